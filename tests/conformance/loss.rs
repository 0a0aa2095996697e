//! Leases that are over before their holders are done.

use std::cell::Cell;
use std::future::pending;
use std::sync::Arc;

use futures::{StreamExt, stream};
use lockstream::{FutureLockExt, LockError, LockRegistry, OnLost, StreamLockExt};
use tokio::time::{Instant, sleep, sleep_until};

use crate::assert_err;
use crate::world::{BOUND, World, assert_took, eventually, is_held, ms, poll_once};

/// The usable part of a lease: its ttl but for 1 % and 2 ms.
fn usable(ttl: u64) -> std::time::Duration {
    ms(ttl) - ms(ttl) / 100 - ms(2)
}

pub(crate) async fn lost_work_is_dropped_at_once(w: &dyn World) {
    w.leases_last(ms(300));
    let [here, there] = w.registries().await;
    let lock = here.obtain("k").ttl(ms(500));
    let guard = Arc::new(());
    let inside = guard.clone();
    let begin = Instant::now();
    let lost = lock.with_lease(async |lease| {
        let _inside = inside;
        let (token, lost) = (lease.token(), lease.lost());
        tokio::spawn(async move {
            assert!(matches!(lost.await, LockError::Lost { token: of, .. } if of == token));
        });
        pending::<()>().await;
    });
    let mut lost = Box::pin(lost);
    let error = assert_err!((&mut lost).await, Lost, "k");
    assert!(error.is_lost());
    assert_took(begin, usable(500), w.late());
    assert_eq!(Arc::strong_count(&guard), 1, "the work outlived its lease");
    assert!(there.obtain("k").acquire().await.unwrap());
    assert!(begin.elapsed() <= ms(500) + w.late());
}

pub(crate) async fn a_lost_stream_is_dropped_at_once(w: &dyn World) {
    let registry = w.registry().await;
    let lock = registry.obtain("k").ttl(ms(500));
    let guard = Arc::new(());
    let inside = guard.clone();
    let rows = stream::iter([1, 2]).chain(stream::pending().inspect(move |_| {
        let _inside = &inside;
    }));
    let mut rows = Box::pin(rows.with_lock(&lock));
    let begin = Instant::now();
    assert_eq!(rows.next().await.unwrap().unwrap(), 1);
    assert_eq!(rows.next().await.unwrap().unwrap(), 2);
    assert_err!(rows.next().await.unwrap(), Lost, "k");
    assert_took(begin, usable(500), w.late());
    assert_eq!(
        Arc::strong_count(&guard),
        1,
        "the stream outlived its lease"
    );
    assert!(rows.next().await.is_none());

    // One that nobody polled meanwhile learns of it before it is polled.
    let nobody_holds = async || {
        let keys = registry.snapshot().keys;
        keys.iter().all(|key| key.held.is_empty())
    };
    let polled = Cell::new(0);
    let rows = stream::iter(1..).inspect(|_| polled.set(polled.get() + 1));
    let mut rows = Box::pin(rows.with_lock(&lock));
    assert_eq!(rows.next().await.unwrap().unwrap(), 1);
    // A lease that was long in coming is renewed once (W3).
    eventually("its lease is over", nobody_holds).await;
    assert_err!(rows.next().await.unwrap(), Lost, "k");
    assert_eq!(polled.get(), 1);
}

/// A value that is ready only when the lease is over is no value, also if the poll that made it began in time.
pub(crate) async fn work_done_too_late_has_lost(w: &dyn World) {
    let registry = w.registry().await;
    let lock = registry.obtain("k").ttl(ms(500));
    let work = async {
        block(w, &registry).await;
        "too late"
    };
    assert_err!(work.with_lock(&lock).await, Lost, "k");
    let work = block(w, &registry).with_lock(lock.clone().on_lost(OnLost::RunOn));
    work.await.unwrap();

    // A stream's end is as late as a value.
    let rows = stream::once(std::future::ready(())).chain(stream::once(block(w, &registry)));
    let mut rows = Box::pin(
        rows.take(2)
            .filter(|_| std::future::ready(false))
            .with_lock(&lock),
    );
    assert_err!(rows.next().await.unwrap(), Lost, "k");
    assert!(rows.next().await.is_none());
    // An item that comes too late is the last.
    let rows = stream::once(block(w, &registry)).with_lock(&lock);
    let told: Vec<_> = rows.collect().await;
    let late = matches!(told[..], [Ok(()), Err(LockError::Lost { .. })]);
    assert!(late, "{told:?}");
}

/// Takes its time within one poll, so that no timer of its runtime can come in between: until no lease of the registry
/// lasts. One that was long in coming was renewed once (W3).
async fn block(w: &dyn World, registry: &LockRegistry) {
    if w.is_paused() {
        // Its first poll moves the clock, and the rest would let the others look at it.
        let _ = poll_once(&mut Box::pin(tokio::time::advance(ms(550)))).await;
        return;
    }
    let lasts = || {
        let keys = registry.snapshot().keys;
        let mut held = keys.iter().flat_map(|key| &key.held);
        held.any(|lease| lease.deadline > Instant::now())
    };
    let begin = Instant::now();
    while lasts() {
        assert!(begin.elapsed() < BOUND, "a lease of 500 ms does not end");
        std::thread::sleep(ms(1));
    }
}

