//! The interface between a registry and a store.
//!
//! A store is asked by [`Session::submit`], one op a key at a time (rule O2; renewals excepted),
//! and answers each op exactly once by [`StoreEvents::on_event`]. An op that it drops without an answer is
//! noted in the registry's [`LostOps`]. It decides nothing: who waits, when to ask again and what an
//! answer is worth is the turnstile's business.

use std::any::Any;
use std::fmt;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;

pub(crate) use super::submitted::{LostOps, SubmittedOp, lost_error};
use crate::StoreError;

/// The store's own time, in microseconds since the Unix epoch.
pub(crate) type ServerTime = u64;

/// One ticket and the tenure it leads to: the sequence in `<instance>:<sequence>`, whose instance
/// is the session's. Never reused (rule O1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Owner(pub u64);

/// One operation of the store. Each is idempotent for its owner, so it may be sent again when its
/// answer was lost.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Op {
    /// Take the lock if it is free and nobody is before us in the queue.
    Attempt { owner: Owner, ttl: Duration },
    /// The same, else enter the queue. `score` is the place that a first answer named (K2).
    Enter {
        owner: Owner,
        ttl: Duration,
        score: Option<u64>,
    },
    /// Take the lock as an attempt does, else be told once when it is freed: a [`StoreEvent::Freed`]. It
    /// gives no turn: of those that listen the first is told, and asks like anybody else. A store
    /// that cannot tell takes it for an attempt.
    Listen { owner: Owner, ttl: Duration },
    /// Leave the queue, and release the lock if it was granted meanwhile. `ttl` is the ticket's: with it
    /// the op names the whole ticket (G3).
    Withdraw { owner: Owner, ttl: Duration },
    /// Stop listening, and release the lock if the last [`Op::Listen`] took it.
    Unlisten { owner: Owner },
    /// Give the lock to the first live ticket, else free it.
    Release { owner: Owner },
    /// Release, and enter the end of the queue under a new owner.
    Yield {
        old: Owner,
        new: Owner,
        ttl: Duration,
    },
    /// Make the lock last `ttl` from now, if that is longer than what it has. `within`, counted from
    /// when the session takes the op, is how long the lease still lasts: a renewal that cannot be
    /// answered by then is not sent (G4).
    Renew {
        owner: Owner,
        ttl: Duration,
        within: Duration,
    },
    /// Take the lock over from the owner that left it: `from` is the whole value of its key,
    /// perhaps another registry's. Whoever stands in the queue stays there.
    Adopt {
        owner: Owner,
        from: Arc<str>,
        ttl: Duration,
    },
    /// Make the next epoch of this store greater than `epoch`, which another store of a quorum made,
    /// if the lock is the owner's. `age`: whether the answer is to name the store's age.
    Raise { owner: Owner, epoch: u64, age: bool },
}

impl Op {
    /// Whose op it is; of a yield, the old owner.
    pub(crate) fn owner(&self) -> Owner {
        match *self {
            Self::Attempt { owner, .. }
            | Self::Enter { owner, .. }
            | Self::Listen { owner, .. }
            | Self::Withdraw { owner, .. }
            | Self::Unlisten { owner }
            | Self::Release { owner }
            | Self::Yield { old: owner, .. }
            | Self::Renew { owner, .. }
            | Self::Adopt { owner, .. }
            | Self::Raise { owner, .. } => owner,
        }
    }
}

