//! On the memory store, where time is paused and a millisecond is one.

use std::future::pending;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::{StreamExt, poll, stream};
use lockstream::store::MemoryStore;
use lockstream::{FutureLockExt, LockEvent, LockRegistry, OnFinish, Renewal, StreamLockExt};
use tokio::time::{Instant, sleep};

use crate::{ms, usable};

const TTL: Duration = Duration::from_secs(30);

/// What a registry does that was told nothing: a stream that brings a row a minute, for three days, keeps its lock.
#[tokio::test(start_paused = true)]
async fn by_default_a_stream_of_days_keeps_its_lock() {
    const MINUTES: u32 = 3 * 24 * 60;
    let store = MemoryStore::new();
    let locks = LockRegistry::builder(store.clone()).build().unwrap();
    let others = LockRegistry::builder(store.clone()).build().unwrap();
    let rows = stream::iter(0..MINUTES).then(async |minute| {
        sleep(Duration::from_secs(60)).await;
        minute
    });
    let (begin, other) = (Instant::now(), others.obtain("k"));
    let mut rows = Box::pin(rows.with_lock(locks.obtain("k")));
    for minute in 0..MINUTES {
        assert_eq!(rows.next().await.unwrap().unwrap(), minute);
        assert!(!other.acquire_once().await.unwrap(), "at minute {minute}");
    }
    assert!(rows.next().await.is_none());
    let late = begin.elapsed() - MINUTES * Duration::from_secs(60);
    assert!(late <= Duration::from_secs(1), "{late:?}");
    assert_eq!((locks.in_use(), store.keys()), (0, 0));
}

/// However slow the store, as long as the answer comes before the lease is over.
#[tokio::test(start_paused = true)]
async fn renewed_over_a_slow_line() {
    for latency in [0, 1, 400, 5_000, 9_000] {
        let store = MemoryStore::new();
        let builder = LockRegistry::builder(store.clone()).response_timeout(TTL);
        let locks = builder.build().unwrap();
        store.set_latency(ms(latency));
        let lease = locks.obtain("k").lease().await.unwrap();
        sleep(100 * TTL).await;
        assert!(lease.is_valid(), "{latency} ms");
        lease.release().await.unwrap();
        assert_eq!((locks.in_use(), store.keys()), (0, 0));
    }
}

/// At the deadline: not before it, not 50 ms after it, and to the millisecond where nothing else is going on. Whoever waits
/// has the lock then, for the one who lost it gives it up there and then; and so often the next lease is renewed, too.
#[tokio::test(start_paused = true)]
async fn a_loss_is_told_at_the_deadline() {
    for most in [0, 1, 2, 3, 4, 360] {
        let store = MemoryStore::new();
        let locks = LockRegistry::builder(store.clone()).build().unwrap();
        let others = LockRegistry::builder(store).build().unwrap();
        let lock = locks.obtain("k");
        let lock = lock.renewal(Renewal::watchdog().max_renewals(most));
        let due = most * (TTL / 3) + usable(TTL);
        // Each renewal may be sent a tick of tokio's clock late.
        let late = ms(20.min(2 + u64::from(most)));
        let assert_due = |begin: Instant| {
            let took = begin.elapsed();
            assert!(took >= due && took <= due + late, "{most}: {took:?}");
        };
        let begin = Instant::now();
        let lease = lock.lease().await.unwrap();
        let other = others.obtain("k").wait(Duration::from_secs(7_200));
        let (lost, next) = tokio::join!(lease.lost(), async {
            let next = other.lease().await.unwrap();
            assert_due(begin);
            next
        });
        assert!(lost.is_lost() && next.token() > lease.token());
        assert!(lease.deadline().elapsed() <= ms(1));
        assert!(lease.lost().await.is_lost(), "also afterwards");
        assert!(lease.release().await.unwrap_err().is_lost());
        next.release().await.unwrap();

        // Work under it is stopped at that end.
        let begin = Instant::now();
        let work = pending::<()>().with_lock(&lock).await;
        assert!(work.unwrap_err().is_lost());
        assert_due(begin);
    }
}

