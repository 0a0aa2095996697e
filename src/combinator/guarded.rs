use std::convert::Infallible;
use std::fmt;
use std::marker::PhantomData;
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
/// `B` begins the work, once the lock is held. `K` tells whether that is a future or a stream.
///
/// If the work or its value were a parameter as well, it would have to be the same type as `B` and `K` name. The compiler
/// cannot prove that while it checks whether a task is `Send`, if the type contains a boxed error or a borrow.
#[pin_project]
#[must_use = "futures and streams do nothing unless polled"]
pub struct Guarded<B: Begin, K: Kind<B::Work>> {
    begin: Option<B>,
    #[pin]
    locked_work: LockedWork<B::Work, K::Value>,
}

/// What begins the work when the lock is held.
pub trait Begin {
    /// A future or a stream.
    type Work;

    #[doc(hidden)]
    fn begin(self, lease: LeaseView) -> Self::Work;
}

impl<F, W> Begin for F
where
    F: FnOnce(LeaseView) -> W,
{
    type Work = W;

    fn begin(self, lease: LeaseView) -> W {
        self(lease)
    }
}

/// The work is there already, and nothing begins it.
#[derive(Debug)]
pub struct Given<W>(Infallible, PhantomData<fn() -> W>);

impl<W> Begin for Given<W> {
    type Work = W;

    fn begin(self, _: LeaseView) -> W {
        match self.0 {}
    }
}

/// A kind of work.
pub trait Kind<W> {
    /// What the work leaves when it has completed.
    type Value;
}

/// Work that is a future.
#[derive(Debug)]
pub struct OfFuture;

/// Work that is a stream.
#[derive(Debug)]
pub struct OfStream;

impl<W: Future> Kind<W> for OfFuture {
    type Value = W::Output;
}

impl<W> Kind<W> for OfStream {
    type Value = ();
}

impl<W, K: Kind<W>> Guarded<Given<W>, K> {
    pub(super) fn given(options: LockOptions, work: W) -> Self {
        Self {
            begin: None,
            locked_work: LockedWork::new(WorkLock::new(options), Some(work)),
        }
    }
}

impl<B: Begin, K: Kind<B::Work>> Guarded<B, K> {
    pub(super) fn begun_by(options: LockOptions, begin: B) -> Self {
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
    pub fn keep_if(mut self, succeeds: fn(&K::Value) -> bool) -> Self {
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

impl<B: Begin> Future for Guarded<B, OfFuture>
where
    B::Work: Future,
{
    type Output = Result<<B::Work as Future>::Output, LockError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        this.locked_work.poll_future(cx, this.begin)
    }
}

impl<B: Begin, K: Kind<B::Work>> FusedFuture for Guarded<B, K>
where
    Self: Future,
{
    fn is_terminated(&self) -> bool {
        self.locked_work.is_done()
    }
}

impl<B: Begin> Stream for Guarded<B, OfStream>
where
    B::Work: Stream,
{
    type Item = Result<<B::Work as Stream>::Item, LockError>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = self.project();
        this.locked_work.poll_next(cx, this.begin)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.locked_work.size_hint()
    }
}

impl<B: Begin, K: Kind<B::Work>> FusedStream for Guarded<B, K>
where
    Self: Stream,
{
    fn is_terminated(&self) -> bool {
        self.locked_work.is_done()
    }
}

impl<B: Begin, K: Kind<B::Work>> fmt::Debug for Guarded<B, K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Guarded")
            .field(&self.locked_work.work_lock)
            .finish()
    }
}
