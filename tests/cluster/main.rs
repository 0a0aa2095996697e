//! Real clusters, whose slots move and whose primaries are killed.
#![cfg(all(feature = "cluster", feature = "test-util"))]

#[path = "../support/mod.rs"]
mod support;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use lockstream::store::RedisStore;
use lockstream::{LockRegistry, LockRegistryBuilder};
use support::{Cluster, Program, least_rights, wait_until};
use tokio::time::{sleep, timeout};

/// For what takes a reconnect or the promotion of a replica; no more than the usual ttl.
const BOUND: Duration = Duration::from_secs(20);

/// What comes sooner has come by a grant: whoever waits asks by itself every 10 s, at most.
const BY_GRANT: Duration = Duration::from_secs(5);

const fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

fn builder(cluster: &Cluster) -> LockRegistryBuilder {
    let store = RedisStore::connect_lazy(cluster.url()).unwrap();
    LockRegistry::builder(store).response_timeout(ms(3000))
}

/// The fences are kept, and nothing else.
async fn nothing_left(cluster: &Cluster, registries: &[&LockRegistry]) {
    wait_until("nothing is in use", BOUND, || {
        registries.iter().all(|registry| registry.in_use() == 0)
    })
    .await;
    wait_until("no lock and no queue is left", BOUND, || {
        cluster.leftovers().is_empty()
    })
    .await;
    wait_until("no subscription is left", BOUND, || {
        cluster.channels().is_empty()
    })
    .await;
}

/// Waits until somebody stands in the queue.
async fn queued(registry: &LockRegistry, key: &str) {
    let begin = Instant::now();
    // A node that has just gone is an error.
    while !matches!(registry.obtain(key).inspect().await, Ok(seen) if seen.waiting > 0) {
        assert!(begin.elapsed() < BOUND, "nobody waits for {key}");
        sleep(ms(5)).await;
    }
}

/// Keys, and their side keys, lie all over the cluster; each slot has the fence of its own.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn locks_lie_in_every_slot() {
    let cluster = Cluster::without_replicas();
    let store = RedisStore::cluster(cluster.urls()).await.unwrap();
    let (here, there) = (
        LockRegistry::builder(store).build(),
        builder(&cluster).build(),
    );
    let keys = (0..60).map(|number| match number % 3 {
        0 => format!("{{tag{number}}}:order"),
        1 => format!("order {{ {number}"),
        _ => format!("order:{number}"),
    });
    let homes: BTreeSet<_> = keys
        .clone()
        .map(|key| cluster.home(&format!("lock:{key}")))
        .collect();
    assert_eq!(homes.len(), 3, "they are spread");
    for key in keys {
        let lease = here.obtain(&key).lease().await.unwrap();
        assert!(!there.obtain(&key).acquire_once().await.unwrap(), "{key}");
        let waiter = tokio::spawn(there.obtain(&key).lease());
        queued(&here, &key).await;
        let before = lease.token();
        lease.release().await.unwrap();
        let next = timeout(BY_GRANT, waiter).await.expect("by a grant");
        let next = next.unwrap().unwrap();
        assert!(next.token() > before, "{key}");
        next.release().await.unwrap();
    }
    let fences: Vec<_> = cluster
        .primaries()
        .iter()
        .flat_map(|server| server.keys("lock:~fence*"))
        .collect();
    assert!(
        fences
            .iter()
            .all(|fence| fence.starts_with("lock:~fence:{"))
    );
    assert!(fences.len() > 30, "{fences:?}");
    nothing_left(&cluster, &[&here, &there]).await;
}

