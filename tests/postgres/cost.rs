//! What waiting costs, and what a lock.

use std::time::Duration;

use lockstream::LockRegistry;

use crate::support::{PgServer, Proxy};
use crate::{BOUND, eventually, ms, registry};

/// A hundred callers of a process wait with one ticket, and send nothing.
#[tokio::test]
async fn who_waits_sends_nothing() {
    let server = PgServer::start();
    let proxy = Proxy::to_port(server.port());
    let holder = registry(&server.url()).await;
    let waiter = registry(&PgServer::url_at(proxy.port())).await;
    let lease = holder
        .obtain("k")
        .ttl(Duration::from_secs(60))
        .lease()
        .await
        .unwrap();
    let wait = async || {
        waiter
            .obtain("k")
            .lease_within(Duration::from_secs(30))
            .await
            .unwrap()
            .release()
            .await
            .unwrap()
    };
    let waiting = futures::future::join_all((0..100).map(|_| wait()));
    let quiet = async {
        let lock = holder.obtain("k");
        eventually("they wait", async || {
            lock.inspect().await.unwrap().waiting == 1
        })
        .await;
        tokio::time::sleep(ms(300)).await;
        let before = proxy.bytes();
        tokio::time::sleep(ms(3000)).await;
        assert_eq!(proxy.bytes(), before);
        assert_eq!(proxy.connections(), 1);
        lease.release().await.unwrap();
    };
    tokio::join!(waiting, quiet);
}

/// A lock is two transactions, and callers that come together share theirs.
#[tokio::test]
async fn a_lock_costs_two_transactions() {
    let server = PgServer::builder().config("log_statement = 'all'").start();
    let locks = registry(&server.url()).await;
    let turn = async |key: String| {
        let lease = locks.obtain(key).lease().await.unwrap();
        lease.release().await.unwrap();
    };
    // Each call is a statement, and a transaction. It is logged before it is done.
    let calls = async || {
        let mark = format!("SELECT 'mark {}'", rand::random::<u64>());
        server.run(&mark);
        eventually("the log is read", async || server.log().contains(&mark)).await;
        server.log().matches(".ops_1($1").count()
    };
    turn("k".to_owned()).await;
    let before = calls().await;
    for _ in 0..50 {
        turn("k".to_owned()).await;
    }
    assert_eq!(calls().await - before, 2 * 50);
    let before = calls().await;
    futures::future::join_all((0..50).map(|n| turn(format!("k{n}")))).await;
    let shared = calls().await - before;
    assert!(shared < 26, "{shared} for a hundred ops");
}

/// G3: a registry that has died may have left very many tickets, and many shared leases may end at once. One call deletes a
/// hundred, and until the last of these calls the lock is as it was.
#[tokio::test]
async fn many_dead_tickets_are_cleared_by_several_calls() {
    let server = PgServer::start();
    let locks = registry(&server.url()).await;
    let mut sql = server.client();
    let mut op = |letter: &str, owner: &str, mode: &str| -> (String, i64) {
        let call = format!(
            "SELECT verdict FROM lockstream.ops_1(true, 7, {}, '{letter}', '{{lock:k}}', '{{{owner}}}', '{{\"{mode}\"}}', \
             '{{60000000}}', '{{a:2}}', '{{NULL}}')",
            i64::MAX
        );
        let verdict = sql.one(&call);
        let left = "SELECT (SELECT count(*) FROM lockstream.ticket WHERE owner LIKE 'dead:%') \
                    + (SELECT count(*) FROM lockstream.holder WHERE owner LIKE 'dead:%')";
        (verdict, sql.one(left))
    };
    let more = |left| ("more".to_owned(), left);
    // The same line has left them all.
    let dead = "INSERT INTO lockstream.ticket SELECT 'lock:k', i, 'dead:' || i, 4711, '', 1000 FROM generate_series(1, 250) i; \
                UPDATE lockstream.lock SET waited = true";
    for (letter, is_held, verdict) in [
        ("R", true, "held"),
        ("W", true, "held"),
        ("Y", true, "won"),
        ("A", false, "won"),
        ("E", false, "won"),
    ] {
        server.run("TRUNCATE lockstream.lock, lockstream.ticket, lockstream.guard");
        assert_eq!(op("A", "a:1", "").0, "won");
        server.run(dead);
        if !is_held {
            server.run("UPDATE lockstream.lock SET expires_at = 1");
        }
        let row = || server.one::<String>("SELECT l::text FROM lockstream.lock l");
        let before = row();
        assert_eq!(op(letter, "a:1", ""), more(150), "{letter}");
        assert_eq!(op(letter, "a:1", ""), more(50), "{letter}");
        assert_eq!(row(), before, "{letter}");
        assert_eq!(op(letter, "a:1", ""), (verdict.to_owned(), 0), "{letter}");
    }
    server.run(
        "TRUNCATE lockstream.lock, lockstream.ticket, lockstream.guard; \
         INSERT INTO lockstream.lock VALUES ('lock:k', '', 1, 0); \
         INSERT INTO lockstream.holder SELECT 'lock:k', 'dead:' || i, 'r', 1, i, 1 FROM generate_series(1, 250) i",
    );
    assert_eq!(op("A", "a:1", ""), more(150));
    assert_eq!(op("A", "a:1", ""), more(50));
    assert_eq!(op("A", "a:1", ""), ("won".to_owned(), 0));
    // A registry sends them again.
    server.run("TRUNCATE lockstream.lock, lockstream.ticket, lockstream.guard");
    let lease = locks.obtain("k").lease().await.unwrap();
    server.run(dead);
    lease.release().await.unwrap();
    assert!(locks.obtain("k").acquire_once().await.unwrap());
}

