//! Runtimes that come and go under a registry. Time is real here, on whatever store.

use std::time::Duration;

use lockstream::FutureLockExt;
use tokio::runtime::{Builder, Runtime};
use tokio::time::Instant;
use tracing::Level;

use crate::assert_err;
use crate::hearing::Log;
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
    let (registry, other) = (
        w.lazy_builder().build().unwrap(),
        w.lazy_builder().build().unwrap(),
    );
    for _ in 0..3 {
        let runtime = runtime();
        runtime.block_on(async {
            let held = other.obtain("k").lease().await.unwrap();
            let lock = registry.obtain("k");
            // Its connection stands now.
            assert!(!lock.acquire_once().await.unwrap());
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

/// Two runtimes at once, and the one on which the registry's tasks run goes: the other's waiters must neither wait past
/// their time nor miss their turn.
pub(crate) fn waiters_outlive_another_runtime<W: World>(w: &W) {
    let (registry, other) = (
        w.lazy_builder().build().unwrap(),
        w.lazy_builder().build().unwrap(),
    );
    let (first, second) = (runtime(), runtime());
    let held = second
        .block_on(other.obtain("k").ttl(ms(8000)).lease())
        .unwrap();
    let begin = std::time::Instant::now();
    // The first who waits brings the tasks to its runtime.
    let lock = registry.obtain("k");
    let early = first.spawn(async move { lock.acquire_within(ms(4000)).await });
    second.block_on(waiting(&other.obtain("k"), 1));
    let lock = registry.obtain("k");
    let timely = second.spawn(async move {
        let begin = Instant::now();
        (lock.acquire_within(ms(600)).await, begin.elapsed())
    });
    let lock = registry.obtain("k");
    let patient = second.spawn(async move { lock.lease_within(ms(6000)).await });
    second.block_on(eventually("both wait", async || begin.elapsed() > ms(200)));
    drop(first);
    second.block_on(async {
        assert!(early.await.unwrap_err().is_cancelled());
        let timely = tokio::time::timeout(ms(3000), timely).await;
        let (acquired, took) = timely.expect("waits past its time").unwrap();
        assert!(!acquired.unwrap());
        assert!(took >= ms(599) && took <= ms(600) + LATE, "{took:?}");
        held.release().await.unwrap();
        let patient = tokio::time::timeout(ms(3000), patient).await;
        patient
            .expect("misses its turn")
            .unwrap()
            .unwrap()
            .release()
            .await
            .unwrap();
    });
}

/// A lease whose registry's tasks went with another runtime still tells its end.
pub(crate) fn a_loss_is_told_after_another_runtime_is_gone<W: World>(w: &W) {
    let registry = w.lazy_builder().build().unwrap();
    let (first, second) = (runtime(), runtime());
    let kept = first.block_on(registry.obtain("first").lease()).unwrap();
    let lost = second.spawn({
        let lock = registry.obtain("k").ttl(ms(700));
        let begin = Instant::now();
        async move {
            let lost = std::future::pending::<()>().with_lock(lock).await;
            (lost, begin.elapsed())
        }
    });
    second.block_on(eventually("the work runs", async || registry.in_use() == 2));
    drop(first);
    second.block_on(async {
        let lost = tokio::time::timeout(ms(3000), lost).await;
        let (lost, took) = lost.expect("the loss is not told").unwrap();
        assert_err!(lost, Lost, "k");
        assert!(took <= ms(700) + LATE, "{took:?}");
        kept.release().await.unwrap();
    });
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
    let registry = w.lazy_builder().build().unwrap();
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

/// The end of `main`, or of a test, on however many threads: tasks end in any order there. The end of our own, before that
/// of the registry or of a lease, looked like an outage in one of three.
pub(crate) fn a_clean_end_warns_of_nothing<W: World>(w: &W) {
    let log = Log::default();
    for round in 0..32 {
        let (drains, outlives) = (round & 1 == 1, round & 2 == 2);
        // Held by a task that ends with its runtime.
        let is_held = round >= 28;
        let (heard, here) = (log.clone(), log.hear(Level::WARN));
        let runtime = Builder::new_multi_thread()
            .worker_threads(2)
            .on_thread_start(move || std::mem::forget(heard.hear(Level::WARN)))
            .enable_all()
            .build()
            .unwrap();
        let registry = runtime.block_on(async {
            let registry = w.registry().await;
            let lock = registry.obtain("k");
            assert!(lock.acquire().await.unwrap());
            assert!(lock.release().await.unwrap());
            if is_held {
                let lease = registry.obtain(format!("k{round}")).lease().await.unwrap();
                tokio::spawn(async move {
                    let _lease = lease;
                    std::future::pending::<()>().await;
                });
            } else if drains {
                registry.drain(SOON).await;
            }
            outlives.then_some(registry)
        });
        drop(runtime);
        drop((registry, here));
        assert_eq!(log.text(), "", "round {round}");
    }
}
