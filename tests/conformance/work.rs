//! Futures under a lock.

use std::cell::{Cell, RefCell};
use std::future::{Ready, pending, poll_fn};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::task::Poll;

use futures::future::FusedFuture;
use futures::{FutureExt, StreamExt, stream};
use lockstream::{FutureLockExt, LeaseView, LockError, StreamLockExt};
use tokio::time::{Instant, sleep};

use crate::assert_err;
use crate::waiting::assert_panics;
use crate::world::{World, assert_took, free, idle, is_held, ms, poll_once, waited, waiting};

pub(crate) async fn work_runs_under_the_lock(w: &dyn World) {
    let [here, there] = w.registries().await;
    let watch = there.obtain("k");
    let work = async {
        assert!(is_held(&watch).await);
        assert!(!watch.acquire_once().await.unwrap());
        // Locals may be borrowed, and the output is the work's own.
        "done"
    };
    assert_eq!(work.with_lock(here.obtain("k")).await.unwrap(), "done");
    // Completion waits for the release.
    assert!(!is_held(&watch).await);
    assert!(watch.acquire_once().await.unwrap());
}

pub(crate) async fn work_is_not_polled_while_others_hold_the_lock(w: &dyn World) {
    let [here, there] = w.registries().await;
    let held = here.obtain("k").lease().await.unwrap();
    let polled = Cell::new(false);
    let work = || async { polled.set(true) };
    for registry in [&there, &here] {
        let lock = registry.obtain("k").wait(ms(100));
        let begin = Instant::now();
        let error = assert_err!(work().with_lock(&lock).await, NotAcquired, "k");
        assert_took(begin, ms(100), w.late());
        assert!(waited(&error) >= ms(100) && waited(&error) <= ms(100) + w.late());
        let error = assert_err!(lock.with_lease(|_| work()).await, NotAcquired, "k");
        assert!(waited(&error) >= ms(100));
        assert_eq!(work().with_lock(&lock).or_skip().await.unwrap(), None);
        let skipped = lock.with_lease(|_| work()).or_skip().await;
        assert_eq!(skipped.unwrap(), None);
        let mine = async {
            polled.set(true);
            Ok::<_, LockError>(())
        };
        assert_err!(mine.try_with_lock(&lock).await, NotAcquired, "k");
    }
    assert!(!polled.get());
    held.release().await.unwrap();
}

pub(crate) async fn work_starts_when_the_lock_is_free(w: &dyn World) {
    let [here, there] = w.registries().await;
    let held = here.obtain("k").lease().await.unwrap();
    let lock = there.obtain("k");
    let released = Cell::new(false);
    let work = async { assert!(released.get(), "started under another's lease") };
    let begin = Instant::now();
    let (done, ()) = tokio::join!(work.with_lock(&lock), async {
        waiting(&lock, 1).await;
        released.set(true);
        held.release().await.unwrap();
    });
    done.unwrap();
    assert_took(begin, ms(0), w.late());
    assert!(!is_held(&lock).await);
}

#[derive(Debug)]
enum ShopError {
    Lock(LockError),
    SoldOut,
}

impl From<LockError> for ShopError {
    fn from(error: LockError) -> Self {
        Self::Lock(error)
    }
}

pub(crate) async fn work_that_errs_releases(w: &dyn World) {
    let registry = w.registry().await;
    let lock = registry.obtain("k");
    let sell = async || Err::<u8, _>(ShopError::SoldOut);
    // A `Result` is a value like any other.
    assert!(matches!(
        sell().with_lock(&lock).await,
        Ok(Err(ShopError::SoldOut))
    ));
    assert!(!is_held(&lock).await);
    assert!(matches!(
        sell().try_with_lock(&lock).await,
        Err(ShopError::SoldOut)
    ));
    assert!(!is_held(&lock).await);
    let skip = sell().try_with_lock(&lock).or_skip().await;
    assert!(matches!(skip, Err(ShopError::SoldOut)));
    let with_token = lock.try_with_lease(async |_| sell().await).await;
    assert!(matches!(with_token, Err(ShopError::SoldOut)));
    assert!(!is_held(&lock).await);

    let _held = lock.lease().await.unwrap();
    let busy = sell().try_with_lock(lock.clone().wait(ms(0))).await;
    assert!(matches!(busy, Err(ShopError::Lock(error)) if error.is_not_acquired()));
    let brief = lock.clone().wait(ms(0));
    let busy = brief.try_with_lease(async |_| sell().await).await;
    assert!(matches!(busy, Err(ShopError::Lock(error)) if error.is_not_acquired()));
}

