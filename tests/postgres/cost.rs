//! What waiting costs, and what a lock.

use std::time::{Duration, Instant};

use lockstream::LockRegistry;

use crate::support::{PgServer, Proxy, on_a_steady_machine};
use crate::{BOUND, eventually, ms, registry};

/// How often each of these was called, by the server's log of all statements.
async fn calls<const N: usize>(server: &PgServer, functions: [&str; N]) -> [usize; N] {
    // A statement is logged before it is done.
    let mark = format!("SELECT 'mark {}'", rand::random::<u64>());
    server.run(&mark);
    eventually("the log is read", async || server.log().contains(&mark)).await;
    let log = server.log();
    functions.map(|it| log.matches(&format!(".{it}(")).count())
}

/// What is measured between two sweeps: the first of a registry comes at any time, on a connection of its own. The server
/// must log all statements.
async fn unswept<T>(server: &PgServer, measure: impl AsyncFn() -> T) -> T {
    for _ in 0..5 {
        let before = calls(server, ["sweep_1"]).await;
        let measured = measure().await;
        if calls(server, ["sweep_1"]).await == before {
            return measured;
        }
    }
    panic!("it sweeps all the time");
}

/// How many transactions have written something.
fn writes(server: &PgServer) -> i64 {
    server.one("SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint")
}

/// A hundred callers of a process wait with one ticket. They look twice a second for a grant that they were not told of,
/// together, and ask for nothing.
#[tokio::test]
async fn who_waits_sends_next_to_nothing() {
    let server = PgServer::builder()
        .config("log_statement = 'all'")
        .config("autovacuum = off")
        .start();
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
        let seen = async || calls(&server, ["ops_1", "untold_1"]).await;
        let measure = async || {
            let (before, bytes, wrote) = (seen().await, proxy.bytes(), writes(&server));
            let begin = Instant::now();
            // Three measurements are over before it asks by itself, after 8 s at the earliest (W2).
            tokio::time::sleep(ms(2000)).await;
            let (after, sent) = (seen().await, proxy.bytes().0 - bytes.0);
            // Each after 400 ms at the earliest.
            let most = 1 + begin.elapsed().as_millis() / 400;
            let wrote = writes(&server) - wrote;
            let (asked, looks) = (after[0] - before[0], after[1] - before[1]);
            (asked, looks, most, sent, wrote, proxy.connections())
        };
        let (asked, looks, most, sent, wrote, connections) = unswept(&server, measure).await;
        assert_eq!(asked, 0);
        assert!((1..=most).contains(&(looks as u128)), "{looks} looks");
        assert!(sent <= 200 * (looks as u64 + 1), "{sent} bytes");
        assert_eq!(wrote, 0);
        assert_eq!(connections, 1);
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
    // Each call is a statement, and a transaction.
    let calls = async || calls(&server, ["ops_1"]).await[0];
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
    // It makes the schema. One that stays would sweep away what is made here.
    drop(registry(&server.url()).await);
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
    // Leases that are over and dead tickets count together. Whoever is behind them is served, and not passed over.
    let mut other = server.client();
    other.run("SELECT lockstream.hello_1(12)");
    server.run(
        "TRUNCATE lockstream.lock, lockstream.ticket, lockstream.guard, lockstream.holder; \
         INSERT INTO lockstream.lock VALUES ('lock:k', '', 1, 0, true); \
         INSERT INTO lockstream.holder SELECT 'lock:k', 'dead:' || i, 'r', 1, i, 1 FROM generate_series(1, 80) i; \
         INSERT INTO lockstream.ticket SELECT 'lock:k', i, 'dead:' || i, 4711, '', 1000 FROM generate_series(1, 80) i; \
         INSERT INTO lockstream.ticket VALUES ('lock:k', 81, 'live:1', 12, '', 60000000)",
    );
    assert_eq!(op("E", "a:1", ""), more(60));
    assert_eq!(op("E", "a:1", ""), ("busy".to_owned(), 0));
    let holder = server.one::<String>("SELECT owner FROM lockstream.lock");
    assert_eq!(holder, "live:1");
    // A registry sends them again.
    let locks = registry(&server.url()).await;
    server.run("TRUNCATE lockstream.lock, lockstream.ticket, lockstream.guard");
    let lease = locks.obtain("k").lease().await.unwrap();
    server.run(dead);
    lease.release().await.unwrap();
    assert!(locks.obtain("k").acquire_once().await.unwrap());
}

