//! How a lease ends, but by a release: keys that stay, leases that last longer, and those that change hands.

use std::cell::Cell;
use std::error::Error;
use std::future::pending;

use futures::{StreamExt, stream};
use lockstream::{
    DetachedLease, FutureLockExt, Lock, LockError, LockRegistry, LossCause, OnFinish, Renewal,
    StreamLockExt,
};
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep};

use crate::assert_err;
use crate::world::{
    TTL, World, assert_took, assert_was_kept, connected, eventually, free, idle, is_held, ms,
    poll_once, waiting,
};

/// For how many milliseconds a key is kept that others look at meanwhile, on a machine with other things to do.
const KEPT: u64 = 2500;

/// At most once in so many milliseconds.
fn kept(lock: Lock, ttl: u64) -> Lock {
    lock.ttl(ms(ttl)).on_finish(OnFinish::LetExpire)
}

/// Work that never ends, and the word that it has begun.
fn endless() -> (impl Future<Output = ()>, oneshot::Receiver<()>) {
    let (tells, begun) = oneshot::channel();
    let work = async move {
        let _ = tells.send(());
        pending::<()>().await;
    };
    (work, begun)
}

/// Drops work that never ends, once it has begun.
async fn cut(work: impl Future, begun: oneshot::Receiver<()>) {
    tokio::select! {
        _ = work => panic!("it ended"),
        told = begun => told.unwrap(),
    }
}

/// Whichever way the work ends, the key stays until the ttl is over, and nobody has to wait for that but who wants it.
pub(crate) async fn a_kept_key_stays_until_its_ttl_is_over(w: &dyn World) {
    let [here, there] = w.registries().await;
    let other = there.obtain("k");
    for way in 0..6 {
        let lock = kept(here.obtain("k"), KEPT);
        let begin = Instant::now();
        match way {
            0 => async {}.with_lock(&lock).await.unwrap(),
            1 => {
                let erred = async { Err::<(), _>("no") }.with_lock(&lock).await;
                assert_eq!(erred.unwrap(), Err("no"));
            }
            2 => {
                let (work, begun) = endless();
                cut(work.with_lock(&lock), begun).await;
            }
            3 => drop(lock.lease().await.unwrap()),
            4 => {
                assert!(lock.acquire().await.unwrap());
                drop(lock);
            }
            _ => {
                let rows = stream::iter([1, 2]).with_lock(&lock);
                assert_eq!(rows.count().await, 2);
            }
        }
        let done = Instant::now();
        assert!(is_held(&other).await, "way {way}");
        assert!(!other.acquire_within(ms(200)).await.unwrap(), "way {way}");
        assert!(
            other.acquire_within(ms(2 * KEPT)).await.unwrap(),
            "way {way}"
        );
        assert_was_kept(begin, done, ms(KEPT - 2), w.late() + ms(52));
        assert!(other.release().await.unwrap());
        free(&other).await;
    }
    idle(&here).await;
}

/// Once a period, however short the work is, and whoever does it.
pub(crate) async fn a_key_that_is_kept_for_a_time_is_free_after_it(w: &dyn World) {
    let [here, there] = w.registries().await;
    let once = |locks: &LockRegistry| {
        let lock = locks.obtain("k").wait(ms(0));
        lock.on_finish(OnFinish::KeepFor(ms(KEPT)))
    };
    let begin = Instant::now();
    let worked = async {}.with_lock(once(&here)).or_skip().await.unwrap();
    let done = Instant::now();
    assert!(worked.is_some());
    let again = async {}.with_lock(once(&here)).or_skip().await.unwrap();
    assert!(again.is_none(), "in the same process");
    let again = async {}.with_lock(once(&there)).or_skip().await.unwrap();
    assert!(again.is_none(), "in another");
    let waiter = there.obtain("k");
    assert!(waiter.acquire().await.unwrap());
    assert_was_kept(begin, done, ms(KEPT - 2), w.late() + ms(52));
    assert!(waiter.release().await.unwrap());
    // A failed job lets another one try.
    let lock = once(&here);
    lock.lease().await.unwrap().release().await.unwrap();
    free(&lock).await;
    idle(&here).await;
}

