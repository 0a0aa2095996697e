//! For how long a node that was started again has no vote for anybody new.

use std::time::Duration;

#[derive(Clone, Copy, Debug)]
pub(super) enum Quarantine {
    /// For this long, the registry's ttl, or for the ttl of the lock, where that is longer: who else
    /// uses the lock mostly has it for as long.
    AtLeast(Duration),
    /// For so long, or not at all.
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
