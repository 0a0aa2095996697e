//! Runtimes that come and go under a registry. Time is real here, on whatever store.

use std::any::Any;
use std::cell::RefCell;
use std::future::pending;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures::{StreamExt, stream};
use lockstream::{FutureLockExt, Leadership, Lock, LockRegistry, Renewal, StreamLockExt};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep, timeout};
use tracing::Level;

use crate::assert_err;
use crate::hearing::Log;
use crate::world::{
    LATE_AT_A_SERVER, SOON, World, assert_took, eventually, free, idle, ms, poll_once, waiting,
};

/// How late real time may make things on a busy machine.
const LATE: Duration = LATE_AT_A_SERVER;

/// Of the leases here that are renewed.
const TTL: Duration = ms(3000);

fn renewed(registry: &LockRegistry) -> Lock {
    let lock = registry.obtain("k").ttl(TTL);
    lock.renewal(Renewal::watchdog())
}

fn runtime() -> Runtime {
    let mut builder = Builder::new_multi_thread();
    builder.worker_threads(1).enable_all().build().unwrap()
}

/// Its lease lasts as long as it said, and no longer; neither a loss nor a drop needs the dead runtime.
pub(crate) fn a_runtime_dropped_right_after_a_lease_was_taken(w: &dyn World) {
    let first = runtime();
    let registry = first.block_on(w.registry());
    // It lasts until the other has connected.
    let lock = registry.obtain("k").ttl(ms(2500));
    let lease = first.block_on(lock.lease()).unwrap();
    drop(first);
    let begin = Instant::now();
    assert!(lease.is_valid());
    runtime().block_on(async {
        let other = w.registry().await;
        let other = other.obtain("k");
        assert!(!other.acquire_once().await.unwrap());
        assert!(other.acquire().await.unwrap());
        assert!(begin.elapsed() <= ms(2500) + LATE);
        assert!(!lease.is_valid());
        assert!(lease.lost().await.is_lost());
        drop(lease);
        assert!(other.is_acquired());
        assert!(other.release().await.unwrap());
    });
}

/// Dropped in the last line of its runtime it may be released by nobody, but then it runs out.
pub(crate) fn a_lease_dropped_with_its_runtime_runs_out(w: &dyn World) {
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

pub(crate) fn a_lease_of_one_runtime_is_released_on_another(w: &dyn World) {
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
pub(crate) fn a_registry_outlives_its_runtimes(w: &dyn World) {
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
            let lost = std::future::pending::<()>().with_lock(registry.obtain("k").ttl(ms(500)));
            let begin = Instant::now();
            assert_err!(lost.await, Lost, "k");
            assert_took(begin, ms(493), LATE);
        });
    }
}

