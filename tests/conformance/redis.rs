//! A server of the case's own, in real time, behind a proxy that breaks the connection.

use std::marker::PhantomData;
use std::time::Duration;

use futures::future::BoxFuture;
use lockstream::LockRegistry;
use lockstream::store::RedisStore;

#[cfg(feature = "cluster")]
pub(crate) use crate::cluster::OnCluster;
pub(crate) use crate::replicas::OnReplicas;
use crate::support::{Program, Proxy, RedisServer, Way, least_rights};
use crate::watch::{Builder, Watch};
use crate::world::{PATIENCE, TTL, World};

/// Which server a world is on.
pub(crate) trait Make: Send + Sync + 'static {
    const PROGRAM: Program;

    /// Whether registries are a user who may do what the documentation says is needed, and nothing else.
    const MEEK: bool = false;
}

macro_rules! makes {
    ($($make:ident, $world:ident: $doc:literal)*) => {$(
        #[derive(Debug)]
        pub(crate) struct $make;

        impl Make for $make {
            const PROGRAM: Program = Program::$make;
        }

        #[doc = $doc]
        pub(crate) type $world = On<$make>;
    )*};
}

makes! {
    Usual, Redis: "On what everything runs on."
    Valkey, OnValkey: "On Valkey 9.1."
    Redis8, OnRedis8: "On Redis 8.2."
    Redis6, OnRedis6: "On Redis 6.2."
}

#[derive(Debug)]
pub(crate) struct Meek;

impl Make for Meek {
    const PROGRAM: Program = Program::Usual;
    const MEEK: bool = true;
}

/// On what everything runs on, with the least rights.
pub(crate) type WithLeastRights = On<Meek>;

#[derive(Debug)]
pub(crate) struct On<M> {
    // Dropped first: what connects through it must not see the server go.
    proxy: Proxy,
    server: RedisServer,
    watch: Watch,
    make: PhantomData<M>,
}

impl<M: Make> On<M> {
    pub(crate) fn server(&self) -> &RedisServer {
        &self.server
    }

    pub(crate) fn server_mut(&mut self) -> &mut RedisServer {
        &mut self.server
    }

    pub(crate) fn proxy(&self) -> &Proxy {
        &self.proxy
    }

    pub(crate) fn url(&self) -> String {
        if M::MEEK {
            self.proxy.url_with("lockstream", "password", 0)
        } else {
            self.proxy.url()
        }
    }

    pub(crate) async fn registries<const N: usize>(&self) -> [LockRegistry; N] {
        let this: &dyn World = self;
        this.registries().await
    }

    pub(crate) fn settle(&self, store: RedisStore) -> Builder {
        let builder = LockRegistry::builder(store)
            .ttl(TTL)
            .wait(PATIENCE)
            .response_timeout(PATIENCE);
        self.watch.over(builder)
    }
}

impl<M: Make> World for On<M> {
    fn new() -> Self {
        let mut server = RedisServer::builder().program(M::PROGRAM);
        if M::MEEK {
            server = server.config(format!("user {}", least_rights().join(" ")));
        }
        let server = server.start();
        let proxy = Proxy::to(&server);
        let watch = Watch::new();
        Self {
            proxy,
            server,
            watch,
            make: PhantomData,
        }
    }

    fn watch(&self) -> &Watch {
        &self.watch
    }

    fn builder(&self) -> BoxFuture<'_, Builder> {
        Box::pin(async { self.settle(RedisStore::connect(self.url()).await.unwrap()) })
    }

    fn lazy_builder(&self) -> Builder {
        self.settle(RedisStore::connect_lazy(self.url()).unwrap())
    }

    fn set_offline(&self, offline: bool) {
        if offline {
            self.proxy.refuse();
            self.proxy.cut();
        } else {
            self.proxy.accept();
        }
    }

    fn set_latency(&self, latency: Duration) {
        self.proxy.delay(Way::Both, latency / 2);
    }

    fn expire(&self, key: &str) {
        self.server.del(&format!("lock:{key}"));
    }

    fn crashed_holder(&self, key: &str, ttl: Duration) {
        let (key, ttl) = (format!("lock:{key}"), ttl.as_millis().to_string());
        self.server.cmd(&["SET", &key, "dead:1", "PX", &ttl]);
    }

    fn dead_waiter(&self, key: &str) {
        let queue = format!("{{lock:{key}}}:~queue2");
        self.server.cmd(&["ZADD", &queue, "1", "dead:1 2000"]);
    }

    fn leftovers(&self) -> Vec<String> {
        let mut keys = self.server.keys("*");
        keys.retain(|key| !key.ends_with(":~fence"));
        keys
    }

    fn commands(&self) -> u64 {
        self.server.all_calls().values().sum()
    }
}
