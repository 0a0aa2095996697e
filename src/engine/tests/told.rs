//! Who is told, by whom, and what the user's code may do then.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::Context;
use std::time::Duration;

use futures::task::ArcWake;
use futures::{FutureExt, StreamExt};
use tokio::time::sleep;

use super::Silent;
use crate::base::{Clock, LockError, Repeat};
use crate::handle::{Lease, LockRegistry};
use crate::observe::LockEvent;
use crate::store::MemoryStore;
use crate::store::contract::{StoreEvent, StoreEvents};

async fn held(store: &Silent, locks: &LockRegistry) -> Lease {
    let mut lease = Box::pin(locks.obtain("k").lease());
    assert!(futures::poll!(&mut lease).is_pending());
    locks.engine.on_events(store.answers());
    lease.await.expect("it is free")
}

/// Looks, when it is woken, whether the registry is locked.
struct Looks {
    locks: LockRegistry,
    found_unlocked: AtomicBool,
}

impl ArcWake for Looks {
    fn wake_by_ref(looks: &Arc<Self>) {
        let is_unlocked = looks.locks.engine.state.try_lock().is_some();
        looks.found_unlocked.store(is_unlocked, Ordering::Relaxed);
    }
}

/// Its waker is the user's code, which may use the registry.
#[tokio::test(start_paused = true)]
async fn a_reader_is_woken_for_a_busy_runtime_with_nothing_locked() {
    let locks = LockRegistry::in_memory();
    let _held = locks.obtain("k").lease().await.expect("it is free");
    let mut events = locks.events();
    let looks = Arc::new(Looks {
        locks: locks.clone(),
        found_unlocked: AtomicBool::new(false),
    });
    let waker = futures::task::waker(looks.clone());
    let mut cx = Context::from_waker(&waker);
    assert!(events.poll_next_unpin(&mut cx).is_pending());
    locks.engine.tell_busy(Duration::from_secs(1));
    assert!(looks.found_unlocked.load(Ordering::Relaxed));
    let told = events.next().now_or_never().expect("it is told");
    assert!(
        matches!(told, Some(LockEvent::RuntimeBusy { leases: 1, .. })),
        "{told:?}"
    );
}

/// Not only when its time is over.
#[tokio::test(start_paused = true)]
async fn a_drain_ends_with_the_answer_to_the_last_release() {
    let store = Silent::default();
    let locks = LockRegistry::builder(store.clone()).build().unwrap();
    let lease = held(&store, &locks).await;
    let mut drain = Box::pin(locks.drain(Duration::MAX));
    assert!(futures::poll!(&mut drain).is_pending(), "it is held");
    drop(lease);
    assert!(futures::poll!(&mut drain).is_pending(), "not answered yet");
    locks.engine.on_events(store.answers());
    assert!(futures::poll!(&mut drain).is_ready());
}

/// Its destructor has a fault.
struct Faulty;

impl Drop for Faulty {
    fn drop(&mut self) {
        assert!(std::thread::panicking(), "a user's fault");
    }
}

/// The policy of a wait is dropped where the wait ends, which is here the timer's task; that of a registry with the
/// registry. The panic of the first closed the registry, and that of the second unwound out of a drop.
#[tokio::test(start_paused = true)]
async fn a_policy_whose_destructor_panics_harms_nobody() {
    const PAUSE: Duration = Duration::from_secs(60);
    let of_registry = Faulty;
    let usual = Repeat::from_fn(move || {
        let _mine = &of_registry;
        || Some(PAUSE)
    });
    let own = Repeat::from_fn(|| {
        let of_wait = Faulty;
        move || {
            let _mine = &of_wait;
            Some(PAUSE)
        }
    });
    let store = Silent::default();
    let builder = LockRegistry::builder(store.clone()).repeat(usual);
    let locks = builder.build().unwrap();
    // Without grants, so that the policy is asked.
    locks.engine.on_event(StoreEvent::up(false));
    let lock = locks.obtain("busy").repeat(own);
    let mut waiting = Box::pin(lock.lease_within(Duration::from_secs(1)));
    assert!(futures::poll!(&mut waiting).is_pending());
    locks.engine.on_events(store.answers());
    let told = waiting.await;
    assert!(
        matches!(told, Err(LockError::NotAcquired { .. })),
        "{told:?}"
    );
    let lease = held(&store, &locks).await;
    assert!(lease.is_valid());
    drop((lease, lock));
    locks.engine.on_events(store.answers());
    let engine = Arc::downgrade(&locks.engine);
    drop(locks);
    assert_eq!(engine.strong_count(), 0, "and its policy with it");
}

