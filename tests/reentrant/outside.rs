//! What is not polled inside of the work waits as anyone does.

use futures::{FutureExt, StreamExt, stream};
use lockstream::{FutureLockExt, LockError, StreamLockExt};
use tokio::task::LocalSet;

use crate::assert_waited_in_vain;
use crate::scene::{BOUND, BRIEF, KEY, Scene, World};

pub(crate) async fn a_spawned_task_waits_as_anyone_does<W: World>(s: &Scene<W>) {
    let patient = s.here.obtain(KEY).wait(BOUND).reentrant();
    let outer = s.lock.with_lease(async |lease| {
        assert_waited_in_vain!(tokio::spawn(s.nested.lease()).await.unwrap());
        assert!(!tokio::spawn(s.nested.acquire()).await.unwrap().unwrap());
        assert_waited_in_vain!(tokio::spawn(async {}.with_lock(&s.nested)).await.unwrap());
        // And so does what is made in here, but polled there for the first time.
        let mut set = tokio::task::JoinSet::new();
        set.spawn(s.nested.lease());
        assert_waited_in_vain!(set.join_next().await.unwrap().unwrap());
        (tokio::spawn(patient.lease()), lease.token())
    });
    let (waiter, token) = outer.await.unwrap();
    let lease = waiter.await.unwrap().unwrap();
    assert!(lease.token() > token, "a lease of its own");
    assert!(s.is_busy().await);
    lease.release().await.unwrap();
}

pub(crate) async fn the_tasks_of_a_local_set_wait<W: World>(s: &Scene<W>) {
    let outer = s.lock.with_lease(async |lease| {
        let set = LocalSet::new();
        let task = set.spawn_local(s.nested.lease());
        let told = set.run_until(async {
            assert_waited_in_vain!(task.await.unwrap());
            // What is awaited beside them is no task of the set, but the work itself.
            s.nested.lease().await.unwrap().token()
        });
        assert_eq!(told.await, lease.token());
    });
    outer.await.unwrap();
}

pub(crate) async fn another_registry_waits<W: World>(s: &Scene<W>) {
    let nested = s.there.obtain(KEY).wait(BRIEF).reentrant();
    let told = nested.lease().with_lock(&s.lock).await.unwrap();
    assert_waited_in_vain!(told);
    let other = s.world.builder().await.prefix("other").build().unwrap();
    let lease = async { other.obtain(KEY).reentrant().lease().await.unwrap() };
    let lease = lease.with_lock(&s.lock).await.unwrap();
    assert!(!s.is_busy().await, "another prefix is another lock");
    lease.release().await.unwrap();
}

pub(crate) async fn another_key_is_another_lock<W: World>(s: &Scene<W>) {
    let other = s.here.obtain("other").wait(BRIEF).reentrant();
    let theirs = s.there.obtain("other");
    let outer = s.lock.with_lease(async |lease| {
        let inner = other.with_lease(async |inner| {
            assert_ne!(inner.token(), lease.token());
            assert!(!theirs.acquire_once().await.unwrap());
        });
        inner.await.unwrap();
        assert!(theirs.acquire_once().await.unwrap(), "its own to free");
        assert_waited_in_vain!(other.lease().await);
        assert!(theirs.release().await.unwrap());
    });
    outer.await.unwrap();
}

/// Only combinators can be nested in: a guard says when it ends, but not what it is for.
pub(crate) async fn what_is_beside_a_guard_or_a_handle_waits<W: World>(s: &Scene<W>) {
    let guard = s.lock.lease().await.unwrap();
    assert_waited_in_vain!(s.nested.lease().await);
    assert_waited_in_vain!(async {}.with_lock(&s.nested).await);
    guard.release().await.unwrap();
    assert!(s.nested.acquire().await.unwrap());
    assert!(s.is_busy().await);
    assert!(!s.nested.acquire().await.unwrap());
    assert!(s.nested.release().await.unwrap());
}

