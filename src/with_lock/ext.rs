use futures::{Stream, TryFuture, TryStream};

use super::or_skip::Try;
use super::scoped::Scoped;
use super::{future, stream};
use crate::into_lock::IntoLock;
use crate::lease::LeaseView;
use crate::{Lock, LockError};

/// Runs futures under a lock.
pub trait FutureLockExt: Future {
    /// Runs this future under the lock, which is held exactly as long as it runs.
    ///
    /// The lock is acquired at the first poll, waiting as long as its `wait` says. The future is
    /// polled only while the lease is valid: that is checked before each poll, and once more when
    /// it completes. Completion waits until the release is confirmed (for one response time-out at
    /// most); a drop, at whatever await, releases in the background.
    ///
    /// Pass a [`Lock`](crate::Lock) from [`obtain`](crate::LockRegistry::obtain), a reference to
    /// one (which is a caller of its own), `(&registry, key)`, or a bare key of the
    /// [installed](crate::LockRegistry::install) registry.
    ///
    /// # Errors
    ///
    /// [`LockError::NotAcquired`] if others had the lock for the whole wait: the future was never
    /// polled then. [`LockError::Lost`] if the lease was lost while it ran: it was dropped at once
    /// ([`OnLost::RunOn`](crate::OnLost) lets it run on). [`LockError::Closed`] at a shutdown,
    /// [`LockError::QueueFull`], [`LockError::Store`], and what is wrong with the key, the ttl or
    /// the settings. If the store cannot be told of the release, the value is delivered all the
    /// same.
    ///
    /// # Cancel safety
    ///
    /// Dropped while it waits, it gives up its place in line; dropped while the future runs, the
    /// future is dropped and the lock released in the background.
    ///
    /// # Races
    ///
    /// A future that completes in the very poll in which the lease runs out has lost: the error
    /// wins over the value.
    ///
    /// # Hot futures
    ///
    /// `tokio::spawn(work()).with_lock(lock)` runs before it is locked, and dropping a
    /// `JoinHandle` stops nothing. Spawn inside: `lock.with_lease(|_| tokio::spawn(work()))`.
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
    /// // two keys at once: the outermost is taken first, so sort them
    /// let both = charge(7)
    ///     .with_lock((&locks, "account:b"))
    ///     .try_with_lock((&locks, "account:a"))
    ///     .await?;
    /// # assert_eq!(both, 7);
    /// // bounds waiting and work together
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
        let scoped = Scoped::given(lock.into_lock().into_plan(), self);
        future::WithLock { scoped }
    }

    /// [`with_lock`](Self::with_lock) for a future that yields a `Result`: lock errors become its
    /// own by `From<LockError>`, so that there is one `?`.
    ///
    /// For errors that have no `From<LockError>`, use `with_lock` and `.await??`, or convert
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
    /// Runs this stream under one lease, held from the first poll to the stream's end: for the
    /// whole stream, not for its first item.
    ///
    /// Back-pressure is the stream's own: one item asked for, one item polled. The lease's validity
    /// is checked before each poll; an error of the lock is the last item. The end is yielded when
    /// the release is confirmed (for one response time-out at most). A stream that is dropped
    /// half-way releases in the background; one that is kept but not polled holds its lease until
    /// that runs out.
    ///
    /// # Errors
    ///
    /// Those of [`FutureLockExt::with_lock`], as the last item.
    ///
    /// # Cancel safety
    ///
    /// That of [`FutureLockExt::with_lock`]; between two polls nothing is lost.
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
        let scoped = Scoped::given(lock.into_lock().into_plan(), self);
        stream::WithLock { scoped }
    }

    /// [`with_lock`](Self::with_lock) for a stream of `Result`s: lock errors become its own by
    /// `From<LockError>`. The stream's errors are items like any other: they do not end it.
    #[track_caller]
    fn try_with_lock(self, lock: impl IntoLock) -> stream::TryWithLock<Self>
    where
        Self: TryStream + Sized,
        Self::Error: From<LockError>,
    {
        let inner = StreamLockExt::with_lock(self, lock);
        Try { inner }
    }
}

impl<S: Stream + ?Sized> StreamLockExt for S {}

/// Work that is begun with a view of its lease.
impl Lock {
    /// Runs work under the lock that wants to see its lease: the fencing token, the loss.
    ///
    /// `work` is called once the lock is held, with a view that cannot release it. See
    /// [`with_lock`](crate::FutureLockExt::with_lock) for what happens when.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), lockstream::LockError> {
    /// # let locks = lockstream::LockRegistry::in_memory();
    /// let lock = locks.obtain("row:7");
    /// let token = lock.with_lease(async |lease| lease.token()).await?;
    /// assert!(token > 0);
    /// // hot work: spawn it inside, so that it starts when the lock is held
    /// let sum = lock.with_lease(|_| tokio::spawn(async { 1 + 1 })).await?.unwrap();
    /// # assert_eq!(sum, 2);
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn with_lease<F, Fut>(&self, work: F) -> future::WithLease<F, Fut>
    where
        F: FnOnce(LeaseView) -> Fut,
        Fut: Future,
    {
        future::WithLease {
            begin: Some(work),
            scoped: Scoped::begun(self.plan_asked_here()),
        }
    }

    /// [`with_lease`](Self::with_lease) for work that yields a `Result`: lock errors become the
    /// work's own by `From<LockError>`.
    #[track_caller]
    pub fn try_with_lease<F, Fut>(&self, work: F) -> future::TryWithLease<F, Fut>
    where
        F: FnOnce(LeaseView) -> Fut,
        Fut: TryFuture + Future,
        Fut::Error: From<LockError>,
    {
        let inner = self.with_lease(work);
        Try { inner }
    }

    /// Runs a stream under the lock that wants to see its lease; see
    /// [`StreamLockExt::with_lock`](crate::StreamLockExt::with_lock).
    #[track_caller]
    pub fn with_lease_stream<F, S>(&self, work: F) -> stream::WithLease<F, S>
    where
        F: FnOnce(LeaseView) -> S,
        S: Stream,
    {
        stream::WithLease {
            begin: Some(work),
            scoped: Scoped::begun(self.plan_asked_here()),
        }
    }

    /// [`with_lease_stream`](Self::with_lease_stream) for a stream of `Result`s: lock errors
    /// become the stream's own by `From<LockError>`.
    #[track_caller]
    pub fn try_with_lease_stream<F, S>(&self, work: F) -> stream::TryWithLease<F, S>
    where
        F: FnOnce(LeaseView) -> S,
        S: TryStream + Stream,
        S::Error: From<LockError>,
    {
        let inner = self.with_lease_stream(work);
        Try { inner }
    }
}
