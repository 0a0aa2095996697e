use std::sync::Arc;

use tokio::time::Instant;

use crate::base::{Mode, Token};

/// What is held and waited for in one registry at one moment; see
/// [`LockRegistry::snapshot`](crate::LockRegistry::snapshot).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Snapshot {
    /// The keys that are held or waited for, in alphabetical order.
    pub keys: Vec<KeySnapshot>,
}

/// One key in a [`Snapshot`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct KeySnapshot {
    /// The name of what is locked.
    pub key: Arc<str>,
    /// The leases on it that this registry has: one, or several shared ones. One that is being released is none any
    /// more.
    pub held: Vec<LeaseSnapshot>,
    /// The callers of this registry that wait for it. Those that [adopt](crate::LockRegistry::adopt) come first, then the
    /// exclusive ones, then the shared ones, each in order of arrival.
    pub waiting: Vec<WaiterSnapshot>,
}

/// A lease in a [`Snapshot`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LeaseSnapshot {
    /// The caller that holds it, by the number that [events](crate::LockEvent) give it.
    pub waiter: u64,
    /// What it excludes.
    pub mode: Mode,
    /// Its fencing token.
    pub token: Token,
    /// Since when it is held.
    pub since: Instant,
    /// Until when it is proved, unless it is renewed.
    pub deadline: Instant,
}

/// A caller that waits, in a [`Snapshot`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct WaiterSnapshot {
    /// Which caller, by the number that [events](crate::LockEvent) give it.
    pub waiter: u64,
    /// What it would exclude.
    pub mode: Mode,
    /// Since when it waits: its first poll.
    pub since: Instant,
}
