use std::error::Error;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::base::{Holder, LossCause, Token};

/// The error of a lock. Every variant has its key.
///
/// "Not acquired in time", "lost", "queue full", "closed" and "the store did not answer" call for different reactions,
/// so each is a variant.
///
/// Its `Display` has the reason in one line, also what the store said, so its [`source`](Error::source) is always `None`.
/// The [`StoreError`] itself is in [`LockError::Store`].
///
/// # Examples
///
/// ```
/// use lockstream::{LockError, LockRegistry, FutureLockExt};
/// # #[tokio::main(flavor = "current_thread")] async fn main() {
/// let locks = LockRegistry::in_memory();
/// match async { 6 * 7 }.with_lock(locks.obtain("answer")).await {
///     Ok(answer) => assert_eq!(answer, 42),
///     Err(busy) if busy.is_not_acquired() => println!("somebody else is at it: {busy}"),
///     Err(other) => panic!("{other}"),
/// }
/// # }
/// ```
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum LockError {
    /// Others held the lock for the whole of the caller's `wait`. The work was not started.
    ///
    /// Perhaps the work around this call holds it: a lock is [reentrant](crate::Lock::reentrant) only on request.
    #[error("lock {key:?} not acquired{}{}", within(*waited), held_by(holder.as_ref()))]
    #[non_exhaustive]
    NotAcquired {
        /// The name of what is locked.
        key: Arc<str>,
        /// How long the caller waited in the queue. Zero if its `wait` was zero: it asked once.
        waited: Duration,
        /// Who holds it, as far as the store has said when it was asked for the lock. Nothing is sent to find it out.
        holder: Option<Holder>,
    },
    /// The lease ended before the work was done, or the detached lease before it was
    /// [adopted](crate::LockRegistry::adopt). Others may hold the key now.
    ///
    /// Renewal or a longer ttl makes it rarer. What the work writes to should check the token.
    #[error("lease on {key:?} lost (token {token}): {cause}")]
    #[non_exhaustive]
    Lost {
        /// The name of what is locked.
        key: Arc<str>,
        /// The fencing token of the lease that is gone.
        token: Token,
        /// Why it was lost.
        cause: LossCause,
    },
    /// The lease that was to be [adopted](crate::LockRegistry::adopt) is held, by the registry that was to adopt it: it
    /// was not detached.
    #[error("lease on {key:?} not adopted: this registry holds it")]
    #[non_exhaustive]
    NotDetached {
        /// The name of what is locked.
        key: Arc<str>,
    },
    /// `max_waiters` callers wait for this key in this registry already.
    #[error("queue for lock {key:?} full: limit of {limit} waiters reached")]
    #[non_exhaustive]
    QueueFull {
        /// The name of what is locked.
        key: Arc<str>,
        /// The registry's `max_waiters`.
        limit: usize,
    },
    /// The handle on which [`acquire`](crate::Lock::acquire) was called belongs to another caller: it holds a reader or a
    /// permit, or acquires one; or what it held was lost, and [`release`](crate::Lock::release) has not told that yet.
    ///
    /// Give each task a clone of the handle. After a loss, call `release`, which tells the loss once.
    #[error("lock {key:?} not acquired: its handle is in use")]
    #[non_exhaustive]
    HandleInUse {
        /// The name of what is locked.
        key: Arc<str>,
    },
    /// A bare key was locked, but no registry is [installed](crate::LockRegistry::install).
    ///
    /// Call [`install`](crate::LockRegistry::install) at the start, lock `(&registry, key)`, or write `registry = …` in
    /// `#[with_lock]`.
    #[error("no registry installed for lock {key:?}")]
    #[non_exhaustive]
    NoRegistry {
        /// The name of what is locked.
        key: Arc<str>,
    },
    /// The registry was shut down.
    #[error("registry of lock {key:?} closed")]
    #[non_exhaustive]
    Closed {
        /// The name of what is locked.
        key: Arc<str>,
    },
    /// The key cannot name a lock.
    #[error("invalid key {key:?}: {reason}")]
    #[non_exhaustive]
    InvalidKey {
        /// The key as it was given.
        key: Arc<str>,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// Three times in a row the key was won, and the lease was over before the caller learned of it: the store's answers
    /// take longer than a lease of this ttl is valid (99 % of it, less 2 ms). The work was not started, and the key was
    /// given back.
    ///
    /// The ttl is too short for the way to the store, or the store or this process is overloaded.
    #[error(
        "store too slow for lock {key:?}: answer took {:?} of a ttl of {ttl:?}",
        Duration::from_micros(u64::try_from(round_trip.as_micros()).unwrap_or(u64::MAX))
    )]
    #[non_exhaustive]
    TooSlow {
        /// The name of what is locked.
        key: Arc<str>,
        /// The ttl that was asked for.
        ttl: Duration,
        /// How long it took from the question to the answer, the last time. For a lock that was granted to a waiter: from
        /// the grant to its arrival.
        round_trip: Duration,
    },
    /// The ttl is out of range: 10 ms to 24 h.
    #[error("invalid ttl {ttl:?} for lock {key:?}: must be from 10 ms to 24 h")]
    #[non_exhaustive]
    InvalidTtl {
        /// The name of what is locked.
        key: Arc<str>,
        /// The ttl as it was given.
        ttl: Duration,
    },
    /// A setting is out of range, or contradicts another one or the store: `setting` names it, and `reason` says why.
    #[error("invalid setting `{setting}` for lock {key:?}: {reason}")]
    #[non_exhaustive]
    InvalidSetting {
        /// The name of what is locked.
        key: Arc<str>,
        /// Which setting.
        setting: &'static str,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// The store did not answer, or refused.
    // Raw, the derive does not take it for the error's `source()`: the text has it.
    #[error("store request{} failed: {}", of_lock(key), chain(r#source))]
    #[non_exhaustive]
    Store {
        /// The name of what is locked. Of a [scan](crate::LockRegistry::scan) the beginning of the keys, which may be
        /// empty.
        key: Arc<str>,
        /// What the store said.
        r#source: StoreError,
    },
}

