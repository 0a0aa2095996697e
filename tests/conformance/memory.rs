//! The memory store, under paused time.

use std::time::Duration;

use futures::future::BoxFuture;
use lockstream::store::MemoryStore;
use lockstream::{LockRegistry, LockRegistryBuilder};

use crate::watch::{Builder, Watch};
use crate::world::{PATIENCE, TTL, World, ms};

#[derive(Debug)]
pub(crate) struct Memory {
    store: MemoryStore,
    watch: Watch,
}

impl Memory {
    fn unwatched(&self) -> LockRegistryBuilder {
        LockRegistry::builder(self.store.clone())
            .ttl(TTL)
            .wait(PATIENCE)
            .response_timeout(PATIENCE)
    }
}

impl World for Memory {
    fn new() -> Self {
        let store = MemoryStore::new();
        let watch = Watch::new();
        Self { store, watch }
    }

    fn is_paused(&self) -> bool {
        true
    }

    fn late(&self) -> Duration {
        ms(100)
    }

    fn watch(&self) -> &Watch {
        &self.watch
    }

    fn builder(&self) -> BoxFuture<'_, Builder> {
        Box::pin(async { self.lazy_builder() })
    }

    fn lazy_builder(&self) -> Builder {
        self.watch.over(self.unwatched())
    }

    fn set_offline(&self, offline: bool) {
        self.store.set_offline(offline);
    }

    fn set_latency(&self, latency: Duration) {
        self.store.set_latency(latency);
    }

    fn expire(&self, key: &str) {
        self.store.expire(key);
    }

    /// On a runtime of its own, and nobody wakes its timers once that is gone. Its clock is the real one, which agrees
    /// with a paused clock only as long as that has not moved on.
    fn crashed_holder(&self, key: &str, ttl: Duration) {
        // Unwatched: a dead process does not tell its end.
        let lock = self.unwatched().build().unwrap().obtain(key).ttl(ttl);
        let dies = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_time()
                .build()
                .unwrap();
            let lease = runtime.block_on(lock.lease()).unwrap();
            std::mem::forget((lease, lock));
        });
        dies.join().unwrap();
    }

    fn dead_waiter(&self, key: &str) {
        self.store.dead_waiter(key, ms(2000));
    }

    fn leftovers(&self) -> Vec<String> {
        vec!["a key".to_owned(); self.store.keys()]
    }

    fn commands(&self) -> u64 {
        0
    }
}
