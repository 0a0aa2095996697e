//! What is said of a lock that is busy, and of a lease that was lost.

use std::time::Duration;

use futures::FutureExt;
use lockstream::{
    FutureLockExt, Holder, LockError, LockEvent, LockRegistry, LossCause, Mode, OnFinish, Renewal,
};
use tokio::time::{Instant, sleep};

use crate::assert_err;
use crate::watch::told_so_far;
use crate::world::{BACK, World, eventually, free, is_held, ms, poll_once, waited, waiting};

async fn named(w: &dyn World, name: &str) -> LockRegistry {
    let registry = w.builder().await.name(name).build().unwrap();
    registry.obtain("anything").inspect().await.unwrap();
    registry
}

#[track_caller]
fn holder(error: &LockError) -> &Holder {
    match error {
        LockError::NotAcquired {
            holder: Some(holder),
            ..
        } => holder,
        other => panic!("{other:?} names nobody"),
    }
}

#[track_caller]
fn cause(error: &LockError) -> LossCause {
    match error {
        LockError::Lost { cause, .. } => *cause,
        other => panic!("{other:?} is no loss"),
    }
}

/// By the answer to what was asked anyway: see `a_lock_costs_two_calls`.
pub(crate) async fn a_busy_lock_names_its_holder(w: &dyn World) {
    let there = named(w, "ci-7").await;
    let here = w.registry().await;
    let held = there.obtain("k").ttl(ms(5000)).lease().await.unwrap();
    let owner = here
        .obtain("k")
        .inspect()
        .await
        .unwrap()
        .owner()
        .unwrap()
        .to_owned();
    let mut events = here.events();
    let lock = here.obtain("k");
    for wait in [Duration::ZERO, ms(50)] {
        let error = assert_err!(lock.lease_within(wait).await, NotAcquired, "k");
        let holder = holder(&error);
        assert_eq!((holder.name(), holder.owner()), ("ci-7", &*owner));
        assert_eq!((holder.mode(), holder.others()), (Mode::Exclusive, 0));
        let remaining = holder.remaining().unwrap();
        assert!(remaining <= ms(5000) && remaining > ms(1000), "{error}");
        let told = error.to_string();
        assert!(told.contains(": held by ci-7 for another "), "{told}");
        // Who only asks has not waited, however long the answer took.
        assert_eq!(told.contains("within"), wait > Duration::ZERO, "{told}");
        assert_eq!(waited(&error) > Duration::ZERO, wait > Duration::ZERO);
        let told = told_so_far(&mut events).await;
        let gave_up = told.iter().find_map(|event| match event {
            LockEvent::GaveUp { holder, .. } => Some(holder.as_ref().expect("it is known")),
            _ => None,
        });
        assert_eq!(gave_up.unwrap().name(), "ci-7", "{told:?}");
    }
    held.release().await.unwrap();
    // Nobody waits for what nobody has.
    assert!(lock.acquire_once().await.unwrap());
}

pub(crate) async fn a_holder_here_is_named(w: &dyn World) {
    let registry = named(w, "ci-8").await;
    let held = registry.obtain("k").ttl(ms(5000)).lease().await.unwrap();
    let owner = registry
        .obtain("k")
        .inspect()
        .await
        .unwrap()
        .owner()
        .unwrap()
        .to_owned();
    for wait in [Duration::ZERO, ms(50)] {
        let busy = registry.obtain("k").lease_within(wait).await;
        let error = assert_err!(busy, NotAcquired, "k");
        assert_eq!(holder(&error).name(), "ci-8");
        assert_eq!(holder(&error).owner(), owner);
        assert!(holder(&error).remaining().unwrap() <= ms(5000));
    }
    drop(held);
}

/// A registry without a name is its random id.
pub(crate) async fn a_holder_without_a_name_is_its_id(w: &dyn World) {
    let [here, there] = w.registries().await;
    let _held = there.obtain("k").lease().await.unwrap();
    let owner = here
        .obtain("k")
        .inspect()
        .await
        .unwrap()
        .owner()
        .unwrap()
        .to_owned();
    let busy = here.obtain("k").lease_within(Duration::ZERO).await;
    let error = assert_err!(busy, NotAcquired, "k");
    let instance = owner.rsplit_once(':').unwrap().0;
    assert_eq!(holder(&error).name(), instance);
}