/// The body of a loop over a stream is not polled inside of it; what is made a part of it is.
pub(crate) async fn what_is_between_two_items_waits<W: World>(s: &Scene<W>) {
    let mut rows = StreamLockExt::with_lock(stream::iter(0..2), &s.lock);
    while let Some(row) = rows.next().await {
        row.unwrap();
        assert_waited_in_vain!(s.nested.lease().await);
    }
    let inside = stream::iter(0..2).then(async |_| s.nested.lease().await.unwrap().is_valid());
    let rows = StreamLockExt::with_lock(inside, &s.lock);
    assert!(rows.all(async |row| row.unwrap()).await);
}

pub(crate) async fn an_outer_lock_that_asks_does_not_help_an_inner_that_does_not<W: World>(
    s: &Scene<W>,
) {
    let plain = s.here.obtain(KEY).wait(BRIEF);
    let around = s.here.obtain(KEY).reentrant();
    let told = plain.lease().with_lock(around).await.unwrap();
    assert_waited_in_vain!(told);
}

pub(crate) async fn nothing_is_inside_of_work_that_ended<W: World>(s: &Scene<W>) {
    let waiter = async { (s.nested.clone().wait(BOUND).lease(),) };
    let (waiter,) = waiter.with_lock(&s.lock).await.unwrap();
    let held = s.lock.lease().await.unwrap();
    let mut waiter = Box::pin(waiter);
    assert!((&mut waiter).now_or_never().is_none(), "it was made inside");
    held.release().await.unwrap();
    waiter.await.unwrap().release().await.unwrap();
}

/// A bad setting is told wherever it is.
pub(crate) async fn faults_are_told_inside_too<W: World>(s: &Scene<W>) {
    let bad = s.nested.clone().ttl(crate::scene::ms(1));
    let told = bad.lease().with_lock(&s.lock).await.unwrap();
    assert!(
        matches!(told, Err(LockError::InvalidTtl { .. })),
        "{told:?}"
    );
}

/// A typo in one of the keys made it another lock, without a word. The key stays free.
pub(crate) async fn what_must_be_inside_fails_outside<W: World>(s: &Scene<W>) {
    let nested = s.here.obtain(KEY).nested();
    macro_rules! assert_alone {
        ($told:expr) => {{
            let told: LockError = $told;
            let LockError::InvalidSetting { key, setting, .. } = &told else {
                panic!("{told:?}");
            };
            assert_eq!((&**key, *setting), (KEY, "nested"), "{told}");
        }};
    }
    let alone = async || {
        assert_alone!(async {}.with_lock(&nested).await.unwrap_err());
        assert_alone!(nested.with_lease(async |_| ()).await.unwrap_err());
        assert_alone!(nested.lease().await.unwrap_err());
        assert_alone!(nested.lease_once().await.unwrap_err());
        assert_alone!(nested.acquire().await.unwrap_err());
        assert!(!s.is_busy().await);
    };
    alone().await;
    alone().with_lock((&s.here, "other")).await.unwrap();
    alone().with_lock((&s.there, "other")).await.unwrap();
    let guard = s.lock.lease().await.unwrap();
    assert_alone!(nested.lease().await.unwrap_err());
    let spawned = tokio::spawn(nested.lease()).await.unwrap();
    assert_alone!(spawned.unwrap_err());
    guard.release().await.unwrap();
    let inside = async {
        let (outer, inner) = (s.inmost().await, nested.lease().await.unwrap());
        assert_eq!(inner.token(), outer);
        inner.release().await.unwrap();
        let spawned = tokio::spawn(nested.lease()).await.unwrap();
        assert_alone!(spawned.unwrap_err());
        async {}.with_lock(&nested).await.unwrap();
    };
    inside.with_lock(&s.lock).await.unwrap();
    let reader = s.here.obtain(KEY).shared();
    let upgrade = async { nested.lease().await.unwrap_err() };
    assert_alone!(upgrade.with_lock(&reader).await.unwrap());
    let shared = s.here.obtain(KEY).shared().nested();
    let shared = async { shared.lease().await.unwrap_err() };
    assert_alone!(shared.with_lock(&reader).await.unwrap());
}
