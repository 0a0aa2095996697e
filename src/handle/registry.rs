mod ending;
mod looking;

use std::sync::{Arc, OnceLock};

#[cfg(any(feature = "redis", feature = "postgres"))]
use crate::base::operation::operation;
use crate::engine::Engine;
use crate::handle::acquire::Acquiring;
use crate::handle::builder::LockRegistryBuilder;
use crate::handle::detached::{Adopt, DetachedLease};
use crate::handle::force::{ForceRelease, force_release};
use crate::handle::lock::Lock;
use crate::handle::options::LockOptions;
use crate::store::{LockStore, MemoryStore};

pub use self::ending::{Drain, Shutdown};
pub use self::looking::{CheckStore, Ping};

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
/// In a process that forks, build and [install](Self::install) it in each child. A registry that was built before the fork
/// refuses there with [`InvalidSetting`](crate::LockError::InvalidSetting), and a lease that was held then is the parent's
/// alone. Take no lock before the fork: in the children of a process that has, no thread [renews while the runtime is
/// busy](crate::LockRegistryBuilder::renew_while_busy).
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
    /// `postgres://[user[:password]@]host[:port][/database]` (feature `postgres`), where it makes the schema `lockstream`
    /// if that is not there. `PostgresStoreBuilder::migrate` says otherwise.
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
    /// of a foreign lock. The store compares and frees in one step, so another owner than the one that was seen never
    /// loses the key. A registry may pass a key on to its next caller under the same owner, for some 20 ms: then that
    /// caller loses it. Resolves to `true` if that owner held the key until now, and to `false` if it did not: then nothing
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

    /// How many keys are in use: waited for, held, or being released.
    #[cfg(any(test, feature = "test-util"))]
    #[doc(hidden)]
    pub fn in_use(&self) -> usize {
        self.engine.in_use()
    }
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

#[cfg(all(feature = "postgres", feature = "redis"))]
fn is_postgres(url: &str) -> bool {
    let scheme = url.split(':').next().unwrap_or(url);
    ["postgres", "postgresql"]
        .iter()
        .any(|it| scheme.eq_ignore_ascii_case(it))
}
