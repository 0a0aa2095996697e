//! A cluster of the case's own: three primaries, in real time, each behind a proxy that breaks the connection.

use std::time::Duration;

use futures::future::BoxFuture;
use lockstream::LockRegistry;
use lockstream::store::RedisStore;

use crate::support::{Cluster, Way};
use crate::watch::{Builder, Watch};
use crate::world::{PATIENCE, TTL, World};

#[derive(Debug)]
pub(crate) struct OnCluster {
    cluster: Cluster,
    watch: Watch,
}

impl OnCluster {
    fn settle(&self, store: RedisStore) -> Builder {
        let builder = LockRegistry::builder(store)
            .ttl(TTL)
            .wait(PATIENCE)
            .response_timeout(PATIENCE);
        self.watch.over(builder)
    }
}

impl World for OnCluster {
    fn new() -> Self {
        Self {
            cluster: Cluster::behind_proxies(),
            watch: Watch::new(),
        }
    }

    fn watch(&self) -> &Watch {
        &self.watch
    }

    fn builder(&self) -> BoxFuture<'_, Builder> {
        Box::pin(async { self.settle(RedisStore::connect(self.cluster.url()).await.unwrap()) })
    }

    /// Its lines to all primaries: what is still asked on one of them would be counted as what a case sends.
    fn registry(&self) -> BoxFuture<'_, LockRegistry> {
        Box::pin(async {
            let registry = self.builder().await.build().unwrap();
            for home in 0..3 {
                let mut keys = (0..).map(|number| format!("anything {number}"));
                let key = keys.find(|key| self.cluster.home(&format!("lock:{key}")) == home);
                let lock = registry.obtain(key.expect("names lie everywhere"));
                lock.inspect().await.unwrap();
            }
            registry
        })
    }

    fn lazy_builder(&self) -> Builder {
        self.settle(RedisStore::connect_lazy(self.cluster.url()).unwrap())
    }

    fn set_offline(&self, offline: bool) {
        for proxy in self.cluster.proxies() {
            if offline {
                proxy.refuse();
                proxy.cut();
            } else {
                proxy.accept();
            }
        }
    }

    fn set_latency(&self, latency: Duration) {
        for proxy in self.cluster.proxies() {
            proxy.delay(Way::Both, latency / 2);
        }
    }

    fn expire(&self, key: &str) {
        let key = format!("lock:{key}");
        self.cluster.cmd(&key, &["DEL", &key]);
    }

    fn crashed_holder(&self, key: &str, ttl: Duration) {
        let (key, ttl) = (format!("lock:{key}"), ttl.as_millis().to_string());
        self.cluster.cmd(&key, &["SET", &key, "dead:1", "PX", &ttl]);
    }

    fn dead_waiter(&self, key: &str) {
        let (key, queue) = (format!("lock:{key}"), format!("{{lock:{key}}}:~queue2"));
        self.cluster
            .cmd(&key, &["ZADD", &queue, "1", "dead:1 2000"]);
    }

    /// Subscriptions, too.
    fn leftovers(&self) -> Vec<String> {
        let mut left = self.cluster.leftovers();
        left.extend(self.cluster.channels());
        left
    }

    fn commands(&self) -> u64 {
        let servers = self.cluster.primaries().iter();
        servers
            .map(|server| server.all_calls().values().sum::<u64>())
            .sum()
    }
}
