//! The streams of this crate, by name.

use crate::lease::LeaseView;

pub use super::guarded::Guarded;
pub use super::outcome::{OrSkip, Try};
pub use crate::events::Events;
pub use crate::leadership::Campaign;
pub use crate::scan::Scan;

/// Stream of [`with_lock`](crate::StreamLockExt::with_lock).
pub type WithLock<S> = WithLease<fn(LeaseView) -> S, S>;

/// Stream of [`try_with_lock`](crate::StreamLockExt::try_with_lock).
pub type TryWithLock<S> = Try<WithLock<S>>;

/// Stream of [`Lock::with_lease_stream`](crate::Lock::with_lease_stream).
pub type WithLease<F, S> = Guarded<F, S, ()>;

/// Stream of [`Lock::try_with_lease_stream`](crate::Lock::try_with_lease_stream).
pub type TryWithLease<F, S> = Try<WithLease<F, S>>;
