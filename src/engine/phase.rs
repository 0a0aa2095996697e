use crate::Token;
use crate::turnstile::{LeaseEnd, Refusal};

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
    Refused(Refusal),
    /// It gave up, whatever the turnstile still says.
    Left,
    /// It holds a lease.
    Held { token: Token },
    /// It holds a lease of a registry that is being shut down, and is to end its work.
    Closing { token: Token },
    /// Its lease ended under it: lost, or closed.
    Ended { token: Token, end: LeaseEnd },
    /// It gave the lease back, and waits for the store's word.
    Finishing { token: Token },
    /// The store's word on that.
    Finished { token: Token, end: LeaseEnd },
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
