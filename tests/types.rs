//! Which public types may cross threads, be moved while polled, and be printed. A change here breaks users.

use std::cell::Cell;
use std::fmt::Debug;
use std::future::Ready;
use std::marker::PhantomPinned;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures::future::FusedFuture;
use futures::stream::{FusedStream, Pending, iter};
use futures::{Stream, StreamExt, TryStreamExt};
use lockstream::store::{MemoryStore, QuorumStore};
use lockstream::{
    BuildError, DetachError, DetachedLease, FutureLockExt, Inspection, Leadership, Lease,
    LeaseView, Lock, LockError, LockEvent, LockRegistry, LockRegistryBuilder, OnFinish, OnLost,
    ParseDetachedLeaseError, Repeat, Snapshot, StoreError, StreamLockExt, Token, future, stream,
};
use static_assertions::{assert_impl_all, assert_not_impl_any, assert_type_ne_all};

/// Work that may not be moved.
struct Pinned(PhantomPinned);

impl Future for Pinned {
    type Output = ();

    fn poll(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<()> {
        Poll::Pending
    }
}

impl Stream for Pinned {
    type Item = Result<(), LockError>;

    fn poll_next(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        Poll::Pending
    }
}

/// Work that stays on its thread.
struct Local(Rc<Cell<u8>>);

impl Future for Local {
    type Output = Result<u8, LockError>;

    fn poll(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Self::Output> {
        Poll::Ready(Ok(self.0.get()))
    }
}

impl Stream for Local {
    type Item = Result<u8, LockError>;

