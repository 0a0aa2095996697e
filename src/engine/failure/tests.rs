//! A panic of our own closes the registry, and is told to everybody.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures::future::BoxFuture;
use futures::{FutureExt, StreamExt};
use tokio::time::timeout;

use crate::base::{Check, Clock, LockError, Renewal, StoreError};
use crate::engine::tests::Silent;
use crate::handle::LockRegistry;
use crate::observe::LockEvent;
use crate::store::MemoryStore;
use crate::store::contract::{
    Answer, KeyStatus, Op, OpResult, Outcome, Session, SessionConfig, StoreEvent, StoreEvents,
    SubmittedOp, run_task,
};

/// Far above what anything here takes on the paused clock.
const BOUND: Duration = Duration::from_secs(5);

fn is_closed<T>(result: Result<T, LockError>) -> bool {
    matches!(result, Err(LockError::Closed { .. }))
}

/// An answer that no store gives to an attempt.
fn impossible(submitted: SubmittedOp) -> StoreEvent {
    StoreEvent::Replied {
        submitted,
        result: Ok(Answer {
            at: 1,
            outcome: Outcome::Renewed,
        }),
    }
}

/// The state of the registry may be half changed: it is not used any more.
#[tokio::test(start_paused = true)]
async fn a_broken_invariant_closes_the_registry_and_no_other() {
    let store = Silent::default();
    let locks = LockRegistry::builder(store.clone()).build().unwrap();
    let engine = locks.engine.clone();
    let mut events = locks.events();
    let mut first = Box::pin(locks.obtain("held").lease());
    assert!(futures::poll!(&mut first).is_pending());
    engine.on_events(store.answers());
    let held = first.await.expect("it is free");
    let mut second = Box::pin(locks.obtain("released").lease());
    assert!(futures::poll!(&mut second).is_pending());
    engine.on_events(store.answers());
    let mut release = Box::pin(second.await.expect("it is free").release());
    assert!(futures::poll!(&mut release).is_pending());
    let mut waiting = Box::pin(locks.obtain("a busy").lease());
    assert!(futures::poll!(&mut waiting).is_pending());
    let detached = "lockstream-lease-1 00ab:17 64 99999999999999 adopted";
    let detached = detached.parse().expect("the format");
    let mut adopting = Box::pin(locks.adopt(detached));
    assert!(futures::poll!(&mut adopting).is_pending());
    let _unanswered = store.asked();
    let mut broken = Box::pin(locks.obtain("broken").lease());
    assert!(futures::poll!(&mut broken).is_pending());
    let submitted = store.asked().pop().expect("it was asked for");
    engine.on_event(impossible(submitted));

    assert!(
        timeout(BOUND, held.lost())
            .await
            .expect("it is told")
            .is_lost()
    );
    assert!(is_closed(
        timeout(BOUND, release).await.expect("it is told")
    ));
    assert!(is_closed(
        timeout(BOUND, waiting).await.expect("it is told")
    ));
    assert!(is_closed(
        timeout(BOUND, adopting).await.expect("it is told")
    ));
    assert!(is_closed(timeout(BOUND, broken).await.expect("it is told")));
    assert!(is_closed(locks.obtain("new").lease().await));
    assert!(locks.snapshot().keys.is_empty());
    let told: Vec<_> = timeout(BOUND, events.by_ref().collect())
        .await
        .expect("they end");
    assert!(
        told.iter()
            .any(|event| matches!(event, LockEvent::Lost { .. })),
        "{told:?}"
    );
    drop(held);
    timeout(BOUND, locks.shutdown())
        .await
        .expect("nothing is in use");
    assert!(
        store.asked().is_empty(),
        "nothing is sent by a registry that has failed"
    );

    let other = LockRegistry::in_memory();
    let lease = other.obtain("k").lease().await;
    assert!(lease.expect("another registry works").is_valid());
}

/// An event takes callers out of their turnstile to serve them. When it panics with one in its hands, the turnstile
/// does not know of that one any more.
#[tokio::test(start_paused = true)]
async fn callers_outside_the_turnstile_at_a_panic_are_told_too() {
    let locks = LockRegistry::builder(Silent::default()).build().unwrap();
    let mut waiting = Box::pin(locks.obtain("k").lease());
    assert!(futures::poll!(&mut waiting).is_pending());
    let done = locks.engine.at_once(|state, _| {
        let _entries = std::mem::take(&mut state.entries);
        panic!("with the entries in hand");
    });
    assert!(done.is_none());
    assert!(is_closed(
        timeout(BOUND, waiting).await.expect("it is told")
    ));
    let engine = Arc::downgrade(&locks.engine);
    drop(locks);
    assert_eq!(engine.strong_count(), 0, "it does not keep itself alive");
}

/// An event that panics has decided what its callers are told, and none of them was told yet. The turnstile does not know of
/// them any more.
#[tokio::test(start_paused = true)]
async fn callers_that_were_to_be_told_at_a_panic_are_told_too() {
    let locks = LockRegistry::builder(Silent::default()).build().unwrap();
    let mut waiting = Box::pin(locks.obtain("k").lease());
    assert!(futures::poll!(&mut waiting).is_pending());
    let key: Arc<str> = "k".into();
    let done = locks.engine.at_once(|state, at| {
        state.feed(at, &key, false, |lines, cx| {
            lines.feed_all(cx, |turnstile, cx| turnstile.drain(cx));
            panic!("with verdicts in hand");
        })
    });
    assert!(done.is_none());
    assert!(is_closed(
        timeout(BOUND, waiting).await.expect("it is told")
    ));
}

