use std::future::pending;

use futures::channel::oneshot;
use futures::{StreamExt, future, poll, stream};
use lockstream::{FutureLockExt, LockError, LockEvent, LockRegistry, OnLost, StreamLockExt};
use tokio::runtime::Builder;
use tokio::time::{Instant, sleep, timeout};

use crate::{GRACE, is_closed, is_free, ms, two};

/// Of all work that hears of a shutdown, none is still there when the next begins.
#[tokio::test(start_paused = true)]
async fn work_is_dropped_before_its_key_is_free() {
    let (store, here, there) = two();
    let mut future = Box::pin(pending::<()>().with_lock((&here, "future")));
    let lock = here.obtain("stubborn").on_lost(OnLost::RunOn);
    let mut stubborn = Box::pin(pending::<()>().with_lock(lock));
    let rows = stream::iter([1]).chain(stream::pending());
    let mut rows = Box::pin(StreamLockExt::with_lock(rows, (&here, "rows")));
    let leads = here.obtain("leads");
    let mut leads = Box::pin(leads.lead(|_| pending::<()>()));
    let lease = here.obtain("lease").lease().await.unwrap();
    let mut lost = lease.lost();
    assert!(poll!(&mut future).is_pending() && poll!(&mut stubborn).is_pending());
    assert!(rows.next().await.unwrap().is_ok() && poll!(rows.next()).is_pending());
    assert!(poll!(&mut leads).is_pending() && poll!(&mut lost).is_pending());
    assert_eq!(store.keys(), 5);

    let mut shutdown = here.shutdown();
    assert!(poll!(&mut shutdown).is_pending());
    let keys = ["future", "stubborn", "rows", "leads", "lease"];
    for key in keys {
        assert!(!is_free(&there, key).await, "{key}");
    }
    assert!(!lease.is_valid(), "it is to end");
    assert!(is_closed(lease.extend(ms(60_000)).await));
    assert!(is_closed(future.await) && is_free(&there, "future").await);
    assert!(is_closed(stubborn.await) && is_free(&there, "stubborn").await);
    assert!(is_closed(rows.next().await.unwrap()) && is_free(&there, "rows").await);
    assert!(is_closed(leads.await) && is_free(&there, "leads").await);
    assert!(matches!(lost.await, LockError::Closed { .. }));
    assert!(!is_free(&there, "lease").await, "its work may clean up");
    assert!(is_closed(lease.release().await) && is_free(&there, "lease").await);
    let begin = Instant::now();
    shutdown.await;
    assert_eq!((begin.elapsed(), here.in_use()), (ms(0), 0));
}

/// A task that is stuck must not keep a registry from ending, nor one that nobody polls.
#[tokio::test(start_paused = true)]
async fn work_that_does_not_end_is_not_waited_for() {
    for (response_timeout, grace) in [(1000, GRACE), (30, 30)] {
        let (store, ..) = two();
        let registry = || LockRegistry::builder(store.clone());
        let here = registry()
            .response_timeout(ms(response_timeout))
            .build()
            .unwrap();
        let there = registry().build().unwrap();
        // Renewed meanwhile.
        let lock = here
            .obtain("k")
            .ttl(ms(20))
            .renewal(lockstream::Renewal::watchdog());
        let mut stuck = Box::pin(pending::<()>().with_lock(lock));
        assert!(poll!(&mut stuck).is_pending());
        let mut events = here.events();
        sleep(ms(500)).await;
        let begin = Instant::now();
        // Whoever asks twice waits no longer.
        let twice = async {
            sleep(ms(grace / 2)).await;
            here.shutdown().await;
        };
        let freed = async {
            assert!(there.obtain("k").acquire().await.unwrap());
            begin.elapsed()
        };
        let ((), (), freed) = future::join3(here.shutdown(), twice, freed).await;
        assert_eq!(begin.elapsed(), ms(grace));
        assert!(freed >= ms(grace) && freed <= ms(grace + 2), "{freed:?}");
        assert!(is_closed(stuck.await));
        let mut ends = Vec::new();
        while let Some(event) = events.next().await {
            if let LockEvent::Closed { held, .. } = event {
                ends.push(held);
            } else {
                assert!(matches!(event, LockEvent::Renewed { .. }), "{event:?}");
            }
        }
        assert_eq!(ends, [ms(500 + grace)], "told once, at its end");
    }
}

