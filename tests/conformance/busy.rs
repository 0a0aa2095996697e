//! Runtimes that are busy: a task computes, or blocks, for longer than a ttl. Time is real here, on whatever store.

use std::thread;
use std::time::{Duration, Instant};

use lockstream::{Lock, LockError, LockEvent, LockRegistry, LossCause, Renewal};
use tokio::runtime::{Builder, Runtime};
use tokio::time::timeout;

use crate::watch::told_so_far;
use crate::world::{
    BOUND, LATE_AT_A_SERVER, PATIENCE, World, free, is_held, ms, poll_once, waiting,
};

/// Of the leases here. A renewal that is due after a third may take two seconds.
const TTL: Duration = ms(3000);

fn renewed(registry: &LockRegistry, key: &str) -> Lock {
    let lock = registry.obtain(key).ttl(TTL);
    lock.renewal(Renewal::watchdog())
}

/// A runtime with so many threads; with 0 it runs on the thread that waits for it.
fn runtime(threads: usize) -> Runtime {
    let mut builder = match threads {
        0 => Builder::new_current_thread(),
        _ => Builder::new_multi_thread(),
    };
    if threads > 0 {
        builder.worker_threads(threads);
    }
    builder.enable_all().build().unwrap()
}

/// Runs work on another runtime. The present one is busy until then.
fn elsewhere<R: Send>(work: impl AsyncFnOnce() -> R + Send) -> R {
    thread::scope(|scope| scope.spawn(|| runtime(0).block_on(work())).join().unwrap())
}

/// Blocks the present runtime until that is so.
#[track_caller]
fn block_until(what: &str, mut condition: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !condition() {
        assert!(begin.elapsed() < BOUND, "not within {BOUND:?}: {what}");
        thread::sleep(ms(5));
    }
}

fn told_of(events: &[LockEvent]) -> usize {
    let is_of_it = |event: &&LockEvent| matches!(event, LockEvent::RuntimeBusy { .. });
    events.iter().filter(is_of_it).count()
}

/// The lease of the one that computes, and that of another task, which only sleeps. It computes right after an answer of
/// the store, so it has the thread that looks after timers and the network.
pub(crate) fn work_that_computes_keeps_every_lease(w: &dyn World) {
    thread::scope(|scope| {
        for threads in [0, 1, 2, 8] {
            scope.spawn(move || work_computes_on(w, threads));
        }
    });
}

fn work_computes_on(w: &dyn World, threads: usize) {
    let (aside, key) = (format!("bystander {threads}"), format!("k {threads}"));
    runtime(threads).block_on(async {
        let registry = w.registry().await;
        let bystander = renewed(&registry, &aside).lease().await.unwrap();
        let view = bystander.view();
        let beside = tokio::spawn(async move {
            tokio::time::sleep(2 * TTL).await;
            bystander
        });
        let lock = renewed(&registry, &key);
        let lease = tokio::spawn(async move {
            let lease = lock.lease().await.unwrap();
            thread::sleep(2 * TTL);
            lease
        });
        let lease = lease.await.unwrap();
        assert!(lease.is_valid() && view.is_valid(), "{threads} threads");
        assert!(beside.await.unwrap().is_valid());
        lease.release().await.unwrap();
    });
    elsewhere(async || {
        let other = w.registry().await;
        free(&other.obtain(&aside)).await;
        free(&other.obtain(&key)).await;
    });
}

