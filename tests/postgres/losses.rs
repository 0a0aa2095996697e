//! What the server loses, and what keeps others away meanwhile.

use std::time::{Duration, Instant};

use lockstream::store::PostgresStore;

use crate::support::PgServer;
use crate::{BOUND, PATIENCE, builder, eventually, ms, patient, registry, told};

/// For longer than it takes to start a server anew on a busy machine.
const QUIET: Duration = ms(10_000);

/// Makes the schema, long ago.
fn migrate(server: &PgServer) {
    server.run(PostgresStore::SQL);
    server.run("UPDATE lockstream.alive SET since = 0");
}

async fn quiet(server: &PgServer) -> lockstream::LockRegistry {
    let store = patient(server.url()).quiet_time(QUIET);
    let store = store.connect().await.unwrap();
    let locks = builder(store).response_timeout(BOUND).build().unwrap();
    locks.obtain("anything").inspect().await.unwrap();
    locks
}

/// What a server that has crashed may have forgotten is given to nobody until it would be over.
#[tokio::test]
async fn after_a_crash_nothing_is_given_away_for_the_quiet_time() {
    let mut server = PgServer::start();
    migrate(&server);
    let locks = quiet(&server).await;
    // They last until the server is back, however slowly it starts.
    let held = locks.obtain("held").ttl(PATIENCE).lease().await.unwrap();
    let shared = locks
        .obtain("shared")
        .permits(4)
        .ttl(PATIENCE)
        .lease()
        .await
        .unwrap();
    locks
        .obtain("free")
        .lease()
        .await
        .unwrap()
        .release()
        .await
        .unwrap();
    server.kill();
    let killed = Instant::now();
    server.restart();
    let other = quiet(&server).await;
    let begin = Instant::now();
    let locks = [
        other.obtain("free"),
        other.obtain("never"),
        other.obtain("shared").permits(4),
    ];
    for lock in locks {
        assert!(!lock.acquire_once().await.unwrap(), "{}", lock.key());
    }
    assert!(begin.elapsed() < QUIET, "too slow to tell");
    // Who has a lease goes on, and can release it.
    held.extend(PATIENCE).await.unwrap();
    held.release().await.unwrap();
    assert!(!other.obtain("held").acquire_once().await.unwrap());
    drop(shared);
    let waits = [
        other.obtain("free"),
        other.obtain("shared").permits(4),
        other.obtain("held").shared(),
    ];
    let got = waits
        .iter()
        .map(|lock| lock.lease_within(QUIET + 3 * BOUND));
    for got in futures::future::join_all(got).await {
        drop(got.unwrap());
    }
    assert!(
        killed.elapsed() >= QUIET - ms(100),
        "{:?}",
        killed.elapsed()
    );
}

/// A restart in good order loses nothing, and keeps nobody waiting.
#[tokio::test]
async fn after_a_restart_in_good_order_there_is_no_quiet_time() {
    let mut server = PgServer::start();
    migrate(&server);
    let locks = quiet(&server).await;
    locks
        .obtain("k")
        .lease()
        .await
        .unwrap()
        .release()
        .await
        .unwrap();
    server.shut_down();
    server.restart();
    let other = registry(&server.url()).await;
    assert!(other.obtain("k").acquire_once().await.unwrap());
}

/// One statement of a client may lose the last moments: `synchronous_commit` is off.
#[tokio::test]
async fn tokens_grow_though_the_server_forgets_them() {
    let mut server = PgServer::builder().config("wal_writer_delay = 10s").start();
    let url = server.url();
    let store = || patient(&url).synchronous_commit(false).connect();
    let locks = builder(store().await.unwrap()).build().unwrap();
    server.run("CHECKPOINT");
    let mut last = 0;
    for _ in 0..20 {
        let lease = locks.obtain("k").lease().await.unwrap();
        assert!(lease.token().get() > last);
        last = lease.token().get();
        lease.release().await.unwrap();
    }
    drop(locks);
    server.kill();
    server.restart();
    let locks = builder(store().await.unwrap()).build().unwrap();
    let lease = locks.obtain("k").lease_within(BOUND).await.unwrap();
    assert!(lease.token().get() > last, "by the server's clock");
}