/// Once a week, once a month: it was refused beyond a day.
pub(crate) async fn a_key_is_kept_for_a_year(w: &dyn World) {
    const DAY: std::time::Duration = std::time::Duration::from_secs(24 * 60 * 60);
    let [here, there] = w.registries().await;
    let kept = |lock: Lock, time| lock.on_finish(OnFinish::KeepFor(time));
    let cases = [here.obtain("k"), here.obtain("k").permits_of(4, 3)];
    for lock in cases {
        let lease = kept(lock.clone(), 366 * DAY).lease().await.unwrap();
        assert!(
            lease.deadline() <= Instant::now() + TTL,
            "the ttl is its own"
        );
        lease.finish().await.unwrap();
        let other = there.obtain("k").wait(ms(300));
        assert!(!other.acquire_once().await.unwrap());
        // One that queues behind it, too.
        assert!(!other.acquire().await.unwrap());
        let seen = other.inspect().await.unwrap();
        let left = seen.remaining().unwrap();
        assert!(left > 365 * DAY && left <= 366 * DAY, "{left:?}");
        assert!(
            there
                .force_release("k", seen.owner().unwrap())
                .await
                .unwrap()
        );
        assert!(other.acquire_once().await.unwrap());
        assert!(other.release().await.unwrap());
        for time in [366 * DAY + ms(1), ms(9)] {
            let lock = kept(lock.clone(), time);
            assert_err!(lock.acquire_once().await, InvalidSetting, "k");
        }
    }
}

/// One that lasts longer than the key is to stay is renewed, and released at its end.
pub(crate) async fn work_that_lasts_longer_than_its_key_is_kept_releases_it(w: &dyn World) {
    let [here, there] = w.registries().await;
    let lock = here.obtain("k").on_finish(OnFinish::KeepFor(ms(500)));
    let begin = Instant::now();
    async {
        sleep(ms(1200)).await;
        assert!(!there.obtain("k").acquire_once().await.unwrap());
    }
    .with_lock(&lock)
    .await
    .unwrap();
    free(&lock).await;
    assert_took(begin, ms(1200), w.late() + ms(100));
    for time in [ms(0), ms(9), ms(366 * 86_400_000 + 1)] {
        let lock = here.obtain("k").on_finish(OnFinish::KeepFor(time));
        assert_err!(lock.acquire_once().await, InvalidSetting, "k");
    }
}

/// The lease has its own ttl, and its end sets that of the key: for longer than the ttl, or for less.
pub(crate) async fn how_long_a_key_is_kept_is_not_how_long_a_lease_lasts(w: &dyn World) {
    let [here, there] = w.registries().await;
    let other = there.obtain("k");
    for (ttl, time) in [(ms(KEPT), ms(2 * KEPT)), (ms(60_000), ms(KEPT))] {
        let lock = here.obtain("k").ttl(ttl).renewal(Renewal::watchdog());
        let lock = lock.on_finish(OnFinish::KeepFor(time));
        let begin = Instant::now();
        let lease = lock.lease().await.unwrap();
        assert!(lease.deadline() <= begin + ttl + w.late());
        let left = other.inspect().await.unwrap().remaining().unwrap();
        assert!(left <= ttl + ms(2), "{left:?}");
        lease.finish().await.unwrap();
        let done = Instant::now();
        let seen = other.inspect().await.unwrap();
        let left = seen.remaining().unwrap();
        assert!(
            left <= time + ms(2) && left + begin.elapsed() + ms(5) >= time,
            "{left:?}"
        );
        let owner = seen.owner().unwrap();
        assert!(owner.contains("+kept:"), "{owner}");
        assert!(other.acquire().await.unwrap());
        assert_was_kept(begin, done, time - ms(2), w.late() + ms(52));
        assert!(other.release().await.unwrap());
        free(&other).await;
    }
}

/// Others have heard of the end of the lease. When that is moved, they are told.
pub(crate) async fn who_waits_gets_a_kept_key_when_its_time_is_over(w: &dyn World) {
    let [here, there] = w.registries().await;
    let lock = here.obtain("k").on_finish(OnFinish::KeepFor(ms(KEPT)));
    let begin = Instant::now();
    let lease = lock.lease().await.unwrap();
    let (waiter, local) = (there.obtain("k"), here.obtain("k"));
    let mut in_line = waiter.acquire_within(ms(9000));
    assert!(poll_once(&mut in_line).await.is_none());
    waiting(&waiter, 1).await;
    let mut here_in_line = local.acquire_within(ms(9000));
    assert!(poll_once(&mut here_in_line).await.is_none());
    lease.finish().await.unwrap();
    let done = Instant::now();
    assert!(in_line.await.unwrap());
    assert_was_kept(begin, done, ms(KEPT - 2), w.late() + ms(102));
    assert!(waiter.release().await.unwrap());
    assert!(here_in_line.await.unwrap());
    assert!(local.release().await.unwrap());
}

