//! The futures of this crate, by name.

use crate::lease::LeaseView;

pub use super::guarded::Guarded;
pub use super::outcome::{OrSkip, Try};
pub use crate::acquire::{AcquireLease, TryLease};
pub use crate::detached::Adopt;
pub use crate::extend::Extend;
pub use crate::force::ForceRelease;
pub use crate::inspect::Inspect;
pub use crate::leadership::{Lead, Resign};
pub use crate::lease::{LeaseRelease, Lost};
pub use crate::manual::{Acquire, ExtendHeld, Release};
pub use crate::operation::Operation;
#[cfg(any(feature = "redis", feature = "postgres"))]
pub use crate::registry::Connect;
pub use crate::registry::{CheckStore, Drain, Ping, Shutdown};
#[cfg(feature = "redis")]
pub use crate::store::ConnectStore;
pub use crate::verify_lease::Verify;

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
