//! The memory store, under paused time.

use std::time::Duration;

use futures::future::BoxFuture;
use lockstream::LockRegistry;
use lockstream::store::MemoryStore;

use crate::watch::{Builder, Watch};
use crate::world::{PATIENCE, TTL, World, ms};

#[derive(Debug)]
pub(crate) struct Memory {
    store: MemoryStore,
    watch: Watch,
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
        let builder = LockRegistry::builder(self.store.clone());
        let builder = builder.ttl(TTL).wait(PATIENCE);
        self.watch.over(builder.response_timeout(PATIENCE))
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

    fn crashed_holder(&self, key: &str, ttl: Duration) {
        self.store.dead_holder(key, ttl);
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
