//! The streams that run under a lock, by name.

use super::guarded::{Given, Guarded, OfStream};
use super::outcome::Try;

/// Stream of [`with_lock`](crate::StreamLockExt::with_lock).
pub type WithLock<S> = Guarded<Given<S>, OfStream>;

/// Stream of [`try_with_lock`](crate::StreamLockExt::try_with_lock).
pub type TryWithLock<S> = Try<WithLock<S>>;

/// Stream of [`Lock::with_lease_stream`](crate::Lock::with_lease_stream).
pub type WithLease<F> = Guarded<F, OfStream>;

/// Stream of [`Lock::try_with_lease_stream`](crate::Lock::try_with_lease_stream).
pub type TryWithLease<F> = Try<WithLease<F>>;