/// A user's panic unwinds through the end of a lease, where callers are dropped as well. That is no failure of ours.
#[tokio::test(start_paused = true)]
async fn a_lease_that_is_dropped_by_a_users_panic_closes_nothing() {
    let locks = LockRegistry::in_memory();
    let lease = locks.obtain("k").lease().await.expect("it is free");
    let waiting = tokio::spawn(locks.obtain("k").lease());
    tokio::task::yield_now().await;
    let work = std::panic::AssertUnwindSafe(async move {
        let _lease = lease;
        panic!("the user's work");
    });
    assert!(work.catch_unwind().await.is_err());
    let next = timeout(BOUND, waiting).await.expect("it is released");
    let next = next.expect("no panic").expect("the registry is open");
    assert!(next.is_valid());
}

/// Panics when it is told to, once.
#[derive(Clone, Default)]
struct Faulty(Arc<AtomicBool>);

impl Faulty {
    fn clock(&self) -> Clock {
        let faulty = self.0.clone();
        Clock::new(move || {
            assert!(!faulty.swap(false, Ordering::Relaxed), "the clock broke");
            Duration::ZERO
        })
    }
}

/// A panic in the timer's task used to pass for the end of its runtime: nothing was renewed any more, and work whose
/// lease ran out was told when it happened to be polled.
#[tokio::test(start_paused = true)]
async fn a_panic_in_the_timer_is_told_at_once() {
    let faulty = Faulty::default();
    let locks = LockRegistry::builder(MemoryStore::new())
        .renewal(Renewal::watchdog())
        .ttl(Duration::from_secs(30))
        .clock(faulty.clock())
        .build()
        .unwrap();
    let lease = locks.obtain("k").lease().await.expect("it is free");
    tokio::time::sleep(Duration::from_secs(1)).await;
    faulty.0.store(true, Ordering::Relaxed);
    // Nobody but the timer looks at the clock meanwhile, which it does once a second.
    tokio::time::sleep(Duration::from_millis(1500)).await;
    assert!(!faulty.0.load(Ordering::Relaxed), "it has panicked");
    let lost = lease.lost().now_or_never().expect("it is told");
    assert!(lost.is_lost());
    assert!(is_closed(locks.obtain("k").lease().await));
}

/// A session's task that panics takes what it knew with it. Whoever sleeps is woken by that, since nothing else may happen
/// in the registry any more, and the session goes.
#[tokio::test(start_paused = true)]
async fn a_panic_in_a_task_of_the_store_closes_the_registry() {
    for drains in [false, true] {
        let locks = LockRegistry::in_memory();
        let lease = locks.obtain("k").lease().await.expect("it is free");
        let loses = tokio::spawn(lease.lost().map(drop));
        let ends = match drains {
            true => tokio::spawn(locks.drain(Duration::from_secs(3600))),
            false => tokio::spawn(locks.events().for_each(|_| std::future::ready(()))),
        };
        tokio::task::yield_now().await;
        assert!(!loses.is_finished() && !ends.is_finished());
        let engine: Arc<dyn StoreEvents> = locks.engine.clone();
        let listener = Arc::downgrade(&engine);
        drop(engine);
        run_task(listener, async { panic!("in a task") }).await;
        assert!(
            timeout(BOUND, lease.lost())
                .await
                .expect("it is told")
                .is_lost()
        );
        // No time goes by: the timer does nothing that would wake them.
        for _ in 0..10 {
            tokio::task::yield_now().await;
        }
        assert!(loses.is_finished(), "whoever watches is told");
        assert!(
            ends.is_finished(),
            "whoever awaits the end is told: {drains}"
        );
        assert!(locks.check().await.is_err(), "it has no session any more");
    }
}

/// A session that panics when it is asked.
#[derive(Debug)]
struct Panics;

impl Session for Panics {
    fn start(&self) {}

    fn submit(&self, _: SubmittedOp) {
        panic!("in a call");
    }

    fn check(&self) -> BoxFuture<'static, Result<Check, StoreError>> {
        unreachable!("nobody asks")
    }

    fn ask(&self, _: Arc<str>, _: Op) -> BoxFuture<'static, OpResult> {
        unreachable!("nobody asks")
    }

    fn inspect(&self, _: Arc<str>) -> BoxFuture<'static, Result<KeyStatus, StoreError>> {
        unreachable!("nobody looks")
    }
}

impl crate::store::sealed::Sealed for Panics {}

impl crate::store::LockStore for Panics {
    fn open(&self, _: SessionConfig) -> Arc<dyn Session> {
        Arc::new(Self)
    }
}

/// The same where it panics in the call of whoever arrives: that one is not left waiting.
#[tokio::test(start_paused = true)]
async fn a_panic_in_a_call_of_the_store_closes_the_registry() {
    let locks = LockRegistry::builder(Panics).build().unwrap();
    let told = timeout(BOUND, locks.obtain("k").lease()).await;
    assert!(is_closed(told.expect("it is told")));
    assert_eq!(locks.engine.in_use(), 0);
}
