mod acquiring;

use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

#[cfg(doc)]
use crate::base::LockError;
use crate::base::{Mode, OnFinish, OnLost, Renewal, Repeat};
use crate::engine::Engine;
use crate::handle::inspect::{Inspect, inspect};
use crate::handle::manual::LeaseSlot;
use crate::handle::options::LockOptions;

/// A handle to a named lock. It does nothing until it is acquired.
///
/// Made by [`obtain`](crate::LockRegistry::obtain), which does no I/O and cannot fail. An invalid key
/// or setting is reported at the first poll of any future that the handle makes.
///
/// **A handle is one caller, and a clone is another**: what one clone acquired, another neither holds nor releases. The
/// same goes for the handle that a setter returns. So give each task a clone of its own. A handle that several tasks
/// share, as `&Lock` or `Arc<Lock>`, makes clones for [`with_lock`](crate::FutureLockExt::with_lock), and its guards
/// ([`lease`](Self::lease)) are callers of their own. But [`acquire`](Self::acquire) and [`release`](Self::release) on
/// it are those of one caller. A lock is not reentrant unless [`reentrant`](Self::reentrant) was called.
///
/// Most work needs none of the methods here, only [`with_lock`](crate::FutureLockExt::with_lock).
///
/// A handle is cheap: setters allocate nothing, and nothing is sent before it is acquired.
#[must_use = "a Lock does nothing until it is acquired"]
pub struct Lock {
    options: LockOptions,
    /// Made by the first `acquire` or `release`: most handles are never acquired by hand.
    slot: OnceLock<Arc<LeaseSlot>>,
}

impl Lock {
    pub(crate) fn new(engine: Option<Arc<Engine>>, key: &str) -> Self {
        Self::with_options(LockOptions::new(engine, key))
    }

    /// A lock of all these keys.
    #[track_caller]
    pub(crate) fn of_all<K: AsRef<str>>(
        engine: Option<Arc<Engine>>,
        keys: impl IntoIterator<Item = K>,
    ) -> Self {
        Self::with_options(LockOptions::of_all(engine, keys))
    }

    fn with_options(options: LockOptions) -> Self {
        Self {
            options,
            slot: OnceLock::new(),
        }
    }

    /// The options of a lock that is used up, asked for where the caller's caller stands.
    #[track_caller]
    pub(crate) fn into_options(self) -> LockOptions {
        self.options.asked_here()
    }

    /// The options of a lock that stays, asked for where the caller's caller stands.
    #[track_caller]
    pub(crate) fn options_here(&self) -> LockOptions {
        self.options.clone().asked_here()
    }

    fn set(mut self, set: impl FnOnce(&mut LockOptions)) -> Self {
        set(&mut self.options);
        Self::with_options(self.options)
    }

    /// How long to wait for the lock while others hold it. Default: the registry's, 30 s.
    ///
    /// [`Duration::ZERO`] asks once and does not queue; [`Duration::MAX`] waits for ever. The store's
    /// first answer is awaited for one response time-out even if the wait is shorter, and counts if it
    /// comes after the wait. A store that does not answer is [`LockError::Store`](crate::LockError::Store),
    /// not busy.
    /// [`acquire_within`](Self::acquire_within) and [`lease_within`](Self::lease_within) have a wait
    /// of their own.
    pub fn wait(self, wait: Duration) -> Self {
        self.set(|options| options.wait = Some(wait))
    }

    /// Gives the lock a fixed lease of this length, from 10 ms to 24 h, which is not renewed unless
    /// [`renewal`](Self::renewal) says so: work that runs longer loses the lock.
    ///
    /// Without this call a lease has the registry's [ttl](crate::LockRegistryBuilder::ttl), 30 s by default, and is
    /// renewed while it is held. The usable part of a lease is 1 % and 2 ms shorter than its ttl, to allow for clock
    /// drift. A server keeps whole milliseconds.
    pub fn ttl(self, ttl: Duration) -> Self {
        self.set(|options| options.ttl = Some(ttl))
    }