    fn poll_next(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        Poll::Pending
    }
}

type Work = Ready<Result<u8, LockError>>;
type Rows = Pending<Result<u8, LockError>>;
type Begin<W> = fn(LeaseView) -> W;

macro_rules! lasting {
    ($($type:ty: $($bound:path),+;)+) => {$(
        assert_impl_all!($type: Debug, $($bound),+);
        const _: fn() = || {
            fn outlives_all<T: 'static>() {}
            outlives_all::<$type>();
        };
    )+};
}

// What users keep.
lasting! {
    LockRegistry: Send, Sync, Unpin, Clone;
    LockRegistryBuilder: Send, Sync, Unpin;
    Lock: Send, Sync, Unpin, Clone;
    Lease: Send, Sync, Unpin;
    LeaseView: Send, Sync, Unpin, Clone;
    Leadership: Send, Sync, Unpin, Clone;
    LockError: Send, Sync, Unpin, Clone, std::error::Error;
    StoreError: Send, Sync, Unpin, Clone, std::error::Error;
    BuildError: Send, Sync, Unpin, Clone, std::error::Error;
    Token: Send, Sync, Unpin, Copy, Ord, std::hash::Hash, std::fmt::Display, Into<u64>, Into<i64>;
    MemoryStore: Send, Sync, Unpin, Clone;
    QuorumStore: Send, Sync, Unpin, Clone;
    Repeat: Send, Sync, Unpin, Clone;
    OnLost: Send, Sync, Unpin, Copy;
    OnFinish: Send, Sync, Unpin, Copy;
    DetachedLease: Send, Sync, Unpin, Clone, PartialEq;
    DetachError: Send, Sync, Unpin, std::error::Error, Into<LockError>;
    ParseDetachedLeaseError: Send, Sync, Unpin, Clone, PartialEq, std::error::Error;
    Inspection: Send, Sync, Unpin, Clone, PartialEq;
    LockEvent: Send, Sync, Unpin, Clone;
    Snapshot: Send, Sync, Unpin, Clone, PartialEq;
    stream::Events: Send, Sync, Unpin, FusedStream;
}
// A guard that could be cloned would release twice.
assert_not_impl_any!(Lease: Clone, Copy);
assert_not_impl_any!(LockError: PartialEq);

// Futures without work: whatever the store, they are spawned, moved and polled by reference.
lasting! {
    future::Acquire: Send, Unpin, FusedFuture;
    future::AcquireLease: Send, Sync, Unpin, FusedFuture;
    future::OrSkip<future::AcquireLease>: Send, Sync, Unpin, FusedFuture;
    future::LeaseOnce: Send, Sync, Unpin, FusedFuture;
    future::ExtendHeld: Send, Unpin, FusedFuture;
    future::ForceRelease: Send, Unpin, FusedFuture;
    future::Verify: Send, Unpin, FusedFuture;
    future::Release: Send, Unpin, FusedFuture;
    future::LeaseRelease: Send, Unpin, FusedFuture;
    future::Lost: Send, Sync, Unpin, Future;
    future::Extend: Send, Unpin, FusedFuture;
    future::Adopt: Send, Sync, Unpin, FusedFuture;
    future::Inspect: Send, Unpin, FusedFuture;
    future::CheckStore: Send, Unpin, FusedFuture;
    future::Ping: Send, Unpin, FusedFuture;
    future::Shutdown: Send, Unpin, FusedFuture;
    future::Drain: Send, Unpin, FusedFuture;
    future::Resign: Send, Unpin, FusedFuture;
    stream::Campaign: Send, Unpin, FusedStream;
    stream::Scan: Send, Unpin, FusedStream;
}

// Futures and streams with work are what their work is.
lasting! {
    future::WithLock<Work>: Send, Unpin, FusedFuture;
    future::TryWithLock<Work>: Send, Unpin, FusedFuture;
    future::WithLease<Begin<Work>>: Send, Unpin, FusedFuture;
    future::TryWithLease<Begin<Work>>: Send, Unpin, FusedFuture;
    future::Lead<Begin<Work>, Work>: Send, Unpin, FusedFuture;
    future::OrSkip<future::WithLock<Work>>: Send, Unpin, FusedFuture;
    future::Try<future::OrSkip<future::WithLock<Work>>>: Send, Unpin, FusedFuture;
    future::OrSkip<future::WithLease<Begin<Work>>>: Send, Unpin, FusedFuture;
    future::Try<future::OrSkip<future::WithLease<Begin<Work>>>>: Send, Unpin, FusedFuture;
    stream::WithLock<Rows>: Send, Unpin, FusedStream;
    stream::TryWithLock<Rows>: Send, Unpin, FusedStream;
    stream::WithLease<Begin<Rows>>: Send, Unpin, FusedStream;
    stream::TryWithLease<Begin<Rows>>: Send, Unpin, FusedStream;
    stream::OrSkip<stream::WithLock<Rows>>: Send, Unpin, FusedStream;
    stream::Try<stream::OrSkip<stream::WithLock<Rows>>>: Send, Unpin, FusedStream;
    stream::OrSkip<stream::WithLease<Begin<Rows>>>: Send, Unpin, FusedStream;
    stream::Try<stream::OrSkip<stream::WithLease<Begin<Rows>>>>: Send, Unpin, FusedStream;
}

macro_rules! as_their_work {
    ($($make:ident),+) => {$(
        assert_not_impl_any!($make<Pinned>: Unpin);
        assert_impl_all!($make<Pinned>: Send, Debug);
        assert_not_impl_any!($make<Local>: Send, Sync);
        assert_impl_all!($make<Local>: Unpin, Debug);
    )+};
}
type FutureWithLock<W> = future::WithLock<W>;
type FutureTryWithLock<W> = future::TryWithLock<W>;
type FutureWithLease<W> = future::WithLease<Begin<W>>;
type FutureTryWithLease<W> = future::TryWithLease<Begin<W>>;
type FutureLead<W> = future::Lead<Begin<W>, W>;
type FutureOrSkip<W> = future::OrSkip<future::WithLock<W>>;
type StreamWithLock<W> = stream::WithLock<W>;
type StreamTryWithLock<W> = stream::TryWithLock<W>;
type StreamWithLease<W> = stream::WithLease<Begin<W>>;
type StreamTryWithLease<W> = stream::TryWithLease<Begin<W>>;
type StreamOrSkip<W> = stream::OrSkip<stream::WithLock<W>>;
as_their_work!(
    FutureWithLock,
    FutureTryWithLock,
    FutureWithLease,
    FutureTryWithLease,
    FutureLead,
    FutureOrSkip,
    StreamWithLock,
    StreamTryWithLock,
    StreamWithLease,
    StreamTryWithLease,
    StreamOrSkip
);
// It keeps the value while the release runs.
assert_not_impl_any!(future::WithLock<std::future::Pending<Rc<u8>>>: Send);

#[cfg(feature = "redis")]
lasting! {
    lockstream::store::RedisStore: Send, Sync, Unpin, Clone;
    lockstream::store::Credentials: Send, Sync, Unpin, Clone, PartialEq;
    lockstream::store::RedisStoreBuilder: Send, Sync, Unpin, Clone;
    future::Connect: Send, Unpin, FusedFuture;
    future::ConnectRedis: Send, Unpin, FusedFuture;
}

#[cfg(feature = "postgres")]
lasting! {
    future::ConnectPostgres: Send, Unpin, FusedFuture;
    future::Migrate: Send, Unpin, FusedFuture;
}

// Each future is a type of its own: one can be changed without the others.
assert_type_ne_all!(
    future::Acquire,
    future::AcquireLease,
    future::Adopt,
    future::CheckStore,
    future::Drain,
    future::Extend,
    future::ExtendHeld,
    future::ForceRelease,
    future::Inspect,
    future::LeaseOnce,
    future::LeaseRelease,
    future::Lost,
    future::Ping,
    future::Release,
    future::Resign,
    future::Shutdown,
    future::Verify
);

#[cfg(feature = "tower")]
mod tower {
    use lockstream::Lock;
    use lockstream::tower::{
        IgnoreLease, IntoServiceError, LockLayer, LockService, RequestLock, ResponseFuture,
    };

