use std::pin::Pin;
use std::task::{Context, Poll, ready};

use futures::Stream;
use futures::future::FusedFuture;
use futures::stream::FusedStream;
use pin_project::pin_project;

use super::guarded::{Begin, Guarded, Kind};
use crate::base::LockError;
use crate::handle::acquire::AcquireLease;

/// Future or stream of the `try_` forms: the errors of the work and those of the lock as one.
///
/// See [`FutureLockExt::try_with_lock`](crate::FutureLockExt::try_with_lock).
#[pin_project]
#[derive(Debug)]
#[must_use = "futures and streams do nothing unless polled"]
pub struct Try<W> {
    #[pin]
    pub(super) inner: W,
}

impl<W> Try<W> {
    /// A future: turns "busy for the whole wait" into `Ok(None)`. A stream: ends empty then. Every
    /// other error stays one.
    pub fn or_skip(self) -> Try<OrSkip<W>> {
        let inner = OrSkip { inner: self.inner };
        Try { inner }
    }
}

impl<B: Begin, K: Kind<B::Work>> Try<Guarded<B, K>> {
    /// The lock's `on_finish` is only for work that succeeds; see [`Guarded::keep_if`].
    pub fn keep_if(self, succeeds: fn(&K::Value) -> bool) -> Self {
        let inner = self.inner.keep_if(succeeds);
        Self { inner }
    }
}

/// Future or stream of `or_skip`: a lock that was busy for the whole wait is `Ok(None)`, or the end
/// of the stream.
///
/// Only the lock's own [`LockError::NotAcquired`] is skipped, never one that the work brought from
/// a lock inside it.
#[pin_project]
#[derive(Debug)]
#[must_use = "futures and streams do nothing unless polled"]
pub struct OrSkip<W> {
    #[pin]
    pub(crate) inner: W,
}

impl AcquireLease {
    /// Turns "busy for the whole wait" into `Ok(None)`; everything else stays an error.
    pub fn or_skip(self) -> OrSkip<Self> {
        OrSkip { inner: self }
    }
}

/// What work under a lock yields, for [`Try`].
pub trait Flatten: Sized {
    /// The same with the errors of the lock among those of the work.
    type Flat;

    /// Makes a lock's error one of the work's.
    fn flatten(outcome: Result<Self, LockError>) -> Self::Flat;
}

impl<T, E: From<LockError>> Flatten for Result<T, E> {
    type Flat = Self;

    fn flatten(outcome: Result<Self, LockError>) -> Self {
        outcome?
    }
}

impl<T, E: From<LockError>> Flatten for Option<Result<T, E>> {
    type Flat = Result<Option<T>, E>;

    fn flatten(outcome: Result<Self, LockError>) -> Self::Flat {
        outcome?.transpose()
    }
}

impl<W, R: Flatten> Future for Try<W>
where
    W: Future<Output = Result<R, LockError>>,
{
    type Output = R::Flat;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.project().inner.poll(cx).map(R::flatten)
    }
}

impl<W, R: Flatten> Stream for Try<W>
where
    W: Stream<Item = Result<R, LockError>>,
{
    type Item = R::Flat;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let item = ready!(self.project().inner.poll_next(cx));
        Poll::Ready(item.map(R::flatten))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.inner.size_hint()
    }
}

impl<W, T> Future for OrSkip<W>
where
    W: Future<Output = Result<T, LockError>>,
{
    type Output = Result<Option<T>, LockError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.project().inner.poll(cx).map(LockError::skip)
    }
}

impl<W, T> Stream for OrSkip<W>
where
    W: Stream<Item = Result<T, LockError>>,
{
    type Item = Result<T, LockError>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let item = ready!(self.project().inner.poll_next(cx));
        Poll::Ready(item.and_then(|item| LockError::skip(item).transpose()))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.inner.size_hint()
    }
}

impl<W: FusedFuture> FusedFuture for Try<W>
where
    Self: Future,
{
    fn is_terminated(&self) -> bool {
        self.inner.is_terminated()
    }
}

impl<W: FusedStream> FusedStream for Try<W>
where
    Self: Stream,
{
    fn is_terminated(&self) -> bool {
        self.inner.is_terminated()
    }
}

impl<W: FusedFuture> FusedFuture for OrSkip<W>
where
    Self: Future,
{
    fn is_terminated(&self) -> bool {
        self.inner.is_terminated()
    }
}

impl<W: FusedStream> FusedStream for OrSkip<W>
where
    Self: Stream,
{
    fn is_terminated(&self) -> bool {
        self.inner.is_terminated()
    }
}
