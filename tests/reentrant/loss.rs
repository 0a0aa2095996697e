//! Who shares a lease shares its end; what becomes of the work is each combinator's own.

use std::cell::Cell;
use std::future::pending;

use futures::{FutureExt, StreamExt, stream};
use lockstream::{FutureLockExt, LockError, OnLost, StreamLockExt};
use tokio::time::timeout;

use crate::scene::{BOUND, KEY, SHORT, Scene, World, ms};
use crate::{assert_waited_in_vain, scene};

/// Counts what was dropped.
struct Dropped<'a>(&'a Cell<u32>);

impl Drop for Dropped<'_> {
    fn drop(&mut self) {
        self.0.set(self.0.get() + 1);
    }
}

pub(crate) async fn a_loss_stops_everything<W: World>(s: &Scene<W>) {
    let dropped = Cell::new(0);
    let never = async {
        let _dropped = Dropped(&dropped);
        pending::<()>().await;
    };
    let rows = StreamLockExt::with_lock(stream::once(never), &s.nested);
    let middle = async {
        let _dropped = Dropped(&dropped);
        rows.collect::<Vec<_>>().await
    };
    let outer = middle.with_lock(&s.nested);
    let outer = async {
        let _dropped = Dropped(&dropped);
        outer.await
    };
    let lock = s.here.obtain(KEY).ttl(SHORT);
    let told = timeout(BOUND, outer.with_lock(lock))
        .await
        .expect("it ends");
    assert!(matches!(told, Err(LockError::Lost { .. })), "{told:?}");
    assert_eq!(dropped.get(), 3);
}

/// Three deep, every one of the eight ways: the outermost that stops, stops all that is in it.
pub(crate) async fn each_combinator_stops_or_runs_on_by_itself<W: World>(s: &Scene<W>) {
    let ways = [OnLost::Stop, OnLost::RunOn];
    for outer in ways {
        for middle in ways {
            for inner in ways {
                let lock = s.here.obtain(KEY).ttl(SHORT).on_lost(outer);
                let nested = |on_lost| s.nested.clone().on_lost(on_lost);
                let work = lock.with_lease(async |lease| {
                    let nest = nested(middle).with_lease(async |view| {
                        assert_eq!(view.token(), lease.token());
                        let inmost = async {
                            assert!(view.lost().await.is_lost());
                            tokio::time::sleep(ms(5)).await;
                        };
                        inmost.with_lock(nested(inner)).await
                    });
                    nest.await
                });
                let told = timeout(BOUND, work).await.expect("it ends");
                let lost = |error: &LockError| error.is_lost() && error.key() == KEY;
                let right = match (&told, outer, middle, inner) {
                    (Err(error), OnLost::Stop, _, _) => lost(error),
                    (Ok(Err(error)), OnLost::RunOn, OnLost::Stop, _) => lost(error),
                    (Ok(Ok(Err(error))), OnLost::RunOn, OnLost::RunOn, OnLost::Stop) => lost(error),
                    (Ok(Ok(Ok(()))), OnLost::RunOn, OnLost::RunOn, OnLost::RunOn) => true,
                    _ => false,
                };
                assert!(right, "{outer:?} {middle:?} {inner:?}: {told:?}");
            }
        }
    }
}

pub(crate) async fn a_release_of_one_of_many_tells_the_loss<W: World>(s: &Scene<W>) {
    let lock = s.here.obtain(KEY).ttl(SHORT).on_lost(OnLost::RunOn);
    let work = lock.with_lease(async |lease| {
        let (first, second) = (s.nested.lease().await, s.nested.lease().await);
        let (first, second) = (first.unwrap(), second.unwrap());
        assert!(s.nested.acquire().await.unwrap());
        assert!(timeout(BOUND, second.lost()).await.unwrap().is_lost());
        assert!(!first.is_valid() && !s.nested.is_acquired());
        let told = first.release().now_or_never().expect("at once");
        assert!(
            matches!(told, Err(LockError::Lost { token, .. }) if token == lease.token()),
            "{told:?}"
        );
        let told = s.nested.release().now_or_never().expect("at once");
        assert!(matches!(told, Err(LockError::Lost { .. })), "{told:?}");
        second
    });
    let last = work.await.unwrap();
    let told = last.release().await;
    assert!(matches!(told, Err(LockError::Lost { .. })), "{told:?}");
}

