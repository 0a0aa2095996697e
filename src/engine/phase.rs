use std::time::Duration;

use crate::base::{LossCause, Token};
use crate::turnstile::{LeaseEnd, NotGranted};

/// How far a caller has come.
#[derive(Clone, Debug)]
pub(crate) enum Phase {
    /// Waits in the queue.
    Waiting,
    /// It has the key as soon as it polls.
    Granted { token: Token },
    /// It did not poll in time. It may arrive again.
    TurnLost,
    /// It does not get the key.
    Refused(NotGranted),
    /// It gave up. Verdicts are ignored from then on.
    Left,
    /// It holds a lease.
    Held { token: Token },
    /// It holds a lease, and is to end its work: the registry is being shut down.
    Closing { token: Token },
    /// Its lease ended before it released it: lost, or closed.
    Ended { token: Token, end: LeaseEnd },
    /// It released the lease, which it had `held` for so long, and waits for the store's answer.
    Finishing { token: Token, held: Duration },
    /// The store has answered.
    Finished { token: Token, end: LeaseEnd },
}

impl Phase {
    /// Why its lease was lost, if it was.
    pub(super) fn loss_cause(&self) -> Option<LossCause> {
        match self {
            Self::Ended {
                end: LeaseEnd::Lost(cause),
                ..
            }
            | Self::Finished {
                end: LeaseEnd::Lost(cause),
                ..
            } => Some(*cause),
            _ => None,
        }
    }
}
