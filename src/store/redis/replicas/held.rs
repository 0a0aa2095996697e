//! An acquisition that is held back, and what the registry is told of it.

use std::time::Duration;

use tokio::time::Instant;

use crate::settings::TTL;
use crate::store::contract::{News, OpError, Owner};
use crate::store::redis::fault::Fault;

/// How many replicas must have an acquisition, and how long they have.
#[derive(Clone, Copy, Debug)]
pub(in crate::store::redis) struct MinReplicas {
    pub(super) least: u32,
    pub(in crate::store::redis) within: Duration,
}

impl MinReplicas {
    /// `None` for no replicas: nobody is asked.
    pub(in crate::store::redis) fn new(
        least: u32,
        within: Duration,
    ) -> Result<Option<Self>, Fault> {
        // To the server no time at all is for ever.
        if !(Duration::from_millis(1)..*TTL.end()).contains(&within) {
            let reason = format!("{within:?} is not from 1 ms to less than 24 h");
            return Err(Fault::invalid("min_replicas", reason));
        }
        Ok((least > 0).then_some(Self { least, within }))
    }
}

/// An acquisition on its way to the replicas and back.
#[derive(Debug)]
pub(in crate::store::redis) struct Held {
    pub(in crate::store::redis) owner: Owner,
    /// What is told once it is confirmed.
    pub(in crate::store::redis) news: News,
    /// When it is given up, counted from when the replicas were first asked.
    pub(in crate::store::redis) until: Option<Instant>,
}

impl Held {
    /// What is told if it was not confirmed. Of a grant whose connection broke that is nothing (O3).
    pub(in crate::store::redis) fn failed(self, error: OpError) -> Option<News> {
        let error = match error {
            OpError::Unsent(error) | OpError::Refused(error) => {
                let fault = Fault::unconfirmed(&error, !error.is_retryable());
                OpError::Unconfirmed(fault.into())
            }
            other => other,
        };
        match (self.news, error) {
            (News::Replied { key, op, .. }, error) => {
                let result = Err(error);
                Some(News::Replied { key, op, result })
            }
            (News::Granted { key, grant }, OpError::Unconfirmed(error)) => {
                Some(News::Unconfirmed { key, grant, error })
            }
            _ => None,
        }
    }
}
