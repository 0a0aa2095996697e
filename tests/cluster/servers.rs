//! Other servers than the usual one.

use tokio::time::{sleep, timeout};

use crate::support::{Cluster, Program, on_a_steady_machine, wait_until};
use crate::{BOUND, BY_GRANT, builder, ms, nothing_left, queued};

/// Redis 6.2 has no sharded channels, so nobody stands in a queue there.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn before_redis_7_waiters_poll() {
    let cluster = Cluster::of(Program::Redis6, &[]);
    let (here, there) = (
        builder(&cluster).build().unwrap(),
        builder(&cluster).build().unwrap(),
    );
    let turns = ["a", "b", "c", "{t}:d"].map(async |key| {
        let lease = here.obtain(key).lease().await.unwrap();
        assert!(!there.obtain(key).acquire_once().await.unwrap());
        let waiter = tokio::spawn(there.obtain(key).lease());
        sleep(ms(50)).await;
        assert_eq!(here.obtain(key).inspect().await.unwrap().waiting, 0);
        lease.release().await.unwrap();
        let next = timeout(BOUND, waiter).await.unwrap().unwrap().unwrap();
        next.release().await.unwrap();
    });
    futures::future::join_all(turns).await;
    wait_until("nothing is left", BOUND, || cluster.leftovers().is_empty()).await;
}

/// Locks are handed over by grants, and follow their slot.
async fn turns_are_taken_on(program: Program) {
    let cluster = Cluster::of(program, &[]);
    let (here, there) = (
        builder(&cluster).build().unwrap(),
        builder(&cluster).build().unwrap(),
    );
    let (slot, from) = (cluster.slot("m"), cluster.home("m"));
    let keys = ["a", "b", "c", "{t}:d", "{m}:e"];
    for round in 0..3 {
        for key in keys {
            let lease = here.obtain(key).lease().await.unwrap();
            assert!(!there.obtain(key).acquire_once().await.unwrap());
            let waiter = tokio::spawn(there.obtain(key).lease());
            queued(&here, key).await;
            let before = lease.token();
            lease.release().await.unwrap();
            let next = timeout(BY_GRANT, waiter).await.expect("by a grant");
            let next = next.unwrap().unwrap();
            assert!(next.token() > before, "{key}");
            next.release().await.unwrap();
        }
        let (from, to) = ((from + round) % 3, (from + round + 1) % 3);
        cluster.move_slot(slot, from, to);
    }
    nothing_left(&cluster, &[&here, &there]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn turns_are_taken_on_valkey() {
    on_a_steady_machine(async || turns_are_taken_on(Program::Valkey).await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn turns_are_taken_on_redis_8() {
    on_a_steady_machine(async || turns_are_taken_on(Program::Redis8).await).await;
}
