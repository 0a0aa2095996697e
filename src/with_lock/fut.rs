use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use futures::future::FusedFuture;
use pin_project::pin_project;

use super::Hold;
use super::future::OrSkip;
use crate::LockError;
use crate::lease::LeaseView;
use crate::plan::Plan;

/// Work under a lock: begun with a view of the lease, or given beforehand.
#[pin_project]
pub(crate) struct Run<F, Fut: Future> {
    #[pin]
    work: Option<Fut>,
    begin: Option<F>,
    /// The value, kept back while the lock is released.
    value: Option<Fut::Output>,
    /// The last field: what the work's destructors do, they do under the lock.
    hold: Hold,
}

/// What begins work that was given beforehand: nothing.
type Given<Fut> = fn(LeaseView) -> Fut;

impl<F, Fut> Run<F, Fut>
where
    F: FnOnce(LeaseView) -> Fut,
    Fut: Future,
{
    fn new(plan: Plan, begin: Option<F>, work: Option<Fut>) -> Self {
        Self {
            hold: Hold::new(plan),
            begin,
            work,
            value: None,
        }
    }

    fn poll(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        name: &str,
    ) -> Poll<Result<Fut::Output, LockError>> {
        let mut this = self.project();
        assert!(!this.hold.is_done(), "`{name}` polled after it was done");
        if this.hold.is_acquiring() {
            match ready!(this.hold.poll_acquire(cx)) {
                Ok(view) => {
                    if let Some(begin) = this.begin.take() {
                        let _scope = this.hold.scope();
                        this.work.set(Some(begin(view)));
                    }
                }
                Err(error) => {
                    *this.begin = None;
                    this.work.set(None);
                    return Poll::Ready(Err(error));
                }
            }
        }
        if !this.hold.is_releasing() {
            let loss = this.hold.poll_loss(cx);
            let scope = this.hold.scope();
            if let Some(loss) = loss {
                this.work.set(None);
                drop(scope);
                this.hold.end();
                return Poll::Ready(Err(loss));
            }
            let work = this.work.as_mut().as_pin_mut();
            let work = work.expect("work begins with the lease and ends with the release");
            let value = ready!(work.poll(cx));
            this.work.set(None);
            drop(scope);
            // A lease that ran out during the last poll was no lease for what that poll did.
            if let Some(loss) = this.hold.poll_loss(cx) {
                this.hold.end();
                return Poll::Ready(Err(loss));
            }
            *this.value = Some(value);
            this.hold.release();
        }
        let released = ready!(this.hold.poll_release(cx));
        let value = this.value.take().expect("kept back until the release");
        Poll::Ready(released.map(|()| value))
    }
}

impl<F, Fut: Future> fmt::Debug for Run<F, Fut> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.hold.fmt(f)
    }
}

/// Future of [`with_lock`](crate::FutureLockExt::with_lock).
///
/// `Send` if the work and its output are: it keeps the value while the release runs.
#[pin_project]
#[must_use = "futures do nothing unless polled"]
pub struct WithLock<F: Future> {
    #[pin]
    run: Run<Given<F>, F>,
}

impl<F: Future> WithLock<F> {
    pub(crate) fn new(plan: Plan, work: F) -> Self {
        Self {
            run: Run::new(plan, None, Some(work)),
        }
    }

    /// Turns "busy for the whole wait" into `Ok(None)`; everything else stays an error. The full
    /// wait is waited: set [`wait(Duration::ZERO)`](crate::Lock::wait) to skip at once.
    pub fn or_skip(self) -> OrSkip<Self> {
        OrSkip::new(self)
    }

    pub(super) fn poll_run(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Result<F::Output, LockError>> {
        self.project().run.poll(cx, "WithLock")
    }
}

impl<F: Future> Future for WithLock<F> {
    type Output = Result<F::Output, LockError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.poll_run(cx)
    }
}

/// Future of [`Lock::with_lease`](crate::Lock::with_lease).
#[pin_project]
#[must_use = "futures do nothing unless polled"]
pub struct WithLease<F, Fut: Future> {
    #[pin]
    run: Run<F, Fut>,
}

