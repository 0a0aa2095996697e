//! Readers and writers, and permits.

use std::cell::Cell;

use futures::future::join_all;
use futures::stream;
use lockstream::verify::StepVerifier;
use lockstream::{
    DetachedLease, FutureLockExt, Lease, Lock, LockError, LockEvent, LockRegistry, Mode, OnFinish,
    Renewal, StreamLockExt,
};
use tokio::sync::Barrier;
use tokio::time::{Instant, sleep, timeout};

use crate::world::{
    BOUND, PATIENCE, SOON, World, assert_took, eventually, free, ms, poll_once, waiting,
};
use crate::{assert_err, watch};

fn reader(locks: &LockRegistry) -> Lock {
    locks.obtain("k").shared()
}

fn permit(locks: &LockRegistry, limit: u32, weight: u32) -> Lock {
    locks.obtain("k").permits_of(limit, weight)
}

async fn once(lock: &Lock) -> Option<Lease> {
    lock.lease_once().await.unwrap()
}

/// Waits until so many hold the key.
async fn held_by(locks: &LockRegistry, n: usize) {
    let lock = locks.obtain("k");
    eventually(format!("held by {n}"), async || {
        lock.inspect().await.unwrap().holders.len() == n
    })
    .await;
}

pub(crate) async fn readers_share_a_key_and_exclude_writers(w: &dyn World) {
    let [a, b] = w.registries().await;
    let first = once(&reader(&a)).await.unwrap();
    let second = once(&reader(&b)).await.unwrap();
    let third = once(&reader(&b)).await.unwrap();
    let writer = b.obtain("k");
    assert!(once(&writer).await.is_none());
    assert!(once(&permit(&b, 4, 1)).await.is_none());
    first.release().await.unwrap();
    second.release().await.unwrap();
    assert!(once(&writer).await.is_none());
    third.release().await.unwrap();
    let alone = once(&writer).await.unwrap();
    assert!(once(&reader(&a)).await.is_none());
    assert!(once(&reader(&b)).await.is_none());
    alone.release().await.unwrap();
    assert!(once(&reader(&a)).await.is_some());
}

pub(crate) async fn permits_are_held_up_to_their_limit(w: &dyn World) {
    let [a, b] = w.registries().await;
    let one = once(&permit(&a, 3, 1)).await.unwrap();
    let two = once(&permit(&b, 3, 2)).await.unwrap();
    assert!(once(&permit(&a, 3, 1)).await.is_none());
    assert!(once(&permit(&b, 3, 1)).await.is_none());
    one.release().await.unwrap();
    assert!(once(&permit(&a, 3, 2)).await.is_none(), "two do not fit");
    assert!(once(&reader(&a)).await.is_none());
    assert!(once(&a.obtain("k")).await.is_none());
    let one = once(&permit(&a, 3, 1)).await.unwrap();
    two.release().await.unwrap();
    assert!(once(&permit(&b, 3, 2)).await.is_some());
    one.release().await.unwrap();
    free(&a.obtain("k")).await;
    assert!(once(&permit(&a, 100, 64)).await.is_some());
}

