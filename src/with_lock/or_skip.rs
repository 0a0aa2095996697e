use std::pin::Pin;
use std::task::{Context, Poll, ready};

use futures::Stream;
use futures::future::FusedFuture;
use futures::stream::FusedStream;
use pin_project::pin_project;

use super::strm::flatten;
use super::{future, stream};
use crate::LockError;
use crate::lease::{Lease, LeaseView};

/// Future of `or_skip`: busy for the whole wait is `Ok(None)`.
///
/// Only the lock's own [`LockError::NotAcquired`] is skipped, never one that the work brought
/// from a lock inside it.
#[pin_project]
#[derive(Debug)]
#[must_use = "futures do nothing unless polled"]
pub struct OrSkipFuture<W> {
    #[pin]
    inner: W,
}

impl<W> OrSkipFuture<W> {
    pub(crate) fn new(inner: W) -> Self {
        Self { inner }
    }
}

/// Busy is nothing; other errors stay.
fn skip<T>(outcome: Result<T, LockError>) -> Result<Option<T>, LockError> {
    match outcome {
        Ok(value) => Ok(Some(value)),
        Err(error) if error.is_not_acquired() => Ok(None),
        Err(error) => Err(error),
    }
}

/// The same for work that yields a `Result` of its own.
fn try_skip<T, E: From<LockError>>(
    outcome: Result<Result<T, E>, LockError>,
) -> Result<Option<T>, E> {
    skip(outcome)?.transpose()
}

impl<F: Future> Future for OrSkipFuture<future::WithLock<F>> {
    type Output = Result<Option<F::Output>, LockError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.project().inner.poll_run(cx).map(skip)
    }
}

impl<F, Fut> Future for OrSkipFuture<future::WithLease<F, Fut>>
where
    F: FnOnce(LeaseView) -> Fut,
    Fut: Future,
{
    type Output = Result<Option<Fut::Output>, LockError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.project().inner.poll_run(cx).map(skip)
    }
}

impl<F, T, E> Future for OrSkipFuture<future::TryWithLock<F>>
where
    F: Future<Output = Result<T, E>>,
    E: From<LockError>,
{
    type Output = Result<Option<T>, E>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let inner = self.project().inner.project().inner;
        inner.poll_run(cx).map(try_skip)
    }
}

impl<F, Fut, T, E> Future for OrSkipFuture<future::TryWithLease<F, Fut>>
where
    F: FnOnce(LeaseView) -> Fut,
    Fut: Future<Output = Result<T, E>>,
    E: From<LockError>,
{
    type Output = Result<Option<T>, E>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let inner = self.project().inner.project().inner;
        inner.poll_run(cx).map(try_skip)
    }
}

impl Future for OrSkipFuture<future::AcquireLease> {
    type Output = Result<Option<Lease>, LockError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.inner.poll_skip(cx)
    }
}

impl<W: FusedFuture> FusedFuture for OrSkipFuture<W>
where
    Self: Future,
{
    fn is_terminated(&self) -> bool {
        self.inner.is_terminated()
    }
}

/// Stream of `or_skip`: busy for the whole wait ends it empty.
///
/// Only the lock's own [`LockError::NotAcquired`] is skipped, never one that the stream brought
/// from a lock inside it.
#[pin_project]
#[derive(Debug)]
#[must_use = "streams do nothing unless polled"]
pub struct OrSkipStream<W> {
    #[pin]
    inner: W,
}

impl<W> OrSkipStream<W> {
    pub(crate) fn new(inner: W) -> Self {
        Self { inner }
    }
}

/// Busy is the end; other errors stay.
fn skip_item<T>(item: Option<Result<T, LockError>>) -> Option<Result<T, LockError>> {
    item.filter(|item| !matches!(item, Err(error) if error.is_not_acquired()))
}

impl<S: Stream> Stream for OrSkipStream<stream::WithLock<S>> {
    type Item = Result<S::Item, LockError>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.project().inner.poll_next(cx).map(skip_item)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.inner.size_hint()
    }
}

impl<F, S> Stream for OrSkipStream<stream::WithLease<F, S>>
where
    F: FnOnce(LeaseView) -> S,
    S: Stream,
{
    type Item = Result<S::Item, LockError>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.project().inner.poll_next(cx).map(skip_item)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.inner.size_hint()
    }
}

impl<S, T, E> Stream for OrSkipStream<stream::TryWithLock<S>>
where
    S: Stream<Item = Result<T, E>>,
    E: From<LockError>,
{
    type Item = Result<T, E>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let inner = self.project().inner.project().inner;
        let item = ready!(inner.poll_next(cx));
        Poll::Ready(flatten(skip_item(item)))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.inner.size_hint()
    }
}

impl<F, S, T, E> Stream for OrSkipStream<stream::TryWithLease<F, S>>
where
    F: FnOnce(LeaseView) -> S,
    S: Stream<Item = Result<T, E>>,
    E: From<LockError>,
{
    type Item = Result<T, E>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let inner = self.project().inner.project().inner;
        let item = ready!(inner.poll_next(cx));
        Poll::Ready(flatten(skip_item(item)))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.inner.size_hint()
    }
}

impl<W: FusedStream> FusedStream for OrSkipStream<W>
where
    Self: Stream,
{
    fn is_terminated(&self) -> bool {
        self.inner.is_terminated()
    }
}
