//! Free, or busy until the wait is over: what `acquire*` and `lease*` say.

use std::time::Duration;

use futures::TryStreamExt;
use futures::future::join_all;
use lockstream::LockError;
use tokio::time::{Instant, sleep};

use crate::assert_err;
use crate::world::{
    SOON, World, assert_took, empty, free, idle, is_held, ms, poll_once, waited, waiting,
};

pub(crate) async fn a_free_lock_is_had_at_once(w: &dyn World) {
    let [here, there] = w.registries().await;
    let (lock, other) = (here.obtain("k"), there.obtain("k"));
    let begin = Instant::now();

    assert!(lock.acquire_once().await.unwrap());
    assert!(lock.is_acquired());
    assert!(!other.acquire_once().await.unwrap());
    assert!(!other.is_acquired());
    assert!(lock.release().await.unwrap());
    assert!(!lock.is_acquired());

    assert!(other.acquire().await.unwrap());
    assert!(!lock.acquire_once().await.unwrap());
    assert!(other.release().await.unwrap());

    assert!(lock.acquire_within(ms(500)).await.unwrap());
    assert!(lock.release().await.unwrap());

    let lease = lock.lease().await.unwrap();
    assert!(lease.is_valid());
    assert!(other.lease_once().await.unwrap().is_none());
    lease.release().await.unwrap();
    let lease = lock.lease_within(ms(500)).await.unwrap();
    lease.release().await.unwrap();
    let lease = lock.lease_once().await.unwrap().unwrap();
    lease.release().await.unwrap();
    let lease = lock.lease().or_skip().await.unwrap().unwrap();
    lease.release().await.unwrap();
    assert!(!is_held(&lock).await);
    // Many answers of a busy server take long together, though nobody has waited for the end of a lease.
    let soon = if w.is_paused() { w.late() } else { SOON };
    assert!(begin.elapsed() < soon);
}

pub(crate) async fn a_busy_lock_is_false_when_the_wait_is_over(w: &dyn World) {
    let [here, there] = w.registries().await;
    let held = here.obtain("k").lease().await.unwrap();

    // Both another process and the holder's own.
    for registry in [&there, &here] {
        let lock = registry.obtain("k").wait(ms(200));
        let begin = Instant::now();
        assert!(!lock.acquire_once().await.unwrap());
        assert!(!lock.acquire_within(Duration::ZERO).await.unwrap());
        assert!(lock.lease_once().await.unwrap().is_none());
        assert_took(begin, ms(0), w.late());

        let begin = Instant::now();
        assert!(!lock.acquire().await.unwrap());
        assert_took(begin, ms(200), w.late());

        let begin = Instant::now();
        assert!(!lock.acquire_within(ms(100)).await.unwrap());
        assert_took(begin, ms(100), w.late());

        let begin = Instant::now();
        let error = assert_err!(lock.lease().await, NotAcquired, "k");
        assert_took(begin, ms(200), w.late());
        assert_took(begin, waited(&error), w.late());
        let error = assert_err!(lock.lease_within(ms(50)).await, NotAcquired, "k");
        assert!(waited(&error) >= ms(50) && waited(&error) <= ms(50) + w.late());

        assert!(lock.lease_within(ms(50)).or_skip().await.unwrap().is_none());
    }
    assert!(held.is_valid(), "the case is shorter than the lease");
}

/// A wait of nothing is no wait that was over before the store was asked.
pub(crate) async fn a_wait_of_nothing_asks_once(w: &dyn World) {
    let registry = w.registry().await;
    let lock = registry.obtain("k").wait(Duration::ZERO);
    assert!(lock.acquire().await.unwrap());
    assert!(lock.release().await.unwrap());
    assert!(lock.acquire_within(Duration::ZERO).await.unwrap());
    assert!(lock.release().await.unwrap());
    lock.lease().await.unwrap().release().await.unwrap();
}