/// One of them, the first that ends, and how many there are.
pub(crate) async fn who_shares_a_busy_lock_is_counted(w: &dyn World) {
    let (there, other) = (named(w, "ci-7").await, named(w, "ci-9").await);
    let here = w.registry().await;
    let ask = async || {
        let busy = here.obtain("k").lease_within(Duration::ZERO).await;
        assert_err!(busy, NotAcquired, "k")
    };
    let mut readers = Vec::new();
    for (registry, ttl, told) in [
        (&there, 10_000, "held by ci-7 for another"),
        (&other, 60_000, "held by ci-7 and another for another"),
        (&other, 60_000, "held by ci-7 and 2 others for another"),
    ] {
        let reader = registry.obtain("k").shared().ttl(ms(ttl));
        readers.push(reader.lease().await.unwrap());
        let error = ask().await;
        assert!(error.to_string().contains(told), "{error}");
        assert_eq!(holder(&error).mode(), Mode::Shared);
        assert_eq!(holder(&error).others(), readers.len() as u64 - 1);
    }
    for reader in readers {
        reader.release().await.unwrap();
    }
    let permit = |registry: &LockRegistry, weight, ttl| {
        let lock = registry.obtain("k").permits_of(5, weight);
        lock.ttl(ms(ttl))
    };
    let mut permits = Vec::new();
    for (registry, weight, ttl, told, others) in [
        (&there, 2, 10_000, "held by ci-7 (2 permits taken) for", 0),
        (&other, 1, 60_000, "held by ci-7 (3 permits taken) for", 1),
        (&other, 2, 90_000, "held by ci-7 (5 permits taken) for", 3),
    ] {
        let permit = permit(registry, weight, ttl);
        permits.push(permit.lease().await.unwrap());
        let error = ask().await;
        assert!(error.to_string().contains(told), "{error}");
        let mode = holder(&error).mode();
        assert!(
            matches!(
                mode,
                Mode::Permits {
                    limit: 5,
                    weight: 2,
                    ..
                }
            ),
            "{mode:?}"
        );
        assert_eq!(holder(&error).others(), others);
    }
    // Another permit is told the same, and so is whoever waits.
    for wait in [Duration::ZERO, ms(50)] {
        let busy = permit(&here, 1, 5000).lease_within(wait).await;
        let error = assert_err!(busy, NotAcquired, "k");
        assert_eq!(holder(&error).name(), "ci-7");
        assert_eq!(holder(&error).others(), 3);
    }
    for permit in permits {
        permit.release().await.unwrap();
    }
}

/// It asks again when the lease is over that it was told of, and is told who has it then.
pub(crate) async fn a_long_wait_names_who_has_it_at_its_end(w: &dyn World) {
    let (first, second) = (named(w, "ci-1").await, named(w, "ci-2").await);
    let here = w.registry().await;
    // It lasts until the next is in the queue, and ends in the midst of the wait.
    let held = first.obtain("k").ttl(ms(2000)).lease().await.unwrap();
    let mut next = Box::pin(second.obtain("k").ttl(ms(8000)).lease());
    assert!(poll_once(&mut next).await.is_none());
    waiting(&here.obtain("k"), 1).await;
    let busy = here.obtain("k").lease_within(ms(4000));
    let (busy, next) = tokio::join!(busy, next);
    assert!(!held.is_valid(), "it has run out");
    let error = assert_err!(busy, NotAcquired, "k");
    assert_eq!(holder(&error).name(), "ci-2", "{error}");
    next.unwrap().release().await.unwrap();
}

/// Of the readers and permits of a registry only the first asks again (M5).
pub(crate) async fn who_waits_behind_others_is_told_what_they_know(w: &dyn World) {
    let (there, here) = (named(w, "ci-7").await, w.registry().await);
    let lock = there.obtain("k").ttl(ms(3000));
    let held = lock.renewal(Renewal::watchdog()).lease().await.unwrap();
    let reader = here.obtain("k").shared();
    let mut first = Box::pin(reader.lease());
    assert!(poll_once(&mut first).await.is_none());
    waiting(&reader, 1).await;
    let error = assert_err!(reader.lease_within(ms(4000)).await, NotAcquired, "k");
    assert_eq!(holder(&error).name(), "ci-7", "{error}");
    held.release().await.unwrap();
    first.await.unwrap().release().await.unwrap();
}

pub(crate) async fn a_group_names_the_key_and_who_has_it(w: &dyn World) {
    let there = named(w, "ci-7").await;
    let here = w.registry().await;
    let held = there.obtain("b").lease().await.unwrap();
    for wait in [Duration::ZERO, ms(50)] {
        let busy = here.obtain_all(["a", "b", "c"]).lease_within(wait).await;
        let error = assert_err!(busy, NotAcquired, "b");
        assert_eq!(holder(&error).name(), "ci-7");
        assert_eq!(error.to_string().contains("within"), wait > Duration::ZERO);
    }
    held.release().await.unwrap();
    free(&here.obtain("a")).await;
}

