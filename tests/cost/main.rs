//! What locks cost a server, counted on the server.
#![cfg(all(feature = "redis", feature = "test-util"))]

#[path = "../support/lock_server.rs"]
mod lock_server;
#[path = "../support/mod.rs"]
mod support;

use std::time::{Duration, Instant};

use futures::future::join_all;
use lock_server::{BOUND, LockServer, registry_builder, wait_for_queue};
use lockstream::{Lease, LockRegistry, LockRegistryBuilder};
use support::{PATIENCE, RedisServer, wait_until};
use tokio::time::{sleep, timeout};

/// Over so much time a waiter must not ask again, by design: a ttl of 30 s is far from over, and so are the 8 to 12 s of W2.
const SILENCE: Duration = Duration::from_secs(3);

async fn builder(server: &RedisServer) -> LockRegistryBuilder {
    registry_builder(&server.url()).await
}

async fn registry(server: &RedisServer) -> LockRegistry {
    let registry = builder(server).await.build().unwrap();
    warm(&registry).await;
    registry
}

/// Connects, and loads the scripts: what happens once is not counted.
async fn warm(registry: &LockRegistry) {
    registry
        .obtain("warm")
        .lease()
        .await
        .unwrap()
        .release()
        .await
        .unwrap();
}

/// Commands that come from outside; those inside the scripts are none of these.
fn calls(server: &RedisServer) -> u64 {
    let outside = [
        "evalsha",
        "eval",
        "script",
        "client",
        "ping",
        "subscribe",
        "hello",
    ];
    outside.into_iter().map(|name| server.calls(name)).sum()
}

#[tokio::test]
async fn a_hundred_waiters_cost_one_call() {
    let server = RedisServer::start();
    let (here, there) = (registry(&server).await, registry(&server).await);
    let held = there.obtain("k").lease().await.unwrap();
    server.reset_stats();
    let waiters: Vec<_> = (0..100)
        .map(|_| tokio::spawn(here.obtain("k").lease()))
        .collect();
    wait_for_queue(&server, 1).await;
    sleep(SILENCE).await;
    assert_eq!(calls(&server), 1, "{:?}", server.all_calls());
    assert_eq!(server.queue(), 1);
    held.release().await.unwrap();
    let begin = Instant::now();
    let mut last = 0;
    for waiter in waiters {
        let lease = timeout(BOUND, waiter)
            .await
            .expect("it is served")
            .unwrap()
            .unwrap();
        assert!(lease.token().get() > last, "not in order of arrival");
        last = lease.token().get();
        lease.release().await.unwrap();
    }
    assert!(begin.elapsed() < BOUND);
    // A tenure is 17 turns at most, and 20 ms; each costs a call to yield, and the whole one to enter.
    let most = 2 + 100;
    assert!(calls(&server) <= most, "{} calls", calls(&server));
}

#[tokio::test]
async fn an_uncontended_pair_costs_two_calls() {
    let server = RedisServer::start();
    let here = registry(&server).await;
    server.reset_stats();
    for _ in 0..50 {
        here.obtain("k")
            .lease()
            .await
            .unwrap()
            .release()
            .await
            .unwrap();
    }
    assert_eq!(calls(&server), 100, "{:?}", server.all_calls());
}

/// Two processes take turns, with no passes: each turn is an enter and a release, and the grant is pushed.
#[tokio::test]
async fn a_contended_acquisition_costs_two_calls() {
    const TURNS: usize = 60;
    let server = RedisServer::start();
    let registries = [
        builder(&server).await.local_passes(0).build().unwrap(),
        builder(&server).await.local_passes(0).build().unwrap(),
        builder(&server).await.local_passes(0).build().unwrap(),
    ];
    for registry in &registries {
        warm(registry).await;
    }
    let held = registries[0].obtain("k").lease().await.unwrap();
    let mut queue: Vec<_> = Vec::new();
    for (at, registry) in registries.iter().enumerate() {
        if at > 0 {
            queue.push(tokio::spawn(registry.obtain("k").lease()));
            wait_for_queue(&server, at as u64).await;
        }
    }
    server.reset_stats();
    let (mut lease, mut at): (Lease, usize) = (held, 0);
    for _ in 0..TURNS {
        // The holder goes to the end of the queue before the next comes up.
        lease.release().await.unwrap();
        let next = queue.remove(0);
        lease = timeout(BOUND, next)
            .await
            .expect("the grant is pushed")
            .unwrap()
            .unwrap();
        queue.push(tokio::spawn(registries[at].obtain("k").lease()));
        wait_for_queue(&server, 2).await;
        at = (at + 1) % registries.len();
    }
    assert_eq!(calls(&server), 2 * TURNS as u64, "{:?}", server.all_calls());
}

#[tokio::test]
async fn a_thousand_waiters_share_a_connection() {
    let server = RedisServer::start();
    let (here, there) = (registry(&server).await, registry(&server).await);
    let held = there.obtain("k").lease().await.unwrap();
    // A process passes its lease on among its own callers for 20 ms: on a slow machine that is to few of them.
    let waiters = join_all((0..1_000).map(|_| {
        let lock = here.obtain("k").wait(2 * PATIENCE);
        async move {
            let lease = lock.lease().await.unwrap();
            let (token, had) = (lease.token(), Instant::now());
            lease.release().await.unwrap();
            (token, had)
        }
    }));
    let waiters = tokio::spawn(waiters);
    wait_for_queue(&server, 1).await;
    assert_eq!(server.clients().len(), 2);
    held.release().await.unwrap();
    let begin = Instant::now();
    let served = timeout(2 * PATIENCE, waiters)
        .await
        .expect("all are served")
        .unwrap();
    let (tokens, mut times): (Vec<_>, Vec<_>) = served.into_iter().unzip();
    assert!(tokens.is_sorted());
    // Nobody had to ask after 8 s (W2).
    times.insert(0, begin);
    let mut pauses = times.windows(2).map(|two| two[1].duration_since(two[0]));
    assert!(pauses.all(|pause| pause < BOUND), "{times:?}");
    wait_until("nothing is left", BOUND, || {
        server.keys("*") == ["lock:~fence"]
    })
    .await;
    assert_eq!(here.in_use(), 0);
}

/// An idle registry sends nothing; one that holds a fixed lease does not either.
#[tokio::test]
async fn an_idle_registry_sends_nothing() {
    let server = RedisServer::start();
    let (idle, holds) = (registry(&server).await, registry(&server).await);
    let lock = holds.obtain("k").ttl(Duration::from_secs(600));
    let lease = lock.lease().await.unwrap();
    server.reset_stats();
    sleep(SILENCE).await;
    assert_eq!(server.all_calls().len(), 0, "{:?}", server.all_calls());
    assert!(lease.is_valid());
    lease.release().await.unwrap();
    drop(idle);
}

/// What goes on in one moment goes in few calls, whatever the number of keys.
#[tokio::test]
async fn many_keys_at_once_share_calls() {
    let server = RedisServer::start();
    let here = registry(&server).await;
    server.reset_stats();
    let leases = join_all((0..256).map(|key| here.obtain(format!("k{key}")).lease())).await;
    let acquired = calls(&server);
    join_all(leases.into_iter().map(|lease| lease.unwrap().release())).await;
    assert!(
        acquired <= 256 / 8 && calls(&server) <= 2 * 256 / 8,
        "{:?}",
        server.all_calls()
    );
    assert_eq!(server.keys("*"), ["lock:~fence"]);
}
