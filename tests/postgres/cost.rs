//! What waiting costs, and what a lock.

use std::time::Duration;

use crate::support::{PgServer, Proxy};
use crate::{eventually, ms, registry};

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

/// A lock is two transactions, a hand-over is two and a notice, and callers that come together share theirs.
#[tokio::test]
async fn a_lock_costs_two_transactions() {
    let server = PgServer::start();
    let locks = registry(&server.url()).await;
    locks
        .obtain("k")
        .lease()
        .await
        .unwrap()
        .release()
        .await
        .unwrap();
    let calls = || -> i64 {
        server.run("SELECT pg_stat_force_next_flush()");
        server.one("SELECT calls FROM pg_stat_user_functions WHERE funcname = 'ops_1'")
    };
    server.run("ALTER SYSTEM SET track_functions = 'all'");
    server.run("SELECT pg_reload_conf()");
    let step = async |turns: u32| {
        for _ in 0..turns {
            locks
                .obtain("k")
                .lease()
                .await
                .unwrap()
                .release()
                .await
                .unwrap();
        }
        // What a server process has counted, it tells when it is idle for a moment.
        tokio::time::sleep(ms(1500)).await;
        locks
            .obtain("k")
            .lease()
            .await
            .unwrap()
            .release()
            .await
            .unwrap();
        tokio::time::sleep(ms(1500)).await;
    };
    step(10).await;
    let before = calls();
    step(50).await;
    assert_eq!(calls() - before, 2 * 51);
    let before = calls();
    let turn = async |n: usize| {
        locks
            .obtain(format!("k{n}"))
            .lease()
            .await
            .unwrap()
            .release()
            .await
            .unwrap()
    };
    futures::future::join_all((0..50).map(turn)).await;
    step(0).await;
    let shared = calls() - before;
    assert!(shared < 30, "{shared} for a hundred ops");
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
