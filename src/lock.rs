use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crate::acquire::{AcquireLease, Acquiring, TryLease};
use crate::engine::Engine;
use crate::handle::{Acquire, Handle, Release};
use crate::inspect::Inspect;
use crate::plan::Plan;
use crate::renewal::Renewal;
use crate::repeat::Repeat;
use crate::settings::{OnFinish, OnLost};

/// A handle to a named lock. It does nothing until it is acquired.
///
/// Made by [`obtain`](crate::LockRegistry::obtain), which does no I/O and cannot fail: what is wrong
/// with a key or a setting is told at the first poll of whatever the handle makes.
///
/// **A clone is a caller of its own**, with an empty slot: what one clone acquired, another
/// neither holds nor releases. So is the handle that a setter returns. To share one handle, share
/// it visibly: `&Lock`, `Arc<Lock>`. A lock is not reentrant, unless [asked](Self::reentrant).
///
/// Most work needs none of the methods here, but [`with_lock`](crate::FutureLockExt::with_lock).
#[must_use = "a Lock does nothing until it is acquired"]
pub struct Lock {
    plan: Plan,
    /// Made when it is first asked for.
    handle: OnceLock<Arc<Handle>>,
}

impl Lock {
    pub(crate) fn new(engine: Option<Arc<Engine>>, key: &str) -> Self {
        Self::with_plan(Plan::new(engine, key))
    }

    fn with_plan(plan: Plan) -> Self {
        Self {
            plan,
            handle: OnceLock::new(),
        }
    }

    /// What it locks, and how, asked for where the caller's caller stands.
    #[track_caller]
    pub(crate) fn into_plan(self) -> Plan {
        self.plan.asked_here()
    }

    /// The same of a lock that is still needed.
    #[track_caller]
    pub(crate) fn plan_asked_here(&self) -> Plan {
        self.plan.clone().asked_here()
    }

    fn set(mut self, set: impl FnOnce(&mut Plan)) -> Self {
        set(&mut self.plan);
        Self::with_plan(self.plan)
    }

    #[track_caller]
    fn acquiring(&self, wait: Option<Duration>) -> Acquiring {
        let mut plan = self.plan_asked_here();
        plan.wait = wait.or(plan.wait);
        Acquiring::new(plan)
    }

    fn handle(&self) -> Arc<Handle> {
        self.handle.get_or_init(Arc::default).clone()
    }

    /// How long a caller is ready to wait for the lock, if it is not
    /// [`acquire_within`](Self::acquire_within) that says so. Default: the registry's, 30 s.
    /// [`Duration::ZERO`] asks once; [`Duration::MAX`] waits for ever.
    /// Any other wait that is shorter than the way to the store and back is over before its answer.
    pub fn wait(self, wait: Duration) -> Self {
        self.set(|plan| plan.wait = Some(wait))
    }

    /// How long a lease lasts: from 10 ms to 24 h. Default: the registry's, 30 s.
    ///
    /// A ttl that is set here is the whole length of the lease: it is not renewed, as others are,
    /// unless [`renewal`](Self::renewal) says so, and work that runs longer loses the lock. The
    /// usable part is 1 % and 2 ms shorter, for clocks that do not run alike. A server keeps whole
    /// milliseconds.
    pub fn ttl(self, ttl: Duration) -> Self {
        self.set(|plan| plan.ttl = Some(ttl))
    }

    /// Whether the lease is prolonged while it is held. Default: the registry's, which is
    /// [`Renewal::watchdog`]; [`Renewal::off`] if [`ttl`](Self::ttl) was set.
    pub fn renewal(self, renewal: Renewal) -> Self {
        self.set(|plan| plan.renewal = Some(renewal))
    }

    /// How to try again on a store that cannot tell who is next; see [`Repeat`].
    pub fn repeat(self, repeat: Repeat) -> Self {
        self.set(|plan| plan.repeat = Some(repeat))
    }

    /// What happens to work under this lock whose lease is lost while it runs. Default:
    /// [`OnLost::Stop`].
    pub fn on_lost(self, on_lost: OnLost) -> Self {
        self.set(|plan| plan.on_lost = on_lost)
    }

