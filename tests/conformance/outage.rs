//! A store that cannot be reached, or answers late.

use std::cell::Cell;
use std::time::Duration;

use futures::StreamExt;
use futures::stream;
use lockstream::{FutureLockExt, LockError, StreamLockExt};
use tokio::time::{Instant, sleep};

use crate::assert_err;
use crate::world::{
    BACK, SOON, World, assert_took, connected, eventually, free, idle, ms, poll_once,
    release_brief, waiting,
};

pub(crate) async fn acquiring_from_an_absent_store_errs(w: &dyn World) {
    let registry = w.registry().await;
    let polled = Cell::new(false);
    let work = || async { polled.set(true) };
    w.set_offline(true);
    let lock = registry.obtain("k").wait(ms(600));
    let begin = Instant::now();
    assert_err!(lock.acquire_once().await, Store, "k");
    assert_err!(lock.lease_once().await, Store, "k");
    assert_took(begin, ms(0), SOON);
    // The others try until their time is over.
    let begin = Instant::now();
    assert_err!(lock.acquire().await, Store, "k");
    assert_took(begin, ms(600), w.late());
    let begin = Instant::now();
    assert_err!(lock.lease_within(ms(400)).await, Store, "k");
    assert_took(begin, ms(400), w.late());
    let begin = Instant::now();
    assert_err!(work().with_lock(&lock).await, Store, "k");
    assert_took(begin, ms(600), w.late());
    // Not "busy", so not skipped.
    assert_err!(work().with_lock(&lock).or_skip().await, Store, "k");
    let mut rows = Box::pin(stream::iter([1]).with_lock(&lock).or_skip());
    assert_err!(rows.next().await.unwrap(), Store, "k");
    assert!(rows.next().await.is_none());
    assert_err!(lock.inspect().await, Store, "k");
    assert!(!polled.get());
    w.set_offline(false);
    assert!(lock.acquire_within(BACK).await.unwrap());
}

/// The first to ask once was told at once. What it had asked was never sent, and yet it was kept to be settled when the
/// store was back: an outage left an entry for every key, and whoever asked for such a key next was told nothing before
/// the response time-out.
pub(crate) async fn an_absent_store_leaves_nothing_behind(w: &dyn World) {
    w.set_offline(true);
    // On a connection that had stood an op might have got through, and then it is owed.
    let within = ms(500);
    let registry = w.lazy_builder().response_timeout(within).build().unwrap();
    for _ in 0..3 {
        // Between two attempts to connect there may be seconds (G1), and nobody waits for that.
        let begin = Instant::now();
        let lock = registry.obtain("k");
        assert_err!(lock.acquire_once().await, Store, "k");
        assert_err!(lock.acquire_within(ms(400)).await, Store, "k");
        assert_took(begin, ms(400), within + w.late());
        idle(&registry).await;
    }
}

pub(crate) async fn a_store_that_comes_back_within_the_wait_serves_it(w: &dyn World) {
    let registry = w.registry().await;
    w.set_offline(true);
    let lock = registry.obtain("k");
    let (acquired, ()) = tokio::join!(lock.acquire(), async {
        sleep(ms(200)).await;
        w.set_offline(false);
    });
    assert!(acquired.unwrap());
    assert!(lock.is_acquired());
    assert!(lock.release().await.unwrap());

    // Also if it was away before the registry first spoke to it.
    w.set_offline(true);
    let registry = w.lazy_builder().build().unwrap();
    let work = async { 1 }.with_lock((&registry, "k"));
    let (done, ()) = tokio::join!(work, async {
        sleep(ms(200)).await;
        w.set_offline(false);
    });
    assert_eq!(done.unwrap(), 1);
}

/// Waiters keep waiting through an outage, and get the lock when it is released afterwards.
pub(crate) async fn waiters_outlast_an_outage(w: &dyn World) {
    let [holder, one, two] = w.registries().await;
    let held = holder.obtain("k").ttl(ms(8000)).lease().await.unwrap();
    let watch = holder.obtain("k");
    let locks = [one.obtain("k"), two.obtain("k")];
    let mut first = locks[0].acquire();
    assert!(poll_once(&mut first).await.is_none());
    waiting(&watch, 1).await;
    let mut second = locks[1].acquire();
    assert!(poll_once(&mut second).await.is_none());
    waiting(&watch, 2).await;
    w.set_offline(true);
    sleep(ms(100)).await;
    assert!(poll_once(&mut first).await.is_none());
    w.set_offline(false);
    // To all of them: what is granted to one that is not back goes to the next.
    for lock in [&watch, &locks[0], &locks[1]] {
        eventually("the store is back", async || lock.inspect().await.is_ok()).await;
    }
    waiting(&watch, 2).await;
    assert!(held.is_valid(), "an outage is no loss");
    held.release().await.unwrap();
    let begin = Instant::now();
    // Their places have outlasted it, too (K2).
    assert!(first.await.unwrap());
    assert!(locks[0].release().await.unwrap());
    assert!(second.await.unwrap());
    assert!(locks[1].release().await.unwrap());
    assert!(begin.elapsed() < SOON);
}

