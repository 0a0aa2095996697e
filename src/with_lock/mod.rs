//! How a future or a stream runs under a lock.
//!
//! | file | contents |
//! |---|---|
//! | `ext.rs` | the methods that put work under a lock |
//! | `fut.rs`, `strm.rs` | the futures and streams that they return |
//! | `or_skip.rs` | what the `try_` forms and `or_skip` make of an outcome |
//! | `scoped.rs` | the poll loop under all of them |
//! | `hold.rs` | the lock that the loop acquires, watches and releases |

mod ext;
mod fut;
mod hold;
mod or_skip;
mod scoped;
mod strm;

pub use self::ext::{FutureLockExt, StreamLockExt};
pub(crate) use self::hold::Hold;
pub(crate) use self::or_skip::skip;
pub(crate) use self::scoped::Scoped;

/// The futures of this crate, by name.
pub mod future {
    pub use super::fut::{TryWithLease, TryWithLock, WithLease, WithLock};
    pub use super::or_skip::{OrSkip, Try};
    pub use crate::acquire::{AcquireLease, TryLease};
    pub use crate::detached::Adopt;
    pub use crate::extend::Extend;
    pub use crate::handle::{Acquire, Release};
    pub use crate::inspect::Inspect;
    pub use crate::leadership::{Lead, Resign};
    pub use crate::lease::{LeaseRelease, Lost};
    #[cfg(feature = "redis")]
    pub use crate::registry::Connect;
    pub use crate::registry::Shutdown;
    #[cfg(feature = "redis")]
    pub use crate::store::ConnectStore;
}

/// The streams of this crate, by name.
pub mod stream {
    pub use super::or_skip::{OrSkip, Try};
    pub use super::strm::{TryWithLease, TryWithLock, WithLease, WithLock};
    pub use crate::events::Events;
    pub use crate::leadership::Campaign;
}
