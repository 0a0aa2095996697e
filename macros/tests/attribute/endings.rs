//! What becomes of the lock when the work does not just end well.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use futures::{FutureExt, StreamExt};
use lockstream::{LockError, LockRegistry, with_lock};

use crate::{ShopError, free, held};

static RUNS: AtomicU32 = AtomicU32::new(0);

#[with_lock(key = "ticket", registry = locks, wait = "2s")]
async fn count(locks: &LockRegistry) -> Result<(), ShopError> {
    let _ = locks;
    RUNS.fetch_add(1, Ordering::Relaxed);
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn busy_for_the_whole_wait() {
    let locks = LockRegistry::in_memory();
    let lease = locks.obtain("ticket").lease().await.unwrap();
    let Err(ShopError::Lock(error)) = count(&locks).await else {
        panic!("the lock is held by others");
    };
    assert!(error.is_not_acquired());
    assert_eq!(RUNS.load(Ordering::Relaxed), 0, "the body was never run");
    lease.release().await.unwrap();
    count(&locks).await.unwrap();
    assert_eq!(RUNS.load(Ordering::Relaxed), 1);
}

#[with_lock(key = "ticket", registry = locks)]
async fn sold_out(locks: &LockRegistry) -> Result<(), ShopError> {
    assert!(held(locks, "ticket").await);
    Err(ShopError::SoldOut)
}

#[tokio::test(start_paused = true)]
async fn an_error_of_its_own() {
    let locks = LockRegistry::in_memory();
    let error = sold_out(&locks).await.unwrap_err();
    assert_eq!(error.to_string(), "sold out");
    assert!(!held(&locks, "ticket").await);
}

#[with_lock(key = "ticket", registry = locks)]
async fn endless(locks: &LockRegistry) -> Result<(), LockError> {
    assert!(held(locks, "ticket").await);
    std::future::pending().await
}

#[tokio::test(start_paused = true)]
async fn cut_off_while_it_runs() {
    let locks = LockRegistry::in_memory();
    let second = Duration::from_secs(1);
    tokio::time::timeout(second, endless(&locks))
        .await
        .unwrap_err();
    free(&locks, "ticket").await;
}

#[tokio::test(start_paused = true)]
async fn cut_off_while_it_waits() {
    let locks = LockRegistry::in_memory();
    let lease = locks.obtain("ticket").lease().await.unwrap();
    let second = Duration::from_secs(1);
    tokio::time::timeout(second, endless(&locks))
        .await
        .unwrap_err();
    let seen = locks.obtain("ticket").inspect().await.unwrap();
    assert_eq!(seen.waiting, 0);
    lease.release().await.unwrap();
    free(&locks, "ticket").await;
}

#[with_lock(key = "ticket", registry = locks)]
async fn panics(locks: &LockRegistry) -> Result<(), LockError> {
    assert!(!held(locks, "ticket").await, "it is held, of course");
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_panic_gives_the_lock_back() {
    let locks = LockRegistry::in_memory();
    let panicked = std::panic::AssertUnwindSafe(panics(&locks))
        .catch_unwind()
        .await;
    assert!(panicked.is_err());
    free(&locks, "ticket").await;
}

#[tokio::test(start_paused = true)]
async fn a_registry_that_is_shut_down() {
    let locks = LockRegistry::in_memory();
    let shut_down = async {
        tokio::time::sleep(Duration::from_secs(1)).await;
        locks.shutdown().await;
    };
    let (ended, ()) = futures::join!(endless(&locks), shut_down);
    assert!(matches!(ended, Err(LockError::Closed { .. })), "{ended:?}");
}

#[with_lock(key = "ticket", registry = locks, ttl = "1s")]
fn ticks(locks: &LockRegistry) -> impl futures::Stream<Item = Result<u64, ShopError>> {
    let _ = locks;
    async_stream::stream! {
        for second in 0.. {
            yield Ok(second);
            tokio::time::sleep(Duration::from_millis(400)).await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_stream_whose_lease_runs_out() {
    let locks = LockRegistry::in_memory();
    let mut items: Vec<_> = ticks(&locks).collect().await;
    let last = items.pop().unwrap();
    assert!(matches!(last, Err(ShopError::Lock(error)) if error.is_lost()));
    let items: Vec<u64> = items.into_iter().map(Result::unwrap).collect();
    assert_eq!(items, [0, 1, 2]);
}
