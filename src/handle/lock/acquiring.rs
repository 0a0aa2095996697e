//! How a lock is acquired, held by its handle, and released.

use std::sync::Arc;
use std::time::Duration;

use super::Lock;
#[cfg(doc)]
use crate::base::LockError;
use crate::handle::LeaseView;
use crate::handle::acquire::{AcquireLease, Acquiring, LeaseOnce};
use crate::handle::extend::extend;
use crate::handle::manual::{Acquire, ExtendHeld, LeaseSlot, Release, acquire};

impl Lock {
    #[track_caller]
    fn acquiring(&self, wait: Option<Duration>) -> Acquiring {
        let mut options = self.options_here();
        options.wait = wait.or(options.wait);
        Acquiring::new(options)
    }

    #[track_caller]
    fn acquire_into_slot(&self, wait: Option<Duration>) -> Acquire {
        let acquiring = LeaseOnce(self.acquiring(wait));
        Acquire::new(acquire(acquiring, self.slot()))
    }

    fn slot(&self) -> Arc<LeaseSlot> {
        self.slot.get_or_init(Arc::default).clone()
    }

    /// Acquires the lock if it is free now: `true` if this handle holds it from now on, `false` if
    /// somebody else does.
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
    /// [`LockError::Store`] if the store cannot be reached, or does not answer within the registry's
    /// response time-out; [`LockError::TooSlow`] if answers take longer than a lease lasts;
    /// [`LockError::HandleInUse`] as by [`acquire`](Self::acquire); [`LockError::QueueFull`] if
    /// `max_waiters` callers of this registry wait for their first answer; [`LockError::Closed`]; an
    /// invalid key, ttl or setting.
    ///
    /// # Cancel safety
    ///
    /// Dropped before it is done, it has taken nothing: a lock that was granted meanwhile is released
    /// in the background.
    #[track_caller]
    #[must_use = "futures do nothing unless polled, and the bool that this one yields must be checked: `false` means that the lock is not held"]
    pub fn acquire_once(&self) -> Acquire {
        self.acquire_into_slot(Some(Duration::ZERO))
    }

