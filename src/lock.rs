use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use futures::{Stream, TryFuture, TryStream};

use crate::acquire::{Acquire, AcquireLease, Acquiring, TryLease};
use crate::engine::Engine;
use crate::handle::{Handle, Release};
use crate::inspect::Inspect;
use crate::lease::LeaseView;
use crate::plan::Plan;
use crate::renewal::Renewal;
use crate::repeat::Repeat;
use crate::settings::{OnFinish, OnLost};
use crate::{LockError, future, stream};

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
    handle: Arc<Handle>,
}

impl Lock {
    pub(crate) fn new(engine: Option<Arc<Engine>>, key: &str) -> Self {
        let plan = Plan::new(engine, key);
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
        self.acquire_by(Acquiring::once(self.plan.asked_here()))
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
        self.acquire_by(Acquiring::patient(self.plan.asked_here()))
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
        self.acquire_by(Acquiring::within(self.plan.asked_here(), wait))
    }

    fn acquire_by(&self, acquiring: Acquiring) -> Acquire {
        Acquire::new(acquiring, self.handle.clone())
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
    #[track_caller]
    pub fn lease(&self) -> AcquireLease {
        AcquireLease::new(Acquiring::patient(self.plan.asked_here()))
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
        AcquireLease::new(Acquiring::within(self.plan.asked_here(), wait))
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
        TryLease::new(Acquiring::once(self.plan.asked_here()))
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
    #[track_caller]
    pub fn with_lease<F, Fut>(&self, work: F) -> future::WithLease<F, Fut>
    where
        F: FnOnce(LeaseView) -> Fut,
        Fut: Future,
    {
        future::WithLease::new(self.plan.asked_here(), work)
    }

    /// [`with_lease`](Self::with_lease) for work that yields a `Result`: lock errors become the
    /// work's own by `From<LockError>`.
    #[track_caller]
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
    #[track_caller]
    pub fn with_lease_stream<F, S>(&self, work: F) -> stream::WithLease<F, S>
    where
        F: FnOnce(LeaseView) -> S,
        S: Stream,
    {
        stream::WithLease::new(self.plan.asked_here(), work)
    }

    /// [`with_lease_stream`](Self::with_lease_stream) for a stream of `Result`s: lock errors
    /// become the stream's own by `From<LockError>`.
    #[track_caller]
    pub fn try_with_lease_stream<F, S>(&self, work: F) -> stream::TryWithLease<F, S>
    where
        F: FnOnce(LeaseView) -> S,
        S: TryStream + Stream,
        S::Error: From<LockError>,
    {
        stream::TryWithLease::new(self.with_lease_stream(work))
    }

    /// Campaigns for the lead: a stream of [`Leadership`](crate::Leadership) that tells when this
    /// candidate leads and when it does not, for ever.
    ///
    /// To lead is to hold this lock, so there is one leader at a time, with a fencing token greater
    /// than any before. The first item is `Leader` if the lead is to be had at once, else
    /// `Follower`, and from then on the two alternate: a loss yields `Follower`, and the campaign
    /// begins anew. [`wait`](Self::wait), [`on_lost`](Self::on_lost) and
    /// [`on_finish`](Self::on_finish) do not matter here. The lease is renewed for as long as it leads, also if [`ttl`](Self::ttl) was set, unless
    /// [`renewal`](Self::renewal) says otherwise: the ttl is how long everybody waits for the next
    /// leader when the one there is has crashed.
    ///
    /// While the store cannot be reached a leader leads until the end of its lease; then, and for a
    /// candidate from the start, the answer is `Follower`. Whatever may mend, and be it much later, is tried
    /// again for ever, after pauses that grow to 5 s where waiting in line will not do, each with a
    /// warning in the log: a store that refuses (a wrong password, a missing right), a queue that
    /// is [full](LockError::QueueFull), a [`repeat`](Self::repeat) that ends. What cannot mend
    /// yields [`Ended`](crate::Leadership::Ended), and then the stream is over:
    /// [`Closed`](LockError::Closed), [`NoRegistry`](LockError::NoRegistry), what is wrong with the
    /// key, the ttl or the settings.
    ///
    /// A leader that does not poll the stream goes on leading; it learns of the loss by
    /// [`LeaseView::lost`], and by the stream when it polls again. A follower must poll: one that
    /// is granted the lead but does not look for a third of the ttl is passed over, and stands in
    /// line anew when it is polled. For work that is to run only while leading, there is
    /// [`lead`](Self::lead).
    ///
    /// # Cancel safety
    ///
    /// Dropping the stream resigns: what is held is released in the background, and the place in
    /// line given up. [`resign`](crate::stream::Campaign::resign) waits for that. `next()` may be
    /// dropped and called again in a `select!` loop; it loses nothing.
    ///
    /// # Examples
    ///
    /// ```
    /// use futures::StreamExt;
    /// use lockstream::{Leadership, LockRegistry};
    /// # #[tokio::main(flavor = "current_thread")] async fn main() {
    /// let locks = LockRegistry::in_memory();
    /// let mut campaign = locks.obtain("scheduler").leadership();
    /// # let mut terms = 0;
    /// while let Some(leadership) = campaign.next().await {
    ///     match leadership {
    ///         Leadership::Leader(lease) => println!("leading, token {}", lease.token()),
    ///         Leadership::Follower => println!("following"),
    ///         Leadership::Ended(why) => println!("no more of that: {why}"),
    ///         _ => {}
    ///     }
    /// #   terms += 1;
    /// #   if terms == 1 { locks.shutdown().await; }
    /// }
    /// # assert_eq!(terms, 2);
    /// # }
    /// ```
    pub fn leadership(&self) -> stream::Campaign {
        stream::Campaign::new(self.plan.clone())
    }

    /// Runs work only while leading: `work` is called with each term's lease, what it makes is
    /// dropped at once when the lead is lost, and it is called anew when the lead comes back.
    ///
    /// When the work completes under the lead, the lock is released and its value yielded. A loss
    /// that shows at the work's last poll or at the release counts as well: the value is dropped,
    /// and the work begins anew. So work may run several times, half or whole, and what it writes
    /// wants the token beside it. Campaigns are those of [`leadership`](Self::leadership).
    ///
    /// # Errors
    ///
    /// [`LockError::Closed`], [`LockError::NoRegistry`], and what is wrong with the key, the ttl or
    /// the settings. Trouble with the store is waited out.
    ///
    /// # Cancel safety
    ///
    /// Dropped, it drops the work and then resigns: what is held is released in the background,
    /// and the place in line given up.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), lockstream::LockError> {
    /// # let locks = lockstream::LockRegistry::in_memory();
    /// let lock = locks.obtain("scheduler");
    /// let jobs = vec!["nightly", "weekly"];
    /// let done = lock
    ///     .lead(|lease| {
    ///         // each term has work of its own
    ///         let jobs = jobs.clone();
    ///         async move { format!("{} jobs under token {}", jobs.len(), lease.token()) }
    ///     })
    ///     .await?;
    /// assert!(done.starts_with("2 jobs"));
    /// # Ok(()) }
    /// ```
    pub fn lead<F, Fut>(&self, work: F) -> future::Lead<F, Fut>
    where
        F: FnMut(LeaseView) -> Fut,
        Fut: Future,
    {
        future::Lead::new(self.plan.clone(), work)
    }
}

impl Clone for Lock {
    /// A caller of its own for the same key, with the same settings and an empty slot.
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
