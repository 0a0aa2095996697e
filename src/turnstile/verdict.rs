//! The verdicts that callers get. Those for waiters and those for holders of leases differ, so each has a type.

use std::sync::Arc;
use std::time::Duration;

use crate::base::clock::Moment;
use crate::base::{Holder, LossCause, StoreError, Token};
use crate::store::contract::{Occupant, Owner};

#[derive(Clone, Debug)]
pub(crate) enum Verdict {
    Waiter(WaiterVerdict),
    Lease(LeaseVerdict),
}

/// For a waiter.
#[derive(Clone, Debug)]
pub(crate) enum WaiterVerdict {
    /// The waiter has the key, if it takes it in time (W4). `needs_another_poll`: the tenure begins with this turn, may
    /// be passed on, and others wait.
    Granted {
        token: Token,
        deadline: Moment,
        needs_another_poll: bool,
    },
    /// Others have the key, or the store has failed. Told once, to those who want to know.
    Waits,
    /// The grant ended before the caller took it. The usual cause: nobody polled the caller (W4). It may queue again.
    TurnLost,
    Refused(NotGranted),
}

/// Why a waiter does not get the key.
#[derive(Clone, Debug)]
pub(crate) enum NotGranted {
    /// Others have the key: who, if that is known.
    Busy(Option<Box<Holding>>),
    /// The wait queue is full.
    QueueFull,
    /// The lease to adopt has ended, or has another owner.
    NothingToAdopt,
    /// The store could not be asked.
    Failed(StoreError),
    /// The key was won three times in a row, and each time the lease was over on arrival (D4). `round_trip`: how long
    /// that took, the last time.
    TooSlow { round_trip: Duration },
    /// The registry was shut down.
    Closed,
}

/// Who has a busy key, and for how long still.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Holding {
    /// A caller of this registry.
    Here { owner: Owner, left: Duration },
    /// The holder that the store has named last. `left`: `None` if its lease has no end.
    There {
        occupant: Arc<Occupant>,
        left: Option<Duration>,
    },
}

impl Holding {
    /// `instance`: of this registry.
    pub(crate) fn holder(&self, instance: &str) -> Holder {
        match self {
            Self::Here { owner, left } => {
                let text = format!("{instance}:{}", owner.sequence);
                Holder::new(&text, owner.mode, 0, Some(*left))
            }
            Self::There { occupant, left } => {
                Holder::new(&occupant.owner, occupant.mode, occupant.others, *left)
            }
        }
    }
}

/// For the holder of a lease.
#[derive(Clone, Debug)]
pub(crate) enum LeaseVerdict {
    /// A renewal was confirmed. `last`: the watchdog will not renew again. That verdict comes even if the
    /// deadline has not moved. A waiter that has not taken its lease yet gets it, too.
    Prolonged {
        deadline: Moment,
        last: bool,
    },
    /// A renewal got no answer, or a refusal, or was not sent. It is tried again until the deadline.
    Unrenewed(StoreError),
    /// A renewal is due and not confirmed, and two thirds of the time that the lease had left are over. Told once, until
    /// a renewal is confirmed.
    RenewalLate,
    /// The registry is being shut down. The lease is held until its work has ended, but not for long.
    Closing,
    Ended(LeaseEnd),
}

/// How a holder ends its lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EndMode {
    Release,
    /// The key stays as the waiter's `on_finish` says, unless that time is over.
    Keep,
    /// The key stays, for another registry to adopt.
    Detach,
}

/// How a lease ended.
#[derive(Clone, Debug)]
pub(crate) enum LeaseEnd {
    /// It was released, and valid until then.
    Released,
    /// It ended before the release, or the release found the key gone.
    Lost(LossCause),
    /// The registry was shut down.
    Closed,
    /// The store has not confirmed the release.
    Failed(StoreError),
}
