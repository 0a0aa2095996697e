//! How a future or a stream runs under a lock.
//!
//! | file | contents |
//! |---|---|
//! | `ext.rs` | the methods that put work under a lock |
//! | `future.rs`, `stream.rs` | the names of the futures and streams that they return |
//! | `guarded.rs` | those futures and streams |
//! | `outcome.rs` | how the `try_` forms and `or_skip` map an outcome |
//! | `locked_work.rs` | the poll loop under all of them |
//! | `work_lock.rs` | the lock that the loop acquires, checks and releases |
//! | `keyed.rs` | a stream whose items have locks of their own: when its source is asked |
//! | `keyed/items.rs` | those items: which may ask for its lock, which may work |
//! | `locked_future.rs` | what may be such an item |
//! | `ready_queue.rs` | which of many futures have woken |
//! | `leadership.rs` | what one of many processes does: a future that leads, and a stream of who does |
//! | `lead_stream.rs` | a stream that runs while its process leads |

mod ext;
pub(crate) mod future;
mod guarded;
mod keyed;
mod lead_stream;
mod leadership;
mod locked_future;
mod locked_work;
mod outcome;
mod ready_queue;
pub(crate) mod stream;
mod work_lock;

pub use self::ext::{FutureLockExt, StreamLockExt};
pub use self::guarded::Guarded;
pub use self::keyed::BufferKeyed;
pub use self::lead_stream::LeadStream;
pub use self::leadership::{Campaign, Lead, Leadership, Resign};
pub use self::locked_future::LockedFuture;
pub(crate) use self::locked_work::LockedWork;
pub use self::outcome::{OrSkip, Try};
pub(crate) use self::work_lock::WorkLock;
