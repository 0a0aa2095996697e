//! A waiter asks as soon as one of the servers says that the key is free.

use std::sync::Arc;
use std::time::{Duration, Instant};

use lockstream::store::{QuorumStore, RedisStore};
use lockstream::{Lease, LockRegistry, LockRegistryBuilder, Repeat};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{sleep, timeout};

use super::support::{RedisServer, on_a_steady_machine, wait_until};
use super::{BOUND, builder, ms, nothing_left, servers, settle};

/// Nobody asks by itself while a test looks.
const PAUSE: Duration = Duration::from_secs(5);

const LISTENERS: &str = "{lock:k}:~listen1";

/// What a busy machine may take for what takes a millisecond or two on an idle one. Who asks by itself has a pause first.
const AT_ONCE: Duration = ms(4000);

async fn registry(servers: &[RedisServer]) -> LockRegistry {
    patient(servers, builder(servers).repeat(Repeat::fixed(PAUSE))).await
}

/// A patient registry that is connected to all servers: what waits for a connection is not sent any more once the
/// others have refused, so a waiter would not listen there.
async fn patient(servers: &[RedisServer], builder: LockRegistryBuilder) -> LockRegistry {
    let registry = builder.wait(Duration::from_secs(100)).build().unwrap();
    let held = holds(servers, &registry, "another").await;
    held.release().await.unwrap();
    wait_until("all have let it go", BOUND, || {
        servers.iter().all(|server| !server.exists("lock:another"))
    })
    .await;
    registry
}

/// How many listen on each of them.
fn listening(servers: &[RedisServer]) -> Vec<u64> {
    let listening = |server: &RedisServer| server.ask(&["ZCARD", LISTENERS]);
    servers.iter().map(listening).collect()
}

/// A lease that all have voted for: a majority is enough to have it, and whoever asks before the last vote has that one
/// for a moment, and does not listen there.
async fn holds(servers: &[RedisServer], registry: &LockRegistry, key: &str) -> Lease {
    let held = registry.obtain(key).lease().await.unwrap();
    let lock = format!("lock:{key}");
    wait_until("all have voted", BOUND, || {
        servers.iter().all(|server| server.exists(&lock))
    })
    .await;
    held
}

async fn waits(servers: &[RedisServer], registry: &LockRegistry) -> JoinHandle<Lease> {
    let before = listening(servers);
    let lock = registry.obtain("k");
    let waiter = tokio::spawn(async move { lock.lease().await.unwrap() });
    // The answers are on their way, before whatever the servers may say later.
    wait_until("it listens everywhere", BOUND, || {
        let mut both = listening(servers).into_iter().zip(&before);
        both.all(|(now, before)| now > *before)
    })
    .await;
    waiter
}

/// The name is in the channel of its notices.
#[tokio::test]
async fn a_waiter_with_a_name_is_told() {
    on_a_steady_machine(async || {
        let servers = servers(3);
        let named = || {
            builder(&servers)
                .repeat(Repeat::fixed(PAUSE))
                .name("billing-7")
        };
        let (here, there) = (
            patient(&servers, named()).await,
            patient(&servers, named()).await,
        );
        let held = holds(&servers, &here, "k").await;
        let seen = there.obtain("k").inspect().await.unwrap();
        assert!(seen.owner().unwrap().starts_with("billing-7~"));
        let waiter = waits(&servers, &there).await;
        let begin = Instant::now();
        held.release().await.unwrap();
        let next = waiter.await.unwrap();
        assert!(begin.elapsed() < AT_ONCE, "{:?}", begin.elapsed());
        next.release().await.unwrap();
        nothing_left(&servers, &[&here, &there]).await;
    })
    .await;
}