/// Whatever becomes of work that does not succeed: the key is free.
pub(crate) async fn only_work_that_succeeds_keeps_its_key(w: &dyn World) {
    let [here, there] = w.registries().await;
    let other = there.obtain("k");
    let kept_for = |millis| here.obtain("k").on_finish(OnFinish::KeepFor(ms(millis)));
    // For longer than is waited for it to be free.
    let lock = kept_for(60_000);
    for way in 0..6 {
        match way {
            0 => {
                let erred = async { Err::<(), _>("no") }.with_lock(&lock);
                assert_eq!(erred.keep_if(Result::is_ok).await.unwrap(), Err("no"));
            }
            1 => {
                let work = async { Err::<(), Box<dyn Error>>("no".into()) };
                let erred = work.try_with_lock(&lock).keep_if(Result::is_ok).await;
                assert_eq!(erred.unwrap_err().to_string(), "no");
            }
            2 => {
                let (work, begun) = endless();
                cut(work.with_lock(&lock).keep_if(|()| true), begun).await;
            }
            3 => {
                let task = async { panic!("on purpose") };
                let task = task.with_lock(lock.clone()).keep_if(|()| true);
                assert!(tokio::spawn(task).await.unwrap_err().is_panic());
            }
            4 => {
                let brief = lock.clone().ttl(ms(500));
                let lost = sleep(ms(5000)).with_lock(&brief).keep_if(|()| true);
                assert_err!(lost.await, Lost, "k");
            }
            _ => {
                let mut rows =
                    std::pin::pin!(stream::iter([1, 2]).with_lock(&lock).keep_if(|()| true));
                assert_eq!(rows.next().await.unwrap().unwrap(), 1);
                // Dropped before its end.
            }
        }
        free(&other).await;
    }
    let begin = Instant::now();
    let work = async { Ok::<_, LockError>(7) }.try_with_lock(kept_for(KEPT));
    assert_eq!(
        work.keep_if(Result::is_ok).or_skip().await.unwrap(),
        Some(7)
    );
    let done = Instant::now();
    assert!(is_held(&other).await);
    assert!(other.acquire().await.unwrap());
    assert_was_kept(begin, done, ms(KEPT - 2), w.late() + ms(52));
    assert!(other.release().await.unwrap());
    free(&other).await;
}

/// A nested lock has the `on_finish` of the lock around it, whichever of the two ends last, and whatever it asks itself.
pub(crate) async fn nested_locks_keep_the_key_only_for_work_that_succeeds(w: &dyn World) {
    let [here, there] = w.registries().await;
    let other = there.obtain("k");
    for (succeeds, releases) in [(false, false), (true, false), (true, true)] {
        let is_kept = succeeds && !releases;
        // What is not, for longer than is waited for it to be free.
        let time = ms(if is_kept { KEPT } else { 60_000 });
        let lock = here.obtain("k").on_finish(OnFinish::KeepFor(time));
        let work = async {
            let nested = here.obtain("k").reentrant();
            let inner = async { Ok::<_, ()>(()) }.with_lock(&nested);
            assert_eq!(inner.keep_if(Result::is_ok).await.unwrap(), Ok(()));
            let guard = nested.lease().await.unwrap();
            if succeeds { Ok(guard) } else { Err(guard) }
        };
        let begin = Instant::now();
        let guard = work.with_lock(&lock).keep_if(Result::is_ok).await.unwrap();
        assert!(is_held(&other).await, "the nested guard is there");
        match releases {
            false => drop(guard),
            // Whatever `on_finish` says.
            true => guard.unwrap().release().await.unwrap(),
        }
        let done = Instant::now();
        if is_kept {
            assert!(is_held(&other).await);
            assert!(other.acquire().await.unwrap());
            assert_was_kept(begin, done, ms(KEPT - 2), w.late() + ms(52));
            assert!(other.release().await.unwrap());
        }
        free(&other).await;
    }
}

