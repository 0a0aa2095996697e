//! A real PgBouncer between a registry and its server.

use std::time::Duration;

use lockstream::LockRegistry;
use lockstream::store::PostgresStore;

use crate::support::{PgBouncer, PgServer, Proxy, Way, on_a_steady_machine};
use crate::{BOUND, builder, eventually, ms, patient, told};

async fn registry(server: &PgServer, pooler: &PgBouncer) -> LockRegistry {
    let store = patient(server.url())
        .pooled(pooler.url())
        .lanes(2)
        .connect()
        .await;
    let locks = builder(store.unwrap()).build().unwrap();
    locks.obtain("anything").inspect().await.unwrap();
    locks
}

/// Calls go by the pooler, and grants come by the server's own connection.
#[tokio::test]
async fn turns_are_taken_by_a_pooler() {
    on_a_steady_machine(async || {
        let server = PgServer::start();
        let pooler = PgBouncer::to(&server, 3);
        let (one, other) = (
            registry(&server, &pooler).await,
            registry(&server, &pooler).await,
        );
        for _ in 0..3 {
            let lease = one
                .obtain("k")
                .ttl(Duration::from_secs(20))
                .lease()
                .await
                .unwrap();
            let lock = other.obtain("k");
            let waiting = tokio::spawn(async move { lock.lease_within(BOUND).await });
            let lock = one.obtain("k");
            eventually("it waits", async || {
                lock.inspect().await.unwrap().waiting == 1
            })
            .await;
            let token = lease.token();
            lease.release().await.unwrap();
            // Not by asking: that would take until the ttl is over, or eight seconds.
            let next = tokio::time::timeout(ms(5000), waiting)
                .await
                .expect("it is told")
                .unwrap()
                .unwrap();
            assert!(next.token() > token);
            next.release().await.unwrap();
        }
        let listening = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE '%pg_notify($1%' AND application_name LIKE 'lockstream%'";
        assert!(server.one::<i64>(listening) <= 2);
    })
    .await;
}

/// Many registries by few connections.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_registries_share_few_connections() {
    let server = PgServer::start();
    let pooler = PgBouncer::to(&server, 2);
    let mut registries = Vec::new();
    for _ in 0..8 {
        registries.push(registry(&server, &pooler).await);
    }
    let turns = async |locks: &LockRegistry| {
        for n in 0..20 {
            let lease = locks
                .obtain(format!("k{}", n % 3))
                .lease_within(Duration::from_secs(30))
                .await
                .unwrap();
            lease.release().await.unwrap();
        }
    };
    futures::future::join_all(registries.iter().map(turns)).await;
    // A sweep has a lock, too, for a moment.
    let own = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'";
    eventually("each has its line on a connection of its own", async || {
        server.one::<i64>(own) == 8
    })
    .await;
}

/// A fence by a pooler is one statement of the transaction.
#[tokio::test]
async fn a_transaction_by_a_pooler_is_fenced() {
    let server = PgServer::start();
    let pooler = PgBouncer::to(&server, 2);
    let one = registry(&server, &pooler).await;
    let lease = one.obtain("k").lease().await.unwrap();
    let mut client = crate::client(&pooler.url()).await;
    let transaction = client.transaction().await.unwrap();
    lease.view().fence(&transaction).await.unwrap();
    let releasing = tokio::spawn(async move { lease.release().await });
    tokio::time::sleep(ms(200)).await;
    assert!(!releasing.is_finished());
    transaction.commit().await.unwrap();
    releasing.await.unwrap().unwrap();
}

