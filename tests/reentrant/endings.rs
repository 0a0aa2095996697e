//! The lock is free when the last that shares the lease is gone, and not before.

use std::future::pending;
use std::panic::AssertUnwindSafe;

use futures::FutureExt;
use lockstream::{FutureLockExt, LockError, OnFinish};
use tokio::task::yield_now;

use crate::assert_waited_in_vain;
use crate::scene::{BOUND, KEY, SHORT, Scene, World};

pub(crate) async fn the_inner_one_goes_first<W: World>(s: &Scene<W>) {
    let outer = s.lock.with_lease(async |lease| {
        let inner = s.nested.lease().await.unwrap();
        let view = inner.view();
        drop(inner);
        yield_now().await;
        assert!(s.is_busy().await && view.is_valid() && lease.is_valid());
        assert!(view.lost().now_or_never().is_none());
        view
    });
    let view = outer.await.unwrap();
    assert!(!view.is_valid() && !s.is_busy().await);
    assert!(view.lost().now_or_never().is_none(), "it was not lost");
}

pub(crate) async fn a_guard_that_was_carried_out_goes_last<W: World>(s: &Scene<W>) {
    let carried = async { s.nested.lease().await.unwrap() };
    let carried = carried.with_lock(&s.nested).with_lock(&s.lock).await;
    let guard = carried.unwrap().unwrap();
    assert!(guard.is_valid() && s.is_busy().await);
    assert_waited_in_vain!(s.nested.lease().await);
    drop(guard);
    s.settles().await;
}

pub(crate) async fn a_guard_that_was_carried_out_may_be_released<W: World>(s: &Scene<W>) {
    let carried = async { [s.nested.lease().await, s.nested.lease().await] };
    let carried = carried.with_lock(&s.lock).await.unwrap();
    let [first, last] = carried.map(Result::unwrap);
    first.release().await.unwrap();
    assert!(last.is_valid() && s.is_busy().await);
    last.release().await.unwrap();
    assert!(!s.is_busy().await, "it waited for the store");
}

pub(crate) async fn a_handle_that_was_carried_out_goes_last<W: World>(s: &Scene<W>) {
    let told = s.nested.acquire().with_lock(&s.lock).await;
    assert!(told.unwrap().unwrap());
    assert!(s.nested.is_acquired() && s.is_busy().await);
    assert!(s.nested.release().await.unwrap());
    assert!(!s.nested.is_acquired() && !s.is_busy().await);
    assert!(!s.nested.release().await.unwrap());
}

/// A handle has one slot: what is acquired twice is released by one release. The work around
/// holds on.
pub(crate) async fn a_handle_does_not_count<W: World>(s: &Scene<W>) {
    let work = async {
        assert!(s.nested.acquire().await.unwrap());
        assert!(s.nested.acquire().await.unwrap());
        assert!(s.nested.release().await.unwrap());
        assert!(!s.nested.is_acquired());
        assert!(!s.nested.release().await.unwrap());
        assert!(s.is_busy().await);
        // And twice into a slot that is never emptied.
        assert!(s.nested.acquire().await.unwrap());
        assert!(s.nested.acquire().await.unwrap());
        drop(s.nested.clone());
    };
    work.with_lock(&s.lock).await.unwrap();
    assert!(s.is_busy().await);
    assert!(s.nested.release().await.unwrap());
    assert!(!s.is_busy().await);
}

pub(crate) async fn a_release_of_one_of_many_is_told_at_once<W: World>(s: &Scene<W>) {
    let work = async {
        let guard = s.nested.lease().await.unwrap();
        guard.release().now_or_never().expect("at once").unwrap();
        // One that is dropped unpolled leaves as well, and once.
        drop(s.nested.lease().await.unwrap().release());
        assert!(s.nested.acquire().await.unwrap());
        let told = s.nested.release().now_or_never().expect("at once");
        assert!(told.unwrap());
        assert!(s.is_busy().await);
    };
    work.with_lock(&s.lock).await.unwrap();
    assert!(!s.is_busy().await);
}

pub(crate) async fn inner_work_dropped_half_way<W: World>(s: &Scene<W>) {
    let outer = async {
        for polls in 0..3 {
            let deep = async { pending::<()>().with_lock(&s.nested).await };
            let mut inner = Box::pin(deep.with_lock(&s.nested));
            for _ in 0..polls {
                assert!(futures::poll!(&mut inner).is_pending());
            }
            drop(inner);
            yield_now().await;
            assert!(s.is_busy().await, "after {polls} polls");
        }
        s.inmost().await
    };
    outer.with_lock(&s.lock).await.unwrap();
    assert!(!s.is_busy().await);
}

pub(crate) async fn outer_work_dropped_half_way<W: World>(s: &Scene<W>) {
    let deep = async {
        let _guard = s.nested.lease().await.unwrap();
        assert!(s.nested.acquire().await.unwrap());
        let keeps = (s.nested.clone(), s.nested.lease_once().await);
        pending::<()>().with_lock(&keeps.0).await
    };
    let mut outer = Box::pin(deep.with_lock(&s.nested).with_lock(&s.lock));
    while !s.nested.is_acquired() {
        assert!(futures::poll!(&mut outer).is_pending());
        yield_now().await;
    }
    assert!(futures::poll!(&mut outer).is_pending());
    assert!(s.is_busy().await);
    drop(outer);
    assert!(s.is_busy().await, "the handle is still there");
    assert!(s.nested.release().await.unwrap());
}

