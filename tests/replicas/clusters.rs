//! On a cluster, where each primary has replicas of its own.

use std::time::Instant;

use futures::future::try_join_all;
use lockstream::LockRegistry;
use lockstream::store::RedisStore;
use tokio::time::timeout;

use crate::flock::{asker as asker_of, builder, registry, told};
use crate::support::{
    Cluster, FAIL_OVER, RedisServer, least_rights, on_a_steady_machine, wait_until,
};
use crate::{BOUND, LONG, ms};

/// Whose replicas are heard of. They take nobody's place: on a machine that stands still all look as if they failed.
async fn start() -> Cluster {
    let cluster = Cluster::replicated(&[
        "repl-diskless-sync-delay 0",
        "repl-timeout 600",
        "cluster-replica-no-failover yes",
    ]);
    cluster.wait_until_whole();
    for index in 0..3 {
        let primary = cluster.server(index);
        let probe = name_at(&cluster, index, "probe");
        wait_until("its replica follows", BOUND, || {
            primary.set(&probe, "");
            primary.ask::<u64>(&["WAIT", "1", "1000"]) == 1
        })
        .await;
        primary.del(&probe);
        // Whoever looks into a replica says so first.
        cluster.server(index + 3).cmd(&["READONLY"]);
    }
    cluster
}

/// A name that a primary has.
fn name_at(cluster: &Cluster, index: usize, stem: &str) -> String {
    let names = (0..).map(|number| format!("{stem}:{number}"));
    let mut names = names.filter(|name| cluster.home(name) == index);
    names.next().expect("names lie everywhere")
}

/// A lock's, without the prefix.
fn key_at(cluster: &Cluster, index: usize, stem: &str) -> String {
    let name = name_at(cluster, index, &format!("lock:{stem}"));
    name["lock:".len()..].to_owned()
}

async fn locks(cluster: &Cluster, least: u32, within: u64) -> LockRegistry {
    registry(&cluster.url(), least, ms(within)).await
}

async fn is_asked(server: &RedisServer) -> u64 {
    let mut asker = None;
    wait_until("the replicas are asked", BOUND, || {
        asker = asker_of(server);
        asker.is_some()
    })
    .await;
    asker.expect("it was seen")
}

async fn nothing_left(cluster: &Cluster) {
    wait_until("nothing is left", BOUND, || cluster.leftovers().is_empty()).await;
}