/// A rolling change of the limit goes through, in either direction: whoever comes counts what is taken under any limit
/// against its own.
pub(crate) async fn permits_of_two_limits_count_each_other(w: &dyn World) {
    let [old, new] = w.registries().await;
    let one = once(&permit(&old, 2, 1)).await.unwrap();
    let two = once(&permit(&old, 2, 1)).await.unwrap();
    assert!(once(&permit(&old, 2, 1)).await.is_none());
    let three = once(&permit(&new, 4, 1)).await.unwrap();
    assert!(once(&permit(&new, 4, 2)).await.is_none(), "three are taken");
    let four = once(&permit(&new, 4, 1)).await.unwrap();
    let seen = old.obtain("k").inspect().await.unwrap();
    let mut modes: Vec<_> = seen.holders.iter().map(|it| it.mode.to_string()).collect();
    modes.sort();
    assert_eq!(
        modes,
        ["permit 1/2", "permit 1/2", "permit 1/4", "permit 1/4"]
    );
    assert!(once(&reader(&new)).await.is_none());
    assert!(once(&new.obtain("k")).await.is_none());

    // The one in front does not fit before one is left, and those behind it wait, though they fit.
    let (small, great) = (permit(&old, 2, 1), permit(&new, 4, 1));
    let mut waits_small = Box::pin(small.lease());
    assert!(poll_once(&mut waits_small).await.is_none());
    waiting(&small, 1).await;
    let mut waits_great = Box::pin(great.lease());
    assert!(poll_once(&mut waits_great).await.is_none());
    waiting(&small, 2).await;
    for lease in [one, three] {
        lease.release().await.unwrap();
        assert!(poll_once(&mut waits_small).await.is_none());
        assert!(poll_once(&mut waits_great).await.is_none());
        waiting(&small, 2).await;
    }
    four.release().await.unwrap();
    let served = timeout(SOON, async { tokio::join!(waits_small, waits_great) });
    let (small, great) = served.await.unwrap();
    let held = [two, small.unwrap(), great.unwrap()];
    held_by(&old, 3).await;
    join_all(held.into_iter().map(Lease::release)).await;
    free(&old.obtain("k")).await;

    // A limit of one is like an exclusive lock, and a weight may be more than another's limit.
    let alone = once(&permit(&old, 1, 1)).await.unwrap();
    assert!(once(&permit(&old, 1, 1)).await.is_none());
    assert!(once(&permit(&new, 64, 64)).await.is_none());
    let many = once(&permit(&new, u32::MAX, 64)).await.unwrap();
    assert!(once(&permit(&new, 64, 1)).await.is_none());
    alone.release().await.unwrap();
    assert!(once(&permit(&old, 1, 1)).await.is_none());
    many.release().await.unwrap();
    let heavy = once(&permit(&new, 64, 64)).await.unwrap();
    assert!(once(&permit(&new, 64, 1)).await.is_none());
    let more = once(&permit(&old, u32::MAX, 64)).await.unwrap();
    more.release().await.unwrap();
    heavy.release().await.unwrap();
}

/// A busy answer tells when the one in front has room, whatever limits the others have. Nobody releases here.
pub(crate) async fn a_permit_of_another_limit_comes_when_enough_have_run_out(w: &dyn World) {
    let [a, b] = w.registries().await;
    let stays = permit(&a, 4, 1).lease().await.unwrap();
    let begin = Instant::now();
    for ttl in [300, 800] {
        let left = permit(&a, 4, 1).ttl(ms(ttl));
        let left = left.on_finish(OnFinish::LetExpire);
        async {}.with_lock(left).await.unwrap();
    }
    let lock = permit(&b, 2, 1);
    let lease = timeout(BOUND, lock.lease()).await.unwrap().unwrap();
    // It asks after 8 to 12 s in any case.
    let late = if w.is_paused() { w.late() } else { ms(5_000) };
    assert_took(begin, ms(800), late);
    lease.release().await.unwrap();
    stays.release().await.unwrap();
}

/// Tokens are unique, and greater for whoever comes later.
pub(crate) async fn shared_tokens_grow(w: &dyn World) {
    let [a, b] = w.registries().await;
    let mut last = a.obtain("k").lease().await.unwrap().token();
    free(&a.obtain("k")).await;
    let mut held = Vec::new();
    for locks in [&a, &b, &a, &a, &b] {
        let lease = reader(locks).lease().await.unwrap();
        assert!(lease.token() > last);
        last = lease.token();
        held.push(lease);
    }
    join_all(held.into_iter().map(Lease::release)).await;
    assert!(a.obtain("k").lease().await.unwrap().token() > last);
}

/// Readers that come and go without end do not keep a writer out.
pub(crate) async fn nobody_overtakes_a_writer(w: &dyn World) {
    let [a, b, c] = w.registries().await;
    let held = reader(&a).lease().await.unwrap();
    let writer = b.obtain("k");
    let mut writes = Box::pin(writer.lease());
    assert!(poll_once(&mut writes).await.is_none());
    waiting(&writer, 1).await;
    // It would fit, but for the writer.
    assert!(once(&reader(&c)).await.is_none());
    let late = reader(&c);
    let mut reads = Box::pin(late.lease());
    assert!(poll_once(&mut reads).await.is_none());
    waiting(&writer, 2).await;
    held.release().await.unwrap();
    let written = timeout(SOON, writes).await.unwrap().unwrap();
    assert!(poll_once(&mut reads).await.is_none());
    written.release().await.unwrap();
    let read = timeout(SOON, reads).await.unwrap().unwrap();
    read.release().await.unwrap();
}