/// Two runtimes at once, and the one on which the registry's tasks run goes: the other's waiters must neither wait past
/// their time nor miss their turn.
pub(crate) fn waiters_outlive_another_runtime(w: &dyn World) {
    let (registry, other) = (
        w.lazy_builder().build().unwrap(),
        w.lazy_builder().build().unwrap(),
    );
    let (first, second) = (runtime(), runtime());
    let held = second
        .block_on(other.obtain("k").ttl(ms(60_000)).lease())
        .unwrap();
    let begin = std::time::Instant::now();
    // The first who waits brings the tasks to its runtime.
    let lock = registry.obtain("k");
    let early = first.spawn(async move { lock.acquire_within(ms(9000)).await });
    second.block_on(waiting(&other.obtain("k"), 1));
    let lock = registry.obtain("k");
    let timely = second.spawn(async move {
        let begin = Instant::now();
        (lock.acquire_within(ms(3000)).await, begin.elapsed())
    });
    let lock = registry.obtain("k");
    let patient = second.spawn(async move { lock.lease_within(ms(12_000)).await });
    second.block_on(eventually("both wait", async || begin.elapsed() > ms(200)));
    drop(first);
    second.block_on(async {
        assert!(early.await.unwrap_err().is_cancelled());
        let timely = timeout(ms(7000), timely).await;
        let (acquired, took) = timely.expect("waits past its time").unwrap();
        assert!(!acquired.unwrap());
        assert!(took >= ms(2999) && took <= ms(3000) + LATE, "{took:?}");
        held.release().await.unwrap();
        let patient = timeout(ms(3000), patient).await;
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
pub(crate) fn a_loss_is_told_after_another_runtime_is_gone(w: &dyn World) {
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
    second.block_on(eventually("the work runs", async || {
        registry.in_use() == 2 || lost.is_finished()
    }));
    drop(first);
    second.block_on(async {
        let lost = timeout(ms(3000), lost).await;
        let (lost, took) = lost.expect("the loss is not told").unwrap();
        assert_err!(lost, Lost, "k");
        assert!(took <= ms(700) + LATE, "{took:?}");
        kept.release().await.unwrap();
    });
}

/// D7: a guard outlives the runtime that acquired it, and nobody looks at it meanwhile. It was renewed no more, though
/// another runtime was there. One that was forgotten is renewed as well.
pub(crate) fn a_lease_is_renewed_by_the_runtime_that_is_left(w: &dyn World) {
    for second_works in [false, true] {
        let registry = w.lazy_builder().build().unwrap();
        let (first, second) = (runtime(), runtime());
        // Whoever comes first has the registry's tasks on its runtime.
        let early =
            second_works.then(|| second.block_on(registry.obtain("early").lease()).unwrap());
        let lease = first.block_on(renewed(&registry).lease()).unwrap();
        let forgotten = registry.obtain("forgotten").ttl(TTL);
        let forgotten = forgotten.renewal(Renewal::watchdog()).lease();
        std::mem::forget(first.block_on(forgotten).unwrap());
        let other = second.block_on(registry.obtain("other").lease()).unwrap();
        drop(first);
        second.block_on(async {
            sleep(2 * TTL).await;
            assert!(lease.is_valid() && other.is_valid());
            let rival = w.registry().await;
            for key in ["k", "forgotten"] {
                assert!(!rival.obtain(key).acquire_once().await.unwrap());
            }
            for lease in [lease, other].into_iter().chain(early) {
                lease.release().await.unwrap();
            }
            registry.shutdown().await;
        });
    }
}

/// D7: the registry knows no other runtime when the first one ends, until somebody looks at the guard.
pub(crate) fn a_lease_is_renewed_where_it_is_looked_at(w: &dyn World) {
    let registry = w.lazy_builder().build().unwrap();
    let first = runtime();
    let lease = first.block_on(renewed(&registry).lease()).unwrap();
    drop(first);
    runtime().block_on(async {
        assert!(lease.is_valid());
        sleep(2 * TTL).await;
        assert!(lease.is_valid());
        lease.release().await.unwrap();
    });
}

/// D7: the registry's tasks are not left to a runtime without timers, though a guard was looked at there last. They
/// panicked there, which closed the registry.
pub(crate) fn a_runtime_without_timers_is_passed_over(w: &dyn World) {
    let registry = w.lazy_builder().build().unwrap();
    let (first, second) = (runtime(), runtime());
    let without_timers = Builder::new_current_thread().build().unwrap();
    let lease = first.block_on(renewed(&registry).lease()).unwrap();
    let other = second.block_on(registry.obtain("other").lease()).unwrap();
    let mut lost = lease.lost();
    without_timers.block_on(async { assert!(poll_once(&mut lost).await.is_none()) });
    drop(first);
    without_timers.block_on(async {
        for _ in 0..10 {
            tokio::task::yield_now().await;
        }
    });
    second.block_on(async {
        sleep(2 * TTL).await;
        assert!(lease.is_valid() && other.is_valid());
        lease.release().await.unwrap();
        other.release().await.unwrap();
    });
}

/// D7: work under a lock begins on one runtime and goes on on another, before or after the first one has ended. It was
/// dropped as if its lease were lost, or lost it and was not told.
pub(crate) fn work_that_moves_to_another_runtime_keeps_its_lease(w: &dyn World) {
    for moves_first in [false, true] {
        let registry = w.lazy_builder().build().unwrap();
        let (first, second) = (runtime(), runtime());
        let (go_on, gate) = oneshot::channel();
        let has_moved = Arc::new(AtomicBool::new(false));
        let moved = has_moved.clone();
        let work = async move {
            gate.await.unwrap();
            moved.store(true, Ordering::Relaxed);
            sleep(2 * TTL).await;
        };
        let mut work = Box::pin(work.with_lock(renewed(&registry)));
        let begins = async {
            while registry
                .snapshot()
                .keys
                .iter()
                .all(|key| key.held.is_empty())
            {
                assert!(poll_once(&mut work).await.is_none());
                sleep(ms(5)).await;
            }
        };
        first
            .block_on(async { timeout(SOON, begins).await })
            .unwrap();
        go_on.send(()).unwrap();
        let work = if moves_first {
            let work = second.spawn(work);
            second.block_on(eventually("it has moved", async || {
                has_moved.load(Ordering::Relaxed)
            }));
            drop(first);
            work
        } else {
            drop(first);
            second.spawn(work)
        };
        second.block_on(work).unwrap().unwrap();
        second.block_on(free(&registry.obtain("k")));
    }
}

pub(crate) fn a_drop_on_a_thread_without_a_runtime_releases(w: &dyn World) {
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
    runtime.block_on(async { assert!(poll_once(&mut acquire).await.is_none()) });
    std::thread::spawn(move || drop(acquire)).join().unwrap();
    drop(_held);
    runtime.block_on(free(&registry.obtain("k")));
}

/// As in a `static`: nothing but the first poll needs a runtime.
pub(crate) fn a_registry_made_outside_a_runtime_works_in_one(w: &dyn World) {
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

thread_local! {
    static LOCAL: RefCell<Vec<Box<dyn Any>>> = const { RefCell::new(Vec::new()) };
}

/// Its destructor panicked where the locals of the crate and of tokio were gone, and the process aborted.
pub(crate) fn what_is_in_a_local_of_a_thread_is_released_at_its_end(w: &dyn World) {
    let home = runtime();
    let registry = home.block_on(w.registry());
    let other = home.block_on(w.registry());
    let waited_for = home.block_on(other.obtain("wait").lease()).unwrap();
    for has_own in [false, true] {
        let locks = registry.clone();
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                // Before any other local: it is dropped after them.
                LOCAL.with(|_| ());
                match has_own {
                    true => {
                        let mut own = Builder::new_current_thread();
                        own.enable_all().build().unwrap().block_on(fill(locks));
                    }
                    false => home.block_on(fill(locks)),
                }
            });
            thread.join().unwrap();
        });
        home.block_on(async {
            for key in &KEYS[..7] {
                free(&other.obtain(*key)).await;
            }
            waiting(&other.obtain("wait"), 0).await;
            idle(&registry).await;
        });
    }
    home.block_on(waited_for.release()).unwrap();
    drop((registry, other));
}

