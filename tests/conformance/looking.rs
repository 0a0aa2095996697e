//! What is told of a lock in the store, and what may be done about it from outside.

use futures::TryStreamExt;
use futures::future::try_join_all;
use lockstream::{Lease, LockError, LockRegistry, Mode, OnFinish, Renewal};
use tokio::time::{Instant, sleep, timeout};

use crate::assert_err;
use crate::world::{
    BOUND, SOON, World, assert_took, assert_was_kept, connected, eventually, free, is_held, ms,
    poll_once, waiting,
};

/// The owner of a lease, as the store has it.
fn owner(lease: &Lease) -> String {
    lease.owner().expect("it is held")
}

/// A holder that was killed stays written in the store until somebody clears it away: it was told as a holder with nothing
/// left, even as the owner.
pub(crate) async fn who_is_over_is_told_no_more(w: &dyn World) {
    let [here, there] = w.registries().await;
    for mode in ["shared", "permits"] {
        let lock = || match mode {
            "shared" => here.obtain("k").shared(),
            _ => here.obtain("k").permits_of(9, 3),
        };
        let taken = if mode == "shared" { 1 } else { 3 };
        // Nothing is sent at its end, as if its process had been killed.
        let killed = |ttl| lock().ttl(ms(ttl)).on_finish(OnFinish::LetExpire);
        let first = killed(3000).lease().await.unwrap();
        first.finish().await.unwrap();
        // Nobody renews this one, which would clear away the other.
        let alive = lock().ttl(ms(60_000)).lease().await.unwrap();
        let seen = there.obtain("k").inspect().await.unwrap();
        assert_eq!((seen.holders.len(), seen.taken), (2, 2 * taken), "{mode}");
        assert_eq!(seen.holders[1].owner, owner(&alive), "by their ends");
        eventually("it is told no more", async || {
            there.obtain("k").inspect().await.unwrap().holders.len() == 1
        })
        .await;
        let seen = there.obtain("k").inspect().await.unwrap();
        assert_eq!(seen.owner(), alive.owner().as_deref());
        assert_eq!((seen.taken, seen.is_held()), (taken, true));
        assert!(seen.remaining() > Some(ms(10_000)));
        alive.release().await.unwrap();

        // Of a lock all of whose holders are over, too.
        let killed = killed(1500);
        killed.lease().await.unwrap().finish().await.unwrap();
        let begin = Instant::now();
        killed.lease().await.unwrap().finish().await.unwrap();
        let done = Instant::now();
        eventually("nobody holds it", async || {
            !there.obtain("k").inspect().await.unwrap().is_held()
        })
        .await;
        assert_was_kept(begin, done, ms(1400), w.late() + ms(100));
        let seen = there.obtain("k").inspect().await.unwrap();
        assert_eq!(
            (seen.owner(), seen.remaining(), seen.taken),
            (None, None, 0)
        );
    }
}

/// For readiness probes there was only the thorough look, which connects anew and costs more than locks.
pub(crate) async fn a_ping_is_answered_while_locks_would_be(w: &dyn World) {
    let locks = w.builder().await.response_timeout(ms(3000));
    let locks = locks.build().unwrap();
    let lease = locks.obtain("k").ttl(ms(60_000)).lease().await.unwrap();
    let left = w.leftovers();
    let took = locks.ping().await.unwrap();
    assert!(took < BOUND, "{took:?}");
    assert_eq!(w.leftovers(), left, "it writes nothing");
    lease.release().await.unwrap();

    w.set_offline(true);
    locks.ping().await.unwrap_err();
    w.set_offline(false);
    eventually("it answers again", async || locks.ping().await.is_ok()).await;

    w.set_latency(ms(9000));
    let begin = Instant::now();
    locks.ping().await.unwrap_err();
    // To the response time-out belongs that of connecting, if the connection was not needed meanwhile.
    assert!(begin.elapsed() < BOUND, "{:?}", begin.elapsed());
    w.set_latency(ms(0));
    eventually("it answers again", async || locks.ping().await.is_ok()).await;

    locks.shutdown().await;
    let closed = locks.ping().await.unwrap_err();
    assert!(!closed.is_retryable(), "{closed}");
}