/// What would stay in the server process that answers, beside what a pooler itself sets there.
async fn left_behind(client: &tokio_postgres::Client) -> String {
    let sql = "SELECT concat_ws('; ', pg_backend_pid(), \
        (SELECT string_agg('listens ' || c, ', ') FROM pg_listening_channels() c), \
        (SELECT string_agg('prepared ' || statement, ', ') FROM pg_prepared_statements), \
        (SELECT string_agg('locked ' || objid, ', ') FROM pg_locks \
         WHERE locktype = 'advisory' AND pid = pg_backend_pid()), \
        (SELECT string_agg('set ' || name, ', ') FROM pg_settings WHERE source = 'session' AND name NOT IN \
         ('application_name', 'client_encoding', 'DateStyle', 'IntervalStyle', 'TimeZone', 'search_path', \
          'default_transaction_read_only', 'standard_conforming_strings', 'scram_iterations') \
         OR source = 'session' AND name IN ('search_path', 'default_transaction_read_only') AND setting <> reset_val))";
    let rows = client.simple_query(sql).await.unwrap();
    let row = rows.iter().find_map(|message| match message {
        tokio_postgres::SimpleQueryMessage::Row(row) => row.get(0).map(str::to_owned),
        _ => None,
    });
    row.expect("a row")
}

/// The server processes that the pooler has.
fn processes(server: &PgServer) -> Vec<i32> {
    let sql = "SELECT pid FROM pg_stat_activity WHERE backend_type = 'client backend' \
               AND application_name <> 'harness' ORDER BY pid";
    server.rows(sql).iter().map(|row| row.get(0)).collect()
}

/// As many pools are all day: the registry gets the same server process each time, so everything seems to work as with a
/// server itself. What it left there, whoever came next would find: the second registry "s0", which the first had
/// prepared, and the application notices and locks that are not its own.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_url_of_a_pooler_alone_works_and_leaves_nothing() {
    for (mode, connections) in [("transaction", 1), ("transaction", 3), ("session", 8)] {
        let server = PgServer::start();
        patient(server.url()).connect().await.unwrap();
        let pooler = PgBouncer::in_mode(&server, connections, "postgres", mode);
        let client = crate::client(&pooler.url()).await;
        // A pool that is busy gives each transaction another process.
        let mut others = Vec::new();
        for _ in 1..connections.min(4) {
            let client = crate::client(&pooler.url()).await;
            others.push(tokio::spawn(async move {
                while client.simple_query("SELECT pg_sleep(0.001)").await.is_ok() {}
            }));
        }
        let mut before = Vec::new();
        for _ in 0..3 {
            let lazily = patient(pooler.url()).connect_lazy().unwrap();
            let (one, other) = (
                builder(patient(pooler.url()).connect().await.unwrap())
                    .build()
                    .unwrap(),
                builder(lazily).build().unwrap(),
            );
            let direct = crate::registry(&server.url()).await;
            let lease = one
                .obtain("k")
                .ttl(Duration::from_secs(20))
                .lease()
                .await
                .unwrap();
            for locks in [&other, &direct] {
                assert!(locks.obtain("k").lease_once().await.unwrap().is_none());
            }
            // It asks again and again.
            let lock = other.obtain("k");
            let waiting = tokio::spawn(async move { lock.lease_within(BOUND).await });
            tokio::time::sleep(ms(100)).await;
            let token = lease.token();
            lease.release().await.unwrap();
            let next = waiting.await.unwrap().unwrap();
            assert!(next.token() > token);
            let mut fencing = crate::client(&pooler.url()).await;
            let transaction = fencing.transaction().await.unwrap();
            next.view().fence(&transaction).await.unwrap();
            transaction.commit().await.unwrap();
            next.release().await.unwrap();
            drop(fencing);
            for _ in 0..20 {
                let left = left_behind(&client).await;
                assert!(left.parse::<i32>().is_ok(), "{mode} {connections}: {left}");
            }
            // While registries are connected, and when they have gone.
            for locks in [one, other, direct] {
                locks.shutdown().await;
            }
            for _ in 0..20 {
                let left = left_behind(&client).await;
                assert!(left.parse::<i32>().is_ok(), "{mode} {connections}: {left}");
            }
            // The server ends the sessions of the direct one a moment after it has gone.
            eventually("only those of the pooler are left", async || {
                processes(&server).len() <= connections
            })
            .await;
            let now = processes(&server);
            if mode == "transaction" {
                assert!(
                    before.iter().all(|pid| now.contains(pid)),
                    "{before:?} {now:?}"
                );
            }
            before = now;
        }
        others.iter().for_each(tokio::task::JoinHandle::abort);
    }
}