    use super::{Debug, Local, LockError, Ready, Work, assert_impl_all, assert_not_impl_any};

    type Key = fn(&String) -> Lock;
    type Inner = ::tower::util::ServiceFn<fn(String) -> Work>;
    type Stays = ::tower::util::ServiceFn<fn(String) -> Local>;

    lasting! {
        LockLayer<Key>: Send, Sync, Unpin, Clone;
        RequestLock: Send, Sync, Unpin, From<Lock>;
        LockService<Inner, Key, IntoServiceError>: Send, Sync, Unpin;
        ResponseFuture<Inner, String, IntoServiceError>: Send, Unpin, Future<Output = Result<u8, LockError>>;
        ResponseFuture<Stays, String, IntoServiceError>: Unpin;
    }
    #[cfg(feature = "http")]
    lasting! {
        lockstream::tower::LockedBody<String>: Send, Unpin, http_body::Body;
        LockLayer<Key, IntoServiceError, IgnoreLease, lockstream::tower::UntilBodyEnd>: Send, Sync, Unpin, Clone;
    }
    assert_impl_all!(LockService<fn() -> Ready<()>, Key, IntoServiceError>: Clone);
    // A key that is missing must not mean no lock.
    assert_not_impl_any!(RequestLock: From<Option<Lock>>);
    assert_not_impl_any!(ResponseFuture<Stays, String, IntoServiceError>: Send);
}

// What a lock error costs in a `Result`, and a handle in a struct.
const _: () = assert!(size_of::<LockError>() <= 64);
const _: () = assert!(size_of::<Option<Arc<Lease>>>() == size_of::<usize>());

/// The table above is checked when this is compiled; a suite that runs nothing would fail.
#[test]
fn the_table_holds() {
    let printed = format!("{:?}", LockRegistry::in_memory().obtain("k"));
    assert!(printed.contains("\"k\""), "{printed}");
}

/// A service spawns its consumers, and its errors are often boxed. The compiler then compared a boxed error with itself and
/// found two types.
#[tokio::test]
async fn consumers_of_boxed_errors_can_be_spawned() {
    type Boxed = Box<dyn std::error::Error + Send + Sync>;

    async fn charge(order: u8) -> Result<u8, Boxed> {
        tokio::task::yield_now().await;
        Ok(order)
    }

    async fn consume(locks: LockRegistry) -> Result<u8, Boxed> {
        let mut sum = charge(1).try_with_lock(locks.obtain("k")).await?;
        let orders = || iter(2..=3);
        let lock = |_: &u8| locks.obtain("k");
        let keyed = orders().map(|order| charge(order).try_with_lock(lock(&order)));
        sum += keyed.buffer_keyed(2).try_fold(0, add).await?;
        let skips = orders().map(|order| charge(order).try_with_lock(lock(&order)).or_skip());
        sum += skips.buffer_keyed(2).try_fold(0, add).await?;
        let plain = orders().map(|order| charge(order).with_lock(lock(&order)));
        sum += plain
            .buffer_keyed(2)
            .try_fold(0, async |sum, order| Ok(sum + order.unwrap_or(0)))
            .await?;
        let leased = orders().map(|order| lock(&order).try_with_lease(move |_| charge(order)));
        sum += leased.buffer_keyed(2).try_fold(0, add).await?;
        let buffered = orders().map(|order| charge(order).try_with_lock(lock(&order)));
        sum += buffered.buffered(2).try_fold(0, add).await?;
        let unordered = orders().map(|order| charge(order).try_with_lock(lock(&order)));
        sum += unordered.buffer_unordered(2).try_fold(0, add).await?;
        // Locks in each other, around a borrow.
        let sums = iter([vec![2], vec![3]]);
        let nested = sums.map(Ok).and_then(async |orders: Vec<u8>| {
            let (outer, inner) = (locks.obtain("outer"), locks.obtain("inner"));
            let leased = inner.try_with_lease(|_| sum_of(&orders));
            let both = leased.try_with_lock(locks.obtain("second"));
            outer.try_with_lease(|_| both).await
        });
        sum += nested.try_fold(0, add).await?;
        let rows = orders()
            .map(Ok::<_, Boxed>)
            .try_with_lock(locks.obtain("k"));
        Ok(sum + rows.try_fold(0, add).await?)
    }

    async fn sum_of(orders: &[u8]) -> Result<u8, Boxed> {
        let mut sum = 0;
        for order in orders {
            sum += charge(*order).await?;
        }
        Ok(sum)
    }

    async fn add(sum: u8, order: u8) -> Result<u8, Boxed> {
        Ok(sum + order)
    }

    let spawned = tokio::spawn(consume(LockRegistry::in_memory()));
    assert_eq!(spawned.await.unwrap().unwrap(), 1 + 8 * 5);
}
