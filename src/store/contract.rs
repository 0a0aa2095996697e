//! The interface between a registry and a store.
//!
//! A registry sends operations (ops) with [`Session::submit`], one at a time for each key (rule O2), renewals
//! excepted. The store answers each op exactly once by [`StoreEvents::on_event`]. An op that is dropped without an
//! answer is noted in the registry's [`DroppedOps`]. A store decides only who is next in its queue.
//! The turnstile decides who waits, when to ask again and what an answer is worth.
//!
//! A store must:
//!
//! - answer each op once, and run the ops of one key in the order in which they were submitted; renewals may go first;
//! - make each op idempotent for its owner;
//! - give the lock for its ttl with a new, greater epoch at each win (S3, F1), and for at least that long at a renewal;
//! - if it has a queue, keep the place of a ticket (K2), skip tickets of dead registries (S2), and grant the lock to the
//!   first;
//! - at the end of a lease whose key is kept, make the key nobody's for the time that is named (M8);
//! - drop attempts that come too late to be of use (O5), and undo nothing that others own;
//! - report its clock in each answer (D2), if it sends grants;
//! - name who has the lock in each answer that it is busy, as far as it has looked anyway (G8);
//! - send `Down` after the answers to the ops that were lost with a connection, and `Up` once for each later connection,
//!   with the server's identity known before (O4).

use std::any::Any;
use std::fmt;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures::future::BoxFuture;
use futures::stream::BoxStream;
use futures::{FutureExt, StreamExt, stream};
use tokio::runtime::Handle;

pub(crate) use super::submitted::{DroppedOps, SubmittedOp, dropped_error};
pub(crate) use crate::base::Mode;
use crate::base::{Check, StoreError};
use crate::roaming::Tasks;
use crate::roaming::time::timeout;

/// The store's own time, in microseconds since the Unix epoch.
pub(crate) type ServerTime = u64;

/// Identifies one ticket, and the tenure that follows from it. The store writes it as `<instance>:<sequence>`. A registry
/// never uses a sequence twice (O1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Owner {
    pub sequence: u64,
    pub mode: Mode,
}

impl Owner {
    pub const fn exclusive(sequence: u64) -> Self {
        let mode = Mode::Exclusive;
        Self { sequence, mode }
    }
}

/// An operation of the store. Each is idempotent for its owner, so it may be sent again if its answer was lost.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Op {
    /// Take the lock if it is free and the queue is empty.
    Attempt { owner: Owner, ttl: Duration },
    /// Take the lock as an attempt does, or else enter the queue. `score` is the place in the first answer (K2).
    Enter {
        owner: Owner,
        ttl: Duration,
        score: Option<u64>,
    },
    /// Take the lock as an attempt does, or else subscribe to its release: one [`StoreEvent::Freed`] follows. A notice
    /// is not a grant: the notified owner must ask for the lock. A store that cannot notify treats it as an attempt.
    Listen { owner: Owner, ttl: Duration },
    /// Leave the queue, and release the lock if it was granted meanwhile. `ttl` is the ticket's, so that the op names
    /// the whole ticket (G3).
    Withdraw { owner: Owner, ttl: Duration },
    /// Unsubscribe, and release the lock if the last [`Op::Listen`] took it.
    Unlisten { owner: Owner },
    /// Give the lock to the first live ticket, or else free it.
    Release { owner: Owner },
    /// The lease is over, and the lock stays locked for `left` from now, whatever its ttl was (M8). Its owner is then
    /// another one, with [`KEPT`](crate::base::holder::KEPT): so nobody renews or releases it, and the same op a second time changes nothing. The
    /// registry of the first ticket is told to ask how long the lock lasts ([`StoreEvent::Freed`]).
    Keep { owner: Owner, left: Duration },
    /// Release, and enter the end of the queue under a new owner.
    Yield {
        old: Owner,
        new: Owner,
        ttl: Duration,
    },
    /// Extend the lock to `ttl` from now, unless it lasts longer already. `within`, counted from when the session
    /// takes the op, is how long the lease still lasts: a renewal that cannot be answered by then is not sent (G4).
    Renew {
        owner: Owner,
        ttl: Duration,
        within: Duration,
    },
    /// Take over the lock from the owner that left it, which has it in the mode of `owner`. `from` is that owner as text:
    /// of an exclusive lock the whole value of its key, perhaps of another registry. The queue stays as it is. `within`,
    /// counted from when the session takes the op, is how long its caller still waits: done later, the lease would be
    /// nobody's.
    Adopt {
        owner: Owner,
        from: Arc<str>,
        ttl: Duration,
        within: Duration,
    },
    /// Whether the owner has the lock now. It changes nothing: [`Session::ask`].
    Verify { owner: Owner },
    /// Take the lock from one of its holders, whoever that is, as its own release would: `whose` is its owner as text.
    /// Of a foreign lock it is the value. By [`Session::ask`] alone.
    Evict { whose: Arc<str> },
    /// Raise the next epoch of this store above `epoch`, an epoch of another node of a quorum, if the owner has the
    /// lock. `age`: whether the answer must have the store's age.
    Raise { owner: Owner, epoch: u64, age: bool },
    /// Serve the queue from its front: a call that served many tickets has left some that may fit (M4). `owner`: the
    /// owner whose answer or grant said so.
    Serve { owner: Owner },
}

