//! One holder at a time, and tokens that tell who was later.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use futures::future::join_all;
use lockstream::FutureLockExt;
use tokio::task::yield_now;

use crate::world::{BOUND, World, idle, ms, ok};

/// What a race would break: between the look and the change anybody may come.
#[derive(Debug, Default)]
struct Counter(AtomicU64);

impl Counter {
    async fn add_one(&self) {
        let seen = self.0.load(Ordering::SeqCst);
        for _ in 0..3 {
            yield_now().await;
        }
        let before = self.0.swap(seen + 1, Ordering::SeqCst);
        assert_eq!(before, seen, "somebody else was there");
    }
}

pub(crate) async fn a_hundred_tasks_in_eight_processes_never_meet<W: World>(w: &W) {
    const TURNS: u64 = 10;
    let registries: [_; 8] = w.registries().await;
    let counter = Arc::new(Counter::default());
    let newest = Arc::new(AtomicU64::new(0));
    let tasks = (0..100).map(|n| {
        let lock = registries[n % 8].obtain("k").wait(6 * BOUND);
        let (counter, newest) = (counter.clone(), newest.clone());
        tokio::spawn(async move {
            for turn in 0..TURNS {
                if turn % 2 == 0 {
                    let lease = lock.lease().await.unwrap();
                    let before = newest.swap(lease.token(), Ordering::SeqCst);
                    assert!(before < lease.token(), "tokens do not grow");
                    counter.add_one().await;
                    lease.release().await.unwrap();
                } else {
                    let counter = counter.clone();
                    let work = async move { counter.add_one().await };
                    work.with_lock(&lock).await.unwrap();
                }
            }
        })
    });
    join_all(tasks).await.into_iter().for_each(ok);
    assert_eq!(counter.0.load(Ordering::SeqCst), 100 * TURNS);
    for registry in &registries {
        idle(registry).await;
    }
}

/// Everybody gives up, is dropped or takes over all the time, and still nobody meets another.
pub(crate) async fn comings_and_goings_break_nothing<W: World>(w: &W) {
    let registries: [_; 4] = w.registries().await;
    let counter = Arc::new(Counter::default());
    let tasks = (0..40_u64).map(|n| {
        let lock = registries[n as usize % 4].obtain("k").wait(6 * BOUND);
        let counter = counter.clone();
        tokio::spawn(async move {
            for turn in 0..20 {
                let work = counter.add_one().with_lock(&lock);
                match (n + turn) % 4 {
                    0 => work.await.unwrap(),
                    1 => drop(tokio::time::timeout(ms((n + turn) % 7), lock.lease()).await),
                    2 => drop(lock.acquire_within(ms((n + turn) % 5)).await.unwrap()),
                    _ => drop(lock.lease_once().await.unwrap()),
                }
                if lock.is_acquired() {
                    counter.add_one().await;
                    lock.release().await.unwrap();
                }
            }
        })
    });
    join_all(tasks).await.into_iter().for_each(ok);
    for registry in &registries {
        idle(registry).await;
    }
}

pub(crate) async fn tokens_grow_over_ten_thousand_leases<W: World>(w: &W) {
    let registries: [_; 2] = w.registries().await;
    let mut newest = 0;
    for turn in 0..10_000 {
        let lease = registries[turn % 2].obtain("k").lease_once().await;
        let lease = lease.unwrap().expect("nobody else wants it");
        assert!(lease.token() > newest, "token {turn} does not grow");
        newest = lease.token();
        lease.release().await.unwrap();
    }
    assert!(
        i64::try_from(newest).is_ok(),
        "databases have no room for it"
    );
}

/// Within a tenure, where no draw is made, and over many of them.
pub(crate) async fn tokens_grow_through_passes<W: World>(w: &W) {
    let registry = w.registry().await;
    let newest = AtomicU64::new(0);
    let first = registry.obtain("k").lease().await.unwrap();
    newest.store(first.token(), Ordering::SeqCst);
    tokio::join!(
        join_all((0..200).map(async |_| {
            let lease = registry.obtain("k").lease().await.unwrap();
            let before = newest.swap(lease.token(), Ordering::SeqCst);
            assert!(before < lease.token());
            lease.release().await.unwrap();
        })),
        // When all stand in line.
        async { first.release().await.unwrap() },
    );
}