/// It listed locks of dead holders as held.
pub(crate) async fn a_scan_leaves_out_the_dead(w: &dyn World) {
    let [here, there] = w.registries().await;
    let killed = here.obtain("k").shared().on_finish(OnFinish::LetExpire);
    let lease = killed.ttl(ms(3000)).lease().await.unwrap();
    w.dead_waiter("k");
    lease.finish().await.unwrap();
    let found: Vec<_> = there.scan("").try_collect().await.unwrap();
    let [found] = &found[..] else {
        panic!("{found:?}")
    };
    assert_eq!((found.inspection.taken, found.inspection.waiting), (1, 0));
    eventually("it is listed no more", async || {
        let found: Vec<_> = there.scan("").try_collect().await.unwrap();
        found.is_empty()
    })
    .await;
    // Whoever comes next clears it away.
    there
        .obtain("k")
        .lease()
        .await
        .unwrap()
        .release()
        .await
        .unwrap();
}

/// Of ten permits of weight 64 three were told, and 8 of the fourth.
pub(crate) async fn holders_are_told_whole_and_how_much_is_taken(w: &dyn World) {
    let [here, there] = w.registries().await;
    let lock = here.obtain("k");
    let look = async || there.obtain("k").inspect().await.unwrap();
    let hold = async |locks: Vec<lockstream::Lock>| {
        try_join_all(locks.iter().map(|lock| lock.lease()))
            .await
            .unwrap()
    };
    let permit = |weight| lock.clone().permits_of(1000, weight).ttl(ms(60_000));

    let mut held = hold((0..10).map(|_| permit(64)).collect()).await;
    held.extend(hold(vec![permit(7), permit(1)]).await);
    let seen = look().await;
    let mut weights: Vec<_> = seen.holders.iter().map(|it| it.mode.to_string()).collect();
    weights.sort();
    let mut expected = vec!["permit 64/1000"; 10];
    expected.splice(0..0, ["permit 1/1000"]);
    expected.push("permit 7/1000");
    assert_eq!(weights, expected);
    assert_eq!(seen.taken, 648);
    // So much is free.
    let rest = hold((0..22).map(|_| permit(16)).collect()).await;
    assert_eq!(look().await.taken, 1000);
    assert!(permit(1).lease_once().await.unwrap().is_none());
    held.extend(rest);
    try_join_all(held.into_iter().map(Lease::release))
        .await
        .unwrap();

    let cases = [
        (0..150).map(|_| permit(1)).collect::<Vec<_>>(),
        (0..150)
            .map(|_| lock.clone().shared().ttl(ms(60_000)))
            .collect(),
    ];
    for locks in cases {
        let held = hold(locks).await;
        let seen = look().await;
        assert_eq!((seen.holders.len(), seen.taken), (100, 150));
        assert!(seen.holders.is_sorted_by_key(|it| it.remaining));
        try_join_all(held.into_iter().map(Lease::release))
            .await
            .unwrap();
    }
    let alone = lock.lease().await.unwrap();
    let seen = look().await;
    assert_eq!((seen.holders.len(), seen.taken), (1, 1));
    alone.release().await.unwrap();
    assert_eq!(look().await.taken, 0);
}

/// It was told as waiting for as long as somebody held the lock.
pub(crate) async fn a_waiter_that_died_is_told_no_more(w: &dyn World) {
    let [here, there] = w.registries().await;
    let cases = [here.obtain("k"), here.obtain("k").shared()];
    for lock in cases {
        let held = lock.lease().await.unwrap();
        w.dead_waiter("k");
        let seen = there.obtain("k").inspect().await.unwrap();
        assert_eq!((seen.waiting, seen.queue.len()), (0, 0));
        let waits = there.obtain("k");
        let mut acquire = waits.acquire();
        assert!(poll_once(&mut acquire).await.is_none());
        // Whoever asks is there, too.
        for registry in [&here, &there] {
            waiting(&registry.obtain("k"), 1).await;
            let seen = registry.obtain("k").inspect().await.unwrap();
            assert_eq!(seen.queue.len(), 1);
            assert!(!seen.queue[0].owner.starts_with("dead"), "{seen:?}");
        }
        held.release().await.unwrap();
        assert!(timeout(SOON, acquire).await.unwrap().unwrap());
        assert!(waits.release().await.unwrap());
    }
}