/// A guard that nobody watches has nobody to wait for.
#[tokio::test(start_paused = true)]
async fn a_guard_that_nobody_watches_is_given_back_at_once() {
    let (_, here, there) = two();
    let lease = here.obtain("lease").lease().await.unwrap();
    let handle = here.obtain("handle");
    assert!(handle.acquire().await.unwrap());
    drop(lease.lost());
    let mut looked = lease.lost();
    assert!(poll!(&mut looked).is_pending());
    drop(looked);
    let begin = Instant::now();
    here.shutdown().await;
    assert_eq!(begin.elapsed(), ms(0));
    for key in ["lease", "handle"] {
        assert!(is_free(&there, key).await, "{key}");
    }
    assert!(is_closed(lease.release().await) && is_closed(handle.release().await));
}

/// Its end is for its holder to choose until then.
#[tokio::test(start_paused = true)]
async fn a_lease_may_be_left_behind_at_a_shutdown() {
    let (_, here, there) = two();
    let lease = here.obtain("k").lease().await.unwrap();
    let mut lost = lease.lost();
    assert!(poll!(&mut lost).is_pending());
    let shutdown = tokio::spawn(here.shutdown());
    assert!(matches!(lost.await, LockError::Closed { .. }));
    let left = lease.detach().unwrap();
    shutdown.await.unwrap();
    assert!(!is_free(&there, "k").await, "it was left to another");
    assert!(there.adopt(left).await.unwrap().is_valid());
}

/// Nor is a shutdown held up by a runtime that nobody drives, on which the lease was acquired and is watched.
#[test]
fn work_on_a_stopped_runtime_is_not_waited_for() {
    let runtime = || Builder::new_current_thread().enable_all().build().unwrap();
    let (still, other) = (runtime(), runtime());
    let (store, ..) = two();
    let registry = || LockRegistry::builder(store.clone());
    let here = registry().response_timeout(ms(120_000)).build().unwrap();
    let there = registry().build().unwrap();
    let mut events = here.events();
    let (lease, mut lost) = still.block_on(async {
        let lease = here.obtain("k").lease().await.unwrap();
        let mut lost = lease.lost();
        assert!(poll!(&mut lost).is_pending());
        (lease, lost)
    });
    other.block_on(async {
        let begin = Instant::now();
        here.shutdown().await;
        // Not for the response time-out.
        assert!(begin.elapsed() < ms(60_000), "{:?}", begin.elapsed());
        assert!(is_free(&there, "k").await);
        assert!(matches!((&mut lost).await, LockError::Closed { .. }));
        let released = timeout(ms(60_000), lease.release()).await;
        assert!(is_closed(released.expect("it has ended")));
        let mut ends = 0;
        while let Some(event) = events.next().await {
            ends += usize::from(matches!(event, LockEvent::Closed { .. }));
        }
        assert_eq!(ends, 1);
    });
}

/// The task that awaits a shutdown may be polled before the timer, long after work was to have ended.
#[tokio::test]
async fn a_stopped_process_still_releases_after_it_continues() {
    let (store, _, there) = two();
    let here = LockRegistry::builder(store)
        .response_timeout(ms(20))
        .build()
        .unwrap();
    let events = here.events();
    let lease = here.obtain("k").lease().await.unwrap();
    let mut lost = lease.lost();
    assert!(poll!(&mut lost).is_pending());
    let mut shutdown = here.shutdown();
    assert!(poll!(&mut shutdown).is_pending());
    // The timer sleeps now.
    tokio::task::yield_now().await;
    std::thread::sleep(ms(100));
    shutdown.await;
    assert!(is_free(&there, "k").await);
    let released = timeout(ms(60_000), lease.release()).await;
    assert!(is_closed(released.expect("it has ended")));
    let ends = events.filter(|event| future::ready(matches!(event, LockEvent::Closed { .. })));
    assert_eq!(ends.count().await, 1);
}

