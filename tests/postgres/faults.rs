//! What may befall a server, a connection and a right.

use std::collections::BTreeSet;
use std::pin::pin;
use std::time::{Duration, Instant};

use futures::future::join_all;
use futures::poll;
use lockstream::store::PostgresStore;
use lockstream::{LockError, LockRegistry, Renewal};

use crate::support::{PgBouncer, PgServer, Proxy, Way, on_a_steady_machine};
use crate::{BOUND, PATIENCE, builder, eventually, ms, patient, registry, told};

/// Who waits has asked by itself by then, once: it does so after 8 to 12 s (W2).
const ASKED: Duration = ms(15_500);

/// A lease that lasts for so long does not run out before [`ASKED`].
const LASTING: Duration = Duration::from_secs(120);

/// One holds, and another waits.
pub(crate) struct Pair {
    pub(crate) holder: LockRegistry,
    pub(crate) lease: lockstream::Lease,
    pub(crate) waiting: tokio::task::JoinHandle<Result<lockstream::Lease, LockError>>,
}

impl Pair {
    /// The lease outlasts what befalls the server, however slowly that comes back.
    pub(crate) async fn new(url: &str) -> Self {
        Self::lasting(url, Duration::from_secs(30)).await
    }

    pub(crate) async fn lasting(url: &str, ttl: Duration) -> Self {
        let (holder, waiter) = (registry(url).await, registry(url).await);
        let lock = holder.obtain("k").ttl(ttl).renewal(Renewal::watchdog());
        let lease = lock.lease().await.unwrap();
        let lock = waiter.obtain("k").wait(PATIENCE);
        let waiting = tokio::spawn(async move { lock.lease().await });
        let lock = holder.obtain("k");
        eventually("it waits", async || {
            lock.inspect().await.unwrap().waiting == 1
        })
        .await;
        Self {
            holder,
            lease,
            waiting,
        }
    }

    /// The lease was held all the time, and the waiter is served when it is released.
    pub(crate) async fn goes_on(self) {
        let lock = self.holder.obtain("k");
        eventually("the waiter is back", async || {
            lock.inspect().await.is_ok_and(|seen| seen.waiting == 1)
        })
        .await;
        assert!(self.lease.is_valid());
        let token = self.lease.token();
        self.lease.release().await.unwrap();
        let next = self.waiting.await.unwrap().unwrap();
        assert!(next.token() > token);
        next.release().await.unwrap();
    }
}

#[tokio::test]
async fn backends_terminated() {
    let server = PgServer::start();
    let pair = Pair::new(&server.url()).await;
    backends_once(&server, 2).await;
    assert!(server.terminate_all() >= 2);
    pair.goes_on().await;
}

/// One server process dies, and the server ends all others.
#[tokio::test]
async fn a_process_of_the_server_crashes() {
    let server = PgServer::start();
    let pair = Pair::new(&server.url()).await;
    server.crash();
    pair.goes_on().await;
}

#[tokio::test]
async fn killed_and_started_again() {
    let mut server = PgServer::start();
    let pair = Pair::new(&server.url()).await;
    server.kill();
    server.restart();
    pair.goes_on().await;
}

#[tokio::test]
async fn shut_down_and_started_again() {
    let mut server = PgServer::start();
    let pair = Pair::new(&server.url()).await;
    server.shut_down();
    server.restart();
    pair.goes_on().await;
}

#[tokio::test]
async fn stopped_for_a_moment() {
    let server = PgServer::start();
    let pair = Pair::new(&server.url()).await;
    server.stop();
    tokio::time::sleep(ms(700)).await;
    server.cont();
    pair.goes_on().await;
}