pub(crate) async fn holders_and_waiters_have_a_key_and_a_name(w: &dyn World) {
    let here = w.builder().await.name("web-1").build().unwrap();
    let there = w.builder().await.name("web-2").build().unwrap();
    let nameless = w.registry().await;
    let group = || nameless.obtain_all(["b", "a", "c"]);
    assert!(!group().inspect().await.unwrap().is_held());
    let held = [
        here.obtain("a").lease().await.unwrap(),
        there.obtain("b").shared().lease().await.unwrap(),
        nameless.obtain("c").lease().await.unwrap(),
    ];
    let waits = there.obtain("a");
    let mut acquire = waits.acquire();
    assert!(poll_once(&mut acquire).await.is_none());
    waiting(&waits, 1).await;

    let seen = group().inspect().await.unwrap();
    let told = seen.holders.iter().map(|it| (&*it.key, it.name(), it.mode));
    let expected = [
        ("a", Some("web-1"), Mode::Exclusive),
        ("b", Some("web-2"), Mode::Shared),
        ("c", None, Mode::Exclusive),
    ];
    assert_eq!(told.collect::<Vec<_>>(), expected);
    assert_eq!((seen.taken, seen.is_held(), seen.waiting), (3, true, 1));
    let told = seen.queue.iter().map(|it| (&*it.key, it.name(), it.mode));
    let expected = [("a", Some("web-2"), Mode::Exclusive)];
    assert_eq!(told.collect::<Vec<_>>(), expected);

    try_join_all(held.map(Lease::release)).await.unwrap();
    assert!(acquire.await.unwrap());
    assert!(waits.release().await.unwrap());
    let kept = here.obtain("d").on_finish(OnFinish::KeepFor(ms(60_000)));
    drop(kept.lease().await.unwrap());
    eventually("it is kept under the name", async || {
        let seen = there.obtain("d").inspect().await.unwrap();
        let owner = seen.owner().expect("it is kept");
        assert_eq!(seen.holders[0].name(), Some("web-1"));
        owner.contains("+kept:")
    })
    .await;
    let seen = there.obtain("d").inspect().await.unwrap();
    assert!(
        there
            .force_release("d", &seen.holders[0].owner)
            .await
            .unwrap()
    );
}

pub(crate) async fn a_lease_tells_its_owner(w: &dyn World) {
    let [here, there] = w.registries().await;
    let seen = async |key: &str| {
        let seen = there.obtain(key).inspect().await.unwrap();
        seen.holders
            .into_iter()
            .map(|it| it.owner)
            .collect::<Vec<_>>()
    };
    let cases = [
        here.obtain("k"),
        here.obtain("k").shared(),
        here.obtain("k").permits_of(4, 2),
    ];
    for lock in cases {
        let lease = lock.lease().await.unwrap();
        let view = lease.view();
        assert_eq!(seen("k").await, [owner(&lease)]);
        assert_eq!(view.owner(), lease.owner());
        assert_eq!(view.owner_of("k"), lease.owner());
        assert_eq!(view.owner_of("l"), None);
        lease.release().await.unwrap();
        assert_eq!(view.owner(), None);
        assert!(lock.acquire().await.unwrap());
        assert_eq!(seen("k").await, [lock.view().unwrap().owner().unwrap()]);
        assert!(lock.release().await.unwrap());
    }
    let group = here.obtain_all(["b", "a"]).lease().await.unwrap();
    assert_eq!(group.owner(), group.owner_of("a"));
    for key in ["a", "b"] {
        assert_eq!(seen(key).await, [group.owner_of(key).unwrap()]);
    }
    assert_eq!(group.owner_of("c"), None);
    group.release().await.unwrap();

    // One that is over tells none.
    let lease = here.obtain("k").lease().await.unwrap();
    w.expire("k");
    assert!(lease.verify().await.is_err());
    assert_eq!(lease.owner(), None);
}