#[tokio::test]
async fn a_waiter_has_the_lock_as_soon_as_it_is_released() {
    on_a_steady_machine(async || {
        for count in [1, 3, 5] {
            let servers = servers(count);
            let (here, there) = (registry(&servers).await, registry(&servers).await);
            let held = holds(&servers, &here, "k").await;
            let waiter = waits(&servers, &there).await;
            let begin = Instant::now();
            held.release().await.unwrap();
            let next = timeout(BOUND, waiter).await.unwrap().unwrap();
            let took = begin.elapsed();
            println!("{count} servers: {took:?}");
            assert!(took < AT_ONCE, "{took:?} of {count}");
            next.release().await.unwrap();
            nothing_left(&servers, &[&here, &there]).await;
        }
    })
    .await;
}

/// It is told once, and once is not always heard.
#[tokio::test]
async fn a_notice_that_is_lost_costs_a_pause() {
    let servers = servers(3);
    let (here, there) = (registry(&servers).await, registry(&servers).await);
    let held = holds(&servers, &here, "k").await;
    let waiter = waits(&servers, &there).await;
    for server in &servers {
        server.del(LISTENERS);
    }
    let begin = Instant::now();
    held.release().await.unwrap();
    let next = timeout(2 * PAUSE, waiter).await.unwrap().unwrap();
    assert!(begin.elapsed() > PAUSE / 2, "{:?}", begin.elapsed());
    next.release().await.unwrap();
    nothing_left(&servers, &[&here, &there]).await;
}

/// Twenty in four registries. A split vote may cost one pause, but not two. The pauses are longer here than elsewhere: on a
/// slow machine all that is done between them takes its time, too.
#[tokio::test]
async fn all_of_many_waiters_are_served() {
    const LONG_PAUSE: Duration = ms(6500);
    on_a_steady_machine(async || {
        let servers = servers(3);
        let mut registries = Vec::new();
        for _ in 0..4 {
            let builder = builder(&servers).repeat(Repeat::fixed(LONG_PAUSE));
            registries.push(patient(&servers, builder).await);
        }
        let held = holds(&servers, &registries[0], "k").await;
        let mut waiters = JoinSet::new();
        for (at, registry) in registries.iter().cycle().take(20).enumerate() {
            let lock = registry.obtain("k");
            waiters.spawn(async move {
                let lease = lock.lease().await.unwrap();
                sleep(ms(5)).await;
                lease.release().await.unwrap();
                at
            });
        }
        // Those in the registry of the holder wait in its own queue.
        wait_until("all wait", BOUND, || listening(&servers) == [3; 3]).await;
        let begin = Instant::now();
        held.release().await.unwrap();
        while let Some(waiter) = timeout(4 * LONG_PAUSE, waiters.join_next()).await.unwrap() {
            waiter.unwrap();
        }
        assert!(begin.elapsed() < 2 * LONG_PAUSE, "{:?}", begin.elapsed());
        nothing_left(&servers, &registries.iter().collect::<Vec<_>>()).await;
    })
    .await;
}

/// Waiting costs nothing between two questions, however many wait.
#[tokio::test]
async fn waiting_sends_nothing() {
    let servers = servers(3);
    let here = registry(&servers).await;
    let held = holds(&servers, &here, "k").await;
    let slow = builder(&servers).repeat(Repeat::fixed(Duration::from_secs(60)));
    let there = patient(&servers, slow).await;
    let mut waiters = vec![waits(&servers, &there).await];
    for _ in 0..100 {
        let lock = there.obtain("k");
        waiters.push(tokio::spawn(async move { lock.lease().await.unwrap() }));
    }
    // The holder's last vote, and the raising of its fence, may still be on their way.
    sleep(ms(300)).await;
    let calls = || servers.iter().map(|it| it.calls("evalsha")).sum::<u64>();
    // Nothing comes, for as long as one that repeats would ask some ten times. If the machine stood still, what was on
    // its way comes in the first of these seconds.
    let mut came = Vec::new();
    while came.last() != Some(&0) {
        assert!(came.len() < 2, "calls in a second each: {came:?}");
        let before = calls();
        sleep(ms(1000)).await;
        came.push(calls() - before);
    }
    assert_eq!(listening(&servers), [1; 3]);
    for waiter in &waiters {
        waiter.abort();
    }
    wait_until("nobody listens", BOUND, || listening(&servers) == [0; 3]).await;
    held.release().await.unwrap();
    nothing_left(&servers, &[&here, &there]).await;
}

