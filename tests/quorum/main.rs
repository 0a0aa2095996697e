//! Quorums of real servers, of which some are killed, stopped, emptied.
#![cfg(all(feature = "redis", feature = "test-util"))]

mod faults;
#[path = "../support/hearing.rs"]
mod hearing;
mod notices;
mod same_server;
#[path = "../support/mod.rs"]
mod support;

use std::cell::Cell;
use std::time::{Duration, Instant};

use futures::StreamExt;
use lockstream::store::{LockStore, QuorumStore, RedisStore};
use lockstream::{FutureLockExt, LockError, LockRegistry, LockRegistryBuilder, OnFinish};
use support::{PATIENCE, RedisServer, chain, ms, on_a_steady_machine, wait_until};
use tokio::time::timeout;

/// For what takes a reconnect and some repeats, also on a machine that is ten times as slow; far below the ttl and the wait
/// of [`settle`].
const BOUND: Duration = Duration::from_secs(30);

fn servers(count: usize) -> Vec<RedisServer> {
    std::iter::repeat_with(RedisServer::start)
        .take(count)
        .collect()
}

/// Servers of a test have just been started, and forget nothing.
fn store(servers: &[RedisServer]) -> QuorumStore {
    let nodes = servers
        .iter()
        .map(|server| RedisStore::connect_lazy(server.url()).unwrap());
    QuorumStore::new(nodes).unwrap().quarantine(None)
}

fn builder(servers: &[RedisServer]) -> LockRegistryBuilder {
    settle(store(servers))
}

/// A registry to be. What comes within [`BOUND`] comes by no lease's end, unless a test says how long its leases last.
fn settle(store: impl LockStore) -> LockRegistryBuilder {
    LockRegistry::builder(store)
        .ttl(4 * BOUND)
        .wait(PATIENCE)
        .response_timeout(ms(5000))
}

/// The values of the lock, server by server.
fn values(servers: &[RedisServer]) -> Vec<Option<String>> {
    servers.iter().map(|server| server.get("lock:k")).collect()
}

/// The servers keep the fence at most, and the registries nothing.
async fn nothing_left(servers: &[RedisServer], registries: &[&LockRegistry]) {
    wait_until("nothing is in use", BOUND, || {
        registries.iter().all(|registry| registry.in_use() == 0)
    })
    .await;
    for server in servers {
        wait_until("nothing is left", BOUND, || {
            server.keys("*").iter().all(|key| key == "lock:~fence")
        })
        .await;
    }
}

/// Its nodes may differ, and each of them can be scanned by itself.
#[tokio::test]
async fn a_quorum_is_not_scanned_and_its_nodes_are() {
    let servers = servers(3);
    let locks = builder(&servers).build().unwrap();
    let lease = locks.obtain("k").lease().await.unwrap();
    let mut scan = locks.scan("");
    let error = scan.next().await.unwrap().unwrap_err();
    let told = chain(&error);
    assert!(told.contains("scan one of its nodes"), "{told}");
    assert!(!error.is_retryable() && scan.next().await.is_none());
    let mut found = 0;
    for server in &servers {
        let url = format!("{}?response_timeout=10", server.url());
        let node = LockRegistry::connect(url).await.unwrap();
        let mut scan = node.scan("");
        while let Some(lock) = scan.next().await {
            assert_eq!(&*lock.unwrap().key, "k");
            found += 1;
        }
    }
    assert!(found >= 2, "a majority has it: {found}");
    lease.release().await.unwrap();
}