/// `is_valid` looks at a clock, and an extension of a long lease succeeds though the lock is gone.
pub(crate) async fn a_lease_is_verified_at_the_store(w: &dyn World) {
    let [here, there] = w.registries().await;
    let cases = [
        here.obtain("k"),
        here.obtain("k").ttl(ms(60_000)),
        here.obtain("k").shared(),
        here.obtain("k").permits_of(4, 2).ttl(ms(60_000)),
    ];
    for lock in cases {
        let lease = lock.lease().await.unwrap();
        let view = lease.view();
        lease.verify().await.unwrap();
        view.verify().await.unwrap();
        w.expire("k");
        let other = there.obtain("k").lease().await.unwrap();
        let mut lost = lease.lost();
        assert_err!(lease.verify().await, Lost, "k");
        // It is lost from then on, and not only after the next renewal.
        assert!(
            poll_once(&mut lost)
                .await
                .is_some_and(|loss| loss.is_lost())
        );
        assert!(!lease.is_valid() && !view.is_valid());
        assert_err!(view.verify().await, Lost, "k");
        assert_err!(lease.release().await, Lost, "k");
        other.verify().await.unwrap();
        other.release().await.unwrap();
    }
    // Of several keys, all.
    let group = here.obtain_all(["a", "b"]).lease().await.unwrap();
    group.verify().await.unwrap();
    w.expire("b");
    assert_err!(group.verify().await, Lost, "b");
    assert_err!(group.release().await, Lost, "b");
    // One that was released is none of ours.
    let lease = here.obtain("k").lease().await.unwrap();
    let view = lease.view();
    lease.release().await.unwrap();
    let next = here.obtain("k").lease().await.unwrap();
    assert_err!(view.verify().await, Lost, "k");
    next.verify().await.unwrap();
    here.shutdown().await;
    assert_err!(next.verify().await, Closed, "k");
}

pub(crate) async fn a_verification_prolongs_nothing(w: &dyn World) {
    let [here, there] = w.registries().await;
    let cases = [
        here.obtain("k"),
        here.obtain("k").shared(),
        here.obtain("k").permits_of(4, 2),
    ];
    for lock in cases {
        let lock = lock.ttl(ms(2000));
        let (lease, begin) = loop {
            let lease = lock.lease().await.unwrap();
            let begin = Instant::now();
            if lease.deadline() - begin > ms(1900) {
                break (lease, begin);
            }
            // It took long to come. Such a one is renewed once, to last as long as was asked for (W3).
            lease.release().await.unwrap();
        };
        let until = lease.deadline();
        sleep(ms(600)).await;
        lease.verify().await.unwrap();
        let seen = there.obtain("k").inspect().await.unwrap();
        let ends = begin.elapsed() + seen.remaining().unwrap();
        assert!(ends <= ms(2010) + w.late(), "{ends:?}");
        // Prolonged, it would have nearly 2 s. The server's clock may be set meanwhile.
        assert!(seen.remaining().unwrap() <= ms(1700), "{seen:?}");
        assert_eq!(lease.deadline(), until);
        lease.release().await.unwrap();
    }
}

