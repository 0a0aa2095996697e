//! The futures that run under a lock, by name.

use super::guarded::Guarded;
use super::outcome::Try;
use crate::handle::LeaseView;

/// Future of [`with_lock`](crate::FutureLockExt::with_lock).
///
/// `Send` if the work and its output are: it keeps the value while the release runs.
pub type WithLock<F> = WithLease<fn(LeaseView) -> F, F>;

/// Future of [`try_with_lock`](crate::FutureLockExt::try_with_lock).
pub type TryWithLock<F> = Try<WithLock<F>>;

/// Future of [`Lock::with_lease`](crate::Lock::with_lease).
///
/// `Send` if the closure, the work and its output are: it keeps the value while the release runs.
pub type WithLease<F, Fut> = Guarded<F, Fut, <Fut as Future>::Output>;

/// Future of [`Lock::try_with_lease`](crate::Lock::try_with_lease).
pub type TryWithLease<F, Fut> = Try<WithLease<F, Fut>>;
