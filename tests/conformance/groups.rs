//! Several keys as one lock.

use std::sync::atomic::{AtomicUsize, Ordering};

use futures::future::join_all;
use futures::{StreamExt, stream};
use lockstream::{
    FutureLockExt, Lock, LockError, LockRegistry, OnFinish, OnLost, Renewal, StreamLockExt,
};
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep, timeout};

use crate::assert_err;
use crate::world::{
    BOUND, SOON, World, assert_took, eventually, free, is_held, ms, poll_once, waiting,
};

async fn all_free(locks: &LockRegistry, keys: &[&str]) {
    for key in keys {
        free(&locks.obtain(key)).await;
    }
}

pub(crate) async fn a_group_is_one_lease_of_all_its_keys(w: &dyn World) {
    let [here, there] = w.registries().await;
    let group = here.obtain_all(["c", "a", "b", "a"]);
    assert_eq!(group.key(), "a,b,c");
    let lease = group.lease().await.unwrap();
    assert_eq!(lease.key(), "a,b,c");
    for key in ["a", "b", "c"] {
        assert!(!there.obtain(key).acquire_once().await.unwrap());
        assert!(lease.token_of(key).is_some());
    }
    assert_eq!(lease.token_of("a"), Some(lease.token()));
    assert_eq!(lease.token_of("d"), None);
    let seen = group.inspect().await.unwrap();
    assert_eq!(seen.holders.len(), 3);
    let keys: Vec<_> = here
        .snapshot()
        .keys
        .iter()
        .map(|it| it.key.clone())
        .collect();
    assert_eq!(keys.len(), 3);
    assert!(lease.is_valid());
    let deadline = lease.extend(ms(5000)).await.unwrap();
    assert_eq!(deadline, lease.deadline());
    lease.release().await.unwrap();
    all_free(&there, &["a", "b", "c"]).await;
}

pub(crate) async fn everything_that_takes_a_lock_takes_a_group(w: &dyn World) {
    let locks = w.registry().await;
    let group = locks.obtain_all(["a", "b"]);
    assert_eq!(async { 7 }.with_lock(&group).await.unwrap(), 7);
    let rows = stream::iter([1, 2]).with_lock(&group);
    assert_eq!(rows.count().await, 2);
    assert!(group.acquire().await.unwrap());
    assert!(is_held(&locks.obtain("b")).await);
    assert!(group.release().await.unwrap());
    let tokens = group.with_lease(async |lease| (lease.token_of("a"), lease.token_of("b")));
    let (a, b) = tokens.await.unwrap();
    assert!(a.is_some() && b.is_some());
    // A lock of one of its keys shares its lease.
    let nested = async {
        let nested = locks.obtain("b").reentrant().wait(ms(0));
        async { "inside" }.with_lock(nested).await
    };
    assert_eq!(nested.with_lock(&group).await.unwrap().unwrap(), "inside");
    all_free(&locks, &["a", "b"]).await;
}

pub(crate) async fn a_group_gets_all_keys_or_none(w: &dyn World) {
    let [here, there] = w.registries().await;
    let last = there.obtain("c").lease().await.unwrap();
    let group = here.obtain_all(["a", "b", "c"]);
    assert!(!group.acquire_once().await.unwrap());
    all_free(&there, &["a", "b"]).await;
    let begin = Instant::now();
    let error = group.lease_within(ms(300)).await.unwrap_err();
    assert_took(begin, ms(300), w.late());
    let LockError::NotAcquired { waited, .. } = error else {
        panic!("{error:?}")
    };
    assert!(waited >= ms(300), "{waited:?}");
    all_free(&there, &["a", "b"]).await;
    assert!(last.is_valid());
    // Its first keys are held while it waits, and longer than their ttl.
    let mut waits = Box::pin(group.lease());
    assert!(poll_once(&mut waits).await.is_none());
    eventually("the first keys are held", async || {
        let _ = poll_once(&mut waits).await;
        is_held(&there.obtain("b")).await
    })
    .await;
    // It asks for the last one only while it is polled.
    eventually("it waits for the last key", async || {
        let _ = poll_once(&mut waits).await;
        last_lock(&there).inspect().await.unwrap().waiting == 1
    })
    .await;
    last.release().await.unwrap();
    timeout(SOON, waits)
        .await
        .unwrap()
        .unwrap()
        .release()
        .await
        .unwrap();
    all_free(&there, &["a", "b", "c"]).await;
}

fn last_lock(locks: &LockRegistry) -> Lock {
    locks.obtain("c")
}

