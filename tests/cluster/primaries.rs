//! Primaries that are killed, replaced and started again.

use std::net::{Ipv4Addr, TcpListener};
use std::time::Instant;

use futures::future::try_join_all;
use lockstream::store::RedisStore;
use lockstream::{Lease, LockRegistry};
use tokio::time::{sleep, timeout};

use crate::load::Load;
use crate::support::{ClientRow, Cluster, RedisServer, on_a_steady_machine, wait_until};
use crate::{BOUND, BY_GRANT, builder, ms, nothing_left, queued};

/// The replica that is promoted has the lock, and the waiter finds it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_primary_is_killed_while_a_lock_is_held_and_waited_for() {
    on_a_steady_machine(async || {
        let mut cluster = Cluster::start();
        let (here, there) = (
            builder(&cluster).build().unwrap(),
            builder(&cluster).build().unwrap(),
        );
        let home = cluster.home("lock:k");
        let elsewhere = (0..)
            .map(|number| format!("other:{number}"))
            .find(|key| cluster.home(&format!("lock:{key}")) != home)
            .unwrap();
        let lease = here.obtain("k").lease().await.unwrap();
        let token = lease.token();
        let waiter = tokio::spawn(there.obtain("k").lease());
        queued(&here, "k").await;
        let _: u64 = cluster.server(home).ask(&["WAIT", "1", "5000"]);
        wait_until("the replica has the lock", BOUND, || {
            let replica = cluster.server(home + 3);
            let _ = replica.try_cmd(&["READONLY"]);
            replica.exists("lock:k")
        })
        .await;

        cluster.let_replicas_stand_in(false);
        cluster.server_mut(home).kill();
        // All that is elsewhere goes on for as long as nobody stands in for it.
        let other = timeout(BOUND, here.obtain(&elsewhere).lease()).await;
        other.unwrap().unwrap().release().await.unwrap();
        cluster.let_replicas_stand_in(true);
        cluster.wait_for_promotion(home + 3);
        assert!(lease.is_valid());
        assert!(!waiter.is_finished());
        queued(&here, "k").await;
        lease.release().await.unwrap();
        let next = timeout(BOUND, waiter).await.unwrap().unwrap().unwrap();
        assert!(next.token() > token);
        next.release().await.unwrap();
        wait_until("nothing is left", BOUND, || {
            let keys = cluster.server(home + 3).keys("*");
            keys.iter().all(|key| key.contains(":~fence"))
        })
        .await;
    })
    .await;
}

/// So it has what several hold, and one key of a group whose other key is elsewhere.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_primary_is_killed_while_several_hold_and_wait() {
    let mut cluster = Cluster::start();
    cluster.let_replicas_stand_in(false);
    let (here, there) = (
        builder(&cluster).build().unwrap(),
        builder(&cluster).build().unwrap(),
    );
    let home = cluster.home("lock:{k}");
    // The later one of the group: those who wait for it wait at the primary that is killed.
    let mut keys = (0..).map(|number| format!("|other:{number}"));
    let elsewhere = keys.find(|key| cluster.home(&format!("lock:{key}")) != home);
    let elsewhere = elsewhere.expect("names lie everywhere");
    let permit = |locks: &LockRegistry| locks.obtain("{k}:permits").permits(2);
    let reader = |locks: &LockRegistry| locks.obtain("{k}:read").shared();
    let held = [
        reader(&here).lease().await.unwrap(),
        reader(&there).lease().await.unwrap(),
        permit(&here).lease().await.unwrap(),
        permit(&there).lease().await.unwrap(),
        here.obtain_all(["{k}:group", &elsewhere])
            .lease()
            .await
            .unwrap(),
    ];
    let waiters = [
        tokio::spawn(there.obtain("{k}:read").lease()),
        tokio::spawn(permit(&there).lease()),
        tokio::spawn(there.obtain_all([&elsewhere, "{k}:group"]).lease()),
    ];
    for key in ["{k}:read", "{k}:permits", "{k}:group"] {
        queued(&here, key).await;
    }
    let _: u64 = cluster.server(home).ask(&["WAIT", "1", "5000"]);
    cluster.server_mut(home).kill();
    cluster.let_replicas_stand_in(true);
    cluster.wait_for_promotion(home + 3);

    for key in ["{k}:read", "{k}:permits", "{k}:group"] {
        queued(&here, key).await;
    }
    let primary = cluster.server(home + 3);
    for key in ["lock:{k}:read", "lock:{k}:permits"] {
        assert_eq!(primary.ask::<u64>(&["ZCARD", key]), 2, "{key}");
    }
    assert!(held.iter().all(Lease::is_valid));
    assert!(waiters.iter().all(|waiter| !waiter.is_finished()));
    for lease in held {
        lease.release().await.unwrap();
    }
    for waiter in waiters {
        let lease = timeout(BOUND, waiter).await.unwrap().unwrap().unwrap();
        lease.release().await.unwrap();
    }
    wait_until("nothing is in use", BOUND, || {
        here.in_use() + there.in_use() == 0
    })
    .await;
    wait_until("nothing is left", BOUND, || {
        let keys = cluster.server(home + 3).keys("*");
        keys.iter().all(|key| key.contains(":~fence"))
    })
    .await;
}