/// A panic while the timer's task has nothing locked is no end of its runtime either.
#[tokio::test(start_paused = true)]
async fn a_panic_of_the_timer_between_two_changes_is_told_at_once() {
    // At how many reads from now the clock breaks.
    let breaks_at = Arc::new(AtomicU64::new(0));
    let left = breaks_at.clone();
    let clock = Clock::new(move || {
        let relaxed = Ordering::Relaxed;
        let left = left.fetch_update(relaxed, relaxed, |left| left.checked_sub(1));
        assert_ne!(left, Ok(1), "the clock broke");
        Duration::ZERO
    });
    let builder = LockRegistry::builder(MemoryStore::new()).clock(clock);
    let locks = builder.build().unwrap();
    let lease = locks.obtain("k").lease().await.expect("it is free");
    sleep(Duration::from_secs(1)).await;
    // Only the timer reads it meanwhile, once a second: for a change, and then for the time at which it comes back.
    breaks_at.store(2, Ordering::Relaxed);
    sleep(Duration::from_millis(1500)).await;
    assert_eq!(breaks_at.load(Ordering::Relaxed), 0, "it has panicked");
    let lost = lease.lost().now_or_never().expect("it is told");
    assert!(lost.is_lost());
}

/// Twenty losses of a second have a line each, and one more counts the others: when the second is over, though nothing
/// is in use any more, or when the registry goes.
#[cfg(any(feature = "redis", feature = "postgres"))]
#[tokio::test(start_paused = true)]
async fn losses_without_a_line_are_counted_in_time_or_at_the_end() {
    use crate::base::Renewal;
    use crate::store::contract::{Answer, Outcome, SubmittedOp};
    use crate::store::hearing::Log;

    let is_lost = |submitted: SubmittedOp| StoreEvent::Replied {
        submitted,
        result: Ok(Answer {
            at: 1,
            outcome: Outcome::Lost,
        }),
    };
    for goes in [false, true] {
        let log = Log::default();
        let _hearing = log.hear(tracing::Level::WARN);
        let told = || {
            let mut lines = log.take();
            lines.retain(|line| line.contains("lease lost"));
            lines
        };
        let store = Silent::default();
        let builder = LockRegistry::builder(store.clone()).renewal(Renewal::watchdog());
        let locks = builder.build().unwrap();
        let leases = (0..25).map(|key| locks.obtain(format!("k{key}")).lease());
        let mut leases = Box::pin(futures::future::join_all(leases));
        assert!(futures::poll!(&mut leases).is_pending());
        locks.engine.on_events(store.answers());
        let leases = leases.await;
        assert!(leases.iter().all(Result::is_ok));
        sleep(Duration::from_millis(10_001)).await;
        let renewals = store.asked().into_iter();
        locks.engine.on_events(renewals.map(is_lost).collect());
        assert_eq!(locks.engine.in_use(), 0);
        let lines = told();
        assert_eq!(lines.len(), 20, "{lines:?}");
        if goes {
            drop((leases, locks));
        } else {
            sleep(Duration::from_secs(2)).await;
        }
        let lines = told();
        assert_eq!(lines.len(), 1, "{lines:?}");
        assert!(lines[0].contains("lease lost: and 5 more"), "{lines:?}");
    }
}
