use std::sync::Arc;
#[cfg(feature = "test-util")]
use std::sync::Weak;
#[cfg(feature = "test-util")]
use std::time::Duration;

#[cfg(feature = "test-util")]
use super::keyspace::Asking;
use super::session::MemorySession;
#[cfg(feature = "test-util")]
use super::session::offline_error;
use super::shared::Shared;
#[cfg(feature = "test-util")]
use crate::base::StoreError;
#[cfg(feature = "test-util")]
use crate::store::contract::{Op, Owner, StoreEvent};
use crate::store::contract::{Session, SessionConfig};
use crate::store::{LockStore, sealed};

/// Leases in this process, on tokio's clock.
///
/// It does what the Redis store does, with queue, grants and ttl. So several registries on clones of one `MemoryStore`
/// behave like several processes on one server. With tokio's clock paused, a test of hours ends at once.
///
/// # Examples
///
/// ```
/// use lockstream::{LockRegistry, store::MemoryStore};
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let store = MemoryStore::new();
/// let here = LockRegistry::builder(store.clone()).build()?;
/// let there = LockRegistry::builder(store).build()?;
///
/// let lock = here.obtain("till");
/// assert!(lock.acquire_once().await?);
/// assert!(!there.obtain("till").acquire_once().await?);
/// lock.release().await?;
/// # Ok(()) }
/// ```
#[derive(Clone, Debug, Default)]
pub struct MemoryStore {
    pub(super) shared: Arc<Shared>,
}

impl MemoryStore {
    /// An empty store. Needs no runtime.
    pub fn new() -> Self {
        Self::default()
    }

    /// Expires the lease on `key` now, as if its ttl were over. The holder is not told; it learns of it from its own
    /// clock or from the store.
    #[cfg(feature = "test-util")]
    pub fn expire(&self, key: impl AsRef<str>) {
        self.shared.lock().keyspace.expire(key.as_ref());
    }

    /// Makes the store unreachable for all registries on it, or reachable again. Its data stays, and expires in time.
    #[cfg(feature = "test-util")]
    pub fn set_offline(&self, offline: bool) {
        let listeners: Vec<_> = {
            let mut state = self.shared.lock();
            if state.offline == offline {
                return;
            }
            state.offline = offline;
            state.listeners.values().filter_map(Weak::upgrade).collect()
        };
        for listener in listeners {
            listener.on_event(if offline {
                StoreEvent::down(offline_error())
            } else {
                StoreEvent::up(true)
            });
        }
    }

    /// Makes every operation take this long; half of it is the way to the store. Needs a runtime.
    #[cfg(feature = "test-util")]
    pub fn set_latency(&self, latency: Duration) {
        self.shared.lock().latency = latency;
    }

    /// A registry of the usual prefix has queued for a key that is held, and is gone without a word.
    #[cfg(feature = "test-util")]
    #[doc(hidden)]
    pub fn dead_waiter(&self, key: &str, ttl: Duration) {
        let (owner, score) = (Owner::exclusive(1), None);
        self.dead_has_asked(key, &Op::Enter { owner, ttl, score });
    }

    /// A registry of the usual prefix has taken a key that is free, and is gone without a word.
    #[cfg(feature = "test-util")]
    #[doc(hidden)]
    pub fn dead_holder(&self, key: &str, ttl: Duration) {
        let owner = Owner::exclusive(2);
        self.dead_has_asked(key, &Op::Attempt { owner, ttl });
    }

    #[cfg(feature = "test-util")]
    fn dead_has_asked(&self, key: &str, op: &Op) {
        let asking = Asking {
            prefix: &"lock".into(),
            instance: &"dead".into(),
            key: &key.into(),
            now: self.shared.now(),
        };
        let mut state = self.shared.lock();
        drop(state.keyspace.apply(asking, op, &|_| true));
    }

    /// Deletes all data, fences too, as a server that restarts without its data: the connection of every registry
    /// breaks and is made again.
    #[cfg(feature = "test-util")]
    pub fn forget(&self) {
        let (listeners, offline): (Vec<_>, _) = {
            let now = self.shared.now();
            let mut state = self.shared.lock();
            state.keyspace.forget(now);
            let listeners = state.listeners.values().filter_map(Weak::upgrade);
            (listeners.collect(), state.offline)
        };
        if !offline {
            for listener in listeners {
                listener.on_event(StoreEvent::down(StoreError::new(
                    "the memory store was restarted",
                )));
                listener.on_event(StoreEvent::up(true));
            }
        }
    }

    /// How many keys the store has: locks that are held or have not expired, and queues.
    #[cfg(feature = "test-util")]
    #[doc(hidden)]
    pub fn keys(&self) -> usize {
        let now = self.shared.now();
        self.shared.lock().keyspace.len(now)
    }
}

impl sealed::Sealed for MemoryStore {}

impl LockStore for MemoryStore {
    fn open(&self, config: SessionConfig) -> Arc<dyn Session> {
        let instance = config.instance.clone();
        let listener = config.listener.clone();
        self.shared.lock().listeners.insert(instance, listener);
        Arc::new(MemorySession::new(self.shared.clone(), config))
    }

    fn place(&self) -> Option<String> {
        Some(format!("a memory store and its clone ({:p})", self.shared))
    }
}