/// Each of its keys is kept from the moment on at which all are had.
pub(crate) async fn each_key_of_a_group_is_kept(w: &dyn World) {
    let [here, there] = w.registries().await;
    let blocker = there.obtain("b").lease().await.unwrap();
    let group = here
        .obtain_all(["a", "b"])
        .on_finish(OnFinish::KeepFor(ms(KEPT)));
    let acquiring = tokio::spawn(group.lease_within(ms(9000)));
    waiting(&there.obtain("b"), 1).await;
    sleep(ms(500)).await;
    let begin = Instant::now();
    blocker.release().await.unwrap();
    let lease = acquiring.await.unwrap().unwrap();
    lease.finish().await.unwrap();
    let done = Instant::now();
    let others = ["a", "b"].map(|key| there.obtain(key));
    for other in &others {
        assert!(is_held(other).await, "{}", other.key());
    }
    for other in &others {
        assert!(other.acquire_within(ms(5000)).await.unwrap());
        assert_was_kept(begin, done, ms(KEPT - 20), w.late() + ms(152));
        assert!(other.release().await.unwrap());
    }
}

/// In the same process too: there is no pass, and no place in the queue before others.
pub(crate) async fn who_waits_here_gets_a_kept_key_no_sooner(w: &dyn World) {
    let registry = w.registry().await;
    let lock = kept(registry.obtain("k"), KEPT);
    let begin = Instant::now();
    let lease = lock.lease().await.unwrap();
    let waiter = registry.obtain("k");
    let mut in_line = waiter.acquire_within(ms(5000));
    assert!(poll_once(&mut in_line).await.is_none());
    drop(lease);
    let done = Instant::now();
    assert!(!registry.obtain("k").acquire_once().await.unwrap());
    assert!(in_line.await.unwrap());
    assert_was_kept(begin, done, ms(KEPT - 2), w.late() + ms(52));
    assert!(waiter.release().await.unwrap());
}

/// Nothing is sent at the end: a combinator is done when its work is, however slow the store.
pub(crate) async fn the_end_of_a_kept_lease_waits_for_nothing(w: &dyn World) {
    let registry = w.registry().await;
    // Answers take so long from the work on.
    let slow = ms(2000);
    // A lease that is 5 % of its ttl late would be renewed at once.
    let lock = kept(registry.obtain("k"), 60_000);
    let done_at = Cell::new(Instant::now());
    let work = async {
        w.set_latency(slow);
        done_at.set(Instant::now());
    };
    work.with_lock(&lock).await.unwrap();
    assert!(done_at.get().elapsed() < slow, "it waited for an answer");
    idle(&registry).await;
    let commands = w.commands();
    w.set_latency(ms(0));
    sleep(slow).await;
    assert_eq!(w.commands(), commands);
    let seen = lock.inspect().await.unwrap();
    let owner = seen.owner().expect("a release on its way would have come");
    assert!(registry.force_release("k", owner).await.unwrap());
    free(&lock).await;
}

/// A job that failed gives its turn back: a release is an explicit wish.
pub(crate) async fn what_was_to_stay_can_be_released(w: &dyn World) {
    let [here, there] = w.registries().await;
    // For longer than is waited for it to be free.
    let lock = kept(here.obtain("k"), 60_000);
    lock.lease().await.unwrap().release().await.unwrap();
    free(&lock).await;
    drop(lock.lease().await.unwrap().release());
    free(&lock).await;
    assert!(lock.acquire().await.unwrap());
    assert!(lock.release().await.unwrap());
    assert!(there.obtain("k").acquire_once().await.unwrap());
}

/// The watchdog ends with the lease: one whole ttl after its last renewal the key is free.
pub(crate) async fn nothing_prolongs_what_is_kept(w: &dyn World) {
    let registry = w.registry().await;
    let lock = kept(registry.obtain("k"), KEPT).renewal(Renewal::watchdog());
    let lease = lock.lease().await.unwrap();
    let first = lease.deadline();
    eventually("it is renewed", async || lease.deadline() > first).await;
    assert!(lease.is_valid());
    drop(lease);
    let begin = Instant::now();
    idle(&registry).await;
    assert!(is_held(&lock).await);
    let mut left = ms(KEPT + 2);
    while let Some(now) = lock.inspect().await.unwrap().remaining() {
        assert!(now <= left, "prolonged from {left:?} to {now:?}");
        left = now;
        sleep(ms(10)).await;
    }
    free(&lock).await;
    assert!(begin.elapsed() <= ms(KEPT) + w.late());
}

