use futures::{Stream, TryFuture, TryStream};

use super::guarded::Guarded;
use super::keyed::BufferKeyed;
use super::locked_future::LockedFuture;
use super::outcome::Try;
use super::{future, stream};
use crate::base::LockError;
use crate::handle::into_lock::IntoLock;
use crate::handle::{LeaseView, Lock};

/// Runs futures under a lock.
pub trait FutureLockExt: Future {
    /// Runs this future under the lock, which is held exactly as long as it runs.
    ///
    /// The first poll begins the acquisition, which waits as long as the lock's
    /// [`wait`](crate::Lock::wait) says. The future is polled only while the lease is valid: that is
    /// checked before each poll, and once more when it completes. The value is delivered when the
    /// release is confirmed, after one response time-out at most.
    ///
    /// Pass a [`Lock`](crate::Lock) from [`obtain`](crate::LockRegistry::obtain), a reference to
    /// one (which is cloned, and so is a caller of its own), `(&registry, key)`, or a bare key of
    /// the [installed](crate::LockRegistry::install) registry.
    ///
    /// # Errors
    ///
    /// - [`LockError::NotAcquired`] if others held the lock for the whole wait. The future was never
    ///   polled.
    /// - [`LockError::Lost`] if the lease was lost while the future ran. The future was dropped at
    ///   once, unless [`on_lost`](crate::Lock::on_lost) lets it run on.
    /// - [`LockError::Closed`] after a shutdown, [`LockError::QueueFull`], [`LockError::Store`],
    ///   [`LockError::TooSlow`], and an invalid key, ttl or setting.
    ///
    /// If the store cannot be told of the release, the value is delivered all the same.
    ///
    /// # Cancel safety
    ///
    /// Dropped while it waits, it leaves the queue. Dropped while the future runs, it drops the
    /// future and then releases the lock in the background.
    ///
    /// # Races
    ///
    /// If the future completes in the same poll in which the lease runs out, the error wins over the
    /// value.
    ///
    /// # Hot futures
    ///
    /// `tokio::spawn(work()).with_lock(lock)` runs before it is locked, and dropping a
    /// `JoinHandle` stops nothing. Spawn inside: `lock.with_lease(|_| tokio::spawn(work()))`. If that future is dropped,
    /// the task runs on without the lock. Work that must not be cut off is spawned with its lock:
    /// `tokio::spawn(work().with_lock(lock)).await`.
    ///
    /// # Examples
    ///
    /// ```
    /// use lockstream::{FutureLockExt, LockRegistry};
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), lockstream::LockError> {
    /// # async fn charge(order: u64) -> u64 { order }
    /// let locks = LockRegistry::in_memory();
    /// let receipt = charge(42).with_lock(locks.obtain("order:42")).await?;
    /// # assert_eq!(receipt, 42);
    /// // two keys at once: the outermost is acquired first, so sort them
    /// let both = charge(7)
    ///     .with_lock((&locks, "account:b"))
    ///     .try_with_lock((&locks, "account:a"))
    ///     .await?;
    /// # assert_eq!(both, 7);
    /// // one time-out for waiting and work
    /// # use std::time::Duration;
    /// let timely = tokio::time::timeout(
    ///     Duration::from_secs(1),
    ///     charge(1).with_lock((&locks, "order:1")),
    /// ).await;
    /// # assert!(timely.is_ok());
    /// # Ok(()) }
    /// ```
    #[track_caller]
    fn with_lock(self, lock: impl IntoLock) -> future::WithLock<Self>
    where
        Self: Sized,
    {
        Guarded::given(lock.into_lock().into_options(), self)
    }

    /// [`with_lock`](Self::with_lock) for a future of a `Result`: errors of the lock are converted
    /// by `From<LockError>`, so that there is one `?`.
    ///
    /// If the error type has no `From<LockError>`, use `with_lock` and `.await??`, or convert it
    /// before with `.err_into()`.
    ///
    /// ```
    /// use lockstream::{FutureLockExt, LockError, LockRegistry};
    /// # #[derive(Debug)] enum ShopError { Lock(LockError) }
    /// impl From<LockError> for ShopError {
    ///     fn from(error: LockError) -> Self { Self::Lock(error) }
    /// }
    /// async fn sell() -> Result<u32, ShopError> { Ok(1) }
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), ShopError> {
    /// let locks = LockRegistry::in_memory();
    /// let ticket = sell().try_with_lock(locks.obtain("last ticket")).await?;
    /// # assert_eq!(ticket, 1);
    /// # Ok(()) }
    /// ```
    #[track_caller]
    fn try_with_lock(self, lock: impl IntoLock) -> future::TryWithLock<Self>
    where
        Self: TryFuture + Sized,
        Self::Error: From<LockError>,
    {
        let inner = FutureLockExt::with_lock(self, lock);
        Try { inner }
    }
}

impl<F: Future + ?Sized> FutureLockExt for F {}

