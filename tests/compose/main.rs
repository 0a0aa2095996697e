//! Locks inside everything that users build from futures and streams.
//!
//! | file | question it answers |
//! |---|---|
//! | `futures.rs` | does a lock work in `select!`, `join!`, `timeout`, boxed, spawned, borrowed, not `Send`? |
//! | `nesting.rs` | do locks work inside locks? whose error is whose? |
//! | `closing.rs` | does work end before the lock that a shutdown takes from it is another's? |
//! | `draining.rs` | does work end by itself in a registry that takes nobody any more? |
//! | `moving.rs` | is a future woken where it is polled, and not where it was? |
//! | `streams.rs` | does a stream under a lock stay the stream that it was? |
//! | `spans.rs` | what do logs say that are written under a lock? |
//! | `into_lock.rs` | what can be locked? |
//! | `waits.rs` | for how long does one wait, and how many at a time? |
//! | `at_random.rs` | does a lock keep others out, whatever is shared and nested? |
#![cfg(feature = "test-util")]

mod at_random;
mod closing;
mod draining;
mod futures;
#[path = "../support/hearing.rs"]
mod hearing;
mod into_lock;
mod moving;
mod nesting;
mod spans;
mod streams;
mod waits;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use lockstream::LockRegistry;
use lockstream::store::MemoryStore;

pub(crate) const fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// Two processes on one store.
pub(crate) fn two() -> (MemoryStore, LockRegistry, LockRegistry) {
    let store = MemoryStore::new();
    let registry = || LockRegistry::builder(store.clone()).build().unwrap();
    let (here, there) = (registry(), registry());
    (store, here, there)
}

/// Panics if two are inside at once.
#[derive(Clone, Default)]
pub(crate) struct Floor(Arc<AtomicBool>);

impl Floor {
    pub(crate) async fn cross(&self) {
        assert!(!self.0.swap(true, Ordering::SeqCst), "two at once");
        tokio::time::sleep(ms(3)).await;
        self.0.store(false, Ordering::SeqCst);
    }
}