/// A call that is given up, with a pooler between: the next connection ends the process that still runs it, if that is its
/// own. By now that process may serve somebody else.
#[tokio::test]
async fn a_process_of_a_pooler_is_never_ended() {
    on_a_steady_machine(async || {
        let server = PgServer::start();
        patient(server.url()).connect().await.unwrap();
        for pooled in [false, true] {
            let pooler = PgBouncer::to(&server, 1);
            let client = crate::client(&pooler.url()).await;
            let pid = left_behind(&client).await;
            let proxy = Proxy::to_port(pooler.port());
            let through = PgServer::url_at(proxy.port());
            let store = match pooled {
                true => PostgresStore::builder(server.url()).pooled(through),
                false => PostgresStore::builder(through),
            };
            let store = store.connect().await.unwrap();
            let locks = builder(store).response_timeout(ms(300)).build().unwrap();
            // A busy machine may take longer than that for an answer.
            eventually("it is connected", async || {
                locks.obtain("k").inspect().await.is_ok()
            })
            .await;
            for _ in 0..3 {
                // Each time a call is not answered.
                proxy.hold(Way::ToClient, true);
                let error = locks.obtain("k").lease_once().await.unwrap_err();
                assert!(error.is_retryable(), "{error}");
                proxy.hold(Way::ToClient, false);
                eventually("it is back", async || {
                    locks.obtain("k").inspect().await.is_ok()
                })
                .await;
                assert_eq!(left_behind(&client).await, pid);
            }
            locks.shutdown().await;
            drop(client);
        }
    })
    .await;
}

/// Nothing is sent at the start of a session that a pooler does not know; what the url adds is the user's.
#[tokio::test]
async fn options_of_the_url_are_refused_by_a_pooler() {
    let server = PgServer::start();
    let pooler = PgBouncer::to(&server, 2);
    let url = format!("{}&options=-c%20geqo%3Doff", pooler.url());
    let error = PostgresStore::connect(url).await.unwrap_err();
    assert!(
        told(&error).contains("leave them out of the url"),
        "{error}"
    );
}

/// All of it in one url, as an environment has it.
#[tokio::test]
async fn a_url_that_names_its_pooler() {
    let server = PgServer::start();
    let pooler = PgBouncer::to(&server, 2);
    let encoded: String = pooler
        .url()
        .bytes()
        .map(|byte| format!("%{byte:02X}"))
        .collect();
    let url = format!(
        "{}&pooled={encoded}&name=web&response_timeout=5s&connect_timeout=60s",
        server.url()
    );
    let locks = LockRegistry::connect(url).await.unwrap();
    let other = crate::registry(&server.url()).await;
    let lease = locks
        .obtain("k")
        .ttl(Duration::from_secs(20))
        .lease()
        .await
        .unwrap();
    let lock = other.obtain("k");
    let waiting = tokio::spawn(async move { lock.lease_within(BOUND).await });
    eventually("it waits", async || {
        locks.obtain("k").inspect().await.unwrap().waiting == 1
    })
    .await;
    lease.release().await.unwrap();
    waiting.await.unwrap().unwrap().release().await.unwrap();
    let direct = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'lockstream:web'";
    assert!(server.one::<i64>(direct) >= 1);
}

/// A pooler that nobody could notice is told by its url. Here it is the server itself.
#[tokio::test]
async fn what_is_said_to_be_a_pooler_is_taken_for_one() {
    let server = PgServer::start();
    let locks = crate::registry(&format!("{}&pgbouncer=true", server.url())).await;
    locks
        .obtain("k")
        .lease()
        .await
        .unwrap()
        .release()
        .await
        .unwrap();
    let lines = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'";
    eventually("nobody has a line, nor sweeps", async || {
        server.one::<i64>(lines) == 0
    })
    .await;
}
