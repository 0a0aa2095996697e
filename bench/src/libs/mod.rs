//! The libraries that are measured, each behind the same few calls.

mod advisory;
mod async_redis_lock;
mod bare;
mod lockstream;
mod polled_table;
mod rslock;

use std::fmt::Display;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::target::Store;

pub(crate) use self::advisory::Advisory;
pub(crate) use self::async_redis_lock::AsyncRedisLock;
pub(crate) use self::bare::Bare;
pub(crate) use self::lockstream::Lockstream;
pub(crate) use self::polled_table::PolledTable;
pub(crate) use self::rslock::Rslock;

/// How long a lock lasts where a library asks for it: what lockstream takes by itself.
const TTL: Duration = Duration::from_secs(30);

/// In place of a url: the store in memory.
pub(crate) const MEMORY: &str = "memory";

/// What went wrong, in words for the one who reads the report.
pub(crate) type Outcome<T> = Result<T, String>;

/// Puts into words what a library said when it failed at something.
pub(crate) fn told<E: Display>(what: &str) -> impl FnOnce(E) -> String {
    move |error| format!("{what}: {error}")
}

/// A library, by the name that it has in the report.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Lib {
    Lockstream,
    Bare,
    Rslock,
    AsyncRedisLock,
    SqlxAdvisory,
    PolledTable,
}

impl Lib {
    pub(crate) const ALL: [Self; 6] = [
        Self::Lockstream,
        Self::Bare,
        Self::Rslock,
        Self::AsyncRedisLock,
        Self::SqlxAdvisory,
        Self::PolledTable,
    ];

    /// Those that keep locks in Redis, in the order in which each round runs them.
    pub(crate) const ON_REDIS: [Self; 4] = [
        Self::Lockstream,
        Self::Bare,
        Self::Rslock,
        Self::AsyncRedisLock,
    ];

    /// Those that keep locks in such a store, in that order.
    pub(crate) fn of(store: Store) -> &'static [Self] {
        match store {
            Store::Redis => &Self::ON_REDIS,
            Store::Postgres => &[Self::Lockstream, Self::SqlxAdvisory, Self::PolledTable],
        }
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Lockstream => "lockstream",
            Self::Bare => "bare",
            Self::Rslock => "rslock",
            Self::AsyncRedisLock => "async-redis-lock",
            Self::SqlxAdvisory => "sqlx-advisory",
            Self::PolledTable => "polled-table",
        }
    }
}

/// Whether a process may hand the lock on to the next of its own waiters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Passes {
    /// As the library does it by itself.
    Default,
    /// Never; the same as the default for those who have no such thing.
    None,
}

/// What every scenario does with a library.
///
/// The scenarios are generic over it, so that nothing stands between them and the library's own
/// futures.
pub(crate) trait Library: Sized + Send + Sync + 'static {
    /// What a task keeps to take one key again and again.
    type Lock: Send + Sync + 'static;
    /// What stands for the lock while it is held.
    type Held: Send + 'static;

    /// Connects, as a process does once. `callers`: how many tasks may hold or wait at a time.
    fn connect(
        url: &str,
        passes: Passes,
        callers: usize,
    ) -> impl Future<Output = Outcome<Self>> + Send;

    /// The same with locks that last so long, where that can be said.
    fn lasting(self, _ttl: Duration) -> Self {
        self
    }

    /// Whether the library has said, without a question to the server, that the lock is over.
    fn is_lost(_held: &Self::Held) -> bool {
        false
    }

    fn lock(&self, key: &str) -> Self::Lock;

    /// One of so many permits; only for libraries that take part in its scenario.
    fn permit(&self, _key: &str, _limit: u32) -> Self::Lock {
        unreachable!("it has no permits")
    }

    /// A reader's lock, as above.
    fn reader(&self, _key: &str) -> Self::Lock {
        unreachable!("it has no readers")
    }

    /// Several keys at once, as above.
    fn all(&self, _keys: &[String]) -> Self::Lock {
        unreachable!("it locks one key at a time")
    }

    /// Waits for the lock for as long as it takes.
    fn acquire(&self, lock: &Self::Lock) -> impl Future<Output = Outcome<Self::Held>> + Send;

    /// Gives it back, and waits until the server has confirmed that.
    fn release(&self, held: Self::Held) -> impl Future<Output = Outcome<()>> + Send;
}
