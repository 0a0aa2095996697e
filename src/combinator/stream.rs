//! The streams that run under a lock, by name.

use super::guarded::Guarded;
use super::outcome::Try;
use crate::handle::LeaseView;

/// Stream of [`with_lock`](crate::StreamLockExt::with_lock).
pub type WithLock<S> = WithLease<fn(LeaseView) -> S, S>;

/// Stream of [`try_with_lock`](crate::StreamLockExt::try_with_lock).
pub type TryWithLock<S> = Try<WithLock<S>>;

/// Stream of [`Lock::with_lease_stream`](crate::Lock::with_lease_stream).
pub type WithLease<F, S> = Guarded<F, S, ()>;

/// Stream of [`Lock::try_with_lease_stream`](crate::Lock::try_with_lease_stream).
pub type TryWithLease<F, S> = Try<WithLease<F, S>>;