/// A shutdown frees what is to be freed, and leaves what is to stay.
pub(crate) async fn a_shutdown_leaves_what_is_to_stay(w: &dyn World) {
    let [here, there] = w.registries().await;
    let stays = kept(here.obtain("stays"), KEPT);
    let begin = Instant::now();
    let lease = stays.lease().await.unwrap();
    let goes = here.obtain("goes");
    assert!(goes.acquire().await.unwrap());
    here.shutdown().await;
    // Its own clock ends a lease a little sooner than the store does.
    let within = ms(if w.is_paused() { 500 } else { KEPT - 200 });
    assert!(begin.elapsed() < within, "it waited for what stays");
    assert_err!(Err::<(), _>(lease.lost().await), Closed, "stays");
    assert!(!is_held(&there.obtain("goes")).await);
    assert!(is_held(&there.obtain("stays")).await);
    assert!(
        there
            .obtain("stays")
            .acquire_within(ms(2 * KEPT))
            .await
            .unwrap()
    );
    assert!(begin.elapsed() >= ms(KEPT - 2));
}

pub(crate) async fn a_lease_is_extended(w: &dyn World) {
    let [here, there] = w.registries().await;
    let lock = here.obtain("k").ttl(ms(2500));
    let lease = lock.lease().await.unwrap();
    sleep(ms(200)).await;
    w.set_latency(ms(100));
    let begin = Instant::now();
    let deadline = lease.extend(ms(4500)).await.unwrap();
    w.set_latency(ms(0));
    assert_eq!(deadline, lease.deadline());
    // It counts from when it was sent, which on a busy machine may be later.
    let sent_by = if w.is_paused() { begin } else { Instant::now() };
    assert!(deadline >= begin + ms(4452) && deadline <= sent_by + ms(4500));
    // Never shorter.
    assert_eq!(lease.extend(ms(50)).await.unwrap(), deadline);
    let other = there.obtain("k");
    assert!(!other.acquire_within(ms(2700)).await.unwrap());
    assert!(lease.is_valid());
    assert!(lease.lost().await.is_lost());
    assert_took(begin, ms(4453), w.late());

    let renewed = here.obtain("k").ttl(ms(3000)).renewal(Renewal::watchdog());
    let lease = renewed.lease().await.unwrap();
    let begin = Instant::now();
    lease.extend(ms(6000)).await.unwrap();
    sleep(ms(1050)).await;
    assert!(lease.deadline() >= begin + ms(5930));
    lease.release().await.unwrap();
    free(&other).await;
}

pub(crate) async fn what_cannot_be_extended_says_so(w: &dyn World) {
    let registry = w.registry().await;
    // A lease that is 5 % of its ttl late would be renewed at once.
    let lock = registry.obtain("k").ttl(ms(60_000));
    let lease = lock.lease().await.unwrap();
    let commands = w.commands();
    for ttl in [ms(0), ms(9), ms(24 * 3600 * 1000 + 1)] {
        assert_err!(lease.extend(ttl).await, InvalidTtl, "k");
    }
    // Unpolled it asks for nothing.
    drop(lease.extend(ms(90_000)));
    assert_eq!(w.commands(), commands);
    w.expire("k");
    let error = assert_err!(lease.extend(ms(90_000)).await, Lost, "k");
    assert!(matches!(error, LockError::Lost { token, .. } if token == lease.token()));
    assert_err!(lease.extend(ms(90_000)).await, Lost, "k");
    drop(lease);

    let lease = lock.lease().await.unwrap();
    let extend = lease.extend(ms(90_000));
    lease.release().await.unwrap();
    assert_err!(extend.await, Lost, "k");

    let lease = lock.lease().await.unwrap();
    registry.shutdown().await;
    assert_err!(lease.extend(ms(90_000)).await, Closed, "k");
}

pub(crate) async fn a_handle_extends_what_it_holds(w: &dyn World) {
    let registry = w.registry().await;
    let cases = [registry.obtain("k"), registry.obtain("k").permits(4)];
    for lock in cases {
        let lock = lock.ttl(ms(8000));
        assert_eq!(lock.extend(ms(60_000)).await.unwrap(), None);
        assert!(lock.acquire().await.unwrap());
        let begin = Instant::now();
        let until = lock.extend(ms(60_000)).await.unwrap().unwrap();
        assert!(until > begin + ms(59_000));
        assert_eq!(lock.view().unwrap().deadline(), until);
        let seen = lock.inspect().await.unwrap();
        assert!(seen.remaining() > Some(ms(58_000)), "{seen:?}");
        assert_err!(lock.extend(ms(1)).await, InvalidTtl, "k");
        let mut lost = lock.view().unwrap().lost();
        assert!(poll_once(&mut lost).await.is_none());
        w.expire("k");
        assert_err!(lock.view().unwrap().verify().await, Lost, "k");
        assert_err!(lock.extend(ms(60_000)).await, Lost, "k");
        assert!(lost.await.is_lost());
        assert_err!(lock.release().await, Lost, "k");
        assert_eq!(lock.extend(ms(60_000)).await.unwrap(), None);
    }
}

