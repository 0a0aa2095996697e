use std::time::Duration;

use crate::settings::TTL;
use crate::store::redis::fault::Fault;

/// How many replicas must have an acquisition, and how long they have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::store::redis) struct Replicas {
    pub(super) least: u32,
    pub(super) within: Duration,
}

impl Replicas {
    /// `None` for no replicas: nobody is asked.
    pub(in crate::store::redis) fn new(
        least: u32,
        within: Duration,
    ) -> Result<Option<Self>, Fault> {
        // To the server no time at all is for ever.
        let longest = *TTL.end();
        if !(Duration::from_millis(1)..longest).contains(&within) {
            let reason = format!(
                "it gives replicas {within:?}, and must give them from 1 ms to less than 24 h"
            );
            return Err(Fault::Replicas { reason });
        }
        Ok((least > 0).then_some(Self { least, within }))
    }

    /// What an acquisition must last longer than.
    pub(in crate::store::redis) fn within(&self) -> Duration {
        self.within
    }
}