/// A release waits for a transaction that goes on for long, and asks less and less often.
#[tokio::test]
async fn a_release_that_waits_for_a_transaction_asks_seldom() {
    on_a_steady_machine(async || {
        let server = PgServer::start();
        let proxy = Proxy::to_port(server.port());
        let locks = registry(&PgServer::url_at(proxy.port())).await;
        let lease = locks.obtain("k").lease().await.unwrap();
        let mut transaction = server.client();
        let token = lease.token().get();
        transaction.run(&format!("BEGIN; SELECT lockstream.fence('k', {token})"));
        let before = proxy.bytes().0;
        let releasing = tokio::spawn(async move { lease.release().await });
        tokio::time::sleep(ms(2700)).await;
        // A call is some 200 bytes.
        let sent = proxy.bytes().0 - before;
        assert!((1..17_000).contains(&sent), "{sent}");
        transaction.run("COMMIT");
        let begin = Instant::now();
        releasing.await.unwrap().unwrap();
        // Its pauses are an eighth of the time that it has waited. Were each twice the one before it, this would be one of
        // 2.5 s, from 2.6 s to 5.1 s.
        assert!(begin.elapsed() < ms(2300), "it still asks often enough");
    })
    .await;
}

/// A lease ends, and a transaction that is fenced by it goes on: whoever waits asks less and less often, and writes nothing.
#[tokio::test]
async fn who_waits_for_a_fenced_transaction_backs_off_and_writes_nothing() {
    on_a_steady_machine(async || {
        let server = PgServer::builder()
            .config("log_statement = 'all'")
            .config("autovacuum = off")
            .start();
        let holder = registry(&server.url()).await;
        let mut transaction = server.client();
        let lease = holder.obtain("k").ttl(ms(1000)).lease().await.unwrap();
        let token = lease.token().get();
        transaction.run(&format!("BEGIN; SELECT lockstream.fence('k', {token})"));
        let mut waiting = Vec::new();
        for _ in 0..3 {
            let waiter = registry(&server.url()).await;
            let lock = waiter
                .obtain("k")
                .ttl(ms(2000))
                .wait(Duration::from_secs(60));
            waiting.push(tokio::spawn(async move {
                let lease = lock.lease().await.unwrap();
                lease.release().await.unwrap();
                waiter
            }));
        }
        lease.lost().await;
        let lock = holder.obtain("k");
        eventually("they wait", async || {
            lock.inspect().await.unwrap().waiting == 3
        })
        .await;
        // The end of the lease is written, and a waiter whose connection was too slow enters again. Not each call
        // writes. Three waiters, and the release. After every 50 ms, by each, it would be two hundred.
        let mut seen = Vec::new();
        while !matches!(seen.last(), Some((4..100, 0))) {
            assert!(seen.len() < 10, "calls and writes in 3 s: {seen:?}");
            let before = (calls(&server, ["ops_1"]).await[0], writes(&server));
            tokio::time::sleep(ms(3000)).await;
            let asked = calls(&server, ["ops_1"]).await[0] - before.0;
            seen.push((asked, writes(&server) - before.1));
        }
        transaction.run("COMMIT");
        for waiting in waiting {
            drop(tokio::time::timeout(BOUND, waiting).await.unwrap().unwrap());
        }
    })
    .await;
}

/// An op that changes nothing writes nothing, not even a lock on a row: it has no transaction of its own to be numbered, and
/// makes no record of the server's log.
#[tokio::test]
async fn what_changes_nothing_writes_nothing() {
    const TIMES: i64 = 40;
    let server = PgServer::builder().config("autovacuum = off").start();
    drop(registry(&server.url()).await);
    let mut admin = server.client();
    admin.run("SELECT lockstream.hello_1(4710)");
    let op = |letter: &str, line: i64, key: &str, owner: &str, mode: &str, place: &str| {
        format!(
            "SELECT verdict, score FROM lockstream.ops_1(true, {line}, 9000000000000000000, '{letter}', '{{{key}}}', \
             '{{{owner}}}', '{{\"{mode}\"}}', '{{86400000000}}', '{{waiter:9}}', '{{{place}}}')"
        )
    };
    for (key, mode) in [
        ("x", ""),
        ("fenced", ""),
        ("free", ""),
        ("r", "r"),
        ("p", "2/2"),
    ] {
        let won = op("A", 0, key, &format!("holder:{key}"), mode, "null");
        assert_eq!(admin.one::<String>(&won), "won");
    }
    assert_eq!(
        admin.one::<String>(&op("R", 0, "free", "holder:free", "", "null")),
        "held"
    );
    // A transaction that is fenced, as `fence` does it, and outlives its lease.
    let mut transaction = server.client();
    transaction.run("BEGIN; SELECT FROM lockstream.guard WHERE key = 'fenced' FOR KEY SHARE");
    admin.run("UPDATE lockstream.lock SET expires_at = lockstream.now_1() WHERE key = 'fenced'");
    let mut waiter = server.client();
    waiter.run("SELECT lockstream.hello_1(4711)");

    let seen = |sql: &str| server.one::<i64>(sql);
    let bytes = "SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint";
    // Of readers a writer waits for, and of permits one that does not fit.
    for (key, mode) in [
        ("x", ""),
        ("x", "r"),
        ("fenced", ""),
        ("r", ""),
        ("r", "1/2"),
        ("p", "1/2"),
        ("p", ""),
    ] {
        let owner = format!("waiter:{key}{}", mode.replace('/', "-"));
        let entered = waiter.rows(&op("E", 4711, key, &owner, mode, "null"));
        assert_eq!(entered[0].get::<_, String>(0), "busy", "{key} {mode}");
        let place = entered[0].get::<_, i64>(1).to_string();
        let again = op("E", 4711, key, &owner, mode, &place);
        let others = ["A", "W", "U", "R", "N", "V", "S", "Y", "T"];
        let others = others.map(|it| op(it, 4711, key, "waiter:8", mode, "5"));
        let inspects = format!("SELECT count(*)::text FROM lockstream.inspect_1('{key}', 4711)");
        for sql in others.iter().chain([&again, &inspects]) {
            let before = (writes(&server), seen(bytes));
            let verdict: String = waiter.one(sql);
            for _ in 0..TIMES {
                assert_eq!(waiter.one::<String>(sql), verdict);
            }
            let (wrote, logged) = (writes(&server) - before.0, seen(bytes) - before.1);
            assert_eq!(wrote, 0, "{verdict}: {sql}");
            // What the server itself logs now and then is less than a record for each.
            assert!(logged < 24 * TIMES, "{logged} bytes: {sql}");
        }
    }
    for letter in ["W", "U", "R", "S", "N"] {
        let before = writes(&server);
        waiter.rows(&op(letter, 4711, "free", "waiter:8", "", "null"));
        waiter.rows(&op(letter, 4711, "nobody", "waiter:8", "", "null"));
        assert_eq!(writes(&server), before, "{letter}");
    }
    transaction.run("COMMIT");
    let freed = waiter.one::<String>(&op("A", 4711, "fenced", "waiter:8", "", "null"));
    assert_eq!(freed, "busy", "whoever waits is served");
    let served =
        "SELECT count(*) FROM lockstream.lock WHERE key = 'fenced' AND owner = 'waiter:fenced'";
    assert_eq!(seen(served), 1);
}

