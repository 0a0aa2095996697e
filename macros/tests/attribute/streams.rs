//! Functions that return streams.

use std::cell::Cell;
use std::pin::Pin;
use std::rc::Rc;

use futures::stream::{BoxStream, FusedStream, LocalBoxStream};
use futures::{Stream, TryStream, TryStreamExt};
use lockstream::{LockError, LockRegistry, with_lock};

use crate::{ShopError, free, held};

/// Yields, `times` times, whether the key is held.
fn looks(
    locks: &LockRegistry,
    key: &'static str,
    times: usize,
) -> impl Stream<Item = Result<bool, ShopError>> + Send + use<> {
    let locks = locks.clone();
    async_stream::try_stream! {
        for _ in 0..times {
            yield held(&locks, key).await;
        }
    }
}

#[with_lock(key = "opaque", registry = locks)]
fn opaque(locks: &LockRegistry, times: usize) -> impl Stream<Item = Result<bool, ShopError>> {
    looks(locks, "opaque", times)
}

#[with_lock(key = "tried", registry = locks)]
fn tried(locks: &LockRegistry) -> impl TryStream<Ok = bool, Error = ShopError> {
    looks(locks, "tried", 2)
}

#[with_lock(key = "fused", registry = locks)]
fn fused(locks: &LockRegistry) -> impl FusedStream<Item = Result<bool, ShopError>> {
    looks(locks, "fused", 2)
}

#[with_lock(key = "pinned", registry = locks)]
fn pinned(locks: LockRegistry) -> Pin<Box<dyn Stream<Item = Result<bool, ShopError>> + Send>> {
    if locks.obtain("x").key() == "x" {
        return Box::pin(looks(&locks, "pinned", 2));
    }
    Box::pin(futures::stream::empty())
}

#[with_lock(key = "boxed:{shown}", registry = locks)]
fn boxed<'a>(locks: &'a LockRegistry, shown: &'a str) -> BoxStream<'a, Result<bool, ShopError>> {
    Box::pin(async_stream::try_stream! {
        for _ in 0..2 {
            yield held(locks, &format!("boxed:{shown}")).await;
        }
    })
}

#[with_lock(key = "local", registry = locks)]
fn local<'a>(
    locks: &'a LockRegistry,
    times: &'a Rc<Cell<u32>>,
) -> LocalBoxStream<'a, Result<bool, ShopError>> {
    let (locks, times) = (locks.clone(), Rc::clone(times));
    Box::pin(async_stream::try_stream! {
        while times.get() > 0 {
            times.set(times.get() - 1);
            yield held(&locks, "local").await;
        }
    })
}

#[with_lock(key = "unpinned", registry = locks)]
fn unpinned(locks: LockRegistry) -> Box<dyn Stream<Item = Result<bool, ShopError>> + Send + Unpin> {
    Box::new(Box::pin(looks(&locks, "unpinned", 2)))
}

async fn all_held<S>(stream: S) -> bool
where
    S: TryStream<Ok = bool, Error = ShopError>,
{
    let seen: Vec<bool> = stream.try_collect().await.unwrap();
    seen == [true, true]
}

/// It takes its arguments, so that it borrows nothing.
#[with_lock(key = "owned:{id}", registry = locks)]
fn owned(
    locks: LockRegistry,
    id: &str,
) -> impl Stream<Item = Result<bool, ShopError>> + Send + use<> {
    looks(&locks, "owned:a", 2)
}

#[tokio::test(start_paused = true)]
async fn each_kind_of_stream() {
    let locks = LockRegistry::in_memory();
    assert!(all_held(opaque(&locks, 2)).await);
    assert!(all_held(tried(&locks)).await);
    assert!(all_held(fused(&locks)).await);
    assert!(all_held(pinned(locks.clone())).await);
    assert!(all_held(boxed(&locks, "a")).await);
    assert!(all_held(local(&locks, &Rc::new(Cell::new(2)))).await);
    let stream = owned(locks.clone(), &String::from("a"));
    assert!(all_held(stream).await);
    assert!(all_held(unpinned(locks.clone())).await);
    for key in [
        "opaque", "tried", "fused", "pinned", "boxed:a", "local", "unpinned",
    ] {
        assert!(!held(&locks, key).await, "{key}");
    }
}

/// The lock is there for the whole stream: between two items, and until it ends.
#[tokio::test(start_paused = true)]
async fn the_lock_is_held_between_the_items() {
    let locks = LockRegistry::in_memory();
    let mut stream = std::pin::pin!(opaque(&locks, 2));
    assert!(!held(&locks, "opaque").await, "before the first poll");
    for _ in 0..2 {
        assert!(stream.try_next().await.unwrap().unwrap());
        assert!(held(&locks, "opaque").await);
    }
    assert!(stream.try_next().await.unwrap().is_none());
    assert!(!held(&locks, "opaque").await);
}

#[tokio::test(start_paused = true)]
async fn a_stream_dropped_half_way_gives_the_lock_back() {
    let locks = LockRegistry::in_memory();
    let mut stream = boxed(&locks, "a");
    assert!(stream.try_next().await.unwrap().unwrap());
    drop(stream);
    free(&locks, "boxed:a").await;
}

/// What the body does before it has its stream is work, too.
#[with_lock(key = "eager", registry = locks, wait = "0s")]
fn eager(locks: LockRegistry, begun: Rc<Cell<bool>>) -> impl Stream<Item = Result<u8, LockError>> {
    begun.set(true);
    drop(locks);
    futures::stream::iter([Ok(1)])
}

#[tokio::test(start_paused = true)]
async fn no_part_of_the_body_runs_without_the_lock() {
    let locks = LockRegistry::in_memory();
    let begun = Rc::new(Cell::new(false));
    let lease = locks.obtain("eager").lease().await.unwrap();
    let busy: Result<Vec<u8>, _> = eager(locks.clone(), begun.clone()).try_collect().await;
    assert!(busy.unwrap_err().is_not_acquired());
    assert!(!begun.get());

    lease.release().await.unwrap();
    let items: Result<Vec<u8>, _> = eager(locks.clone(), begun.clone()).try_collect().await;
    assert_eq!(items.unwrap(), [1]);
    assert!(begun.get());
}

#[with_lock(key = "failing", registry = locks)]
fn failing(locks: &LockRegistry) -> impl Stream<Item = Result<u8, ShopError>> {
    let _ = locks;
    futures::stream::iter([Ok(1), Err(ShopError::SoldOut), Ok(2)])
}

/// An error of the stream's own is an item like any other.
#[tokio::test(start_paused = true)]
async fn an_error_does_not_end_the_stream() {
    let locks = LockRegistry::in_memory();
    let mut stream = std::pin::pin!(failing(&locks));
    assert_eq!(stream.try_next().await.unwrap(), Some(1));
    assert!(stream.try_next().await.is_err());
    assert!(held(&locks, "failing").await);
    assert_eq!(stream.try_next().await.unwrap(), Some(2));
    assert_eq!(stream.try_next().await.unwrap(), None);
}
