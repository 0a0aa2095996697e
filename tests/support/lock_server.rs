//! What tests of every kind of server ask of one.

#![allow(dead_code, reason = "each test uses another part of this")]

use std::time::Duration;

use lockstream::store::RedisStore;
use lockstream::{LockRegistry, LockRegistryBuilder};

#[cfg(feature = "postgres")]
use crate::support::PgServer;
use crate::support::{PATIENCE, RedisServer, wait_until};

/// For what takes some round trips or a reconnect.
pub(crate) const BOUND: Duration = Duration::from_secs(5);

/// For the start of a process and what it does first, such as to wait in a queue: many may start beside it.
pub(crate) const START: Duration = PATIENCE;

/// A server that keeps locks.
pub(crate) trait LockServer: Sized {
    /// After so long a waiter finds a grant by itself whose notice was lost with the process that released.
    const LOST_NOTICE: Duration;

    fn start() -> Self;

    fn url(&self) -> String;

    /// What is left of locks, queues and leases.
    fn leftovers(&self) -> Vec<String>;

    /// How many connections of registries it has.
    fn connections(&self) -> usize;

    /// Until what it returns is dropped, no registry sweeps away what the dead have left.
    fn keep_dead(&self) -> Box<dyn Send>;

    /// How many registries are in the queue of `k`.
    fn queue(&self) -> u64;

    /// Whether somebody has `k`: `shared` tells who counts.
    fn is_held(&self, shared: bool) -> bool;
}

/// A registry to be, on the server of that url. Answers may take long, since the machine may be busy.
pub(crate) async fn registry_builder(url: &str) -> LockRegistryBuilder {
    let patience = Duration::from_secs(10);
    #[cfg(feature = "postgres")]
    if url.starts_with("postgres:") {
        // The first connection makes the schema.
        let store = lockstream::store::PostgresStore::builder(url).connect_timeout(PATIENCE);
        let store = store.connect().await.unwrap();
        return LockRegistry::builder(store).response_timeout(patience);
    }
    let store = RedisStore::builder(url).connect_timeout(PATIENCE);
    let store = store.connect().await.unwrap();
    LockRegistry::builder(store).response_timeout(patience)
}

/// Waits until so many registries are in the queue of `k`.
pub(crate) async fn wait_for_queue(server: &impl LockServer, tickets: u64) {
    wait_until(format!("{tickets} in the queue"), START, || {
        server.queue() == tickets
    })
    .await;
}

/// Nothing is left of any lease and of any wait: neither in the registries nor on the server.
#[cfg(feature = "test-util")]
pub(crate) async fn nothing_left(server: &impl LockServer, registries: &[&LockRegistry]) {
    wait_until("nothing is in use", BOUND, || {
        registries.iter().all(|registry| registry.in_use() == 0)
    })
    .await;
    assert_eq!(server.leftovers(), [""; 0]);
}

impl LockServer for RedisServer {
    /// The script that releases sends it.
    const LOST_NOTICE: Duration = Duration::ZERO;

    fn start() -> Self {
        Self::start()
    }

    fn url(&self) -> String {
        self.url()
    }

    /// All but the fence, of which there is one for all keys.
    fn leftovers(&self) -> Vec<String> {
        let mut keys = self.keys("*");
        keys.retain(|key| key != "lock:~fence");
        keys
    }

    fn connections(&self) -> usize {
        self.clients().len()
    }

    /// There are no sweeps.
    fn keep_dead(&self) -> Box<dyn Send> {
        Box::new(())
    }

    fn queue(&self) -> u64 {
        self.ask(&["ZCARD", "{lock:k}:~queue2"])
    }

    fn is_held(&self, shared: bool) -> bool {
        let kind: String = self.ask(&["TYPE", "lock:k"]);
        kind == if shared { "zset" } else { "string" }
    }
}

/// The advisory lock that a sweep takes: the number in `sweep_1` of the schema.
#[cfg(feature = "postgres")]
const SWEEP: i64 = 6_012_214_763_185_742;

#[cfg(feature = "postgres")]
impl LockServer for PgServer {
    /// It is sent when the release is committed. A waiter asks every 10 s, and a fifth more at most (W2).
    const LOST_NOTICE: Duration = Duration::from_secs(12);

    fn start() -> Self {
        Self::start()
    }

    fn url(&self) -> String {
        self.url()
    }

    /// Rows of free locks stay.
    fn leftovers(&self) -> Vec<String> {
        let rows = self.rows(
            "SELECT key || ' of ' || owner FROM lockstream.lock WHERE owner IS NOT NULL \
             UNION ALL SELECT key || ' of ' || owner FROM lockstream.holder \
             UNION ALL SELECT key || ': ' || owner FROM lockstream.ticket",
        );
        rows.iter().map(|row| row.get(0)).collect()
    }

    fn connections(&self) -> usize {
        let count: i64 = self.one(
            "SELECT count(*) FROM pg_stat_activity \
             WHERE backend_type = 'client backend' AND application_name <> 'harness'",
        );
        usize::try_from(count).expect("it counts")
    }

    /// It holds the lock of a sweep: each that comes meanwhile has nothing to do.
    fn keep_dead(&self) -> Box<dyn Send> {
        let mut client = self.client();
        client.run(&format!("SELECT pg_advisory_lock({SWEEP})"));
        Box::new(client)
    }

    fn queue(&self) -> u64 {
        let count: i64 = self
            .one("SELECT count(*) FROM lockstream.ticket WHERE key = 'lock:k' AND ttl IS NOT NULL");
        u64::try_from(count).expect("it counts")
    }

    fn is_held(&self, shared: bool) -> bool {
        let condition = if shared { "owner = ''" } else { "owner <> ''" };
        self.one(&format!(
            "SELECT EXISTS (SELECT 1 FROM lockstream.lock WHERE key = 'lock:k' AND {condition})"
        ))
    }
}

/// Runs each of these cases, which take the kind of server, on each kind: in real time, and so on a steady machine.
#[macro_export]
macro_rules! on_each_server {
    ($(#[$test:meta] { $($case:ident,)* })*) => {
        mod on_redis {
            $($(
                #[$test]
                async fn $case() {
                    $crate::support::on_a_steady_machine(super::$case::<$crate::support::RedisServer>).await;
                }
            )*)*
        }
        #[cfg(feature = "postgres")]
        mod on_postgres {
            $($(
                #[$test]
                async fn $case() {
                    $crate::support::on_a_steady_machine(super::$case::<$crate::support::PgServer>).await;
                }
            )*)*
        }
    };
}
