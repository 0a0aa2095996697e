//! Where locks and their side keys lie, and a subscriber to what.

use std::collections::BTreeSet;

use lockstream::LockRegistry;
use lockstream::store::RedisStore;
use tokio::time::{sleep, timeout};

use crate::support::{Cluster, on_a_steady_machine, wait_until};
use crate::{BOUND, BY_GRANT, builder, ms, nothing_left, queued};

/// Keys, and their side keys, lie all over the cluster; each slot has the fence of its own.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn locks_lie_in_every_slot() {
    on_a_steady_machine(async || {
        let cluster = Cluster::without_replicas();
        let store = RedisStore::cluster(cluster.urls()).await.unwrap();
        let (here, there) = (
            LockRegistry::builder(store).build().unwrap(),
            builder(&cluster).build().unwrap(),
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
    })
    .await;
}

/// A prefix with a tag of its own keeps all locks in one slot, with one fence.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prefix_with_a_tag_has_one_slot() {
    on_a_steady_machine(async || {
        let cluster = Cluster::without_replicas();
        let registry = builder(&cluster).prefix("{app}").build().unwrap();
        for number in 0..10 {
            let key = number.to_string();
            let lease = registry.obtain(&key).lease().await.unwrap();
            let waiter = tokio::spawn(registry.obtain(&key).lease());
            sleep(ms(5)).await;
            lease.release().await.unwrap();
            let next = timeout(BY_GRANT, waiter).await.unwrap();
            next.unwrap().unwrap().release().await.unwrap();
        }
        nothing_left(&cluster, &[&registry]).await;
        let fences: Vec<_> = cluster
            .primaries()
            .iter()
            .flat_map(|server| server.keys("{app}:~fence*"))
            .collect();
        assert_eq!(fences, ["{app}:~fence"]);
    })
    .await;
}

/// What a registry listens to: a channel for each key that it waits for, and none when it does not.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_waiters_are_subscribed() {
    on_a_steady_machine(async || {
        let cluster = Cluster::without_replicas();
        let (here, there) = (
            builder(&cluster).build().unwrap(),
            builder(&cluster).build().unwrap(),
        );
        let lease = here.obtain("k").lease().await.unwrap();
        let other = here.obtain("{t}:k").lease().await.unwrap();
        // Each node is asked, once, whether its grants would reach us.
        let listening = async |keys| {
            let what = format!("{keys} keys are listened for, and nothing else");
            wait_until(what, BOUND, || cluster.channels().len() == keys).await;
        };
        // Who holds does not listen.
        listening(0).await;
        let waiters = ["k", "{t}:k"].map(|key| tokio::spawn(there.obtain(key).lease()));
        queued(&here, "k").await;
        queued(&here, "{t}:k").await;
        listening(2).await;
        let channels = cluster.channels();
        assert!(
            channels[0].starts_with("lock:{t}:k:~grant:"),
            "{channels:?}"
        );
        assert!(channels[1].starts_with("{lock:k}:~grant:"), "{channels:?}");

        // Who gives up leaves nothing behind.
        let [first, second] = waiters;
        second.abort();
        listening(1).await;
        lease.release().await.unwrap();
        other.release().await.unwrap();
        drop(timeout(BY_GRANT, first).await.unwrap());
        nothing_left(&cluster, &[&here, &there]).await;
    })
    .await;
}

/// Ops of one slot share calls; those of others never do.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ops_of_one_slot_share_calls() {
    const PAIRS: u64 = 64 * 20;
    let cluster = Cluster::without_replicas();
    let registry = builder(&cluster).build().unwrap();
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