/// Each node is asked for every renewal, by whoever runs the tasks.
#[tokio::test]
async fn a_lease_outlasts_a_runtime_that_is_busy() {
    on_a_steady_machine(async || {
        let servers = servers(3);
        let locks = builder(&servers).ttl(ms(2_000)).build().unwrap();
        let lease = locks.obtain("k").lease().await.unwrap();
        std::thread::sleep(ms(3 * 2_000));
        assert!(lease.is_valid());
        lease.release().await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn shared_locks_and_permits_are_refused() {
    let servers = servers(3);
    let locks = builder(&servers).build().unwrap();
    for (lock, setting) in [
        (locks.obtain("k").shared(), "shared"),
        (locks.obtain("k").permits(4), "permits"),
    ] {
        let error = lock.acquire_once().await.unwrap_err();
        assert!(
            matches!(&error, LockError::InvalidSetting { setting: told, .. } if *told == setting),
            "{error:?}"
        );
        assert!(
            error
                .to_string()
                .contains("a quorum has exclusive locks only"),
            "{error}"
        );
    }
    // Several keys are exclusive locks.
    let both = locks.obtain_all(["a", "b"]).lease().await.unwrap();
    both.release().await.unwrap();
    assert!(values(&servers).iter().all(Option::is_none));
}

/// Whoever mends one node is not to find out about the next only then. The third may not have been heard of yet.
#[tokio::test]
async fn nodes_that_are_away_are_all_told() {
    let urls = [1, 2, 3].map(|port| format!("redis://127.0.0.1:{port}/"));
    let nodes = urls.map(|url| RedisStore::connect_lazy(url).unwrap());
    let locks = LockRegistry::builder(QuorumStore::new(nodes).unwrap())
        .build()
        .unwrap();
    let error = locks.obtain("k").acquire_once().await.unwrap_err();
    let error = chain(&error);
    let addresses = [1, 2, 3].map(|port| format!("127.0.0.1:{port}:"));
    let told = addresses.iter().filter(|it| error.contains(*it)).count();
    assert!(told >= 2, "{error}");
}

#[tokio::test]
async fn acquired_contended_released_dropped() {
    for count in [1, 3, 4, 5] {
        let servers = servers(count);
        let (here, there) = (
            builder(&servers).build().unwrap(),
            builder(&servers).build().unwrap(),
        );
        let lease = here.obtain("k").lease().await.unwrap();
        wait_until("all have voted", BOUND, || {
            let values = values(&servers);
            values[0].is_some() && values.iter().all(|value| *value == values[0])
        })
        .await;
        assert!(!there.obtain("k").acquire_once().await.unwrap());
        let waiter = tokio::spawn(there.obtain("k").lease());
        let seen = there.obtain("k").inspect().await.unwrap();
        assert!(format!("{seen:?}").contains(&values(&servers)[0].clone().unwrap()));
        lease.release().await.unwrap();
        let next = timeout(BOUND, waiter).await.unwrap().unwrap().unwrap();
        drop(next);
        let work = async { 7 }.with_lock(here.obtain("k"));
        assert_eq!(timeout(BOUND, work).await.unwrap().unwrap(), 7);
        nothing_left(&servers, &[&here, &there]).await;
    }
}

/// Of three nodes one may be away. What a minority has is nobody's lock.
#[tokio::test]
async fn verified_and_taken_by_force() {
    let mut servers = servers(3);
    let (here, there) = (
        builder(&servers).build().unwrap(),
        builder(&servers).build().unwrap(),
    );
    for is_one_away in [false, true] {
        let lease = here.obtain("k").lease().await.unwrap();
        lease.verify().await.unwrap();
        let owner = lease.owner().unwrap();
        let seen = there.obtain("k").inspect().await.unwrap();
        assert_eq!((seen.owner(), seen.taken), (Some(&*owner), 1));
        if is_one_away {
            servers[2].kill();
            lease.verify().await.unwrap();
        }
        let waiter = tokio::spawn(there.obtain("k").lease());
        wait_until("it listens", BOUND, || {
            let listeners =
                |server: &RedisServer| server.ask::<u64>(&["ZCARD", "{lock:k}:~listen1"]) == 1;
            servers[..2].iter().all(listeners)
        })
        .await;
        assert!(!there.force_release("k", "a:1").await.unwrap());
        assert!(there.force_release("k", &owner).await.unwrap());
        let next = timeout(BOUND, waiter).await.unwrap().unwrap().unwrap();
        assert!(lease.verify().await.is_err_and(|error| error.is_lost()));
        assert!(!lease.is_valid());
        next.verify().await.unwrap();
        assert!(!there.force_release("k", &owner).await.unwrap());
        next.release().await.unwrap();
    }
    let lease = here.obtain("k").lease().await.unwrap();
    servers[1].kill();
    let error = lease.verify().await.unwrap_err();
    assert!(matches!(error, LockError::Store { .. }), "{error:?}");
    let owner = lease.owner().expect("it is not known to be lost");
    let error = there.force_release("k", owner).await.unwrap_err();
    assert!(matches!(error, LockError::Store { .. }), "{error:?}");
    drop(lease);
}

#[tokio::test]
async fn tokens_grow_and_turns_do_not_overlap() {
    let servers = servers(3);
    let registries: Vec<_> = (0..4).map(|_| builder(&servers).build().unwrap()).collect();
    let last = std::sync::Arc::new(std::sync::Mutex::new(0));
    let mut tasks = Vec::new();
    for registry in registries.clone() {
        let last = last.clone();
        tasks.push(tokio::spawn(async move {
            for _ in 0..10 {
                let lease = registry.obtain("k").lease().await.unwrap();
                let token = lease.token().get();
                assert!(std::mem::replace(&mut *last.lock().unwrap(), token) < token);
                tokio::task::yield_now().await;
                assert_eq!(*last.lock().unwrap(), token, "two hold");
                lease.release().await.unwrap();
            }
        }));
    }
    for task in tasks {
        timeout(Duration::from_secs(60), task)
            .await
            .unwrap()
            .unwrap();
    }
    nothing_left(&servers, &registries.iter().collect::<Vec<_>>()).await;
}

/// Of three, the loss of one stops nothing, the loss of two everything, until one is back.
#[tokio::test]
async fn killed_and_started_again() {
    on_a_steady_machine(async || {
        let mut servers = servers(3);
        let (here, there) = (
            builder(&servers).build().unwrap(),
            builder(&servers).build().unwrap(),
        );
        let lease = here
            .obtain("k")
            .ttl(ms(3000))
            .renewal(lockstream::Renewal::watchdog());
        let lease = lease.lease().await.unwrap();
        servers[0].kill();
        let first = lease.deadline();
        wait_until("renewed by two", BOUND, || {
            lease.deadline() > first + ms(2000)
        })
        .await;
        let waiter = tokio::spawn(there.obtain("k").lease());
        lease.release().await.unwrap();
        let second = timeout(BOUND, waiter).await.unwrap().unwrap().unwrap();
        second.release().await.unwrap();

        servers[1].kill();
        let error = here.obtain("k").acquire_once().await.unwrap_err();
        assert!(matches!(error, LockError::Store { .. }), "{error}");
        assert!(chain(&error).contains("of 3 nodes"), "{error:?}");
        let waiter = tokio::spawn(there.obtain("k").lease());
        servers[0].restart();
        let third = timeout(BOUND, waiter).await.unwrap().unwrap().unwrap();
        third.release().await.unwrap();
        servers[1].restart();
        nothing_left(&servers, &[&here, &there]).await;
    })
    .await;
}

/// A server that does not answer holds nobody up, and gives its vote back when it goes on.
#[tokio::test]
async fn stopped_and_continued() {
    on_a_steady_machine(async || {
        let servers = servers(3);
        let patient = || builder(&servers).response_timeout(BOUND).build().unwrap();
        let (here, there) = (patient(), patient());
        // Connections stand before the server stops.
        for registry in [&here, &there] {
            let lease = registry.obtain("k").lease().await.unwrap();
            lease.release().await.unwrap();
            let looks = || servers.iter().all(|server| !server.clients().is_empty());
            wait_until("all are connected", BOUND, looks).await;
        }
        // A release returns once a majority has confirmed it. What is left on the third would vote against us.
        nothing_left(&servers, &[&here, &there]).await;
        servers[2].stop();
        let begin = Instant::now();
        let lease = here.obtain("k").lease().await.unwrap();
        assert!(!there.obtain("k").acquire_once().await.unwrap());
        lease.release().await.unwrap();
        let lease = there.obtain("k").lease().await.unwrap();
        // No answer of the third was waited for, and no connection to it.
        assert!(begin.elapsed() < ms(5000), "{:?}", begin.elapsed());
        lease.release().await.unwrap();
        // Also what it was asked before its connections were given up.
        servers[2].cont();
        nothing_left(&servers, &[&here, &there]).await;
    })
    .await;
}

/// Two of three elected the holder. One of them forgets, and it is kept out for as long as the
/// holder may believe in it: also for one who has never seen it before.
#[tokio::test]
async fn started_again_without_data_and_kept_out() {
    // Also if the machine stands still.
    let overlap = Cell::new(Duration::ZERO);
    on_a_steady_machine(async || {
        let mut servers = servers(3);
        let kept_out = Duration::from_secs(3);
        let quorum = |servers: &[RedisServer]| {
            let store = store(servers).quarantine(kept_out);
            settle(store).response_timeout(ms(500)).build().unwrap()
        };
        let here = quorum(&servers);
        let young = here.obtain("k").acquire_once().await.unwrap_err();
        assert!(chain(&young).contains("node restarted"), "{young:?}");
        servers[0].stop();
        let lock = here.obtain("k").ttl(kept_out);
        let lease = timeout(BOUND, lock.lease()).await.unwrap().unwrap();
        servers[0].cont();
        servers[1].restart();
        servers[2].stop();
        let there = quorum(&servers);
        let next = tokio::spawn(there.obtain("k").lease());
        // Its fixed lease ends by its own clock; until then nobody else has one.
        let (token, deadline) = (lease.token(), lease.deadline());
        let next = timeout(BOUND, next).await.unwrap().unwrap().unwrap();
        let both = deadline.saturating_duration_since(tokio::time::Instant::now());
        overlap.set(overlap.get().max(both));
        assert!(both.is_zero(), "two held for {both:?}");
        assert!(!lease.is_valid());
        assert!(next.token() > token);
        servers[2].cont();
        next.release().await.unwrap();
        nothing_left(&servers, &[&here, &there]).await;
    })
    .await;
    assert_eq!(overlap.get(), Duration::ZERO, "two held");
}

/// Servers that were just started may have been started again; unless it is told otherwise they have no vote for the
/// registry's ttl.
#[tokio::test]
async fn kept_out_for_the_registrys_ttl_unless_told_otherwise() {
    on_a_steady_machine(async || {
        let servers = servers(3);
        let nodes = || {
            servers
                .iter()
                .map(|it| RedisStore::connect_lazy(it.url()).unwrap())
        };
        // So long that two of the servers are younger when they are asked.
        let ttl = ms(4000);
        let by_default = QuorumStore::new(nodes()).unwrap();
        let here = settle(by_default).ttl(ttl).build().unwrap();
        let young = here.obtain("k").acquire_once().await.unwrap_err();
        let text = chain(&young);
        assert!(matches!(young, LockError::Store { .. }), "{text}");
        assert!(
            text.contains("no vote for 4s (`QuorumStore::quarantine`)"),
            "{text}"
        );
        let at_once = builder(&servers).build().unwrap();
        let lease = at_once.obtain("other").lease().await.unwrap();
        lease.release().await.unwrap();
        let lease = timeout(5 * ttl, here.obtain("k").lease())
            .await
            .unwrap()
            .unwrap();
        lease.release().await.unwrap();
        nothing_left(&servers, &[&here, &at_once]).await;
    })
    .await;
}

/// Without the right to INFO a registry cannot know that a server has just been started again: one that connected for the
/// first time believed each.
#[tokio::test]
async fn servers_of_unknown_age_have_no_vote_for_the_quarantine() {
    let servers = servers(3);
    let quarantine = ms(3000);
    let registry = |url: &dyn Fn(&RedisServer) -> String| {
        let nodes = servers
            .iter()
            .map(|it| RedisStore::connect_lazy(url(it)).unwrap());
        let store = QuorumStore::new(nodes).unwrap().quarantine(quarantine);
        settle(store).response_timeout(BOUND).build().unwrap()
    };
    let rights = support::least_rights();
    let rights: Vec<_> = rights.into_iter().filter(|it| *it != "+info").collect();
    for server in &servers {
        server.cmd(&[&["ACL", "SETUSER"], &rights[..]].concat());
    }
    // Who may know their age waits until they are old enough.
    let knows = registry(&RedisServer::url);
    let lease = timeout(BOUND, knows.obtain("k").lease()).await.unwrap();
    lease.unwrap().release().await.unwrap();
    let begin = Instant::now();
    let ignorant = registry(&|server| server.url_with("lockstream", "password", 0));
    let lock = ignorant.obtain("k");
    let told = chain(&lock.acquire_once().await.unwrap_err());
    assert!(told.contains("age of the node unknown"), "{told}");
    let lease = timeout(BOUND, lock.lease()).await.unwrap().unwrap();
    assert!(begin.elapsed() >= quarantine, "{:?}", begin.elapsed());
    lease.release().await.unwrap();
    nothing_left(&servers, &[&knows, &ignorant]).await;
}

/// A minority that forgets is given the lock again; a majority that does ends the lease.
#[tokio::test]
async fn emptied_while_held() {
    on_a_steady_machine(async || {
        let servers = servers(5);
        let registry = builder(&servers).build().unwrap();
        let lock = registry.obtain("k").ttl(ms(3000));
        let lease = lock
            .renewal(lockstream::Renewal::watchdog())
            .lease()
            .await
            .unwrap();
        let whole = || values(&servers).iter().all(Option::is_some);
        wait_until("all have voted", BOUND, whole).await;
        for server in &servers[..2] {
            server.flushall();
        }
        wait_until("all have it again", BOUND, whole).await;
        assert!(lease.is_valid());
        for server in &servers[..3] {
            server.flushall();
        }
        let lost = timeout(BOUND, lease.lost()).await.unwrap();
        assert!(lost.is_lost());
        nothing_left(&servers, &[&registry]).await;
    })
    .await;
}

/// A lock of redsync is extended on the servers that still have it. One that was started again without data has it no
/// more and never gets it back, so the second restart lost the lock, however long after the first (its pull request 149).
/// Here each of three is started again, one after the other, and the lease lasts.
#[tokio::test]
async fn each_started_again_without_data_in_its_turn() {
    on_a_steady_machine(async || {
        let mut servers = servers(3);
        let (here, there) = (
            builder(&servers).build().unwrap(),
            builder(&servers).build().unwrap(),
        );
        // A server takes a while to start on a busy machine, and renewals wait for answers.
        let lock = here.obtain("k").ttl(ms(9000));
        let lease = lock
            .renewal(lockstream::Renewal::watchdog())
            .lease()
            .await
            .unwrap();
        for at in 0..servers.len() {
            // A server that has lost its data votes for whoever asks first, and the other asks below.
            wait_until("all have voted for it", BOUND, || {
                let values = values(&servers);
                values[0].is_some() && values.iter().all(|value| *value == values[0])
            })
            .await;
            servers[at].cmd(&["SET", "witness", "1"]);
            servers[at].restart();
            assert!(!servers[at].exists("witness"), "it has lost its data");
            let before = lease.deadline();
            wait_until("renewed by the others", BOUND, || {
                lease.deadline() > before + ms(1000)
            })
            .await;
            // It may be connected to too few to know; that is no lease either.
            assert!(!there.obtain("k").acquire_once().await.unwrap_or(false));
        }
        assert!(lease.is_valid());
        lease.release().await.unwrap();
        nothing_left(&servers, &[&here, &there]).await;
    })
    .await;
}

#[tokio::test]
async fn extended_detached_adopted_and_left_to_run_out() {
    let mut servers = servers(3);
    let (here, there) = (
        builder(&servers).build().unwrap(),
        builder(&servers).build().unwrap(),
    );
    let lease = here.obtain("k").ttl(ms(60_000)).lease().await.unwrap();
    lease.extend(ms(90_000)).await.unwrap();
    assert!(
        servers
            .iter()
            .filter(|it| it.pttl("lock:k") > 60_000)
            .count()
            >= 2
    );
    let token = lease.token();
    let detached = lease.detach().unwrap();
    servers[0].kill();
    let adopted = timeout(BOUND, there.adopt(detached))
        .await
        .unwrap()
        .unwrap();
    assert!(adopted.token() > token);
    adopted.release().await.unwrap();
    servers[0].restart();

    let ttl = ms(3000);
    let lock = here.obtain("k").ttl(ttl).on_finish(OnFinish::LetExpire);
    let begin = Instant::now();
    async {}.with_lock(lock).await.unwrap();
    let next = there.obtain("k").lease().await.unwrap();
    assert!(begin.elapsed() >= ttl - ms(50), "{:?}", begin.elapsed());
    next.release().await.unwrap();
    nothing_left(&servers, &[&here, &there]).await;
}