/// The first wait may be as long as the whole.
pub(crate) async fn the_keys_share_one_wait(w: &dyn World) {
    let [here, there] = w.registries().await;
    let first = there.obtain("a").lease().await.unwrap();
    let second = there.obtain("b").lease().await.unwrap();
    let begin = Instant::now();
    let group = here.obtain_all(["a", "b"]).wait(ms(800));
    let frees = async {
        sleep(ms(500)).await;
        first.release().await.unwrap();
    };
    let (group, ()) = tokio::join!(group.lease(), frees);
    assert!(matches!(group, Err(LockError::NotAcquired { .. })));
    assert_took(begin, ms(800), w.late());
    second.release().await.unwrap();
    all_free(&here, &["a", "b"]).await;
}

/// Whatever the keys and their orders are.
pub(crate) async fn groups_never_wait_for_each_other_in_a_circle(w: &dyn World) {
    const KEYS: usize = 10;
    let [here, there] = w.registries().await;
    let inside: [AtomicUsize; KEYS] = std::array::from_fn(|_| AtomicUsize::new(0));
    let work = async |task: usize| {
        let locks = [&here, &there][task % 2];
        for round in 0..2 {
            let mut mine = [
                task % KEYS,
                (task * 7 + round) % KEYS,
                (task * 3 + 1) % KEYS,
            ];
            mine.rotate_left(task % 3);
            let keys = mine.map(|key| format!("key-{key}"));
            let group = locks.obtain_all(&keys).wait(ms(200_000));
            let mut mine = mine.to_vec();
            mine.sort_unstable();
            mine.dedup();
            let alone = async {
                for key in &mine {
                    assert_eq!(inside[*key].fetch_add(1, Ordering::SeqCst), 0);
                }
                tokio::task::yield_now().await;
                for key in &mine {
                    inside[*key].fetch_sub(1, Ordering::SeqCst);
                }
            };
            alone.with_lock(group).await.unwrap();
        }
    };
    let all = join_all((0..100).map(work));
    timeout(ms(200_000), all).await.unwrap();
}

pub(crate) async fn a_key_that_is_lost_while_the_last_is_waited_for_is_taken_again(w: &dyn World) {
    let [here, there] = w.registries().await;
    let last = there.obtain("c").lease().await.unwrap();
    let group = here.obtain_all(["a", "b", "c"]);
    let waits = group.lease_within(ms(20_000));
    let meanwhile = async {
        waiting(&there.obtain("c"), 1).await;
        let before = there.obtain("b").inspect().await.unwrap();
        w.expire("b");
        // Its renewal finds the loss.
        eventually("it is taken again", async || {
            let seen = there.obtain("b").inspect().await.unwrap();
            seen.is_held() && seen.owner() != before.owner()
        })
        .await;
        assert!(is_held(&there.obtain("a")).await);
        waiting(&there.obtain("c"), 1).await;
        last.release().await.unwrap();
    };
    let (lease, ()) = timeout(BOUND, async { tokio::join!(waits, meanwhile) })
        .await
        .unwrap();
    let lease = lease.unwrap();
    assert!(lease.is_valid());
    lease.release().await.unwrap();
    all_free(&there, &["a", "b", "c"]).await;
}

pub(crate) async fn the_loss_of_one_key_is_the_loss_of_all(w: &dyn World) {
    let [here, there] = w.registries().await;
    let group = here.obtain_all(["a", "b", "c"]);
    let lease = group.lease().await.unwrap();
    w.expire("b");
    let lost = timeout(BOUND, lease.lost()).await.unwrap();
    assert!(
        matches!(&lost, LockError::Lost { key, .. } if &**key == "b"),
        "{lost:?}"
    );
    assert!(!lease.is_valid());
    assert!(matches!(lease.release().await, Err(LockError::Lost { .. })));
    all_free(&there, &["a", "b", "c"]).await;
    let (tells, runs) = oneshot::channel();
    let work = async move {
        let _ = tells.send(());
        std::future::pending::<()>().await;
    };
    let work = work.with_lock(&group);
    let loses = async {
        runs.await.unwrap();
        w.expire("c");
    };
    let (ended, ()) = timeout(BOUND, async { tokio::join!(work, loses) })
        .await
        .unwrap();
    assert!(matches!(ended, Err(LockError::Lost { .. })));
    all_free(&there, &["a", "b", "c"]).await;
}