    /// Acquires the lock, waiting for it as long as [`wait`](Self::wait) says: `true` if this
    /// handle holds it from now on, `false` if others held it for the whole wait.
    ///
    /// As with [`acquire_once`](Self::acquire_once), `if locks.obtain(k).acquire().await? { … }`
    /// would run unlocked. An exclusive handle that already holds the lock waits like any other.
    ///
    /// # The answer
    ///
    /// **The statement `lock.acquire().await?;` goes on without the lock after a wait in vain.** The compiler is silent
    /// about it: an `if` takes a `bool` and nothing else, and a `bool` that is dropped is no mistake to it. If you want
    /// an error, use [`lease`](Self::lease). Otherwise let the compiler speak, by its lint `unused_results`:
    ///
    /// ```compile_fail
    /// #![deny(unused_results)]
    /// # async fn f(lock: lockstream::Lock) -> Result<(), lockstream::LockError> {
    /// lock.acquire().await?; // error: unused result of type `bool`
    /// # Ok(()) }
    /// ```
    ///
    /// ```
    /// #![deny(unused_results)]
    /// # async fn f(lock: lockstream::Lock) -> Result<(), lockstream::LockError> {
    /// if lock.acquire().await? {
    ///     // work
    ///     let _released = lock.release().await?;
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// At run time a [`release`](Self::release) after a `false` logs a warning, unless the handle was asked meanwhile
    /// whether it [is acquired](Self::is_acquired).
    ///
    /// # Errors
    ///
    /// [`LockError::Store`] if the store could not be reached by the end of the wait;
    /// [`LockError::HandleInUse`], see below; [`LockError::TooSlow`], [`LockError::QueueFull`],
    /// [`LockError::Closed`]; an invalid key, ttl or setting.
    ///
    /// # One handle, one caller
    ///
    /// A handle holds one lease, until its [`release`](Self::release) or until the handle is dropped. So `acquire`
    /// fails with [`LockError::HandleInUse`] if the handle holds a [reader](Self::shared) or a [permit](Self::permits),
    /// or is acquiring one. It also fails if the handle's lease was lost and not released yet, be it while this call
    /// waited: otherwise a late release by whoever lost the lease would free the key under the next holder. `release`
    /// tells the loss, once. Then the handle can acquire again.
    ///
    /// # Cancel safety
    ///
    /// Polled by reference in a `select!` loop, it keeps its place in the queue. Dropped, it leaves
    /// the queue, and a lock that was granted meanwhile is released in the background. If it is
    /// granted the lock but not polled for a third of the ttl, the lock goes to the next waiter, and
    /// it queues again when it is polled.
    #[track_caller]
    #[must_use = "futures do nothing unless polled, and the bool that this one yields must be checked: `false` means that the lock is not held"]
    pub fn acquire(&self) -> Acquire {
        self.acquire_into_slot(None)
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
    #[must_use = "futures do nothing unless polled, and the bool that this one yields must be checked: `false` means that the lock is not held"]
    pub fn acquire_within(&self, wait: Duration) -> Acquire {
        self.acquire_into_slot(Some(wait))
    }

    /// Releases what this handle's `acquire` acquired: `Ok(true)` when it is released, `Ok(false)`
    /// if this handle did not hold the lock. It frees the key whatever
    /// [`on_finish`](Self::on_finish) says.
    ///
    /// `Ok(false)` is no error, so that a loser may clean up as a winner does: it frees nobody else's lock. It logs a
    /// warning if the last [`acquire`](Self::acquire) of the handle yielded `false`: the work since then had no lock,
    /// unless its answer was looked at.
    ///
    /// # Errors
    ///
    /// [`LockError::Lost`] if the lease was over before, reported once; [`LockError::Store`] if the
    /// store could not be told until the deadline.
    ///
    /// # Cancel safety
    ///
    /// Dropped before its first poll, it has done nothing; dropped later, the release goes on in the
    /// background.
    #[must_use = "a release that is not polled has done nothing"]
    pub fn release(&self) -> Release {
        let (slot, key) = (self.slot(), self.options.key().clone());
        Release::new(async move {
            match slot.take() {
                Some(lease) => lease.release().await.map(|()| true),
                None => {
                    slot.warn_of_refusal(&key);
                    Ok(false)
                }
            }
        })
    }

    /// A view of the lease that this handle's `acquire` brought, until it is released: with its token, its deadline, its
    /// owner in the store, [`lost`](LeaseView::lost) to be told of its loss, and [`verify`](LeaseView::verify). `None` if
    /// there is none.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), lockstream::LockError> {
    /// # let locks = lockstream::LockRegistry::in_memory();
    /// let lock = locks.obtain("k");
    /// assert!(lock.acquire().await?);
    /// let token = lock.view().expect("it was just acquired").token();
    /// # let _ = token;
    /// lock.release().await?;
    /// assert!(lock.view().is_none());
    /// # Ok(()) }
    /// ```
    pub fn view(&self) -> Option<LeaseView> {
        self.slot.get()?.view()
    }

    /// Extends the lease that this handle's `acquire` brought to at least `ttl` from now (10 ms to 24 h); it never gets
    /// shorter. Resolves to the new deadline, or to `None` if this handle holds nothing. See
    /// [`Lease::extend`](crate::Lease::extend).
    ///
    /// # Errors
    ///
    /// Those of [`Lease::extend`](crate::Lease::extend).
    ///
    /// # Cancel safety
    ///
    /// That of [`Lease::extend`](crate::Lease::extend).
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), lockstream::LockError> {
    /// # let locks = lockstream::LockRegistry::in_memory();
    /// let lock = locks.obtain("import").ttl(Duration::from_secs(10));
    /// assert!(lock.acquire().await?);
    /// // More rows than expected.
    /// let deadline = lock.extend(Duration::from_secs(60)).await?;
    /// assert_eq!(deadline, lock.view().map(|view| view.deadline()));
    /// lock.release().await?;
    /// assert_eq!(lock.extend(Duration::from_secs(60)).await?, None);
    /// # Ok(()) }
    /// ```
    #[must_use = "futures do nothing unless polled: the lease lasts no longer than before"]
    pub fn extend(&self, ttl: Duration) -> ExtendHeld {
        let view = self.view();
        ExtendHeld::new(async move {
            match view {
                Some(view) => extend(view.engine()?, view, ttl).await.map(Some),
                None => Ok(None),
            }
        })
    }

    /// Whether this handle's `acquire` holds the lock now. It becomes false at the lease's deadline,
    /// and is not about [`lease`](Self::lease), [`lease_within`](Self::lease_within) and
    /// [`lease_once`](Self::lease_once).
    pub fn is_acquired(&self) -> bool {
        self.slot.get().is_some_and(|slot| slot.is_valid())
    }

    /// Acquires the lock as a guard, waiting for it as long as [`wait`](Self::wait) says.
    ///
    /// # Errors
    ///
    /// [`LockError::NotAcquired`] if others held it for the whole wait, which
    /// [`or_skip`](AcquireLease::or_skip) turns into `Ok(None)`; otherwise those of
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

    /// Acquires the lock as a guard if it is free now; `None` if somebody else holds it.
    ///
    /// As a statement, `lock.lease_once().await?;` locks nothing: a guard that is there is dropped at once. The compiler
    /// is silent, since `if let Some(lease)` takes an [`Option`]; its lint `unused_results` speaks, as with
    /// [`acquire`](Self::acquire).
    ///
    /// ```compile_fail
    /// #![deny(unused_results)]
    /// # async fn f(lock: lockstream::Lock) -> Result<(), lockstream::LockError> {
    /// lock.lease_once().await?; // error: unused result of type `Option<Lease>`
    /// # Ok(()) }
    /// ```
    ///
    /// ```
    /// #![deny(unused_results)]
    /// # async fn f(lock: lockstream::Lock) -> Result<(), lockstream::LockError> {
    /// if let Some(lease) = lock.lease_once().await? {
    ///     lease.release().await?;
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`acquire_once`](Self::acquire_once).
    ///
    /// # Cancel safety
    ///
    /// That of [`acquire_once`](Self::acquire_once).
    #[track_caller]
    pub fn lease_once(&self) -> LeaseOnce {
        LeaseOnce(self.acquiring(Some(Duration::ZERO)))
    }
}