pub(crate) async fn a_verification_without_an_answer_says_so(w: &dyn World) {
    let here = w.builder().await.response_timeout(ms(300)).build().unwrap();
    connected(&here).await;
    let lease = here.obtain("k").ttl(ms(60_000)).lease().await.unwrap();
    w.set_offline(true);
    let begin = Instant::now();
    let mut dropped = lease.verify();
    let _ = poll_once(&mut dropped).await;
    drop(dropped);
    assert_err!(lease.verify().await, Store, "k");
    assert_took(begin, ms(0), ms(300) + w.late());
    assert!(lease.is_valid(), "it is not known");
    w.set_offline(false);
    eventually("the store answers", async || lease.verify().await.is_ok()).await;
    assert!(lease.is_valid());
    lease.release().await.unwrap();
    free(&here.obtain("k")).await;

    // A lease that ends meanwhile is lost.
    let lease = here.obtain("k").ttl(ms(1500)).lease().await.unwrap();
    w.set_offline(true);
    sleep(ms(1450)).await;
    eventually("it is over", async || {
        matches!(lease.verify().await, Err(LockError::Lost { .. }))
    })
    .await;
    w.set_offline(false);
    drop(lease);
    eventually("the store is back", async || {
        here.obtain("k")
            .inspect()
            .await
            .is_ok_and(|it| !it.is_held())
    })
    .await;
}

/// A stuck holder renews for ever: its lock goes to whoever waits, and it learns of that.
pub(crate) async fn force_takes_an_exclusive_lock(w: &dyn World) {
    let [stuck, waits, operator] = w.registries().await;
    let lease = stuck.obtain("k").lease().await.unwrap();
    let token = lease.token();
    let next = waits.obtain("k").wait(2 * BOUND);
    let mut acquire = next.acquire();
    assert!(poll_once(&mut acquire).await.is_none());
    waiting(&next, 1).await;

    let seen = operator.obtain("k").inspect().await.unwrap();
    assert!(!operator.force_release("k", "somebody:1").await.unwrap());
    assert!(
        !operator
            .force_release("l", &seen.holders[0].owner)
            .await
            .unwrap()
    );
    lease.verify().await.unwrap();
    assert!(
        operator
            .force_release("k", &seen.holders[0].owner)
            .await
            .unwrap()
    );
    assert!(timeout(SOON, acquire).await.unwrap().unwrap());
    let now = next.view().unwrap();
    assert!(now.token() > token);
    // A second time it is another's.
    assert!(
        !operator
            .force_release("k", &seen.holders[0].owner)
            .await
            .unwrap()
    );
    now.verify().await.unwrap();
    assert!(timeout(BOUND, lease.lost()).await.unwrap().is_lost());
    drop(lease);

    // By the registry itself, too, and without a waiter.
    assert!(
        waits
            .force_release("k", now.owner().unwrap())
            .await
            .unwrap()
    );
    assert!(!is_held(&next).await);
    assert_err!(now.verify().await, Lost, "k");
    assert!(next.release().await.is_err());
    assert!(operator.obtain("k").acquire_once().await.unwrap());
    operator.shutdown().await;
    assert_err!(operator.force_release("k", "a:1").await, Closed, "k");
    assert_err!(waits.force_release("~", "a:1").await, InvalidKey, "~");
}

pub(crate) async fn force_takes_one_reader(w: &dyn World) {
    let [here, waits, operator] = w.registries().await;
    let one = here.obtain("k").shared().lease().await.unwrap();
    let two = here.obtain("k").shared().lease().await.unwrap();
    let writer = waits.obtain("k").wait(2 * BOUND);
    let mut acquire = writer.acquire();
    assert!(poll_once(&mut acquire).await.is_none());
    waiting(&writer, 1).await;

    assert!(operator.force_release("k", owner(&one)).await.unwrap());
    assert!(
        !operator
            .force_release("k", two.owner().unwrap() + "0")
            .await
            .unwrap()
    );
    assert_err!(one.verify().await, Lost, "k");
    two.verify().await.unwrap();
    let seen = operator.obtain("k").inspect().await.unwrap();
    assert_eq!((seen.holders.len(), seen.waiting), (1, 1));
    assert!(poll_once(&mut acquire).await.is_none());
    assert!(operator.force_release("k", owner(&two)).await.unwrap());
    assert!(timeout(SOON, acquire).await.unwrap().unwrap());
    assert_err!(two.verify().await, Lost, "k");
    assert!(writer.release().await.unwrap());
}

