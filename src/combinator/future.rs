//! The futures that run under a lock, by name.

use super::guarded::{Given, Guarded, OfFuture};
use super::outcome::Try;

/// Future of [`with_lock`](crate::FutureLockExt::with_lock).
///
/// `Send` if the work and its output are: it keeps the value while the release runs.
pub type WithLock<F> = Guarded<Given<F>, OfFuture>;

/// Future of [`try_with_lock`](crate::FutureLockExt::try_with_lock).
pub type TryWithLock<F> = Try<WithLock<F>>;

/// Future of [`Lock::with_lease`](crate::Lock::with_lease).
///
/// `Send` if the closure, the work and its output are: it keeps the value while the release runs.
pub type WithLease<F> = Guarded<F, OfFuture>;

/// Future of [`Lock::try_with_lease`](crate::Lock::try_with_lease).
pub type TryWithLease<F> = Try<WithLease<F>>;