impl LockError {
    /// The name of what is locked.
    pub fn key(&self) -> &str {
        match self {
            Self::NotAcquired { key, .. }
            | Self::Lost { key, .. }
            | Self::QueueFull { key, .. }
            | Self::NotDetached { key }
            | Self::HandleInUse { key }
            | Self::NoRegistry { key }
            | Self::Closed { key }
            | Self::TooSlow { key, .. }
            | Self::InvalidKey { key, .. }
            | Self::InvalidTtl { key, .. }
            | Self::InvalidSetting { key, .. }
            | Self::Store { key, .. } => key,
        }
    }

    /// Whether others held the lock for the whole wait: the one error that `or_skip` skips.
    pub fn is_not_acquired(&self) -> bool {
        matches!(self, Self::NotAcquired { .. })
    }

    /// Makes `NotAcquired` an `Ok(None)`.
    pub(crate) fn skip<T>(outcome: Result<T, Self>) -> Result<Option<T>, Self> {
        match outcome {
            Err(error) if error.is_not_acquired() => Ok(None),
            outcome => outcome.map(Some),
        }
    }

    /// Whether the lease was lost while its work ran.
    pub fn is_lost(&self) -> bool {
        matches!(self, Self::Lost { .. })
    }

    /// Whether `max_waiters` callers waited already.
    pub fn is_queue_full(&self) -> bool {
        matches!(self, Self::QueueFull { .. })
    }

    /// Whether the registry was shut down.
    pub fn is_closed(&self) -> bool {
        matches!(self, Self::Closed { .. })
    }

    /// Whether the same call may succeed later: true if others had the lock, the queue was full or the store was too
    /// slow; if the store failed, what [`StoreError::is_retryable`] says.
    ///
    /// False for all others. After [`Lost`](Self::Lost) the work has run, at least in part, and only you know whether
    /// it may run again.
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::NotAcquired { .. } | Self::QueueFull { .. } | Self::TooSlow { .. } => true,
            Self::Store { source, .. } => source.is_retryable(),
            Self::Lost { .. }
            | Self::NotDetached { .. }
            | Self::HandleInUse { .. }
            | Self::NoRegistry { .. }
            | Self::Closed { .. }
            | Self::InvalidKey { .. }
            | Self::InvalidTtl { .. }
            | Self::InvalidSetting { .. } => false,
        }
    }
}

/// The error of [`LockRegistryBuilder::build`](crate::LockRegistryBuilder::build): a setting is out of range.
#[derive(Debug, Clone, thiserror::Error)]
#[error("invalid setting `{setting}`: {reason}")]
pub struct BuildError {
    pub(crate) setting: &'static str,
    pub(crate) reason: &'static str,
}

impl BuildError {
    /// The setting, by the name of its method on the builder.
    pub fn setting(&self) -> &'static str {
        self.setting
    }

    /// What is wrong with it.
    pub fn reason(&self) -> &'static str {
        self.reason
    }
}

/// An error and its causes, in one line.
pub(crate) fn chain(error: &dyn Error) -> String {
    let mut told = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        told += &format!(": {error}");
        cause = error.source();
    }
    told
}

/// How long a caller waited, in words and whole milliseconds.
fn within(waited: Duration) -> String {
    match u64::try_from(waited.as_millis()).unwrap_or(u64::MAX) {
        0 => String::new(),
        millis => format!(" within {:?}", Duration::from_millis(millis)),
    }
}

/// Which lock a request was about. A scan of all keys is about none.
fn of_lock(key: &str) -> String {
    match key {
        "" => String::new(),
        key => format!(" for lock {key:?}"),
    }
}

/// Who has the lock, if that is known.
fn held_by(holder: Option<&Holder>) -> String {
    holder.map_or_else(String::new, |holder| format!(": held by {holder}"))
}

