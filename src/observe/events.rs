use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures::Stream;
use futures::stream::FusedStream;
use tokio::sync::broadcast::error::TryRecvError;
use tokio::sync::broadcast::{Receiver, Sender};
use tokio::time::Instant;

use crate::base::sync::AtomicWaker;
use crate::base::{Holder, LossCause, Mode, StoreError, Token};

/// An event of a registry; see [`LockRegistry::events`](crate::LockRegistry::events).
///
/// Every [`Waiting`](Self::Waiting) is followed by exactly one of [`Acquired`](Self::Acquired),
/// [`GaveUp`](Self::GaveUp) and [`QueueFull`](Self::QueueFull) of the same waiter, and every
/// [`Acquired`](Self::Acquired) by exactly one of [`Released`](Self::Released),
/// [`Unreleased`](Self::Unreleased), [`LeftToExpire`](Self::LeftToExpire),
/// [`Detached`](Self::Detached), [`Lost`](Self::Lost) and [`Closed`](Self::Closed) with the same key
/// and token. For exclusive locks that comes before the next [`Acquired`](Self::Acquired) of the key in this registry;
/// readers and permits of a key are held side by side. A
/// [reentrant](crate::Lock::reentrant) lock that shares a lease has no events. More variants and fields may be added:
/// match with `..` and a last arm `_`.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum LockEvent {
    /// A caller wants the lock. Sent at its first poll, also if it gets the lock at once. A caller that was granted
    /// the key, was not polled in time and queues again is still waiting.
    #[non_exhaustive]
    Waiting {
        /// The name of what is locked.
        key: Arc<str>,
        /// The caller: a number that is unique in this registry.
        waiter: u64,
        /// What it would exclude.
        mode: Mode,
    },
    /// A waiter has acquired the lock.
    #[non_exhaustive]
    Acquired {
        /// The name of what is locked.
        key: Arc<str>,
        /// Which caller.
        waiter: u64,
        /// What it excludes.
        mode: Mode,
        /// The fencing token of its lease.
        token: Token,
        /// How long it has waited.
        waited: Duration,
    },
    /// This registry passed the lock from one of its callers to the next without asking the store. Sent right before
    /// [`Acquired`](Self::Acquired).
    #[non_exhaustive]
    Passed {
        /// The name of what is locked.
        key: Arc<str>,
        /// The fencing token of the lease that begins.
        token: Token,
    },
    /// A lease was renewed.
    #[non_exhaustive]
    Renewed {
        /// The name of what is locked.
        key: Arc<str>,
        /// The fencing token of the lease.
        token: Token,
        /// Its new deadline.
        deadline: Instant,
    },
    /// A renewal got no answer, was refused, or was not sent because its answer would have come too late. It is
    /// retried until the deadline.
    #[non_exhaustive]
    RenewalUnknown {
        /// The name of what is locked.
        key: Arc<str>,
        /// The fencing token of the lease.
        token: Token,
        /// What the store said.
        error: StoreError,
    },
    /// A renewal is due and not confirmed, and two thirds of the time between its moment and the deadline are over. At the
    /// usual moment two ninths of the ttl are left then. Without a [`Renewed`](Self::Renewed) the lease is
    /// lost at its deadline. Sent once until the lease is renewed, whatever the cause: a slow store, an outage, or
    /// more leases than can be renewed.
    #[non_exhaustive]
    RenewalLate {
        /// The name of what is locked.
        key: Arc<str>,
        /// The fencing token of the lease.
        token: Token,
        /// Until when it lasts.
        deadline: Instant,
    },
    /// The [`Renewed`](Self::Renewed) before this was the last that
    /// [`max_renewals`](crate::Renewal::max_renewals) allows: the lease ends at its deadline.
    #[non_exhaustive]
    LastRenewal {
        /// The name of what is locked.
        key: Arc<str>,
        /// The fencing token of the lease.
        token: Token,
        /// When it ends.
        deadline: Instant,
    },
    /// A lease was lost: it ended before its holder released it, or the release found it gone.
    #[non_exhaustive]
    Lost {
        /// The name of what is locked.
        key: Arc<str>,
        /// The fencing token of the lease.
        token: Token,
        /// How long it was held.
        held: Duration,
        /// Why it was lost.
        cause: LossCause,
    },
    /// A lease was released, and the store has confirmed it.
    #[non_exhaustive]
    Released {
        /// The name of what is locked.
        key: Arc<str>,
        /// The fencing token of the lease.
        token: Token,
        /// From when it was taken until it was given back.
        held: Duration,
    },
    /// A lease was released, but the store did not confirm it before the deadline. It has expired.
    #[non_exhaustive]
    Unreleased {
        /// The name of what is locked.
        key: Arc<str>,
        /// The fencing token of the lease.
        token: Token,
        /// From when it was taken until it was given back.
        held: Duration,
    },
    /// A lease ended, and its key stays in the store: until its ttl is over, or for a time, as
    /// [`OnFinish`](crate::OnFinish) asks.
    #[non_exhaustive]
    LeftToExpire {
        /// The name of what is locked.
        key: Arc<str>,
        /// The fencing token of the lease.
        token: Token,
        /// How long it was held.
        held: Duration,
    },
    /// A lease was [detached](crate::Lease::detach), for others to adopt.
    #[non_exhaustive]
    Detached {
        /// The name of what is locked.
        key: Arc<str>,
        /// The fencing token of the lease.
        token: Token,
        /// How long it was held here.
        held: Duration,
    },
    /// A lease was ended by the shutdown of its registry.
    #[non_exhaustive]
    Closed {
        /// The name of what is locked.
        key: Arc<str>,
        /// The fencing token of the lease.
        token: Token,
        /// How long it was held.
        held: Duration,
    },
    /// A wait ended without the lock: its time was over, it was dropped, the store failed, or the registry was shut
    /// down.
    #[non_exhaustive]
    GaveUp {
        /// The name of what is locked.
        key: Arc<str>,
        /// Which caller.
        waiter: u64,
        /// How long it had waited.
        waited: Duration,
        /// Who had the lock, if its time was over and that is known.
        holder: Option<Holder>,
    },
    /// A caller was refused, because [`max_waiters`](crate::LockRegistryBuilder::max_waiters) callers waited already.
    #[non_exhaustive]
    QueueFull {
        /// The name of what is locked.
        key: Arc<str>,
        /// Which caller.
        waiter: u64,
        /// How many may wait.
        limit: usize,
    },
    /// The last handle of a held [`Lock`](crate::Lock) was dropped, which releases it. Usually a mistake. The end of
    /// the lease is a separate event after this one.
    #[non_exhaustive]
    DroppedWhileHeld {
        /// The name of what is locked.
        key: Arc<str>,
        /// The fencing token of the lease.
        token: Token,
    },
    /// The connection to the store is lost, or could not be made. Sent once for each outage, however many attempts
    /// there are.
    #[non_exhaustive]
    StoreDown {
        /// What went wrong.
        error: StoreError,
    },
    /// The connection to the store is up, for the first time or again.
    #[non_exhaustive]
    StoreUp {},
    /// The runtime has not run the registry's tasks for a sixth of a ttl or longer: a task computes or blocks. A thread
    /// runs them meanwhile; see [`renew_while_busy`](crate::LockRegistryBuilder::renew_while_busy). Sent once, until the
    /// runtime runs them again.
    #[non_exhaustive]
    RuntimeBusy {
        /// For how long, at least.
        busy: Duration,
        /// How many leases are held.
        leases: usize,
    },
    /// This reader was too slow and has missed this many events.
    #[non_exhaustive]
    Missed {
        /// How many.
        count: u64,
    },
}

