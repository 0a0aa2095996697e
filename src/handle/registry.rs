use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::time::{Instant, timeout, timeout_at};

use crate::base::operation::operation;
use crate::engine::Engine;
use crate::handle::acquire::Acquiring;
use crate::handle::builder::LockRegistryBuilder;
use crate::handle::detached::{Adopt, DetachedLease};
use crate::handle::force::{ForceRelease, force_release};
use crate::handle::lock::Lock;
use crate::handle::options::LockOptions;
use crate::store::{LockStore, MemoryStore};

/// The process's own registry, if one was installed.
static INSTALLED: OnceLock<LockRegistry> = OnceLock::new();

/// A registry makes locks. It has a store, settings, and the state of the keys in use.
///
/// Cheap to clone; clones are the same registry. Two registries that are built separately compete with each other like
/// two processes. When the last registry, lock, lease and future of it are dropped, its connection closes and its
/// tasks end.
///
/// No runtime is needed to build one, so it may be a `static`. Its tasks start at the first poll, on the runtime that
/// polls. If that runtime ends, they move to another one on which somebody has waited for a lock or a loss, or else to
/// the runtime of whoever looks at a lease next. They do not run while their runtime is not driven (a current-thread
/// runtime between two calls of `block_on`): drop such a runtime, or use the registry on one that runs.
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

    /// A registry on a memory store of its own: it excludes the tasks of this process that use it. For tests and first
    /// steps.
    pub fn in_memory() -> Self {
        Self::with_defaults(MemoryStore::new())
    }

    /// Connects to a Redis or Valkey server: `redis://[[user:]password@]host[:port][/db]`,
    /// `rediss://…` (feature `tls-rustls`), or `unix:///path?db=&user=&pass=`; to a cluster,
    /// `redis+cluster://host:port,host:port/` (feature `cluster`), or behind sentinels,
    /// `redis+sentinel://host,host/service` (feature `sentinel`). Or to a PostgreSQL database:
    /// `postgres://[user[:password]@]host[:port][/database]` (feature `postgres`).
    ///
    /// The options of urls, such as `?prefix=shop&name=web-1`, are listed in `docs/urls.md`. For settings beside the url
    /// there is [`builder_for`](Self::builder_for).
    ///
    /// # Errors
    ///
    /// [`StoreError`](crate::StoreError) if the url is invalid, or the server cannot be reached within 5 s (or
    /// `?connect_timeout=`). If the service may start before its server, use [`builder_for`](Self::builder_for).
    #[cfg(any(feature = "redis", feature = "postgres"))]
    pub fn connect(url: impl Into<String>) -> Connect {
        let url = url.into();
        Connect::new(async move {
            #[cfg(all(feature = "postgres", feature = "redis"))]
            if is_postgres(&url) {
                let store = crate::store::PostgresStore::connect(url).await?;
                return Self::of_url(store);
            }
            #[cfg(feature = "redis")]
            let store = crate::store::RedisStore::connect(url).await?;
            #[cfg(not(feature = "redis"))]
            let store = crate::store::PostgresStore::connect(url).await?;
            Self::of_url(store)
        })
    }

    /// Builds a registry on the store that a url names, with settings of its own. The urls are those of
    /// [`connect`](Self::connect).
    ///
    /// Nothing is sent: the registry connects when it is first used, and a service may start before its server.
    ///
    /// # Errors
    ///
    /// If the url is invalid, or needs a feature that is not enabled.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// use std::time::Duration;
    /// use lockstream::LockRegistry;
    /// # fn f() -> Result<(), Box<dyn std::error::Error>> {
    /// let url = std::env::var("LOCKS_URL")?;
    /// let locks = LockRegistry::builder_for(url)?
    ///     .prefix("shop")
    ///     .ttl(Duration::from_secs(10))
    ///     .build()?;
    /// # let _ = locks; Ok(()) }
    /// ```
    #[cfg(any(feature = "redis", feature = "postgres"))]
    pub fn builder_for(
        url: impl AsRef<str>,
    ) -> Result<LockRegistryBuilder, crate::base::StoreError> {
        let url = url.as_ref();
        #[cfg(all(feature = "postgres", feature = "redis"))]
        if is_postgres(url) {
            return crate::store::PostgresStore::connect_lazy(url).map(Self::builder);
        }
        #[cfg(feature = "redis")]
        let store = crate::store::RedisStore::connect_lazy(url);
        #[cfg(not(feature = "redis"))]
        let store = crate::store::PostgresStore::connect_lazy(url);
        store.map(Self::builder)
    }

    #[cfg(any(feature = "redis", feature = "postgres"))]
    fn of_url(store: impl LockStore) -> Result<Self, crate::base::StoreError> {
        // The url may say what is out of range.
        let built = Self::builder(store).build();
        built.map_err(crate::base::StoreError::lasting)
    }

    fn with_defaults(store: impl LockStore) -> Self {
        let built = Self::builder(store).build();
        built.expect("the default settings are in range")
    }

    /// Builds a registry on any store, with settings of its own.
    pub fn builder(store: impl LockStore) -> LockRegistryBuilder {
        LockRegistryBuilder::new(store)
    }

    /// Makes this registry the default of the process. Bare keys use it: `work.with_lock("order:42")`.
    ///
    /// # Errors
    ///
    /// [`AlreadyInstalled`] if another one is installed. Installing the same one again is `Ok`.
    pub fn install(&self) -> Result<(), AlreadyInstalled> {
        let installed = INSTALLED.get_or_init(|| self.clone());
        if Arc::ptr_eq(&installed.engine, &self.engine) {
            Ok(())
        } else {
            Err(AlreadyInstalled(()))
        }
    }

    /// A handle to the lock named `key`: 1 to 512 bytes, no control characters.
    ///
    /// Does no I/O and cannot fail: an invalid key is reported at the first poll.
    pub fn obtain(&self, key: impl AsRef<str>) -> Lock {
        Lock::new(Some(self.engine.clone()), key.as_ref())
    }

    /// A handle to several locks as one: all of its keys are acquired, or none.
    ///
    /// The keys may be known at run time only. They are acquired one after the other in the order of their bytes, under
    /// one [`wait`](Lock::wait). So groups never wait for each other in a circle, whatever their keys and in whatever
    /// order they are given, and a group and a lock of one key do not either. Keys that are acquired already are renewed
    /// until the last one is. If one is lost meanwhile, it is acquired again within the same wait, and so are those after
    /// it.
    ///
    /// The lease is one: its deadline is the earliest of all keys, and the first loss is its loss.
    /// [`token`](crate::LeaseView::token) is that of the first key **in the order of their bytes**, not as they were given:
    /// for a write that belongs to one of the keys take [`token_of`](crate::LeaseView::token_of). Its [`key`](Lock::key) is all keys, separated by commas; a comma or a backslash in a key has a
    /// backslash before it, so two groups never have one name. A key that is given twice counts once. Groups are
    /// exclusive, and not [reentrant](Lock::reentrant).
    ///
    /// **A group or lock that is taken inside the work of another is not in that order.** Two tasks that nest in different
    /// orders wait for each other until their waits are over, as with any lock. Take all keys at once.
    ///
    /// ```
    /// use lockstream::{FutureLockExt, LockRegistry};
    /// # async fn transfer(from: &str, to: &str) {}
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), lockstream::LockError> {
    /// let locks = LockRegistry::in_memory();
    /// let (from, to) = ("account:7", "account:3");
    /// transfer(from, to).with_lock(locks.obtain_all([from, to])).await?;
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn obtain_all<K: AsRef<str>>(&self, keys: impl IntoIterator<Item = K>) -> Lock {
        Lock::of_all(Some(self.engine.clone()), keys)
    }

    /// Takes over a lease that was [detached](crate::Lease::detach), here or in another process.
    ///
    /// The new lease has this registry's ttl, counted from now, and its [`Renewal`](crate::Renewal), unless
    /// [`Adopt::ttl`] and [`Adopt::renewal`] say otherwise. Its token is greater than the detached one, so late writes
    /// with that one are refused where tokens are checked. Adopting does not use the queue: waiters for the key keep
    /// waiting, and this registry's own ticket may lose its place.
    ///
    /// A detached lease can be adopted once, by a registry with the same prefix on the same server. The text is all
    /// that is needed to take the lease, so keep it secret.
    ///
    /// # Errors
    ///
    /// [`LockError::Lost`](crate::LockError::Lost) with the detached token if the lease has expired, was adopted
    /// before, or has another prefix; also if the future had the lease and was not polled for a third of the ttl.
    /// [`LockError::Store`](crate::LockError::Store) if no answer came within the response time-out: the lease may
    /// still be there, so try again. [`LockError::Closed`](crate::LockError::Closed); an invalid key, ttl or setting.
    ///
    /// # Cancel safety
    ///
    /// Dropped before its first poll, it has done nothing. Dropped later, it has left the detached lease as it was, or
    /// has adopted it: then the lease is released in the background.
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
    /// let line = lease.detach()?.to_string();
    /// // … sent to another process …
    /// let detached: DetachedLease = line.parse()?;
    /// let lease = there.adopt(detached.clone()).await?;
    /// assert!(lease.token() > detached.token());
    /// lease.release().await?;
    /// # Ok(()) }
    /// ```
    ///
    /// For a fixed time, whatever this registry's own ttl is:
    ///
    /// ```
    /// use std::time::Duration;
    /// use lockstream::{DetachedLease, LockError, LockRegistry};
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), LockError> {
    /// async fn prolong(locks: &LockRegistry, left: DetachedLease) -> Result<DetachedLease, LockError> {
    ///     let lease = locks.adopt(left).ttl(Duration::from_secs(600)).await?;
    ///     Ok(lease.detach()?)
    /// }
    /// # let locks = LockRegistry::in_memory();
    /// # let left = prolong(&locks, locks.obtain("k").lease().await?.detach()?).await?;
    /// # locks.adopt(left).await?.release().await?;
    /// # Ok(()) }
    /// ```
    pub fn adopt(&self, detached: DetachedLease) -> Adopt {
        Adopt::new(Acquiring::adopting(self.engine.clone(), detached))
    }

    /// Takes a key from one of its holders by force, whoever that is, and gives it to whoever waits: for an operator, or a
    /// program that knows that the holder is gone or stuck.
    ///
    /// `owner` is its owner as [`InspectedHolder::owner`](crate::InspectedHolder::owner) has it, up to the last character.
    /// It may be an exclusive holder, one reader, one permit, a key that is [kept](crate::OnFinish::KeepFor), or the value
    /// of a foreign lock. The store compares and frees in one step, so another holder than the one that was seen never
    /// loses the key. Resolves to `true` if that owner held the key until now, and to `false` if it did not: then nothing
    /// was changed.
    ///
    /// **The holder is not asked.** Its next renewal tells it that its lease is lost, after a third of its ttl at most. A
    /// fixed lease is not renewed, and its holder works on to its deadline unless it [verifies](crate::Lease::verify) it.
    /// So somebody else may work at the same time; the next holder's token is greater. In PostgreSQL, a transaction that is
    /// [fenced](crate::LeaseView::fence) by the lease is waited for: it may commit, and the key is free after it.
    ///
    /// # Errors
    ///
    /// [`LockError::Store`](crate::LockError::Store) if there was no answer: it may have been done, so call it again.
    /// [`LockError::Closed`](crate::LockError::Closed); an invalid key.
    ///
    /// # Cancel safety
    ///
    /// Dropped before its first poll, it has done nothing. Dropped later, it may still be done.
    ///
    /// # Examples
    ///
    /// ```
    /// use lockstream::{LockRegistry, store::MemoryStore};
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let store = MemoryStore::new();
    /// # let stuck = LockRegistry::builder(store.clone()).build()?;
    /// # let locks = LockRegistry::builder(store).build()?;
    /// # let lease = stuck.obtain("import").lease().await?;
    /// let seen = locks.obtain("import").inspect().await?;
    /// let holder = &seen.holders[0];
    /// assert!(locks.force_release("import", &holder.owner).await?);
    /// assert!(!locks.force_release("import", &holder.owner).await?);
    /// # assert!(lease.verify().await.is_err());
    /// # Ok(()) }
    /// ```
    pub fn force_release(&self, key: impl AsRef<str>, owner: impl AsRef<str>) -> ForceRelease {
        let options = LockOptions::new(Some(self.engine.clone()), key.as_ref());
        ForceRelease::new(force_release(options, owner.as_ref().into()))
    }

    /// The events of this registry from now on: waits, acquisitions, ends of leases, and outages of the store.
    ///
    /// A stream of [`LockEvent`](crate::LockEvent)s in order. Each reader gets all of them. The last 1,024 events are
    /// stored for slow readers, in less than 100 KiB for all of them together. A reader that is slower gets
    /// [`LockEvent::Missed`](crate::LockEvent::Missed) with the number of lost events, and continues with the oldest
    /// stored one. Without a reader no events are stored, and they cost next to nothing.
    ///
    /// The stream does not keep the registry alive. It ends after the last event of a registry that was shut down or
    /// dropped. Other registries on the same store have their own events.
    ///
    /// With the feature `metrics` the events are also counted for the recorder of the `metrics` facade, by prefix and
    /// not by key, since there may be any number of keys; acquisitions and their waits by mode, too (`exclusive`, `shared`,
    /// `permit`), and lost leases by their [cause](crate::LossCause) (`fixed_ttl`, `store_unreachable` and so on): the gauges
    /// `lockstream_waiting` and `lockstream_held`; the counters `lockstream_acquired_total`,
    /// `lockstream_passed_total`, `lockstream_renewed_total`,
    /// `lockstream_renewal_unknown_total`, `lockstream_renewal_late_total`, `lockstream_lost_total`,
    /// `lockstream_given_up_total`, `lockstream_queue_full_total` and `lockstream_store_down_total`; the histograms
    /// `lockstream_wait_seconds` and `lockstream_hold_seconds`. Install the recorder before the first registry is
    /// built, or it does not get their descriptions.
    ///
    /// # Cancel safety
    ///
    /// Dropping the stream, or a `next()` on it, loses no event for other readers. The next `next()` gets the next
    /// event.
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
    pub fn events(&self) -> crate::observe::Events {
        self.engine.events()
    }

    /// [`events`](Self::events) without a bound: a test that reads at the end misses nothing.
    #[cfg(feature = "test-util")]
    #[doc(hidden)]
    pub fn every_event(&self) -> std::sync::mpsc::Receiver<crate::observe::LockEvent> {
        self.engine.every_event()
    }

    /// The leases and waiters of this registry now, and since when.
    ///
    /// It sends nothing: leases of other processes are not in it. It is made under the registry's own lock, and takes
    /// time proportional to the keys in use and the waiters.
    ///
    /// # Examples
    ///
    /// ```
    /// use lockstream::LockRegistry;
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), lockstream::LockError> {
    /// let locks = LockRegistry::in_memory();
    /// let lease = locks.obtain("till").lease().await?;
    /// for key in locks.snapshot().keys {
    ///     for held in &key.held {
    ///         assert_eq!((&*key.key, held.token), ("till", lease.token()));
    ///         println!("{} is held for {:?}", key.key, held.since.elapsed());
    ///     }
    /// }
    /// # lease.release().await
    /// # }
    /// ```
    #[must_use]
    pub fn snapshot(&self) -> crate::observe::Snapshot {
        self.engine.snapshot()
    }

    /// Lists the locks in the store whose keys begin with `prefix` and that somebody, of any registry, holds or waits
    /// for; with an empty prefix, all under this registry's own [prefix](crate::LockRegistryBuilder::prefix).
    ///
    /// A stream of [`ScannedLock`](crate::ScannedLock)s in no order, each once. It reads page by page as it is polled,
    /// so it needs no memory but for the keys that it has yielded, and holds up nobody. It is no snapshot: a lock that
    /// is taken or released meanwhile may be in it or not. Each item was true when the store told it.
    ///
    /// It has a connection of its own while it runs, on a cluster to each primary in turn. On Redis it needs the right
    /// to `scan`, which looks at all names of the database, and in PostgreSQL that to `scan_1`. For people and
    /// monitoring, not for programs that want to know whether a key is free: those acquire it.
    ///
    /// # Errors
    ///
    /// [`LockError::Store`](crate::LockError::Store) with a key if that key could not be read, say since another
    /// program's value has its name: the stream goes on. With `prefix` in place of a key if the store could not list
    /// its keys: the stream ends. A quorum never can. [`LockError::Closed`](crate::LockError::Closed).
    ///
    /// # Cancel safety
    ///
    /// It changes nothing. A `next()` may be dropped and called again.
    ///
    /// # Examples
    ///
    /// ```
    /// use futures::TryStreamExt;
    /// use lockstream::LockRegistry;
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), lockstream::LockError> {
    /// let locks = LockRegistry::in_memory();
    /// let lease = locks.obtain("order:42").lease().await?;
    /// let other = locks.obtain("user:7").lease().await?;
    /// let found: Vec<_> = locks.scan("order:").try_collect().await?;
    /// assert_eq!(found.len(), 1);
    /// assert_eq!(&*found[0].key, "order:42");
    /// assert_eq!(found[0].inspection.holders.len(), 1);
    /// # lease.release().await?; other.release().await
    /// # }
    /// ```
    pub fn scan(&self, prefix: impl AsRef<str>) -> crate::handle::scan::Scan {
        crate::handle::scan::Scan::new(self.engine.clone(), prefix.as_ref().into())
    }

    /// Asks the store one small question, as a lock would: for readiness probes. Yields how long the answer took.
    ///
    /// It uses the connections of the registry, and makes one only if there is none, as the first lock does. So it is true
    /// also while the server refuses further connections. A question is a call that goes with renewals: it writes nothing,
    /// and needs no right that locks do not. On one server it is one call; on a cluster one to each primary that this
    /// registry uses now, or to any if it uses none; on a quorum one to each node, and a majority must answer. A memory
    /// store answers at once. A connection that is asked more often than once a minute stays open.
    ///
    /// [`check`](Self::check) looks at more, and costs more.
    ///
    /// # Errors
    ///
    /// [`StoreError`](crate::StoreError) if there is no answer within the response time-out, to which the first connection
    /// adds its `connect_timeout`; if a server refuses; if the registry was shut down. While the store is down it is the
    /// reason of that, as in [`LockEvent::StoreDown`](crate::LockEvent::StoreDown).
    ///
    /// # Cancel safety
    ///
    /// It changes nothing, and may be dropped at any time. With a server that is gone it takes up to the response
    /// time-out, 1 s: give a probe more time than that (Kubernetes: `timeoutSeconds: 2`), or put a time-out around it.
    ///
    /// # Examples
    ///
    /// ```
    /// use lockstream::LockRegistry;
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), lockstream::StoreError> {
    /// let locks = LockRegistry::in_memory();
    /// // GET /ready
    /// let (status, body) = match locks.ping().await {
    ///     Ok(took) => (200, format!("the lock store answered in {took:?}")),
    ///     Err(error) => (503, error.to_string()),
    /// };
    /// # assert_eq!(status, 200, "{body}");
    /// # Ok(()) }
    /// ```
    pub fn ping(&self) -> Ping {
        let engine = self.engine.clone();
        Ping::new(async move {
            let session = engine.session().ok_or_else(closed)?;
            let began = Instant::now();
            let within = engine.settings.response_timeout + session.connects_within();
            let answered = session.ping(within).await;
            // What it waited for may be the pause after a failed attempt to connect.
            answered.map_err(|error| engine.away().unwrap_or(error))?;
            Ok(began.elapsed())
        })
    }

    /// Looks thoroughly whether the store can be used, and what it is: before anything else on a new machine, at a start or
    /// a deploy. For readiness probes, which are many, there is [`ping`](Self::ping).
    ///
    /// It connects to each server anew: of a cluster to all primaries, of a quorum to all nodes. Each must accept the
    /// user, take writes, and allow what every registry needs. What not everybody needs is told in the
    /// [`Check`](crate::Check): missing rights, servers that cannot push. No lock is touched, and the registry's own
    /// connection is not. `docs/operations.md` counts what it costs.
    ///
    /// It takes one `connect_timeout` and one response time-out at most: the servers are looked at side by side.
    ///
    /// # Errors
    ///
    /// [`StoreError`](crate::StoreError) if the store cannot be used: a server that cannot be reached in that time (of a
    /// quorum, if no majority is left), that refuses, that takes no writes, or whose PostgreSQL schema is missing. Its text
    /// says why, and [`is_retryable`](crate::StoreError::is_retryable) whether that may pass by itself. Also if the registry
    /// was shut down.
    ///
    /// # Cancel safety
    ///
    /// It changes nothing. Dropped, it closes its connections.
    ///
    /// # Examples
    ///
    /// ```
    /// use lockstream::LockRegistry;
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), lockstream::StoreError> {
    /// let locks = LockRegistry::in_memory();
    /// let check = locks.check().await?;
    /// println!("{check}");
    /// assert!(check.shares && check.servers[0].no_push.is_none());
    /// # Ok(()) }
    /// ```
    pub fn check(&self) -> CheckStore {
        let engine = self.engine.clone();
        CheckStore::new(async move {
            let session = engine.session().ok_or_else(closed)?;
            session.check().await
        })
    }

    /// Shuts the registry down. New callers, waiters and running work get
    /// [`LockError::Closed`](crate::LockError::Closed). Every lease is released, unless it is to
    /// [expire](crate::OnFinish::LetExpire), and every ticket is withdrawn. Resolves when the store has confirmed
    /// that, after three response time-outs at the latest. What is left then expires.
    ///
    /// Work in a combinator, or of a task that awaits [`Lease::lost`](crate::Lease::lost), is dropped before its lease
    /// is released, so nobody else begins before it has ended. It has 100 ms for that (one response time-out, if that
    /// is less). A guard whose loss nobody awaits is released at once: release it yourself before. If the program ends
    /// before this future resolves, leases that are left last for their ttl.
    ///
    /// The shutdown begins at the first poll. A second shutdown does nothing.
    ///
    /// # Cancel safety
    ///
    /// Once polled, the shutdown goes on in the background if the future is dropped.
    pub fn shutdown(&self) -> Shutdown {
        Shutdown::new(shut_down(self.engine.clone()))
    }

    /// Refuses new callers, waits up to `within` for held leases to end by themselves, and then [shuts
    /// down](Self::shutdown). For a process that is to stop without cutting off work.
    ///
    /// New callers of all clones of this registry get [`LockError::Closed`](crate::LockError::Closed), and so do
    /// waiters, since no new turn begins. Leases are renewed as before, and work may still lock what it holds, by
    /// [`reentrant`](Lock::reentrant). The work is not told: a service stops its own loops first.
    ///
    /// Resolves when the shutdown is done: as soon as nothing is held, or after `within` and the time of the shutdown.
    /// [`Duration::MAX`] waits as long as anything is held. A [`shutdown`](Self::shutdown) meanwhile ends the drain at
    /// once. Of two drains the one that ends first ends both.
    ///
    /// # Cancel safety
    ///
    /// The drain begins at the first poll. If it is dropped after that, the registry still refuses callers, and leases
    /// stay held until the next `drain` or `shutdown`.
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
        Drain::new(async move {
            engine.drain();
            let _ = timeout(within, engine.idle()).await;
            shut_down(engine).await;
        })
    }

    /// How many keys are in use: waited for, held, or being released.
    #[cfg(any(test, feature = "test-util"))]
    #[doc(hidden)]
    pub fn in_use(&self) -> usize {
        self.engine.in_use()
    }
}

