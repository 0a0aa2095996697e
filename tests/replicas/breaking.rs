use tokio::time::timeout;

use crate::flock::{Flock, builder, told};
use crate::support::{Proxy, wait_until};
use crate::{BOUND, LONG, ms};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_caller_that_is_dropped_meanwhile_leaves_nothing() {
    let flock = Flock::start().await;
    let (holding, locks) = (
        flock.registry(0, ms(100)).await,
        flock.registry(2, ms(500)).await,
    );
    flock.replicas[0].stop();
    // Of what it won by itself.
    let caller = tokio::spawn(locks.obtain("k").lease());
    wait_until("the replicas are asked for it", BOUND, || {
        flock.asker().is_some() && flock.primary.exists("lock:k")
    })
    .await;
    caller.abort();
    flock.wait_until_empty().await;

    // Of what it was granted.
    let lease = holding.obtain("k").lease().await.unwrap();
    let caller = tokio::spawn(locks.obtain("k").lease());
    wait_until("it stands in the queue", BOUND, || {
        flock.primary.exists("{lock:k}:~queue2")
    })
    .await;
    lease.release().await.unwrap();
    flock.wait_until_asked().await;
    caller.abort();
    flock.wait_until_empty().await;
    wait_until("nothing is in use", BOUND, || locks.in_use() == 0).await;
    flock.replicas[0].cont();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_registry_that_is_shut_down_meanwhile_leaves_nothing() {
    let flock = Flock::start().await;
    let locks = flock.registry(2, ms(500)).await;
    flock.replicas[0].stop();
    let caller = tokio::spawn(locks.obtain("k").lease());
    flock.wait_until_asked().await;
    timeout(BOUND, locks.shutdown()).await.expect("it ends");
    assert!(caller.await.unwrap().is_err());
    flock.wait_until_empty().await;
    drop(locks);
    wait_until("both its connections are closed", BOUND, || {
        flock.channels_and_askers() == 0
    })
    .await;
    flock.replicas[0].cont();
}

/// Only the connection that asks: the next one asks again, while there is time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_connection_that_asks_is_killed_meanwhile() {
    let flock = Flock::start().await;
    let locks = flock.registry(2, LONG / 2).await;
    flock.replicas[0].stop();
    let caller = tokio::spawn(locks.obtain("k").lease());
    for _ in 0..3 {
        flock.wait_until_asked().await;
        let asker = flock.asker().unwrap();
        let killed: u64 = flock
            .primary
            .ask(&["CLIENT", "KILL", "ID", &asker.to_string()]);
        assert_eq!(killed, 1);
        wait_until("another asks", BOUND, || {
            flock.asker().is_some_and(|next| next != asker)
        })
        .await;
    }
    let owner = flock.primary.get("lock:k");
    flock.replicas[0].cont();
    let lease = timeout(BOUND, caller).await.expect("it is confirmed");
    let lease = lease.unwrap().unwrap();
    assert_eq!(flock.primary.get("lock:k"), owner, "it was not given back");
    lease.release().await.unwrap();

    // While nobody asks.
    flock.primary.client_kill_all();
    let lease = timeout(BOUND, locks.obtain("k").lease()).await.unwrap();
    lease.unwrap().release().await.unwrap();
    flock.wait_until_empty().await;
}

/// A connection that asks and was made before the session's may lead to the server of that time: it would be told there
/// that the lock is nobody's, and the first after each reconnect released.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_connection_that_asks_is_made_again_after_the_sessions() {
    let flock = Flock::start().await;
    let locks = flock.registry(2, ms(5_000)).await;
    let lock = locks.obtain("k");
    let confirmed = async || {
        let lease = timeout(BOUND, lock.lease()).await;
        lease.expect("it is had").unwrap().release().await.unwrap();
        flock.last_asker()
    };
    // A session that nobody needs does not connect again.
    let held = locks.obtain("held").lease().await.unwrap();
    let asker = confirmed().await;
    assert_eq!(confirmed().await, asker, "it stays while all goes well");
    let clients = flock.primary.clients();
    let mut session = clients.iter().filter(|it| it.field("sub") == "1");
    let session = session.next().expect("it is told of grants").id();
    let killed: u64 = flock
        .primary
        .ask(&["CLIENT", "KILL", "ID", &session.to_string()]);
    assert_eq!(killed, 1);
    wait_until("there is another", BOUND, || {
        let clients = flock.primary.clients();
        let mut sessions = clients.iter().filter(|it| it.field("sub") == "1");
        sessions.any(|it| it.id() != session)
    })
    .await;
    assert_ne!(confirmed().await, asker);
    flock.wait_until_gone(asker).await;
    held.release().await.unwrap();
    flock.wait_until_empty().await;
}

