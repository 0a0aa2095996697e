//! Functions that do nothing if the lock is busy.

use std::future::Future;
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use lockstream::{LockError, LockRegistry, with_lock};
use tokio::time::Instant;

use crate::{ShopError, held};

#[with_lock(key = "ticket", registry = locks, wait = "0s", skip)]
async fn sell(locks: &LockRegistry, stock: u32) -> Result<Option<u32>, ShopError> {
    assert!(held(locks, "ticket").await);
    if stock == 0 {
        return Err(ShopError::SoldOut);
    }
    Ok(stock.checked_sub(2))
}

#[with_lock(key = "ticket", registry = locks, wait = "3s", skip)]
async fn sell_patiently(locks: &LockRegistry) -> anyhow::Result<Option<&'static str>> {
    assert!(held(locks, "ticket").await);
    Ok(Some("sold"))
}

#[tokio::test(start_paused = true)]
async fn a_busy_lock_is_none() {
    let locks = LockRegistry::in_memory();
    assert_eq!(sell(&locks, 5).await.unwrap(), Some(3));
    // None of the body's own.
    assert_eq!(sell(&locks, 1).await.unwrap(), None);
    let sold_out = sell(&locks, 0).await.unwrap_err();
    assert!(matches!(sold_out, ShopError::SoldOut), "{sold_out}");
    assert!(!held(&locks, "ticket").await);

    let day = Duration::from_secs(24 * 60 * 60);
    let lease = locks.obtain("ticket").ttl(day).lease().await.unwrap();
    let begin = Instant::now();
    assert_eq!(sell(&locks, 5).await.unwrap(), None);
    assert_eq!(begin.elapsed(), Duration::ZERO);
    assert_eq!(sell_patiently(&locks).await.unwrap(), None);
    assert_eq!(begin.elapsed().as_secs(), 3);
    lease.release().await.unwrap();
    assert_eq!(sell_patiently(&locks).await.unwrap(), Some("sold"));
}

#[tokio::test(start_paused = true)]
async fn other_errors_of_the_lock_stay() {
    let locks = LockRegistry::in_memory();
    locks.shutdown().await;
    let error = sell(&locks, 5).await.unwrap_err();
    let ShopError::Lock(error) = error else {
        panic!("{error}");
    };
    assert!(error.is_closed(), "{error}");
}

/// Not busy itself, it fails at a lock inside.
#[with_lock(key = "outer", registry = locks, wait = "0s", skip)]
async fn locks_within(locks: &LockRegistry) -> Result<Option<()>, LockError> {
    let lease = locks.obtain("ticket").wait(Duration::ZERO).lease().await?;
    lease.release().await?;
    Ok(Some(()))
}

#[with_lock(key = "outer", registry = locks, wait = "0s", skip)]
#[with_lock(key = "ticket", registry = locks, wait = "0s")]
async fn skips_the_first(locks: &LockRegistry) -> Result<Option<()>, LockError> {
    let _ = locks;
    Ok(Some(()))
}

#[with_lock(key = "outer", registry = locks, wait = "0s")]
#[with_lock(key = "ticket", registry = locks, wait = "0s", skip)]
async fn skips_the_second(locks: &LockRegistry) -> Result<Option<()>, LockError> {
    let _ = locks;
    Ok(Some(()))
}

#[tokio::test(start_paused = true)]
async fn only_the_lock_that_says_so_is_skipped() {
    let locks = LockRegistry::in_memory();
    for free in [
        locks_within(&locks).await,
        skips_the_first(&locks).await,
        skips_the_second(&locks).await,
    ] {
        assert_eq!(free.unwrap(), Some(()));
    }

    let ticket = locks.obtain("ticket").lease().await.unwrap();
    let error = locks_within(&locks).await.unwrap_err();
    assert_eq!((error.is_not_acquired(), error.key()), (true, "ticket"));
    let error = skips_the_first(&locks).await.unwrap_err();
    assert_eq!((error.is_not_acquired(), error.key()), (true, "ticket"));
    assert_eq!(skips_the_second(&locks).await.unwrap(), None);
    assert!(!held(&locks, "outer").await);
    ticket.release().await.unwrap();

    let outer = locks.obtain("outer").lease().await.unwrap();
    assert_eq!(skips_the_first(&locks).await.unwrap(), None);
    let error = skips_the_second(&locks).await.unwrap_err();
    assert_eq!((error.is_not_acquired(), error.key()), (true, "outer"));
    outer.release().await.unwrap();
}

#[with_lock(key = "ticket", registry = locks, wait = "0s", skip)]
fn bare(locks: &LockRegistry) -> impl Future<Output = Result<Option<bool>, LockError>> {
    held(locks, "ticket").map(|held| Ok(Some(held)))
}

#[with_lock(key = "ticket", registry = locks, wait = "0s", skip)]
fn boxed(locks: &LockRegistry) -> BoxFuture<'_, Result<Option<bool>, LockError>> {
    held(locks, "ticket").map(|held| Ok(Some(held))).boxed()
}

#[tokio::test(start_paused = true)]
async fn functions_that_return_a_future_skip_too() {
    let locks = LockRegistry::in_memory();
    assert_eq!(bare(&locks).await.unwrap(), Some(true));
    assert_eq!(boxed(&locks).await.unwrap(), Some(true));
    let lease = locks.obtain("ticket").lease().await.unwrap();
    assert_eq!(bare(&locks).await.unwrap(), None);
    assert_eq!(boxed(&locks).await.unwrap(), None);
    lease.release().await.unwrap();
}
