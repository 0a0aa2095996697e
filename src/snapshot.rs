use std::sync::Arc;

use tokio::time::Instant;

use crate::Token;

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
    /// The lease on it, if this registry has it. One that is being released is none any more.
    pub held: Option<LeaseSnapshot>,
    /// The callers of this registry that wait for it, in order of arrival; those that
    /// [adopt](crate::LockRegistry::adopt) come before the others.
    pub waiting: Vec<WaiterSnapshot>,
}

/// A lease in a [`Snapshot`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LeaseSnapshot {
    /// The caller that holds it, by the number that [events](crate::LockEvent) give it.
    pub waiter: u64,
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
    /// Since when it waits: its first poll.
    pub since: Instant,
}
