//! Ops that a session loses: no key waits for an answer that never comes.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use futures::future::BoxFuture;
use tokio::time::{Instant, sleep, timeout};

use super::Silent;
use crate::base::{LockError, Renewal, StoreError};
use crate::engine::Engine;
use crate::handle::{Lease, LockRegistry};
use crate::store::contract::{
    KeyStatus, Op, OpResult, Session, SessionConfig, StoreEvents, SubmittedOp, dropped_error,
};

/// Far above what anything here takes on the paused clock.
const BOUND: Duration = Duration::from_secs(5);

/// The first pause before the store is asked again, and a little more.
const PAUSE: Duration = Duration::from_millis(110);

fn registry() -> (Silent, LockRegistry) {
    let store = Silent::default();
    let locks = LockRegistry::builder(store.clone());
    (store, locks.renewal(Renewal::watchdog()).build().unwrap())
}

async fn held(store: &Silent, locks: &LockRegistry) -> Lease {
    let mut lease = Box::pin(locks.obtain("k").lease());
    assert!(futures::poll!(&mut lease).is_pending());
    locks.engine.on_events(store.answers());
    lease.await.expect("it is free")
}

/// The one op that was asked for.
fn asked(store: &Silent) -> SubmittedOp {
    let mut asked = store.asked();
    assert_eq!(asked.len(), 1, "{asked:?}");
    asked.remove(0)
}

/// The key was never asked for again: whoever waited did so until its wait was over, and so did everybody after it.
#[tokio::test(start_paused = true)]
async fn a_lost_question_is_asked_again_and_for_the_same_owner() {
    let (store, locks) = registry();
    let mut lease = Box::pin(locks.obtain("k").lease());
    assert!(futures::poll!(&mut lease).is_pending());
    let first = asked(&store).op.clone();
    sleep(PAUSE).await;
    assert_eq!(asked(&store).op, first);
    // Its answer is lost on its way from the session.
    sleep(2 * PAUSE).await;
    drop(store.answers());
    sleep(4 * PAUSE).await;
    assert!(futures::poll!(&mut lease).is_pending());
    locks.engine.on_events(store.answers());
    assert!(lease.await.expect("it is free").is_valid());
}

/// Whoever asks once is told at once, and the store may have given the lock to it: it is released.
#[tokio::test(start_paused = true)]
async fn a_caller_that_asks_once_hears_of_the_loss() {
    let (store, locks) = registry();
    let mut once = Box::pin(locks.obtain("k").lease_once());
    assert!(futures::poll!(&mut once).is_pending());
    let owner = match asked(&store).op {
        Op::Attempt { owner, .. } => owner,
        ref other => panic!("{other:?}"),
    };
    let begin = Instant::now();
    match timeout(BOUND, once).await.expect("it is told") {
        Err(LockError::Store { source, .. }) => {
            assert_eq!(source.to_string(), dropped_error().to_string());
        }
        other => panic!("{other:?}"),
    }
    assert!(begin.elapsed() < Duration::from_millis(5));
    sleep(PAUSE).await;
    assert_eq!(asked(&store).op, Op::Release { owner });
}

#[tokio::test(start_paused = true)]
async fn a_lost_renewal_is_tried_again() {
    let (store, locks) = registry();
    let lease = held(&store, &locks).await;
    let deadline = lease.deadline();
    sleep(Duration::from_millis(10_001)).await;
    assert!(matches!(asked(&store).op, Op::Renew { .. }));
    sleep(PAUSE).await;
    locks.engine.on_events(store.answers());
    assert!(lease.deadline() > deadline);
}

#[tokio::test(start_paused = true)]
async fn a_lost_release_is_sent_again() {
    let (store, locks) = registry();
    let mut release = Box::pin(held(&store, &locks).await.release());
    assert!(futures::poll!(&mut release).is_pending());
    assert!(matches!(asked(&store).op, Op::Release { .. }));
    sleep(PAUSE).await;
    locks.engine.on_events(store.answers());
    release.await.expect("it was held");
    assert_eq!(locks.engine.in_use(), 0);

    // Nobody waits for it: only the session's loss wakes the timer.
    drop(held(&store, &locks).await);
    assert!(matches!(asked(&store).op, Op::Release { .. }));
    sleep(PAUSE).await;
    locks.engine.on_events(store.answers());
    assert_eq!(locks.engine.in_use(), 0);
}

/// A session that answers nothing must not keep a processor busy.
#[tokio::test(start_paused = true)]
async fn one_that_loses_everything_is_asked_less_and_less_often() {
    let (store, locks) = registry();
    let waiting = tokio::spawn(locks.obtain("k").lease_within(Duration::from_secs(60)));
    let mut lost = 0;
    while !waiting.is_finished() {
        sleep(Duration::from_millis(10)).await;
        lost += store.asked().len();
    }
    assert!((30..60).contains(&lost), "{lost}");
}

/// A session that may lose ops with its own lock held, which all calls of it take.
#[derive(Clone, Debug, Default)]
struct Locking {
    lock: Arc<Mutex<()>>,
    loses: Arc<AtomicBool>,
    /// How often it was started.
    starts: Arc<AtomicUsize>,
    /// Its registry, which is not locked when it is started.
    engine: Arc<Mutex<Weak<Engine>>>,
    asked: Silent,
}

