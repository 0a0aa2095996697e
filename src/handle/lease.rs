use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use smallvec::SmallVec;
use tokio::time::Instant;

use crate::base::operation::operation;
use crate::base::{LockError, OnFinish, Token};
use crate::engine::{Caller, Engine, Phase};
use crate::handle::detached::{DetachError, DetachedLease};
use crate::handle::extend::{Extend, extend};
use crate::handle::lease_view::{Group, LeaseView};
use crate::handle::options::LockOptions;
use crate::handle::verify_lease::Verify;
use crate::turnstile::LeaseEnd;

pub use crate::handle::lease_view::Lost;

/// The time-limited right to a key, as a guard. Dropping it releases the lock in the background, unless its lock's
/// [`on_finish`](crate::Lock::on_finish) lets the key expire, or keeps it for a time.
///
/// Made by [`Lock::lease`](crate::Lock::lease), `lease_within` and `lease_once`. [`release`](Self::release) reports
/// whether the lease was valid to the end; a drop does not wait and reports nothing. If a lease is dropped just before
/// the runtime ends, nobody releases it and it lasts for its ttl: end a program with `release().await` or
/// [`LockRegistry::shutdown`](crate::LockRegistry::shutdown).
///
/// # Examples
///
/// ```
/// use lockstream::LockRegistry;
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), lockstream::LockError> {
/// let locks = LockRegistry::in_memory();
/// let lease = locks.obtain("till").lease().await?;
/// println!("fencing token {}", lease.token());
/// lease.release().await?;
/// # Ok(()) }
/// ```
#[must_use = "dropping a Lease releases the lock"]
#[clippy::has_significant_drop]
#[derive(Debug)]
pub struct Lease {
    engine: Arc<Engine>,
    view: LeaseView,
    /// Whether it has left the lease already, which others may share.
    parted: bool,
    on_finish: OnFinish,
}

impl Lease {
    pub(crate) fn new(
        engine: Arc<Engine>,
        caller: Arc<Caller>,
        token: Token,
        on_finish: OnFinish,
    ) -> Self {
        let view_context = engine.view_context.clone();
        Self {
            engine,
            view: LeaseView {
                view_context,
                caller,
                token,
                group: None,
            },
            on_finish,
            parted: false,
        }
    }

    /// The lease of several keys, from the views of their leases.
    pub(crate) fn of_group(options: &LockOptions, members: Vec<LeaseView>) -> Self {
        let engine = options.known_engine().clone();
        let renewals = options.renewals();
        // While the last key was waited for, the watchdog has renewed the others. From now on keys are kept.
        if renewals != u32::MAX || options.on_finish != OnFinish::Release {
            for member in &members {
                engine.restart(&member.caller, renewals, options.on_finish);
            }
        }
        let callers: Vec<_> = members.iter().map(|it| it.caller.clone()).collect();
        // Work that loses a key has not succeeded.
        let at_loss = match options.is_conditional {
            true => OnFinish::Release,
            false => options.on_finish,
        };
        engine.unite(&callers, at_loss);
        let first = members.first().expect("a group has several keys").clone();
        let group = Group {
            key: options.key().clone(),
            members,
            #[cfg(feature = "tokio-util")]
            cancellation: std::sync::OnceLock::new(),
        };
        Self {
            engine,
            view: LeaseView {
                group: Some(Arc::new(group)),
                ..first
            },
            on_finish: options.on_finish,
            parted: false,
        }
    }

    /// The view, for a guard that takes over.
    pub(crate) fn into_view(mut self) -> LeaseView {
        self.parted = true;
        self.view.clone()
    }

    /// Another guard of the lease around the caller, if it is still held.
    pub(crate) fn share(
        engine: Arc<Engine>,
        caller: Arc<Caller>,
        on_finish: OnFinish,
    ) -> Option<Self> {
        let token = caller.join(engine.view_context.clock.now())?;
        Some(Self::new(engine, caller, token, on_finish))
    }

    /// The name of what is locked.
    pub fn key(&self) -> &str {
        self.view.key()
    }

    /// The fencing token: strictly greater for every later lease of this key.
    pub fn token(&self) -> Token {
        self.view.token()
    }

    /// The fencing token of one of the keys; see [`LeaseView::token_of`].
    pub fn token_of(&self, key: &str) -> Option<Token> {
        self.view.token_of(key)
    }

    /// The owner of this lease in the store; see [`LeaseView::owner`].
    pub fn owner(&self) -> Option<String> {
        self.view.owner()
    }

    /// The owner of one of the keys; see [`LeaseView::owner_of`].
    pub fn owner_of(&self, key: &str) -> Option<String> {
        self.view.owner_of(key)
    }

    /// The time until which nobody else can hold the key, on our own clock. Each renewal moves it later. It may move
    /// earlier after the machine was suspended, since suspended time counts.
    pub fn deadline(&self) -> Instant {
        self.view.deadline()
    }

    /// Whether the lease is held and its deadline has not passed. False after a shutdown of its registry.
    pub fn is_valid(&self) -> bool {
        self.view.is_valid()
    }

    /// Asks the store whether it still has this lease, and prolongs nothing. [`is_valid`](Self::is_valid) looks at our own
    /// clock alone: it cannot know that somebody has deleted the key, or [released it by
    /// force](crate::LockRegistry::force_release), until the next renewal.
    ///
    /// `Ok` says that the store had the lease when it answered. It proves nothing for later: fence what must not be
    /// written by a stale holder.
    ///
    /// # Errors
    ///
    /// [`LockError::Lost`] if it is gone, or over: the lease is lost from then on, as if a renewal had found out.
    /// [`LockError::Store`] if no answer came within the registry's response time-out: then it is not known.
    /// [`LockError::Closed`] if the registry was shut down.
    ///
    /// # Cancel safety
    ///
    /// Dropped at any time, it has changed nothing.
    ///
    /// # Examples
    ///
    /// ```
    /// use lockstream::LockRegistry;
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), lockstream::LockError> {
    /// let locks = LockRegistry::in_memory();
    /// let lease = locks.obtain("till").lease().await?;
    /// lease.verify().await?;
    /// let owner = lease.owner().expect("it is held");
    /// locks.force_release("till", &owner).await?;
    /// assert!(lease.verify().await.is_err_and(|error| error.is_lost()));
    /// assert!(!lease.is_valid());
    /// # Ok(()) }
    /// ```
    pub fn verify(&self) -> Verify {
        self.view.verify()
    }

    /// Resolves when the lease is lost; see [`LeaseView::lost`].
    pub fn lost(&self) -> Lost {
        self.view.lost()
    }

    /// A view of this lease, to hand to the work.
    #[must_use]
    pub fn view(&self) -> LeaseView {
        self.view.clone()
    }

    /// Extends the lease to at least `ttl` from now (10 ms to 24 h); it never gets shorter. Resolves to the new
    /// deadline.
    ///
    /// For fixed and renewed leases. A renewed lease is renewed to its own ttl afterwards. If this process crashes,
    /// others wait until the extended end. The next lease of the key has its own ttl.
    ///
    /// # Errors
    ///
    /// [`LockError::InvalidTtl`] before anything is sent. [`LockError::Lost`] if the lease is over
    /// before the store has answered, [`LockError::Closed`] if its registry was shut down. [`LockError::Store`] if no
    /// answer came within the registry's response time-out: the extension is still retried as long as the lease lasts.
    ///
    /// # Cancel safety
    ///
    /// Dropped before its first poll, it has done nothing. Once polled, the extension goes on if the future is
    /// dropped.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use lockstream::LockRegistry;
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), lockstream::LockError> {
    /// let locks = LockRegistry::in_memory();
    /// let lease = locks.obtain("import").ttl(Duration::from_secs(10)).lease().await?;
    /// // More rows than expected.
    /// let deadline = lease.extend(Duration::from_secs(60)).await?;
    /// assert_eq!(deadline, lease.deadline());
    /// # Ok(()) }
    /// ```
    #[must_use = "futures do nothing unless polled: the lease lasts no longer than before"]
    pub fn extend(&self, ttl: Duration) -> Extend {
        Extend::new(extend(self.engine.clone(), self.view(), ttl))
    }

    /// Gives up the lease without releasing it, so that another process may [adopt](crate::LockRegistry::adopt) it.
    /// Nothing is sent, renewal stops, and the key stays in the store for the rest of its ttl.
    ///
    /// # Errors
    ///
    /// [`LockError::Lost`] if the lease is over, as far as is known here: nothing is left to adopt.
    /// [`LockError::InvalidSetting`] for a lease of [several keys](crate::LockRegistry::obtain_all), which can only be held
    /// as one. [`LockError::Closed`] after a shutdown; until the shutdown releases the lease, it can be detached.
    ///
    /// The [`DetachError`] has the lease, as it was: [`into_lease`](DetachError::into_lease) gives it back. If the error is
    /// dropped, or made a [`LockError`] by `?`, the lease is dropped, too.
    ///
    /// # What follows
    ///
    /// Others that [share](crate::Lock::reentrant) the lease lose it then. A renewal in flight may prolong the key
    /// once more. If the key was deleted in the store and no renewal has found that out yet, adopting it yields
    /// [`LockError::Lost`].
    ///
    /// # Examples
    ///
    /// ```
    /// use lockstream::LockRegistry;
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), lockstream::LockError> {
    /// # fn send(_line: String) {}
    /// let locks = LockRegistry::in_memory();
    /// match locks.obtain("upload:7").lease().await?.detach() {
    ///     Ok(detached) => send(detached.to_string()),
    ///     Err(refused) => {
    ///         println!("not handed on: {refused}");
    ///         refused.into_lease().release().await?;
    ///     }
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// [`LockRegistry::adopt`](crate::LockRegistry::adopt) takes it over. [`extend`](Self::extend) it before, if the other
    /// process needs more time than is left: a ttl that `adopt` is given counts from the adoption.
    pub fn detach(self) -> Result<DetachedLease, DetachError> {
        let (view, key) = (&self.view, self.view.whole_key().clone());
        if view.group.is_some() {
            let (setting, reason) = ("detach", "is for locks of one key only");
            let error = LockError::InvalidSetting {
                key,
                setting,
                reason,
            };
            return Err(DetachError::new(error, self));
        }
        // In the grace of a shutdown its end is still for its holder to choose.
        if let Some(loss) = view.loss().filter(LockError::is_lost) {
            return Err(DetachError::new(loss, self));
        }
        let now = view.view_context.clock.now();
        let left = view.caller.deadline().saturating_sub(now);
        let (mode, token) = (view.caller.mode(), view.token);
        match self.engine.detach(&view.caller) {
            Some(owner) => Ok(DetachedLease::new(key, owner, mode, token, left)),
            // It ended after the look.
            None => Err(DetachError::new(view.over(), self)),
        }
    }

    /// Releases the lock, and waits until the store has confirmed it. It frees the key whatever
    /// [`Lock::on_finish`](crate::Lock::on_finish) says.
    ///
    /// # Errors
    ///
    /// [`LockError::Lost`] if the lease was over before. [`LockError::Store`] if the store could not be told until the
    /// deadline: the key expires then, within the drift (1 % of the ttl and 2 ms) and one round trip.
    /// [`LockError::Closed`] after a shutdown.
    ///
    /// # Cancel safety
    ///
    /// Dropped at any time, polled or not, the release goes on in the background.
    #[must_use = "the lock is released in the background; await this to know that it was"]
    pub fn release(mut self) -> LeaseRelease {
        self.on_finish = OnFinish::Release;
        self.finish()
    }

    /// Ends the lease as its lock's [`on_finish`](crate::Lock::on_finish) says, and waits until the store has confirmed
    /// it: as a drop, but it tells whether the lease was valid to the end. It releases the lock, or
    /// [keeps](OnFinish::KeepFor) the key; a key that is [left to expire](OnFinish::LetExpire) needs no call.
    ///
    /// # Errors
    ///
    /// Those of [`release`](Self::release).
    ///
    /// # Cancel safety
    ///
    /// Dropped at any time, polled or not, the end goes on in the background.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use lockstream::{LockRegistry, OnFinish};
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), lockstream::LockError> {
    /// # async fn report() -> Result<(), std::io::Error> { Ok(()) }
    /// let locks = LockRegistry::in_memory();
    /// let hourly = OnFinish::KeepFor(Duration::from_secs(59 * 60));
    /// let Some(lease) = locks.obtain("report").on_finish(hourly).lease_once().await? else {
    ///     return Ok(());
    /// };
    /// match report().await {
    ///     // Done for this hour.
    ///     Ok(()) => lease.finish().await?,
    ///     // Another may try.
    ///     Err(_) => lease.release().await?,
    /// }
    /// # Ok(()) }
    /// ```
    #[must_use = "the lease is ended in the background; await this to know that it was"]
    pub fn finish(mut self) -> LeaseRelease {
        LeaseRelease::new(async move {
            // Before it leaves: after that the other holders may end the lease at any moment.
            let loss = self.is_shared().then(|| self.view.loss()).flatten();
            let mut parted = SmallVec::<[_; 1]>::new();
            self.part(|caller| parted.push(caller.clone()));
            let mut result = loss.map_or(Ok(()), Err);
            // All of them are being released by now.
            for caller in parted {
                result = result.and(ended(&caller).await);
            }
            result
        })
    }

    pub(crate) fn engine(&self) -> &Arc<Engine> {
        &self.engine
    }

    /// The last handle of the lock that holds it is dropped.
    pub(crate) fn dropped_while_held(&self) {
        for member in self.view.members() {
            self.engine.dropped_while_held(&member.caller);
        }
    }

    pub(crate) fn caller(&self) -> &Arc<Caller> {
        &self.view.caller
    }

    pub(crate) fn on_finish(&self) -> OnFinish {
        self.on_finish
    }

    /// The lock's `on_finish` is only for work that succeeds, so until then the key is to be released. Returns false if
    /// it shares the lease of a lock around it, whose `on_finish` holds.
    pub(crate) fn make_conditional(&self) -> bool {
        let is_own = !self.is_shared();
        if is_own {
            self.await_success(true);
        }
        is_own
    }

    /// The work has succeeded for which alone the lock's `on_finish` is. It holds for those, too, who share the lease
    /// and may end it later.
    pub(crate) fn succeed(&self) {
        self.await_success(false);
    }

    fn await_success(&self, awaits: bool) {
        for member in self.view.members() {
            member.caller.await_success(awaits);
        }
    }

    /// Whether the lock stays held when this guard goes, because others share its lease.
    pub(crate) fn is_shared(&self) -> bool {
        let mut members = self.view.members().iter();
        members.any(|member| member.caller.is_shared())
    }

    /// Whether its key stays in the store when it ends.
    pub(crate) fn is_kept(&self) -> bool {
        self.on_finish != OnFinish::Release
    }

    /// Leaves the lease, once. The last one that shares it ends it: `ended` is told whose leases that are.
    fn part(&mut self, mut ended: impl FnMut(&Arc<Caller>)) {
        if std::mem::replace(&mut self.parted, true) {
            return;
        }
        if self.view.group.is_some() {
            for member in self.view.members() {
                member.caller.leave_group();
            }
        }
        for member in self.view.members() {
            if member.caller.part() {
                self.engine.finish(&member.caller, self.on_finish);
                ended(&member.caller);
            }
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.part(|_| ());
    }
}

/// Waits until the store has answered to the end of a lease.
async fn ended(caller: &Caller) -> Result<(), LockError> {
    let ended = poll_fn(|cx| match caller.phase_or_wake(cx.waker()) {
        Phase::Finished { token, end } | Phase::Ended { token, end } => Poll::Ready((token, end)),
        _ => Poll::Pending,
    });
    let (token, end) = ended.await;
    let key = caller.key().clone();
    match end {
        LeaseEnd::Released => Ok(()),
        LeaseEnd::Lost(cause) => Err(LockError::Lost { key, token, cause }),
        LeaseEnd::Closed => Err(LockError::Closed { key }),
        LeaseEnd::Failed(source) => Err(LockError::Store { key, source }),
    }
}

operation! {
    /// Future of [`Lease::release`] and [`Lease::finish`].
    #[must_use = "the lease ends in the background; await this to know that it has ended"]
    pub struct LeaseRelease(Operation<Result<(), LockError>>);
}