/// A prefix with a tag of its own keeps all locks in one slot, with one fence.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prefix_with_a_tag_has_one_slot() {
    let cluster = Cluster::without_replicas();
    for prefix in ["{app}", "{ap"] {
        let registry = builder(&cluster).prefix(prefix).build();
        for number in 0..10 {
            let key = format!("{number}}}").replace('}', if prefix == "{ap" { "}" } else { "" });
            let lease = registry.obtain(&key).lease().await.unwrap();
            let waiter = tokio::spawn(registry.obtain(&key).lease());
            sleep(ms(5)).await;
            lease.release().await.unwrap();
            let next = timeout(BY_GRANT, waiter).await.unwrap();
            next.unwrap().unwrap().release().await.unwrap();
        }
        nothing_left(&cluster, &[&registry]).await;
    }
    let fences: Vec<_> = cluster
        .primaries()
        .iter()
        .flat_map(|server| server.keys("{app}:~fence*"))
        .collect();
    assert_eq!(fences, ["{app}:~fence"]);
}

/// What a registry listens to: a channel for each key that it waits for, and none when it does not.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_waits_listens_and_nobody_else() {
    let cluster = Cluster::without_replicas();
    let (here, there) = (builder(&cluster).build(), builder(&cluster).build());
    let lease = here.obtain("k").lease().await.unwrap();
    let other = here.obtain("{t}:k").lease().await.unwrap();
    assert_eq!(cluster.channels(), [""; 0], "who holds does not listen");
    let waiters = ["k", "{t}:k"].map(|key| tokio::spawn(there.obtain(key).lease()));
    queued(&here, "k").await;
    queued(&here, "{t}:k").await;
    let channels = cluster.channels();
    assert_eq!(channels.len(), 2, "{channels:?}");
    assert!(
        channels[0].starts_with("lock:{t}:k:~grant:"),
        "{channels:?}"
    );
    assert!(channels[1].starts_with("{lock:k}:~grant:"), "{channels:?}");

    // Who gives up leaves nothing behind.
    let [first, second] = waiters;
    second.abort();
    wait_until("one is left", BOUND, || cluster.channels().len() == 1).await;
    lease.release().await.unwrap();
    other.release().await.unwrap();
    drop(timeout(BY_GRANT, first).await.unwrap());
    nothing_left(&cluster, &[&here, &there]).await;
}

/// Ops of one slot share calls; those of others never do.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ops_of_one_slot_share_calls() {
    const PAIRS: u64 = 64 * 20;
    let cluster = Cluster::without_replicas();
    let registry = builder(&cluster).build();
    let home = cluster.home("{one}");
    registry.obtain("{one}").inspect().await.unwrap();
    let calls = || cluster.server(home).calls("evalsha") + cluster.server(home).calls("eval");
    let before = calls();
    let tasks: Vec<_> = (0..64)
        .map(|task| {
            let lock = registry.obtain(format!("{{one}}:{task}"));
            tokio::spawn(async move {
                for _ in 0..PAIRS / 64 {
                    lock.lease().await.unwrap().release().await.unwrap();
                }
            })
        })
        .collect();
    for task in tasks {
        timeout(BOUND, task).await.unwrap().unwrap();
    }
    let calls = calls() - before;
    assert!(calls < PAIRS, "{calls} calls for {} ops", 2 * PAIRS);
    nothing_left(&cluster, &[&registry]).await;
}

/// How often the primaries have answered so.
fn errors(cluster: &Cluster, word: &str) -> u64 {
    let count = |server: &support::RedisServer| {
        let stats: String = server.ask(&["INFO", "errorstats"]);
        let begin = format!("errorstat_{word}:count=");
        let count = stats.lines().find_map(|line| line.strip_prefix(&begin));
        count.map_or(0, |count| count.trim().parse().unwrap())
    };
    cluster.primaries().iter().map(count).sum()
}

/// Tasks in two registries that lock the same keys again and again, and see that nobody else is there.
struct Load {
    stop: Arc<AtomicBool>,
    done: Arc<AtomicU64>,
    tasks: Vec<tokio::task::JoinHandle<()>>,
}