    /// Whether the lease is renewed while it is held. Default: [`Renewal::off`] if
    /// [`ttl`](Self::ttl) was set, otherwise the registry's, which is [`Renewal::watchdog`].
    pub fn renewal(self, renewal: Renewal) -> Self {
        self.set(|options| options.renewal = Some(renewal))
    }

    /// How to retry on a store that cannot notify waiters; see [`Repeat`].
    pub fn repeat(self, repeat: Repeat) -> Self {
        self.set(|options| options.repeat = Some(repeat))
    }

    /// What happens to work under this lock whose lease is lost while it runs. Default:
    /// [`OnLost::Stop`].
    pub fn on_lost(self, on_lost: OnLost) -> Self {
        self.set(|options| options.on_lost = on_lost)
    }

    /// Lets this lock be acquired inside work that already holds it: nested in the work of a
    /// [`with_lock`](crate::FutureLockExt::with_lock) or [`with_lease`](Self::with_lease) on the
    /// same key through the same registry, it shares that lease at once, without a call to the
    /// store. Without this setting a nested lock waits until its `wait` is over, since the work
    /// around it cannot go on (builds with debug assertions log a warning with both places).
    ///
    /// Call it on the *inner* lock; the outer one needs no setting. Inside of nothing it is a lock like any other;
    /// [`nested`](Self::nested) is an error there.
    ///
    /// # What is inside
    ///
    /// A lock is inside if its first poll happens while the outer work, or stream, is polled in the
    /// same task. That includes `join!`, `select!`, boxed futures, `FuturesUnordered`, streams in
    /// streams, and a task that moves between threads. If the outer lease is over, the lock queues
    /// like any other. Not inside are:
    ///
    /// - what is given to `tokio::spawn`, and the tasks of a runtime or a `LocalSet` in the work;
    /// - what is done with a stream's items between two polls of it: put that into the stream,
    ///   `rows.then(…).with_lock(lock)`;
    /// - code next to a guard ([`lease`](Self::lease)) or a handle that holds
    ///   ([`acquire`](Self::acquire)): only combinators say where their work begins and ends. If a guard of the same
    ///   task holds the key for the whole wait, builds with debug assertions log a warning when that is over;
    /// - another process, another registry, another key.
    ///
    /// # What is shared
    ///
    /// **Those who share a lease do not exclude each other**: two branches of a `join!` inside, each
    /// under the nested lock, run concurrently. All see one token, one deadline and one
    /// [`lost()`](crate::LeaseView::lost). The ttl, the renewal and [`on_finish`](Self::on_finish) are those
    /// of the outermost lock, whatever was set on the nested one. After a loss each combinator
    /// follows its own [`on_lost`](Self::on_lost).
    ///
    /// The lock is released when the last one that shares the lease is gone. That is usually the
    /// outermost, but a guard or a handle that was carried out of the work keeps the lock until it is
    /// dropped. A release by one that is not the last resolves at once, and says whether the lease is
    /// still valid. A handle has one slot and does not count: what it acquired twice, one
    /// [`release`](Self::release) gives back.
    ///
    /// Only an exclusive lease is shared. Inside a [reader](Self::shared) or a [permit](Self::permits) of the key an
    /// exclusive lock is [`LockError::InvalidSetting`]: an upgrade would wait for the work around it.
    ///
    /// # Examples
    ///
    /// ```
    /// use lockstream::{FutureLockExt, LockError, LockRegistry};
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), LockError> {
    /// async fn book(locks: &LockRegistry, sum: i64) -> Result<i64, LockError> {
    ///     // Alone, or as a part of a larger operation on the same account.
    ///     let account = locks.obtain("account:7").reentrant();
    ///     async { sum }.with_lock(account).await
    /// }
    ///
    /// let locks = LockRegistry::in_memory();
    /// book(&locks, 10).await?;
    /// let both = async { tokio::try_join!(book(&locks, 10), book(&locks, -10)) };
    /// let booked = both.try_with_lock(locks.obtain("account:7")).await?;
    /// assert_eq!(booked, (10, -10));
    /// # Ok(()) }
    /// ```
    ///
    /// A guard that shares the lease sees what the outermost sees:
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), lockstream::LockError> {
    /// # let locks = lockstream::LockRegistry::in_memory();
    /// let lock = locks.obtain("row:7");
    /// let nested = lock.clone().reentrant();
    /// lock.try_with_lease(async |outer| {
    ///     let inner = nested.lease().await?;
    ///     assert_eq!(inner.token(), outer.token());
    ///     inner.release().await?; // not the last, so the lock is held on
    ///     assert!(outer.is_valid());
    ///     Ok::<_, lockstream::LockError>(())
    /// })
    /// .await?;
    /// # Ok(()) }
    /// ```
    pub fn reentrant(self) -> Self {
        self.set(|options| options.reentrant = true)
    }

    /// As [`reentrant`](Self::reentrant), and it must find a lease to share: a lock that is never acquired by itself.
    ///
    /// For work that is a part of larger work under the lock, and must not run without that. A `reentrant` lock that is
    /// inside of nothing is a lock like any other, with a token of its own: so it is if the two keys differ by a typo,
    /// or if the work around it was spawned. This one is an error then.
    ///
    /// # Errors
    ///
    /// [`LockError::InvalidSetting`] of each future, if no work around its first poll holds the key, or if that is a reader
    /// or a permit.
    ///
    /// # Examples
    ///
    /// ```
    /// use lockstream::{FutureLockExt, LockError, LockRegistry};
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), LockError> {
    /// async fn post(locks: &LockRegistry, sum: i64) -> Result<i64, LockError> {
    ///     // Only as a part of a booking, under whose lock the balance was read.
    ///     async { sum }.with_lock(locks.obtain("account:7").nested()).await
    /// }
    ///
    /// let locks = LockRegistry::in_memory();
    /// let posted = post(&locks, 10).try_with_lock(locks.obtain("account:7")).await?;
    /// assert_eq!(posted, 10);
    /// assert!(post(&locks, 10).await.is_err());
    /// assert!(post(&locks, 10).try_with_lock(locks.obtain("acount:7")).await.is_err());
    /// # Ok(()) }
    /// ```
    pub fn nested(self) -> Self {
        self.set(|options| {
            options.reentrant = true;
            options.is_nested = true;
        })
    }

    /// Makes this a lock for readers: any number of them hold it at a time, and no exclusive one. Nobody overtakes the
    /// queue, so a writer waits only for the readers before it.
    ///
    /// The last of `shared`, [`permits`](Self::permits) and [`permits_of`](Self::permits_of) counts.
    ///
    /// ```
    /// use lockstream::{FutureLockExt, LockRegistry};
    /// # async fn read() -> u32 { 7 } async fn write() {}
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), lockstream::LockError> {
    /// let locks = LockRegistry::in_memory();
    /// let both = async {
    ///     tokio::try_join!(
    ///         read().with_lock(locks.obtain("doc:7").shared()),
    ///         read().with_lock(locks.obtain("doc:7").shared()),
    ///     )
    /// };
    /// assert_eq!(both.await?, (7, 7)); // at the same time
    /// write().with_lock(locks.obtain("doc:7")).await?; // alone
    /// # Ok(()) }
    /// ```
    pub fn shared(self) -> Self {
        self.set(|options| options.mode = Mode::Shared)
    }

    /// Makes this one of `limit` permits, from 1: at most so many are held at a time, and no exclusive lease of the
    /// key. A permit whose holder crashes is free when its ttl is over, like any lease.
    ///
    /// If callers name different limits, as during a rolling update, each counts all permits that are held, and enters
    /// when they leave room for it within its own limit. With limits of 4 and 2, a caller with the limit 2 waits until
    /// at most one permit is held. The queue is one: whoever is in front holds up those behind it.
    ///
    /// ```
    /// use lockstream::{FutureLockExt, LockRegistry};
    /// # async fn resize() {}
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), lockstream::LockError> {
    /// let locks = LockRegistry::in_memory();
    /// resize().with_lock(locks.obtain("gpu").permits(4)).await?;
    /// # Ok(()) }
    /// ```
    ///
    /// As a rate limit, here five calls a second in all processes: each permit stays taken for its ttl.
    ///
    /// ```
    /// use lockstream::{LockRegistry, OnFinish};
    /// # async fn call() {}
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), lockstream::LockError> {
    /// # let locks = LockRegistry::in_memory();
    /// let second = std::time::Duration::from_secs(1);
    /// let slot = locks.obtain("api").permits(5).ttl(second).on_finish(OnFinish::LetExpire);
    /// drop(slot.lease().await?);
    /// call().await;
    /// # Ok(()) }
    /// ```
    pub fn permits(self, limit: u32) -> Self {
        self.permits_of(limit, 1)
    }

    /// As [`permits`](Self::permits), and this one takes `weight` of the `limit`: from 1 to 64, and at most the limit.
    ///
    /// ```
    /// use lockstream::{FutureLockExt, LockRegistry};
    /// # async fn train() {}
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), lockstream::LockError> {
    /// let locks = LockRegistry::in_memory();
    /// // As much as three of `permits(4)`.
    /// train().with_lock(locks.obtain("gpu").permits_of(4, 3)).await?;
    /// # Ok(()) }
    /// ```
    pub fn permits_of(self, limit: u32, weight: u32) -> Self {
        // What does not fit is refused later, like all that is more than 64.
        let weight = u8::try_from(weight).unwrap_or(u8::MAX);
        self.set(|options| options.mode = Mode::Permits { limit, weight })
    }

    /// What happens to the key when a lease of this lock ends. Default: [`OnFinish::Release`].
    ///
    /// Once an hour, on however many machines (and again if a machine crashes in the middle of it):
    ///
    /// ```
    /// use std::time::Duration;
    /// use lockstream::{FutureLockExt, LockRegistry, OnFinish};
    /// # async fn send_report() -> u32 { 1 }
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), lockstream::LockError> {
    /// let locks = LockRegistry::in_memory();
    /// let hourly = locks
    ///     .obtain("report")
    ///     .wait(Duration::ZERO)
    ///     .on_finish(OnFinish::KeepFor(Duration::from_secs(59 * 60)));
    /// assert_eq!(send_report().with_lock(&hourly).or_skip().await?, Some(1));
    /// // Done already, in this hour.
    /// assert_eq!(send_report().with_lock(&hourly).or_skip().await?, None);
    /// # Ok(()) }
    /// ```
    pub fn on_finish(self, on_finish: OnFinish) -> Self {
        self.set(|options| options.on_finish = on_finish)
    }

    /// The name of what is locked.
    pub fn key(&self) -> &str {
        self.options.key()
    }

    /// Reads the state of the lock in the store, without changing it.
    ///
    /// The answer may be outdated when it arrives: do not use it to decide whether to work.
    ///
    /// # Errors
    ///
    /// [`LockError::Store`] if the store does not answer; [`LockError::Closed`]; an invalid key or
    /// setting.
    pub fn inspect(&self) -> Inspect {
        Inspect::new(inspect(self.options.clone()))
    }
}

impl Clone for Lock {
    /// A caller of its own for the same key with the same settings, which holds nothing.
    fn clone(&self) -> Self {
        Self::with_options(self.options.clone())
    }
}

impl fmt::Debug for Lock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lock")
            .field("key", &self.key())
            .field("acquired", &self.is_acquired())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::future::ready;

    use super::*;
    use crate::combinator::FutureLockExt;

    #[test]
    fn a_reference_is_cloned_once_and_a_setter_makes_no_slot() {
        let lock = Lock::new(None, "k").wait(Duration::ZERO).reentrant();
        let before = Arc::strong_count(lock.options.key());
        let work = ready(()).with_lock(&lock);
        assert_eq!(Arc::strong_count(lock.options.key()), before + 1);
        assert!(lock.slot.get().is_none());
        assert!(lock.clone().slot.get().is_none());
        drop(work);
        assert_eq!(Arc::strong_count(lock.options.key()), before);
    }
}