/// The store is away: told after one response time-out, and the wish stands.
pub(crate) async fn an_extension_outlasts_an_outage(w: &dyn World) {
    let registry = w.builder().await.response_timeout(ms(300)).build().unwrap();
    connected(&registry).await;
    // It ends long after the store is back.
    let lock = registry.obtain("k").ttl(ms(8000));
    let lease = lock.lease().await.unwrap();
    w.set_offline(true);
    let begin = Instant::now();
    let mut other = lease.extend(ms(15_000));
    assert!(poll_once(&mut other).await.is_none());
    assert_err!(lease.extend(ms(60_000)).await, Store, "k");
    assert_took(begin, ms(300), w.late());
    drop(other);
    w.set_offline(false);
    eventually("the wish is met", async || {
        lease.deadline() >= begin + ms(59_350)
    })
    .await;
    assert!(lease.is_valid());
    lease.release().await.unwrap();
    free(&lock).await;
}

/// Another process goes on with it: under a greater token, and with the ttl of its own registry.
pub(crate) async fn a_lease_goes_from_process_to_process(w: &dyn World) {
    w.leases_last(ms(5_000));
    let here = w.registry().await;
    let there = w.builder().await.ttl(ms(5_000)).build().unwrap();
    let lease = here.obtain("k").ttl(ms(60_000)).lease().await.unwrap();
    let (token, view, until) = (lease.token(), lease.view(), lease.deadline());
    let detached = lease.detach().unwrap();
    assert_eq!((detached.key(), detached.token()), ("k", token));
    let seen = here.obtain("k").inspect().await.unwrap();
    assert_eq!(seen.owner(), Some(detached.owner()));
    assert!(!view.is_valid());
    idle(&here).await;

    // Any waiter does not come in between.
    let third = w.registry().await;
    let waiter = third.obtain("k");
    let mut in_line = waiter.acquire_within(ms(9000));
    assert!(poll_once(&mut in_line).await.is_none());
    waiting(&there.obtain("k"), 1).await;

    let sent: DetachedLease = detached.to_string().parse().unwrap();
    assert_eq!(sent, detached);
    let adopted = there.adopt(sent).await.unwrap();
    assert!(adopted.token() > token);
    assert!(adopted.deadline() < until, "its own ttl");
    // It can be had once.
    let error = assert_err!(here.adopt(detached.clone()).await, Lost, "k");
    assert!(matches!(error, LockError::Lost { token: of, .. } if of == token));
    assert_err!(there.adopt(detached).await, Lost, "k");
    assert!(adopted.is_valid());
    assert!(poll_once(&mut in_line).await.is_none());
    adopted.release().await.unwrap();
    assert!(in_line.await.unwrap());
    assert!(waiter.release().await.unwrap());
}

/// It was told as lost, though it is held: by whoever asks.
pub(crate) async fn what_is_held_here_cannot_be_adopted(w: &dyn World) {
    let [here, there] = w.registries().await;
    let lease = here.obtain("k").lease().await.unwrap();
    let text = format!("lockstream-lease-1 {} 64 0 k", lease.owner().unwrap());
    let text: DetachedLease = text.parse().unwrap();
    let error = assert_err!(here.adopt(text.clone()).await, NotDetached, "k");
    assert!(!error.is_lost() && !error.is_retryable(), "{error}");
    lease.verify().await.unwrap();
    // Another of this registry is not there.
    let other = format!("lockstream-lease-1 {}0 64 0 k", lease.owner().unwrap());
    let adopting = here.adopt(other.parse().unwrap());
    assert_err!(adopting.await, Lost, "k");
    lease.verify().await.unwrap();
    // Elsewhere it is taken, as whatever one knows the owner of.
    let adopted = there.adopt(text.clone()).await.unwrap();
    assert_err!(lease.verify().await, Lost, "k");
    assert_err!(here.adopt(text).await, Lost, "k");
    adopted.release().await.unwrap();
}

