//! A server of the case's own with a replica that must have what is acquired.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures::future::BoxFuture;
use lockstream::store::{RedisStore, RedisStoreBuilder};

use crate::redis::Redis;
use crate::support::{RedisServer, wait_until_blocking};
use crate::watch::{Builder, Watch};
use crate::world::{EVENTUALLY, World, ms};

#[derive(Debug)]
pub(crate) struct OnReplicas {
    inner: Redis,
    _replica: RedisServer,
    /// How long a replica may take, in milliseconds.
    within: AtomicU64,
}

impl OnReplicas {
    fn store(&self) -> RedisStoreBuilder {
        let within = ms(self.within.load(Ordering::Relaxed));
        RedisStore::builder(self.inner.url()).min_replicas(1, within)
    }
}

impl World for OnReplicas {
    fn new() -> Self {
        let inner = Redis::new();
        let primary = inner.server();
        primary.cmd(&["CONFIG", "SET", "repl-diskless-sync-delay", "0"]);
        let replica = RedisServer::builder()
            .config(format!("replicaof 127.0.0.1 {}", primary.port()))
            .start();
        wait_until_blocking("the replica follows", EVENTUALLY, || {
            primary.set("probe", "");
            primary.ask::<u64>(&["WAIT", "1", "1000"]) == 1
        });
        primary.del("probe");
        primary.reset_stats();
        Self {
            inner,
            _replica: replica,
            within: AtomicU64::new(1_200),
        }
    }

    /// Another server has to come to its turn for each lock.
    fn late(&self) -> Duration {
        ms(2_500)
    }

    fn brief(&self) -> Duration {
        ms(1_440)
    }

    fn leases_last(&self, shortest: Duration) {
        // Less than a lease lasts, and else so long that the replica comes to its turn on a busy machine as well.
        let within = shortest * 5 / 6;
        self.within
            .store(within.as_millis() as u64, Ordering::Relaxed);
    }

    fn watch(&self) -> &Watch {
        self.inner.watch()
    }

    fn builder(&self) -> BoxFuture<'_, Builder> {
        Box::pin(async { self.inner.settle(self.store().connect().await.unwrap()) })
    }

    fn lazy_builder(&self) -> Builder {
        self.inner.settle(self.store().connect_lazy().unwrap())
    }

    fn set_offline(&self, offline: bool) {
        self.inner.set_offline(offline);
    }

    fn set_latency(&self, latency: Duration) {
        self.inner.set_latency(latency);
    }

    fn expire(&self, key: &str) {
        self.inner.expire(key);
    }

    fn crashed_holder(&self, key: &str, ttl: Duration) {
        self.inner.crashed_holder(key, ttl);
    }

    fn dead_waiter(&self, key: &str) {
        self.inner.dead_waiter(key);
    }

    fn leftovers(&self) -> Vec<String> {
        self.inner.leftovers()
    }

    fn commands(&self) -> u64 {
        self.inner.commands()
    }
}