impl Load {
    fn on(registries: &[&LockRegistry], keys: &[&str]) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let done = Arc::new(AtomicU64::new(0));
        let mut tasks = Vec::new();
        for key in keys {
            // The last token, or all ones while somebody is in.
            let inside = Arc::new(AtomicU64::new(0));
            for registry in registries {
                for _ in 0..2 {
                    let lock = registry.obtain(*key);
                    let (stop, done, inside) = (stop.clone(), done.clone(), inside.clone());
                    tasks.push(tokio::spawn(async move {
                        while !stop.load(Ordering::Relaxed) {
                            let lease = timeout(BOUND, lock.lease()).await.unwrap().unwrap();
                            let before = inside.swap(u64::MAX, Ordering::SeqCst);
                            assert!(before < lease.token(), "somebody is in, or was later");
                            tokio::task::yield_now().await;
                            inside.store(lease.token(), Ordering::SeqCst);
                            lease.release().await.unwrap();
                            done.fetch_add(1, Ordering::Relaxed);
                        }
                    }));
                }
            }
        }
        Self { stop, done, tasks }
    }

    /// Waits for so many turns more.
    async fn goes_on(&self, what: &str) {
        let before = self.done.load(Ordering::Relaxed);
        wait_until(what, BOUND, || {
            self.done.load(Ordering::Relaxed) > before + 200
                || self.tasks.iter().any(tokio::task::JoinHandle::is_finished)
        })
        .await;
    }

    async fn end(self) {
        self.stop.store(true, Ordering::Relaxed);
        for task in self.tasks {
            timeout(BOUND, task).await.unwrap().unwrap();
        }
    }
}

/// `MOVED`, `ASK` and `TRYAGAIN`, all of which a slot on its way answers.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slot_moves_under_load() {
    let cluster = Cluster::without_replicas();
    let registries = [builder(&cluster).build(), builder(&cluster).build()];
    let (slot, from) = (cluster.slot("m"), cluster.home("m"));
    let to = (from + 1) % 3;
    let load = Load::on(
        &[&registries[0], &registries[1]],
        &["{m}:1", "{m}:2", "{m}:3", "{m}:4", "elsewhere"],
    );
    load.goes_on("locks are had").await;
    for (from, to) in [(from, to), (to, from), (from, to)] {
        cluster.begin_move(slot, from, to);
        // One by one, with all that is done meanwhile.
        for _ in 0..5 {
            cluster.move_keys(slot, from, to, 1);
            sleep(ms(20)).await;
        }
        while cluster.move_keys(slot, from, to, 100) > 0 {}
        cluster.end_move(slot, from, to);
        load.goes_on("locks are had again").await;
    }
    load.end().await;
    for word in ["MOVED", "TRYAGAIN"] {
        assert!(errors(&cluster, word) > 0, "nobody was answered {word}");
    }
    nothing_left(&cluster, &[&registries[0], &registries[1]]).await;
}

/// A lease is renewed and released, and a waiter served, wherever their slot is meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slot_moves_while_a_lock_is_held_and_waited_for() {
    let cluster = Cluster::without_replicas();
    let short = || builder(&cluster).ttl(ms(1500)).build();
    let (here, there) = (short(), short());
    let (slot, from) = (cluster.slot("m"), cluster.home("m"));
    let to = (from + 1) % 3;
    let lease = here.obtain("{m}:k").lease().await.unwrap();
    let waiter = tokio::spawn(there.obtain("{m}:k").lease());
    queued(&here, "{m}:k").await;

    cluster.begin_move(slot, from, to);
    while cluster.move_keys(slot, from, to, 1) > 0 {}
    // All is there, but the slot: renewals are sent on by ASK.
    sleep(ms(3000)).await;
    assert!(lease.is_valid(), "it was renewed");
    assert!(errors(&cluster, "ASK") > 0, "nobody was answered ASK");
    cluster.end_move(slot, from, to);
    wait_until("the waiter listens there", BOUND, || {
        let channels: Vec<String> = cluster.server(to).ask(&["PUBSUB", "SHARDCHANNELS"]);
        !channels.is_empty()
    })
    .await;
    queued(&here, "{m}:k").await;
    lease.release().await.unwrap();
    let next = timeout(ms(1000), waiter).await.expect("by a grant");
    next.unwrap().unwrap().release().await.unwrap();
    nothing_left(&cluster, &[&here, &there]).await;
}

