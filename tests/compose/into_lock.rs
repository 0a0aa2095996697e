use std::borrow::Cow;
use std::future::ready;
use std::sync::Arc;

use futures::{StreamExt, stream};
use lockstream::{FutureLockExt, IntoLock, LockError, LockRegistry, StreamLockExt};

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

/// The installed registry is the process's, so all of it is one test. It outlives the runtimes that use it.
#[test]
fn bare_keys_ask_the_installed_registry() {
    let runtime = || {
        let mut builder = tokio::runtime::Builder::new_current_thread();
        builder.enable_all().build().unwrap()
    };
    runtime().block_on(async {
        // Never a lock that only looks like one.
        let work = async { panic!("never polled") };
        let told = work.with_lock("k").await.map(|()| 7);
        let none = matches!(&told, Err(LockError::NoRegistry { key, .. }) if &**key == "k");
        assert!(none, "{told:?}");
        let rows = StreamLockExt::with_lock(stream::iter([1]), String::from("k"));
        let told: Vec<_> = rows.collect().await;
        let none = matches!(&told[..], [Err(LockError::NoRegistry { key, .. })] if &**key == "k");
        assert!(none, "{told:?}");
    });

    let locks = LockRegistry::in_memory();
    locks.install().unwrap();
    locks.clone().install().unwrap();
    let other = LockRegistry::in_memory();
    let refused = other.install().unwrap_err();
    assert_eq!(other.install(), Err(refused));
    for _ in 0..2 {
        runtime().block_on(async {
            lock_by_bare_keys().await;
            let rows = StreamLockExt::with_lock(stream::iter([1]), Cow::from("k"));
            assert_eq!(rows.count().await, 1);
            let held = locks.obtain("k");
            let work = async { !held.acquire_once().await.unwrap() };
            assert!(work.with_lock("k").await.unwrap(), "not the same registry");
            assert_eq!(locks.in_use(), 0);
        });
    }
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