pub(crate) async fn run_on_lets_the_work_end(w: &dyn World) {
    let [here, there] = w.registries().await;
    let lock = here.obtain("k").ttl(ms(500)).on_lost(OnLost::RunOn);
    let other = there.obtain("k");
    let work = lock.with_lease(async |lease| {
        assert!(lease.is_valid());
        assert!(lease.lost().await.is_lost());
        assert!(!lease.is_valid());
        assert!(other.acquire().await.unwrap(), "it is another's by now");
        "value"
    });
    assert_eq!(work.await.unwrap(), "value");
    assert!(other.is_acquired(), "the late release took another's lock");
    assert!(other.release().await.unwrap());

    let rows = stream::iter([1, 2, 3]).then(async |row| {
        sleep(ms(250)).await;
        row
    });
    let rows: Vec<_> = rows.with_lock(&lock).collect().await;
    let rows: Vec<_> = rows.into_iter().map(Result::unwrap).collect();
    assert_eq!(rows, [1, 2, 3]);
}

/// The key was deleted under its holder, who could not know: the release finds out.
pub(crate) async fn a_release_that_finds_another_is_a_loss(w: &dyn World) {
    let [here, there] = w.registries().await;
    let other = there.obtain("k");
    let lock = here.obtain("k");

    let lease = lock.lease().await.unwrap();
    let (view, mut before) = (lease.view(), lease.lost());
    assert!(poll_once(&mut before).await.is_none());
    w.expire("k");
    assert!(other.acquire_once().await.unwrap());
    assert_err!(lease.release().await, Lost, "k");
    // Those who look are told as well, whether they asked before or after.
    assert!(before.await.is_lost() && view.lost().await.is_lost());
    assert!(is_held(&other).await, "another's lock was released");

    assert!(other.release().await.unwrap());
    assert!(lock.acquire().await.unwrap());
    w.expire("k");
    assert_err!(lock.release().await, Lost, "k");
    assert!(!lock.release().await.unwrap(), "told once");

    let work = async {
        w.expire("k");
        assert!(other.acquire_once().await.unwrap());
    };
    assert_err!(work.with_lock(&lock).await, Lost, "k");
    assert!(is_held(&other).await, "another's lock was released");
    assert!(other.release().await.unwrap());

    let work = async { w.expire("k") };
    let run_on = lock.clone().on_lost(OnLost::RunOn);
    work.with_lock(&run_on).await.unwrap();

    let rows = stream::iter([1])
        .inspect(|_| w.expire("k"))
        .with_lock(&lock);
    let mut rows = Box::pin(rows);
    assert_eq!(rows.next().await.unwrap().unwrap(), 1);
    assert_err!(rows.next().await.unwrap(), Lost, "k");
    assert!(rows.next().await.is_none());
}

pub(crate) async fn a_handle_learns_of_the_end_by_itself(w: &dyn World) {
    let registry = w.registry().await;
    let lock = registry.obtain("k").ttl(ms(1500));
    let begin = Instant::now();
    assert!(lock.acquire().await.unwrap());
    while lock.is_acquired() {
        sleep(ms(1)).await;
    }
    assert_took(begin, usable(1500), w.late());
    assert_err!(lock.release().await, Lost, "k");
    assert!(!lock.release().await.unwrap(), "told once");
    // And can be used again, without a word about the old lease.
    assert!(lock.acquire().await.unwrap());
    assert!(lock.release().await.unwrap());
}

pub(crate) async fn a_lease_tells_its_end(w: &dyn World) {
    let registry = w.registry().await;
    let begin = Instant::now();
    let lease = registry.obtain("k").ttl(ms(500)).lease().await.unwrap();
    let (view, deadline) = (lease.view(), lease.deadline());
    assert!(deadline <= begin + usable(500) + w.late());
    assert!(deadline + ms(1) >= begin + usable(500));
    let mut lost = lease.lost();
    assert!(poll_once(&mut lost).await.is_none());
    assert!(lost.await.is_lost());
    assert!(Instant::now() >= deadline && !lease.is_valid() && !view.is_valid());
    // Also for those who ask afterwards.
    assert!(view.lost().await.is_lost());
    let token = lease.token();
    let error = assert_err!(lease.release().await, Lost, "k");
    assert!(matches!(error, LockError::Lost { token: of, .. } if of == token));

    // A release is no loss, for whoever waits for one already.
    let lease = registry.obtain("k").ttl(ms(1500)).lease().await.unwrap();
    let mut lost = lease.lost();
    assert!(poll_once(&mut lost).await.is_none());
    lease.release().await.unwrap();
    sleep(ms(1700)).await;
    assert!(poll_once(&mut lost).await.is_none());
}

/// What nobody looks at loses nothing but itself: a late release harms no later lease.
pub(crate) async fn an_expired_lease_does_not_release_its_successor(w: &dyn World) {
    let [here, there] = w.registries().await;
    for registry in [&here, &there] {
        let lease = here.obtain("k").ttl(ms(500)).lease().await.unwrap();
        let other = registry.obtain("k");
        assert!(other.acquire().await.unwrap());
        assert!(!lease.is_valid());
        drop(lease);
        sleep(ms(20)).await;
        assert!(other.is_acquired() && is_held(&other).await);
        assert!(other.release().await.unwrap());
    }
    // A release around the very end of a lease: in time, too late, or overtaken by the deadline on its way.
    let (short, next) = (here.obtain("k").ttl(ms(300)), there.obtain("k"));
    for round in 0..10 {
        let lease = short.lease().await.unwrap();
        let waiter = tokio::spawn(next.clone().ttl(ms(9000)).lease());
        // A busy machine may look when it has it.
        eventually("it waits, or has waited", async || {
            waiter.is_finished() || next.inspect().await.unwrap().waiting == 1
        })
        .await;
        sleep_until(lease.deadline() + ms(3 * round) - ms(10)).await;
        match lease.release().await {
            Ok(()) | Err(LockError::Lost { .. } | LockError::Store { .. }) => {}
            told => panic!("{told:?}"),
        }
        let lease = waiter.await.unwrap().unwrap();
        assert!(lease.is_valid() && is_held(&next).await);
        lease.release().await.unwrap();
    }
}