/// A standby takes over that has not received the last moments. With a quiet time nobody gets what may be held.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_standby_that_lags_behind_takes_over() {
    for is_quiet in [false, true] {
        let mut primary = PgServer::builder().config("max_wal_senders = 4").start();
        let url = |one: &PgServer, two: &PgServer| {
            format!(
                "postgres://postgres@127.0.0.1:{},127.0.0.1:{}/postgres?sslmode=disable",
                one.port(),
                two.port()
            )
        };
        migrate(&primary);
        if is_quiet {
            drop(quiet(&primary).await);
        } else {
            drop(registry(&primary.url()).await);
        }
        let standby = primary.standby(&[]);
        let url = url(&primary, &standby);
        let (holder, other) = (registry(&url).await, registry(&url).await);
        let kept = holder.obtain("kept").ttl(QUIET).lease().await.unwrap();
        let received = "SELECT count(*) FROM lockstream.lock WHERE owner <> ''";
        eventually("the standby has it", async || {
            standby.one::<i64>(received) == 1
        })
        .await;
        standby.run("SELECT pg_wal_replay_pause()");
        let forgotten = holder.obtain("forgotten").ttl(QUIET).lease().await.unwrap();
        let token = forgotten.token();
        // The standby has received it, and does not know it yet: as if it had not.
        standby.run("ALTER SYSTEM SET primary_conninfo = ''");
        standby.run("SELECT pg_reload_conf()");
        primary.kill();
        let taken_over = Instant::now();
        lose_what_was_not_replayed(&standby);
        standby.promote();
        let lock = other.obtain("forgotten");
        let mut got = None;
        eventually("the new primary answers", async || {
            match lock.lease_once().await {
                Ok(lease) => {
                    got = lease;
                    true
                }
                Err(_) => false,
            }
        })
        .await;
        if is_quiet {
            if taken_over.elapsed() < QUIET {
                assert!(got.is_none(), "it may be held");
            }
            let next = lock.lease_within(QUIET + 3 * BOUND).await.unwrap();
            assert!(next.token() > token);
        } else if let Some(next) = got {
            // Two have it now. Only the token tells them apart.
            assert!(next.token() > token);
        }
        // What the standby had goes on.
        assert!(kept.is_valid() || kept.deadline() <= tokio::time::Instant::now());
    }
}

/// Nothing: replay goes on at a promotion, so what was received is there. It is enough that it may not be.
fn lose_what_was_not_replayed(_: &PgServer) {}

/// A standby is not written to.
#[tokio::test]
async fn a_standby_is_not_used() {
    let primary = PgServer::builder().config("max_wal_senders = 4").start();
    drop(registry(&primary.url()).await);
    let standby = primary.standby(&[]);
    let error = PostgresStore::connect(standby.url()).await.unwrap_err();
    assert!(
        told(&error).contains("standby") && error.is_retryable(),
        "{error}"
    );
}

/// Rows that nobody has used are deleted, and tokens grow all the same.
#[tokio::test]
async fn a_sweep_deletes_what_nobody_uses() {
    let server = PgServer::start();
    let locks = registry(&server.url()).await;
    let mut last = 0;
    for key in ["a", "b", "c"] {
        let lease = locks.obtain(key).lease().await.unwrap();
        last = lease.token().get();
        lease.release().await.unwrap();
    }
    let held = locks
        .obtain("held")
        .ttl(Duration::from_secs(60))
        .lease()
        .await
        .unwrap();
    let permit = locks
        .obtain("permit")
        .permits(2)
        .ttl(Duration::from_secs(60))
        .lease()
        .await
        .unwrap();
    locks
        .obtain("gone")
        .permits(2)
        .lease()
        .await
        .unwrap()
        .release()
        .await
        .unwrap();
    let gone = locks.obtain("gone");
    eventually("it is released", async || {
        gone.inspect().await.unwrap().owner().is_none()
    })
    .await;
    server.run(
        "UPDATE lockstream.lock SET expires_at = 1, epoch = epoch + 1000000000000 WHERE owner IS NULL; \
         INSERT INTO lockstream.ticket VALUES ('lock:held', 1, 'dead:1', 4711, '', 1000)",
    );
    let floor: i64 = server.one("SELECT max(epoch) FROM lockstream.lock");
    // It looks at no second row when 50 ms are over.
    let calls = (1..).find(|_| server.one("SELECT lockstream.sweep_1(3600000000, 0)"));
    assert!(calls <= Some(5), "{calls:?}");
    let left =
        server.rows("SELECT key FROM lockstream.lock WHERE owner <> '' OR owner = '' ORDER BY key");
    let left: Vec<String> = left.iter().map(|row| row.get(0)).collect();
    assert_eq!(left, ["lock:held", "lock:permit"]);
    assert_eq!(
        server.one::<i64>("SELECT count(*) FROM lockstream.ticket"),
        0
    );
    let guards: i64 = server.one("SELECT count(*) FROM lockstream.guard g WHERE NOT EXISTS (SELECT 1 FROM lockstream.lock l WHERE l.key = g.key)");
    assert_eq!(guards, 0);
    let next = locks.obtain("a").lease().await.unwrap();
    assert!(next.token().get() > last && next.token().get() / 64 > floor as u64);
    held.release().await.unwrap();
    permit.release().await.unwrap();
}