const KEYS: [&str; 8] = [
    "guard", "handle", "work", "stream", "lead", "a", "b", "wait",
];

/// Something of every kind, each with a key of its own.
async fn fill(locks: LockRegistry) {
    let guard = locks.obtain("guard").lease().await.unwrap();
    keep(guard.lost());
    keep(guard.view());
    keep(guard);
    let handle = locks.obtain("handle");
    assert!(handle.acquire().await.unwrap());
    keep(handle.release());
    keep(handle);
    let mut work = Box::pin(pending::<()>().with_lock(locks.obtain("work")));
    let mut rows = Box::pin(stream::pending::<()>().with_lock(locks.obtain("stream")));
    let mut campaign = locks.obtain("lead").leadership();
    let leads = campaign.next().await;
    assert!(matches!(leads, Some(Leadership::Leader(_))), "{leads:?}");
    keep(campaign);
    keep(locks.obtain_all(["a", "b"]).lease().await.unwrap());
    let mut wait = locks.obtain("wait").acquire();
    eventually("all are held, and it waits", async || {
        let waits = poll_once(&mut wait).await.is_none();
        let works = poll_once(&mut work).await.is_none();
        let runs = futures::poll!(rows.next()).is_pending();
        assert!(waits && works && runs);
        let snapshot = locks.snapshot();
        snapshot
            .keys
            .iter()
            .filter(|key| !key.held.is_empty())
            .count()
            == KEYS.len() - 1
    })
    .await;
    keep(work);
    keep(rows);
    keep(wait);
    keep(locks.shutdown());
    keep(locks.events());
    keep(locks);
}

fn keep(value: impl Any) {
    LOCAL.with_borrow_mut(|local| local.push(Box::new(value)));
}

/// The end of `main`, or of a test, on however many threads: tasks end in any order there. The end of our own, before that
/// of the registry or of a lease, looked like an outage in one of three.
pub(crate) fn a_clean_end_warns_of_nothing(w: &dyn World) {
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