/// The registry that left it may take it up again.
pub(crate) async fn a_registry_adopts_what_it_left(w: &dyn World) {
    let registry = w.registry().await;
    let lock = registry.obtain("k");
    let mut last = 0;
    for _ in 0..3 {
        let lease = lock.lease().await.unwrap();
        let detached = lease.detach().unwrap();
        assert!(!lock.acquire_once().await.unwrap());
        let adopted = registry.adopt(detached).await.unwrap();
        assert!(adopted.token().get() > last);
        last = adopted.token().get();
        let again = registry.adopt(adopted.detach().unwrap()).await.unwrap();
        assert!(again.token().get() > last);
        last = again.token().get();
        again.release().await.unwrap();
        free(&lock).await;
    }
}

/// What has run out, what was lost before it was detached, what lies under another prefix, what somebody else has.
pub(crate) async fn what_is_not_there_cannot_be_adopted(w: &dyn World) {
    let [here, there] = w.registries().await;
    let lock = here.obtain("k").ttl(ms(1000));
    let detached = lock.lease().await.unwrap().detach().unwrap();
    let elsewhere = w.builder().await.prefix("elsewhere").build().unwrap();
    assert_err!(elsewhere.adopt(detached.clone()).await, Lost, "k");
    free(&lock).await;
    assert_err!(there.adopt(detached.clone()).await, Lost, "k");
    let held = here.obtain("k").lease().await.unwrap();
    assert_err!(there.adopt(detached.clone()).await, Lost, "k");
    assert_err!(here.adopt(detached).await, Lost, "k");
    assert!(held.is_valid());
    held.release().await.unwrap();

    // Its loss is known only in the store.
    let lease = here.obtain("k").lease().await.unwrap();
    w.expire("k");
    let over = lease.detach().unwrap();
    assert_err!(there.adopt(over).await, Lost, "k");
    free(&lock).await;
}

/// It was left as a line of text that nobody could adopt. Its holder learns why, and has its lease back.
pub(crate) async fn a_lost_lease_is_not_detached(w: &dyn World) {
    let registry = w.registry().await;
    let lock = registry.obtain("k").ttl(ms(300));
    let lease = lock.lease().await.unwrap();
    assert!(lease.lost().await.is_lost());
    let refused = lease.detach().unwrap_err();
    assert_eq!(refused.to_string(), refused.error().to_string());
    let lease = refused.into_lease();
    assert!(!lease.is_valid() && lease.key() == "k");
    assert_err!(lease.release().await, Lost, "k");
    // By `?` it is the error of a lock.
    let lease = lock.lease().await.unwrap();
    lease.lost().await;
    let left = async { Ok::<_, LockError>(lease.detach()?) };
    assert_err!(left.await, Lost, "k");
    free(&lock).await;
}

/// Of many that want it one gets it, and the others are told.
pub(crate) async fn of_many_that_adopt_one_is_served(w: &dyn World) {
    let registries: [_; 4] = w.registries().await;
    for _ in 0..5 {
        let lease = registries[0].obtain("k").lease().await.unwrap();
        let (token, detached) = (lease.token(), lease.detach().unwrap());
        let tasks: Vec<_> = (0..12)
            .map(|n| tokio::spawn(registries[n % 4].adopt(detached.clone())))
            .collect();
        let mut served = Vec::new();
        for task in tasks {
            match task.await.unwrap() {
                Ok(lease) => served.push(lease),
                Err(error) => assert!(error.is_lost(), "{error}"),
            }
        }
        assert_eq!(served.len(), 1);
        let adopted = served.pop().expect("one");
        assert!(adopted.is_valid() && adopted.token() > token);
        adopted.release().await.unwrap();
    }
}

/// The process goes on waiting for the key whose lease it adopts, or could not.
pub(crate) async fn who_waits_here_waits_on_behind_an_adoption(w: &dyn World) {
    let [here, there] = w.registries().await;
    let detached = there.obtain("k").lease().await.unwrap().detach().unwrap();
    let waiter = here.obtain("k");
    let mut in_line = waiter.acquire();
    assert!(poll_once(&mut in_line).await.is_none());
    waiting(&there.obtain("k"), 1).await;
    let adopted = here.adopt(detached.clone()).await.unwrap();
    assert!(poll_once(&mut in_line).await.is_none());
    adopted.release().await.unwrap();
    assert!(in_line.await.unwrap());
    assert_err!(here.adopt(detached).await, Lost, "k");
    assert!(waiter.release().await.unwrap());
}

