use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll};

use futures::Stream;
use futures::future::FusedFuture;
use futures::stream::FusedStream;
use pin_project::pin_project;

use super::WorkLock;
use super::locked_work::LockedWork;
use super::outcome::OrSkip;
use crate::base::LockError;
use crate::handle::LeaseView;
use crate::handle::options::LockOptions;

/// A future or stream that runs while its lock is held: see
/// [`with_lock`](crate::FutureLockExt::with_lock) and [`with_lease`](crate::Lock::with_lease).
///
/// `F` begins the work `W`, once the lock is held. `V` is the output of a future, and `()` for a
/// stream.
#[pin_project]
#[must_use = "futures and streams do nothing unless polled"]
pub struct Guarded<F, W, V> {
    begin: Option<F>,
    #[pin]
    locked_work: LockedWork<W, V>,
}

impl<W, V> Guarded<fn(LeaseView) -> W, W, V> {
    /// The work is there already, and nothing begins it.
    pub(super) fn given(options: LockOptions, work: W) -> Self {
        Self {
            begin: None,
            locked_work: LockedWork::new(WorkLock::new(options), Some(work)),
        }
    }
}

impl<F, W, V> Guarded<F, W, V> {
    pub(super) fn begun_by(options: LockOptions, begin: F) -> Self {
        Self {
            begin: Some(begin),
            locked_work: LockedWork::new(WorkLock::new(options), None),
        }
    }

    pub(super) fn work_lock_mut(self: Pin<&mut Self>) -> &mut WorkLock {
        self.project().locked_work.project().work_lock
    }

    /// The lock's [`on_finish`](crate::Lock::on_finish) is only for work that succeeds: with
    /// [`OnFinish::KeepFor`](crate::OnFinish::KeepFor), a job that is done once a period, and again if it failed.
    ///
    /// `succeeds` looks at the output of the work: a function, or a closure that captures nothing. If it returns false,
    /// the key is released. So it is if the work is dropped or panics, and if the lease is lost or ended by a shutdown.
    /// A stream succeeds when it is polled to its end: `keep_if(|()| true)`.
    ///
    /// ```
    /// use std::time::Duration;
    /// use lockstream::{FutureLockExt, LockRegistry, OnFinish};
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), lockstream::LockError> {
    /// async fn report(disk: Result<(), &str>) -> Result<(), &str> { disk }
    /// let locks = LockRegistry::in_memory();
    /// let hourly = locks.obtain("report").wait(Duration::ZERO);
    /// let hourly = hourly.on_finish(OnFinish::KeepFor(Duration::from_secs(59 * 60)));
    ///
    /// let failed = report(Err("full")).with_lock(&hourly).keep_if(Result::is_ok).await?;
    /// assert!(failed.is_err());
    /// let done = report(Ok(())).with_lock(&hourly).keep_if(Result::is_ok).await?;
    /// assert!(done.is_ok());
    /// let again = report(Ok(())).with_lock(&hourly).keep_if(Result::is_ok).or_skip().await?;
    /// assert!(again.is_none());
    /// # Ok(()) }
    /// ```
    pub fn keep_if(mut self, succeeds: fn(&V) -> bool) -> Self {
        self.locked_work.keep_if(succeeds);
        self
    }

    /// A lock that was busy for the whole wait is no error: a future yields `Ok(None)` then, and a
    /// stream ends empty. Everything else stays an error. The full wait is waited: set
    /// [`wait(Duration::ZERO)`](crate::Lock::wait) to skip at once. [`keep_if`](Self::keep_if) goes before it.
    ///
    /// Who holds the lock is not told then, and a stream that was skipped looks like an empty one: where that matters,
    /// match [`LockError::NotAcquired`](crate::LockError::NotAcquired) instead.
    pub fn or_skip(self) -> OrSkip<Self> {
        OrSkip { inner: self }
    }
}

impl<F, W> Future for Guarded<F, W, W::Output>
where
    F: FnOnce(LeaseView) -> W,
    W: Future,
{
    type Output = Result<W::Output, LockError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        this.locked_work.poll_future(cx, this.begin)
    }
}

impl<F, W, V> FusedFuture for Guarded<F, W, V>
where
    Self: Future,
{
    fn is_terminated(&self) -> bool {
        self.locked_work.is_done()
    }
}

impl<F, W> Stream for Guarded<F, W, ()>
where
    F: FnOnce(LeaseView) -> W,
    W: Stream,
{
    type Item = Result<W::Item, LockError>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = self.project();
        this.locked_work.poll_next(cx, this.begin)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.locked_work.size_hint()
    }
}

impl<F, W, V> FusedStream for Guarded<F, W, V>
where
    Self: Stream,
{
    fn is_terminated(&self) -> bool {
        self.locked_work.is_done()
    }
}

impl<F, W, V> fmt::Debug for Guarded<F, W, V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Guarded")
            .field(&self.locked_work.work_lock)
            .finish()
    }
}