/// Wherever it lies; and many share a question, also those of different slots.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_acquired_lock_on_a_cluster_is_on_the_replica() {
    const MANY: u64 = 300;
    let cluster = start().await;
    let locks = locks(&cluster, 1, 5_000).await;
    for index in 0..3 {
        for key in ["a", "b"].map(|stem| key_at(&cluster, index, stem)) {
            let lease = locks.obtain(&*key).lease().await.unwrap();
            let name = format!("lock:{key}");
            let owner = cluster.server(cluster.home(&name)).get(&name);
            assert!(owner.is_some(), "{key}");
            assert_eq!(cluster.server(cluster.home(&name) + 3).get(&name), owner);
            lease.release().await.unwrap();
        }
    }
    cluster
        .primaries()
        .iter()
        .for_each(RedisServer::reset_stats);
    let leases = (0..MANY).map(|n| locks.obtain(format!("k{n}")).lease());
    let leases = try_join_all(leases).await.unwrap();
    let primaries = cluster.primaries().iter();
    let asked: u64 = primaries.map(|primary| primary.calls("wait")).sum();
    println!("{MANY} acquisitions asked {asked} times");
    assert!((3..=MANY / 3).contains(&asked), "{asked}");
    for lease in leases {
        lease.release().await.unwrap();
    }
    nothing_left(&cluster).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unconfirmed_lock_is_refused_in_time_and_other_primaries_are_not_delayed() {
    on_a_steady_machine(async || {
        let cluster = start().await;
        let locks = locks(&cluster, 1, 3_000).await;
        let [here, there] = [0, 1].map(|index| key_at(&cluster, index, "k"));
        // All connections stand.
        for key in [&here, &there] {
            let lease = locks.obtain(&**key).lease().await.unwrap();
            lease.release().await.unwrap();
        }
        cluster.server(3).stop();
        let begun = Instant::now();
        let refused = tokio::spawn(locks.obtain(&*here).acquire_once());
        is_asked(cluster.server(0)).await;
        // Others have as much to do as they like meanwhile.
        let mut turns = 0;
        while begun.elapsed() < ms(2_000) && turns < 100 {
            let lease = timeout(BOUND, locks.obtain(&*there).lease()).await;
            lease.unwrap().unwrap().release().await.unwrap();
            turns += 1;
        }
        assert!(!refused.is_finished() || begun.elapsed() >= ms(3_000));
        // Held up they would have one, or two.
        assert!(turns >= 4, "held up: {turns} turns");
        let error = told(refused.await.unwrap());
        let passed = begun.elapsed();
        assert!(passed >= ms(3_000) && passed < ms(12_000), "{passed:?}");
        assert!(error.is_retryable(), "{error}");
        let said = error.to_string();
        assert!(said.contains(": 0 of 1 replicas"), "{error}");
        let address = format!("127.0.0.1:{}", cluster.server(0).port());
        assert!(said.contains(&address), "{error}");
        nothing_left(&cluster).await;

        // A waiter outlasts it.
        let waiter = tokio::spawn(locks.obtain(&*here).lease());
        is_asked(cluster.server(0)).await;
        cluster.server(3).cont();
        let lease = timeout(BOUND, waiter).await.expect("it is served");
        lease.unwrap().unwrap().release().await.unwrap();
        nothing_left(&cluster).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hand_over_on_a_cluster_counts_when_the_replica_has_it() {
    let cluster = start().await;
    let both = [
        locks(&cluster, 1, 5_000).await,
        locks(&cluster, 1, 5_000).await,
    ];
    for index in 0..3 {
        let key = key_at(&cluster, index, "k");
        let (name, queue) = (format!("lock:{key}"), format!("{{lock:{key}}}:~queue2"));
        let (primary, replica) = (cluster.server(index), cluster.server(index + 3));
        let mut lease = both[0].obtain(&*key).lease().await.unwrap();
        for turn in 1..5 {
            let waiter = tokio::spawn(both[turn % 2].obtain(&*key).lease());
            wait_until("it stands in the queue", BOUND, || primary.exists(&queue)).await;
            let (token, owner) = (lease.token(), primary.get(&name));
            lease.release().await.unwrap();
            lease = timeout(BOUND, waiter).await.unwrap().unwrap().unwrap();
            assert!(lease.token() > token);
            let now = primary.get(&name);
            assert_ne!(now, owner);
            assert_eq!(replica.get(&name), now);
        }
        lease.release().await.unwrap();
    }
    nothing_left(&cluster).await;
}

/// The lock goes to another primary while the replicas of the first are asked. Once their answer is lost, those of the
/// next are asked, and have it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slot_moves_while_its_replicas_are_asked() {
    let cluster = start().await;
    let locks = locks(&cluster, 1, 60_000).await;
    let key = key_at(&cluster, 0, "k");
    let name = format!("lock:{key}");
    cluster.server(3).stop();
    let caller = tokio::spawn(locks.obtain(&*key).lease());
    let asker = is_asked(cluster.server(0)).await;
    let owner = cluster.server(0).get(&name);
    cluster.move_slot(cluster.slot(&name), 0, 1);
    assert!(!caller.is_finished());
    let killed: u64 = cluster
        .server(0)
        .ask(&["CLIENT", "KILL", "ID", &asker.to_string()]);
    assert_eq!(killed, 1);
    let lease = timeout(BOUND, caller).await.expect("it is confirmed");
    let lease = lease.unwrap().unwrap();
    assert_eq!(cluster.server(1).get(&name), owner, "it was not given back");
    assert_eq!(cluster.server(4).get(&name), owner);
    lease.release().await.unwrap();
    cluster.server(3).cont();
    nothing_left(&cluster).await;
}

/// One lock has gone (`ASK`), the other has not (`TRYAGAIN` to whoever names both): each is confirmed where it is.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn half_a_slot_moves_while_its_replicas_are_asked() {
    let cluster = start().await;
    let locks = locks(&cluster, 1, 60_000).await;
    let (slot, from) = (cluster.slot("t"), cluster.home("t"));
    let to = (from + 1) % 3;
    cluster.server(from + 3).stop();
    let keys = ["{t}:gone", "{t}:here"];
    let mut callers = Vec::new();
    for key in keys {
        callers.push(tokio::spawn(locks.obtain(key).lease()));
        wait_until("it is won", BOUND, || {
            cluster.server(from).exists(&format!("lock:{key}"))
        })
        .await;
    }
    let asker = is_asked(cluster.server(from)).await;
    cluster.begin_move(slot, from, to);
    cluster.move_key("lock:{t}:gone", from, to);
    let killed: u64 = cluster
        .server(from)
        .ask(&["CLIENT", "KILL", "ID", &asker.to_string()]);
    assert_eq!(killed, 1);
    wait_until("another asks", BOUND, || {
        asker_of(cluster.server(from)).is_some_and(|next| next != asker)
    })
    .await;
    assert!(callers.iter().all(|caller| !caller.is_finished()));
    cluster.server(from + 3).cont();
    let mut leases = Vec::new();
    for caller in callers {
        let lease = timeout(BOUND, caller).await.expect("it is confirmed");
        leases.push(lease.unwrap().unwrap());
    }
    // Of a key whose slot is not there yet a node speaks to nobody who does not ask so, but names it.
    for (key, at) in keys.into_iter().zip([to, from]) {
        let names = cluster.server(at + 3).keys("lock:?t?:[gh]*");
        assert_eq!(names, [format!("lock:{key}")]);
    }
    while cluster.move_keys(slot, from, to, 100) > 0 {}
    cluster.end_move(slot, from, to);
    for lease in leases {
        lease.release().await.unwrap();
    }
    // The registry's map is out of date now.
    let lease = timeout(BOUND, locks.obtain("{t}:gone").lease()).await;
    let lease = lease.expect("it is confirmed").unwrap();
    // Its replica may not have heard yet whose the slot is.
    assert_eq!(cluster.server(to + 3).keys("lock:?t?:g*").len(), 1);
    lease.release().await.unwrap();
    nothing_left(&cluster).await;
}

/// Nobody waits until the replica has it, but the acquisition itself.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_confirmed_lock_on_a_cluster_survives_its_primary() {
    let mut cluster = start().await;
    let (holding, other) = (locks(&cluster, 1, 500).await, locks(&cluster, 1, 500).await);
    let [key, next] = ["k", "next"].map(|stem| key_at(&cluster, 0, stem));
    let name = format!("lock:{key}");
    let lease = other.obtain(&*next).lease().await.unwrap();
    lease.release().await.unwrap();
    let lease = holding.obtain(&*key).lease().await.unwrap();
    cluster.let_replicas_stand_in(true);
    cluster.server_mut(0).kill();
    cluster.wait_for_promotion(3);
    assert!(cluster.server(3).exists(&name));
    assert!(lease.is_valid());
    // The new primary has no replica, and is asked nevertheless.
    let lock = other.obtain(&*next);
    let begun = Instant::now();
    loop {
        let error = told(lock.acquire_once().await).to_string();
        if error.contains(": 0 of 1 replicas") {
            let address = format!("127.0.0.1:{}", cluster.server(3).port());
            assert!(error.contains(&address), "{error}");
            break;
        }
        assert!(begun.elapsed() < FAIL_OVER, "{error}");
    }
    let waiter = tokio::spawn(lock.lease());
    cluster.server_mut(0).restart();
    let after = timeout(FAIL_OVER, waiter).await.expect("it is served");
    let after = after.unwrap().unwrap();
    cluster.server(0).cmd(&["READONLY"]);
    let name = format!("lock:{next}");
    assert!(cluster.server(0).exists(&name) && cluster.server(3).exists(&name));
    after.release().await.unwrap();
    assert!(lease.is_valid());
    let released = timeout(BOUND, lease.release()).await;
    released
        .expect("a release ends")
        .expect("it was held to the end");
    wait_until("nothing is left", BOUND, || {
        let keys = cluster.server(3).keys("*");
        keys.iter().all(|key| key.contains(":~fence"))
    })
    .await;
}