/// One event each time, however long it lasts. What follows on the runtime finds the connection as it was.
pub(crate) fn a_busy_runtime_is_told_of_once_each_time(w: &dyn World) {
    runtime(0).block_on(async {
        let registry = w.registry().await;
        let mut events = registry.events();
        let lease = renewed(&registry, "k").lease().await.unwrap();
        for _ in 0..2 {
            thread::sleep(TTL);
            let told = told_so_far(&mut events).await;
            assert_eq!(told_of(&told), 1, "{told:#?}");
            assert!(registry.obtain("other").acquire_once().await.unwrap());
            // Its own tasks are looked for once more. A busy machine may keep the runtime from them, too.
            let (begin, mut longest) = (Instant::now(), ms(0));
            while begin.elapsed() < TTL / 2 {
                let round = Instant::now();
                tokio::time::sleep(ms(5)).await;
                longest = longest.max(round.elapsed());
            }
            let told = told_so_far(&mut events).await;
            assert!(
                told_of(&told) == 0 || longest > ms(50),
                "{longest:?}: {told:#?}"
            );
        }
        lease.release().await.unwrap();
    });
}

/// While it is busy nobody else notices anything of a connection that breaks.
pub(crate) fn an_outage_while_the_runtime_is_busy_is_outlasted(w: &dyn World) {
    runtime(0).block_on(async {
        let registry = w.registry().await;
        // Its first renewal is due when the store is back, and without one it ends before anybody looks.
        let lock = registry.obtain("k").ttl(2 * TTL);
        let lease = lock.renewal(Renewal::watchdog()).lease().await.unwrap();
        thread::sleep(TTL / 2);
        w.set_offline(true);
        thread::sleep(ms(300));
        w.set_offline(false);
        thread::sleep(2 * TTL);
        assert!(lease.is_valid());
        lease.release().await.unwrap();
    });
}

/// There is one truth about a lease: whoever computes can look.
pub(crate) fn a_loss_while_the_runtime_is_busy_is_seen_there(w: &dyn World) {
    runtime(0).block_on(async {
        let registry = w.registry().await;
        let lock = registry.obtain("k").ttl(2 * TTL);
        let lease = lock.renewal(Renewal::watchdog()).lease().await.unwrap();
        let deadline = lease.deadline();
        w.expire("k");
        block_until("the loss is seen", || !lease.is_valid());
        assert!(tokio::time::Instant::now() < deadline);
        assert!(lease.lost().await.is_lost());
    });
}

/// The lease of a caller that does not ask for it ends, and is not renewed by anybody else either.
pub(crate) fn a_fixed_lease_ends_while_the_runtime_is_busy(w: &dyn World) {
    runtime(0).block_on(async {
        let registry = w.registry().await;
        let renewed = renewed(&registry, "renewed").lease().await.unwrap();
        let fixed = registry.obtain("fixed").ttl(TTL).lease().await.unwrap();
        let other_has_it = elsewhere(async || {
            let other = w.registry().await;
            assert!(
                !other
                    .obtain("renewed")
                    .acquire_within(TTL + TTL / 2)
                    .await
                    .unwrap()
            );
            other.obtain("fixed").acquire_once().await.unwrap()
        });
        assert!(other_has_it && !fixed.is_valid() && renewed.is_valid());
    });
}

/// Also those of a registry that renews nothing.
pub(crate) fn callers_of_another_runtime_go_on_while_this_one_is_busy(w: &dyn World) {
    runtime(0).block_on(async {
        let registry = w.registry().await;
        // The registry's tasks are here from now on.
        let here = registry.obtain("here").ttl(PATIENCE).lease().await.unwrap();
        elsewhere(async || {
            let going_on = async {
                let once = registry.obtain("once").ttl(PATIENCE).lease_once().await;
                drop(once.unwrap().expect("it is free"));
                let there = registry.obtain("there").ttl(TTL).lease().await.unwrap();
                let waiting = registry.obtain("here");
                assert!(!waiting.acquire_within(ms(100)).await.unwrap());
                assert!(there.lost().await.is_lost());
            };
            timeout(BOUND, going_on)
                .await
                .expect("none of it waits for the busy runtime");
        });
        here.release().await.unwrap();
    });
}

