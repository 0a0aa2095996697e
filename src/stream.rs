//! The streams of this crate, by name.

pub use crate::combinator::stream::{TryWithLease, TryWithLock, WithLease, WithLock};
pub use crate::combinator::{
    BufferKeyed, Campaign, Guarded, LeadStream, LockedFuture, OrSkip, Try,
};
pub use crate::handle::scan::Scan;
pub use crate::observe::Events;