/// A ping is one call, which writes nothing: it has no transaction to be numbered, and makes no record of the server's log.
#[tokio::test]
async fn a_ping_is_one_call_that_writes_nothing() {
    const TIMES: usize = 20;
    let server = PgServer::builder()
        .config("log_statement = 'all'")
        .config("autovacuum = off")
        .start();
    let proxy = Proxy::to_port(server.port());
    let locks = registry(&PgServer::url_at(proxy.port())).await;
    locks.ping().await.unwrap();
    let logged = || server.one::<i64>("SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint");
    let measure = async || {
        let made = proxy.accepted();
        let before = calls(&server, ["ops_1"]).await[0];
        let (wrote, bytes) = (writes(&server), logged());
        for _ in 0..TIMES {
            locks.ping().await.unwrap();
        }
        let (wrote, bytes) = (writes(&server) - wrote, logged() - bytes);
        let asked = calls(&server, ["ops_1"]).await[0] - before;
        (wrote, bytes, asked, proxy.accepted() - made)
    };
    let (wrote, bytes, asked, made) = unswept(&server, measure).await;
    assert_eq!(wrote, 0);
    // What the server itself logs now and then is less than a record for each.
    assert!(bytes < 24 * 20, "{bytes} bytes");
    assert_eq!(asked, TIMES);
    assert_eq!(made, 0);
}

/// A look waited for the disk, and for the standbys, that its notification to itself was there: which it reads back at once.
#[tokio::test]
async fn a_look_waits_for_no_disk_and_changes_nothing() {
    let server = PgServer::builder()
        .config("log_statement = 'all'")
        .config("autovacuum = off")
        .start();
    let locks = registry(&server.url()).await;
    let measure = async || {
        let before = writes(&server);
        let check = locks.check().await.unwrap();
        (check, writes(&server) - before)
    };
    let (check, wrote) = unswept(&server, measure).await;
    assert!(check.servers[0].no_push.is_none(), "{check}");
    assert!(check.servers[0].warnings.is_empty(), "{check}");
    // The notification.
    assert!(wrote <= 1, "{wrote}");

    // Commits that are to be durable wait for ever from now on.
    let mut admin = server.client();
    admin.run("ALTER SYSTEM SET synchronous_standby_names = 'nobody'");
    admin.run("SELECT pg_reload_conf()");
    let set = "SELECT current_setting('synchronous_standby_names') = 'nobody'";
    eventually("it is set", async || server.one::<bool>(set)).await;
    let check = locks.check().await.unwrap();
    let warnings = check.servers[0].warnings.join("\n");
    assert!(warnings.contains("synchronous_standby_names"), "{check}");
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
    server.run("ANALYZE lockstream.lock, lockstream.guard, lockstream.ticket, lockstream.holder, lockstream.notice");

    let seen = |scans: &str| -> i64 {
        let sql = format!(
            "SELECT sum({scans})::bigint FROM pg_stat_user_tables WHERE relname IN ('lock', 'guard', 'ticket', 'holder', 'notice')"
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
