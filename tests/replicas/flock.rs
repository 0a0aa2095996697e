//! A primary with two replicas.

use std::time::Duration;

use lockstream::store::RedisStore;
use lockstream::{LockError, LockRegistry, LockRegistryBuilder, StoreError};

use crate::support::{RedisServer, wait_until};
use crate::{BOUND, LONG};

#[derive(Debug)]
pub(crate) struct Flock {
    pub(crate) primary: RedisServer,
    pub(crate) replicas: Vec<RedisServer>,
}

impl Flock {
    pub(crate) async fn start() -> Self {
        let primary = RedisServer::builder()
            // The first replica to come would else wait for others.
            .config("repl-diskless-sync-delay 0")
            .config("repl-timeout 600")
            .start();
        let replica = || {
            RedisServer::builder()
                .config(format!("replicaof 127.0.0.1 {}", primary.port()))
                .start()
        };
        let replicas = vec![replica(), replica()];
        let flock = Self { primary, replicas };
        flock.wait_until_whole().await;
        flock
    }

    /// Until both replicas follow. That they are online does not say that they hear anything yet.
    pub(crate) async fn wait_until_whole(&self) {
        wait_until("both replicas follow", BOUND, || {
            self.primary.set("probe", "");
            self.primary.ask::<u64>(&["WAIT", "2", "1000"]) == 2
        })
        .await;
        self.primary.del("probe");
    }

    /// One that counts what so many replicas have within so many milliseconds.
    pub(crate) async fn registry(&self, least: u32, within: Duration) -> LockRegistry {
        registry(&self.primary.url(), least, within).await
    }

    /// The owner that each of the replicas knows.
    pub(crate) fn owners(&self, key: &str) -> Vec<Option<String>> {
        let replicas = self.replicas.iter();
        replicas.map(|it| it.get(&format!("lock:{key}"))).collect()
    }

    /// Until the primary holds up somebody who asks for replicas.
    pub(crate) async fn wait_until_asked(&self) {
        wait_until("the replicas are asked", BOUND, || self.asker().is_some()).await;
    }

    /// The connection that is held up.
    pub(crate) fn asker(&self) -> Option<u64> {
        asker(&self.primary)
    }

    /// The connection that has asked last, or asks.
    pub(crate) fn last_asker(&self) -> u64 {
        let clients = self.primary.clients();
        // The harness's own has done so as well, and lists them now.
        let mut askers = clients.iter().filter(|it| it.last_command() == "wait");
        askers.next().expect("somebody has asked").id()
    }

    pub(crate) async fn wait_until_gone(&self, id: u64) {
        wait_until("a connection is closed", BOUND, || {
            self.primary.clients().iter().all(|it| it.id() != id)
        })
        .await;
    }

    /// How many connections of registries there are.
    pub(crate) fn channels_and_askers(&self) -> usize {
        self.primary.channels().len() + usize::from(self.asker().is_some())
    }

    /// Until nothing is left but the fence.
    pub(crate) async fn wait_until_empty(&self) {
        wait_until("nothing is left", BOUND, || {
            self.primary.keys("*") == ["lock:~fence"]
        })
        .await;
    }
}

/// The connection that a primary holds up since it waits for replicas.
pub(crate) fn asker(primary: &RedisServer) -> Option<u64> {
    let clients = primary.clients();
    let asker = clients
        .iter()
        .find(|it| it.last_command() == "wait" && it.field("flags").contains('b'));
    asker.map(|it| it.id())
}

pub(crate) async fn registry(url: &str, least: u32, within: Duration) -> LockRegistry {
    builder(url, least, within).await.build().unwrap()
}

pub(crate) async fn builder(url: &str, least: u32, within: Duration) -> LockRegistryBuilder {
    let store = RedisStore::builder(url).min_replicas(least, within);
    let store = store.connect().await.unwrap();
    LockRegistry::builder(store)
        .ttl(LONG)
        .wait(LONG)
        .response_timeout(BOUND)
}

/// The store's word in an error.
#[track_caller]
pub(crate) fn told<T>(result: Result<T, LockError>) -> StoreError {
    match result {
        Err(LockError::Store { source, .. }) => source,
        Err(other) => panic!("not the store's: {other:?}"),
        Ok(_) => panic!("it should not have worked"),
    }
}