impl LockEvent {
    /// The name of what is locked, if the event is about a lock.
    pub fn key(&self) -> Option<&str> {
        self.about().0
    }

    /// The fencing token, if the event is about a lease.
    pub fn token(&self) -> Option<Token> {
        self.about().1
    }

    fn about(&self) -> (Option<&str>, Option<Token>) {
        match self {
            Self::Acquired { key, token, .. }
            | Self::Passed { key, token }
            | Self::Renewed { key, token, .. }
            | Self::RenewalUnknown { key, token, .. }
            | Self::RenewalLate { key, token, .. }
            | Self::LastRenewal { key, token, .. }
            | Self::Lost { key, token, .. }
            | Self::Released { key, token, .. }
            | Self::Unreleased { key, token, .. }
            | Self::LeftToExpire { key, token, .. }
            | Self::Detached { key, token, .. }
            | Self::Closed { key, token, .. }
            | Self::DroppedWhileHeld { key, token } => (Some(key), Some(*token)),
            Self::Waiting { key, .. } | Self::GaveUp { key, .. } | Self::QueueFull { key, .. } => {
                (Some(key), None)
            }
            Self::StoreDown { .. }
            | Self::StoreUp { .. }
            | Self::RuntimeBusy { .. }
            | Self::Missed { .. } => (None, None),
        }
    }
}

