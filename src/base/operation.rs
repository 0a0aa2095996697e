use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use futures::FutureExt;
use futures::future::{BoxFuture, FusedFuture};

/// A future that yields a `T`: what methods such as [`Lock::acquire`](crate::Lock::acquire),
/// [`Lock::inspect`](crate::Lock::inspect) and [`LockRegistry::shutdown`](crate::LockRegistry::shutdown) return.
#[must_use = "futures do nothing unless polled"]
pub struct Operation<T> {
    /// `None` once it is done.
    future: Option<BoxFuture<'static, T>>,
}

impl<T> Operation<T> {
    pub(crate) fn new(future: impl Future<Output = T> + Send + 'static) -> Self {
        let future = Some(future.boxed());
        Self { future }
    }
}

impl<T> Future for Operation<T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T> {
        let future = self.future.as_mut();
        let future = future.expect("an operation is not polled after it was done");
        let output = ready!(future.poll_unpin(cx));
        self.future = None;
        Poll::Ready(output)
    }
}

impl<T> FusedFuture for Operation<T> {
    fn is_terminated(&self) -> bool {
        self.future.is_none()
    }
}

impl<T> fmt::Debug for Operation<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_done = self.future.is_none();
        f.debug_struct("Operation")
            .field("is_done", &is_done)
            .finish_non_exhaustive()
    }
}
