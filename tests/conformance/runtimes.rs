//! Runtimes that come and go under a registry. Time is real here, on whatever store.

use std::time::Duration;

use lockstream::FutureLockExt;
use tokio::runtime::{Builder, Runtime};
use tokio::time::Instant;

use crate::assert_err;
use crate::world::{SOON, World, assert_took, eventually, free, ms, waiting};

/// How late real time may make things on a busy machine.
const LATE: Duration = ms(500);

fn runtime() -> Runtime {
    let mut builder = Builder::new_multi_thread();
    builder.worker_threads(1).enable_all().build().unwrap()
}

/// Its lease lasts as long as it said, and no longer; neither a loss nor a drop needs the dead runtime.
pub(crate) fn a_runtime_dropped_right_after_a_lease_was_taken<W: World>(w: &W) {
    let first = runtime();
    let registry = first.block_on(w.registry());
    let lock = registry.obtain("k").ttl(ms(1000));
    let lease = first.block_on(lock.lease()).unwrap();
    drop(first);
    let begin = Instant::now();
    assert!(lease.is_valid());
    runtime().block_on(async {
        let other = w.registry().await;
        let other = other.obtain("k");
        assert!(!other.acquire_once().await.unwrap());
        assert!(other.acquire().await.unwrap());
        assert!(begin.elapsed() <= ms(1000) + LATE);
        assert!(!lease.is_valid());
        assert!(lease.lost().await.is_lost());
        drop(lease);
        assert!(other.is_acquired());
        assert!(other.release().await.unwrap());
    });
}

/// Dropped in the last line of its runtime it may be released by nobody, but then it runs out.
pub(crate) fn a_lease_dropped_with_its_runtime_runs_out<W: World>(w: &W) {
    let first = runtime();
    let registry = first.block_on(w.registry());
    first.block_on(async {
        let lease = registry.obtain("a").ttl(ms(800)).lease().await.unwrap();
        let lock = registry.obtain("b").ttl(ms(800));
        assert!(lock.acquire().await.unwrap());
        drop((lease, lock));
    });
    first.shutdown_background();
    let begin = Instant::now();
    runtime().block_on(async {
        let other = w.registry().await;
        for key in ["a", "b"] {
            let lock = other.obtain(key);
            assert!(lock.acquire().await.unwrap());
        }
        assert!(begin.elapsed() <= ms(800) + LATE);
    });
}

pub(crate) fn a_lease_of_one_runtime_is_released_on_another<W: World>(w: &W) {
    let first = runtime();
    let registry = first.block_on(w.registry());
    let lock = registry.obtain("handle").ttl(ms(8000));
    let lease = first
        .block_on(registry.obtain("guard").ttl(ms(8000)).lease())
        .unwrap();
    assert!(first.block_on(lock.acquire()).unwrap());
    drop(first);
    runtime().block_on(async {
        let begin = Instant::now();
        lease.release().await.unwrap();
        assert!(lock.release().await.unwrap());
        let other = w.registry().await;
        for key in ["guard", "handle"] {
            assert!(other.obtain(key).acquire().await.unwrap());
        }
        assert!(begin.elapsed() < SOON);
    });
}

/// The same registry on one runtime after another, each time with all that needs tasks and timers.
pub(crate) fn a_registry_outlives_its_runtimes<W: World>(w: &W) {
    let (registry, other) = (w.lazy_builder().build(), w.lazy_builder().build());
    for _ in 0..3 {
        let runtime = runtime();
        runtime.block_on(async {
            let held = other.obtain("k").lease().await.unwrap();
            let lock = registry.obtain("k");
            let begin = Instant::now();
            assert!(!lock.acquire_within(ms(100)).await.unwrap());
            assert_took(begin, ms(100), LATE);
            let (acquired, ()) = tokio::join!(lock.acquire(), async {
                waiting(&lock, 1).await;
                held.release().await.unwrap();
            });
            assert!(acquired.unwrap());
            assert!(lock.release().await.unwrap());
            let lost = std::future::pending::<()>().with_lock(registry.obtain("k").ttl(ms(100)));
            let begin = Instant::now();
            assert_err!(lost.await, Lost, "k");
            assert_took(begin, ms(97), LATE);
        });
    }
}

pub(crate) fn a_drop_on_a_thread_without_a_runtime_releases<W: World>(w: &W) {
    let runtime = runtime();
    let registry = runtime.block_on(w.registry());
    let lease = runtime.block_on(registry.obtain("guard").lease()).unwrap();
    let lock = registry.obtain("handle");
    assert!(runtime.block_on(lock.acquire()).unwrap());
    let waiters = ["guard", "handle"].map(|key| {
        let other = runtime.block_on(w.registry());
        let watch = other.obtain(key);
        let waiter = runtime.spawn(async move {
            other
                .obtain(key)
                .lease()
                .await
                .unwrap()
                .release()
                .await
                .unwrap();
        });
        runtime.block_on(waiting(&watch, 1));
        waiter
    });
    let begin = Instant::now();
    std::thread::spawn(move || drop((lease, lock)))
        .join()
        .unwrap();
    for waiter in waiters {
        runtime.block_on(waiter).unwrap();
    }
    assert!(begin.elapsed() < SOON);
    // A future may be dropped there as well.
    let _held = runtime.block_on(registry.obtain("k").lease()).unwrap();
    let mut acquire = registry.obtain("k").lease();
    runtime.block_on(async { assert!(crate::world::poll_once(&mut acquire).await.is_none()) });
    std::thread::spawn(move || drop(acquire)).join().unwrap();
    drop(_held);
    runtime.block_on(free(&registry.obtain("k")));
}

/// As in a `static`: nothing but the first poll needs a runtime.
pub(crate) fn a_registry_made_outside_a_runtime_works_in_one<W: World>(w: &W) {
    let registry = w.lazy_builder().build();
    let lock = registry.obtain("k");
    let acquire = lock.acquire();
    let work = async { 7 }.with_lock((&registry, "other"));
    runtime().block_on(async {
        assert!(acquire.await.unwrap());
        assert_eq!(work.await.unwrap(), 7);
        assert!(lock.release().await.unwrap());
        registry.shutdown().await;
    });
}