/// Nobody else would wake the readers behind it.
pub(crate) async fn a_writer_that_gives_up_wakes_the_readers_behind_it(w: &dyn World) {
    let [a, b, c] = w.registries().await;
    let held = reader(&a).lease().await.unwrap();
    let writer = b.obtain("k");
    let mut writes = Box::pin(writer.lease());
    assert!(poll_once(&mut writes).await.is_none());
    waiting(&writer, 1).await;
    let late = [reader(&c), reader(&c), reader(&a)];
    let reads = join_all(late.iter().map(async |lock| lock.lease().await.unwrap()));
    let mut reads = Box::pin(reads);
    assert!(poll_once(&mut reads).await.is_none());
    waiting(&writer, 4).await;
    drop(writes);
    let read = timeout(SOON, reads).await.unwrap();
    assert_eq!(read.len(), 3);
    held.release().await.unwrap();
}

/// One call serves 64; all of them are in at the same time, and nobody asks.
pub(crate) async fn very_many_readers_behind_a_writer_are_all_let_in(w: &dyn World) {
    const READERS: usize = 150;
    let [a, b, c] = w.registries().await;
    // Nobody asks because this one may be over.
    let held = a.obtain("k").ttl(ms(60_000)).lease().await.unwrap();
    let (all_in, all_in_at) = (Barrier::new(READERS), Cell::new(Instant::now()));
    let read = async |locks: &LockRegistry| {
        let reading = async {
            all_in.wait().await;
            all_in_at.set(Instant::now());
        };
        reading.with_lock(reader(locks)).await.unwrap();
    };
    let reads = join_all((0..READERS).map(|n| read(if n % 3 == 0 { &b } else { &c })));
    let release = async {
        waiting(&a.obtain("k"), READERS as u64).await;
        let released_at = Instant::now();
        held.release().await.unwrap();
        released_at
    };
    let all = timeout(PATIENCE, async { tokio::join!(reads, release) }).await;
    let (_, released_at) = all.unwrap();
    // Whoever is not told asks 8 s after it has come, at the earliest (W2), and the last came just before the release.
    let took = all_in_at.get() - released_at;
    assert!(took < ms(7000), "{took:?}");
}

pub(crate) async fn a_permit_that_is_released_goes_to_the_next(w: &dyn World) {
    let [a, b] = w.registries().await;
    let held = permit(&a, 2, 2).lease().await.unwrap();
    let (heavy, light) = (permit(&b, 2, 2), permit(&b, 2, 1));
    let mut waits_heavy = Box::pin(heavy.lease());
    assert!(poll_once(&mut waits_heavy).await.is_none());
    waiting(&heavy, 1).await;
    let mut waits_light = Box::pin(light.lease());
    assert!(poll_once(&mut waits_light).await.is_none());
    waiting(&heavy, 2).await;
    held.release().await.unwrap();
    let served = timeout(SOON, waits_heavy).await.unwrap().unwrap();
    assert!(poll_once(&mut waits_light).await.is_none(), "in order");
    served.release().await.unwrap();
    let served = timeout(SOON, waits_light).await.unwrap().unwrap();
    served.release().await.unwrap();
}

pub(crate) async fn shared_leases_are_renewed_and_lost_each_by_itself(w: &dyn World) {
    let [a, b] = w.registries().await;
    let brief = reader(&a).ttl(ms(3000));
    let renewed = brief.clone().renewal(Renewal::watchdog());
    let stays = renewed.lease().await.unwrap();
    let ends = brief.lease().await.unwrap();
    let other = reader(&b).ttl(ms(3000)).renewal(Renewal::watchdog());
    let other = other.lease().await.unwrap();
    timeout(BOUND, ends.lost()).await.unwrap();
    let then = Instant::now();
    // A deadline leaves 32 ms of the ttl out (D1).
    eventually("the others are renewed once more", async || {
        stays.deadline().min(other.deadline()) > then + ms(2967)
    })
    .await;
    assert!(stays.is_valid() && other.is_valid() && !ends.is_valid());
    assert_err!(ends.release().await, Lost, "k");
    held_by(&a, 2).await;
    // A renewal finds that the key is gone.
    w.expire("k");
    timeout(BOUND, async { tokio::join!(stays.lost(), other.lost()) })
        .await
        .unwrap();
    assert_err!(stays.release().await, Lost, "k");
    assert_err!(other.release().await, Lost, "k");
}