/// For longer than a call may take: the connection is given up, and its server process ended.
#[tokio::test]
async fn stopped_for_longer_than_the_response_time_out() {
    on_a_steady_machine(async || {
        let server = PgServer::start();
        let locks = registry(&server.url()).await;
        let fast = builder(PostgresStore::connect(server.url()).await.unwrap())
            .response_timeout(ms(300))
            .build()
            .unwrap();
        // A busy machine may take longer than that for an answer.
        eventually("it is connected", async || {
            fast.obtain("k").inspect().await.is_ok()
        })
        .await;
        server.stop();
        let begin = Instant::now();
        let error = fast.obtain("k").acquire_once().await.unwrap_err();
        assert!(
            told(&error).contains("answer") && begin.elapsed() < ms(2000),
            "{error:?}"
        );
        server.cont();
        // The call that was given up has won the lock for nobody (O5, O6).
        let lock = locks.obtain("k");
        let lease = lock.lease_within(BOUND).await.unwrap();
        lease.release().await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn every_way_in_which_a_wire_breaks() {
    let server = PgServer::start();
    let proxy = Proxy::to_port(server.port());
    let url = PgServer::url_at(proxy.port());
    for break_it in [
        (|proxy| proxy.cut()) as fn(&Proxy),
        |proxy| proxy.half_close(Way::ToServer),
        |proxy| proxy.half_close(Way::ToClient),
        |proxy| proxy.delay(Way::Both, ms(100)),
        |proxy| {
            proxy.refuse();
            proxy.cut();
            std::thread::sleep(ms(500));
            proxy.accept();
        },
        |proxy| {
            proxy.hold(Way::Both, true);
            std::thread::sleep(ms(500));
            proxy.hold(Way::Both, false);
        },
        |proxy| {
            proxy.blackhole(Way::ToClient, true);
            std::thread::sleep(ms(300));
            proxy.blackhole(Way::ToClient, false);
            proxy.cut();
        },
    ] {
        let pair = Pair::new(&url).await;
        break_it(&proxy);
        pair.goes_on().await;
        proxy.delay(Way::Both, Duration::ZERO);
    }
}

/// Cut off for longer than its ttl: the holder learns it by its own clock, and the waiter is served.
#[tokio::test]
async fn cut_off_for_longer_than_the_ttl() {
    let server = PgServer::start();
    let proxy = Proxy::to_port(server.port());
    let holder = registry(&PgServer::url_at(proxy.port())).await;
    let waiter = registry(&server.url()).await;
    let lease = holder
        .obtain("k")
        .ttl(ms(800))
        .renewal(Renewal::watchdog())
        .lease()
        .await
        .unwrap();
    let token = lease.token();
    proxy.refuse();
    proxy.cut();
    let lost = lease.lost().await;
    assert!(matches!(lost, LockError::Lost { .. }), "{lost:?}");
    let next = waiter.obtain("k").lease_within(BOUND).await.unwrap();
    assert!(next.token() > token);
}

/// Notices vanish: the waiter looks for them. If it may not, it asks when the lease of the last holder has run out, or after
/// 12 s (W2).
#[tokio::test]
async fn notices_that_vanish() {
    // It looks within a second, and asks after 8 s at the earliest.
    for (functions, within) in [
        (&["notify_1"][..], ms(6000)),
        (&["notify_1", "untold_1"], ASKED),
    ] {
        let server = PgServer::start();
        let pair = Pair::lasting(&server.url(), LASTING).await;
        for function in functions {
            let hide = format!("ALTER FUNCTION lockstream.{function} RENAME TO hidden_{function}");
            server.run(&hide);
        }
        pair.lease.release().await.unwrap();
        let next = tokio::time::timeout(within, pair.waiting).await;
        drop(next.expect("it asks by itself").unwrap().unwrap());
    }
}

/// The server takes no writes for a while.
#[tokio::test]
async fn read_only() {
    let server = PgServer::start();
    let pair = Pair::new(&server.url()).await;
    server.run("ALTER SYSTEM SET default_transaction_read_only = on");
    server.run("SELECT pg_reload_conf()");
    let other = registry_lazily(&server.url());
    eventually("it takes no writes", async || {
        let error = other.obtain("other").acquire_once().await;
        error.is_err_and(|error| told(&error).contains("25006") && error.is_retryable())
    })
    .await;
    let mut admin = server.client();
    admin.run("SET default_transaction_read_only = off");
    admin.run("ALTER SYSTEM RESET default_transaction_read_only");
    server.run("SELECT pg_reload_conf()");
    pair.goes_on().await;
}

fn registry_lazily(url: &str) -> LockRegistry {
    builder(PostgresStore::connect_lazy(url).unwrap())
        .build()
        .unwrap()
}

#[tokio::test]
async fn out_of_connections() {
    let server = PgServer::builder()
        .config("max_connections = 6")
        .config("superuser_reserved_connections = 2")
        .start();
    server.run("CREATE ROLE app LOGIN CREATEROLE; GRANT CREATE ON DATABASE postgres TO app");
    let url = PgServer::url_of("app", server.port());
    let pair = Pair::new(&url).await;
    let mut others = Vec::new();
    while let Ok(client) = postgres::Config::new()
        .host("127.0.0.1")
        .port(server.port())
        .user("app")
        .dbname("postgres")
        .connect_apart()
    {
        others.push(client);
    }
    assert!(!others.is_empty());
    let error = registry_lazily(&url)
        .obtain("other")
        .acquire_once()
        .await
        .unwrap_err();
    assert!(
        told(&error).contains("53300") && error.is_retryable(),
        "{error:?}"
    );
    drop(others);
    pair.goes_on().await;
}

/// A connection that is made and dropped on another thread, since it has a runtime of its own.
trait ConnectApart {
    fn connect_apart(&self) -> Result<Apart, postgres::Error>;
}

struct Apart(Option<postgres::Client>);

impl ConnectApart for postgres::Config {
    fn connect_apart(&self) -> Result<Apart, postgres::Error> {
        let connected = std::thread::scope(|scope| {
            scope
                .spawn(|| self.connect(postgres::NoTls))
                .join()
                .unwrap()
        });
        Ok(Apart(Some(connected?)))
    }
}

impl Drop for Apart {
    fn drop(&mut self) {
        let client = self.0.take();
        std::thread::scope(|scope| scope.spawn(|| drop(client)).join().unwrap());
    }
}

/// Somebody locks our tables: calls are refused after half of the response time-out, and go on.
#[tokio::test]
async fn tables_that_are_locked() {
    on_a_steady_machine(async || {
        let server = PgServer::start();
        let locks = builder(patient(server.url()).connect().await.unwrap())
            .response_timeout(BOUND)
            .build()
            .unwrap();
        let lease = locks.obtain("k").ttl(3 * BOUND).lease().await.unwrap();
        let mut other = server.client();
        other.run("BEGIN; LOCK TABLE lockstream.lock");
        let error = locks.obtain("other").acquire_once().await.unwrap_err();
        assert!(
            told(&error).contains("55P03") && error.is_retryable(),
            "{error:?}"
        );
        other.run("ROLLBACK");
        locks
            .obtain("other")
            .lease()
            .await
            .unwrap()
            .release()
            .await
            .unwrap();
        lease.release().await.unwrap();
    })
    .await;
}

/// What only lasts too long costs no connection: whoever shares it would have to wait for the next one.
#[tokio::test]
async fn a_row_that_is_locked_costs_one_call() {
    on_a_steady_machine(async || {
        let server = PgServer::start();
        let locks = registry(&server.url()).await;
        let lease = locks.obtain("blocked").lease().await.unwrap();
        lease.release().await.unwrap();
        let before = backends_once(&server, 1).await;
        let mut other = server.client();
        other.run("BEGIN; SELECT 1 FROM lockstream.lock FOR UPDATE");
        let error = locks.obtain("blocked").acquire_once().await.unwrap_err();
        assert!(
            told(&error).contains("55P03") && error.is_retryable(),
            "{error:?}"
        );
        other.run("ROLLBACK");
        drop(locks.obtain("blocked").lease().await.unwrap());
        let after = backends_once(&server, before.len()).await;
        assert_eq!(after, before, "the connection stands");
    })
    .await;
}

/// The server processes of registries.
fn backends(server: &PgServer) -> BTreeSet<i32> {
    let sql = "SELECT pid FROM pg_stat_activity WHERE application_name LIKE 'lockstream%'";
    server.rows(sql).iter().map(|row| row.get(0)).collect()
}

/// The same, once there are so many: a sweep comes at any time, and ends its connection when it is done.
async fn backends_once(server: &PgServer, count: usize) -> BTreeSet<i32> {
    let mut seen = BTreeSet::new();
    eventually("so many connections", async || {
        seen = backends(server);
        seen.len() == count
    })
    .await;
    seen
}

/// Also by a pooler, behind which a session's settings would be those of others.
#[tokio::test]
async fn no_statement_runs_for_longer_than_the_response_time_out() {
    on_a_steady_machine(async || {
    let server = PgServer::start();
    let pooler = PgBouncer::to(&server, 2);
    let pooled = patient(server.url()).pooled(pooler.url());
    let direct = patient(server.url()).connect().await.unwrap();
    for (key, connections, store) in [
        ("slow", 1, direct),
        ("slower", 2, pooled.connect().await.unwrap()),
    ] {
        let locks = builder(store).response_timeout(ms(5000)).build().unwrap();
        // Released before: what shares the call that is cancelled is sent again by itself.
        let lease = locks.obtain("k").lease().await.unwrap();
        lease.release().await.unwrap();
        let before = backends_once(&server, connections).await;
        server.run(
            "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS \
             $$ BEGIN PERFORM pg_sleep(3600); RETURN NEW; END $$; \
             CREATE TRIGGER slow BEFORE INSERT ON lockstream.lock FOR EACH ROW EXECUTE FUNCTION slow()",
        );
        let error = locks.obtain(key).acquire_once().await.unwrap_err();
        assert!(
            told(&error).contains("57014") && error.is_retryable(),
            "{error:?}"
        );
        let running = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'PgSleep'";
        assert_eq!(server.one::<i64>(running), 0);
        server.run("DROP FUNCTION slow() CASCADE");
        drop(locks.obtain(key).lease().await.unwrap());
        let after = backends_once(&server, before.len()).await;
        assert_eq!(after, before, "the connection stands");
        locks.shutdown().await;
    }
    let left = "SELECT count(*) FROM pg_settings WHERE name IN ('statement_timeout', 'lock_timeout') AND setting <> '0'";
    let client = crate::client(&pooler.url()).await;
    assert_eq!(
        client.query_one(left, &[]).await.unwrap().get::<_, i64>(0),
        0,
        "nothing is left in the pooled session"
    );
    })
    .await;
}

/// Where each call waits for those of others, forty requests by themselves wait forty times, and their registry is behind
/// all others. Here the first call is refused as the server refuses one that has waited too long.
#[tokio::test]
async fn a_call_that_was_refused_is_sent_again_in_a_few_parts() {
    let server = PgServer::start();
    let store = patient(server.url()).connect().await.unwrap();
    // What waits below is not cancelled before it is let go.
    let locks = builder(store).response_timeout(PATIENCE).ttl(PATIENCE);
    let locks = locks.wait(PATIENCE).build().unwrap();
    drop(locks.obtain("first").lease().await.unwrap());
    // A sequence remembers a call that was undone.
    server.run(
        "CREATE TABLE done (call bigint); CREATE SEQUENCE tries; \
         CREATE FUNCTION noted() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
         IF nextval('public.tries') = 1 THEN RAISE 'too late' USING ERRCODE = '55P03'; END IF; \
         INSERT INTO public.done VALUES (txid_current()); RETURN NEW; END $$; \
         CREATE TRIGGER noted BEFORE INSERT ON lockstream.lock FOR EACH ROW EXECUTE FUNCTION noted()",
    );
    let mut other = server.client();
    other.run("BEGIN; SELECT 1 FROM lockstream.lock FOR UPDATE");
    let first = locks.obtain("first");
    let first = tokio::spawn(async move { first.lease().await });
    let waits = "SELECT count(*) = 1 FROM pg_stat_activity \
                 WHERE application_name LIKE 'lockstream%' AND wait_event_type = 'Lock'";
    eventually("its call waits", async || server.one::<bool>(waits)).await;

    // They share the next call.
    let leases = (0..40).map(|n| locks.obtain(format!("k{n}")).lease().into_future());
    let mut leases = pin!(join_all(leases));
    assert!(poll!(&mut leases).is_pending());
    other.run("COMMIT");
    let leases = leases.await;
    assert_eq!(leases.iter().filter(|lease| lease.is_ok()).count(), 40);
    let seen = &server.rows("SELECT nextval('tries'), count(DISTINCT call) FROM done")[0];
    let (tries, calls): (i64, i64) = (seen.get(0), seen.get(1));
    assert_eq!(tries, 42, "one was refused, and each was done once");
    assert!((4..=8).contains(&calls), "{calls}");
    drop(first.await.unwrap().unwrap());
}

/// Those that share its call are served, after a few waits for the row.
#[tokio::test]
async fn a_locked_row_fails_its_own_caller_alone() {
    let server = PgServer::start();
    let store = patient(server.url()).connect().await.unwrap();
    let locks = builder(store).response_timeout(ms(2000)).build().unwrap();
    let obtain = async |n: u64| {
        let wait = if n == 23 { ms(5000) } else { PATIENCE };
        locks.obtain(format!("k{n}")).wait(wait).lease().await
    };
    let all = async || join_all((10..50).map(obtain)).await;
    let leases = all().await;
    assert!(leases.iter().all(Result::is_ok));
    for lease in leases {
        lease.unwrap().release().await.unwrap();
    }
    let mut other = server.client();
    other.run("BEGIN; SELECT 1 FROM lockstream.lock WHERE key LIKE '%k23' FOR UPDATE");
    for (n, lease) in (10..).zip(all().await) {
        match lease {
            Ok(_) => assert_ne!(n, 23),
            Err(error) => assert!(n == 23 && error.is_retryable(), "{n}: {error:?}"),
        }
    }
}

/// The queue of notifications is full: a session that listens does not end its transaction. From version 17 on its size can
/// be set; before, it has 8 GiB, and sending fails in the same way by hand.
#[tokio::test]
async fn a_full_queue_of_notifications() {
    let mut server = PgServer::start();
    let is_settable =
        server.one::<bool>("SELECT current_setting('server_version_num')::int >= 170000");
    if is_settable {
        server.reconfigure("max_notify_queue_pages = 64");
        server.restart();
    }
    let pair = Pair::lasting(&server.url(), LASTING).await;
    let mut stuck = server.client();
    if is_settable {
        stuck.run("LISTEN other");
        stuck.run("BEGIN; SELECT 1");
        let fill =
            "SELECT pg_notify('other', i || repeat('x', 7000)) FROM generate_series(1, 1000) i";
        let full = server.client().try_run(fill).unwrap_err();
        assert_eq!(full.code().unwrap().code(), "54000");
    } else {
        server.run(
            "CREATE OR REPLACE FUNCTION lockstream.notify_1(notices text[]) RETURNS void LANGUAGE plpgsql AS $$ BEGIN \
             RAISE 'too many notifications in the NOTIFY queue' USING ERRCODE = '54000'; END $$",
        );
    }
    let token = pair.lease.token();
    pair.lease.release().await.unwrap();
    let next = tokio::time::timeout(ASKED, pair.waiting).await;
    let next = next.expect("it asks by itself").unwrap().unwrap();
    assert!(next.token() > token);
    next.release().await.unwrap();
}

/// The disk is full, as far as that can be made: no file of the server may grow beyond the size that the table has. New keys
/// are refused; what is held is renewed and released, and who waits is served, for that needs no room.
#[tokio::test]
async fn a_full_disk() {
    on_a_steady_machine(async || {
        let mut server = PgServer::start();
        drop(registry(&server.url()).await);
        // Segments of the log must fit: they have 16 MiB.
        server.run(
            "INSERT INTO lockstream.lock SELECT repeat('fill', 50) || i, NULL, 1, 4000000000000000 FROM generate_series(1, 40000) i",
        );
        let size: i64 = server.one("SELECT pg_relation_size('lockstream.lock')");
        assert!(size >= 16 << 20, "{size}");
        server.shut_down();
        server.limit_files(Some(size.try_into().unwrap()));
        server.restart();
        // The log is written, and the small table of tickets may grow.
        let pair = Pair::lasting(&server.url(), ms(6000)).await;
        let locks = registry_lazily(&server.url());
        let mut error = None;
        // The last page may have room for some. The others have none for a row that is longer than theirs.
        for number in 0..200 {
            error = locks
                .obtain(format!("{}:{number}", "longer".repeat(50)))
                .acquire_once()
                .await
                .err();
            if error.is_some() {
                break;
            }
        }
        let error = error.expect("there is no room");
        assert!(
            told(&error).contains("could not extend file") && error.is_retryable(),
            "{error:?}"
        );
        // For longer than the ttl: by renewals.
        tokio::time::sleep(ms(6500)).await;
        pair.goes_on().await;
        server.shut_down();
        server.limit_files(None);
        server.restart();
        drop(locks.obtain("another").lease().await.unwrap());
    })
    .await;
}

#[tokio::test]
async fn a_right_is_taken_away_and_given_back() {
    let server = PgServer::start();
    drop(registry(&server.url()).await);
    server.run(
        "CREATE ROLE app LOGIN; GRANT USAGE ON SCHEMA lockstream TO app; \
         GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA lockstream TO app",
    );
    let url = PgServer::url_of("app", server.port());
    let locks = registry(&url).await;
    let lease = locks.obtain("k").lease().await.unwrap();
    server.run("REVOKE ALL ON ALL FUNCTIONS IN SCHEMA lockstream FROM app");
    let error = locks.obtain("other").acquire_once().await.unwrap_err();
    assert!(
        told(&error).contains("42501") && !error.is_retryable(),
        "{error:?}"
    );
    assert!(lease.is_valid());
    server.run("GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA lockstream TO app");
    lease.release().await.unwrap();
    drop(locks.obtain("other").lease().await.unwrap());
}

/// A registry with several connections for its calls.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn several_lanes() {
    let server = PgServer::start();
    let store = patient(server.url()).lanes(3).connect().await.unwrap();
    // It takes a slow machine long to connect three times over.
    let registry = || {
        let builder = builder(store.clone()).ttl(PATIENCE).wait(PATIENCE);
        builder.response_timeout(PATIENCE).build().unwrap()
    };
    let (one, other) = (registry(), registry());
    let turn = async |registry: &LockRegistry, n: usize| {
        for _ in 0..20 {
            registry
                .obtain(format!("k{}", n % 8))
                .lease()
                .await
                .unwrap()
                .release()
                .await
                .unwrap();
        }
    };
    let turns = (0..16).map(|n| turn(if n % 2 == 0 { &one } else { &other }, n));
    let all = futures::future::join_all(turns);
    let cuts = async {
        for _ in 0..3 {
            tokio::time::sleep(ms(100)).await;
            server.terminate_all();
        }
    };
    // A turn may be cut off: then the lease is renewed or lost, and no caller waits for ever.
    let _ = tokio::time::timeout(3 * PATIENCE, async { tokio::join!(all, cuts) })
        .await
        .unwrap();
    one.obtain("k").inspect().await.unwrap();
    other.obtain("k").inspect().await.unwrap();
    let connections = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'lockstream'";
    eventually("three each", async || server.one::<i64>(connections) == 6).await;
}

/// it.
#[tokio::test]
async fn a_cancelled_wait_for_a_synchronous_standby_is_no_answer() {
    let server = PgServer::builder().config("max_wal_senders = 4").start();
    let pair = Pair::new(&server.url()).await;
    server.run("ALTER SYSTEM SET synchronous_standby_names = 'nobody'");
    server.run("SELECT pg_reload_conf()");
    eventually("it waits for a standby", async || {
        server.one::<String>("SHOW synchronous_standby_names") == "nobody"
    })
    .await;
    let lock = pair.holder.obtain("other").wait(PATIENCE);
    let taking = tokio::spawn(async move { lock.lease().await });
    let cancel =
        "SELECT count(pg_cancel_backend(pid)) FROM pg_stat_activity WHERE wait_event = 'SyncRep'";
    for _ in 0..2 {
        eventually("it is cancelled", async || server.one::<i64>(cancel) > 0).await;
    }
    assert!(!taking.is_finished());
    server.run("ALTER SYSTEM RESET synchronous_standby_names");
    server.run("SELECT pg_reload_conf()");
    taking.await.unwrap().unwrap().release().await.unwrap();
    pair.goes_on().await;
}

/// After calls that took long, renewals are not held to be too late for ever.
#[tokio::test]
async fn renewals_are_sent_again_after_a_stall() {
    on_a_steady_machine(async || {
        let server = PgServer::start();
        let locks = builder(patient(server.url()).connect().await.unwrap())
            .response_timeout(3 * BOUND)
            .build()
            .unwrap();
        locks.obtain("k").inspect().await.unwrap();
        let lock = locks.obtain("other");
        server.stop();
        let asking = tokio::spawn(async move { lock.acquire_once().await });
        // The time of a call was estimated at an eighth of this pause: three seconds, and still more than two after some fast
        // calls. A renewal with less time left than that was not sent. The renewal of the lease below has just under two.
        tokio::time::sleep(ms(25_000)).await;
        server.cont();
        asking.await.unwrap().unwrap();
        let lock = locks.obtain("k").ttl(ms(3000)).renewal(Renewal::watchdog());
        let lease = lock.lease().await.unwrap();
        tokio::time::sleep(ms(4000)).await;
        assert!(lease.is_valid());
        lease.release().await.unwrap();
    })
    .await;
}

/// A registry whose machine is gone holds its line until the server knows it. Until then each of its turns costs a ttl.
#[tokio::test]
async fn the_server_looks_for_registries_that_are_gone() {
    let server = PgServer::start();
    let locks = registry(&server.url()).await;
    server.run(
        "CREATE TABLE seen AS SELECT name, setting FROM pg_settings WHERE false; \
         CREATE FUNCTION see() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
         INSERT INTO public.seen SELECT name, setting FROM pg_settings WHERE name LIKE 'tcp_%'; RETURN NEW; END $$; \
         CREATE TRIGGER see BEFORE INSERT ON lockstream.lock FOR EACH ROW EXECUTE FUNCTION see()",
    );
    drop(locks.obtain("k").lease().await.unwrap());
    let seconds = |name: &str| -> i32 {
        server.one(&format!(
            "SELECT setting::int FROM seen WHERE name = '{name}'"
        ))
    };
    let (idle, interval, count) = (
        seconds("tcp_keepalives_idle"),
        seconds("tcp_keepalives_interval"),
        seconds("tcp_keepalives_count"),
    );
    assert!(idle + interval * count <= 15, "{idle} {interval} {count}");
}

/// The runtime stands still for longer than an answer may take, and the answer is there when it goes on: it counts, and the
/// connection stays. It is read by the thread that renews leases (D8), which looks after 5 s, or by the runtime.
#[tokio::test]
async fn an_answer_that_came_while_the_process_stood_still_counts() {
    let server = PgServer::start();
    // The disk may take two seconds for a commit.
    let timeout = ms(4000);
    let store = patient(server.url()).connect().await.unwrap();
    let builder = builder(store).ttl(Duration::from_secs(30));
    let locks = builder.response_timeout(timeout).build().unwrap();
    let lease = locks.obtain("warm").lease().await.unwrap();
    lease.release().await.unwrap();
    let before = backends_once(&server, 1).await;
    for round in 0..2 {
        let lock = locks.obtain(format!("k{round}")).wait(BOUND);
        let taking = tokio::spawn(async move { lock.lease().await });
        // The call is written, and its answer not read.
        for _ in 0..5 {
            tokio::task::yield_now().await;
        }
        std::thread::sleep(timeout + ms(1500));
        taking.await.unwrap().unwrap().release().await.unwrap();
    }
    let after = backends_once(&server, before.len()).await;
    assert_eq!(after, before, "the connection stands");
}