pub(crate) async fn a_waiter_gets_what_is_released(w: &dyn World) {
    let [here, there] = w.registries().await;
    for registry in [&here, &there] {
        let lock = here.obtain("k");
        assert!(lock.acquire().await.unwrap());
        let other = registry.obtain("k").wait(Duration::MAX);
        let mut acquire = other.acquire();
        assert_eq!(poll_once(&mut acquire).await.transpose().unwrap(), None);
        if std::ptr::eq(registry, &there) {
            waiting(&lock, 1).await;
        }
        assert!(lock.release().await.unwrap());
        let begin = Instant::now();
        assert!(acquire.await.unwrap());
        assert_took(begin, ms(0), w.late());
        assert!(other.release().await.unwrap());
    }
}

/// Waiters of Redisson now and then got nothing until their wait was over, though the lock was released just after they
/// arrived (its ticket 5070). Here the release is sent at each moment of the waiter's way to the store and back. The lock
/// has a long ttl, and a ticket asks after 8 s at the earliest (W2): only the release can serve the waiter in time.
pub(crate) async fn a_release_that_crosses_an_arrival_is_not_missed(w: &dyn World) {
    const THERE_AND_BACK: u64 = 8;
    const UNASKED: Duration = ms(6000);
    let [here, there] = w.registries().await;
    w.set_latency(ms(THERE_AND_BACK));
    for registry in [&there, &here] {
        for after in 0..=2 * THERE_AND_BACK {
            let held = here.obtain("k").ttl(ms(60_000)).lease().await.unwrap();
            let first = held.token();
            let release = async {
                sleep(ms(after)).await;
                held.release().await.unwrap();
            };
            let lock = registry.obtain("k");
            let (next, ()) = tokio::join!(lock.lease_within(UNASKED), release);
            let next = next.unwrap_or_else(|error| panic!("released after {after} ms: {error}"));
            assert!(next.token() > first);
            next.release().await.unwrap();
        }
    }
    w.set_latency(ms(0));
}

/// Whoever wins, each caller of many waits no longer than it said.
pub(crate) async fn waits_end_each_in_its_own_time(w: &dyn World) {
    let [here, there] = w.registries().await;
    let held = here.obtain("k").lease().await.unwrap();
    let begin = Instant::now();
    let waits = [250, 100, 150, 50, 200].map(ms);
    join_all(waits.map(async |wait| {
        let lock = there.obtain("k");
        assert!(!lock.acquire_within(wait).await.unwrap());
        assert_took(begin, wait, w.late());
    }))
    .await;
    held.release().await.unwrap();
}

/// Those who gave up or were dropped hold up nobody: the next one gets the lock by the release itself.
pub(crate) async fn a_waiter_that_gave_up_leaves_nothing_in_the_way(w: &dyn World) {
    let [holder, impatient, dropped, local, patient] = w.registries().await;
    let held = holder.obtain("k").lease().await.unwrap();
    let watch = holder.obtain("k");

    let lock = impatient.obtain("k");
    // When all the others are in the queue.
    let mut gives_up = lock.acquire_within(ms(4000));
    assert!(poll_once(&mut gives_up).await.is_none());
    waiting(&watch, 1).await;
    let lock = dropped.obtain("k");
    let mut to_be_dropped = lock.acquire();
    assert!(poll_once(&mut to_be_dropped).await.is_none());
    waiting(&watch, 2).await;
    // Before the last one in its own line, too.
    let lock = local.obtain("k");
    let mut first_of_two = lock.lease();
    let mut second_of_two = lock.lease();
    assert!(poll_once(&mut first_of_two).await.is_none());
    assert!(poll_once(&mut second_of_two).await.is_none());
    waiting(&watch, 3).await;
    let lock = patient.obtain("k");
    let mut last = lock.acquire();
    assert!(poll_once(&mut last).await.is_none());
    waiting(&watch, 4).await;

    assert!(!gives_up.await.unwrap());
    drop((to_be_dropped, first_of_two));
    waiting(&watch, 2).await;
    held.release().await.unwrap();
    let begin = Instant::now();
    second_of_two.await.unwrap().release().await.unwrap();
    assert!(last.await.unwrap());
    assert_took(begin, ms(0), w.late());
    for registry in [&impatient, &dropped] {
        idle(registry).await;
    }
}