/// Whatever is to become of its keys when it ends as a lease.
pub(crate) async fn a_group_that_is_dropped_leaves_nothing(w: &dyn World) {
    let [here, there] = w.registries().await;
    let last = there.obtain("c").lease().await.unwrap();
    let group = here.obtain_all(["a", "b", "c"]);
    let kept = group.clone().on_finish(OnFinish::KeepFor(ms(60_000)));
    let left = group.clone().on_finish(OnFinish::LetExpire);
    for (polls, group) in [&group, &group, &group, &group, &group, &kept, &left]
        .into_iter()
        .enumerate()
    {
        let mut waits = Box::pin(group.lease());
        for _ in 0..polls {
            assert!(poll_once(&mut waits).await.is_none());
            sleep(ms(20)).await;
        }
        drop(waits);
        all_free(&there, &["a", "b"]).await;
        waiting(&there.obtain("c"), 0).await;
    }
    last.release().await.unwrap();
    drop(group.lease().await.unwrap());
    all_free(&there, &["a", "b", "c"]).await;
}

/// It was granted the last key, and nobody polls it: the keys before that are released, too.
pub(crate) async fn a_group_that_nobody_polls_holds_nothing(w: &dyn World) {
    let [here, there] = w.registries().await;
    let last = there.obtain("c").lease().await.unwrap();
    let group = here.obtain_all(["a", "b", "c"]);
    let mut waits = Box::pin(group.lease_within(ms(30_000)));
    eventually("it waits for the last", async || {
        assert!(poll_once(&mut waits).await.is_none());
        there.obtain("c").inspect().await.unwrap().waiting == 1
    })
    .await;
    last.release().await.unwrap();
    all_free(&there, &["a", "b", "c"]).await;
    // It begins again where it is polled again.
    let lease = timeout(BOUND, waits).await.unwrap().unwrap();
    assert!(lease.is_valid());
    lease.release().await.unwrap();
    // The wait ends while nobody polls it, when it has come to the last.
    let last = there.obtain("c").lease().await.unwrap();
    let mut waits = Box::pin(group.lease_within(ms(2000)));
    eventually("it waits for the last", async || {
        assert!(poll_once(&mut waits).await.is_none());
        there.obtain("c").inspect().await.unwrap().waiting == 1
    })
    .await;
    all_free(&there, &["a", "b"]).await;
    assert_err!(waits.await, NotAcquired, "c");
    last.release().await.unwrap();
}

/// The ttl counts from when the last key is had.
pub(crate) async fn a_fixed_lease_of_a_group_begins_when_it_is_complete(w: &dyn World) {
    let [here, there] = w.registries().await;
    let last = there.obtain("b").lease().await.unwrap();
    let group = here.obtain_all(["a", "b"]).ttl(ms(1400));
    let frees = async {
        sleep(ms(1800)).await;
        last.release().await.unwrap();
    };
    let (lease, ()) = tokio::join!(group.lease(), frees);
    let (lease, begin) = (lease.unwrap(), Instant::now());
    timeout(BOUND, lease.lost()).await.unwrap();
    let took = begin.elapsed();
    // On a busy machine some of it is over when the caller has it.
    let least = if w.is_paused() { ms(1000) } else { ms(500) };
    assert!(took >= least && took <= ms(1400) + w.late(), "{took:?}");
    drop(lease);
    all_free(&there, &["a", "b"]).await;
}

pub(crate) async fn groups_that_cannot_be_are_refused(w: &dyn World) {
    let locks = w.registry().await;
    let none: [&str; 0] = [];
    assert_err!(locks.obtain_all(none).acquire_once().await, InvalidKey, "");
    let invalid = locks.obtain_all(["a", "~b"]);
    assert_err!(invalid.acquire_once().await, InvalidKey, "~b");
    let both = locks.obtain_all(["a", "b"]);
    let refused = [
        both.clone().shared(),
        both.clone().permits(2),
        both.reentrant(),
    ];
    for lock in refused {
        assert_err!(lock.acquire_once().await, InvalidSetting, "a,b");
    }
    let group = locks.obtain_all(["a", "b"]);
    assert_err!(group.lead(async |_| ()).await, InvalidSetting, "a,b");
    // Its lease is not detached, and is held as before.
    let refused = group.lease().await.unwrap().detach().unwrap_err();
    let lease = refused.into_lease();
    assert!(lease.is_valid() && is_held(&locks.obtain("b")).await);
    assert_err!(
        lease.detach().map_err(LockError::from),
        InvalidSetting,
        "a,b"
    );
    // One key is a lock like any other.
    let one = locks.obtain_all(["a", "a"]);
    assert_eq!(one.key(), "a");
    assert!(one.reentrant().acquire_once().await.unwrap());
    all_free(&locks, &["a", "b"]).await;
}

