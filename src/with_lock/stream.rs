//! The streams of this crate, by name.

use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll};

use futures::Stream;
use futures::stream::FusedStream;
use pin_project::pin_project;

use super::scoped::{Given, Scoped};
use crate::LockError;
use crate::lease::LeaseView;

pub use super::outcome::{OrSkip, Try};
pub use crate::events::Events;
pub use crate::leadership::Campaign;

/// Stream of [`with_lock`](crate::StreamLockExt::with_lock).
#[pin_project]
#[must_use = "streams do nothing unless polled"]
pub struct WithLock<S> {
    #[pin]
    pub(super) scoped: Scoped<S, ()>,
}

/// Stream of [`try_with_lock`](crate::StreamLockExt::try_with_lock).
pub type TryWithLock<S> = Try<WithLock<S>>;

impl<S> WithLock<S> {
    /// Ends empty if the lock is busy for the whole wait, which looks like an empty stream;
    /// everything else stays an error.
    pub fn or_skip(self) -> OrSkip<Self> {
        OrSkip { inner: self }
    }
}

impl<S: Stream> Stream for WithLock<S> {
    type Item = Result<S::Item, LockError>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let scoped = self.project().scoped;
        scoped.poll_next(cx, &mut None::<Given<S>>)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.scoped.size_hint()
    }
}

impl<S: Stream> FusedStream for WithLock<S> {
    fn is_terminated(&self) -> bool {
        self.scoped.is_done()
    }
}

impl<S> fmt::Debug for WithLock<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("WithLock").field(&self.scoped).finish()
    }
}

/// Stream of [`Lock::with_lease_stream`](crate::Lock::with_lease_stream).
#[pin_project]
#[must_use = "streams do nothing unless polled"]
pub struct WithLease<F, S> {
    pub(super) begin: Option<F>,
    #[pin]
    pub(super) scoped: Scoped<S, ()>,
}

/// Stream of [`Lock::try_with_lease_stream`](crate::Lock::try_with_lease_stream).
pub type TryWithLease<F, S> = Try<WithLease<F, S>>;

impl<F, S> WithLease<F, S> {
    /// Ends empty if the lock is busy for the whole wait, which looks like an empty stream;
    /// everything else stays an error.
    pub fn or_skip(self) -> OrSkip<Self> {
        OrSkip { inner: self }
    }
}

impl<F, S> Stream for WithLease<F, S>
where
    F: FnOnce(LeaseView) -> S,
    S: Stream,
{
    type Item = Result<S::Item, LockError>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = self.project();
        this.scoped.poll_next(cx, this.begin)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.scoped.size_hint()
    }
}

impl<F, S> FusedStream for WithLease<F, S>
where
    F: FnOnce(LeaseView) -> S,
    S: Stream,
{
    fn is_terminated(&self) -> bool {
        self.scoped.is_done()
    }
}

impl<F, S> fmt::Debug for WithLease<F, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("WithLease").field(&self.scoped).finish()
    }
}