/// The ticket of a waiter that is gone is gone with the store's next answer. It stood for up to half a second: a release in
/// that time went to it, and whoever asked once was told that the lock is busy, though nobody wanted it.
pub(crate) async fn what_is_released_when_the_only_waiter_has_gone_is_free(w: &dyn World) {
    let [holder, gone, other] = w.registries().await;
    let lock = gone.obtain("{k}");
    for is_dropped in [true, false] {
        let held = holder.obtain("{k}").lease().await.unwrap();
        if is_dropped {
            let mut waiter = lock.lease();
            assert!(poll_once(&mut waiter).await.is_none());
            waiting(&lock, 1).await;
            drop(waiter);
        } else {
            assert!(!lock.acquire_within(ms(100)).await.unwrap());
        }
        // On the same connection, and on a cluster in the same slot: its answer comes after that to the withdrawal.
        let next = gone.obtain("{k} next").lease_once().await.unwrap();
        held.release().await.unwrap();
        let lease = other.obtain("{k}").lease_once().await.unwrap();
        let lease = lease.expect("nobody has it, and nobody waits");
        lease.release().await.unwrap();
        drop(next);
    }
}

/// The only waiter is dropped just when the lock is given to it: it must not be held for nobody.
pub(crate) async fn what_was_granted_to_a_dropped_waiter_is_given_back(w: &dyn World) {
    let [holder, dropped, other] = w.registries().await;
    let held = holder.obtain("k").lease().await.unwrap();
    let lock = dropped.obtain("k");
    let mut to_be_dropped = lock.acquire();
    assert!(poll_once(&mut to_be_dropped).await.is_none());
    waiting(&lock, 1).await;
    held.release().await.unwrap();
    // The store has handed it over; whether the waiter knows or not is the race that is meant.
    drop(to_be_dropped);
    let begin = Instant::now();
    assert!(other.obtain("k").acquire().await.unwrap());
    assert_took(begin, ms(0), w.late());
}

/// W2: nobody releases what a dead process held; its waiters look when the ttl is over.
pub(crate) async fn a_crashed_holders_key_is_had_when_its_ttl_is_over(w: &dyn World) {
    let registry = w.registry().await;
    let before = Instant::now();
    w.crashed_holder("k", ms(2500));
    let begin = Instant::now();
    let lock = registry.obtain("k");
    assert!(!lock.acquire_once().await.unwrap());
    let left = lock.inspect().await.unwrap().remaining().unwrap();
    // However long the questions took.
    assert!(
        left + before.elapsed() >= ms(2490) && left <= ms(2550),
        "{left:?}"
    );
    let acquired = join_all((0..3).map(async |_| {
        let lock = registry.obtain("k");
        assert!(lock.acquire().await.unwrap());
        let took = begin.elapsed();
        assert!(lock.release().await.unwrap());
        took
    }))
    .await;
    for took in acquired {
        assert!(took + ms(10) >= left, "before the ttl was over: {took:?}");
        assert!(took <= left + w.late(), "{took:?}");
    }
}

/// A waiter that looks when the lease that it knew of is over, and finds the next one's, goes on waiting.
pub(crate) async fn a_waiter_that_looks_in_vain_goes_on_waiting(w: &dyn World) {
    let [holder, first, second] = w.registries().await;
    // It lasts until both are in the queue.
    let lease = holder.obtain("k").ttl(ms(2500)).lease().await.unwrap();
    let (one, two) = (first.obtain("k"), second.obtain("k"));
    let mut acquire_one = one.acquire();
    assert!(poll_once(&mut acquire_one).await.is_none());
    waiting(&one, 1).await;
    let mut acquire_two = two.acquire();
    assert!(poll_once(&mut acquire_two).await.is_none());
    waiting(&one, 2).await;
    let begin = Instant::now();
    assert!(acquire_one.await.unwrap());
    assert!(begin.elapsed() <= ms(2500) + w.late());
    assert_err!(lease.release().await, Lost, "k");
    // Its own look is for nothing now.
    sleep(ms(300)).await;
    assert!(poll_once(&mut acquire_two).await.is_none());
    waiting(&one, 1).await;
    assert!(one.release().await.unwrap());
    let begin = Instant::now();
    assert!(acquire_two.await.unwrap());
    assert_took(begin, ms(0), w.late());
    assert!(two.release().await.unwrap());
}

