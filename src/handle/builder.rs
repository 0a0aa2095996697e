use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::base::{BuildError, Clock, Renewal, Repeat};
use crate::engine::Engine;
use crate::engine::settings::Settings;
use crate::handle::LockRegistry;
use crate::store::LockStore;
use crate::store::contract::RegistryOptions;

/// Settings of a registry; made by [`LockRegistry::builder`].
///
/// [`build`](Self::build) reports a setting that is out of range.
#[must_use = "a builder does nothing until it is built"]
pub struct LockRegistryBuilder {
    store: Arc<dyn LockStore>,
    settings: Settings,
    /// What the caller has set, of what a url may say as well.
    set: RegistryOptions,
    clock: Clock,
}

impl LockRegistryBuilder {
    pub(crate) fn new(store: impl LockStore) -> Self {
        Self {
            store: Arc::new(store),
            settings: Settings::default(),
            set: RegistryOptions::default(),
            clock: Clock::system(),
        }
    }

    /// The first part of every name in the store: 1 to 128 bytes, no control characters, no `~`, no `:`, and braces
    /// only with a hash tag. Registries with different prefixes share no locks, on any store. Default: `lock`.
    ///
    /// The lock `key` is named `prefix:key`, so the first `:` ends the prefix. A part of a service is `shop-billing`, or
    /// begins the keys: the prefix `shop` with the key `billing:7`.
    ///
    /// In a url it is `?prefix=`. If both are given, they must be the same.
    pub fn prefix(mut self, prefix: impl Into<String>) -> Self {
        self.set.prefix = Some(prefix.into());
        self
    }

    /// A name that [`Lock::inspect`](crate::Lock::inspect) shows for locks of this registry, such as a host name: 1 to
    /// 64 of `A-Z`, `a-z`, `0-9`, `.`, `_` and `-`. Names need not be unique. Default: `?name=` of the
    /// url, or none.
    ///
    /// # Examples
    ///
    /// ```
    /// use lockstream::{LockRegistry, store::MemoryStore};
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let locks = LockRegistry::builder(MemoryStore::new()).name("billing-7").build()?;
    /// let lock = locks.obtain("till");
    /// let lease = lock.lease().await?;
    /// let seen = lock.inspect().await?;
    /// assert!(seen.owner().expect("the lock is held").starts_with("billing-7~"));
    /// # lease.release().await?;
    /// # Ok(()) }
    /// ```
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.set.name = Some(name.into());
        self
    }

    /// How long a lease lasts: from 10 ms to 24 h. It is renewed at every third of this, unless
    /// [`renewal`](Self::renewal) is off. Default: 30 s.
    ///
    /// After a crash of a holder the others wait this long.
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.settings.ttl = ttl;
        self
    }

    /// How long a caller waits for a lock. Default: 30 s; [`Duration::MAX`] waits for ever.
    pub fn wait(mut self, wait: Duration) -> Self {
        self.settings.wait = wait;
        self
    }

    /// How to poll a store that cannot notify waiters.
    pub fn repeat(mut self, repeat: Repeat) -> Self {
        self.settings.repeat = repeat;
        self
    }

    /// Whether leases are renewed while they are held, for locks without a [`ttl`](crate::Lock::ttl) of their own.
    /// Default: [`Renewal::watchdog`], at every third of the ttl, without a limit.
    pub fn renewal(mut self, renewal: Renewal) -> Self {
        self.settings.renewal = renewal;
        self
    }

    /// How many callers may wait for one key in this registry. One more gets
    /// [`LockError::QueueFull`](crate::LockError::QueueFull). A caller that awaits the store's first answer counts,
    /// too. Default: no limit.
    pub fn max_waiters(mut self, max_waiters: usize) -> Self {
        self.settings.max_waiters = max_waiters;
        self
    }

    /// How often the lock may be passed to the next waiter in this process before another process gets it: 0 to 63.
    /// Four times as often, up to 63, if no other process was in the key's queue twice in a row. Default: 16.
    pub fn local_passes(mut self, local_passes: u32) -> Self {
        self.settings.local_passes = local_passes;
        self
    }

    /// How long the lock may be passed on within this process before another process gets it. Default: 20 ms.
    pub fn local_span(mut self, local_span: Duration) -> Self {
        self.settings.local_span = local_span;
        self
    }

    /// How long the store may take to answer before its connection is given up and made again: from 1 ms to 24 h.
    /// Default: `?response_timeout=` of the url, or 1 s.
    pub fn response_timeout(mut self, response_timeout: Duration) -> Self {
        self.set.response_timeout = Some(response_timeout);
        self
    }

    /// For how long a thread of this crate renews leases, and serves callers on other runtimes, while the runtime of the
    /// registry's tasks is too busy to do it. Default: 5 minutes. Zero: there is no such thread.
    ///
    /// A task that computes or blocks without an await can keep the timers and the network of a whole runtime from being
    /// looked after, however many threads it has. One thread a process looks whether the registries' own tasks run, as
    /// long as leases are held or waited for, and runs them while their runtime does not. It tells so by
    /// [`LockEvent::RuntimeBusy`](crate::LockEvent::RuntimeBusy) and in the log. A runtime that never comes back, say after a
    /// deadlock, keeps its locks for this time, counted from half a second after its last sign of life at the latest, and
    /// then until the ttl is over.
    ///
    /// Work that computes belongs on [`spawn_blocking`](tokio::task::spawn_blocking), or on a runtime of its own. If
    /// tokio's clock is paused when the registry is first used, there is no such thread for it.
    pub fn renew_while_busy(mut self, longest: Duration) -> Self {
        self.settings.renew_while_busy = longest;
        self
    }

    /// Builds the registry. Does no I/O.
    ///
    /// # Errors
    ///
    /// [`BuildError`] if a setting is out of range, or the url of the store has another prefix.
    ///
    /// # Examples
    ///
    /// ```
    /// use lockstream::{LockRegistry, store::MemoryStore};
    /// let error = LockRegistry::builder(MemoryStore::new()).prefix("").build().unwrap_err();
    /// assert_eq!(error.to_string(), "invalid setting `prefix`: must not be empty");
    /// ```
    pub fn build(mut self) -> Result<LockRegistry, BuildError> {
        self.settings
            .take(self.set, self.store.registry_options())?;
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
            .field("set", &self.set)
            .finish_non_exhaustive()
    }
}
