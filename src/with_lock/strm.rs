use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use futures::Stream;
use futures::stream::FusedStream;
use pin_project::pin_project;

use super::Hold;
use super::stream::OrSkip;
use crate::LockError;
use crate::lease::LeaseView;
use crate::plan::Plan;

/// A stream under a lock: begun with a view of the lease, or given beforehand.
#[pin_project]
pub(crate) struct Run<F, S> {
    #[pin]
    work: Option<S>,
    begin: Option<F>,
    /// The last field: what the stream's destructors do, they do under the lock.
    hold: Hold,
}

/// What begins a stream that was given beforehand: nothing.
type Given<S> = fn(LeaseView) -> S;

impl<F, S> Run<F, S>
where
    F: FnOnce(LeaseView) -> S,
    S: Stream,
{
    fn new(plan: Plan, begin: Option<F>, work: Option<S>) -> Self {
        Self {
            hold: Hold::new(plan),
            begin,
            work,
        }
    }

    fn poll_next(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<S::Item, LockError>>> {
        let mut this = self.project();
        if this.hold.is_done() {
            return Poll::Ready(None);
        }
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
                    return Poll::Ready(Some(Err(error)));
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
                return Poll::Ready(Some(Err(loss)));
            }
            let work = this.work.as_mut().as_pin_mut();
            let work = work.expect("a stream begins with the lease and ends with the release");
            if let Some(item) = ready!(work.poll_next(cx)) {
                return Poll::Ready(Some(Ok(item)));
            }
            this.work.set(None);
            drop(scope);
            // A lease that ran out during the last poll was no lease for what that poll did.
            if let Some(loss) = this.hold.poll_loss(cx) {
                this.hold.end();
                return Poll::Ready(Some(Err(loss)));
            }
            this.hold.release();
        }
        let released = ready!(this.hold.poll_release(cx));
        Poll::Ready(released.err().map(Err))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        if self.hold.is_done() {
            return (0, Some(0));
        }
        let most = match &self.work {
            Some(work) => work.size_hint().1,
            None if self.hold.is_releasing() => Some(0),
            None => None,
        };
        // One more for what may become of the lock.
        (0, most.and_then(|most| most.checked_add(1)))
    }
}

impl<F, S> fmt::Debug for Run<F, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.hold.fmt(f)
    }
}

/// Stream of [`with_lock`](crate::StreamLockExt::with_lock).
#[pin_project]
#[must_use = "streams do nothing unless polled"]
pub struct WithLock<S> {
    #[pin]
    run: Run<Given<S>, S>,
}

impl<S: Stream> WithLock<S> {
    pub(crate) fn new(plan: Plan, work: S) -> Self {
        Self {
            run: Run::new(plan, None, Some(work)),
        }
    }

    /// Ends empty if the lock is busy for the whole wait, which looks like an empty stream;
    /// everything else stays an error.
    pub fn or_skip(self) -> OrSkip<Self> {
        OrSkip::new(self)
    }
}

impl<S: Stream> Stream for WithLock<S> {
    type Item = Result<S::Item, LockError>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.project().run.poll_next(cx)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.run.size_hint()
    }
}

/// Stream of [`Lock::with_lease_stream`](crate::Lock::with_lease_stream).
#[pin_project]
#[must_use = "streams do nothing unless polled"]
pub struct WithLease<F, S> {
    #[pin]
    run: Run<F, S>,
}

impl<F, S> WithLease<F, S>
where
    F: FnOnce(LeaseView) -> S,
    S: Stream,
{
    pub(crate) fn new(plan: Plan, work: F) -> Self {
        Self {
            run: Run::new(plan, Some(work), None),
        }
    }

    /// Ends empty if the lock is busy for the whole wait, which looks like an empty stream;
    /// everything else stays an error.
    pub fn or_skip(self) -> OrSkip<Self> {
        OrSkip::new(self)
    }
}

impl<F, S> Stream for WithLease<F, S>
where
    F: FnOnce(LeaseView) -> S,
    S: Stream,
{
    type Item = Result<S::Item, LockError>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.project().run.poll_next(cx)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.run.size_hint()
    }
}

/// Stream of [`try_with_lock`](crate::StreamLockExt::try_with_lock).
#[pin_project]
#[must_use = "streams do nothing unless polled"]
pub struct TryWithLock<S> {
    #[pin]
    pub(super) inner: WithLock<S>,
}

impl<S: Stream> TryWithLock<S> {
    pub(crate) fn new(inner: WithLock<S>) -> Self {
        Self { inner }
    }

    /// Ends empty if the lock is busy for the whole wait, which looks like an empty stream;
    /// everything else stays an error.
    pub fn or_skip(self) -> OrSkip<Self> {
        OrSkip::new(self)
    }
}

impl<S, T, E> Stream for TryWithLock<S>
where
    S: Stream<Item = Result<T, E>>,
    E: From<LockError>,
{
    type Item = Result<T, E>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.project().inner.poll_next(cx).map(flatten)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.inner.size_hint()
    }
}

/// Stream of [`Lock::try_with_lease_stream`](crate::Lock::try_with_lease_stream).
#[pin_project]
#[must_use = "streams do nothing unless polled"]
pub struct TryWithLease<F, S> {
    #[pin]
    pub(super) inner: WithLease<F, S>,
}

impl<F, S> TryWithLease<F, S> {
    pub(crate) fn new(inner: WithLease<F, S>) -> Self {
        Self { inner }
    }

    /// Ends empty if the lock is busy for the whole wait, which looks like an empty stream;
    /// everything else stays an error.
    pub fn or_skip(self) -> OrSkip<Self> {
        OrSkip::new(self)
    }
}

impl<F, S, T, E> Stream for TryWithLease<F, S>
where
    F: FnOnce(LeaseView) -> S,
    S: Stream<Item = Result<T, E>>,
    E: From<LockError>,
{
    type Item = Result<T, E>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.project().inner.poll_next(cx).map(flatten)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.inner.size_hint()
    }
}

/// The stream's own errors and the lock's, as one.
pub(super) fn flatten<T, E: From<LockError>>(
    item: Option<Result<Result<T, E>, LockError>>,
) -> Option<Result<T, E>> {
    item.map(|item| item.unwrap_or_else(|error| Err(error.into())))
}

impl<S: Stream> FusedStream for WithLock<S> {
    fn is_terminated(&self) -> bool {
        self.run.hold.is_done()
    }
}

impl<F, S> FusedStream for WithLease<F, S>
where
    F: FnOnce(LeaseView) -> S,
    S: Stream,
{
    fn is_terminated(&self) -> bool {
        self.run.hold.is_done()
    }
}

impl<S, T, E> FusedStream for TryWithLock<S>
where
    S: Stream<Item = Result<T, E>>,
    E: From<LockError>,
{
    fn is_terminated(&self) -> bool {
        self.inner.is_terminated()
    }
}

impl<F, S, T, E> FusedStream for TryWithLease<F, S>
where
    F: FnOnce(LeaseView) -> S,
    S: Stream<Item = Result<T, E>>,
    E: From<LockError>,
{
    fn is_terminated(&self) -> bool {
        self.inner.is_terminated()
    }
}

impl<S> fmt::Debug for WithLock<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("WithLock").field(&self.run).finish()
    }
}

impl<F, S> fmt::Debug for WithLease<F, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("WithLease").field(&self.run).finish()
    }
}

impl<S> fmt::Debug for TryWithLock<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("TryWithLock").field(&self.inner.run).finish()
    }
}

impl<F, S> fmt::Debug for TryWithLease<F, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("TryWithLease")
            .field(&self.inner.run)
            .finish()
    }
}