/// Whether nobody has a lock: sequences begin at 1. It goes the way of renewals, and needs no right that they do not.
pub(crate) const PING: Op = Op::Verify {
    owner: Owner::exclusive(0),
};

impl Op {
    /// Its name in the scripts and functions of servers.
    pub(crate) fn letter(&self) -> u8 {
        match self {
            Self::Attempt { .. } => b'A',
            Self::Enter { .. } => b'E',
            Self::Listen { .. } => b'L',
            Self::Withdraw { .. } => b'W',
            Self::Unlisten { .. } => b'U',
            Self::Release { .. } => b'R',
            Self::Keep { .. } => b'K',
            Self::Yield { .. } => b'Y',
            // Without a ttl it only looks.
            Self::Renew { .. } | Self::Verify { .. } => b'N',
            Self::Adopt { .. } => b'D',
            Self::Evict { .. } => b'T',
            Self::Raise { .. } => b'V',
            Self::Serve { .. } => b'S',
        }
    }

    /// The owner of the op; for a yield, the old owner.
    pub(crate) fn owner(&self) -> Owner {
        match *self {
            Self::Attempt { owner, .. }
            | Self::Enter { owner, .. }
            | Self::Listen { owner, .. }
            | Self::Withdraw { owner, .. }
            | Self::Unlisten { owner }
            | Self::Release { owner }
            | Self::Keep { owner, .. }
            | Self::Yield { old: owner, .. }
            | Self::Renew { owner, .. }
            | Self::Verify { owner }
            | Self::Adopt { owner, .. }
            | Self::Raise { owner, .. }
            | Self::Serve { owner } => owner,
            // Of nobody here: sequences begin at 1.
            Self::Evict { .. } => Owner::exclusive(0),
        }
    }
}

/// What the store did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// To attempt, enter, listen, yield and adopt: the (new) owner has the lock for its ttl, counted from this command
    /// (S3), with a new epoch from the fence.
    Won { epoch: u64 },
    /// To attempt, enter, listen and yield: another owner has the lock, for `left` unless it is renewed (`None`: it
    /// has no ttl). `score` is the place of our ticket or subscription, if there is one.
    Busy {
        left: Option<Duration>,
        score: Option<u64>,
        /// Whether the ticket was not in the queue before.
        entered: bool,
        /// Who has it, where that is known (G8).
        holder: Option<Arc<Occupant>>,
    },
    /// To yield and adopt: the old owner did not have the lock, so nothing was written. For an adoption the new owner
    /// does not have it either.
    NotOld,
    /// To release, keep, evict, withdraw, unsubscribe and serve: done. `held`: this owner had the lock until now.
    Gone { held: bool },
    /// To renew: the owner has the lock for the ttl, counted from this command, or longer. To verify: the owner has it.
    Renewed,
    /// To raise: done. `age`: the store has lost nothing for at least this long, if that was asked for and is known.
    Raised { age: Option<Duration> },
    /// To renew, verify and raise: another owner has the lock, or none.
    Lost,
}

/// Who has a lock that is busy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Occupant {
    /// The owner as text, or what a foreign lock wrote there. Of several that share the lock, the one that ends first.
    pub owner: Box<str>,
    pub mode: Mode,
    /// How many readers have it besides, or how much other permits take.
    pub others: u64,
}

