//! How long a node that has restarted gives no vote to a new owner.

use std::time::Duration;

#[derive(Clone, Copy, Debug)]
pub(super) enum Quarantine {
    /// The larger of the registry's ttl and the lock's ttl. Other users of a lock usually have the same ttl.
    AtLeast(Duration),
    /// For this long; `None` turns it off.
    Fixed(Option<Duration>),
}

impl Quarantine {
    /// For a lock of this ttl.
    pub(super) fn time(self, ttl: Duration) -> Option<Duration> {
        match self {
            Self::AtLeast(least) => Some(least.max(ttl)),
            Self::Fixed(time) => time,
        }
    }
}
