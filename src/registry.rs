use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::time::{Instant, timeout, timeout_at};

use crate::acquire::{AcquireLease, Acquiring};
use crate::builder::LockRegistryBuilder;
use crate::detached::{Adopt, DetachedLease};
use crate::engine::Engine;
use crate::lock::Lock;
use crate::operation::Operation;
use crate::store::{LockStore, MemoryStore};

/// The process's own registry, if one was installed.
static INSTALLED: OnceLock<LockRegistry> = OnceLock::new();

/// Where locks come from: a store, settings, and what is in use of it in this process.
///
/// Cheap to clone; clones are one registry. Each registry made anew is an instance of its own, to
/// others like another process. When the last registry, lock, lease and future of it are gone, its
/// connection closes and its tasks end.
///
/// Making one needs no runtime (it may stand in a `static`). Its tasks start at the first poll, on
/// the runtime that polls, and again when that runtime has gone. A runtime that is kept but not
/// driven (a current-thread one between two `block_on`) keeps its tasks from working: drop it, or
/// use the registry on one that runs.
///
/// # Examples
///
/// ```
/// use std::time::Duration;
/// use lockstream::{FutureLockExt, LockRegistry};
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), lockstream::LockError> {
/// let locks = LockRegistry::in_memory();
/// let lock = locks.obtain("order:42").wait(Duration::from_secs(3));
/// let receipt = async { "charged" }.with_lock(&lock).await?;
/// assert_eq!(receipt, "charged");
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct LockRegistry {
    pub(crate) engine: Arc<Engine>,
}

impl LockRegistry {
    pub(crate) fn new(engine: Arc<Engine>) -> Self {
        Self { engine }
    }

    /// A registry on a memory store of its own: it excludes tasks of this process that use it, and
    /// nobody else. For tests, and for trying things out.
    pub fn in_memory() -> Self {
        Self::with_defaults(MemoryStore::new())
    }

    /// Connects to a Redis or Valkey server: `redis://[[user:]password@]host[:port][/db]`,
    /// `rediss://…` (feature `tls-rustls`), or `unix:///path?db=&user=&pass=`; to a cluster,
    /// `redis+cluster://host:port,host:port/` (feature `cluster`), or behind sentinels,
    /// `redis+sentinel://host,host/service` (feature `sentinel`).
    ///
    /// # Errors
    ///
    /// [`StoreError`](crate::StoreError) if the url cannot be read, or the server not be reached
    /// within 5 s. To boot while the server is away, use
    /// [`RedisStore::connect_lazy`](crate::store::RedisStore::connect_lazy).
    #[cfg(feature = "redis")]
    pub fn connect(url: impl Into<String>) -> Connect {
        let connecting = crate::store::RedisStore::connect(url);
        Operation::new(async move { Ok(Self::with_defaults(connecting.await?)) })
    }

    fn with_defaults(store: impl LockStore) -> Self {
        let built = Self::builder(store).build();
        built.expect("the default settings are in range")
    }

    /// A registry on any store, with settings of its own.
    pub fn builder(store: impl LockStore) -> LockRegistryBuilder {
        LockRegistryBuilder::new(store)
    }

    /// Makes this registry the process's own, which bare keys ask: `work.with_lock("order:42")`.
    ///
    /// # Errors
    ///
    /// [`AlreadyInstalled`] if another one is; installing the same again is `Ok`.
    pub fn install(&self) -> Result<(), AlreadyInstalled> {
        let installed = INSTALLED.get_or_init(|| self.clone());
        if Arc::ptr_eq(&installed.engine, &self.engine) {
            Ok(())
        } else {
            Err(AlreadyInstalled(()))
        }
    }

    /// A handle to the lock that `key` names: 1 to 512 bytes, no control characters.
    ///
    /// Does no I/O and cannot fail: what is wrong with the key is told at the first poll.
    pub fn obtain(&self, key: impl AsRef<str>) -> Lock {
        Lock::new(Some(self.engine.clone()), key.as_ref())
    }

    /// Takes over a lease that was [detached](crate::Lease::detach), here or in another process.
    ///
    /// The new lease has this registry's ttl, counted from now, its [`Renewal`](crate::Renewal), and a token of its
    /// own, greater than the detached one: what is still written under that one is refused where
    /// tokens are checked. It does not enter the queue: whoever waits for the key waits on, and a
    /// process of which some wait may lose its place in the store's queue.
    ///
    /// A detached lease can be adopted once, by a registry with the same prefix on the same server.
    /// Its text is all that is needed to take it, so keep it from whoever may not have the lock.
    ///
    /// # Errors
    ///
    /// [`LockError::Lost`](crate::LockError::Lost) with the detached token if the lease is not there to be taken: it ran
    /// out, or was adopted before, or lies under another prefix; also if the future was not polled
    /// for a third of the ttl when it had it. [`LockError::Store`](crate::LockError::Store) if no answer came within the
    /// registry's response time-out: it may lie there still, so try again.
    /// [`LockError::Closed`](crate::LockError::Closed); what is wrong with the key or the settings.
    ///
    /// # Cancel safety
    ///
    /// Dropped before it is polled, it has done nothing. Dropped later, before it is done, it
    /// leaves the detached lease as it was, or has taken it: then it is given back in the
    /// background.
    ///
    /// # Examples
    ///
    /// ```
    /// use lockstream::{DetachedLease, LockRegistry, store::MemoryStore};
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let store = MemoryStore::new();
    /// # let here = LockRegistry::builder(store.clone()).build()?;
    /// # let there = LockRegistry::builder(store).build()?;
    /// let lease = here.obtain("upload:7").lease().await?;
    /// let line = lease.detach().to_string();
    /// // … sent to another process …
    /// let detached: DetachedLease = line.parse()?;
    /// let lease = there.adopt(detached.clone()).await?;
    /// assert!(lease.token() > detached.token());
    /// lease.release().await?;
    /// # Ok(()) }
    /// ```
    pub fn adopt(&self, detached: DetachedLease) -> Adopt {
        AcquireLease(Acquiring::adopting(self.engine.clone(), detached))
    }

    /// What happens in this registry from now on: who waits, who has a lock, how each lease ends,
    /// and whether the store is there.
    ///
    /// A stream of [`LockEvent`](crate::LockEvent), in the order in which things came about; each
    /// reader has its own. The last 1,024 events are kept for a reader that does not come: a slower
    /// one is told by [`LockEvent::Missed`](crate::LockEvent::Missed) how many it did not get, and
    /// goes on with the oldest that is left. All readers share these, in less than 100 KiB. Where nobody
    /// reads, nothing is kept, and next to nothing is spent.
    ///
    /// It keeps no registry at work, and ends after the last event of one that was shut down, or is
    /// gone. What happens in other registries is not told, be they on the same store.
    ///
    /// With the feature `metrics` the same is counted for the recorder of the `metrics` facade, by
    /// prefix and not by key, since there may be any number of keys: the gauges
    /// `lockstream_waiting` and `lockstream_held`; the counters `lockstream_acquired_total`,
    /// `lockstream_passed_total`, `lockstream_renewed_total`,
    /// `lockstream_renewal_unknown_total`, `lockstream_renewal_late_total`, `lockstream_lost_total`,
    /// `lockstream_given_up_total`, `lockstream_queue_full_total` and `lockstream_store_down_total`; the histograms
    /// `lockstream_wait_seconds` and `lockstream_hold_seconds`. Install the recorder before the first
    /// registry is made, or it does not get their descriptions.
    ///
    /// # Cancel safety
    ///
    /// Dropping it, or a `next()` on it, loses nothing for other readers; the next event stays the
    /// next.
    ///
    /// # Examples
    ///
    /// ```
    /// use futures::StreamExt;
    /// use lockstream::{FutureLockExt, LockEvent, LockRegistry};
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), lockstream::LockError> {
    /// let locks = LockRegistry::in_memory();
    /// let mut events = locks.events();
    /// async {}.with_lock(locks.obtain("till")).await?;
    /// locks.shutdown().await;
    /// while let Some(event) = events.next().await {
    ///     match event {
    ///         LockEvent::Acquired { key, token, waited, .. } => println!("{key} #{token} after {waited:?}"),
    ///         LockEvent::Lost { key, token, .. } => eprintln!("{key} #{token} was lost"),
    ///         LockEvent::Missed { count, .. } => eprintln!("{count} events were missed"),
    ///         other => println!("{other}"),
    ///     }
    /// }
    /// # Ok(()) }
    /// ```
    pub fn events(&self) -> crate::stream::Events {
        self.engine.events()
    }

    /// [`events`](Self::events) without a bound: a test that reads at the end misses nothing.
    #[cfg(feature = "test-util")]
    #[doc(hidden)]
    pub fn every_event(&self) -> std::sync::mpsc::Receiver<crate::LockEvent> {
        self.engine.every_event()
    }

    /// What this registry holds and waits for at this moment, and since when.
    ///
    /// Asks nobody: what other processes hold is not in it. It is gone through under the registry's
    /// own lock, so it costs as much as there are keys in use and callers waiting.
    ///
    /// # Examples
    ///
    /// ```
    /// use lockstream::LockRegistry;
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), lockstream::LockError> {
    /// let locks = LockRegistry::in_memory();
    /// let lease = locks.obtain("till").lease().await?;
    /// for key in locks.snapshot().keys {
    ///     let held = key.held.expect("nobody waits");
    ///     assert_eq!((&*key.key, held.token), ("till", lease.token()));
    ///     println!("{} is held for {:?}", key.key, held.since.elapsed());
    /// }
    /// # lease.release().await
    /// # }
    /// ```
    #[must_use]
    pub fn snapshot(&self) -> crate::Snapshot {
        self.engine.snapshot()
    }

    /// Shuts the registry down: no new callers, everybody who waits and everything that runs under
    /// a lock ends with [`LockError::Closed`](crate::LockError::Closed), every lease is released
    /// (unless it is to [run out](crate::OnFinish::LetExpire)) and every place in a queue given up. Resolves
    /// when the store has confirmed that, after three response time-outs at the latest; what is left then
    /// runs out by itself.
    ///
    /// Work that hears of it, a combinator's or whoever awaits [`Lease::lost`](crate::Lease::lost), is
    /// dropped before its lease is given back, so that nobody else begins before it has ended: it has
    /// 100 ms for that (one response time-out, where that is less). A guard whose end nobody watches for
    /// is given back at once: release it before. A program that ends before this resolves leaves to its ttl
    /// what still had time.
    ///
    /// It begins at the first poll. A second shutdown is a no-op.
    ///
    /// # Cancel safety
    ///
    /// Once polled it goes on in the background when it is dropped.
    pub fn shutdown(&self) -> Shutdown {
        Operation::new(shut_down(self.engine.clone()))
    }

    /// Takes no new callers, lets what is held and the work that runs end by itself for `within`, and then
    /// does what [`shutdown`](Self::shutdown) does: for a process that is to stop without cutting work off.
    ///
    /// Those who come get [`LockError::Closed`](crate::LockError::Closed), of all clones of this registry; so
    /// do at once those who wait already, since no new turn begins. Leases are renewed as before, and
    /// work may still lock what it holds, by [`reentrant`](Lock::reentrant). Nothing tells the work that it is to end: a
    /// service tells its own loops before.
    ///
    /// It resolves when the shutdown is done: as soon as nothing is held any more, and else after `within` and
    /// what the shutdown takes. [`Duration::MAX`] waits for as long as anything is held. A shutdown meanwhile ends
    /// it at once, and of two drains the one that ends first ends both.
    ///
    /// # Cancel safety
    ///
    /// It begins at the first poll. Dropped after that, the registry goes on taking nobody, and what is held goes on:
    /// nothing ends it until the next `drain` or `shutdown`.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use lockstream::{FutureLockExt, LockRegistry};
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let locks = LockRegistry::in_memory();
    /// let lock = locks.obtain("report");
    /// let work = tokio::spawn(async { "sent" }.with_lock(&lock));
    /// # tokio::task::yield_now().await;
    /// // … at SIGTERM …
    /// locks.drain(Duration::from_secs(20)).await;
    /// assert_eq!(work.await??, "sent");
    /// assert!(lock.acquire_once().await.is_err_and(|error| error.is_closed()));
    /// # Ok(()) }
    /// ```
    pub fn drain(&self, within: Duration) -> Drain {
        let engine = self.engine.clone();
        Operation::new(async move {
            engine.drain();
            let _ = timeout(within, engine.idle()).await;
            shut_down(engine).await;
        })
    }

    /// How many keys are in use: waited for, held, or being given back.
    #[cfg(any(test, feature = "test-util"))]
    #[doc(hidden)]
    pub fn in_use(&self) -> usize {
        self.engine.in_use()
    }
}

async fn shut_down(engine: Arc<Engine>) {
    let (grace, answered) = engine.close();
    if timeout_at(grace, engine.idle()).await.is_err() {
        // Not left to the timer, whose runtime may stand still. If the whole process did, what is
        // given back only now is to reach the store.
        engine.close();
        let soon = Instant::now() + engine.settings.response_timeout;
        let _ = timeout_at(answered.max(soon), engine.idle()).await;
    }
    engine.disconnect();
}

/// A lock of the installed registry, or one that says that there is none.
pub(crate) fn obtain_installed(key: &str) -> Lock {
    let engine = INSTALLED.get().map(|registry| registry.engine.clone());
    Lock::new(engine, key)
}

/// What [`LockRegistry::install`] says if another registry is installed: it stays so for the life of the
/// process. Lock `(registry, key)` instead.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("another registry is already installed")]
pub struct AlreadyInstalled(());

/// Future of [`LockRegistry::connect`].
#[cfg(feature = "redis")]
pub type Connect = Operation<Result<LockRegistry, crate::StoreError>>;

/// Future of [`LockRegistry::shutdown`].
pub type Shutdown = Operation<()>;

/// Future of [`LockRegistry::drain`].
pub type Drain = Operation<()>;
