//! Locks that several hold at a time.

use std::time::Duration;

use futures::future::{join, join_all};
use futures::{Stream, TryStreamExt};
use lockstream::{LockError, LockRegistry, with_lock};
use tokio::time::{Instant, sleep};

use crate::ShopError;

const WORK: Duration = Duration::from_secs(1);

macro_rules! modes {
    ($($name:ident: ($($option:tt)*);)*) => {$(
        #[with_lock(key = "ticket", registry = locks, ttl = "10s", $($option)*)]
        async fn $name(locks: &LockRegistry) -> Result<(), LockError> {
            let _ = locks;
            sleep(WORK).await;
            Ok(())
        }
    )*};
}

modes! {
    read: (shared);
    write: ();
    permit: (permits = 2);
    heavy: (permits = 4, weight = 2);
    heavy_by_expression: (permits = LIMIT + 1, weight = LIMIT - 1);
    zero: (permits = NONE);
    too_heavy: (permits = LIMIT, weight = LIMIT + 1);
}

const NONE: u32 = 0;
const LIMIT: u32 = 3;

/// How many rounds of work five of them take.
async fn rounds<W: Future<Output = Result<(), LockError>>>(work: impl Fn() -> W) -> u64 {
    let begin = Instant::now();
    for done in join_all((0..5).map(|_| work())).await {
        done.unwrap();
    }
    begin.elapsed().as_secs()
}

#[tokio::test(start_paused = true)]
async fn shared_locks_run_at_the_same_time_and_no_exclusive_one_with_them() {
    let locks = LockRegistry::in_memory();
    assert_eq!(rounds(|| read(&locks)).await, 1);
    assert_eq!(rounds(|| write(&locks)).await, 5);
    let begin = Instant::now();
    let (read, write) = join(read(&locks), write(&locks)).await;
    read.and(write).unwrap();
    assert_eq!(begin.elapsed(), WORK * 2);
}

#[tokio::test(start_paused = true)]
async fn permits_run_as_many_at_a_time_as_their_weight_allows() {
    let locks = LockRegistry::in_memory();
    assert_eq!(rounds(|| permit(&locks)).await, 3);
    assert_eq!(rounds(|| heavy(&locks)).await, 3);
    assert_eq!(rounds(|| heavy_by_expression(&locks)).await, 3);
    for (error, wrong) in [
        (zero(&locks).await, "permits"),
        (too_heavy(&locks).await, "weight"),
    ] {
        let Err(LockError::InvalidSetting { setting, .. }) = error else {
            panic!("{error:?}");
        };
        assert_eq!(setting, wrong);
    }
}

#[with_lock(key = "ticket", registry = locks, shared, wait = "0s")]
fn rows(locks: &LockRegistry) -> impl Stream<Item = Result<u32, ShopError>> {
    let _ = locks;
    futures::stream::iter([Ok(1), Ok(2)])
}

#[tokio::test(start_paused = true)]
async fn streams_share_a_lock() {
    let locks = LockRegistry::in_memory();
    let lease = locks.obtain("ticket").shared().lease().await.unwrap();
    let all: Vec<u32> = rows(&locks).try_collect().await.unwrap();
    assert_eq!(all, [1, 2]);
    assert!(lease.is_valid());
}

/// `{to}` twice is one key, and the order does not matter.
#[with_lock(keys = ["account:{from}", "account:{to}", "account:{to}", from_bank], registry = locks)]
async fn transfer(
    locks: &LockRegistry,
    from: u32,
    to: u32,
    from_bank: &str,
) -> Result<(), LockError> {
    assert_eq!((from_bank, from != to), ("bank", true));
    assert_eq!(locks.snapshot().keys.len(), 3);
    sleep(WORK).await;
    Ok(())
}

#[with_lock(keys = files, wait = "0s", skip, registry = locks)]
async fn archive(locks: &LockRegistry, files: Vec<String>) -> Result<Option<usize>, LockError> {
    assert_eq!(locks.snapshot().keys.len(), files.len());
    let count = files.len();
    drop(files);
    Ok(Some(count))
}

#[with_lock(keys = ["account:1", "account:2"], registry = locks)]
fn entries(locks: LockRegistry) -> impl Stream<Item = Result<usize, LockError>> {
    let held = locks.snapshot().keys.len();
    futures::stream::iter([Ok(held)])
}

#[tokio::test(start_paused = true)]
async fn several_keys_are_one_lock() {
    let locks = LockRegistry::in_memory();
    let begin = Instant::now();
    let (one, other) = join(
        transfer(&locks, 1, 2, "bank"),
        transfer(&locks, 2, 1, "bank"),
    )
    .await;
    one.and(other).unwrap();
    assert_eq!(begin.elapsed(), WORK * 2);
    assert_eq!(
        entries(locks.clone())
            .try_collect::<Vec<_>>()
            .await
            .unwrap(),
        [2]
    );

    let files = || vec!["a".to_owned(), "b".to_owned()];
    assert_eq!(archive(&locks, files()).await.unwrap(), Some(2));
    let held = locks.obtain("b").lease().await.unwrap();
    assert_eq!(archive(&locks, files()).await.unwrap(), None);
    held.release().await.unwrap();
    let none = archive(&locks, Vec::new()).await.unwrap_err();
    assert!(matches!(none, LockError::InvalidKey { .. }), "{none}");
}