/// A fleet sweeps as often as one process does.
#[tokio::test]
async fn a_sweep_right_after_another_has_nothing_to_do() {
    let server = PgServer::start();
    drop(registry(&server.url()).await);
    let idle = "INSERT INTO lockstream.lock VALUES ('lock:k', NULL, 1, 1)";
    let left = || server.one::<i64>("SELECT count(*) FROM lockstream.lock");
    server.run(idle);
    assert!(server.one::<bool>("SELECT lockstream.sweep_1(3600000000, 0)"));
    assert_eq!(left(), 0);
    server.run(idle);
    assert!(server.one::<bool>("SELECT lockstream.sweep_1()"));
    assert_eq!(left(), 1);
    server.run("UPDATE lockstream.sweep SET began_at = began_at - 300000001");
    assert!(server.one::<bool>("SELECT lockstream.sweep_1()"));
    assert_eq!(left(), 0);
}

/// Others wait for what a sweep has deleted, so it does a piece at a time. While one session is at it, others leave it alone:
/// a fleet would else ask again and again for as long as it takes.
#[tokio::test]
async fn a_long_sweep_is_done_in_pieces() {
    const ROWS: i64 = 5000;
    let server = PgServer::start();
    drop(registry(&server.url()).await);
    server.run(&format!(
        "INSERT INTO lockstream.lock SELECT 'lock:' || i, NULL, i, 1 FROM generate_series(1, {ROWS}) i; \
         INSERT INTO lockstream.guard SELECT 'lock:' || i, '' FROM generate_series(1, {ROWS}) i; \
         INSERT INTO lockstream.ticket SELECT 'lock:' || i, 1, 'dead:1', i, '', 1000 FROM generate_series(1, {ROWS}) i"
    ));
    let rows = || {
        server.one::<i64>("SELECT (SELECT count(*) FROM lockstream.lock) + (SELECT count(*) FROM lockstream.ticket)")
    };
    let (mut calls, mut before) = (0, rows());
    let mut other = server.client();
    other.run("BEGIN; SELECT lockstream.sweep_1()");
    assert!(server.one::<bool>("SELECT lockstream.sweep_1(3600000000, 0)"));
    assert_eq!(rows(), before, "the other has not committed");
    other.run("ROLLBACK");
    loop {
        calls += 1;
        let is_done = server.one::<bool>("SELECT lockstream.sweep_1(3600000000, 0)");
        let after = rows();
        assert!(before - after <= 2000, "{before} {after}");
        before = after;
        if is_done {
            break;
        }
        assert!(calls < 1000);
    }
    assert_eq!(before, 0);
    assert_eq!(
        server.one::<i64>("SELECT epoch FROM lockstream.state"),
        ROWS
    );
    // Each call reads this table.
    let pages = "SELECT pg_relation_size('lockstream.state') / 8192";
    assert!(server.one::<i64>(pages) <= 2);
}

/// What was answered is on disk, though the server commits other transactions without.
#[tokio::test]
async fn a_lease_is_on_disk_whatever_the_servers_default_is() {
    let mut server = PgServer::builder()
        .config("synchronous_commit = off")
        .config("wal_writer_delay = 10s")
        .start();
    let locks = registry(&server.url()).await;
    server.run("CHECKPOINT");
    let lease = locks
        .obtain("k")
        .ttl(Duration::from_secs(60))
        .lease()
        .await
        .unwrap();
    server.kill();
    server.restart();
    let held = "SELECT count(*) FROM lockstream.lock WHERE key = 'lock:k' AND owner <> ''";
    assert_eq!(server.one::<i64>(held), 1);
    lease.release().await.unwrap();
}
