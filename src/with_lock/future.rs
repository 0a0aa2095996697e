//! The futures of this crate, by name.

use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll};

use futures::future::FusedFuture;
use pin_project::pin_project;

use super::scoped::{Given, Scoped};
use crate::LockError;
use crate::lease::LeaseView;

pub use super::outcome::{OrSkip, Try};
pub use crate::acquire::{AcquireLease, TryLease};
pub use crate::detached::Adopt;
pub use crate::extend::Extend;
pub use crate::inspect::Inspect;
pub use crate::leadership::{Lead, Resign};
pub use crate::lease::{LeaseRelease, Lost};
pub use crate::manual::{Acquire, Release};
#[cfg(feature = "redis")]
pub use crate::registry::Connect;
pub use crate::registry::{Drain, Shutdown};
#[cfg(feature = "redis")]
pub use crate::store::ConnectStore;

/// Future of [`with_lock`](crate::FutureLockExt::with_lock).
///
/// `Send` if the work and its output are: it keeps the value while the release runs.
#[pin_project]
#[must_use = "futures do nothing unless polled"]
pub struct WithLock<F: Future> {
    #[pin]
    pub(super) scoped: Scoped<F, F::Output>,
}

/// Future of [`try_with_lock`](crate::FutureLockExt::try_with_lock).
pub type TryWithLock<F> = Try<WithLock<F>>;

impl<F: Future> WithLock<F> {
    /// Turns "busy for the whole wait" into `Ok(None)`; everything else stays an error. The full
    /// wait is waited: set [`wait(Duration::ZERO)`](crate::Lock::wait) to skip at once.
    pub fn or_skip(self) -> OrSkip<Self> {
        OrSkip { inner: self }
    }
}

impl<F: Future> Future for WithLock<F> {
    type Output = Result<F::Output, LockError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let scoped = self.project().scoped;
        scoped.poll_future(cx, &mut None::<Given<F>>)
    }
}

impl<F: Future> FusedFuture for WithLock<F> {
    fn is_terminated(&self) -> bool {
        self.scoped.is_done()
    }
}

impl<F: Future> fmt::Debug for WithLock<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("WithLock").field(&self.scoped).finish()
    }
}

/// Future of [`Lock::with_lease`](crate::Lock::with_lease).
///
/// `Send` if the closure, the work and its output are: it keeps the value while the release runs.
#[pin_project]
#[must_use = "futures do nothing unless polled"]
pub struct WithLease<F, Fut: Future> {
    pub(super) begin: Option<F>,
    #[pin]
    pub(super) scoped: Scoped<Fut, Fut::Output>,
}

/// Future of [`Lock::try_with_lease`](crate::Lock::try_with_lease).
pub type TryWithLease<F, Fut> = Try<WithLease<F, Fut>>;

impl<F, Fut: Future> WithLease<F, Fut> {
    /// Turns "busy for the whole wait" into `Ok(None)`; everything else stays an error.
    pub fn or_skip(self) -> OrSkip<Self> {
        OrSkip { inner: self }
    }
}

impl<F, Fut> Future for WithLease<F, Fut>
where
    F: FnOnce(LeaseView) -> Fut,
    Fut: Future,
{
    type Output = Result<Fut::Output, LockError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        this.scoped.poll_future(cx, this.begin)
    }
}

impl<F, Fut> FusedFuture for WithLease<F, Fut>
where
    F: FnOnce(LeaseView) -> Fut,
    Fut: Future,
{
    fn is_terminated(&self) -> bool {
        self.scoped.is_done()
    }
}

impl<F, Fut: Future> fmt::Debug for WithLease<F, Fut> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("WithLease").field(&self.scoped).finish()
    }
}