/// A holder that is gone, and one that keeps its permit: others have room when that time is over.
pub(crate) async fn permits_that_are_left_behind_run_out(w: &dyn World) {
    let [a, b] = w.registries().await;
    let limited = permit(&a, 2, 1)
        .ttl(ms(2500))
        .wait(ms(0))
        .on_finish(OnFinish::LetExpire);
    let begin = Instant::now();
    // At most two in 2.5 s.
    for done in [true, true, false] {
        let work = async {}.with_lock(&limited).or_skip().await.unwrap();
        assert_eq!(work.is_some(), done);
    }
    let next = permit(&b, 2, 1);
    let lease = timeout(BOUND, next.lease()).await.unwrap().unwrap();
    assert_took(begin, ms(2500), w.late());
    lease.release().await.unwrap();
}

pub(crate) async fn shared_waiters_that_are_dropped_leave_nothing(w: &dyn World) {
    let [a, b] = w.registries().await;
    let held = a.obtain("k").lease().await.unwrap();
    let long = ms(60_000);
    let locks: Vec<_> = (0..10).map(|_| reader(&b).ttl(long)).collect();
    for polls in 0..3 {
        let mut waits = Vec::new();
        for lock in &locks {
            let mut wait = Box::pin(lock.lease());
            for _ in 0..polls {
                assert!(poll_once(&mut wait).await.is_none());
            }
            waits.push(wait);
        }
        drop(waits);
        waiting(&a.obtain("k"), 0).await;
    }
    // Granted, and dropped before they look.
    let mut waits = Vec::new();
    for lock in &locks {
        let mut wait = Box::pin(lock.lease());
        assert!(poll_once(&mut wait).await.is_none());
        waits.push(wait);
    }
    waiting(&a.obtain("k"), 10).await;
    held.release().await.unwrap();
    held_by(&a, 10).await;
    drop(waits);
    free(&a.obtain("k")).await;
}

pub(crate) async fn a_shared_waiter_gives_up_in_its_time(w: &dyn World) {
    let [a, b] = w.registries().await;
    let held = a.obtain("k").lease().await.unwrap();
    let begin = Instant::now();
    let lock = reader(&b).wait(ms(300));
    assert_err!(lock.lease().await, NotAcquired, "k");
    assert_took(begin, ms(300), w.late());
    waiting(&lock, 0).await;
    held.release().await.unwrap();
}

pub(crate) async fn modes_are_seen_in_inspections_snapshots_and_events(w: &dyn World) {
    let locks = w.builder().await.name("seen").build().unwrap();
    let mut events = locks.events();
    let (two, one) = (permit(&locks, 4, 2), permit(&locks, 4, 1));
    let two = two.lease().await.unwrap();
    let one = one.lease().await.unwrap();
    let writer = locks.obtain("k");
    let mut writes = Box::pin(writer.lease());
    assert!(poll_once(&mut writes).await.is_none());
    let late = reader(&locks);
    let mut reads = Box::pin(late.lease());
    assert!(poll_once(&mut reads).await.is_none());
    waiting(&writer, 2).await;

    let seen = writer.inspect().await.unwrap();
    let mut holders: Vec<_> = seen.holders.iter().map(|it| it.mode.to_string()).collect();
    holders.sort();
    assert_eq!(holders, ["permit 1/4", "permit 2/4"]);
    assert!(seen.holders.iter().all(|it| it.owner.starts_with("seen~")));
    assert!(seen.holders.iter().all(|it| it.remaining > Some(ms(500))));
    assert_eq!(seen.waiting, 2);
    let modes: Vec<_> = seen.queue.iter().map(|it| it.mode).collect();
    assert_eq!(modes, [Mode::Exclusive, Mode::Shared]);

    let snapshot = locks.snapshot();
    let [key] = &snapshot.keys[..] else {
        panic!("{snapshot:?}")
    };
    let held: Vec<_> = key.held.iter().map(|it| (it.mode, it.token)).collect();
    let weight = |lease: &Lease| held.iter().find(|(_, token)| *token == lease.token());
    assert_eq!(weight(&two).unwrap().0.to_string(), "permit 2/4");
    assert_eq!(weight(&one).unwrap().0.to_string(), "permit 1/4");
    let modes: Vec<_> = key.waiting.iter().map(|it| it.mode).collect();
    assert_eq!(modes, [Mode::Exclusive, Mode::Shared]);

    two.release().await.unwrap();
    one.release().await.unwrap();
    let written = timeout(SOON, writes).await.unwrap().unwrap();
    written.release().await.unwrap();
    timeout(SOON, reads)
        .await
        .unwrap()
        .unwrap()
        .release()
        .await
        .unwrap();
    let told = watch::told_so_far(&mut events).await;
    let acquired = told.iter().filter_map(|event| match event {
        LockEvent::Acquired { mode, .. } => Some(mode.to_string()),
        _ => None,
    });
    let acquired: Vec<_> = acquired.collect();
    assert_eq!(
        acquired,
        ["permit 2/4", "permit 1/4", "exclusive", "shared"]
    );
}