/// What the store did about an op.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// To attempt, enter, listen, yield and adopt: the lock is the (new) owner's for its ttl, counted from
    /// this very command (S3), under a fresh epoch from the fence.
    Won { epoch: u64 },
    /// To attempt, enter, listen and yield: another has the lock, for `left` unless it is prolonged
    /// (`None`: it has no ttl). `score` is the place of our ticket, or of who listens, if there is
    /// one.
    Busy {
        left: Option<Duration>,
        score: Option<u64>,
    },
    /// To yield and adopt: the lock was not the old owner's, so nothing was written. To adopt it says
    /// that it is not the new owner's either.
    NotOld,
    /// To release and withdraw: done. `held`: the lock was this owner's until now.
    Gone { held: bool },
    /// To renew: the lock is the owner's for the ttl, counted from this command, or longer.
    Renewed,
    /// To raise: done. `age`: for how long at least the store has forgotten nothing, if that was
    /// asked for and can be told.
    Raised { age: Option<Duration> },
    /// To renew and raise: the lock is another's, or nobody's.
    Lost,
}

/// An outcome, and the store's time when it came about; after a release perhaps an earlier one, the
/// last that it told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    pub at: ServerTime,
    pub outcome: Outcome,
}

/// Why there is no outcome.
#[derive(Clone, Debug)]
pub enum OpError {
    /// The connection broke, or no answer came in time: the op may have been done or not.
    Unknown(StoreError),
    /// There was no connection to send it on: it was not done.
    Unsent(StoreError),
    /// The store answered that it would not do it: it was not done.
    Refused(StoreError),
    /// A renewal was not sent, since its answer could not have come in time. The connection is well.
    TooLate(StoreError),
    /// It gave us the lock, which does not count, since too few of those who have to know of it do. The
    /// lock is, or was, the owner's: it is to be given back, and the owner retired.
    Unconfirmed(StoreError),
}

/// What becomes of an op.
pub(crate) type OpResult = Result<Answer, OpError>;

impl OpError {
    pub fn store_error(&self) -> &StoreError {
        match self {
            Self::Unknown(error)
            | Self::Unsent(error)
            | Self::Refused(error)
            | Self::TooLate(error)
            | Self::Unconfirmed(error) => error,
        }
    }
}

/// The store gave a free lock to one of our tickets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grant {
    pub owner: Owner,
    pub ttl: Duration,
    pub epoch: u64,
    pub at: ServerTime,
}

/// What a session reports to the registry that opened it.
#[derive(Debug)]
pub enum StoreEvent {
    /// The one answer to an op that was submitted.
    Replied {
        submitted: SubmittedOp,
        result: OpResult,
    },
    /// One of our tickets got the lock.
    Granted { key: Arc<str>, grant: Grant },
    /// The same, but it does not count, as with [`OpError::Unconfirmed`].
    Unconfirmed {
        key: Arc<str>,
        grant: Grant,
        error: StoreError,
    },
    /// A lock was freed that one of our owners listened for. It may be another's again.
    Freed { key: Arc<str> },
    /// A new connection stands, and what the store knew of our tickets for the keys in `scope` may be
    /// gone: their leases are renewed and their tickets entered again (O4).
    Up {
        scope: KeyScope,
        /// Whether grants for these keys can reach us; else nobody must stand in their queues (W5).
        queue: bool,
        /// Whether no part of the store is known to be away any more.
        complete: bool,
    },
    /// A connection is gone, or could not be made. Told after the ops that it took along. An `Up`
    /// follows for each key in `scope` that was in use.
    Down { scope: KeyScope, error: StoreError },
}

/// The keys that an event is about.
#[derive(Clone)]
pub enum KeyScope {
    /// All keys.
    All,
    /// The keys for which this is true.
    Keys(Arc<dyn Fn(&str) -> bool + Send + Sync>),
}

impl KeyScope {
    pub fn contains(&self, key: &str) -> bool {
        match self {
            Self::All => true,
            Self::Keys(contains) => contains(key),
        }
    }
}

impl fmt::Debug for KeyScope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::All => f.write_str("All"),
            Self::Keys(_) => f.debug_tuple("Keys").finish_non_exhaustive(),
        }
    }
}

impl StoreEvent {
    /// The whole store is there.
    pub(crate) fn up(queue: bool) -> Self {
        Self::Up {
            scope: KeyScope::All,
            queue,
            complete: true,
        }
    }