/// A permit of 2 of 3 is taken, and two permits of 1 fit, which wait behind one another.
pub(crate) async fn force_takes_one_permit(w: &dyn World) {
    let [here, waits, operator] = w.registries().await;
    let permit = |locks: &LockRegistry, weight| {
        let lock = locks.obtain("k").permits_of(3, weight);
        lock.wait(2 * BOUND)
    };
    let great = permit(&here, 2).lease().await.unwrap();
    let small = permit(&here, 1).lease().await.unwrap();
    let locks = [permit(&waits, 1), permit(&waits, 1)];
    let mut acquire = Box::pin(try_join_all(locks.iter().map(|lock| lock.lease())));
    assert!(poll_once(&mut acquire).await.is_none());
    waiting(&locks[0], 2).await;

    // A part of a permit has no owner of its own.
    let part = format!("{} 1/3", owner(&great));
    assert!(!operator.force_release("k", part).await.unwrap());
    assert_eq!(operator.obtain("k").inspect().await.unwrap().taken, 3);
    assert!(operator.force_release("k", owner(&great)).await.unwrap());
    let served = timeout(SOON, acquire).await.unwrap().unwrap();
    assert_err!(great.verify().await, Lost, "k");
    small.verify().await.unwrap();
    let seen = operator.obtain("k").inspect().await.unwrap();
    assert_eq!((seen.holders.len(), seen.taken), (3, 3));
    for lease in served.iter().chain([&small]) {
        assert!(operator.force_release("k", owner(lease)).await.unwrap());
    }
    free(&operator.obtain("k")).await;
    for lease in served.iter().chain([&small]) {
        assert_err!(lease.verify().await, Lost, "k");
    }
}

pub(crate) async fn force_takes_a_key_that_is_kept(w: &dyn World) {
    let [here, operator] = w.registries().await;
    let cases = [here.obtain("k"), here.obtain("k").shared()];
    for lock in cases {
        let kept = lock.on_finish(OnFinish::KeepFor(ms(60_000)));
        kept.lease().await.unwrap().finish().await.unwrap();
        let lock = operator.obtain("k");
        assert!(lock.lease_once().await.unwrap().is_none());
        let owner = lock.inspect().await.unwrap().owner().unwrap().to_owned();
        assert!(owner.contains("+kept:"), "{owner}");
        assert!(operator.force_release("k", owner).await.unwrap());
        lock.lease_once()
            .await
            .unwrap()
            .unwrap()
            .release()
            .await
            .unwrap();
    }
}

/// Whatever is asked for by mistake: nothing is changed, and a lock of another key or prefix is none of it.
pub(crate) async fn force_takes_nothing_from_another(w: &dyn World) {
    let [here, operator] = w.registries().await;
    let elsewhere = w.builder().await.prefix("other").build().unwrap();
    let cases = [
        here.obtain("k"),
        here.obtain("k").shared(),
        here.obtain("k").permits_of(4, 3),
    ];
    for lock in cases {
        let lease = lock.renewal(Renewal::watchdog()).lease().await.unwrap();
        let own = owner(&lease);
        let (instance, sequence) = own.split_once(':').unwrap();
        let others = [
            "",
            ":",
            "1",
            "x",
            " ",
            instance,
            sequence,
            &format!("{own} "),
            &format!(" {own}"),
            &format!("{own} 1/4"),
            &format!("{own}1"),
            &format!("{instance}:0"),
            &format!("{instance}+kept:{sequence}"),
            &own[1..],
            &own[..own.len() - 1],
        ];
        for other in others {
            let taken = operator.force_release("k", other).await.unwrap();
            assert!(!taken, "{other:?}");
        }
        assert!(!elsewhere.force_release("k", &own).await.unwrap());
        lease.verify().await.unwrap();
        let seen = operator.obtain("k").inspect().await.unwrap();
        assert_eq!(seen.holders.len(), 1);
        assert!(operator.force_release("k", &own).await.unwrap());
        drop(lease);
    }
    assert!(!operator.force_release("k", "").await.unwrap());
}