/// The one error that is skipped is the lock's own, not one that the work brought from a lock inside it.
pub(crate) async fn an_inner_locks_busy_is_not_skipped(w: &dyn World) {
    let [here, there] = w.registries().await;
    let _held = there.obtain("inner").lease().await.unwrap();
    let inner = here.obtain("inner").wait(ms(5));
    let outer = here.obtain("outer");
    let rows = || StreamLockExt::with_lock(stream::iter([1]), &inner);

    let told = async {}.with_lock(&inner).try_with_lock(&outer).or_skip();
    assert_err!(told.await, NotAcquired, "inner");
    let told = async {}.with_lock(&inner).with_lock(&outer).or_skip().await;
    let told = told.unwrap().expect("the outer was free");
    assert_err!(told, NotAcquired, "inner");
    let told = outer.try_with_lease(|_| async {}.with_lock(&inner));
    assert_err!(told.or_skip().await, NotAcquired, "inner");
    let told = StreamLockExt::try_with_lock(rows(), &outer).or_skip();
    let mut told: Vec<_> = told.collect().await;
    assert_err!(told.pop().unwrap(), NotAcquired, "inner");
    assert!(told.is_empty());
    let told = outer.try_with_lease_stream(|_| rows()).or_skip();
    let mut told: Vec<_> = told.collect().await;
    assert_err!(told.pop().unwrap(), NotAcquired, "inner");
    assert!(told.is_empty());

    // And the lock's own.
    let work = async { Ok::<_, LockError>(1) };
    let told = work.try_with_lock(&inner).or_skip().await;
    assert_eq!(told.unwrap(), None);
    assert_eq!(rows().or_skip().count().await, 0);
    assert!(inner.lease().or_skip().await.unwrap().is_none());
}

/// Dropped at whatever await of the work, the lock is free at once, and so is the work's own.
pub(crate) async fn work_dropped_at_any_await_releases(w: &dyn World) {
    let [here, there] = w.registries().await;
    let (lock, other) = (here.obtain("k"), there.obtain("k"));
    for steps in 0..4 {
        let (step, guard) = (Cell::new(0), Arc::new(()));
        let inside = guard.clone();
        let step_now = &step;
        let work = async move {
            let _inside = inside;
            loop {
                step_now.set(step_now.get() + 1);
                if step_now.get() > steps {
                    pending::<()>().await;
                }
                tokio::task::yield_now().await;
            }
        };
        let mut running = Box::pin(work.with_lock(&lock));
        tokio::select! {
            biased;
            _ = &mut running => panic!("the work never ends"),
            () = async { while step.get() <= steps { tokio::task::yield_now().await } } => {}
        }
        assert!(is_held(&other).await);
        drop(running);
        assert_eq!(
            Arc::strong_count(&guard),
            1,
            "the work outlived its combinator"
        );
        let begin = Instant::now();
        assert!(other.acquire().await.unwrap());
        assert_took(begin, ms(0), w.late());
        assert!(other.release().await.unwrap());
        idle(&here).await;
    }
}

/// Before the first poll, in the queue, granted but not looked, and while the release runs.
pub(crate) async fn a_combinator_dropped_around_its_work_leaves_nothing(w: &dyn World) {
    let [here, there] = w.registries().await;
    let (lock, other) = (here.obtain("k"), there.obtain("k"));
    let polled = Cell::new(false);
    let work = || async { polled.set(true) };

    drop(work().with_lock(&lock));
    assert_eq!(here.in_use(), 0);

    let held = other.lease().await.unwrap();
    let mut in_line = Box::pin(work().with_lock(&lock));
    assert!(poll_once(&mut in_line).await.is_none());
    waiting(&other, 1).await;
    drop(in_line);
    waiting(&other, 0).await;

    let mut granted = Box::pin(work().with_lock(&lock));
    assert!(poll_once(&mut granted).await.is_none());
    waiting(&other, 1).await;
    held.release().await.unwrap();
    drop(granted);
    free(&other).await;
    assert!(!polled.get());

    w.set_latency(ms(20));
    let mut releasing = Box::pin(work().with_lock(&lock));
    while !polled.get() {
        assert!(poll_once(&mut releasing).await.is_none());
        tokio::task::yield_now().await;
        sleep(ms(1)).await;
    }
    drop(releasing);
    w.set_latency(ms(0));
    free(&other).await;
    idle(&here).await;
}