    /// The whole store is away.
    pub(crate) fn down(error: StoreError) -> Self {
        let scope = KeyScope::All;
        Self::Down { scope, error }
    }

    /// Whether it speaks of one key alone.
    pub(crate) fn is_of_a_key(&self) -> bool {
        matches!(
            self,
            Self::Replied { .. }
                | Self::Granted { .. }
                | Self::Unconfirmed { .. }
                | Self::Freed { .. }
        )
    }
}

/// The registry, as its session sees it.
pub trait StoreEvents: Send + Sync {
    /// Handles events in this order, such as the answers of one call. May be called from any thread, with
    /// no lock held that [`Session::submit`] takes.
    fn on_events(&self, events: Vec<StoreEvent>);

    /// The same for one event.
    fn on_event(&self, event: StoreEvent) {
        self.on_events(vec![event]);
    }

    /// Whether a lease is held, or a caller waits, for any key in `scope`: then the store keeps its
    /// connections for these keys open. May be slow: called about once a minute.
    fn uses(&self, scope: &KeyScope) -> bool;

    /// Whether a ticket for the key may stand in its queue, or be entered soon: then its grants must
    /// reach us.
    fn waits(&self, key: &str) -> bool;

    /// A task of the session has panicked: what it knew is lost, and the registry closes.
    fn failed(&self, panicked: &(dyn Any + Send));
}

/// Runs a task of a session. If it panics, the registry closes.
pub(crate) async fn run_task(listener: Weak<dyn StoreEvents>, task: impl Future<Output = ()>) {
    if let Err(panicked) = AssertUnwindSafe(task).catch_unwind().await
        && let Some(listener) = listener.upgrade()
    {
        listener.failed(&*panicked);
    }
}

/// Who opens a session.
#[derive(Clone)]
#[allow(
    missing_debug_implementations,
    reason = "whom it tells is not for printing"
)]
pub struct SessionConfig {
    /// Before every name in the store.
    pub prefix: Arc<str>,
    /// The registry's id: random bits, after its name and `~` if it has one.
    pub instance: Arc<str>,
    /// How long the registry's locks last unless they say otherwise.
    pub ttl: Duration,
    /// How long the oldest unanswered op may take before the connection is given up.
    pub response_timeout: Duration,
    /// The registry, which gets the events.
    pub listener: Weak<dyn StoreEvents>,
}

/// What a lock looks like in the store.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KeyStatus {
    /// The value of the lock key: an owner as text, or what a foreign lock put there.
    pub owner: Option<String>,
    /// How long it lasts; `None` if it is free or has no ttl.
    pub left: Option<Duration>,
    /// How many tickets are in the queue.
    pub tickets: u64,
}

/// One registry's session with a store. Dropping it ends its connection and its tasks.
pub trait Session: Send + Sync {
    /// Starts the session's tasks on the caller's runtime if they are needed and do not run, perhaps
    /// because the runtime that they ran on has gone. Called at every arrival, and now and then while
    /// anything is waited for, so it must cost next to nothing. Does nothing on a thread without a
    /// runtime, and shortens no pause between two attempts to connect (G1).
    fn start(&self);

    /// Takes an op. Its answer comes as [`StoreEvent::Replied`], also when the connection breaks; it may
    /// come before this returns. Ops of one key are done in the order in which they were taken.
    fn submit(&self, submitted: SubmittedOp);

    /// Which server the connection that stands leads to, or the last that did: two sessions that say
    /// the same are at the same server, by whatever name it is called. Known before [`StoreEvent::Up`] is
    /// told; `None` if it cannot be known, or is not one server.
    fn identity(&self) -> Option<Arc<str>> {
        None
    }

    /// Looks at a lock without touching it.
    fn inspect(&self, key: Arc<str>) -> BoxFuture<'static, Result<KeyStatus, StoreError>>;
}
