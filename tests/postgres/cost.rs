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