/// A deadlock, say, must not keep its locks for ever.
pub(crate) fn a_runtime_that_stays_busy_loses_its_leases_in_the_end(w: &dyn World) {
    runtime(0).block_on(async {
        let longest = TTL + TTL / 2;
        let builder = w.builder().await.renew_while_busy(longest);
        let registry = builder.build().unwrap();
        let lease = renewed(&registry, "k").lease().await.unwrap();
        // However long the other takes to connect.
        let begin = Instant::now();
        elsewhere(async || {
            let other = w.registry().await;
            assert!(other.obtain("k").acquire().await.unwrap());
        });
        let kept_for = begin.elapsed();
        assert!(!lease.is_valid());
        let expected = longest..=longest + 2 * TTL + LATE_AT_A_SERVER;
        assert!(expected.contains(&kept_for), "{kept_for:?}");
        // It comes back after all.
        tokio::time::sleep(ms(100)).await;
        let lease = renewed(&registry, "other").lease().await.unwrap();
        thread::sleep(TTL + ms(500));
        assert!(lease.is_valid(), "and is kept for as long again");
    });
}

pub(crate) fn without_a_heartbeat_a_busy_runtime_loses_its_leases(w: &dyn World) {
    runtime(0).block_on(async {
        let builder = w.builder().await.renew_while_busy(Duration::ZERO);
        let registry = builder.build().unwrap();
        let first = Instant::now();
        let lease = loop {
            let lease = renewed(&registry, "k").lease().await.unwrap();
            // A renewal of one that was long in coming is on its way (W3), which is another cause.
            if lease.deadline() - tokio::time::Instant::now() > TTL / 4 * 3 {
                break lease;
            }
            assert!(first.elapsed() < PATIENCE, "none comes soon");
        };
        thread::sleep(TTL + ms(10));
        assert!(!lease.is_valid());
        let error = lease.lost().await;
        let LockError::Lost { cause, .. } = error else {
            panic!("{error}")
        };
        let LossCause::StoodStill { lasted, .. } = cause else {
            panic!("{cause}")
        };
        assert!(lasted > ms(500) && lasted < TTL, "{lasted:?}");
    });
}

/// A grant that comes meanwhile is taken by nobody, and goes to the next long before the lease would be over.
pub(crate) fn a_turn_that_comes_while_the_runtime_is_busy_goes_on(w: &dyn World) {
    runtime(0).block_on(async {
        let (registry, other) = (w.registry().await, w.registry().await);
        let held = other.obtain("k").lease().await.unwrap();
        let lock = registry.obtain("k").ttl(2 * TTL);
        let lock = lock.renewal(Renewal::watchdog());
        let mut first = Box::pin(lock.lease());
        assert!(poll_once(&mut first).await.is_none());
        waiting(&lock, 1).await;
        let took = elsewhere(async || {
            let third = w.registry().await;
            let third = third.obtain("k").ttl(TTL / 2);
            let mut second = Box::pin(third.lease());
            assert!(poll_once(&mut second).await.is_none());
            waiting(&third, 2).await;
            let begin = Instant::now();
            held.release().await.unwrap();
            drop(second.await.unwrap());
            begin.elapsed()
        });
        assert!(took < 2 * TTL, "{took:?}");
        let lease = first.await.unwrap();
        assert!(is_held(&lock).await && lease.is_valid());
    });
}

/// The threads of a runtime that is shut down may go on with what they do.
pub(crate) fn a_runtime_that_ends_while_it_is_busy_is_left(w: &dyn World) {
    let first = runtime(2);
    let lease = first.block_on(async {
        let registry = w.registry().await;
        let lease = renewed(&registry, "k").lease().await.unwrap();
        tokio::spawn(async move {
            registry.obtain("any").inspect().await.unwrap();
            thread::sleep(3 * TTL);
        });
        lease
    });
    thread::sleep(TTL + TTL / 2);
    assert!(lease.is_valid());
    first.shutdown_background();
    runtime(0).block_on(async {
        for _ in 0..30 {
            assert!(lease.is_valid());
            tokio::time::sleep(TTL / 20).await;
        }
        lease.release().await.unwrap();
    });
}
