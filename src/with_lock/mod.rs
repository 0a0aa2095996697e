//! How a future or a stream runs under a lock.

mod ext;
mod fut;
mod hold;
mod or_skip;
mod strm;

pub use self::ext::{FutureLockExt, StreamLockExt};
pub(crate) use self::hold::Hold;

/// The futures of this crate, by name.
pub mod future {
    pub use super::fut::{TryWithLease, TryWithLock, WithLease, WithLock};
    pub use super::or_skip::OrSkipFuture as OrSkip;
    pub use crate::acquire::{Acquire, AcquireLease, TryLease};
    pub use crate::detached::Adopt;
    pub use crate::extend::Extend;
    pub use crate::handle::Release;
    pub use crate::inspect::Inspect;
    pub use crate::leadership::{Lead, Resign};
    pub use crate::lease::{LeaseRelease, Lost};
    #[cfg(feature = "redis")]
    pub use crate::registry::Connect;
    pub use crate::registry::{Drain, Shutdown};
    #[cfg(feature = "redis")]
    pub use crate::store::ConnectStore;
}

/// The streams of this crate, by name.
pub mod stream {
    pub use super::or_skip::OrSkipStream as OrSkip;
    pub use super::strm::{TryWithLease, TryWithLock, WithLease, WithLock};
    pub use crate::events::Events;
    pub use crate::leadership::Campaign;
}