/// One whose user has no right to channels, of three; and all of them.
#[tokio::test]
async fn servers_that_cannot_tell() {
    on_a_steady_machine(async || {
        for mute in [1, 3] {
            let user = "user x on >p ~* +@all resetchannels";
            let server = |at| {
                let builder = RedisServer::builder();
                let builder = if at < mute {
                    builder.config(user)
                } else {
                    builder
                };
                builder.start()
            };
            let servers: Vec<_> = (0..3).map(server).collect();
            let registry = || {
                let url = |(at, server): (usize, &RedisServer)| match at < mute {
                    true => server.url_with("x", "p", 0),
                    false => server.url(),
                };
                let urls = servers.iter().enumerate().map(url);
                let nodes = urls.map(|url| RedisStore::connect_lazy(url).unwrap());
                let store = QuorumStore::new(nodes).unwrap().quarantine(None);
                let builder = settle(store).repeat(Repeat::fixed(PAUSE));
                patient(&servers, builder)
            };
            let (here, there) = (registry().await, registry().await);
            let held = holds(&servers, &here, "k").await;
            let calls = || servers.iter().map(|it| it.calls("evalsha"));
            let before: Vec<_> = calls().collect();
            let lock = there.obtain("k");
            let waiter = tokio::spawn(async move { lock.lease().await.unwrap() });
            wait_until("it has asked", BOUND, || {
                calls().zip(&before).all(|(now, before)| now > *before)
            })
            .await;
            // Nothing shows that it was answered where it cannot stand.
            sleep(ms(300)).await;
            // Nobody stands where it cannot be told.
            let listens = |at| u64::from(at >= mute);
            wait_until("it listens where it can", BOUND, || {
                listening(&servers) == [listens(0), listens(1), listens(2)]
            })
            .await;
            let begin = Instant::now();
            held.release().await.unwrap();
            let next = timeout(BOUND, waiter).await.unwrap().unwrap();
            let took = begin.elapsed();
            if mute == 3 {
                assert!(took > ms(500) && took < 2 * PAUSE, "{took:?}");
            } else {
                assert!(took < AT_ONCE, "{took:?}");
            }
            next.release().await.unwrap();
            nothing_left(&servers, &[&here, &there]).await;
        }
    })
    .await;
}

/// The first in the queue was killed, and nobody waits for it.
#[tokio::test]
async fn one_whose_connections_are_gone_is_passed_by() {
    on_a_steady_machine(async || {
        let servers = Arc::new(servers(3));
        let (here, there) = (registry(&servers).await, registry(&servers).await);
        let held = holds(&servers, &here, "k").await;
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let theirs = servers.clone();
        let gone = runtime.spawn(async move { registry(&theirs).await });
        let gone = gone.await.unwrap();
        let lock = gone.obtain("k");
        runtime.spawn(async move { lock.lease().await.unwrap() });
        wait_until("it listens", BOUND, || listening(&servers) == [1; 3]).await;
        let waiter = waits(&servers, &there).await;
        wait_until("both listen", BOUND, || listening(&servers) == [2; 3]).await;
        // As a crash does: its tasks and its connections end, and it says nothing.
        std::mem::forget(gone);
        runtime.shutdown_background();
        wait_until("its connections are gone", BOUND, || {
            servers.iter().all(|server| server.channels().len() == 2)
        })
        .await;
        let begin = Instant::now();
        held.release().await.unwrap();
        let next = timeout(BOUND, waiter).await.unwrap().unwrap();
        assert!(begin.elapsed() < AT_ONCE, "{:?}", begin.elapsed());
        next.release().await.unwrap();
        nothing_left(&servers, &[&here, &there]).await;
    })
    .await;
}
