use std::future::ready;

use futures::{StreamExt, stream};
use lockstream::{FutureLockExt, LockError, LockRegistry, StreamLockExt};

use crate::{Floor, ms, two};

/// Two keys at once, by whoever, in sorted order: nobody waits for one who waits for him.
#[tokio::test(start_paused = true)]
async fn two_keys_in_sorted_order() {
    let (_, here, there) = two();
    let floors = [(); 3].map(|()| Floor::default());
    let accounts = ["a", "b", "c"];
    let transfer = async |registry: &LockRegistry, from: usize, to: usize| {
        let (first, second) = (from.min(to), from.max(to));
        let work = async {
            tokio::join!(floors[from].cross(), floors[to].cross());
        };
        work.with_lock((registry, accounts[second]))
            .try_with_lock((registry, accounts[first]))
            .await
    };
    let transfer = &transfer;
    let all = stream::iter(0..60).map(|i| {
        let registry = [&here, &there][i % 2];
        transfer(registry, i % 3, (i + 1 + i / 3 % 2) % 3)
    });
    let done: Vec<_> = all.buffer_unordered(12).collect().await;
    for outcome in done {
        outcome.unwrap();
    }
    assert_eq!((here.in_use(), there.in_use()), (0, 0));
}

/// A lock is not reentrant: the inner one waits for the outer, for nothing, and the outer's error stays the inner's.
#[tokio::test(start_paused = true)]
async fn the_same_key_inside_itself_is_busy() {
    let locks = LockRegistry::in_memory();
    let lock = locks.obtain("k").wait(ms(20));
    let told = ready(1).with_lock(&lock).with_lock(&lock).await;
    assert!(
        matches!(told, Ok(Err(LockError::NotAcquired { .. }))),
        "{told:?}"
    );
    assert_eq!(locks.in_use(), 0);
}

/// Only the lock's own "busy" is skipped, never one that the work brings from a lock inside it.
#[tokio::test(start_paused = true)]
async fn or_skip_does_not_swallow_an_inner_busy() {
    let (_, here, there) = two();
    let _held = there.obtain("inner").lease().await.unwrap();
    let inner = here.obtain("inner").wait(ms(5));
    let outer = here.obtain("outer");
    let busy = |error: &LockError| error.is_not_acquired() && error.key() == "inner";

    let told = ready(1)
        .with_lock(&inner)
        .try_with_lock(&outer)
        .or_skip()
        .await;
    assert!(told.as_ref().is_err_and(busy), "{told:?}");
    let told = ready(1).with_lock(&inner).with_lock(&outer).or_skip().await;
    let told = told.unwrap().expect("the outer was free");
    assert!(told.as_ref().is_err_and(busy), "{told:?}");
    let told = outer
        .try_with_lease(|_| ready(1).with_lock(&inner))
        .or_skip()
        .await;
    assert!(told.as_ref().is_err_and(busy), "{told:?}");

    let rows = || StreamLockExt::with_lock(stream::iter([1]), &inner);
    let told: Vec<_> = StreamLockExt::try_with_lock(rows(), &outer)
        .or_skip()
        .collect()
        .await;
    assert!(matches!(&told[..], [Err(error)] if busy(error)), "{told:?}");
    let told: Vec<_> = outer
        .try_with_lease_stream(|_| rows())
        .or_skip()
        .collect()
        .await;
    assert!(matches!(&told[..], [Err(error)] if busy(error)), "{told:?}");

    // And the lock's own.
    let told = ready(Ok::<_, LockError>(1))
        .try_with_lock(&inner)
        .or_skip()
        .await;
    assert!(matches!(told, Ok(None)), "{told:?}");
    let told: Vec<_> = rows().or_skip().collect().await;
    assert!(told.is_empty(), "{told:?}");
    let told = inner.lease().or_skip().await;
    assert!(matches!(told, Ok(None)), "{told:?}");
}

struct NeverBusy;

impl From<LockError> for NeverBusy {
    fn from(error: LockError) -> Self {
        panic!("{error}")
    }
}

/// The "busy" that is skipped is nobody's error, so it is not made one either.
#[tokio::test(start_paused = true)]
async fn or_skip_does_not_convert_the_skipped_error() {
    let (_, here, there) = two();
    let _held = there.obtain("k").lease().await.unwrap();
    let lock = here.obtain("k").wait(ms(5));
    let work = || ready(Ok::<_, NeverBusy>(1));
    let told = work().try_with_lock(&lock).or_skip().await;
    assert!(matches!(told, Ok(None)));
    let told = lock.try_with_lease(|_| work()).or_skip().await;
    assert!(matches!(told, Ok(None)));
    let rows = StreamLockExt::try_with_lock(stream::once(work()), &lock);
    assert_eq!(rows.or_skip().count().await, 0);
    let rows = lock.try_with_lease_stream(|_| stream::once(work()));
    assert_eq!(rows.or_skip().count().await, 0);
}

#[derive(Debug)]
enum ShopError {
    SoldOut,
    Lock(LockError),
}

impl From<LockError> for ShopError {
    fn from(error: LockError) -> Self {
        Self::Lock(error)
    }
}

#[tokio::test(start_paused = true)]
async fn errors_of_ones_own() {
    let (store, here, there) = two();
    let lock = here.obtain("k").wait(ms(5));
    let sell = |stock: u32| async move { stock.checked_sub(1).ok_or(ShopError::SoldOut) };
    assert!(matches!(sell(2).try_with_lock(&lock).await, Ok(1)));
    assert!(matches!(
        sell(0).try_with_lock(&lock).await,
        Err(ShopError::SoldOut)
    ));
    assert_eq!(store.keys(), 0, "an inner error releases");
    let held = there.obtain("k").lease().await.unwrap();
    let told = lock.try_with_lease(|_| sell(2)).await;
    assert!(
        matches!(told, Err(ShopError::Lock(LockError::NotAcquired { .. }))),
        "{told:?}"
    );
    held.release().await.unwrap();

    let rows = stream::iter([Ok(1), Err(ShopError::SoldOut), Ok(2)]);
    let rows: Vec<_> = StreamLockExt::try_with_lock(rows, &lock).collect().await;
    let ok = matches!(rows[..], [Ok(1), Err(ShopError::SoldOut), Ok(2)]);
    assert!(ok, "the stream's errors are items like any other: {rows:?}");
}