/// While a slot stays half-way every script of several keys is refused there: a release frees the lock alone, and
/// who waits finds it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lock_is_released_while_its_slot_is_half_way() {
    let cluster = Cluster::without_replicas();
    let registry = builder(&cluster).response_timeout(ms(1000)).build();
    let (slot, from) = (cluster.slot("m"), cluster.home("m"));
    let to = (from + 1) % 3;
    let lease = registry.obtain("{m}:k").lease().await.unwrap();
    cluster.begin_move(slot, from, to);
    cluster.move_key("lock:{m}:k", from, to);
    assert_eq!(cluster.server(to).keys("lock:{m}*").len(), 1, "it is there");

    let begin = Instant::now();
    lease.release().await.unwrap();
    assert!(begin.elapsed() < ms(1500), "{:?}", begin.elapsed());
    assert_eq!(cluster.server(to).keys("lock:{m}*").len(), 0);
    // Which lasts, so that asking once does not help, and waiting does.
    let error = registry.obtain("{m}:k").acquire_once().await.unwrap_err();
    assert!(error.to_string().contains("TRYAGAIN"), "{error}");
    let patient = tokio::spawn(registry.obtain("{m}:k").lease());
    sleep(ms(1500)).await;
    assert!(!patient.is_finished());
    while cluster.move_keys(slot, from, to, 1) > 0 {}
    cluster.end_move(slot, from, to);
    let lease = timeout(BOUND, patient).await.unwrap().unwrap().unwrap();
    lease.release().await.unwrap();
    nothing_left(&cluster, &[&registry]).await;
}

/// The replica that is promoted has the lock, and the waiter finds it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_primary_is_killed_while_a_lock_is_held_and_waited_for() {
    let mut cluster = Cluster::start();
    let (here, there) = (builder(&cluster).build(), builder(&cluster).build());
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

    cluster.server_mut(home).kill();
    // Meanwhile all that is elsewhere goes on.
    let begin = Instant::now();
    let other = here.obtain(&elsewhere).lease().await.unwrap();
    other.release().await.unwrap();
    assert!(begin.elapsed() < ms(1000), "{:?}", begin.elapsed());
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
}

/// Under load, too, nobody meets anybody once the promoted replica serves, and everybody gets on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_primary_hands_over_under_load() {
    let cluster = Cluster::start();
    let registries = [builder(&cluster).build(), builder(&cluster).build()];
    let home = cluster.home("m");
    let load = Load::on(&[&registries[0], &registries[1]], &["{m}:1", "{m}:2"]);
    load.goes_on("locks are had").await;
    // In order: nothing that was acknowledged is lost.
    cluster.server(home + 3).cmd(&["CLUSTER", "FAILOVER"]);
    cluster.wait_for_promotion(home + 3);
    load.goes_on("locks are had again").await;
    load.end().await;
}

#[tokio::test]
async fn what_is_no_cluster_is_told() {
    let server = support::RedisServer::start();
    let error = RedisStore::cluster([server.url()]).await.unwrap_err();
    assert!(
        error.to_string().contains("cluster support disabled"),
        "{error}"
    );
    assert!(!error.is_retryable());
    for (url, reason) in [
        ("redis+cluster://127.0.0.1:1/3", "database 0"),
        ("redis+cluster://a:1,b:x/", "not a Redis url"),
        ("http+cluster://a:1/", "not a Redis url"),
        ("unix+cluster:///a", "hosts and ports"),
    ] {
        let error = RedisStore::connect_lazy(url).unwrap_err();
        assert!(error.to_string().contains(reason), "{url}: {error}");
    }
    let none: [String; 0] = [];
    let error = RedisStore::cluster(none).await.unwrap_err();
    assert!(error.to_string().contains("a node at least"), "{error}");
    let secret = "redis+cluster://me:pa/ss@a:1,b:2/";
    let error = RedisStore::connect_lazy(secret).unwrap_err();
    assert!(!error.to_string().contains("ss@"), "{error}");
}

