//! What a registry tells of itself: events, metrics, and what it holds at a moment.

pub(crate) mod events;
#[cfg(feature = "metrics")]
pub(crate) mod metrics;
pub(crate) mod snapshot;

pub use self::events::{Events, LockEvent};
pub use self::snapshot::{KeySnapshot, LeaseSnapshot, Snapshot, WaiterSnapshot};