/// A stream of a reader begins beside another reader, and behind a writer. One for which there is no permit is empty.
pub(crate) async fn streams_run_under_shared_locks(w: &dyn World) {
    let [a, b] = w.registries().await;
    let held = reader(&a).lease().await.unwrap();
    StepVerifier::try_create(stream::iter([1, 2]).with_lock(reader(&b)))
        .expect_next(1)
        .expect_next(2)
        .expect_complete()
        .verify()
        .await;
    held.release().await.unwrap();

    let held = a.obtain("k").lease().await.unwrap();
    let watch = b.obtain("k");
    StepVerifier::try_create(stream::iter([1]).with_lock(reader(&b)))
        .expect_no_event(ms(100))
        .then(async || {
            waiting(&watch, 1).await;
            held.release().await.unwrap();
        })
        .expect_next(1)
        .expect_complete()
        .verify()
        .await;

    let both = permit(&a, 2, 2).lease().await.unwrap();
    let none = permit(&b, 2, 1).wait(ms(0));
    let skipped = stream::iter([1]).with_lock(&none).or_skip();
    StepVerifier::try_create(skipped)
        .expect_complete()
        .verify()
        .await;
    StepVerifier::try_create(stream::iter([1]).with_lock(&none))
        .expect_error_matches(LockError::is_not_acquired)
        .expect_complete()
        .verify()
        .await;
    both.release().await.unwrap();
}

pub(crate) async fn settings_that_do_not_fit_are_refused(w: &dyn World) {
    let locks = w.registry().await;
    let setting = async |lock: Lock| match lock.acquire_once().await {
        Err(LockError::InvalidSetting { setting, .. }) => setting,
        other => panic!("{other:?}"),
    };
    assert_eq!(setting(locks.obtain("k").permits(0)).await, "permits");
    assert_eq!(setting(permit(&locks, 3, 0)).await, "weight");
    assert_eq!(setting(permit(&locks, 3, 4)).await, "weight");
    assert_eq!(setting(permit(&locks, 100, 65)).await, "weight");
    assert_eq!(setting(reader(&locks).reentrant()).await, "reentrant");
    assert_err!(reader(&locks).lead(async |_| ()).await, InvalidSetting, "k");
    // The last one counts.
    let lock = reader(&locks).permits(2);
    let lease = once(&lock).await.unwrap();
    let seen = lock.inspect().await.unwrap();
    assert_eq!(seen.holders[0].mode.to_string(), "permit 1/2");
    lease.release().await.unwrap();
}