/// Runs streams under a lock.
pub trait StreamLockExt: Stream {
    /// Runs this stream under one lease, from the first poll to the stream's end: the lock is held
    /// for the whole stream, not for its first item.
    ///
    /// **Only what the stream itself polls is stopped at a loss.** The body of a `while let` around it runs on without the
    /// lease until it asks for the next item. So put the work for each item into the stream:
    /// `rows.and_then(import).try_with_lock(lock)`.
    ///
    /// Back-pressure is the stream's own: one item asked for, one item polled. The lease is checked
    /// before each poll, and once more at the end. The end is yielded when the release is confirmed,
    /// after one response time-out at most. A stream that is kept but not polled holds the lock
    /// while its lease lasts.
    ///
    /// # Errors
    ///
    /// Those of [`FutureLockExt::with_lock`], as the last item.
    ///
    /// # Cancel safety
    ///
    /// That of [`FutureLockExt::with_lock`]. No item is lost between two polls.
    ///
    /// # Examples
    ///
    /// ```
    /// use futures::TryStreamExt;
    /// use lockstream::{LockRegistry, StreamLockExt};
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), lockstream::LockError> {
    /// let locks = LockRegistry::in_memory();
    /// let rows = futures::stream::iter([1, 2, 3]).with_lock(locks.obtain("import"));
    /// let rows: Vec<i32> = rows.try_collect().await?;
    /// assert_eq!(rows, [1, 2, 3]);
    /// # Ok(()) }
    /// ```
    #[track_caller]
    fn with_lock(self, lock: impl IntoLock) -> stream::WithLock<Self>
    where
        Self: Sized,
    {
        Guarded::given(lock.into_lock().into_options(), self)
    }

    /// [`with_lock`](Self::with_lock) for a stream of `Result`s: errors of the lock are converted
    /// by `From<LockError>`. The stream's own errors are items like any other and do not end it.
    #[track_caller]
    fn try_with_lock(self, lock: impl IntoLock) -> stream::TryWithLock<Self>
    where
        Self: TryStream + Sized,
        Self::Error: From<LockError>,
    {
        let inner = StreamLockExt::with_lock(self, lock);
        Try { inner }
    }

    /// Runs a stream of futures that have locks of their own, as
    /// [`buffer_unordered`](futures::StreamExt::buffer_unordered) does, but at most `working` of them *work* at a time: one
    /// that waits for its lock takes no place. So a key that others hold does not stand in the way of the rest.
    ///
    /// Items are futures of [`with_lock`](FutureLockExt::with_lock), `try_with_lock`, [`with_lease`](Lock::with_lease) or
    /// `try_with_lease`, of any mode or of several keys, with `or_skip` or without.
    ///
    /// - **Order.** Items of one key begin in the order of the stream, and exclusive ones never overlap. Readers of a key work
    ///   side by side, and so do permits. Items of different keys do not wait for each other. Results come as they are
    ///   ready, or [in order](crate::stream::BufferKeyed::in_order). Two streams, or two registries, know nothing of each
    ///   other's order. An item that fails does not hold back the next of its key: where it must, the work looks whether the
    ///   one before was done.
    /// - **Calls.** An item is passed the key of the item before it without a call. One whose [`wait`](Lock::wait) is zero
    ///   asks when the earlier ones of its key are done: those do not make it busy.
    /// - **Back-pressure.** The source is not asked for more while `working` items work, nor while
    ///   [16 times as many](crate::stream::BufferKeyed::waiting) wait. So a key with more items than that does stand in the way
    ///   of the rest, for as long as others hold it. An item that waits has been taken from its source: what hands it to
    ///   another after a time, such as a consumer group, does so also while it waits here. Its work must then look, under the
    ///   lock, whether it is still to be done.
    /// - **Places.** An item takes a place when it asks for its lock. If others hold that, or the store has failed, it gives the
    ///   place up, and takes one again when the lock is its own. If all are taken then, it holds its lock until one is free. A
    ///   lease that is not renewed ([`ttl`](Lock::ttl)) may be over by then: the item is `Lost`, and its work does not begin.
    /// - **Locks inside.** Do not wait inside an item for a lock that an item of such a stream may hold, here or in another
    ///   process, since that one may wait for a place: take both by [`obtain_all`](crate::LockRegistry::obtain_all).
    /// - **Time.** The [`wait`](Lock::wait) of an item begins when it is the next of its key, and has a place to ask from.
    ///   By default it is as long as a ttl, 30 s: behind a holder that has died let it be longer.
    ///
    /// # Panics
    ///
    /// If `working` is 0. If an item panics, it is gone, and the stream may be polled further.
    ///
    /// # Errors
    ///
    /// Those of each item are that item's, and the stream goes on. What `or_skip` skips is left out. Errors of the source become
    /// those of an item: see the second example.
    ///
    /// # Cancel safety
    ///
    /// Dropping the stream drops all items, and so releases their locks in the background. `next()` may be dropped and
    /// called again; no item is lost.
    ///
    /// # Examples
    ///
    /// ```
    /// use futures::{StreamExt, TryStreamExt, stream};
    /// use lockstream::prelude::*;
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), LockError> {
    /// # async fn charge(order: u64) -> u64 { order }
    /// let locks = LockRegistry::in_memory();
    /// let charged: Vec<u64> = stream::iter(1..=100)
    ///     .map(|order| charge(order).with_lock(locks.obtain(format!("customer:{}", order % 7))))
    ///     .buffer_keyed(16)
    ///     .try_collect()
    ///     .await?;
    /// assert_eq!(charged.len(), 100);
    /// # Ok(()) }
    /// ```
    ///
    /// A source of `Result`s. The stream can be spawned, since its items can.
    ///
    /// ```
    /// use futures::{Stream, StreamExt, TryStreamExt};
    /// use lockstream::prelude::*;
    ///
    /// # #[derive(Debug)] enum Failed { Source, Lock(LockError) }
    /// # impl From<LockError> for Failed { fn from(error: LockError) -> Self { Self::Lock(error) } }
    /// # async fn charge(_: Order) -> Result<(), Failed> { Ok(()) }
    /// # struct Order { customer: u64 }
    /// async fn consume(
    ///     locks: LockRegistry,
    ///     orders: impl Stream<Item = Result<Order, Failed>>,
    /// ) -> Result<(), Failed> {
    ///     let items = orders.map(|order| {
    ///         // An error has a key of its own, and needs the lock of nobody.
    ///         let key = order.as_ref().map_or("none".to_owned(), |order| order.customer.to_string());
    ///         async { charge(order?).await }.try_with_lock(locks.obtain(key))
    ///     });
    ///     items.buffer_keyed(16).try_collect().await
    /// }
    /// # #[tokio::main(flavor = "current_thread")] async fn main() {
    /// # let orders = futures::stream::iter([Ok(Order { customer: 7 }), Err(Failed::Source)]);
    /// # let consuming = tokio::spawn(consume(LockRegistry::in_memory(), orders));
    /// # assert!(matches!(consuming.await.unwrap(), Err(Failed::Source)));
    /// # }
    /// ```
    fn buffer_keyed(self, working: usize) -> BufferKeyed<Self>
    where
        Self: Sized,
        Self::Item: LockedFuture,
    {
        assert!(working > 0, "buffer_keyed(0): no item could ever work");
        BufferKeyed::new(self, working)
    }
}

