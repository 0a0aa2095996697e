use std::error::Error;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::Token;

/// What can go wrong with a lock. Every variant names its key.
///
/// "Not to be had in time", "lost", "queue full", "closed" and "the store did not answer" are
/// different things and call for different acts, so they never collapse into one another.
///
/// Its `Display` says all of it in one line, what the store said included. So [`source`](Error::source) is `None`, and a
/// report that follows the sources (`{:#}` of `anyhow`, say) names each cause once. The [`StoreError`] itself is in
/// [`LockError::Store`].
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
    #[error(
        "lock {key:?} was not to be had: others {}; try again later, wait longer, or see whether \
         this very work holds it, since a lock is not reentrant unless asked",
        held_for(*waited)
    )]
    #[non_exhaustive]
    NotAcquired {
        /// The name of what is locked.
        key: Arc<str>,
        /// How long the caller stood in line.
        waited: Duration,
    },
    /// The lease was over before the work was done, or the detached one before it was
    /// [adopted](crate::LockRegistry::adopt): others may hold the key now.
    #[error(
        "the lease on {key:?} (token {token}) was lost before its holder was done with it: others may hold the key now; have it renewed or make its ttl longer, and check the token where the work writes"
    )]
    #[non_exhaustive]
    Lost {
        /// The name of what is locked.
        key: Arc<str>,
        /// The fencing token of the lease that is gone.
        token: Token,
    },
    /// As many callers as `max_waiters` allows wait for this key in this registry already.
    #[error(
        "{limit} callers wait for lock {key:?} in this registry already, its max_waiters; shed load, or raise it on the builder"
    )]
    #[non_exhaustive]
    QueueFull {
        /// The name of what is locked.
        key: Arc<str>,
        /// The registry's `max_waiters`.
        limit: usize,
    },
    /// A bare key was locked, but no registry is installed.
    #[error(
        "no registry is installed to lock {key:?} with: call LockRegistry::install() first, or name the registry: (registry, key), or `registry = …` in #[with_lock]"
    )]
    #[non_exhaustive]
    NoRegistry {
        /// The name of what is locked.
        key: Arc<str>,
    },
    /// The registry was shut down.
    #[error("the registry of lock {key:?} was shut down")]
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
    /// The ttl is out of range: 10 ms to 24 h.
    #[error("invalid ttl {ttl:?} for lock {key:?}: must be from 10 ms to 24 h")]
    #[non_exhaustive]
    InvalidTtl {
        /// The name of what is locked.
        key: Arc<str>,
        /// The ttl as it was given.
        ttl: Duration,
    },
    /// A setting does not go with what the lock asks for: a ttl that is no longer than
    /// `min_replicas` of the store gives its replicas.
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
    #[error("the store failed while it was asked about lock {key:?}: {}", r#source)]
    #[non_exhaustive]
    Store {
        /// The name of what is locked.
        key: Arc<str>,
        /// What the store said.
        // Under its plain name the derive would return it from `source()`, and it would be told twice.
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
            | Self::NoRegistry { key }
            | Self::Closed { key }
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

    /// Whether the lease was lost while its work ran.
    pub fn is_lost(&self) -> bool {
        matches!(self, Self::Lost { .. })
    }
}

/// Why [`LockRegistryBuilder::build`](crate::LockRegistryBuilder::build) made no registry: a setting
/// is out of range.
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

/// How long others held a lock, in words.
fn held_for(waited: Duration) -> String {
    let millis = waited.as_millis();
    if millis == 0 {
        "hold it".to_owned()
    } else {
        let waited = Duration::from_millis(u64::try_from(millis).unwrap_or(u64::MAX));
        format!("held it for the whole wait of {waited:?}")
    }
}

/// What a store said when it failed: the connection broke, nobody answered in time, the server
/// refused. No type of the `redis` crate shows through.
///
/// Its `Display` is that of what it wraps, in one line, and its [`source`](Error::source) whatever lies behind that: of our
/// own stores nothing, since they say all of it in their line.
#[derive(Clone)]
pub struct StoreError {
    source: Arc<dyn Error + Send + Sync>,
    retryable: bool,
}

impl StoreError {
    /// Wraps whatever went wrong, as something that may mend itself.
    pub fn new(source: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self {
            source: Arc::from(source.into()),
            retryable: true,
        }
    }

    /// Wraps a fault that asking again will not mend: a wrong password, a missing right.
    pub(crate) fn lasting(source: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self {
            retryable: false,
            ..Self::new(source)
        }
    }

    /// Whether asking again may help: true for a broken connection or a server that is starting,
    /// false for a wrong password or a missing right.
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

    /// As `{:#}` of `anyhow` has it.
    fn chain(error: &dyn Error) -> String {
        let mut told = error.to_string();
        let mut cause = error.source();
        while let Some(error) = cause {
            told += &format!(": {error}");
            cause = error.source();
        }
        told
    }

    #[derive(Debug, thiserror::Error)]
    #[error("the roof leaks")]
    struct Roof(#[source] Rain);

    #[derive(Debug, thiserror::Error)]
    #[error("it rains")]
    struct Rain;

    #[test]
    fn whoever_follows_the_sources_reads_each_cause_once() {
        let wrapped = StoreError::new(Roof(Rain));
        assert_eq!(wrapped.to_string(), "the roof leaks");
        assert_eq!(chain(&wrapped), "the roof leaks: it rains");
        let source = StoreError::new("it broke");
        let told = LockError::Store {
            key: "k".into(),
            source: source.clone(),
        };
        assert_eq!(chain(&source), "it broke");
        assert_eq!(chain(&told).matches("it broke").count(), 1, "{told}");
        assert_eq!(chain(&told), told.to_string(), "its line says it all");
    }
}