    /// Asks for this lock to be had at once inside work that holds it already: nested in the work
    /// of a [`with_lock`](crate::FutureLockExt::with_lock) or a [`with_lease`](Self::with_lease)
    /// on the same key through the same registry, it shares that lease, and the outermost frees
    /// the lock. Default: it waits like anybody else, which is in vain there (builds with debug
    /// assertions log a warning with both places).
    ///
    /// It is the *inner* lock that asks; the outer one needs nothing. Inside is what is polled
    /// for the first time while the work, or the stream, under the lock is polled in the same
    /// task: also in `join!`, `select!`, boxed futures, `FuturesUnordered`, streams in streams,
    /// and wherever the task moves. Everywhere else, and if the lease around is over, it
    /// queues as ever. Not inside are
    ///
    /// - what is given to `tokio::spawn`, and the tasks of a runtime or a `LocalSet` in the work;
    /// - what is done with a stream's items between two polls of it: put that into the stream,
    ///   `rows.then(…).with_lock(lock)`;
    /// - what stands beside a guard ([`lease`](Self::lease)) or a handle that holds
    ///   ([`acquire`](Self::acquire)): what they cover has no bounds to be inside of, so only
    ///   combinators can be nested in;
    /// - another process, another registry, another key.
    ///
    /// **Who shares a lease is not excluded**: two branches of a `join!` inside, each under
    /// the nested lock, run side by side. All see one token, one deadline and one
    /// [`lost()`](LeaseView::lost). Its ttl, its renewal and its end are those of the
    /// outermost lock, whatever the nested one was set to; it needs no wait, and no call to the store. On a
    /// loss each combinator stops its own work, or not, as its own [`on_lost`](Self::on_lost) says.
    ///
    /// Nobody ever holds a guard that does not hold: the lock is freed when the last that shares
    /// the lease is gone. As a rule that is the outermost; a guard, or a handle, that was carried
    /// out of the work keeps the lock until it is dropped, too. A release by one that is not the
    /// last resolves at once, and says whether the lease is still valid. A handle has one slot,
    /// and does not count: what it acquired twice, one [`release`](Self::release) gives back.
    ///
    /// # Examples
    ///
    /// ```
    /// use lockstream::{FutureLockExt, LockError, LockRegistry};
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), LockError> {
    /// async fn book(locks: &LockRegistry, sum: i64) -> Result<i64, LockError> {
    ///     // Alone, or as a part of something greater on the same account.
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
        self.set(|plan| plan.reentrant = true)
    }

    /// What becomes of the key when a lease of this lock ends. Default: [`OnFinish::Release`].
    ///
    /// At most once a minute, on however many machines:
    ///
    /// ```
    /// use std::time::Duration;
    /// use lockstream::{FutureLockExt, LockRegistry, OnFinish};
    /// # async fn send_report() -> u32 { 1 }
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), lockstream::LockError> {
    /// let locks = LockRegistry::in_memory();
    /// let minute = locks
    ///     .obtain("report")
    ///     .ttl(Duration::from_secs(60))
    ///     .wait(Duration::ZERO)
    ///     .on_finish(OnFinish::LetExpire);
    /// assert_eq!(send_report().with_lock(&minute).or_skip().await?, Some(1));
    /// // Done already, in this minute.
    /// assert_eq!(send_report().with_lock(&minute).or_skip().await?, None);
    /// # Ok(()) }
    /// ```
    pub fn on_finish(self, on_finish: OnFinish) -> Self {
        self.set(|plan| plan.on_finish = on_finish)
    }

    /// The name of what is locked.
    pub fn key(&self) -> &str {
        self.plan.key()
    }

    /// Looks at the lock in the store without touching it.
    ///
    /// What it tells may be over by the time you read it: never decide by it whether to work.
    ///
    /// # Errors
    ///
    /// [`LockError::Store`] if the store does not answer, and what is wrong with the key or the
    /// settings.
    pub fn inspect(&self) -> Inspect {
        Inspect::new(self.plan.clone())
    }

    /// Acquires the lock if that can be done now: true if this handle holds it from here on,
    /// false if others have it.
    ///
    /// ```no_run
    /// # async fn wrong(locks: lockstream::LockRegistry) -> Result<(), lockstream::LockError> {
    /// if locks.obtain("k").acquire_once().await? { /* WRONG: runs unlocked */ }
    /// # Ok(()) }
    /// ```
    ///
    /// The temporary `Lock` in that line is dropped before the body, which releases the lock (and
    /// warns). Keep the handle in a variable:
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), lockstream::LockError> {
    /// # let locks = lockstream::LockRegistry::in_memory();
    /// let lock = locks.obtain("k");
    /// if lock.acquire_once().await? {
    ///     // work
    ///     lock.release().await?;
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// [`LockError::Store`] if nothing listens, or no answer came within the registry's response
    /// time-out; [`LockError::QueueFull`] if the registry's `max_waiters` have their first question
    /// under way; [`LockError::Closed`]; what is wrong with the key, the ttl or the settings.
    ///
    /// # Cancel safety
    ///
    /// Dropped before it is done, it has taken nothing: what the store granted on the way is given
    /// back in the background.
    #[track_caller]
    pub fn acquire_once(&self) -> Acquire {
        Acquire::new(self.acquiring(Some(Duration::ZERO)), self.handle())
    }

    /// Acquires the lock, waiting for it as long as [`wait`](Self::wait) says: true if this
    /// handle holds it from here on, false if others had it all that time.
    ///
    /// As with [`acquire_once`](Self::acquire_once), `if locks.obtain(k).acquire().await? { … }`
    /// would run unlocked. A handle that holds already waits like anybody else.
    ///
    /// # Errors
    ///
    /// [`LockError::Store`] if the store could not be reached by the end of the wait;
    /// [`LockError::QueueFull`], [`LockError::Closed`]; what is wrong with the key, the ttl or the
    /// settings.
    ///
    /// # Cancel safety
    ///
    /// Polled again and again in a `select!` loop it keeps its place in line. Dropped, it gives the
    /// place up, and what was granted on the way is given back in the background. If it is granted
    /// the lock but not polled for a third of the ttl, the turn goes to the next, and it queues
    /// anew when it is polled.
    #[track_caller]
    pub fn acquire(&self) -> Acquire {
        Acquire::new(self.acquiring(None), self.handle())
    }

    /// [`acquire`](Self::acquire) with a wait of its own.
    ///
    /// # Errors
    ///
    /// Those of [`acquire`](Self::acquire).
    ///
    /// # Cancel safety
    ///
    /// That of [`acquire`](Self::acquire).
    #[track_caller]
    pub fn acquire_within(&self, wait: Duration) -> Acquire {
        Acquire::new(self.acquiring(Some(wait)), self.handle())
    }

    /// Releases what this handle's `acquire` brought: `Ok(true)` when it is released, `Ok(false)`
    /// if this handle did not hold the lock. It frees the key whatever
    /// [`on_finish`](Self::on_finish) says.
    ///
    /// # Errors
    ///
    /// [`LockError::Lost`] if the lease was over before, told once; [`LockError::Store`] if the
    /// store could not be told until the deadline.
    ///
    /// # Cancel safety
    ///
    /// Unpolled it has done nothing; once polled, it goes on in the background when it is dropped.
    pub fn release(&self) -> Release {
        Release::new(self.handle())
    }

    /// Whether this handle's `acquire` holds the lock now. It turns false at the lease's deadline
    /// by itself, and says nothing of [`lease`](Self::lease) and its sisters.
    pub fn is_acquired(&self) -> bool {
        self.handle.get().is_some_and(|handle| handle.is_valid())
    }

    /// Acquires the lock as a guard, waiting for it as long as [`wait`](Self::wait) says.
    ///
    /// # Errors
    ///
    /// [`LockError::NotAcquired`] if others had it all that time, which
    /// [`or_skip`](AcquireLease::or_skip) turns into `Ok(None)`; else those of
    /// [`acquire`](Self::acquire).
    ///
    /// # Cancel safety
    ///
    /// That of [`acquire`](Self::acquire).
    #[track_caller]
    pub fn lease(&self) -> AcquireLease {
        AcquireLease(self.acquiring(None))
    }

    /// [`lease`](Self::lease) with a wait of its own.
    ///
    /// # Errors
    ///
    /// Those of [`lease`](Self::lease).
    ///
    /// # Cancel safety
    ///
    /// That of [`acquire`](Self::acquire).
    #[track_caller]
    pub fn lease_within(&self, wait: Duration) -> AcquireLease {
        AcquireLease(self.acquiring(Some(wait)))
    }

    /// Acquires the lock as a guard if that can be done now; `None` if others have it.
    ///
    /// # Errors
    ///
    /// Those of [`acquire_once`](Self::acquire_once).
    ///
    /// # Cancel safety
    ///
    /// That of [`acquire_once`](Self::acquire_once).
    #[track_caller]
    pub fn lease_once(&self) -> TryLease {
        TryLease(self.acquiring(Some(Duration::ZERO)))
    }
}

impl Clone for Lock {
    /// A caller of its own for the same key, with the same settings and an empty slot.
    fn clone(&self) -> Self {
        Self::with_plan(self.plan.clone())
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