pub(crate) async fn who_keeps_a_key_is_named(w: &dyn World) {
    let there = named(w, "ci-7").await;
    let here = w.registry().await;
    let lock = there.obtain("k").on_finish(OnFinish::KeepFor(ms(3000)));
    lock.lease().await.unwrap().finish().await.unwrap();
    let busy = here.obtain("k").lease_within(Duration::ZERO).await;
    let told = assert_err!(busy, NotAcquired, "k").to_string();
    let expected = "held by ci-7 (kept after its lease) for another";
    assert!(told.contains(expected), "{told}");
    free(&here.obtain("k")).await;
}

/// The error, the event, and whoever looks before it was told.
pub(crate) async fn a_fixed_lease_that_ends_says_why(w: &dyn World) {
    let registry = w.registry().await;
    let mut events = registry.events();
    let lock = registry.obtain("k").ttl(ms(3000));
    let lost = std::future::pending::<()>().with_lock(&lock).await;
    let error = assert_err!(lost, Lost, "k");
    assert_eq!(cause(&error), LossCause::FixedTtl);
    assert!(error.to_string().contains("`renewal`"), "{error}");
    let told = told_so_far(&mut events).await;
    let causes: Vec<_> = told
        .iter()
        .filter_map(|event| match event {
            LockEvent::Lost { cause, .. } => Some(*cause),
            _ => None,
        })
        .collect();
    assert_eq!(causes, [LossCause::FixedTtl], "{told:?}");
    free(&lock).await;

    let renewal = Renewal::watchdog().max_renewals(1);
    let lease = lock.clone().renewal(renewal).lease().await.unwrap();
    assert_eq!(cause(&lease.lost().await), LossCause::LastRenewal);
    drop(lease);
    free(&lock).await;
}

pub(crate) async fn a_lease_that_an_outage_ends_says_so(w: &dyn World) {
    let registry = w.registry().await;
    let lock = registry.obtain("k").ttl(ms(1800));
    let lease = lock.renewal(Renewal::watchdog()).lease().await.unwrap();
    // Of one that was long in coming less is left.
    let left = lease.deadline().saturating_duration_since(Instant::now());
    w.set_offline(true);
    let error = lease.lost().await;
    w.set_offline(false);
    let LossCause::StoreUnreachable { lasted, .. } = cause(&error) else {
        panic!("{error}")
    };
    assert!(
        lasted > left * 4 / 9 && lasted <= ms(1800),
        "{lasted:?} of {left:?}"
    );
    assert!(error.to_string().contains("the store was unreachable for"));
    drop(lease);
    let again = registry.obtain("k").acquire_within(BACK).await;
    assert!(again.unwrap());
}

/// By a renewal, or by a release.
pub(crate) async fn a_lease_whose_key_is_gone_says_so(w: &dyn World) {
    let registry = w.registry().await;
    let lock = registry.obtain("k").ttl(ms(1500));
    let lease = lock
        .clone()
        .renewal(Renewal::watchdog())
        .lease()
        .await
        .unwrap();
    w.expire("k");
    assert_eq!(cause(&lease.lost().await), LossCause::Taken);
    assert_eq!(cause(&lease.release().await.unwrap_err()), LossCause::Taken);

    let lease = lock.ttl(ms(5000)).lease().await.unwrap();
    w.expire("k");
    assert_eq!(cause(&lease.release().await.unwrap_err()), LossCause::Taken);
}

/// By others of this program.
pub(crate) async fn a_lease_that_another_guard_ended_says_so(w: &dyn World) {
    let registry = w.registry().await;
    let lock = registry.obtain("k").reentrant();
    let shared = lock.with_lease(async |outer| {
        let inner = lock.lease().await.unwrap();
        let detached = inner.detach().unwrap();
        (cause(&outer.lost().await), detached)
    });
    // The work goes on to its end in this poll, or is dropped: either way its lease is lost.
    let error = assert_err!(shared.await, Lost, "k");
    assert_eq!(cause(&error), LossCause::EndedByOther);
    w.expire("k");
    eventually("the key is free", async || !is_held(&lock).await).await;

    let lease = lock.lease().await.unwrap();
    let detached = lease.detach().unwrap();
    registry.adopt(detached.clone()).now_or_never();
    let lease = registry.adopt(detached.clone()).await;
    drop(lease);
    free(&lock).await;
    let error = assert_err!(registry.adopt(detached).await, Lost, "k");
    assert_eq!(cause(&error), LossCause::NothingToAdopt);

    // One of a group is lost: whoever shares another of its leases loses that.
    let lease = registry.obtain_all(["a", "b"]).ttl(ms(1500));
    let lease = lease.renewal(Renewal::watchdog()).lease().await.unwrap();
    w.expire("a");
    let error = lease.lost().await;
    assert_eq!((error.key(), cause(&error)), ("a", LossCause::Taken));
    drop(lease);
    sleep(ms(1)).await;
    free(&registry.obtain("b")).await;
}