/// With `select!` in a loop a caller keeps its place.
pub(crate) async fn a_future_polled_now_and_then_keeps_its_place(w: &dyn World) {
    let [holder, first, second] = w.registries().await;
    let held = holder.obtain("k").lease().await.unwrap();
    let (one, two) = (first.obtain("k"), second.obtain("k"));
    let mut acquire_one = one.acquire();
    assert!(poll_once(&mut acquire_one).await.is_none());
    waiting(&one, 1).await;
    let mut acquire_two = two.acquire();
    assert!(poll_once(&mut acquire_two).await.is_none());
    waiting(&one, 2).await;
    for _ in 0..5 {
        tokio::select! {
            biased;
            _ = &mut acquire_one => panic!("held by another"),
            () = sleep(ms(20)) => {}
        }
    }
    held.release().await.unwrap();
    assert!(acquire_one.await.unwrap());
    assert!(poll_once(&mut acquire_two).await.is_none());
    assert!(one.release().await.unwrap());
    assert!(acquire_two.await.unwrap());
}

pub(crate) async fn a_future_that_is_not_polled_has_taken_nothing(w: &dyn World) {
    let registry = w.registry().await;
    let lock = registry.obtain("k");
    let commands = w.commands();
    let futures = (
        lock.acquire(),
        lock.acquire_once(),
        lock.acquire_within(ms(1)),
        lock.lease(),
        lock.lease_once(),
        lock.release(),
        lock.inspect(),
    );
    let handles = (0..10_000).map(|n| registry.obtain(format!("order:{}", n % 100)));
    let handles: Vec<_> = handles.collect();
    assert_eq!(handles[142].key(), "order:42");
    assert_eq!(registry.in_use(), 0);
    assert!(w.leftovers().is_empty());
    assert_eq!(w.commands(), commands);
    drop(futures);
    assert_eq!(w.commands(), commands);
    assert!(lock.acquire_once().await.unwrap());
}

/// Keys are apart from one another, and so are prefixes.
pub(crate) async fn other_keys_and_prefixes_are_other_locks(w: &dyn World) {
    let registry = w.registry().await;
    let apart = w.builder().await.prefix("apart").build().unwrap();
    let locks = [
        registry.obtain("a"),
        registry.obtain("b"),
        registry.obtain("ключ {1}"),
        registry.obtain("x".repeat(512)),
        apart.obtain("a"),
    ];
    for lock in &locks {
        assert!(lock.acquire_once().await.unwrap());
    }
    for lock in &locks {
        assert!(!lock.clone().acquire_once().await.unwrap());
    }
    for lock in &locks {
        assert!(lock.release().await.unwrap());
    }
    free(&locks[0]).await;
}

/// `shop` with `billing:x` and `shop:billing` with `x` were one lock on some stores, and `{ap:p}` had the queue of `ap:p`.
pub(crate) async fn no_two_prefixes_share_a_lock(w: &dyn World) {
    let shop = w.builder().await.prefix("shop").build().unwrap();
    let part = w.builder().await.prefix("shop-billing").build().unwrap();
    for prefix in ["shop:billing", "{shop", "{shop:billing}"] {
        let refused = w.builder().await.prefix(prefix).build();
        assert_eq!(refused.unwrap_err().setting(), "prefix", "{prefix}");
    }
    let keys = ["x", "billing:x", "-billing:x", "billing-x", ":x"];
    let mut held = Vec::new();
    for key in keys {
        for registry in [&shop, &part] {
            let lock = registry.obtain(key);
            held.push(lock.lease_once().await.unwrap().expect("it is free"));
        }
    }
    for registry in [&shop, &part] {
        let found: Vec<_> = registry.scan("").try_collect().await.unwrap();
        let mut found: Vec<_> = found.iter().map(|lock| &*lock.key).collect();
        found.sort_unstable();
        let mut expected = keys;
        expected.sort_unstable();
        assert_eq!(found, expected);
    }
    // A key that would name what is not a lock.
    for key in ["billing:~fence", "x:~grant:1", "x:~queue2"] {
        assert_err!(shop.obtain(key).lease().await, InvalidKey, key);
    }
    for lease in held {
        lease.release().await.unwrap();
    }
}

