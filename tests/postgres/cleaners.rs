//! What if somebody empties or drops our tables, as cleaners of tests do?

use std::time::Duration;

use futures::StreamExt;
use lockstream::store::PostgresStore;
use lockstream::{LockError, LockRegistry, Renewal};

use crate::faults::Pair;
use crate::support::{PgServer, on_a_steady_machine};
use crate::{BOUND, PATIENCE, builder, eventually, ms, patient, registry, told};

/// The table `sweep` comes first, as in a sweep: so TRUNCATE and a sweep never wait for each other.
const TABLES: [&str; 8] = [
    "sweep", "lock", "holder", "guard", "ticket", "state", "alive", "notice",
];

/// A cleaner that goes through the catalogue.
fn empty_all(server: &PgServer) {
    let tables = TABLES.map(|table| format!("lockstream.{table}"));
    server.run(&format!("TRUNCATE {}", tables.join(", ")));
}

/// Nothing of ours goes on in the server.
async fn is_at_rest(server: &PgServer) {
    let active = "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'lockstream%' AND state <> 'idle'";
    eventually("nothing runs", async || server.one::<i64>(active) == 0).await;
}

#[tokio::test]
async fn all_tables_are_emptied_while_a_lock_is_held_and_waited_for() {
    let server = PgServer::start();
    let pair = Pair::new(&server.url()).await;
    let token = pair.lease.token();
    empty_all(&server);
    let lost = pair.lease.lost().await;
    assert!(matches!(lost, LockError::Lost { .. }), "{lost:?}");
    let next = pair.waiting.await.unwrap().unwrap();
    assert!(next.token() > token, "tokens grow");
    next.release().await.unwrap();
    // Whoever comes now finds it in order.
    let locks = registry(&server.url()).await;
    drop(locks.obtain("new").lease().await.unwrap());
    for table in ["state", "alive"] {
        let rows = server.one::<i64>(&format!("SELECT count(*) FROM lockstream.{table}"));
        assert_eq!(rows, 1, "{table}");
    }
    drop(locks);
    is_at_rest(&server).await;
}

/// And nobody was connected meanwhile.
#[tokio::test]
async fn all_tables_are_emptied_between_two_tests() {
    let server = PgServer::start();
    for _ in 0..3 {
        let locks = registry(&server.url()).await;
        let lease = locks.obtain("k").lease().await.unwrap();
        let permit = locks.obtain("p").permits(2).lease().await.unwrap();
        lease.release().await.unwrap();
        permit.release().await.unwrap();
        locks.shutdown().await;
        empty_all(&server);
    }
    is_at_rest(&server).await;
}

/// Each table by itself: what is lost is told, what is not goes on, and whoever waits is served.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_single_table_is_emptied_while_locks_are_held_and_waited_for() {
    on_a_steady_machine(async || {
        let server = PgServer::start();
        let empty = async |table: &str| {
            let schema = format!("of_{table}");
            let registry = async || -> LockRegistry {
                let store = patient(server.url()).schema(&schema);
                builder(store.connect().await.unwrap()).build().unwrap()
            };
            let (one, other) = (registry().await, registry().await);
            // A waiter that lost its place asks again when it may be over.
            let ttl = Duration::from_secs(10);
            let modes = [
                |locks: &LockRegistry| locks.obtain("k"),
                |locks: &LockRegistry| locks.obtain("p").permits(1),
                |locks: &LockRegistry| locks.obtain("r").shared(),
            ];
            let mut held = Vec::new();
            for mode in modes {
                let lock = mode(&one).ttl(ttl).renewal(Renewal::watchdog());
                let lease = lock.lease().await.unwrap();
                // A reader that would fit does not wait.
                let lock = match lease.key() {
                    "r" => other.obtain("r"),
                    _ => mode(&other),
                };
                let waiting = tokio::spawn(async move { lock.lease_within(PATIENCE).await });
                held.push((lease, waiting));
            }
            let waiting = format!("SELECT count(*) FROM {schema}.ticket");
            eventually("they wait", async || server.one::<i64>(&waiting) == 3).await;
            server.run(&format!("TRUNCATE {schema}.{table}"));
            for (lease, waiting) in held {
                let (key, token) = (lease.key().to_owned(), lease.token());
                let is_lost = match table {
                    "lock" => key == "k",
                    "holder" => key != "k",
                    _ => false,
                };
                let released = lease.release().await;
                assert_eq!(released.is_err(), is_lost, "{table} {key}: {released:?}");
                let next = waiting.await.unwrap();
                let next = next.unwrap_or_else(|error| panic!("{table} {key}: {error:?}"));
                assert!(next.token() > token, "{table} {key}");
                let fence = format!("SELECT {schema}.fence('{key}', {})", next.token().get());
                if table != "guard" {
                    server.run(&fence);
                }
                next.release().await.unwrap();
            }
            // From the next tenure on a lock whose guard was deleted can be fenced again.
            let next = one.obtain("k").lease().await.unwrap();
            server.run(&format!(
                "SELECT {schema}.fence('k', {})",
                next.token().get()
            ));
            next.release().await.unwrap();
            one.shutdown().await;
            other.shutdown().await;
        };
        // The first calls of a session plan all functions. If all did so at once, a busy machine would let a call wait for
        // longer than for an answer.
        let emptied = futures::stream::iter(TABLES.map(empty));
        emptied.buffer_unordered(2).collect::<()>().await;
        is_at_rest(&server).await;
    })
    .await;
}