/// Under load, too, nobody meets anybody once the promoted replica serves, and everybody gets on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_primary_hands_over_under_load() {
    let cluster = Cluster::start();
    cluster.let_replicas_stand_in(false);
    let registries = [
        builder(&cluster).build().unwrap(),
        builder(&cluster).build().unwrap(),
    ];
    let home = cluster.home("m");
    let load = Load::on(&[&registries[0], &registries[1]], &["{m}:1", "{m}:2"]);
    load.goes_on("locks are had").await;
    cluster.promote(home + 3);
    let stays = ["CONFIG", "SET", "cluster-replica-no-failover", "yes"];
    cluster.server(home).cmd(&stays);
    load.goes_on("locks are had again").await;
    load.end().await;
}

/// The registry had the map before the fail-over, and connects to the node only after it. The node answers the probe with
/// `MOVED`, which was told as a lasting fault: the caller was not to ask again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_was_demoted_before_it_was_needed_is_no_lasting_fault() {
    let cluster = Cluster::start();
    let registry = builder(&cluster).build().unwrap();
    let home = cluster.home("lock:k");
    let mut keys = (0..).map(|number| format!("other:{number}"));
    let elsewhere = keys.find(|key| cluster.home(&format!("lock:{key}")) != home);
    let lock = registry.obtain(elsewhere.expect("names lie everywhere"));
    lock.lease().await.unwrap().release().await.unwrap();
    cluster.promote(home + 3);
    let lease = timeout(BOUND, registry.obtain("k").lease()).await.unwrap();
    lease.unwrap().release().await.unwrap();
}

/// It may be that one alone, and first, that a caller names.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_is_stopped_is_not_waited_for() {
    on_a_steady_machine(async || {
        let cluster = Cluster::without_replicas();
        let stopped = cluster.home("lock:k");
        cluster.server(stopped).stop();
        let mut urls = cluster.urls();
        urls.rotate_left(stopped);
        let begin = Instant::now();
        let store = RedisStore::cluster(urls).await.unwrap();
        // It would be waited for until the time to connect is over: five seconds.
        assert!(begin.elapsed() < ms(4000), "{:?}", begin.elapsed());
        let registry = LockRegistry::builder(store).build().unwrap();
        let mut keys = (0..).map(|number| format!("other:{number}"));
        let key = keys.find(|key| cluster.home(&format!("lock:{key}")) != stopped);
        let lock = registry.obtain(key.expect("names lie everywhere"));
        lock.lease().await.unwrap().release().await.unwrap();
        cluster.server(stopped).cont();
        nothing_left(&cluster, &[&registry]).await;
    })
    .await;
}