/// A place in the queue that nobody stands on any more is gone from the store at once.
pub(crate) async fn nothing_is_left_of_a_wait(w: &dyn World) {
    let [here, there] = w.registries().await;
    let held = here.obtain("k").lease().await.unwrap();
    assert!(!there.obtain("k").acquire_within(ms(50)).await.unwrap());
    let watch = here.obtain("k");
    waiting(&watch, 0).await;
    idle(&there).await;
    held.release().await.unwrap();
    empty(w).await;
}

pub(crate) async fn done_futures_say_so(w: &dyn World) {
    use futures::future::FusedFuture;
    let registry = w.registry().await;
    let lock = registry.obtain("k");
    let mut acquire = lock.acquire();
    assert!(!acquire.is_terminated());
    assert!((&mut acquire).await.unwrap());
    assert!(acquire.is_terminated());
    assert_panics(&mut acquire).await;
    let mut release = lock.release();
    assert!((&mut release).await.unwrap());
    assert!(release.is_terminated());
    assert_panics(&mut release).await;
    let mut lease = lock.lease();
    let mut release = (&mut lease).await.unwrap().release();
    assert!(lease.is_terminated());
    assert_panics(&mut lease).await;
    (&mut release).await.unwrap();
    assert!(release.is_terminated());
    assert_panics(&mut release).await;
    let mut refused = registry.obtain("").acquire();
    assert!(matches!(
        (&mut refused).await,
        Err(LockError::InvalidKey { .. })
    ));
    assert!(refused.is_terminated());
    assert_panics(&mut refused).await;
}

/// Polled after it was done, it panics; it never yields a second lease.
pub(crate) async fn assert_panics<F: Future + Unpin>(future: &mut F) {
    let again = std::panic::AssertUnwindSafe(poll_once(future));
    let outcome = futures::FutureExt::catch_unwind(again).await;
    assert!(outcome.is_err(), "polled after it was done");
}

/// The name begins the owner, so it is in tickets, in grants, and on a server in the name of a channel.
pub(crate) async fn a_name_is_seen_and_need_not_be_unique(w: &dyn World) {
    let longest = "B.7_-".repeat(13)[..64].to_owned();
    for name in ["billing-7", &longest] {
        let named = async || w.builder().await.name(name).build().unwrap();
        let (here, there) = (named().await, named().await);
        let lock = here.obtain("k");
        let first = lock.lease().await.unwrap();
        let owner = lock.inspect().await.unwrap().owner().unwrap().to_owned();
        let (instance, _) = owner.split_once(':').unwrap();
        let random = instance.strip_prefix(&format!("{name}~")).unwrap();
        assert!(random.len() == 32 && random.bytes().all(|it| it.is_ascii_hexdigit()));
        let mut next = Box::pin(there.obtain("k").lease());
        assert!(poll_once(&mut next).await.is_none());
        waiting(&lock, 1).await;
        let begin = Instant::now();
        first.release().await.unwrap();
        let next = next.await.unwrap();
        assert!(begin.elapsed() < SOON, "told by no grant");
        let other = lock.inspect().await.unwrap().owner().unwrap().to_owned();
        assert!(other.starts_with(&format!("{name}~")) && !other.starts_with(instance));
        let line = next.detach().unwrap().to_string();
        let adopted = here.adopt(line.parse().unwrap()).await.unwrap();
        adopted.release().await.unwrap();
    }
}