/// An outcome, and the store's clock when it executed the op. After a release, `at` may be the last known time. A
/// quorum sends 0.
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
    /// The store refused it: it was not done.
    Refused(StoreError),
    /// A renewal was not sent, since its answer could not have come in time. The connection is fine.
    TooLate(StoreError),
    /// It gave us the lock, but too few replicas or nodes confirmed it, so it does not count. The owner has, or had,
    /// the lock: it must be released, and the owner retired.
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

/// The store gave the lock to one of our tickets.
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
    /// The one answer to a submitted op.
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
    /// A lock was freed that one of our owners had subscribed to. Another owner may have it by now. Or the lock is kept
    /// and our ticket is the first: then our registry asks for how long (M8).
    Freed { key: Arc<str> },
    /// A call has served as many tickets as one may, and more may fit. Each registry that hears of it sends
    /// [`Op::Serve`] (M4).
    Unserved { key: Arc<str>, owner: Owner },
    /// A new connection is up, and the store may have lost our tickets for the keys in `scope`: their leases are
    /// renewed and their tickets entered again (O4).
    Up {
        scope: KeyScope,
        /// Whether grants for these keys can arrive. If not, no ticket may be in their queues (W5).
        queue: bool,
        /// Whether no part of the store is known to be down.
        complete: bool,
    },
    /// A connection is lost, or could not be made. Sent after the answers to the ops that were lost with it. An `Up`
    /// follows for each key in `scope` that was in use.
    Down { scope: KeyScope, error: StoreError },
}

/// The keys that an event is about.
#[derive(Clone)]
pub enum KeyScope {
    /// All keys.
    All,
    /// The keys for which this returns true.
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
    /// The whole store is up.
    pub(crate) fn up(queue: bool) -> Self {
        Self::Up {
            scope: KeyScope::All,
            queue,
            complete: true,
        }
    }

    /// The whole store is down.
    pub(crate) fn down(error: StoreError) -> Self {
        let scope = KeyScope::All;
        Self::Down { scope, error }
    }

    /// Whether it is about one key alone.
    pub(crate) fn is_of_a_key(&self) -> bool {
        !matches!(self, Self::Up { .. } | Self::Down { .. })
    }
}

/// The registry, as its session knows it.
pub trait StoreEvents: Send + Sync {
    /// Handles events in this order, such as the answers of one call. May be called from any thread, without a lock
    /// that [`Session::submit`] takes.
    fn on_events(&self, events: Vec<StoreEvent>);

    /// Handles one event.
    fn on_event(&self, event: StoreEvent) {
        self.on_events(vec![event]);
    }

    /// Whether a lease is held, or a caller waits, for any key in `scope`: then the store keeps its connections for
    /// these keys. May be slow: it is called about once a minute.
    fn uses(&self, scope: &KeyScope) -> bool;

    /// Whether a ticket for the key may be in its queue, or be entered soon: then its grants must arrive.
    fn waits(&self, key: &str) -> bool;

    /// A task of the session has panicked. Its state is lost, and the registry closes.
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

/// The settings of a session.
#[derive(Clone)]
#[allow(
    missing_debug_implementations,
    reason = "whom it tells is not for printing"
)]
pub struct SessionConfig {
    /// The first part of every name in the store.
    pub prefix: Arc<str>,
    /// The registry's id: random bits, after its name and `~` if it has one.
    pub instance: Arc<str>,
    /// The default ttl of the registry's locks.
    pub ttl: Duration,
    /// How long the oldest unanswered op may take before its connection is given up.
    pub response_timeout: Duration,
    /// The registry, which gets the events.
    pub listener: Weak<dyn StoreEvents>,
    /// The registry's tasks.
    pub tasks: Arc<Tasks>,
}

impl SessionConfig {
    /// Starts a task of the session.
    pub(crate) fn spawn(&self, runtime: &Handle, task: impl Future<Output = ()> + Send + 'static) {
        self.tasks
            .spawn(runtime, run_task(self.listener.clone(), task));
    }
}

/// What a url says of a registry. The registry's builder may say the rest.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RegistryOptions {
    pub(crate) prefix: Option<String>,
    pub(crate) name: Option<String>,
    pub(crate) response_timeout: Option<Duration>,
}