/// A release waits for a transaction that goes on for long, and asks less and less often.
#[tokio::test]
async fn a_release_that_waits_for_a_transaction_asks_seldom() {
    let server = PgServer::start();
    let proxy = Proxy::to_port(server.port());
    let locks = registry(&PgServer::url_at(proxy.port())).await;
    let lease = locks.obtain("k").lease().await.unwrap();
    let mut transaction = server.client();
    let token = lease.token().get();
    transaction.run(&format!("BEGIN; SELECT lockstream.fence('k', {token})"));
    let before = proxy.bytes().0;
    let releasing = tokio::spawn(async move { lease.release().await });
    tokio::time::sleep(ms(1500)).await;
    // A call is some 200 bytes.
    let sent = proxy.bytes().0 - before;
    assert!((1..15_000).contains(&sent), "{sent}");
    transaction.run("COMMIT");
    let begin = std::time::Instant::now();
    releasing.await.unwrap().unwrap();
    assert!(begin.elapsed() < ms(1000), "it still asks often enough");
}

/// PostgreSQL reads a small table in full once it knows how small it is. With it go the old versions of each row.
#[tokio::test]
async fn small_tables_are_read_by_their_indexes() {
    let server = PgServer::start();
    let hand_over = async |one: &LockRegistry, other: &LockRegistry| {
        let locks = [one, other].map(|it| it.obtain("k"));
        let lease = locks[0].lease().await.unwrap();
        let release = async {
            eventually("the other waits", async || {
                locks[0].inspect().await.unwrap().waiting == 1
            })
            .await;
            lease.release().await.unwrap();
        };
        let (next, ()) = tokio::join!(locks[1].lease_within(BOUND), release);
        next.unwrap().release().await.unwrap();
        let shared = one.obtain("k").shared().lease().await.unwrap();
        shared.release().await.unwrap();
    };
    hand_over(
        &registry(&server.url()).await,
        &registry(&server.url()).await,
    )
    .await;
    server.run("ANALYZE lockstream.lock, lockstream.guard, lockstream.ticket, lockstream.holder");

    let seen = |scans: &str| -> i64 {
        let sql = format!(
            "SELECT sum({scans})::bigint FROM pg_stat_user_tables WHERE relname IN ('lock', 'guard', 'ticket', 'holder')"
        );
        server.one(&sql)
    };
    let tell = async || {
        let sql = "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'lockstream%'";
        eventually("sessions tell of their scans when they end", async || {
            server.one::<i64>(sql) == 0
        })
        .await;
    };
    tell().await;
    // These plan anew.
    let (one, other) = (registry(&server.url()).await, registry(&server.url()).await);
    let (in_full, by_index) = (seen("seq_scan"), seen("idx_scan"));
    for _ in 0..10 {
        hand_over(&one, &other).await;
    }
    drop((one, other));
    tell().await;
    assert!(seen("idx_scan") > by_index + 100);
    assert_eq!(seen("seq_scan"), in_full);
}
