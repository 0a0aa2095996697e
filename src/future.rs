//! The futures of this crate, by name.

pub use crate::combinator::future::{TryWithLease, TryWithLock, WithLease, WithLock};
pub use crate::combinator::{Guarded, Lead, OrSkip, Resign, Try};
pub use crate::handle::acquire::{AcquireLease, LeaseOnce};
pub use crate::handle::detached::Adopt;
pub use crate::handle::extend::Extend;
pub use crate::handle::force::ForceRelease;
pub use crate::handle::inspect::Inspect;
pub use crate::handle::lease::{LeaseRelease, Lost};
pub use crate::handle::manual::{Acquire, ExtendHeld, Release};
#[cfg(any(feature = "redis", feature = "postgres"))]
pub use crate::handle::registry::Connect;
pub use crate::handle::registry::{CheckStore, Drain, Ping, Shutdown};
pub use crate::handle::verify_lease::Verify;
#[cfg(feature = "postgres")]
pub use crate::store::postgres::{ConnectPostgres, Migrate};
#[cfg(feature = "redis")]
pub use crate::store::redis::ConnectRedis;