/// A lock as it is in the store.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KeyStatus {
    /// Those whose leases are not over, by their ends and then by their names: [`MOST_SHOWN`] at most.
    pub holders: Vec<Holder>,
    /// How much all of them take: permits by their weight, and others 1 each.
    pub taken: u64,
    /// How many tickets are in the queue. Not counted are those of dead registries among the first [`MOST_SEEN`].
    pub tickets: u64,
    /// The owners of the first tickets of live registries, and their modes: [`MOST_SHOWN`] at most.
    pub queue: Vec<(String, Mode)>,
}

#[cfg(test)]
impl KeyStatus {
    /// The first holder's name.
    pub(crate) fn owner(&self) -> Option<String> {
        self.holders.first().map(|holder| holder.name.clone())
    }

    /// How long the first holder has it.
    pub(crate) fn left(&self) -> Option<Duration> {
        self.holders.first()?.left
    }
}

/// How many holders of a lock, and how many tickets of its queue, are shown.
pub(crate) const MOST_SHOWN: usize = 100;

/// Of how many tickets it is looked whether their registry is there.
pub(crate) const MOST_SEEN: usize = 1000;

/// A holder as it is in the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// The owner as text, or what a foreign lock wrote there.
    pub name: String,
    pub mode: Mode,
    /// How long it lasts; `None` if it has no ttl.
    pub left: Option<Duration>,
}

/// One registry's session with a store. Dropping it ends its connection and its tasks.
pub trait Session: Send + Sync {
    /// Starts the session's tasks on the caller's runtime, if they are needed and do not run, perhaps because their
    /// runtime has ended. The engine calls it at every arrival, and repeatedly while callers wait. So it must be
    /// cheap. On a thread without a runtime it does nothing. It does not shorten the pause before an attempt to
    /// connect (G1).
    fn start(&self);

    /// Takes an op. Its answer comes as [`StoreEvent::Replied`], also if the connection breaks, and perhaps before
    /// this returns. Ops of one key are done in the order in which they were taken.
    fn submit(&self, submitted: SubmittedOp);

    /// The identity of the server of the present or last connection. Two sessions with the same identity are at the
    /// same server, whatever its names. It is known before [`StoreEvent::Up`]. `None` if it cannot be known, or is not
    /// one server.
    fn identity(&self) -> Option<Arc<str>> {
        None
    }

    /// The SQL that fences a transaction by a lease: its arguments are the key, the token and the prefix. `None` if
    /// the store has no transactions.
    fn fence(&self) -> Option<Arc<str>> {
        None
    }

    /// How much longer than usual the first answer may take, because a connection is being made that was not tried
    /// before.
    fn connects_within(&self) -> Duration {
        Duration::ZERO
    }

    /// Looks whether the store can be used, on connections of its own.
    fn check(&self) -> BoxFuture<'static, Result<Check, StoreError>>;

    /// Asks a small question on the connections that stand: of several servers, each that is in use. It makes a connection
    /// only if there is none, and writes nothing. `within`: when it gives up.
    fn ping(&self, within: Duration) -> BoxFuture<'static, Result<(), StoreError>> {
        let asked = self.ask("ping".into(), PING);
        async move {
            match timeout(within, asked).await {
                Ok(answer) => answer
                    .map(drop)
                    .map_err(|error| error.store_error().clone()),
                Err(_) => Err(StoreError::new(format!("no answer within {within:?}"))),
            }
        }
        .boxed()
    }

    /// Runs an op that belongs to no ticket or tenure: its answer is told to nobody but the caller. If the future is
    /// dropped, the op may still be done.
    fn ask(&self, key: Arc<str>, op: Op) -> BoxFuture<'static, OpResult>;

    /// Reads the state of a lock without changing it.
    fn inspect(&self, key: Arc<str>) -> BoxFuture<'static, Result<KeyStatus, StoreError>>;

    /// Lists the keys that begin with `start` and may have a holder or a ticket, a page at a time as the stream is
    /// polled. A key may be listed twice. The stream ends after an error.
    fn scan(&self, _start: Arc<str>) -> BoxStream<'static, Result<Vec<Arc<str>>, StoreError>> {
        let error = StoreError::lasting("this store cannot list its keys");
        stream::once(async { Err(error) }).boxed()
    }
}