pub(crate) async fn work_that_panics_releases(w: &dyn World) {
    let registry = w.registry().await;
    let lock = registry.obtain("k");
    let work = async { panic!("as the case wants it") };
    let caught = AssertUnwindSafe(work.with_lock(&lock)).catch_unwind().await;
    assert!(caught.is_err());
    free(&lock).await;
    let caught = tokio::spawn({
        let work = async { panic!("as the case wants it, in a task") };
        work.with_lock(&lock)
    });
    assert!(caught.await.unwrap_err().is_panic());
    free(&lock).await;
    // Before there is a future, in one that leads, and in a stream.
    let begins = |_: LeaseView| -> Ready<()> { panic!("as the case wants it, at once") };
    let caught = AssertUnwindSafe(lock.with_lease(begins))
        .catch_unwind()
        .await;
    assert!(caught.is_err());
    free(&lock).await;
    let leads = lock.lead(async |_| panic!("as the case wants it, leading"));
    assert!(AssertUnwindSafe(leads).catch_unwind().await.is_err());
    free(&lock).await;
    let rows = stream::iter(0..3).inspect(|row| assert_ne!(*row, 2, "as the case wants it"));
    let rows = StreamLockExt::with_lock(rows, &lock).count();
    assert!(AssertUnwindSafe(rows).catch_unwind().await.is_err());
    free(&lock).await;
    // A future that panicked may be kept: it holds, and lets go when it is dropped.
    let work = async { panic!("as the case wants it, kept") };
    let mut kept = Box::pin(work.with_lock(&lock));
    let caught = AssertUnwindSafe(kept.as_mut()).catch_unwind().await;
    assert!(caught.is_err());
    drop(kept);
    free(&lock).await;
    idle(&registry).await;
}

pub(crate) async fn work_that_wants_its_token_gets_it(w: &dyn World) {
    let registry = w.registry().await;
    let lock = registry.obtain("k");
    let seen = RefCell::new(None);
    let token = lock
        .with_lease(async |lease| {
            assert!(lease.is_valid());
            assert_eq!(lease.key(), "k");
            assert!(lease.deadline() > Instant::now());
            *seen.borrow_mut() = Some(lease.clone());
            lease.token()
        })
        .await
        .unwrap();
    let view = seen.take().unwrap();
    assert_eq!(view.token(), token);
    // It sees the lease, and does not keep it.
    assert!(!view.is_valid());
    assert!(!is_held(&lock).await);
    // Pending for ever after a release.
    assert!(poll_once(&mut view.lost()).await.is_none());
    let later = lock.try_with_lease(async |lease| Ok::<_, LockError>(lease.token()));
    assert!(later.await.unwrap() > token);
    // Hot work is spawned inside.
    let sum = lock.with_lease(|_| tokio::spawn(async { 1 + 1 }));
    assert_eq!(sum.await.unwrap().unwrap(), 2);
}

pub(crate) async fn nested_locks_take_the_outermost_first(w: &dyn World) {
    let [here, there] = w.registries().await;
    let (a, b) = (there.obtain("a"), there.obtain("b"));
    let work = async {
        assert!(is_held(&a).await && is_held(&b).await);
        7
    };
    let both = work
        .with_lock(here.obtain("b"))
        .try_with_lock(here.obtain("a"));
    assert_eq!(both.await.unwrap(), 7);

    let _held = a.lease().await.unwrap();
    let both = async {}.with_lock((&here, "b")).try_with_lock((&here, "a"));
    let mut both = Box::pin(both);
    assert!(poll_once(&mut both).await.is_none());
    waiting(&a, 1).await;
    assert!(b.acquire_once().await.unwrap(), "the inner was taken first");
}

pub(crate) async fn done_combinators_say_so(w: &dyn World) {
    let registry = w.registry().await;
    let lock = registry.obtain("k");
    let mut work = Box::pin(async { 1 }.with_lock(&lock));
    assert!(!work.is_terminated());
    assert_eq!((&mut work).await.unwrap(), 1);
    assert!(work.is_terminated());
    assert_panics(&mut work).await;
    let mut work = Box::pin(lock.try_with_lease(async |_| Ok::<_, LockError>(1)));
    assert!(!work.is_terminated());
    assert_eq!((&mut work).await.unwrap(), 1);
    assert!(work.is_terminated());
    assert_panics(&mut work).await;

    let _held = lock.lease().await.unwrap();
    let mut skipped = Box::pin(async { 1 }.with_lock(lock.clone().wait(ms(0))).or_skip());
    assert!(!skipped.is_terminated());
    assert_eq!((&mut skipped).await.unwrap(), None);
    assert!(skipped.is_terminated());
    assert_panics(&mut skipped).await;
}

/// A wake-up of the work's own, while it runs, reaches it: the lock adds none and eats none.
pub(crate) async fn the_works_own_wakers_reach_it(w: &dyn World) {
    let registry = w.registry().await;
    let (sender, receiver) = tokio::sync::oneshot::channel();
    let mut polls = 0;
    let mut receiver = Box::pin(receiver);
    let work = poll_fn(|cx| {
        polls += 1;
        match receiver.as_mut().poll(cx) {
            Poll::Ready(value) => Poll::Ready((value.unwrap(), polls)),
            Poll::Pending => Poll::Pending,
        }
    });
    let running = work.with_lock(registry.obtain("k"));
    let (done, ()) = tokio::join!(running, async {
        sleep(ms(50)).await;
        sender.send("word").unwrap();
    });
    let (word, polls) = done.unwrap();
    assert_eq!(word, "word");
    assert!(polls <= 4, "polled {polls} times for nothing");
}