impl<S: Stream + ?Sized> StreamLockExt for S {}

/// Work that sees its lease.
impl Lock {
    /// Runs a future under the lock that needs its lease: for the fencing token, or to learn of a
    /// loss.
    ///
    /// `work` is called when the lock is held, with a view that cannot release it. Otherwise this is
    /// [`with_lock`](crate::FutureLockExt::with_lock).
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), lockstream::LockError> {
    /// # let locks = lockstream::LockRegistry::in_memory();
    /// let lock = locks.obtain("row:7");
    /// let token = lock.with_lease(async |lease| lease.token()).await?;
    /// assert!(token.get() > 0);
    /// // spawned inside, the task starts when the lock is held
    /// let sum = lock.with_lease(|_| tokio::spawn(async { 1 + 1 })).await?.unwrap();
    /// # assert_eq!(sum, 2);
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn with_lease<F, Fut>(&self, work: F) -> future::WithLease<F>
    where
        F: FnOnce(LeaseView) -> Fut,
        Fut: Future,
    {
        Guarded::begun_by(self.options_here(), work)
    }

    /// [`with_lease`](Self::with_lease) for a future of a `Result`: errors of the lock are converted
    /// by `From<LockError>`.
    #[track_caller]
    pub fn try_with_lease<F, Fut>(&self, work: F) -> future::TryWithLease<F>
    where
        F: FnOnce(LeaseView) -> Fut,
        Fut: TryFuture + Future,
        Fut::Error: From<LockError>,
    {
        let inner = self.with_lease(work);
        Try { inner }
    }

    /// [`with_lease`](Self::with_lease) for a stream. Otherwise this is
    /// [`StreamLockExt::with_lock`](crate::StreamLockExt::with_lock).
    #[track_caller]
    pub fn with_lease_stream<F, S>(&self, work: F) -> stream::WithLease<F>
    where
        F: FnOnce(LeaseView) -> S,
        S: Stream,
    {
        Guarded::begun_by(self.options_here(), work)
    }

    /// [`with_lease_stream`](Self::with_lease_stream) for a stream of `Result`s: errors of the lock
    /// are converted by `From<LockError>`.
    #[track_caller]
    pub fn try_with_lease_stream<F, S>(&self, work: F) -> stream::TryWithLease<F>
    where
        F: FnOnce(LeaseView) -> S,
        S: TryStream + Stream,
        S::Error: From<LockError>,
    {
        let inner = self.with_lease_stream(work);
        Try { inner }
    }
}
