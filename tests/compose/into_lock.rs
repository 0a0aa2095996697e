use std::borrow::Cow;
use std::future::ready;
use std::sync::Arc;

use lockstream::{FutureLockExt, IntoLock, LockError, LockRegistry};

async fn lock(what: impl IntoLock) {
    assert_eq!(ready(7).with_lock(what).await.unwrap(), 7);
}

async fn lock_by_bare_keys() {
    lock("k").await;
    lock(&"k").await;
    lock(String::from("k")).await;
    lock(&String::from("k")).await;
    lock(Box::<str>::from("k")).await;
    lock(&Box::<str>::from("k")).await;
    lock(Arc::<str>::from("k")).await;
    lock(&Arc::<str>::from("k")).await;
    lock(Cow::Borrowed("k")).await;
    lock(Cow::<'static, str>::Owned("k".into())).await;
    lock(&Cow::Borrowed("k")).await;
}

/// The installed registry is the process's, so all of it is one test.
#[tokio::test(start_paused = true)]
async fn bare_keys_ask_the_installed_registry() {
    let told = ready(7).with_lock("k").await;
    assert!(
        matches!(told, Err(LockError::NoRegistry { .. })),
        "{told:?}"
    );
    let locks = LockRegistry::in_memory();
    locks.install().unwrap();
    locks.clone().install().unwrap();
    LockRegistry::in_memory().install().unwrap_err();
    lock_by_bare_keys().await;
    let long = locks.obtain("k").ttl(crate::ms(60_000));
    let _held = long.lease().await.unwrap();
    let told = ready(7).with_lock("k").or_skip().await;
    assert!(matches!(told, Ok(None)), "not the same registry: {told:?}");
}

#[tokio::test(start_paused = true)]
async fn locks_and_pairs() {
    let locks = LockRegistry::in_memory();
    lock(locks.obtain("k")).await;
    lock(&locks.obtain("k")).await;
    lock(&&locks.obtain("k")).await;
    lock(Arc::new(locks.obtain("k"))).await;
    lock(&Arc::new(locks.obtain("k"))).await;
    lock((&locks, "k")).await;
    lock((&locks, String::from("k"))).await;
    lock((&locks, &String::from("k"))).await;
    lock((locks.clone(), Arc::<str>::from("k"))).await;
    lock((Arc::new(locks.clone()), Cow::Borrowed("k"))).await;
    lock(&(&locks, "k")).await;
    assert_eq!(locks.in_use(), 0);
}

/// `&Lock` is a contender of its own, not the handle: what the handle holds is not touched.
#[tokio::test(start_paused = true)]
async fn a_reference_is_a_contender_of_its_own() {
    let locks = LockRegistry::in_memory();
    let handle = locks.obtain("k").wait(crate::ms(10));
    assert!(handle.acquire().await.unwrap());
    let told = ready(7).with_lock(&handle).await;
    assert!(told.is_err_and(|error| error.is_not_acquired()));
    let shared = Arc::new(handle);
    let told = ready(7).with_lock(&shared).await;
    assert!(told.is_err_and(|error| error.is_not_acquired()));
    assert!(shared.is_acquired());
    assert!(!shared.as_ref().clone().is_acquired());
    assert!(shared.release().await.unwrap());
    assert!(!shared.release().await.unwrap());
}

/// Faults ride in the lock and are told at the first poll, before anything is sent.
#[tokio::test(start_paused = true)]
async fn faults_are_told_at_the_first_poll() {
    let locks = LockRegistry::in_memory();
    for key in ["", "~k", "a\nb", "a}", "k:~queue2"] {
        let told = locks.obtain(key).acquire_once().await;
        assert!(
            matches!(told, Err(LockError::InvalidKey { .. })),
            "{key:?}: {told:?}"
        );
        assert_eq!(told.unwrap_err().key(), key);
    }
    for ttl in [crate::ms(0), crate::ms(9), crate::ms(24 * 3_600_000 + 1)] {
        let told = ready(7).with_lock(locks.obtain("k").ttl(ttl)).await;
        assert!(
            matches!(told, Err(LockError::InvalidTtl { .. })),
            "{ttl:?}: {told:?}"
        );
    }
    assert_eq!(locks.in_use(), 0);
}