/// Whoever holds a shared lease keeps it, though the row of its lock is gone.
#[tokio::test]
async fn a_reader_keeps_a_writer_out_though_the_table_of_locks_was_emptied() {
    let server = PgServer::start();
    let (one, other) = (registry(&server.url()).await, registry(&server.url()).await);
    let reader = one.obtain("k").shared().ttl(BOUND).lease().await.unwrap();
    server.run("TRUNCATE lockstream.lock");
    assert!(!other.obtain("k").acquire_once().await.unwrap());
    reader.extend(BOUND).await.unwrap();
    reader.release().await.unwrap();
    drop(other.obtain("k").lease().await.unwrap());
}

/// The quiet time is a setting, and so no loss of rows is a loss of it.
#[tokio::test]
async fn the_quiet_time_outlives_its_row() {
    let server = PgServer::start();
    let store = || patient(server.url()).quiet_time(Duration::from_secs(3600));
    let quiet = || server.one::<i64>("SELECT quiet FROM lockstream.state");
    let locks = builder(store().connect().await.unwrap()).build().unwrap();
    server.run("UPDATE lockstream.alive SET since = 0");
    drop(locks.obtain("k").lease().await.unwrap());
    empty_all(&server);
    assert!(
        !locks.obtain("k").acquire_once().await.unwrap(),
        "it may be held"
    );
    assert_eq!(quiet(), 3_600_000_000);
    server.run("UPDATE lockstream.alive SET since = 0; TRUNCATE lockstream.state");
    assert!(
        !locks.obtain("k").acquire_once().await.unwrap(),
        "it may be held"
    );
    assert_eq!(quiet(), 3_600_000_000);
    // It can be set anew.
    empty_all(&server);
    store().quiet_time(ms(0)).connect().await.unwrap();
    assert_eq!(quiet(), 0);
    assert!(locks.obtain("k").acquire_once().await.unwrap());
}

#[tokio::test]
async fn the_schema_is_dropped_while_a_lock_is_held_and_waited_for() {
    let server = PgServer::start();
    let pair = Pair::new(&server.url()).await;
    let token = pair.lease.token();
    let inspecting = registry(&server.url()).await;
    server.run("DROP SCHEMA lockstream CASCADE");
    let lost = pair.lease.lost().await;
    assert!(matches!(lost, LockError::Lost { .. }), "{lost:?}");
    let next = pair.waiting.await.unwrap().unwrap();
    assert!(next.token() > token, "tokens grow");
    next.release().await.unwrap();
    eventually("who only looks comes back, too", async || {
        inspecting.obtain("k").inspect().await.is_ok()
    })
    .await;
    is_at_rest(&server).await;
}

/// A role that may not make it again is told what is missing.
#[tokio::test]
async fn the_schema_is_dropped_under_a_role_that_may_not_make_it() {
    let server = PgServer::start();
    drop(registry(&server.url()).await);
    server.run(
        "CREATE ROLE app LOGIN; GRANT USAGE ON SCHEMA lockstream TO app; \
         GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA lockstream TO app",
    );
    let pair = Pair::lasting(&PgServer::url_of("app", server.port()), ms(4000)).await;
    server.run("DROP SCHEMA lockstream CASCADE");
    let error = pair.waiting.await.unwrap().unwrap_err();
    assert!(
        told(&error).contains("PostgresStore::migrate") && !error.is_retryable(),
        "{error:?}"
    );
    let lost = pair.lease.lost().await;
    assert!(matches!(lost, LockError::Lost { .. }), "{lost:?}");
}

#[tokio::test]
async fn a_table_that_is_gone_is_named() {
    for table in TABLES {
        let server = PgServer::start();
        let locks = registry(&server.url()).await;
        drop(locks.obtain("k").lease().await.unwrap());
        server.run(&format!("DROP TABLE lockstream.{table} CASCADE"));
        let error = PostgresStore::connect(server.url()).await.unwrap_err();
        let says = format!("lacks the tables {table}: drop the schema");
        assert!(
            error.to_string().contains(&says) && !error.is_retryable(),
            "{error}"
        );
        if ["notice", "sweep"].contains(&table) {
            // Locks do without these.
            continue;
        }
        let mut says = String::new();
        // Not each call needs each table.
        eventually("a registry that is connected is told, too", async || {
            let pair = [locks.obtain("k"), locks.obtain("p").permits(1)];
            for lock in pair {
                match lock.lease_once().await {
                    Ok(lease) => drop(lease),
                    Err(error) => says = told(&error),
                }
            }
            // With the table of tickets a function goes that is of its type.
            says.contains(table) || says.contains("part of the schema is missing")
        })
        .await;
        is_at_rest(&server).await;
    }
}