/// The work was done under a lease that held; that the store cannot be told does not undo it.
pub(crate) async fn a_release_that_cannot_be_told_is_made_good_later(w: &dyn World) {
    let there = w.registry().await;
    let here = w.builder().await.response_timeout(ms(500)).build().unwrap();
    connected(&here).await;
    let lock = here.obtain("k").ttl(ms(60_000));
    let begin = Instant::now();
    let work = async {
        w.set_offline(true);
        "value"
    };
    assert_eq!(work.with_lock(&lock).await.unwrap(), "value");
    if w.is_paused() {
        assert_took(begin, ms(500), ms(0));
    }
    assert!(begin.elapsed() <= SOON, "one response time-out at most");
    let rows = async || {
        let rows = stream::iter([1]).with_lock(&lock);
        rows.collect::<Vec<_>>().await
    };
    w.set_offline(false);
    let begin = Instant::now();
    let other = there.obtain("k");
    let soon = if w.is_paused() { ms(10) } else { 2 * BACK };
    assert!(other.acquire_within(soon).await.unwrap());
    assert!(begin.elapsed() < 2 * BACK, "well before the lease's end");
    assert!(other.release().await.unwrap());
    assert_eq!(rows().await.len(), 1);
    idle(&here).await;
}

/// With a guard one waits for the store's word, until it comes or the lease would be over anyway.
pub(crate) async fn a_guards_release_tries_until_the_deadline(w: &dyn World) {
    let registry = w.registry().await;
    // It ends long after the store is back.
    let lease = registry.obtain("a").ttl(ms(60_000)).lease().await.unwrap();
    w.set_offline(true);
    let (released, ()) = tokio::join!(lease.release(), async {
        sleep(ms(200)).await;
        w.set_offline(false);
    });
    released.unwrap();
    free(&registry.obtain("a")).await;

    // The first lasts until the second is had.
    let lock = registry.obtain("b").ttl(ms(1500));
    assert!(lock.acquire().await.unwrap());
    let lease = registry.obtain("c").ttl(ms(1500)).lease().await.unwrap();
    w.set_offline(true);
    let deadline = lease.deadline();
    let (by_handle, by_guard) = tokio::join!(lock.release(), lease.release());
    assert_err!(by_handle, Store, "b");
    assert_err!(by_guard, Store, "c");
    let now = Instant::now();
    assert!(now + ms(50) >= deadline && now <= deadline + w.late());
    assert!(!lock.release().await.unwrap());
    w.set_offline(false);
    let next = registry.obtain("b");
    assert!(next.acquire_within(BACK).await.unwrap());
}

/// The lease that such a reply brings was over before it came.
pub(crate) async fn a_reply_that_comes_too_late_brings_no_dead_lease(w: &dyn World) {
    let registry = w.registry().await;
    let lock = registry.obtain("k").ttl(ms(800));
    for once in [false, true] {
        w.set_latency(ms(1000));
        let begin = Instant::now();
        let acquire = async {
            if once {
                lock.lease_once().await.map(Option::unwrap)
            } else {
                lock.lease().await
            }
        };
        let (lease, ()) = tokio::join!(acquire, async {
            // The first answer is on its way, and the next comes at once.
            sleep(ms(900)).await;
            w.set_latency(ms(0));
        });
        let lease = lease.unwrap();
        assert!(
            begin.elapsed() + ms(1) >= ms(1000),
            "no answer can have come"
        );
        assert!(lease.is_valid());
        // It counts from a question that followed an answer.
        let counts_from = lease.deadline() - ms(790) - begin;
        assert!(counts_from + ms(1) >= ms(900), "{counts_from:?}");
        release_brief(w, lease).await;
    }
    // And if it never gets better: busy or unreachable, but nothing that is over.
    w.set_latency(ms(1000));
    let begin = Instant::now();
    let acquired = lock.acquire_within(ms(2400)).await;
    assert!(!matches!(acquired, Ok(true)), "{acquired:?}");
    assert_took(begin, ms(2400), w.late());
    w.set_latency(ms(0));
    idle(&registry).await;
}