/// In the very poll in which the registry is shut down, for in the next one the work is gone.
pub(crate) async fn a_release_of_one_of_many_tells_the_shutdown<W: World>(s: &Scene<W>) {
    let checked = Cell::new(false);
    let work = async {
        let guard = s.nested.lease().await.unwrap();
        let mut shutdown = s.here.shutdown();
        let _ = futures::poll!(&mut shutdown);
        let told = guard.release().now_or_never().expect("at once");
        assert!(matches!(told, Err(LockError::Closed { .. })), "{told:?}");
        let told = s.nested.lease().now_or_never().expect("at once");
        assert!(matches!(told, Err(LockError::Closed { .. })), "{told:?}");
        checked.set(true);
        pending::<()>().await;
    };
    let told = work.with_lock(&s.lock).await;
    assert!(matches!(told, Err(LockError::Closed { .. })), "{told:?}");
    assert!(checked.get());
    s.here.shutdown().await;
}

/// A lease that is over is not shared: the lock is taken again, and nested in that.
pub(crate) async fn what_is_nested_in_what_was_lost_queues<W: World>(s: &Scene<W>) {
    let lock = s.here.obtain(KEY).ttl(SHORT).on_lost(OnLost::RunOn);
    let work = lock.with_lease(async |lease| {
        timeout(BOUND, lease.lost()).await.expect("it is lost");
        let theirs = timeout(BOUND, s.there.obtain(KEY).lease()).await;
        let theirs = theirs.expect("it is free").unwrap();
        assert_waited_in_vain!(s.nested.lease().await);
        theirs.release().await.unwrap();
        let again = s.nested.with_lease(async |again| {
            assert!(again.token() > lease.token());
            assert_eq!(s.inmost().await, again.token());
            assert!(again.is_valid());
        });
        again.await.unwrap();
        assert!(!s.is_busy().await, "the second was its own outermost");
    });
    work.await.unwrap();
}

pub(crate) async fn a_shutdown_ends_everything<W: World>(s: &Scene<W>) {
    let (inside, dropped) = (Cell::new(false), Cell::new(0));
    let deep = async {
        let _dropped = Dropped(&dropped);
        let guard = s.nested.lease().await.unwrap();
        let run_on = s.nested.clone().on_lost(OnLost::RunOn);
        inside.set(true);
        guard.lost().with_lock(run_on).await
    };
    let lock = s.lock.clone().on_lost(OnLost::RunOn);
    let outer = deep.with_lock(&s.nested).with_lock(lock);
    let shutdown = async {
        scene::eventually("it holds", || inside.get()).await;
        s.here.shutdown().await;
    };
    let (told, ()) = tokio::join!(outer, shutdown);
    assert!(matches!(told, Err(LockError::Closed { .. })), "{told:?}");
    assert_eq!(dropped.get(), 1);
    let told = s.nested.lease().await;
    assert!(matches!(told, Err(LockError::Closed { .. })), "{told:?}");
}

pub(crate) async fn who_carries_it_out_learns_of_the_loss<W: World>(s: &Scene<W>) {
    let lock = s.here.obtain(KEY).ttl(SHORT);
    let guard = async { s.nested.lease().await.unwrap() };
    let guard = guard.with_lock(lock).await.unwrap();
    let told = timeout(BOUND, guard.lost()).await.expect("it is lost");
    assert!(told.is_lost() && !guard.is_valid());
    drop(guard);
}
