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
//! | `pipelines.rs` | does a stream whose items have locks keep order within keys, and stand still for none? |
//! | `pipelines_at_random.rs` | and whatever the keys, modes, durations, drops and losses are? |
//! | `lead_streams.rs` | does a stream run only while its process leads? |
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
mod lead_streams;
mod moving;
mod nesting;
mod pipelines;
mod pipelines_at_random;
mod spans;
mod streams;
mod waits;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use lockstream::store::MemoryStore;
use lockstream::{LockError, LockRegistry};

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

/// Work that has not been polled since it was told to end runs on, for all that anybody knows.
pub(crate) const GRACE: u64 = 100;

pub(crate) async fn is_free(there: &LockRegistry, key: &str) -> bool {
    there.obtain(key).lease_once().await.unwrap().is_some()
}

pub(crate) fn is_closed<T>(told: Result<T, LockError>) -> bool {
    told.is_err_and(|error| error.is_closed())
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