/// The error of a store: the connection broke, no answer came in time, or the server refused. No type of the `redis`
/// crate is visible.
///
/// It stands for the error that it wraps: it has the same `Display` and the same [`source`](Error::source). The stores
/// of this crate put everything into one line, without a source.
#[derive(Clone)]
pub struct StoreError {
    source: Arc<dyn Error + Send + Sync>,
    retryable: bool,
    /// Whether our own task has ended, with its registry or its runtime. Nothing is known of the server then.
    is_abandoned: bool,
}

impl StoreError {
    /// Wraps an error that may go away: a retry may help.
    pub fn new(source: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self {
            source: Arc::from(source.into()),
            retryable: true,
            is_abandoned: false,
        }
    }

    /// Wraps an error that a retry does not help: a wrong password, a missing right.
    pub(crate) fn lasting(source: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self {
            retryable: false,
            ..Self::new(source)
        }
    }

    /// Wraps an error that says that our own task has ended, with its registry or its runtime.
    pub(crate) fn abandoned(source: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self {
            is_abandoned: true,
            ..Self::new(source)
        }
    }

    pub(crate) fn is_abandoned(&self) -> bool {
        self.is_abandoned
    }

    /// Whether a retry may help: true for a broken connection or a server that is starting, false for a missing right
    /// or a wrong password, unless passwords rotate (`RedisStoreBuilder::credentials`).
    pub fn is_retryable(&self) -> bool {
        self.retryable
    }
}

impl fmt::Debug for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Its text first: a `main` that returns the error prints this.
        let source = format_args!("{}", self.source);
        f.debug_struct("StoreError")
            .field("source", &source)
            .field("retryable", &self.retryable)
            .finish()
    }
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.source, f)
    }
}

impl Error for StoreError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.source.source()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("the roof leaks")]
    struct Roof(#[source] Rain);

    #[derive(Debug, thiserror::Error)]
    #[error("it rains")]
    struct Rain;

    #[test]
    fn the_error_chain_has_each_cause_once() {
        let wrapped = StoreError::new(Roof(Rain));
        assert_eq!(wrapped.to_string(), "the roof leaks");
        assert_eq!(chain(&wrapped), "the roof leaks: it rains");
        let error = LockError::Store {
            key: "k".into(),
            source: wrapped,
        };
        let told = "store request for lock \"k\" failed: the roof leaks: it rains";
        assert_eq!(chain(&error), told);
    }

    #[test]
    fn errors_say_what_failed_and_what_may_be_tried_again() {
        let key = || Arc::<str>::from("k");
        let not_acquired = |waited| LockError::NotAcquired {
            key: key(),
            waited,
            holder: None,
        };
        let store = |source| LockError::Store { key: key(), source };
        let token = crate::base::Token::new(64).unwrap();
        let (setting, reason) = ("min_replicas", "must be less");
        let ttl = Duration::from_millis(9);
        let cases = [
            (
                not_acquired(Duration::from_micros(3_000_999)),
                "lock \"k\" not acquired within 3s",
                true,
            ),
            (
                not_acquired(Duration::from_micros(999)),
                "lock \"k\" not acquired",
                true,
            ),
            (
                LockError::Lost {
                    key: key(),
                    token,
                    cause: LossCause::Taken,
                },
                "lease on \"k\" lost (token 64): its key was deleted or overwritten in the store",
                false,
            ),
            (
                LockError::QueueFull {
                    key: key(),
                    limit: 3,
                },
                "queue for lock \"k\" full: limit of 3 waiters reached",
                true,
            ),
            (
                LockError::NoRegistry { key: key() },
                "no registry installed for lock \"k\"",
                false,
            ),
            (
                LockError::Closed { key: key() },
                "registry of lock \"k\" closed",
                false,
            ),
            (
                LockError::TooSlow {
                    key: key(),
                    ttl: Duration::from_millis(10),
                    round_trip: Duration::from_nanos(12_345_678),
                },
                "store too slow for lock \"k\": answer took 12.345ms of a ttl of 10ms",
                true,
            ),
            (
                LockError::InvalidKey { key: key(), reason },
                "invalid key \"k\": must be less",
                false,
            ),
            (
                LockError::InvalidTtl { key: key(), ttl },
                "invalid ttl 9ms for lock \"k\": must be from 10 ms to 24 h",
                false,
            ),
            (
                LockError::InvalidSetting {
                    key: key(),
                    setting,
                    reason,
                },
                "invalid setting `min_replicas` for lock \"k\": must be less",
                false,
            ),
            (
                store(StoreError::new("it broke")),
                "store request for lock \"k\" failed: it broke",
                true,
            ),
            (
                store(StoreError::lasting("no right")),
                "store request for lock \"k\" failed: no right",
                false,
            ),
        ];
        for (error, told, is_retryable) in cases {
            assert_eq!(error.to_string(), told);
            assert_eq!(error.is_retryable(), is_retryable, "{error}");
            assert_eq!(
                error.is_queue_full(),
                matches!(error, LockError::QueueFull { .. })
            );
            assert_eq!(error.is_closed(), matches!(error, LockError::Closed { .. }));
            // The text has it.
            assert!(error.source().is_none());
        }
    }
}