/// Work that is to run on when its lease is lost ends with its registry all the same.
#[tokio::test(start_paused = true)]
async fn a_closing_holder_is_not_told_of_a_later_loss() {
    let (_, here, there) = two();
    let lock = |key| here.obtain(key).ttl(ms(GRACE / 2));
    let mut work = Box::pin(pending::<()>().with_lock(lock("work").on_lost(OnLost::RunOn)));
    let lease = lock("lease").lease().await.unwrap();
    let mut lost = lease.lost();
    assert!(poll!(&mut work).is_pending() && poll!(&mut lost).is_pending());
    let events = here.events();
    let shutdown = tokio::spawn(here.shutdown());
    assert!(matches!(lost.await, LockError::Closed { .. }));
    sleep(ms(2 * GRACE)).await;
    shutdown.await.unwrap();
    let told: Vec<_> = events.collect().await;
    let is_lost = |event: &LockEvent| matches!(event, LockEvent::Lost { .. });
    assert!(told.len() == 2 && told.iter().all(is_lost), "{told:?}");
    assert!(is_free(&there, "work").await && is_free(&there, "lease").await);
    assert!(matches!(lease.lost().await, LockError::Closed { .. }));
    assert!(is_closed(lease.release().await));
    let ended = timeout(ms(1000), work).await;
    assert!(is_closed(ended.expect("it runs on")));
}

/// Whoever shares a lease may be inside of it still when another of them has ended.
#[tokio::test(start_paused = true)]
async fn a_shared_lease_is_given_back_by_the_last() {
    let (_, here, there) = two();
    let lock = here.obtain("k").reentrant();
    let (events, inner) = (here.events(), lock.clone());
    let (give, given) = oneshot::channel();
    let mut outer = Box::pin(lock.with_lease(move |_| async move {
        give.send(inner.lease().await.unwrap()).unwrap();
        pending::<()>().await
    }));
    assert!(poll!(&mut outer).is_pending());
    let guard = given.await.unwrap();
    let mut shutdown = here.shutdown();
    assert!(poll!(&mut shutdown).is_pending());
    assert!(is_closed(outer.await));
    let keys = here.snapshot().keys;
    assert!(keys.len() == 1 && keys[0].held.len() == 1, "{keys:?}");
    assert!(!is_free(&there, "k").await);
    assert!(is_closed(guard.release().await) && is_free(&there, "k").await);
    shutdown.await;
    let ends = events.filter(|event| future::ready(matches!(event, LockEvent::Closed { .. })));
    assert_eq!(ends.count().await, 1);
}

/// The store may go in the time that work has, and come back or not: every lease has one end, and nobody waits for ever.
#[tokio::test(start_paused = true)]
async fn a_store_that_goes_meanwhile_holds_nobody_up() {
    for back in [Some(500), None] {
        let (store, here, there) = two();
        let events = here.events();
        let lease = here.obtain("lease").lease().await.unwrap();
        let mut lost = lease.lost();
        let mut stuck = Box::pin(pending::<()>().with_lock((&here, "stuck")));
        assert!(poll!(&mut lost).is_pending() && poll!(&mut stuck).is_pending());
        let begin = Instant::now();
        let shutdown = tokio::spawn(here.shutdown());
        assert!(matches!(lost.await, LockError::Closed { .. }));
        store.set_offline(true);
        let released = tokio::spawn(lease.release());
        if let Some(back) = back {
            sleep(ms(back)).await;
            store.set_offline(false);
        }
        assert!(is_closed(released.await.unwrap()));
        shutdown.await.unwrap();
        assert!(begin.elapsed() <= ms(3000), "{:?}", begin.elapsed());
        assert!(is_closed(stuck.await));
        if back.is_some() {
            assert!(is_free(&there, "lease").await && is_free(&there, "stuck").await);
        }
        let told: Vec<_> = events.collect().await;
        for key in ["lease", "stuck"] {
            let ends = told
                .iter()
                .filter(|event| matches!(event, LockEvent::Closed { key: of, .. } if **of == *key));
            assert_eq!(ends.count(), 1, "{told:?}");
        }
        assert_eq!(here.in_use(), 0);
    }
}
