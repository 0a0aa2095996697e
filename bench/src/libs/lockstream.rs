//! This crate, with the settings that it comes with.

use std::time::Duration;

use lockstream::store::{MemoryStore, PostgresStore, RedisStore};
use lockstream::{Lease, Lock, LockRegistry, Renewal};

use super::{Library, MEMORY, Outcome, Passes, TTL, told};

pub(crate) struct Lockstream {
    registry: LockRegistry,
    ttl: Duration,
}

impl Library for Lockstream {
    type Lock = Lock;
    type Held = Lease;

    async fn connect(url: &str, passes: Passes, _: usize) -> Outcome<Self> {
        let builder = if url == MEMORY {
            LockRegistry::builder(MemoryStore::new())
        } else if url.starts_with("postgres:") {
            let store = PostgresStore::connect(url).await;
            LockRegistry::builder(store.map_err(told("connect"))?)
        } else {
            let store = RedisStore::connect(url).await;
            LockRegistry::builder(store.map_err(told("connect"))?)
        };
        let builder = match passes {
            Passes::Default => builder,
            Passes::None => builder.local_passes(0),
        };
        let registry = builder.build().map_err(told("build"))?;
        let ttl = TTL;
        Ok(Self { registry, ttl })
    }

    fn lasting(self, ttl: Duration) -> Self {
        Self { ttl, ..self }
    }

    fn is_lost(held: &Lease) -> bool {
        !held.is_valid()
    }

    fn lock(&self, key: &str) -> Lock {
        let lock = self.registry.obtain(key).wait(Duration::MAX);
        match self.ttl {
            TTL => lock,
            // Renewed, as it comes.
            ttl => lock.ttl(ttl).renewal(Renewal::watchdog()),
        }
    }

    fn permit(&self, key: &str, limit: u32) -> Lock {
        self.lock(key).permits(limit)
    }

    fn reader(&self, key: &str) -> Lock {
        self.lock(key).shared()
    }

    fn all(&self, keys: &[String]) -> Lock {
        self.registry.obtain_all(keys).wait(Duration::MAX)
    }

    async fn acquire(&self, lock: &Lock) -> Outcome<Lease> {
        lock.lease().await.map_err(told("lease"))
    }

    async fn release(&self, held: Lease) -> Outcome<()> {
        held.release().await.map_err(told("release"))
    }
}
