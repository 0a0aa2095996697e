//! How a future or a stream runs under a lock.
//!
//! | file | contents |
//! |---|---|
//! | `ext.rs` | the methods that put work under a lock |
//! | `future.rs`, `stream.rs` | the names of the futures and streams that they return |
//! | `guarded.rs` | those futures and streams |
//! | `outcome.rs` | how the `try_` forms and `or_skip` map an outcome |
//! | `scoped.rs` | the poll loop under all of them |
//! | `scope.rs` | the lock that the loop acquires, checks and releases |
//! | `leadership.rs` | what one of many processes does: a future that leads, and a stream of who does |

mod ext;
pub(crate) mod future;
mod guarded;
mod leadership;
mod outcome;
mod scope;
mod scoped;
pub(crate) mod stream;

pub use self::ext::{FutureLockExt, StreamLockExt};
pub use self::guarded::Guarded;
pub use self::leadership::{Campaign, Lead, Leadership, Resign};
pub use self::outcome::{OrSkip, Try};
pub(crate) use self::scope::Scope;
pub(crate) use self::scoped::Scoped;