/// What one process has taken another gives back, each permit by itself. Whoever waits comes in when there is room, and not
/// by an adoption.
pub(crate) async fn permits_and_readers_go_from_process_to_process(w: &dyn World) {
    let [here, there, third] = w.registries().await;
    let cases = [
        (permit(&here, 9, 3), permit(&here, 9, 6)),
        (reader(&here), reader(&here)),
    ];
    for (lock, other) in cases {
        let beside = once(&other).await.unwrap();
        let lease = lock.ttl(ms(60_000)).lease().await.unwrap();
        let (token, owner, view) = (lease.token(), lease.owner(), lease.view());
        let taken = third.obtain("k").inspect().await.unwrap().taken;
        let detached = lease.detach().unwrap();
        assert_eq!(Some(detached.owner()), owner.as_deref());
        assert!(!view.is_valid());
        let writer = third.obtain("k").wait(2 * BOUND);
        let mut writes = Box::pin(writer.lease());
        assert!(poll_once(&mut writes).await.is_none());
        waiting(&writer, 1).await;

        let line = detached.to_string();
        let sent: DetachedLease = line.parse().unwrap();
        assert_eq!(sent, detached);
        let adopted = there.adopt(sent).await.unwrap();
        assert!(adopted.token() > token);
        let seen = third.obtain("k").inspect().await.unwrap();
        assert_eq!(
            (seen.holders.len(), seen.taken, seen.waiting),
            (2, taken, 1)
        );
        let modes: Vec<_> = seen.holders.iter().map(|it| it.mode).collect();
        assert!(modes.contains(&detached.mode()), "{seen:?}");
        assert!(
            seen.holders
                .iter()
                .any(|it| Some(&it.owner) == adopted.owner().as_ref())
        );
        // It can be had once.
        assert_err!(there.adopt(detached.clone()).await, Lost, "k");
        assert_err!(here.adopt(detached).await, Lost, "k");
        // It is renewed by whoever has it now.
        sleep(ms(2500)).await;
        adopted.verify().await.unwrap();
        assert!(adopted.is_valid() && adopted.token() > token);
        adopted.release().await.unwrap();
        assert!(poll_once(&mut writes).await.is_none());
        beside.release().await.unwrap();
        timeout(SOON, writes)
            .await
            .unwrap()
            .unwrap()
            .release()
            .await
            .unwrap();
    }

    // Several at once, of which one process after the other takes one.
    let mut lines = Vec::new();
    for _ in 0..3 {
        let lease = permit(&here, 3, 1).lease().await.unwrap();
        lines.push(lease.detach().unwrap().to_string());
    }
    let next = permit(&here, 3, 1).wait(2 * BOUND);
    for line in lines {
        assert!(once(&permit(&third, 3, 1)).await.is_none());
        let adopting = [&here, &there, &third].map(|locks| locks.adopt(line.parse().unwrap()));
        let adopted = join_all(adopting).await;
        let had: Vec<_> = adopted.into_iter().filter_map(Result::ok).collect();
        let [lease] = &had[..] else { panic!("{had:?}") };
        let mut waits = Box::pin(next.lease());
        assert!(poll_once(&mut waits).await.is_none());
        waiting(&next, 1).await;
        lease.verify().await.unwrap();
        drop(had);
        let lease = timeout(SOON, waits).await.unwrap().unwrap();
        // It stays for the next round.
        drop(lease.detach().unwrap());
    }
    free(&third.obtain("k")).await;
}

/// A text that was made up takes no more than was given away, and one that is over nothing.
pub(crate) async fn a_permit_is_adopted_as_it_is(w: &dyn World) {
    let [here, there] = w.registries().await;
    let beside = permit(&here, 9, 6).lease().await.unwrap();
    let lease = permit(&here, 9, 3).ttl(ms(60_000)).lease().await.unwrap();
    let detached = lease.detach().unwrap();
    let line = detached.to_string();
    for (from, to) in [
        ("-2 3/9 ", "-2 4/9 "),
        ("-2 3/9 ", "-2 2/9 "),
        ("-2 3/9 ", "-2 3/10 "),
        ("-2 3/9 ", "-2 r "),
        ("-2 3/9 ", "-1 "),
    ] {
        let forged = line.replace(from, to);
        assert_ne!(forged, line);
        assert_err!(there.adopt(forged.parse().unwrap()).await, Lost, "k");
    }
    let forged = line.replace("-2 3/9 ", "-2 0/9 ").parse().unwrap();
    assert_err!(there.adopt(forged).await, InvalidSetting, "k");
    let seen = there.obtain("k").inspect().await.unwrap();
    assert_eq!((seen.holders.len(), seen.taken), (2, 9));
    let adopted = there.adopt(detached).await.unwrap();
    let text = format!("lockstream-lease-2 3/9 {} 64 0 k", adopted.owner().unwrap());
    let held_there = there.adopt(text.parse().unwrap()).await;
    assert_err!(held_there, NotDetached, "k");
    adopted.verify().await.unwrap();
    adopted.release().await.unwrap();
    beside.release().await.unwrap();

    let lease = reader(&here).ttl(ms(1500)).lease().await.unwrap();
    let detached = lease.detach().unwrap();
    free(&here.obtain("k")).await;
    assert_err!(there.adopt(detached).await, Lost, "k");
}