impl Session for Locking {
    fn start(&self) {
        // A test that would wait here would do so for ever.
        drop(
            self.lock
                .try_lock()
                .expect("nothing is called under the lock"),
        );
        let engine = self.engine.lock().unwrap().upgrade();
        let is_locked = engine.is_some_and(|engine| engine.state.try_lock().is_none());
        assert!(!is_locked, "nothing is called under the registry's lock");
        self.starts.fetch_add(1, Ordering::Relaxed);
    }

    fn submit(&self, submitted: SubmittedOp) {
        let _locked = self
            .lock
            .try_lock()
            .expect("nothing is called under the lock");
        if self.loses.load(Ordering::Relaxed) {
            drop(submitted);
        } else {
            self.asked.submit(submitted);
        }
    }

    fn check(&self) -> BoxFuture<'static, Result<crate::base::Check, StoreError>> {
        unreachable!("nobody asks")
    }

    fn ask(&self, _: Arc<str>, _: Op) -> BoxFuture<'static, OpResult> {
        unreachable!("nobody asks")
    }

    fn inspect(&self, _: Arc<str>) -> BoxFuture<'static, Result<KeyStatus, StoreError>> {
        unreachable!("nobody looks")
    }
}

impl crate::store::sealed::Sealed for Locking {}

impl crate::store::LockStore for Locking {
    fn open(&self, _: SessionConfig) -> Arc<dyn Session> {
        Arc::new(self.clone())
    }
}

#[tokio::test(start_paused = true)]
async fn an_op_may_be_lost_under_the_sessions_lock() {
    let store = Locking::default();
    store.loses.store(true, Ordering::Relaxed);
    let locks = LockRegistry::builder(store.clone()).build().unwrap();
    let mut lease = Box::pin(locks.obtain("k").lease());
    for _ in 0..10 {
        assert!(futures::poll!(&mut lease).is_pending());
        sleep(PAUSE).await;
    }
    store.loses.store(false, Ordering::Relaxed);
    sleep(Duration::from_secs(2)).await;
    locks.engine.on_events(store.asked.answers());
    assert!(lease.await.expect("it is free").is_valid());
}

/// A session's tasks may have ended with their runtime. A quorum may tell of something at once when it is started.
#[tokio::test(start_paused = true)]
async fn a_session_is_started_for_each_that_comes_and_with_nothing_locked() {
    let store = Locking::default();
    let locks = LockRegistry::builder(store.clone()).build().unwrap();
    *store.engine.lock().unwrap() = Arc::downgrade(&locks.engine);
    let starts = || store.starts.swap(0, Ordering::Relaxed);
    let mut lease = Box::pin(locks.obtain("k").lease());
    assert!(futures::poll!(&mut lease).is_pending());
    assert_eq!(starts(), 1, "for the lock");
    locks.engine.on_events(store.asked.answers());
    let _lease = lease.await.expect("it is free");
    starts();
    assert!(locks.engine.session().is_some());
    assert_eq!(starts(), 1, "for a question about the store");
}

/// The last op may outlive its registry, whose destructor closes the session: it must not run under that one's lock.
#[tokio::test(start_paused = true)]
async fn an_op_does_not_keep_its_registry() {
    let (store, locks) = registry();
    let mut lease = Box::pin(locks.obtain("k").lease());
    assert!(futures::poll!(&mut lease).is_pending());
    let engine = Arc::downgrade(&locks.engine);
    locks.engine.disconnect();
    drop((lease, locks));
    assert_eq!(engine.strong_count(), 0);
    drop(store.asked());
}

/// A session that is closed drops what it still has, which nobody needs any more.
#[tokio::test(start_paused = true)]
async fn ops_lost_by_a_closed_registry_change_nothing() {
    let (store, locks) = registry();
    let leases = (0..1000).map(|number| locks.obtain(format!("k{number}")).lease());
    let leases = futures::future::join_all(leases);
    let mut leases = Box::pin(leases);
    assert!(futures::poll!(&mut leases).is_pending());
    let asked = store.asked();
    assert_eq!(asked.len(), 1000);
    locks.engine.close();
    locks.engine.disconnect();
    drop(asked);
    sleep(Duration::from_secs(10)).await;
    assert!(store.asked().is_empty());
    assert_eq!(
        (
            locks.engine.in_use(),
            locks.engine.state.lock().timeouts.len()
        ),
        (0, 0)
    );
    let leases = timeout(BOUND, leases).await.expect("they are told");
    assert!(leases.iter().all(Result::is_err));
}

/// As when the session's task is dropped by a panic.
#[tokio::test(start_paused = true)]
async fn an_op_may_be_lost_by_a_panic() {
    let (store, locks) = registry();
    let mut lease = Box::pin(locks.obtain("k").lease());
    assert!(futures::poll!(&mut lease).is_pending());
    let submitted = asked(&store);
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let _submitted = submitted;
        panic!("in a session");
    }));
    assert!(panicked.is_err());
    sleep(PAUSE).await;
    locks.engine.on_events(store.answers());
    assert!(lease.await.expect("it is free").is_valid());
}