/// A response time-out that is longer than the time to connect was the turn of the first node, which half of these ask.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_silent_node_leaves_time_for_the_next_however_long_an_answer_may_take() {
    on_a_steady_machine(async || {
        let cluster = Cluster::without_replicas();
        let silent = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let (place, node) = (silent.local_addr().unwrap(), cluster.server(0).port());
        let url = format!("redis+cluster://{place},127.0.0.1:{node}/");
        let attempts = (0..12).map(|number| {
            let store = RedisStore::builder(&*url).connect_timeout(ms(24_000));
            let registry = LockRegistry::builder(store.connect_lazy().unwrap());
            let registry = registry.response_timeout(3 * BOUND).build().unwrap();
            async move { registry.obtain(number.to_string()).acquire_once().await }
        });
        assert_eq!(try_join_all(attempts).await.unwrap(), [true; 12]);
    })
    .await;
}

/// Nobody is there at first; and later, after all of it was away.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_that_comes_back_is_found() {
    let mut cluster = Cluster::without_replicas();
    let registry = builder(&cluster).build().unwrap();
    let lock = registry.obtain("k");
    lock.lease().await.unwrap().release().await.unwrap();
    let held = registry.obtain("held").lease().await.unwrap();
    for index in 0..3 {
        cluster.server_mut(index).kill();
    }
    assert!(lock.acquire_once().await.is_err());
    let waiter = tokio::spawn(registry.obtain("k").lease());
    sleep(ms(300)).await;
    assert!(!waiter.is_finished());
    for index in 0..3 {
        cluster.server_mut(index).restart();
    }
    let lease = timeout(6 * BOUND, waiter).await.unwrap();
    lease.unwrap().unwrap().release().await.unwrap();
    // Nobody there has heard of it, as its holder is told before its time.
    assert!(timeout(BOUND, held.lost()).await.unwrap().is_lost());
    drop(held);
    nothing_left(&cluster, &[&registry]).await;
}

/// The connection on which somebody is told of grants.
fn listening(server: &RedisServer) -> Option<u64> {
    let clients = server.clients();
    let hears = |client: &&ClientRow| client.field("ssub") != "0";
    clients.iter().find(hears).map(ClientRow::id)
}

/// The end of either connection is seen when it comes, and waiters wait in the queue and are heard again at once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_that_is_killed_is_made_again_at_once() {
    on_a_steady_machine(async || {
        let cluster = Cluster::without_replicas();
        let (here, there) = (
            builder(&cluster).build().unwrap(),
            builder(&cluster).build().unwrap(),
        );
        let home = cluster.server(cluster.home("lock:k"));
        let calls_of = |id: u64| {
            // The call's connection of the registry that was made with this one.
            let own = home
                .clients()
                .into_iter()
                .filter(|it| it.field("ssub") == "0");
            own.map(|it| it.id()).filter(|other| *other < id).max()
        };
        for is_second in [true, false] {
            let lease = here.obtain("k").lease().await.unwrap();
            let waiter = tokio::spawn(there.obtain("k").lease());
            queued(&here, "k").await;
            let id = listening(home).expect("who waits listens");
            let kill = if is_second { Some(id) } else { calls_of(id) };
            let kill = kill.expect("there are two").to_string();
            let begin = Instant::now();
            home.cmd(&["CLIENT", "KILL", "ID", &kill]);
            if is_second {
                wait_until("it listens again", BOUND, || {
                    listening(home).is_some_and(|it| it != id)
                })
                .await;
            } else {
                wait_until("it calls again", BOUND, || {
                    calls_of(u64::MAX).is_some_and(|it| it > id)
                })
                .await;
                assert_eq!(listening(home), Some(id), "the other one is left alone");
            }
            queued(&here, "k").await;
            // Before anybody would ask by itself.
            assert!(begin.elapsed() < BY_GRANT, "{:?}", begin.elapsed());
            lease.release().await.unwrap();
            let next = timeout(BY_GRANT, waiter).await.expect("by a grant");
            next.unwrap().unwrap().release().await.unwrap();
        }
        nothing_left(&cluster, &[&here, &there]).await;
    })
    .await;
}

