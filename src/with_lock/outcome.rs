use std::pin::Pin;
use std::task::{Context, Poll, ready};

use futures::Stream;
use futures::future::FusedFuture;
use futures::stream::FusedStream;
use pin_project::pin_project;

use super::Guarded;
use crate::LockError;
use crate::acquire::AcquireLease;

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
    pub fn or_skip(self) -> OrSkip<Self> {
        OrSkip { inner: self }
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

/// Futures and streams whose errors are the lock's own. Not [`Try`]: its errors may be the work's.
pub trait OnlyLockErrors {}

impl<F, W, V> OnlyLockErrors for Guarded<F, W, V> {}
impl OnlyLockErrors for AcquireLease {}

fn flatten<T, E: From<LockError>>(outcome: Result<Result<T, E>, LockError>) -> Result<T, E> {
    outcome?
}

pub(crate) fn skip<T>(outcome: Result<T, LockError>) -> Result<Option<T>, LockError> {
    match outcome {
        Err(error) if error.is_not_acquired() => Ok(None),
        outcome => outcome.map(Some),
    }
}

/// The same for the items of a stream.
fn skip_item<T>(item: Option<Result<T, LockError>>) -> Option<Result<T, LockError>> {
    skip(item?).transpose()
}

impl<W, T, E> Future for Try<W>
where
    W: Future<Output = Result<Result<T, E>, LockError>>,
    E: From<LockError>,
{
    type Output = Result<T, E>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.project().inner.poll(cx).map(flatten)
    }
}

impl<W, T> Future for OrSkip<W>
where
    W: OnlyLockErrors + Future<Output = Result<T, LockError>>,
{
    type Output = Result<Option<T>, LockError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.project().inner.poll(cx).map(skip)
    }
}

impl<W, T, E> Future for OrSkip<Try<W>>
where
    W: Future<Output = Result<Result<T, E>, LockError>>,
    E: From<LockError>,
{
    type Output = Result<Option<T>, E>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let outcome = ready!(self.project().inner.project().inner.poll(cx));
        Poll::Ready(skip(outcome)?.transpose())
    }
}

impl<W, T, E> Stream for Try<W>
where
    W: Stream<Item = Result<Result<T, E>, LockError>>,
    E: From<LockError>,
{
    type Item = Result<T, E>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let item = ready!(self.project().inner.poll_next(cx));
        Poll::Ready(item.map(flatten))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.inner.size_hint()
    }
}

impl<W, T> Stream for OrSkip<W>
where
    W: OnlyLockErrors + Stream<Item = Result<T, LockError>>,
{
    type Item = Result<T, LockError>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.project().inner.poll_next(cx).map(skip_item)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.inner.size_hint()
    }
}

impl<W, T, E> Stream for OrSkip<Try<W>>
where
    W: Stream<Item = Result<Result<T, E>, LockError>>,
    E: From<LockError>,
{
    type Item = Result<T, E>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let item = ready!(self.project().inner.project().inner.poll_next(cx));
        Poll::Ready(skip_item(item).map(flatten))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.inner.inner.size_hint()
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
