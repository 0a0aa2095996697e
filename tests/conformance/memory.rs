//! The memory store, under paused time.

use std::time::Duration;

use lockstream::store::MemoryStore;
use lockstream::{LockRegistry, LockRegistryBuilder};

use crate::world::{BOUND, World, ms};

#[derive(Debug)]
pub(crate) struct Memory {
    store: MemoryStore,
}

impl World for Memory {
    const LATE: Duration = ms(100);
    const PAUSED: bool = true;

    fn new() -> Self {
        let store = MemoryStore::new();
        Self { store }
    }

    async fn builder(&self) -> LockRegistryBuilder {
        self.lazy_builder()
    }

    fn lazy_builder(&self) -> LockRegistryBuilder {
        LockRegistry::builder(self.store.clone())
            .ttl(ms(2000))
            .wait(BOUND)
            .response_timeout(BOUND)
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
        let lock = self.lazy_builder().build().obtain(key).ttl(ttl);
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

    fn leftovers(&self) -> Vec<String> {
        vec!["a key".to_owned(); self.store.keys()]
    }

    fn commands(&self) -> u64 {
        0
    }
}
