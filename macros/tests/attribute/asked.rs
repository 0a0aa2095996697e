//! What a lock does only if it is asked to.

use std::time::Duration;

use futures::{Stream, StreamExt, TryStreamExt};
use lockstream::{FutureLockExt, LockError, LockRegistry, OnFinish, with_lock};

use crate::{ShopError, held, remaining};

macro_rules! finished {
    ($($name:ident: ($($option:tt)*);)*) => {$(
        #[with_lock(key = "ticket", registry = locks, ttl = "10s", $($option)*)]
        async fn $name(locks: &LockRegistry) -> Result<(), LockError> {
            let _ = locks;
            tokio::time::sleep(Duration::from_secs(4)).await;
            Ok(())
        }
    )*};
}

finished! {
    release: (on_finish = "release");
    let_expire: (on_finish = "let_expire");
    let_expire_by_value: (on_finish = OnFinish::LetExpire);
    let_expire_renewed: (on_finish = "let_expire", renewal = "watchdog");
}

#[tokio::test(start_paused = true)]
async fn on_finish() {
    let locks = LockRegistry::in_memory();
    release(&locks).await.unwrap();
    assert!(!held(&locks, "ticket").await);

    let_expire(&locks).await.unwrap();
    assert_eq!(remaining(&locks, "ticket").await.as_secs(), 6);
    tokio::time::sleep(Duration::from_secs(7)).await;
    assert!(!held(&locks, "ticket").await);

    let_expire_by_value(&locks).await.unwrap();
    assert!(held(&locks, "ticket").await);
    tokio::time::sleep(Duration::from_secs(7)).await;
    assert!(!held(&locks, "ticket").await);

    // Renewed while it ran, at 3.33 s, and not after.
    let_expire_renewed(&locks).await.unwrap();
    assert!(remaining(&locks, "ticket").await > Duration::from_secs(8));
    tokio::time::sleep(Duration::from_secs(11)).await;
    assert!(!held(&locks, "ticket").await);
}

macro_rules! kept {
    ($($name:ident: ($($option:tt)*);)*) => {$(
        #[with_lock(key = "ticket", registry = locks, $($option)*)]
        async fn $name(locks: &LockRegistry, work: Duration) -> Result<(), LockError> {
            let _ = locks;
            tokio::time::sleep(work).await;
            Ok(())
        }
    )*};
}

const PERIOD: Duration = Duration::from_secs(5);

kept! {
    kept: (keep_for = "1h");
    kept_by_value: (keep_for = PERIOD * 2);
    kept_and_renewed: (keep_for = "10s", ttl = "3s", renewal = "watchdog");
    kept_too_long: (keep_for = PERIOD * 10_000_000);
}

#[tokio::test(start_paused = true)]
async fn keep_for() {
    let hour = Duration::from_secs(60 * 60);
    let locks = LockRegistry::in_memory();
    kept(&locks, PERIOD).await.unwrap();
    assert_eq!(remaining(&locks, "ticket").await + PERIOD, hour);
    tokio::time::sleep(hour).await;
    assert!(!held(&locks, "ticket").await);

    kept_by_value(&locks, PERIOD / 5).await.unwrap();
    assert_eq!(remaining(&locks, "ticket").await, PERIOD / 5 * 9);
    tokio::time::sleep(PERIOD * 2).await;
    assert!(!held(&locks, "ticket").await);

    // Longer than it is to be kept: it is released.
    kept_and_renewed(&locks, PERIOD * 3).await.unwrap();
    assert!(!held(&locks, "ticket").await);

    let error = kept_too_long(&locks, PERIOD).await.unwrap_err();
    assert!(matches!(error, LockError::InvalidSetting { .. }), "{error}");
}

#[with_lock(key = "job", wait = "0s", skip, keep_for = "1h", keep_on_success, registry = locks)]
async fn job(
    locks: &LockRegistry,
    outcome: Result<u32, ShopError>,
) -> Result<Option<u32>, ShopError> {
    assert!(held(locks, "job").await);
    outcome.map(Some)
}

#[with_lock(key = "job", wait = "0s", keep_for = "1h", keep_on_success, registry = locks)]
fn later(locks: &LockRegistry, fails: bool) -> impl Future<Output = Result<(), ShopError>> {
    async move {
        if fails {
            Err(ShopError::SoldOut)
        } else {
            Ok(())
        }
    }
}

#[tokio::test(start_paused = true)]
async fn keep_on_success() {
    let hour = Duration::from_secs(60 * 60);
    let locks = LockRegistry::in_memory();
    assert!(job(&locks, Err(ShopError::SoldOut)).await.is_err());
    assert!(!held(&locks, "job").await);
    assert_eq!(job(&locks, Ok(7)).await.unwrap(), Some(7));
    assert_eq!(remaining(&locks, "job").await, hour);
    assert_eq!(job(&locks, Ok(7)).await.unwrap(), None);

    tokio::time::sleep(hour).await;
    assert!(later(&locks, true).await.is_err());
    assert!(!held(&locks, "job").await);
    later(&locks, false).await.unwrap();
    assert!(held(&locks, "job").await);
}

#[with_lock(key = "tree", registry = locks, reentrant, wait = "0s")]
async fn descend(locks: &LockRegistry, level: u32) -> Result<u32, LockError> {
    assert!(held(locks, "tree").await);
    if level == 0 {
        return Ok(0);
    }
    Ok(Box::pin(descend(locks, level - 1)).await? + 1)
}

#[with_lock(key = "tree", registry = locks, wait = "0s")]
async fn descend_once(locks: &LockRegistry, level: u32) -> Result<u32, LockError> {
    if level == 0 {
        return Ok(0);
    }
    Ok(Box::pin(descend_once(locks, level - 1)).await? + 1)
}

#[with_lock(key = "tree", registry = locks, reentrant, wait = "0s")]
fn leaves(locks: &LockRegistry) -> impl Stream<Item = Result<u32, ShopError>> + '_ {
    futures::stream::iter([1, 2]).then(async |level| Ok(descend(locks, level).await?))
}

#[tokio::test(start_paused = true)]
async fn reentrant() {
    let locks = LockRegistry::in_memory();
    assert_eq!(descend(&locks, 3).await.unwrap(), 3);
    assert!(!held(&locks, "tree").await);
    assert!(descend_once(&locks, 1).await.unwrap_err().is_not_acquired());

    let levels: Vec<u32> = leaves(&locks).try_collect().await.unwrap();
    assert_eq!(levels, [1, 2]);
    assert!(!held(&locks, "tree").await);
}

/// A part of the descent, which never runs alone.
#[with_lock(key = "tree", registry = locks, nested)]
async fn note(locks: &LockRegistry) -> Result<u32, LockError> {
    Ok(7)
}

#[tokio::test(start_paused = true)]
async fn nested() {
    let locks = LockRegistry::in_memory();
    let alone = note(&locks).await.unwrap_err();
    assert!(
        matches!(
            alone,
            LockError::InvalidSetting {
                setting: "nested",
                ..
            }
        ),
        "{alone}"
    );
    assert!(!held(&locks, "tree").await);
    let inside = note(&locks).try_with_lock(locks.obtain("tree"));
    assert_eq!(inside.await.unwrap(), 7);
}