/// Answers take longer than a lease lasts. Each win renewed the key and was over on arrival: nobody had the key, and nobody
/// else could have it, until the wait was over. Whoever wants a longer ttl has it.
pub(crate) async fn a_store_that_is_too_slow_for_the_ttl_is_told(w: &dyn World) {
    const TTL: Duration = ms(500);
    const SLOW: Duration = ms(700);
    #[track_caller]
    fn assert_told(error: &LockError) {
        match error {
            LockError::TooSlow {
                ttl, round_trip, ..
            } => assert!(*ttl == TTL && *round_trip >= SLOW - ms(1), "{error}"),
            other => panic!("{other:?}"),
        }
    }
    let [slow, other] = w.registries().await;
    let lock = slow.obtain("k").ttl(TTL);
    w.set_latency(SLOW);
    let polled = Cell::new(false);
    let work = async { polled.set(true) }.with_lock(&lock);
    let long = slow.obtain("k").ttl(ms(60_000));
    let (first, skipped, worked, long) = tokio::join!(
        lock.lease(),
        lock.lease().or_skip(),
        work.or_skip(),
        long.lease()
    );
    assert_told(&assert_err!(first, TooSlow, "k"));
    assert_told(&assert_err!(skipped, TooSlow, "k"));
    assert_told(&assert_err!(worked, TooSlow, "k"));
    assert!(!polled.get());
    long.unwrap().release().await.unwrap();
    assert_told(&assert_err!(lock.acquire_once().await, TooSlow, "k"));
    assert!(!lock.is_acquired());
    w.set_latency(ms(0));
    free(&lock).await;
    let lease = other.obtain("k").lease_once().await.unwrap();
    lease.expect("it was given back").release().await.unwrap();
    release_brief(w, lock.lease().await.unwrap()).await;
}

/// An answer that is not available in the registry's time is none.
pub(crate) async fn a_store_that_does_not_answer_errs_in_time(w: &dyn World) {
    let registry = w.builder().await.response_timeout(ms(300)).build().unwrap();
    connected(&registry).await;
    let lock = registry.obtain("k");
    // A question that is not answered in so short a time is asked again.
    assert!(lock.acquire().await.unwrap());
    assert!(lock.release().await.unwrap());
    w.set_latency(ms(3000));
    let begin = Instant::now();
    assert_err!(lock.acquire_once().await, Store, "k");
    assert_took(begin, ms(300), w.late());
    // Nor is it "busy" to one who waits for others less long.
    assert_err!(lock.acquire_within(ms(50)).await, Store, "k");
    w.set_latency(ms(0));
    // What the store did about it meanwhile is undone.
    idle(&registry).await;
    free(&lock).await;
}

/// A wait bounds how long others are waited for. The first answer counts, also if it comes after that.
pub(crate) async fn a_slow_store_serves_a_short_wait(w: &dyn World) {
    let registry = w.registry().await;
    let lock = registry.obtain("k");
    assert!(lock.acquire_once().await.unwrap());
    assert!(lock.release().await.unwrap());
    w.set_latency(ms(200));
    assert!(lock.acquire_within(ms(20)).await.unwrap());
    let other = w.registry().await;
    let busy = other.obtain("k").acquire_within(ms(20)).await;
    assert!(!busy.unwrap());
    w.set_latency(ms(0));
    assert!(lock.release().await.unwrap());
    free(&lock).await;
}

/// A lease that is valid stays so without its store.
pub(crate) async fn an_outage_is_no_loss(w: &dyn World) {
    let registry = w.registry().await;
    let lock = registry.obtain("k").ttl(ms(1500));
    let begin = Instant::now();
    let lost = lock
        .with_lease(async |lease| {
            w.set_offline(true);
            sleep(ms(500)).await;
            assert!(lease.is_valid());
            std::future::pending::<()>().await;
        })
        .await;
    assert_err!(lost, Lost, "k");
    assert!(begin.elapsed() >= ms(1480), "lost before its deadline");
    assert!(begin.elapsed() <= ms(1500) + w.late());
    w.set_offline(false);
}