/// What runs under the lock is dropped in the moment in which the loss is known, and the error is there: at the deadline,
/// with the store away so that nothing can be told to it, and at the renewal that finds the key gone.
#[tokio::test(start_paused = true)]
async fn work_is_dropped_in_the_moment_of_its_loss() {
    struct Dropped(Arc<Mutex<Option<Instant>>>);
    impl Drop for Dropped {
        fn drop(&mut self) {
            *self.0.lock().unwrap() = Some(Instant::now());
        }
    }
    for (as_stream, early) in [(false, false), (false, true), (true, false), (true, true)] {
        let store = MemoryStore::new();
        let locks = LockRegistry::builder(store.clone()).build().unwrap();
        let lock = locks.obtain("k");
        let dropped = Arc::new(Mutex::new(None));
        let inside = Dropped(dropped.clone());
        let begin = Instant::now();
        let work = async move {
            let _inside = inside;
            pending::<()>().await;
        };
        let seen = dropped.clone();
        let ended = tokio::spawn(async move {
            let told = if as_stream {
                let mut rows = Box::pin(stream::once(work).with_lock(lock));
                let told = rows.next().await.expect("the loss is an item");
                assert!(seen.lock().unwrap().is_some(), "its reader drops it");
                told
            } else {
                work.with_lock(lock).await
            };
            (told, Instant::now())
        });
        sleep(ms(15_000)).await;
        if early {
            store.expire("k");
        } else {
            store.set_offline(true);
        }
        let ended = tokio::time::timeout(2 * TTL, ended).await;
        let (told, at) = ended.expect("it ends").unwrap();
        let what = format!("stream: {as_stream}, early: {early}");
        assert!(told.unwrap_err().is_lost(), "{what}");
        // The renewal after 10 s was the last that was confirmed, and that after 20 s finds the key gone.
        let due = if early {
            2 * TTL / 3
        } else {
            TTL / 3 + usable(TTL)
        };
        let took = at - begin;
        assert!(took >= due && took <= due + ms(4), "{what}: {took:?}");
        let dropped = dropped.lock().unwrap().expect(&what);
        assert!(dropped <= at && at - dropped <= ms(1), "{what}");
        store.set_offline(false);
        sleep(TTL).await;
        assert_eq!((locks.in_use(), store.keys()), (0, 0), "{what}");
    }
}

/// The store goes away at any moment of a lease: it is lost a ttl after the last renewal that was confirmed was sent,
/// and that is known within 50 ms.
#[tokio::test(start_paused = true)]
async fn a_store_that_goes_away_is_a_loss_at_the_deadline() {
    // From one renewal to the next, with room for the two.
    for away in (0..33).map(|at| ms(20_100 + at * 300)) {
        let store = MemoryStore::new();
        let locks = LockRegistry::builder(store.clone()).build().unwrap();
        let begin = Instant::now();
        let lease = locks.obtain("k").lease().await.unwrap();
        sleep(away).await;
        store.set_offline(true);
        let third = TTL / 3;
        let renewals = (away.as_millis() / third.as_millis()) as u32;
        assert!(lease.lost().await.is_lost());
        let due = renewals * third + usable(TTL);
        let took = begin.elapsed();
        assert!(took >= due && took <= due + ms(50), "{took:?}, not {due:?}");
        store.set_offline(false);
        // It could be renewed now, and is not.
        sleep(2 * TTL).await;
        assert!(!lease.is_valid());
        assert_eq!((locks.in_use(), store.keys()), (0, 0));
    }
}

/// For as long as nobody asks twice about the same second: away for less than what is left of the ttl, again and again.
#[tokio::test(start_paused = true)]
async fn a_store_that_goes_away_and_comes_back_in_time_loses_nothing() {
    let store = MemoryStore::new();
    let locks = LockRegistry::builder(store.clone()).build().unwrap();
    let lease = locks.obtain("k").lease().await.unwrap();
    for away in 0..40 {
        sleep(ms(700 + 311 * away)).await;
        store.set_offline(true);
        sleep(ms(17_000)).await;
        store.set_offline(false);
        sleep(ms(2_500)).await;
        assert!(lease.is_valid(), "after {away}");
    }
    lease.release().await.unwrap();
    assert_eq!((locks.in_use(), store.keys()), (0, 0));
}

/// `lost()` stays silent after an ordinary end, for ever, whoever asks and whenever.
#[tokio::test(start_paused = true)]
async fn a_release_or_a_drop_is_no_loss() {
    let locks = LockRegistry::in_memory();
    for dropped in [false, true] {
        let lease = locks.obtain("k").lease().await.unwrap();
        let (view, mut before) = (lease.view(), lease.lost());
        assert!(poll!(&mut before).is_pending());
        sleep(2 * TTL).await;
        if dropped {
            drop(lease);
        } else {
            lease.release().await.unwrap();
        }
        sleep(10 * TTL).await;
        let mut after = view.lost();
        assert!(poll!(&mut before).is_pending() && poll!(&mut after).is_pending());
    }
    assert_eq!(locks.in_use(), 0);
}