/// An adopted lease is renewed as those of its registry are, unless its adopter says otherwise.
pub(crate) async fn an_adopted_lease_is_renewed(w: &dyn World) {
    let here = w.registry().await;
    // Long enough that a busy machine is never late with a renewal.
    let ttl = ms(1500);
    let builder = w.builder().await.ttl(ttl);
    let there = builder.renewal(Renewal::watchdog()).build().unwrap();
    let lease = here.obtain("k").ttl(ms(9000)).lease().await.unwrap();
    let adopted = there.adopt(lease.detach().unwrap()).await.unwrap();
    assert!(adopted.deadline() <= Instant::now() + ttl);
    sleep(ms(1800)).await;
    assert!(adopted.is_valid());

    // As long as the adopter says, and no longer.
    let began = Instant::now();
    let fixed = here.adopt(adopted.detach().unwrap()).ttl(ttl);
    let fixed = fixed.await.unwrap();
    assert!(fixed.deadline() >= began + ms(1482));
    assert!(fixed.deadline() <= Instant::now() + ttl);
    let cause = match fixed.lost().await {
        LockError::Lost { cause, .. } => cause,
        other => panic!("{other}"),
    };
    assert_eq!(cause, LossCause::FixedTtl);

    let lease = here.obtain("k").ttl(ms(9000)).lease().await.unwrap();
    let adopting = here.adopt(lease.detach().unwrap()).ttl(ttl);
    let renewed = adopting.renewal(Renewal::watchdog()).await.unwrap();
    assert!(renewed.deadline() <= Instant::now() + ttl);
    sleep(ms(1800)).await;
    assert!(renewed.is_valid());
    renewed.release().await.unwrap();
}

/// A store that is away is no loss: told as such, and the lease can be adopted when it is back.
pub(crate) async fn an_outage_does_not_lose_what_is_detached(w: &dyn World) {
    let here = w.registry().await;
    // An adoption that is answered in the last eighth of it is lost (M8).
    let there = w
        .builder()
        .await
        .response_timeout(ms(2400))
        .build()
        .unwrap();
    connected(&there).await;
    let lease = here.obtain("k").ttl(ms(60_000)).lease().await.unwrap();
    let detached = lease.detach().unwrap();
    w.set_offline(true);
    let begin = Instant::now();
    assert_err!(there.adopt(detached.clone()).await, Store, "k");
    assert!(begin.elapsed() <= ms(2400) + w.late());
    w.set_offline(false);
    let mut adopted = None;
    eventually("the store is back", async || {
        match there.adopt(detached.clone()).await {
            Ok(lease) => adopted = Some(lease),
            Err(LockError::Store { .. }) => {}
            Err(other) => panic!("{other}"),
        }
        adopted.is_some()
    })
    .await;
    adopted.expect("just seen").release().await.unwrap();
    idle(&there).await;
}

/// What is wrong is told before anything is sent; and after the end of the registry nothing is.
pub(crate) async fn adoptions_that_cannot_be(w: &dyn World) {
    let registry = w.registry().await;
    let commands = w.commands();
    let needs_a_tag: DetachedLease = "lockstream-lease-1 ab:1 64 1 a}b".parse().unwrap();
    assert_err!(registry.adopt(needs_a_tag).await, InvalidKey, "a}b");
    let line: DetachedLease = "lockstream-lease-1 ab:1 64 1 k".parse().unwrap();
    assert_err!(
        registry.adopt(line.clone()).ttl(ms(9)).await,
        InvalidTtl,
        "k"
    );
    drop(registry.adopt(line));
    assert_eq!(w.commands(), commands);
    let detached = registry
        .obtain("k")
        .lease()
        .await
        .unwrap()
        .detach()
        .unwrap();
    let held = registry.obtain("l").lease().await.unwrap();
    registry.shutdown().await;
    assert_err!(held.detach().map_err(LockError::from), Closed, "l");
    assert_err!(registry.adopt(detached.clone()).await, Closed, "k");
    let there = w.registry().await;
    let adopted = there.adopt(detached).await.unwrap();
    adopted.release().await.unwrap();
}

/// Two in the hands of nobody at once: a lease that is handed on again and again is held by one at a time.
pub(crate) async fn handed_round_tokens_grow(w: &dyn World) {
    let registries: [_; 3] = w.registries().await;
    let mut lease = registries[0].obtain("k").lease().await.unwrap();
    for round in 1..60 {
        let token = lease.token();
        let detached = lease.detach().unwrap();
        lease = registries[round % 3].adopt(detached).await.unwrap();
        assert!(lease.token() > token);
        assert!(lease.is_valid());
    }
    lease.release().await.unwrap();
}