pub(crate) async fn a_shutdown_releases_shared_leases_and_refuses_shared_waiters(w: &dyn World) {
    let [a, b] = w.registries().await;
    let leases = [reader(&a), reader(&a)];
    let mut held = Vec::new();
    for lock in &leases {
        held.push(lock.lease().await.unwrap());
    }
    let other = permit(&a, 1, 1);
    let mut waits = Box::pin(other.lease());
    assert!(poll_once(&mut waits).await.is_none());
    waiting(&other, 1).await;
    a.shutdown().await;
    assert_err!(waits.await, Closed, "k");
    for lease in held {
        assert!(!lease.is_valid());
    }
    assert!(b.obtain("k").acquire_once().await.unwrap());
}

pub(crate) async fn shared_waiters_survive_an_outage(w: &dyn World) {
    let [a, b] = w.registries().await;
    let held = a.obtain("k").lease().await.unwrap();
    let locks: Vec<_> = (0..20).map(|_| reader(&b).wait(ms(30_000))).collect();
    let reads = join_all(locks.iter().map(async |lock| lock.lease().await.unwrap()));
    let mut reads = Box::pin(reads);
    assert!(poll_once(&mut reads).await.is_none());
    waiting(&a.obtain("k"), 20).await;
    w.set_offline(true);
    sleep(ms(100)).await;
    assert!(poll_once(&mut reads).await.is_none());
    w.set_offline(false);
    let read = timeout(ms(15_000), async { tokio::join!(reads, held.release()) }).await;
    let (read, _) = read.unwrap();
    assert_eq!(read.len(), 20);
}

/// It shared the lease of the reader around it, or the permit: two wrote at a time, each of them alone, and a permit of
/// weight 1 became one of weight 4. An upgrade would wait for itself.
pub(crate) async fn an_exclusive_lock_inside_a_shared_one_is_refused(w: &dyn World) {
    let [here, there] = w.registries().await;
    let outers = [reader(&here), permit(&here, 4, 1)];
    for outer in outers {
        let beside = outer.lease().await.unwrap();
        let inside = async {
            let nested = here.obtain("k").reentrant();
            let error = assert_err!(nested.lease().await, InvalidSetting, "k");
            assert!(error.to_string().contains("cannot upgrade"), "{error}");
            assert_err!(nested.acquire().await, InvalidSetting, "k");
            assert_err!(nested.lease_once().await, InvalidSetting, "k");
            assert_err!(async {}.with_lock(&nested).await, InvalidSetting, "k");
            // In another process it waits like any other.
            let elsewhere = there.obtain("k").reentrant().wait(ms(20));
            assert_err!(elsewhere.lease().await, NotAcquired, "k");
            // Without `reentrant` it waits for the work around it.
            let waits = here.obtain("k").wait(ms(20));
            assert_err!(waits.lease().await, NotAcquired, "k");
        };
        inside.with_lock(&outer).await.unwrap();
        beside.release().await.unwrap();
        free(&here.obtain("k")).await;
    }
}

/// What is refused alone is refused inside, too.
pub(crate) async fn a_shared_lock_shares_no_lease_inside(w: &dyn World) {
    let locks = w.registry().await;
    let outers = [locks.obtain("k"), reader(&locks), permit(&locks, 4, 4)];
    for outer in outers {
        let inside = async {
            let inners = [reader(&locks), permit(&locks, 4, 1), permit(&locks, 4, 4)];
            for nested in inners {
                let nested = nested.reentrant();
                assert_err!(nested.lease_once().await, InvalidSetting, "k");
                assert_err!(nested.acquire().await, InvalidSetting, "k");
                assert_err!(async {}.with_lock(&nested).await, InvalidSetting, "k");
            }
        };
        inside.with_lock(outer).await.unwrap();
    }
    free(&locks.obtain("k")).await;
}