/// A connection that was lost without a word carries no grant, and the calls' own goes on answering: it is noticed when a
/// question to it is not answered.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_connection_that_vanishes_is_made_again() {
    on_a_steady_machine(async || {
        let cluster = Cluster::behind_proxies();
        // Only who waits is to notice soon. The lease outlasts all of this.
        let here = builder(&cluster).build().unwrap();
        let there = builder(&cluster).response_timeout(ms(1000));
        let there = there.build().unwrap();
        let proxy = &cluster.proxies()[cluster.home("lock:k")];
        let home = cluster.server(cluster.home("lock:k"));
        let lease = here.obtain("k").lease().await.unwrap();
        let waiter = tokio::spawn(there.obtain("k").lease());
        queued(&here, "k").await;
        let id = listening(home).expect("who waits listens");
        let before = proxy.accepted();
        proxy.lose_subscribers();
        // The question comes after 8 to 12 s (W2), and once.
        wait_until("it is made again", ms(15_500), || proxy.accepted() > before).await;
        wait_until("it listens again", BOUND, || {
            listening(home).is_some_and(|it| it != id)
        })
        .await;
        queued(&here, "k").await;
        lease.release().await.unwrap();
        let next = timeout(BY_GRANT, waiter).await.expect("by a grant");
        next.unwrap().unwrap().release().await.unwrap();
    })
    .await;
}

/// Nothing need be written there for as long as the same keys are waited for.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_busy_second_connection_is_kept() {
    on_a_steady_machine(async || {
        let cluster = Cluster::without_replicas();
        // What is asked there is answered behind all that was pushed.
        let patient = || builder(&cluster).response_timeout(BOUND).build().unwrap();
        let (here, there) = (patient(), patient());
        let home = cluster.server(cluster.home("lock:k"));
        home.cmd(&[
            "CONFIG",
            "SET",
            "client-output-buffer-limit",
            "pubsub 0 0 0",
        ]);
        let lease = here.obtain("k").lease().await.unwrap();
        let waiter = tokio::spawn(there.obtain("k").wait(10 * BOUND).lease());
        queued(&here, "k").await;
        let id = listening(home).expect("who waits listens");
        wait_until("its channel is all that is left", BOUND, || {
            cluster.channels().len() == 1
        })
        .await;
        let channel = &cluster.channels()[0];
        // More than is read on a socket on which nothing was asked.
        let message = "x".repeat(10_000);
        for _ in 0..7_500 {
            assert_eq!(home.ask::<u64>(&["SPUBLISH", channel, &message]), 1);
        }
        lease.release().await.unwrap();
        let next = timeout(BY_GRANT, waiter).await.expect("by a grant");
        // By now it may have ended its subscription: nobody waits any more.
        let is_there = home.clients().iter().any(|client| client.id() == id);
        assert!(is_there, "it is the same connection");
        next.unwrap().unwrap().release().await.unwrap();
        nothing_left(&cluster, &[&here, &there]).await;
    })
    .await;
}

/// Nodes that are silent for longer than the others wait are taken for dead, and nobody stands in for them. Whoever is
/// left in a minority refuses, until all are there again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_release_outlasts_nodes_that_are_silent_for_a_while() {
    for its_own in [false, true] {
        let cluster = Cluster::without_replicas();
        cluster.take_for_dead_after(ms(1_500));
        let registry = || {
            let builder = builder(&cluster).ttl(3 * BOUND).wait(3 * BOUND);
            builder.response_timeout(2 * BOUND).build().unwrap()
        };
        let (here, there) = (registry(), registry());
        let home = cluster.home("lock:k");
        let lease = here.obtain("k").lease().await.unwrap();
        let waiter = tokio::spawn(there.obtain("k").lease());
        queued(&here, "k").await;
        let stopped: Vec<_> = (0..3).filter(|n| (*n == home) == its_own).collect();
        let asked = if its_own { (home + 1) % 3 } else { home };
        for n in &stopped {
            cluster.server(*n).stop();
        }
        wait_until("they are taken for dead", BOUND, || {
            let nodes: String = cluster.server(asked).ask(&["CLUSTER", "NODES"]);
            nodes.matches("fail").count() >= stopped.len()
        })
        .await;
        let release = tokio::spawn(lease.release());
        sleep(ms(1_000)).await;
        for n in &stopped {
            cluster.server(*n).cont();
        }
        timeout(BOUND, release).await.unwrap().unwrap().unwrap();
        let next = timeout(BOUND, waiter).await.unwrap().unwrap().unwrap();
        next.release().await.unwrap();
        nothing_left(&cluster, &[&here, &there]).await;
    }
}