/// The rights that the documentation lists, and `wait`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_right_to_wait_is_needed_on_a_cluster() {
    let cluster = start().await;
    let set_user = |more: &[&str]| {
        let mut words = vec!["ACL", "SETUSER"];
        words.extend(least_rights());
        // Of a cluster.
        words.extend("&lock:* &{lock:* +asking +cluster|shards +cluster|slots".split(' '));
        words.extend("+ssubscribe +sunsubscribe +spublish +pubsub|shardnumsub".split(' '));
        words.extend(more);
        for index in 0..6 {
            cluster.server(index).cmd(&words);
        }
    };
    let url = cluster.url_with("lockstream:password@");
    let store = || RedisStore::builder(&*url).min_replicas(1, ms(5_000));
    set_user(&[]);
    let error = store().connect().await.unwrap_err();
    assert!(
        !error.is_retryable() && error.to_string().contains("'wait'"),
        "{error}"
    );
    let locks = LockRegistry::builder(store().connect_lazy().unwrap());
    let locks = locks
        .ttl(LONG)
        .wait(LONG)
        .response_timeout(BOUND)
        .build()
        .unwrap();
    let told_at_once = timeout(BOUND, locks.obtain("k").lease()).await;
    let error = told(told_at_once.expect("waiting mends nothing"));
    assert!(
        !error.is_retryable() && error.to_string().contains("'wait'"),
        "{error}"
    );
    nothing_left(&cluster).await;
    set_user(&["+wait"]);
    store().connect().await.unwrap();
    let lease = timeout(BOUND, locks.obtain("k").lease()).await.unwrap();
    lease.unwrap().release().await.unwrap();
    nothing_left(&cluster).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_registry_on_a_cluster_that_is_dropped_leaves_no_connection() {
    let cluster = start().await;
    let locks = builder(&cluster.url(), 1, ms(500)).await.build().unwrap();
    cluster.server(3).stop();
    let key = key_at(&cluster, 0, "k");
    let caller = tokio::spawn(locks.obtain(&*key).lease());
    is_asked(cluster.server(0)).await;
    timeout(BOUND, locks.shutdown()).await.expect("it ends");
    assert!(caller.await.unwrap().is_err());
    drop(locks);
    wait_until("nobody asks any more", BOUND, || {
        asker_of(cluster.server(0)).is_none()
    })
    .await;
    // All servers are asked for channels.
    cluster.server(3).cont();
    wait_until("all its connections are closed", BOUND, || {
        cluster.channels().is_empty()
    })
    .await;
    nothing_left(&cluster).await;
}