/// The rights that the documentation adds for clusters, each of which is needed for grants.
const RIGHTS: &str = "&lock:* &{lock:* +asking +cluster|shards +cluster|slots +ssubscribe \
     +sunsubscribe +spublish +pubsub|shardnumsub";

/// A user's line with the rights of a server's, and with these.
fn user(more: &str) -> String {
    let rights = least_rights().join(" ");
    let end = rights.split_once("&lock:~grant:*").expect("one channel");
    format!(
        "user {}{}{more}",
        end.0,
        end.1.trim_start().to_owned() + " "
    )
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_rights_that_are_told_are_enough() {
    let page = include_str!("../../docs/operations.md");
    assert!(page.contains(RIGHTS), "the page names other rights");
    let cluster = Cluster::of(Program::Usual, &[&user(RIGHTS)]);
    let connect = || {
        let url = cluster.url_with("lockstream:password@");
        let store = RedisStore::connect_lazy(url).unwrap();
        LockRegistry::builder(store).build()
    };
    let (here, there) = (connect(), connect());
    let hand_over = async || {
        let lease = here.obtain("k").lease().await.unwrap();
        let waiter = tokio::spawn(there.obtain("k").lease());
        sleep(ms(100)).await;
        let waiting = here.obtain("k").inspect().await.unwrap().waiting;
        lease.release().await.unwrap();
        let next = timeout(BOUND, waiter).await.unwrap().unwrap().unwrap();
        next.release().await.unwrap();
        waiting
    };
    assert_eq!(hand_over().await, 1, "by a grant");
    nothing_left(&cluster, &[&here, &there]).await;

    // Without one that grants take, everybody asks again and again.
    for server in cluster.primaries() {
        server.cmd(&["ACL", "SETUSER", "lockstream", "-spublish"]);
        server.client_kill_all();
    }
    let connect = || {
        let url = cluster.url_with("lockstream:password@");
        let store = RedisStore::connect_lazy(url).unwrap();
        LockRegistry::builder(store).build()
    };
    let (here, there) = (connect(), connect());
    let lease = here.obtain("k").lease().await.unwrap();
    assert!(!there.obtain("k").acquire_once().await.unwrap());
    let waiter = tokio::spawn(there.obtain("k").lease());
    sleep(ms(300)).await;
    assert_eq!(here.obtain("k").inspect().await.unwrap().waiting, 0);
    lease.release().await.unwrap();
    let next = timeout(BOUND, waiter).await.unwrap().unwrap().unwrap();
    next.release().await.unwrap();
}

/// Redis 6.2 has no sharded channels, so nobody stands in a queue there.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn before_redis_7_who_waits_asks_again() {
    let cluster = Cluster::of(Program::Redis6, &[]);
    let (here, there) = (builder(&cluster).build(), builder(&cluster).build());
    for key in ["a", "b", "c", "{t}:d"] {
        let lease = here.obtain(key).lease().await.unwrap();
        assert!(!there.obtain(key).acquire_once().await.unwrap());
        let waiter = tokio::spawn(there.obtain(key).lease());
        sleep(ms(50)).await;
        assert_eq!(here.obtain(key).inspect().await.unwrap().waiting, 0);
        lease.release().await.unwrap();
        let next = timeout(BOUND, waiter).await.unwrap().unwrap().unwrap();
        next.release().await.unwrap();
    }
    wait_until("nothing is left", BOUND, || cluster.leftovers().is_empty()).await;
}

/// Nobody is there at first; and later, after all of it was away.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_that_comes_back_is_found() {
    let mut cluster = Cluster::without_replicas();
    let registry = builder(&cluster).build();
    let lock = registry.obtain("k");
    lock.lease().await.unwrap().release().await.unwrap();
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
    let lease = timeout(BOUND, waiter).await.unwrap().unwrap().unwrap();
    lease.release().await.unwrap();
    nothing_left(&cluster, &[&registry]).await;
}
