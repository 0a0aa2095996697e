//! What the code that `#[with_lock]` writes calls. No part of the public face: it changes with the
//! macro, whose exact version this crate asks for.

use std::borrow::Borrow;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use futures::Stream;
use futures::future::FusedFuture;
use futures::stream::FusedStream;
use pin_project::pin_project;

use crate::registry::obtain_installed;
use crate::{Lock, LockError, LockRegistry};

/// What has locks: found by method look-up, so that a `LazyLock`, an `Arc` and a field do, too.
///
/// Its method has a name of its own, so that the macro's import of it is never one too many.
pub trait Obtain {
    /// [`LockRegistry::obtain`].
    fn obtain_lock(&self, key: impl AsRef<str>) -> Lock;
}

impl<R: Borrow<LockRegistry> + ?Sized> Obtain for R {
    fn obtain_lock(&self, key: impl AsRef<str>) -> Lock {
        self.borrow().obtain(key)
    }
}

/// A lock of the installed registry.
pub fn obtain(key: impl AsRef<str>) -> Lock {
    obtain_installed(key.as_ref())
}

/// What a function may return, or its stream yield, whose work runs under a lock.
#[diagnostic::on_unimplemented(
    message = "`#[with_lock]` needs a `Result` that can tell what went wrong with the lock, and `{Self}` is none",
    label = "not a `Result`",
    note = "make it `Result<_, lockstream::LockError>`, or a `Result` with an error of your own that is `From<lockstream::LockError>`"
)]
pub trait Outcome {
    /// The outcome of work that has no lock.
    fn refused(error: LockError) -> Self;
}

impl<T, E: From<LockError>> Outcome for Result<T, E> {
    fn refused(error: LockError) -> Self {
        Err(error.into())
    }
}

/// [`Outcome::refused`]. That it is asked for once, where the macro knows the type's place in the
/// signature, makes a type that is none one error, and there.
pub fn refusal<R: Outcome>() -> fn(LockError) -> R {
    R::refused
}

/// A future or stream under a lock that yields what the work yields, errors of the lock included.
#[pin_project]
#[derive(Debug)]
#[must_use = "futures and streams do nothing unless polled"]
pub struct Locked<W, R> {
    #[pin]
    work: W,
    refused: fn(LockError) -> R,
}

/// Work that runs under its lock already, and what the lock's errors become.
pub fn locked<W, R>(work: W, refused: fn(LockError) -> R) -> Locked<W, R> {
    Locked { work, refused }
}

impl<W, R> Future for Locked<W, R>
where
    W: Future<Output = Result<R, LockError>>,
{
    type Output = R;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<R> {
        let this = self.project();
        let outcome = ready!(this.work.poll(cx));
        Poll::Ready(outcome.unwrap_or_else(this.refused))
    }
}

impl<W, R> FusedFuture for Locked<W, R>
where
    W: FusedFuture<Output = Result<R, LockError>>,
{
    fn is_terminated(&self) -> bool {
        self.work.is_terminated()
    }
}

impl<W, R> Stream for Locked<W, R>
where
    W: Stream<Item = Result<R, LockError>>,
{
    type Item = R;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<R>> {
        let this = self.project();
        let item = ready!(this.work.poll_next(cx));
        Poll::Ready(item.map(|item| item.unwrap_or_else(this.refused)))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.work.size_hint()
    }
}

impl<W, R> FusedStream for Locked<W, R>
where
    W: FusedStream<Item = Result<R, LockError>>,
{
    fn is_terminated(&self) -> bool {
        self.work.is_terminated()
    }
}