/// Nor after the other ends that are none: a key that was left to run out, a lease that was handed on, and a release
/// that the store could not be told of before the deadline.
#[tokio::test(start_paused = true)]
async fn an_end_that_is_no_loss_is_never_told_as_one() {
    #[derive(Clone, Copy, Debug)]
    enum End {
        Kept,
        Detached,
        OverASlowLine,
        Unheard,
    }
    for end in [End::Kept, End::Detached, End::OverASlowLine, End::Unheard] {
        let store = MemoryStore::new();
        let locks = LockRegistry::builder(store.clone()).build().unwrap();
        let lock = locks.obtain("k").ttl(TTL);
        let lock = match end {
            End::Kept => lock.on_finish(OnFinish::LetExpire),
            _ => lock,
        };
        let lease = lock.lease().await.unwrap();
        let (view, mut before) = (lease.view(), lease.lost());
        assert!(poll!(&mut before).is_pending());
        sleep(TTL - ms(2_000)).await;
        match end {
            End::Kept => drop(lease),
            End::Detached => drop(lease.detach().unwrap()),
            End::OverASlowLine => {
                // The answer comes after the deadline.
                store.set_latency(ms(1_900));
                drop(lease);
            }
            End::Unheard => {
                store.set_offline(true);
                drop(lease);
            }
        }
        sleep(10 * TTL).await;
        let mut after = view.lost();
        assert!(
            poll!(&mut before).is_pending() && poll!(&mut after).is_pending(),
            "{end:?}"
        );
        store.set_offline(false);
        assert_eq!(locks.in_use(), 0, "{end:?}");
    }
}

/// Given back at any moment around a renewal, which may be on its way there or back: nothing stays, and nothing is
/// prolonged.
#[tokio::test(start_paused = true)]
async fn ten_thousand_ends_around_a_renewal_leave_nothing() {
    let store = MemoryStore::new();
    let ttl = ms(90);
    let builder = LockRegistry::builder(store.clone()).ttl(ttl);
    let locks = builder.response_timeout(TTL).build().unwrap();
    for cycle in 0..10_000_u64 {
        store.set_latency(ms(cycle % 13));
        let lock = locks.obtain("k");
        let lease = lock.lease().await.unwrap();
        sleep(ms(20 + cycle % 23)).await;
        match cycle % 3 {
            0 => drop(lease),
            1 => lease.release().await.unwrap(),
            _ => {
                // Leaves while it waits for the next.
                let mut next = lock.lease();
                assert!(poll!(&mut next).is_pending());
                drop(lease);
                let _ = tokio::time::timeout(ms(cycle % 17), next).await;
            }
        }
        if cycle % 100 == 0 {
            store.set_latency(ms(0));
            sleep(ms(60)).await;
            assert_eq!((locks.in_use(), store.keys()), (0, 0), "cycle {cycle}");
        }
    }
    sleep(ms(60)).await;
    assert_eq!((locks.in_use(), store.keys()), (0, 0));
}

/// The store is away, and the holder hears in time that its lease is about to be lost: once a renewal.
#[tokio::test(start_paused = true)]
async fn a_late_renewal_is_told_before_the_lease_is_lost() {
    let store = MemoryStore::new();
    let locks = LockRegistry::builder(store.clone()).build().unwrap();
    let mut events = locks.events();
    let lease = locks.obtain("k").lease().await.unwrap();
    let begin = Instant::now();
    sleep(ms(1000)).await;
    store.set_offline(true);
    let mut late = Vec::new();
    let lost = loop {
        match events.next().await.unwrap() {
            LockEvent::RenewalLate { deadline, .. } => late.push((begin.elapsed(), deadline)),
            LockEvent::Lost { token, .. } => break token,
            _ => {}
        }
    };
    // It was due after 10 s, for a lease until 29.7 s.
    let due = TTL / 3;
    let left = usable(TTL) - due;
    assert_eq!(late, [(due + left / 3 * 2, begin + usable(TTL))]);
    assert_eq!(lost, lease.token());
    assert_eq!(begin.elapsed(), usable(TTL));
}