/// Perhaps it leads to another server than the session's: the next connection need not.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_that_knows_nothing_of_ours_is_not_kept() {
    let flock = Flock::start().await;
    let locks = flock.registry(2, LONG / 2).await;
    flock.replicas[0].stop();
    let first = tokio::spawn(locks.obtain("first").lease());
    flock.wait_until_asked().await;
    let asker = flock.last_asker();
    let gone = tokio::spawn(locks.obtain("k").acquire_once());
    wait_until("it is won", BOUND, || flock.primary.exists("lock:k")).await;
    flock.primary.del("lock:k");
    flock.replicas[0].cont();
    // A round in which something is ours says that it is the right one.
    let first = timeout(BOUND, first).await.unwrap().unwrap().unwrap();
    let error = told(timeout(BOUND, gone).await.expect("told at once").unwrap());
    assert!(error.to_string().contains("it was gone before"), "{error}");
    flock.wait_until_gone(asker).await;
    let lease = timeout(BOUND, locks.obtain("k").lease()).await;
    lease.expect("by another").unwrap().release().await.unwrap();
    first.release().await.unwrap();
    flock.wait_until_empty().await;
}

/// The session's connection and the one that asks.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_connections_are_cut_meanwhile() {
    let flock = Flock::start().await;
    let proxy = Proxy::to(&flock.primary);
    let locks = builder(&proxy.url(), 2, LONG / 2).await.build().unwrap();
    flock.replicas[0].stop();
    let caller = tokio::spawn(locks.obtain("k").lease());
    for _ in 0..3 {
        flock.wait_until_asked().await;
        let asker = flock.asker();
        proxy.cut();
        wait_until("another asks", BOUND, || {
            let next = flock.asker();
            next.is_some() && next != asker
        })
        .await;
    }
    flock.replicas[0].cont();
    let lease = timeout(BOUND, caller).await.expect("it is confirmed");
    let lease = lease.unwrap().unwrap();
    let owner = flock.primary.get("lock:k");
    assert_eq!(flock.owners("k"), [owner.clone(), owner]);
    lease.release().await.unwrap();
    flock.wait_until_empty().await;
}

/// What was won is forgotten with the server's data, and won again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_server_is_started_again_meanwhile() {
    let mut flock = Flock::start().await;
    let locks = flock.registry(2, LONG / 2).await;
    flock.replicas[0].stop();
    let caller = tokio::spawn(locks.obtain("k").lease());
    flock.wait_until_asked().await;
    flock.primary.restart();
    flock.replicas[0].cont();
    // Less than the replicas have.
    let lease = timeout(LONG / 2 - ms(5_000), caller).await;
    let lease = lease.expect("it is confirmed").unwrap().unwrap();
    let owner = flock.primary.get("lock:k");
    assert!(owner.is_some());
    assert_eq!(flock.owners("k"), [owner.clone(), owner]);
    lease.release().await.unwrap();
    flock.wait_until_empty().await;
}

/// The runtime on which the replicas were asked ends: the next one asks them.
#[test]
fn a_runtime_ends_meanwhile() {
    let runtime = || tokio::runtime::Runtime::new().unwrap();
    let here = runtime();
    let (flock, locks) = here.block_on(async {
        let flock = Flock::start().await;
        let locks = flock.registry(2, ms(2_000)).await;
        (flock, locks)
    });
    flock.replicas[0].stop();
    here.spawn(locks.obtain("k").lease());
    here.block_on(flock.wait_until_asked());
    here.shutdown_background();
    flock.replicas[0].cont();
    runtime().block_on(async {
        let lease = timeout(BOUND, locks.obtain("k").lease()).await;
        let lease = lease.expect("it is not kept for nobody").unwrap();
        assert!(lease.is_valid());
        lease.release().await.unwrap();
        flock.wait_until_empty().await;
    });
}
