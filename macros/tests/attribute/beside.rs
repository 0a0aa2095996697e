//! Other attributes on the same function, and the lints that stay at work.

use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use futures::Stream;
use lockstream::{LockError, LockRegistry, with_lock};

use crate::{ShopError, held};

#[async_trait]
trait Seller: Send + Sync {
    async fn sell(&self, id: u32) -> Result<bool, ShopError>;
    async fn parse(&mut self, text: &str, count: u32) -> Result<u32, anyhow::Error>;

    #[with_lock(key = "provided", registry = self.locks())]
    async fn provided(&self) -> Result<bool, LockError> {
        Ok(held(self.locks(), "provided").await)
    }

    fn locks(&self) -> &LockRegistry;
}

struct Shop {
    locks: LockRegistry,
    parsed: u32,
}

#[async_trait]
impl Seller for Shop {
    #[with_lock(key = "seller:{id}", registry = self.locks)]
    async fn sell(&self, id: u32) -> Result<bool, ShopError> {
        Ok(held(&self.locks, &format!("seller:{id}")).await)
    }

    #[with_lock(key = "parse:{text}", registry = self.locks)]
    async fn parse(&mut self, text: &str, mut count: u32) -> Result<u32, anyhow::Error> {
        count += text.parse::<u32>()?;
        assert!(held(&self.locks, &format!("parse:{text}")).await);
        self.parsed += count;
        Ok(self.parsed)
    }

    fn locks(&self) -> &LockRegistry {
        &self.locks
    }
}

#[tokio::test(start_paused = true)]
async fn async_trait_on_the_impl() {
    let locks = LockRegistry::in_memory();
    let mut shop: Box<dyn Seller> = Box::new(Shop {
        locks: locks.clone(),
        parsed: 0,
    });
    assert!(shop.sell(7).await.unwrap());
    assert!(shop.provided().await.unwrap());
    assert_eq!(shop.parse("4", 1).await.unwrap(), 5);
    assert!(shop.parse("x", 1).await.is_err());
    for key in ["seller:7", "provided", "parse:4", "parse:x"] {
        assert!(!held(&locks, key).await, "{key}");
    }
}

#[tracing::instrument(skip(locks))]
#[with_lock(key = "above:{id}", registry = locks)]
async fn instrumented_above(locks: &LockRegistry, id: u32) -> Result<bool, ShopError> {
    tracing::info!("selling");
    Ok(held(locks, &format!("above:{id}")).await)
}

#[with_lock(key = "below:{id}", registry = locks)]
#[tracing::instrument(skip(locks), err)]
async fn instrumented_below(locks: &LockRegistry, id: u32) -> Result<bool, ShopError> {
    tracing::info!("selling");
    Ok(held(locks, &format!("below:{id}")).await)
}

/// Notes the spans that are made, by name and value of their field `id`.
#[derive(Clone, Default)]
struct Spans(Arc<Mutex<Vec<(&'static str, String)>>>);

impl tracing::Subscriber for Spans {
    fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, span: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        struct Fields(String);

        impl tracing::field::Visit for Fields {
            fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
                if field.name() == "id" {
                    self.0 = format!("{value:?}");
                }
            }
        }

        let mut fields = Fields(String::new());
        span.record(&mut fields);
        let mut spans = self.0.lock().unwrap();
        spans.push((span.metadata().name(), fields.0));
        tracing::span::Id::from_u64(spans.len() as u64)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn event(&self, _: &tracing::Event<'_>) {}
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

#[tokio::test(start_paused = true)]
async fn instrument_on_either_side() {
    let spans = Spans::default();
    let _guard = tracing::subscriber::set_default(spans.clone());
    let locks = LockRegistry::in_memory();
    assert!(instrumented_above(&locks, 1).await.unwrap());
    assert!(instrumented_below(&locks, 2).await.unwrap());
    let spans = spans.0.lock().unwrap();
    for span in [("instrumented_above", "1"), ("instrumented_below", "2")] {
        let span = (span.0, span.1.to_owned());
        assert!(spans.contains(&span), "{span:?} in {spans:?}");
    }
}

/// Attributes of the function, outer and inner ones, and its docs stay where they are.
#[with_lock(key = "main", registry = locks)]
#[must_use]
#[inline(never)]
#[cfg(test)]
async fn attributes(#[allow(unused_variables)] locks: &LockRegistry) -> Result<u32, LockError> {
    #![allow(unused_assignments)]
    let mut last = 0;
    last = 1;
    Ok(last)
}

#[tokio::test(start_paused = true)]
async fn attributes_stay() {
    assert_eq!(attributes(&LockRegistry::in_memory()).await.unwrap(), 1);
}

/// Lints see the body and the arguments as they would without the attribute: each of these is
/// expected, and an expectation that nothing meets is a warning.
#[expect(unused_variables)]
#[with_lock(key = "lints", registry = locks)]
async fn unused_argument(locks: LockRegistry, unused: u32) -> Result<(), LockError> {
    drop(locks);
    Ok(())
}

#[expect(unused_mut)]
#[with_lock(key = "lints", registry = locks)]
async fn unused_mutability(locks: LockRegistry, mut fixed: u32) -> Result<u32, LockError> {
    drop(locks);
    Ok(fixed)
}

#[expect(unreachable_code)]
#[with_lock(key = "lints", registry = locks)]
async fn unreachable(locks: LockRegistry) -> Result<u32, LockError> {
    drop(locks);
    return Ok(1);
    Ok(2)
}

#[expect(unused_must_use)]
#[tokio::test(start_paused = true)]
async fn a_result_must_be_used() {
    let locks = LockRegistry::in_memory();
    unused_argument(locks.clone(), 1).await;
    assert_eq!(unused_mutability(locks.clone(), 7).await.unwrap(), 7);
    assert_eq!(unreachable(locks).await.unwrap(), 1);
}

/// A stream that is not used is warned of, as without the lock.
#[with_lock(key = "lints", registry = locks)]
fn unused_stream(locks: LockRegistry) -> impl Stream<Item = Result<(), LockError>> {
    drop(locks);
    futures::stream::empty()
}

#[expect(unused_must_use)]
#[test]
fn a_stream_must_be_used() {
    unused_stream(LockRegistry::in_memory());
}
