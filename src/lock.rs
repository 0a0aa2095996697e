use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use futures::{Stream, TryFuture, TryStream};

use crate::acquire::{Acquire, AcquireLease, Acquiring, TryLease};
use crate::driver::Driver;
use crate::handle::{Handle, Release};
use crate::inspect::Inspect;
use crate::lease::LeaseView;
use crate::plan::Plan;
use crate::renewal::Renewal;
use crate::repeat::Repeat;
use crate::settings::OnLost;
use crate::{LockError, future, stream};

/// A handle to a named lock. It does nothing until it is acquired.
///
/// Made by [`obtain`](crate::LockRegistry::obtain), which does no I/O and cannot fail: what is wrong
/// with a key or a setting is told at the first poll of whatever the handle makes.
///
/// **A clone is a contender of its own**, with an empty slot: what one clone acquired, another
/// neither holds nor releases. So is the handle that a setter returns. To share one handle, share
/// it visibly: `&Lock`, `Arc<Lock>`. A lock is not reentrant.
///
/// Most work needs none of the methods here, but [`with_lock`](crate::FutureLockExt::with_lock).
#[must_use = "a Lock does nothing until it is acquired"]
pub struct Lock {
    plan: Plan,
    handle: Arc<Handle>,
}

impl Lock {
    pub(crate) fn new(driver: Option<Arc<Driver>>, key: &str) -> Self {
        let plan = Plan::new(driver, key);
        Self {
            plan,
            handle: Handle::new(),
        }
    }

    pub(crate) fn plan(&self) -> &Plan {
        &self.plan
    }

    fn set(mut self, set: impl FnOnce(&mut Plan)) -> Self {
        set(&mut self.plan);
        self.handle = Handle::new();
        self
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
    /// Work that runs longer loses the lock, unless the lease is renewed: a ttl that is set here is
    /// not, unless [`renewal`](Self::renewal) says so, whatever the registry does with others. The
    /// usable part is 1 % and 2 ms shorter, for clocks that do not run alike. A server keeps whole
    /// milliseconds.
    pub fn ttl(self, ttl: Duration) -> Self {
        self.set(|plan| plan.ttl = Some(ttl))
    }

    /// Whether the lease is prolonged while it is held. Default: the registry's; off if
    /// [`ttl`](Self::ttl) was set.
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
    pub fn acquire_once(&self) -> Acquire {
        self.acquire_by(Acquiring::once(self.plan.clone()))
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
    pub fn acquire(&self) -> Acquire {
        self.acquire_by(Acquiring::patient(self.plan.clone()))
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
    pub fn acquire_within(&self, wait: Duration) -> Acquire {
        self.acquire_by(Acquiring::within(self.plan.clone(), wait))
    }

    fn acquire_by(&self, acquiring: Acquiring) -> Acquire {
        Acquire::new(acquiring, self.handle.clone())
    }

    /// Releases what this handle's `acquire` brought: `Ok(true)` when it is released, `Ok(false)`
    /// if this handle did not hold the lock.
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
        Release::new(self.handle.clone())
    }

    /// Whether this handle's `acquire` holds the lock now. It turns false at the lease's deadline
    /// by itself, and says nothing of [`lease`](Self::lease) and its sisters.
    pub fn is_acquired(&self) -> bool {
        self.handle.is_valid()
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
    pub fn lease(&self) -> AcquireLease {
        AcquireLease::new(Acquiring::patient(self.plan.clone()))
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
    pub fn lease_within(&self, wait: Duration) -> AcquireLease {
        AcquireLease::new(Acquiring::within(self.plan.clone(), wait))
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
    pub fn lease_once(&self) -> TryLease {
        TryLease::new(Acquiring::once(self.plan.clone()))
    }

    /// Runs work under the lock that wants to see its lease: the fencing token, the loss.
    ///
    /// `work` is called once the lock is held, with a view that cannot release it. See
    /// [`with_lock`](crate::FutureLockExt::with_lock) for what happens when.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), lockstream::LockError> {
    /// # let locks = lockstream::LockRegistry::in_memory();
    /// let lock = locks.obtain("row:7");
    /// let token = lock.with_lease(async |lease| lease.token()).await?;
    /// assert!(token > 0);
    /// // hot work: spawn it inside, so that it starts when the lock is held
    /// let sum = lock.with_lease(|_| tokio::spawn(async { 1 + 1 })).await?.unwrap();
    /// # assert_eq!(sum, 2);
    /// # Ok(()) }
    /// ```
    pub fn with_lease<F, Fut>(&self, work: F) -> future::WithLease<F, Fut>
    where
        F: FnOnce(LeaseView) -> Fut,
        Fut: Future,
    {
        future::WithLease::new(self.plan.clone(), work)
    }

    /// [`with_lease`](Self::with_lease) for work that yields a `Result`: lock errors become the
    /// work's own by `From<LockError>`.
    pub fn try_with_lease<F, Fut>(&self, work: F) -> future::TryWithLease<F, Fut>
    where
        F: FnOnce(LeaseView) -> Fut,
        Fut: TryFuture + Future,
        Fut::Error: From<LockError>,
    {
        future::TryWithLease::new(self.with_lease(work))
    }

    /// Runs a stream under the lock that wants to see its lease; see
    /// [`StreamLockExt::with_lock`](crate::StreamLockExt::with_lock).
    pub fn with_lease_stream<F, S>(&self, work: F) -> stream::WithLease<F, S>
    where
        F: FnOnce(LeaseView) -> S,
        S: Stream,
    {
        stream::WithLease::new(self.plan.clone(), work)
    }

    /// [`with_lease_stream`](Self::with_lease_stream) for a stream of `Result`s: lock errors
    /// become the stream's own by `From<LockError>`.
    pub fn try_with_lease_stream<F, S>(&self, work: F) -> stream::TryWithLease<F, S>
    where
        F: FnOnce(LeaseView) -> S,
        S: TryStream + Stream,
        S::Error: From<LockError>,
    {
        stream::TryWithLease::new(self.with_lease_stream(work))
    }
}

impl Clone for Lock {
    /// A contender of its own for the same key, with the same settings and an empty slot.
    fn clone(&self) -> Self {
        Self {
            plan: self.plan.clone(),
            handle: Handle::new(),
        }
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