/// One line for people: `order:42: acquired after 3.0ms, token 114897354611286400`.
impl fmt::Display for LockEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(key) = self.key() {
            write!(f, "{key}: ")?;
        }
        match self {
            Self::Waiting { waiter, .. } => write!(f, "waited for by {waiter}"),
            Self::Acquired { waited, .. } => write!(f, "acquired after {waited:.1?}"),
            Self::Passed { .. } => f.write_str("passed on in this registry"),
            Self::Renewed { deadline, .. } => write!(f, "renewed, {}", left(*deadline)),
            Self::RenewalUnknown { error, .. } => write!(f, "renewal unknown ({error})"),
            Self::RenewalLate { deadline, .. } => {
                write!(f, "renewal late, {}", left(*deadline))
            }
            Self::LastRenewal { deadline, .. } => {
                write!(f, "renewed for the last time, {}", left(*deadline))
            }
            Self::Lost { held, cause, .. } => write!(f, "lost after {held:.1?}: {cause}"),
            Self::Released { held, .. } => write!(f, "released after {held:.1?}"),
            Self::Unreleased { held, .. } => {
                write!(f, "given back after {held:.1?}, not confirmed by the store")
            }
            Self::LeftToExpire { held, .. } => write!(f, "left to expire after {held:.1?}"),
            Self::Detached { held, .. } => write!(f, "detached after {held:.1?}"),
            Self::Closed { held, .. } => write!(f, "closed by a shutdown after {held:.1?}"),
            Self::GaveUp {
                waiter,
                waited,
                holder,
                ..
            } => {
                write!(f, "{waiter} gave up after {waited:.1?}")?;
                match holder {
                    Some(holder) => write!(f, ", held by {holder}"),
                    None => Ok(()),
                }
            }
            Self::QueueFull { waiter, limit, .. } => {
                write!(f, "{waiter} turned away, limit of {limit} waiters reached")
            }
            Self::DroppedWhileHeld { .. } => f.write_str("last handle dropped while held"),
            Self::StoreDown { error } => write!(f, "store unreachable ({error})"),
            Self::StoreUp {} => f.write_str("store connected"),
            Self::RuntimeBusy { busy, leases } => {
                write!(f, "runtime busy for {busy:.1?}, {leases} leases held")
            }
            Self::Missed { count } => write!(f, "{count} events missed"),
        }?;
        match self.token() {
            Some(token) => write!(f, ", token {token}"),
            None => Ok(()),
        }
    }
}

/// An `Instant` is unreadable; the time until it is not.
fn left(deadline: Instant) -> String {
    let left = deadline.saturating_duration_since(Instant::now());
    format!("{left:.1?} left")
}

/// Stream of [`LockRegistry::events`](crate::LockRegistry::events).
#[derive(Debug)]
#[must_use = "streams do nothing unless polled, and what happens meanwhile is kept for this one"]
pub struct Events {
    channel: Receiver<LockEvent>,
    waker: Arc<AtomicWaker>,
    ended: bool,
}

impl Events {
    /// The next sender wakes `waker`.
    pub(crate) fn new(channel: &Sender<LockEvent>, waker: Arc<AtomicWaker>) -> Self {
        Self {
            channel: channel.subscribe(),
            waker,
            ended: false,
        }
    }

    /// The next event, if there is one.
    fn next_now(&mut self) -> Poll<Option<LockEvent>> {
        Poll::Ready(match self.channel.try_recv() {
            Ok(event) => Some(event),
            Err(TryRecvError::Lagged(count)) => Some(LockEvent::Missed { count }),
            Err(TryRecvError::Closed) => {
                self.ended = true;
                None
            }
            Err(TryRecvError::Empty) => return Poll::Pending,
        })
    }
}

impl Stream for Events {
    type Item = LockEvent;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<LockEvent>> {
        if let Poll::Ready(next) = self.next_now() {
            return Poll::Ready(next);
        }
        self.waker.register(cx.waker());
        // An event may have come before the waker was there.
        self.next_now()
    }
}

impl FusedStream for Events {
    fn is_terminated(&self) -> bool {
        self.ended
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A line has the key, the event and, for a lease, the token. An instant is shown as the time until it.
    #[tokio::test(start_paused = true)]
    async fn an_event_is_one_line_for_people() {
        let key: Arc<str> = "order:42".into();
        let token = Token::new(7).unwrap();
        let deadline = Instant::now() + Duration::from_secs(30);
        let waited = Duration::from_millis(3);
        let waiter = 1;
        let told = [
            LockEvent::Acquired {
                mode: Mode::Exclusive,
                key: key.clone(),
                waiter,
                token,
                waited,
            },
            LockEvent::Renewed {
                key: key.clone(),
                token,
                deadline,
            },
            LockEvent::RenewalLate {
                key: key.clone(),
                token,
                deadline,
            },
            LockEvent::GaveUp {
                key,
                waiter,
                waited,
                holder: None,
            },
            LockEvent::Missed { count: 5 },
        ];
        assert_eq!(
            told.map(|event| event.to_string()),
            [
                "order:42: acquired after 3.0ms, token 7",
                "order:42: renewed, 30.0s left, token 7",
                "order:42: renewal late, 30.0s left, token 7",
                "order:42: 1 gave up after 3.0ms",
                "5 events missed",
            ]
        );
    }
}