impl<F, Fut> WithLease<F, Fut>
where
    F: FnOnce(LeaseView) -> Fut,
    Fut: Future,
{
    pub(crate) fn new(plan: Plan, work: F) -> Self {
        Self {
            run: Run::new(plan, Some(work), None),
        }
    }

    /// Turns "busy for the whole wait" into `Ok(None)`; everything else stays an error.
    pub fn or_skip(self) -> OrSkip<Self> {
        OrSkip::new(self)
    }

    pub(super) fn poll_run(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Fut::Output, LockError>> {
        self.project().run.poll(cx, "WithLease")
    }
}

impl<F, Fut> Future for WithLease<F, Fut>
where
    F: FnOnce(LeaseView) -> Fut,
    Fut: Future,
{
    type Output = Result<Fut::Output, LockError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.poll_run(cx)
    }
}

/// Future of [`try_with_lock`](crate::FutureLockExt::try_with_lock).
#[pin_project]
#[must_use = "futures do nothing unless polled"]
pub struct TryWithLock<F: Future> {
    #[pin]
    pub(super) inner: WithLock<F>,
}

impl<F: Future> TryWithLock<F> {
    pub(crate) fn new(inner: WithLock<F>) -> Self {
        Self { inner }
    }

    /// Turns "busy for the whole wait" into `Ok(None)`; everything else stays an error.
    pub fn or_skip(self) -> OrSkip<Self> {
        OrSkip::new(self)
    }
}

impl<F, T, E> Future for TryWithLock<F>
where
    F: Future<Output = Result<T, E>>,
    E: From<LockError>,
{
    type Output = Result<T, E>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let outcome = ready!(self.project().inner.poll_run(cx));
        Poll::Ready(outcome.unwrap_or_else(|error| Err(error.into())))
    }
}

/// Future of [`Lock::try_with_lease`](crate::Lock::try_with_lease).
#[pin_project]
#[must_use = "futures do nothing unless polled"]
pub struct TryWithLease<F, Fut: Future> {
    #[pin]
    pub(super) inner: WithLease<F, Fut>,
}

impl<F, Fut: Future> TryWithLease<F, Fut> {
    pub(crate) fn new(inner: WithLease<F, Fut>) -> Self {
        Self { inner }
    }

    /// Turns "busy for the whole wait" into `Ok(None)`; everything else stays an error.
    pub fn or_skip(self) -> OrSkip<Self> {
        OrSkip::new(self)
    }
}

impl<F, Fut, T, E> Future for TryWithLease<F, Fut>
where
    F: FnOnce(LeaseView) -> Fut,
    Fut: Future<Output = Result<T, E>>,
    E: From<LockError>,
{
    type Output = Result<T, E>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let outcome = ready!(self.project().inner.poll_run(cx));
        Poll::Ready(outcome.unwrap_or_else(|error| Err(error.into())))
    }
}

impl<F: Future> FusedFuture for WithLock<F> {
    fn is_terminated(&self) -> bool {
        self.run.hold.is_done()
    }
}

impl<F, Fut> FusedFuture for WithLease<F, Fut>
where
    F: FnOnce(LeaseView) -> Fut,
    Fut: Future,
{
    fn is_terminated(&self) -> bool {
        self.run.hold.is_done()
    }
}

impl<F, T, E> FusedFuture for TryWithLock<F>
where
    F: Future<Output = Result<T, E>>,
    E: From<LockError>,
{
    fn is_terminated(&self) -> bool {
        self.inner.is_terminated()
    }
}

impl<F, Fut, T, E> FusedFuture for TryWithLease<F, Fut>
where
    F: FnOnce(LeaseView) -> Fut,
    Fut: Future<Output = Result<T, E>>,
    E: From<LockError>,
{
    fn is_terminated(&self) -> bool {
        self.inner.is_terminated()
    }
}

impl<F: Future> fmt::Debug for WithLock<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("WithLock").field(&self.run).finish()
    }
}

impl<F, Fut: Future> fmt::Debug for WithLease<F, Fut> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("WithLease").field(&self.run).finish()
    }
}

impl<F: Future> fmt::Debug for TryWithLock<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("TryWithLock").field(&self.inner.run).finish()
    }
}

impl<F, Fut: Future> fmt::Debug for TryWithLease<F, Fut> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("TryWithLease")
            .field(&self.inner.run)
            .finish()
    }
}
