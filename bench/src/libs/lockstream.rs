//! This crate, with the settings that it comes with, and without busy polling.

use std::time::Duration;

use lockstream::store::{RedisStore, RedisStoreBuilder};
use lockstream::{Lease, Lock, LockRegistry};

use super::{Library, Outcome, Passes, told};

pub(crate) struct Lockstream {
    registry: LockRegistry,
}

impl Lockstream {
    async fn on(store: RedisStoreBuilder, passes: Passes) -> Outcome<Self> {
        let store = store.connect().await.map_err(told("connect"))?;
        let builder = LockRegistry::builder(store);
        let registry = match passes {
            Passes::Default => builder.build(),
            Passes::None => builder.local_passes(0).build(),
        };
        Ok(Self { registry })
    }
}

impl Library for Lockstream {
    type Lock = Lock;
    type Held = Lease;

    async fn connect(url: &str, passes: Passes) -> Outcome<Self> {
        Self::on(RedisStore::builder(url), passes).await
    }

    fn lock(&self, key: &str) -> Lock {
        self.registry.obtain(key).wait(Duration::MAX)
    }

    async fn acquire(&self, lock: &Lock) -> Outcome<Lease> {
        lock.lease().await.map_err(told("lease"))
    }

    async fn release(&self, held: Lease) -> Outcome<()> {
        held.release().await.map_err(told("release"))
    }
}

/// The same, but its thread sleeps whenever a reply is not here yet.
pub(crate) struct Asleep(Lockstream);

impl Library for Asleep {
    type Lock = Lock;
    type Held = Lease;

    async fn connect(url: &str, passes: Passes) -> Outcome<Self> {
        let store = RedisStore::builder(url).busy_poll(Duration::ZERO);
        Lockstream::on(store, passes).await.map(Self)
    }

    fn lock(&self, key: &str) -> Lock {
        self.0.lock(key)
    }

    async fn acquire(&self, lock: &Lock) -> Outcome<Lease> {
        self.0.acquire(lock).await
    }

    async fn release(&self, held: Lease) -> Outcome<()> {
        self.0.release(held).await
    }
}
