use std::sync::Arc;
use std::time::Duration;

use crate::events::LockEvent;
use crate::turnstile::Verdict;
use crate::{StoreError, Token};

/// How far a caller has come.
#[derive(Clone, Debug)]
pub(crate) enum Phase {
    /// In line.
    Waiting,
    /// The key is its, once it looks.
    Granted { token: Token },
    /// It did not look in time; it may arrive again.
    TurnLost,
    /// It does not get the key: busy, queue full, failed, or closed.
    Refused(Verdict),
    /// It gave up, whatever the turnstile still says.
    Left,
    /// It holds a lease.
    Held { token: Token },
    /// It holds a lease of a registry that is being shut down, and is to end its work.
    Closing { token: Token },
    /// Its lease ended under it: lost, or closed.
    Ended { token: Token, end: End },
    /// It gave the lease back, and waits for the store's word.
    Finishing { token: Token },
    /// The store's word on that.
    Finished { token: Token, end: End },
}

/// What its holder does with a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EndMode {
    Release,
    /// The key stays until its ttl is over.
    Keep,
    /// So that another may adopt it.
    Detach,
}

/// How a lease ended.
#[derive(Clone, Debug)]
pub(crate) enum End {
    Released,
    Lost,
    Closed,
    Failed(StoreError),
}

impl End {
    pub(super) fn event(&self, key: Arc<str>, token: Token, held: Duration) -> LockEvent {
        match self {
            Self::Released => LockEvent::Released { key, token, held },
            Self::Lost => LockEvent::Lost { key, token, held },
            Self::Closed => LockEvent::Closed { key, token, held },
            Self::Failed(_) => LockEvent::Unreleased { key, token, held },
        }
    }
}

impl From<Verdict> for End {
    fn from(verdict: Verdict) -> Self {
        match verdict {
            Verdict::Released => Self::Released,
            Verdict::Closed => Self::Closed,
            Verdict::Failed(error) => Self::Failed(error),
            _ => Self::Lost,
        }
    }
}
