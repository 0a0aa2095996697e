use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::clock::Clock;
use crate::engine::Engine;
use crate::renewal::Renewal;
use crate::repeat::Repeat;
use crate::settings::Settings;
use crate::store::LockStore;
use crate::{BuildError, LockRegistry};

/// Settings of a registry; made by [`LockRegistry::builder`].
///
/// What is out of range is told by [`build`](Self::build).
#[must_use = "a builder does nothing until it is built"]
pub struct LockRegistryBuilder {
    store: Arc<dyn LockStore>,
    settings: Settings,
    clock: Clock,
}

impl LockRegistryBuilder {
    pub(crate) fn new(store: impl LockStore) -> Self {
        Self {
            store: Arc::new(store),
            settings: Settings::default(),
            clock: Clock::system(),
        }
    }

    /// What stands before every name in the store: 1 to 128 bytes, no control characters, no `~`.
    /// Registries with different prefixes share nothing. Default: `lock`.
    pub fn prefix(mut self, prefix: impl Into<String>) -> Self {
        self.settings.prefix = prefix.into().into();
        self
    }

    /// A name for people, which [`Lock::inspect`](crate::Lock::inspect) shows where this registry has a lock: 1 to 64 of `A-Z`,
    /// `a-z`, `0-9`, `.`, `_` and `-`; a host's, say. Names need not be unique. Default: none.
    ///
    /// # Examples
    ///
    /// ```
    /// use lockstream::{LockRegistry, store::MemoryStore};
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let locks = LockRegistry::builder(MemoryStore::new()).name("billing-7").build()?;
    /// let lock = locks.obtain("till");
    /// let lease = lock.lease().await?;
    /// let owner = lock.inspect().await?.owner.expect("the lock is held");
    /// assert!(owner.starts_with("billing-7~"));
    /// # lease.release().await?;
    /// # Ok(()) }
    /// ```
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.settings.name = Some(name.into());
        self
    }

    /// How long a lease lasts unless it is renewed, as it is at every third of this if
    /// [`renewal`](Self::renewal) is not off: from 10 ms to 24 h. Default: 30 s.
    ///
    /// It is also for how long others wait when a holder has crashed.
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.settings.ttl = ttl;
        self
    }

    /// How long a caller is ready to wait. Default: 30 s; [`Duration::MAX`] is for ever.
    pub fn wait(mut self, wait: Duration) -> Self {
        self.settings.wait = wait;
        self
    }

    /// How to try again on a store that cannot tell who is next.
    pub fn repeat(mut self, repeat: Repeat) -> Self {
        self.settings.repeat = repeat;
        self
    }

    /// Whether the leases of locks that set no [`ttl`](crate::Lock::ttl) of their own are prolonged while
    /// they are held. Default: [`Renewal::watchdog`], at every third of the ttl, without end.
    pub fn renewal(mut self, renewal: Renewal) -> Self {
        self.settings.renewal = renewal;
        self
    }

    /// How many callers may wait for one key in this registry; one more gets
    /// [`LockError::QueueFull`](crate::LockError::QueueFull). A caller whose first question to the
    /// store is under way waits, too. Default: no limit.
    pub fn max_waiters(mut self, max_waiters: usize) -> Self {
        self.settings.max_waiters = max_waiters;
        self
    }

    /// How often the lock may be handed on to the next waiter in this process before another
    /// process gets its turn: 0 to 63. Four times as often, but no more than 63 times, where the store has
    /// said twice in a row that no other process stands in the key's queue. Default: 16.
    pub fn local_passes(mut self, local_passes: u32) -> Self {
        self.settings.local_passes = local_passes;
        self
    }

    /// For how long the lock may be handed on within this process before another process gets its
    /// turn. Default: 20 ms.
    pub fn local_span(mut self, local_span: Duration) -> Self {
        self.settings.local_span = local_span;
        self
    }

    /// How long the store may take to answer before its connection is given up and made anew: from
    /// 1 ms to 24 h. Default: 1 s.
    pub fn response_timeout(mut self, response_timeout: Duration) -> Self {
        self.settings.response_timeout = response_timeout;
        self
    }

    /// The registry. Does no I/O.
    ///
    /// # Errors
    ///
    /// [`BuildError`] if a setting is out of range.
    ///
    /// # Examples
    ///
    /// ```
    /// use lockstream::{LockRegistry, store::MemoryStore};
    /// let error = LockRegistry::builder(MemoryStore::new()).prefix("").build().unwrap_err();
    /// assert_eq!(error.to_string(), "invalid setting `prefix`: must not be empty");
    /// ```
    pub fn build(self) -> Result<LockRegistry, BuildError> {
        self.settings.check()?;
        let engine = Engine::new(&self.store, self.settings, self.clock);
        Ok(LockRegistry::new(engine))
    }

    #[cfg(test)]
    pub(crate) fn clock(mut self, clock: Clock) -> Self {
        self.clock = clock;
        self
    }
}

impl fmt::Debug for LockRegistryBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockRegistryBuilder")
            .field("store", &self.store)
            .field("settings", &self.settings)
            .finish_non_exhaustive()
    }
}