fn closed() -> crate::base::StoreError {
    crate::base::StoreError::lasting("the registry is closed")
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

/// A lock of the installed registry. Without one its futures yield an error.
pub(crate) fn obtain_installed(key: &str) -> Lock {
    Lock::new(installed_engine(), key)
}

/// Several locks of the installed registry as one.
#[cfg(feature = "macros")]
pub(crate) fn obtain_all_installed<K: AsRef<str>>(keys: impl IntoIterator<Item = K>) -> Lock {
    Lock::of_all(installed_engine(), keys)
}

fn installed_engine() -> Option<Arc<Engine>> {
    INSTALLED.get().map(|registry| registry.engine.clone())
}

/// The error of [`LockRegistry::install`] if another registry is installed: it stays so for the life of the process.
/// Lock `(registry, key)` instead.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("another registry is already installed")]
pub struct AlreadyInstalled(());

#[cfg(any(feature = "redis", feature = "postgres"))]
operation! {
    /// Future of [`LockRegistry::connect`].
    #[must_use = "futures do nothing unless polled"]
    pub struct Connect(Operation<Result<LockRegistry, crate::base::StoreError>>);
}

operation! {
    /// Future of [`LockRegistry::check`].
    #[must_use = "futures do nothing unless polled"]
    pub struct CheckStore(Operation<Result<crate::base::Check, crate::base::StoreError>>);
}

operation! {
    /// Future of [`LockRegistry::ping`].
    #[must_use = "futures do nothing unless polled"]
    pub struct Ping(Operation<Result<Duration, crate::base::StoreError>>);
}

operation! {
    /// Future of [`LockRegistry::shutdown`].
    #[must_use = "futures do nothing unless polled"]
    pub struct Shutdown(Operation<()>);
}

operation! {
    /// Future of [`LockRegistry::drain`].
    #[must_use = "futures do nothing unless polled"]
    pub struct Drain(Operation<()>);
}

#[cfg(all(feature = "postgres", feature = "redis"))]
fn is_postgres(url: &str) -> bool {
    let scheme = url.split(':').next().unwrap_or(url);
    ["postgres", "postgresql"]
        .iter()
        .any(|it| scheme.eq_ignore_ascii_case(it))
}