/// Inside the work of `a,b` it had a lease that held neither `a` nor `b`.
pub(crate) async fn a_group_shares_no_lease_inside(w: &dyn World) {
    let [here, there] = w.registries().await;
    for outer in ["a,b", "a"] {
        let inside = async {
            let nested = here.obtain_all(["a", "b"]).reentrant();
            assert_err!(nested.lease().await, InvalidSetting, "a,b");
            assert_err!(nested.acquire().await, InvalidSetting, "a,b");
            assert_err!(async {}.with_lock(&nested).await, InvalidSetting, "a,b");
            free(&there.obtain("b")).await;
        };
        inside.with_lock(here.obtain(outer)).await.unwrap();
    }
    // One of its keys is no name of it, nor the other way round.
    let inside = async {
        let nested = here.obtain("a,b").reentrant();
        nested.lease().await.unwrap().release().await.unwrap();
    };
    let group = here.obtain_all(["a", "b"]);
    inside.with_lock(group).await.unwrap();
    all_free(&there, &["a", "b", "a,b"]).await;
}

/// The rest was renewed for as long as the guard lived. Nobody polls it here.
pub(crate) async fn the_first_loss_releases_the_rest_by_itself(w: &dyn World) {
    let [here, there] = w.registries().await;
    // Found by a renewal.
    let group = here.obtain_all(["a", "b", "c"]);
    let lease = group.lease().await.unwrap();
    w.expire("b");
    all_free(&there, &["a", "b", "c"]).await;
    assert!(!lease.is_valid());
    assert_err!(lease.release().await, Lost, "b");

    // Found by an extension.
    let lease = group.lease().await.unwrap();
    w.expire("a");
    assert_err!(lease.extend(ms(60_000)).await, Lost, "a");
    all_free(&there, &["a", "b", "c"]).await;
    let lost = lease.lost().await;
    assert!(lost.is_lost() && lost.key() == "a", "{lost:?}");
    drop(lease);

    // At the deadline of one. Work inside has extended the other, and loses it, too.
    let brief = here.obtain_all(["a", "b"]).ttl(ms(1400));
    let inside = async {
        let nested = here.obtain("b").reentrant().lease().await.unwrap();
        nested.extend(ms(60_000)).await.unwrap();
        let lost = timeout(BOUND, nested.lost()).await.unwrap();
        assert!(lost.is_lost() && lost.key() == "b", "{lost:?}");
        all_free(&there, &["a", "b"]).await;
        assert_err!(nested.release().await, Lost, "b");
    };
    let runs_on = brief.on_lost(OnLost::RunOn);
    inside.with_lock(runs_on).await.unwrap();
    all_free(&there, &["a", "b"]).await;

    // Work inside has detached one.
    let inside = async {
        let nested = here.obtain("b").reentrant().lease().await.unwrap();
        drop(nested.detach().unwrap());
        all_free(&there, &["a", "c"]).await;
        assert!(is_held(&there.obtain("b")).await);
    };
    let runs_on = group.clone().on_lost(OnLost::RunOn);
    inside.with_lock(runs_on).await.unwrap();
    w.expire("b");
    all_free(&there, &["b"]).await;

    // Guards from inside that outlive the group's own hold a key each.
    let inside = async {
        let (a, b) = (here.obtain("a").reentrant(), here.obtain("b").reentrant());
        (a.lease().await.unwrap(), b.lease().await.unwrap())
    };
    let pair = here.obtain_all(["a", "b"]);
    let (a, b) = inside.with_lock(pair).await.unwrap();
    assert!(a.is_valid() && b.is_valid());
    w.expire("a");
    assert!(timeout(BOUND, a.lost()).await.unwrap().is_lost());
    all_free(&there, &["a"]).await;
    assert!(b.is_valid() && is_held(&there.obtain("b")).await);
    b.release().await.unwrap();
    all_free(&there, &["a", "b"]).await;
}

/// It is left to expire, as at any end of its lease.
pub(crate) async fn a_loss_leaves_what_is_to_be_kept(w: &dyn World) {
    let [here, there] = w.registries().await;
    let kept = here.obtain_all(["a", "b"]).ttl(ms(2000));
    let kept = kept.renewal(Renewal::watchdog());
    let lease = kept.on_finish(OnFinish::LetExpire).lease().await.unwrap();
    w.expire("a");
    timeout(BOUND, lease.lost()).await.unwrap();
    assert!(is_held(&there.obtain("b")).await);
    all_free(&there, &["a", "b"]).await;
    assert_err!(lease.release().await, Lost, "a");

    // Work that loses a key has not succeeded.
    let kept = here.obtain_all(["a", "b"]);
    let kept = kept.on_finish(OnFinish::KeepFor(ms(60_000)));
    let work = async {
        w.expire("a");
        std::future::pending::<Result<(), ()>>().await
    };
    let ended = work.with_lock(kept).keep_if(Result::is_ok).await;
    assert!(ended.unwrap_err().is_lost());
    all_free(&there, &["a", "b"]).await;
}