/// What unwinds through nested locks takes their frames along.
pub(crate) async fn the_inner_one_panics<W: World>(s: &Scene<W>) {
    let broken = || async {
        yield_now().await;
        panic!("broken");
    };
    let work = async {
        let inner = broken().with_lock(&s.nested).with_lock(&s.nested);
        let caught = AssertUnwindSafe(inner).catch_unwind().await;
        assert!(caught.is_err());
        assert!(s.is_busy().await);
        s.inmost().with_lock(&s.nested).await.unwrap();
        // What panicked and is kept has its share.
        let mut kept = Box::pin(broken().with_lock(&s.nested));
        let caught = AssertUnwindSafe(kept.as_mut()).catch_unwind().await;
        assert!(caught.is_err());
        (kept,)
    };
    let (kept,) = work.with_lock(&s.lock).await.unwrap();
    assert!(s.is_busy().await);
    drop(kept);
    s.settles().await;
    let held = s.lock.lease().await.unwrap();
    assert_waited_in_vain!(s.nested.lease().await);
    held.release().await.unwrap();
}

pub(crate) async fn the_outer_one_panics<W: World>(s: &Scene<W>) {
    let work = async {
        let _guard = s.nested.lease().await.unwrap();
        s.inmost().with_lock(&s.nested).await.unwrap();
        panic!("broken");
    };
    let mut outer = Box::pin(work.with_lock(&s.nested).with_lock(&s.lock));
    let caught = AssertUnwindSafe(outer.as_mut()).catch_unwind().await;
    assert!(caught.is_err());
    assert!(s.is_busy().await, "kept, it holds");
    assert_waited_in_vain!(s.nested.lease().await);
    drop(outer);
    s.settles().await;
    let held = s.lock.lease().await.unwrap();
    assert_waited_in_vain!(s.nested.lease().await);
    held.release().await.unwrap();
}

/// Work under the nested lock that was begun inside and runs on outside is under the lock to its end.
pub(crate) async fn inner_work_carried_out_keeps_the_lock<W: World>(s: &Scene<W>) {
    let (go, gone) = tokio::sync::oneshot::channel::<()>();
    let outer = async {
        let work = async {
            gone.await.unwrap();
            s.is_busy().await
        };
        let mut inner = Box::pin(work.with_lock(&s.nested));
        assert!(futures::poll!(&mut inner).is_pending());
        (inner,)
    };
    let (inner,) = outer.with_lock(&s.lock).await.unwrap();
    assert!(s.is_busy().await);
    go.send(()).unwrap();
    assert!(inner.await.unwrap());
    assert!(!s.is_busy().await);
}

/// The end is the outermost lock's, whoever leaves last.
pub(crate) async fn the_outermost_says_how_it_ends<W: World>(s: &Scene<W>) {
    let lock = || s.here.obtain(KEY);
    let long = lock().ttl(BOUND);
    let expiring = s.nested.clone().on_finish(OnFinish::LetExpire);
    let guard = async { expiring.lease().await.unwrap() };
    let guard = guard.with_lock(&expiring).with_lock(&long).await;
    drop(guard.unwrap().unwrap());
    // Released: the key is not kept for what is left of its ttl, which would be over only then.
    let begin = tokio::time::Instant::now();
    s.settles().await;
    assert!(begin.elapsed() < BOUND / 2);

    let outer = lock().ttl(3 * SHORT).on_finish(OnFinish::LetExpire);
    let guard = async { s.nested.lease().await.unwrap() };
    let guard = guard.with_lock(&s.nested).with_lock(&outer).await;
    drop(guard.unwrap().unwrap());
    assert!(s.is_busy().await, "it is kept");
    s.settles().await;
}

/// What one takes away, the others have lost; what is nested in that queues.
pub(crate) async fn a_shared_lease_that_is_detached_is_lost_to_the_others<W: World>(s: &Scene<W>) {
    let mut detached = None;
    let work = async {
        let (guard, other) = (s.nested.lease().await, s.nested.lease().await);
        let other = other.unwrap();
        detached = Some(guard.unwrap().detach().unwrap());
        assert!(other.lost().await.is_lost() && !other.is_valid());
        assert_waited_in_vain!(s.nested.lease().await);
        let refused = other.detach().unwrap_err();
        assert!(refused.error().is_lost(), "{refused}");
        let told = refused.into_lease().release().now_or_never();
        let told = told.expect("at once");
        assert!(matches!(told, Err(LockError::Lost { .. })), "{told:?}");
    };
    let told = work.with_lock(&s.lock).await;
    assert!(matches!(told, Err(LockError::Lost { .. })), "{told:?}");
    assert!(s.is_busy().await, "it is another's now");
    let lease = s.there.adopt(detached.expect("it came so far"));
    lease.await.unwrap().release().await.unwrap();
}
