use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures::future::FusedFuture;

use crate::base::user_code::log;
use crate::base::{LockError, LossCause, Mode, Token};
use crate::engine::{Caller, Engine, Phase};
use crate::handle::detached::DetachedLease;
use crate::handle::group::GroupAcquiring;
use crate::handle::lease::Lease;
use crate::handle::options::LockOptions;
use crate::handle::reentrancy;
use crate::turnstile::NotGranted;

/// One caller's acquisition of a lease: what every acquiring future wraps.
///
/// Dropped while it waits, it leaves the queue. Dropped after the key was granted and before it has
/// seen that, it gives the key back.
#[derive(Debug)]
pub(crate) struct Acquiring {
    options: LockOptions,
    /// The lease to take over, if it is not the key that is asked for.
    adopts: Option<Box<DetachedLease>>,
    /// The leases of a group that were acquired before. They are released if this wait ends in vain.
    behind: Vec<Arc<Caller>>,
    stage: Stage,
}

#[derive(Debug)]
enum Stage {
    Unpolled,
    Queued(Arc<Caller>),
    Group(Box<GroupAcquiring>),
    Done,
}

impl Acquiring {
    pub(crate) fn new(options: LockOptions) -> Self {
        Self {
            options,
            adopts: None,
            behind: Vec::new(),
            stage: Stage::Unpolled,
        }
    }

    /// For the next key of a group.
    pub(crate) fn behind(options: LockOptions, behind: Vec<Arc<Caller>>) -> Self {
        let mut acquiring = Self::new(options);
        acquiring.behind = behind;
        acquiring
    }

    pub(crate) fn adopting(engine: Arc<Engine>, detached: DetachedLease) -> Self {
        let mut options = LockOptions::new(Some(engine), detached.key());
        // It asks once: the lease is there, or it is lost.
        options.wait = Some(Duration::ZERO);
        options.mode = detached.mode();
        let mut acquiring = Self::new(options);
        acquiring.adopts = Some(Box::new(detached));
        acquiring
    }

    /// Makes the lock's `on_finish` apply only to work that succeeds.
    pub(crate) fn make_conditional(&mut self) {
        self.options.is_conditional = true;
    }

    pub(crate) fn is_done(&self) -> bool {
        matches!(self.stage, Stage::Done)
    }

    pub(crate) fn options(&self) -> &LockOptions {
        &self.options
    }

    /// Settings count before the first poll.
    pub(crate) fn options_mut(&mut self) -> &mut LockOptions {
        &mut self.options
    }

    /// From now on it knows when it [waits for others](Self::waits_for_others).
    pub(crate) fn hear_of_others(&mut self) {
        if let Stage::Unpolled = self.stage {
            self.options.hears_of_others = true;
        }
    }

    /// Whether it waits for others, which have the key, or for a store that has failed. True also if that is not known,
    /// since it was polled before [`hear_of_others`](Self::hear_of_others).
    pub(crate) fn waits_for_others(&self) -> bool {
        match &self.stage {
            Stage::Unpolled | Stage::Done => false,
            _ if !self.options.hears_of_others => true,
            Stage::Queued(caller) => caller.waits_for_others(),
            Stage::Group(group) => group.waits_for_others(),
        }
    }

    /// A lock that others held for the whole wait is [`LockError::NotAcquired`].
    pub(crate) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<Lease, LockError>> {
        let acquired = ready!(self.poll_stage(cx));
        self.stage = Stage::Done;
        Poll::Ready(acquired)
    }

    fn poll_stage(&mut self, cx: &mut Context<'_>) -> Poll<Result<Lease, LockError>> {
        if let Stage::Unpolled = self.stage {
            // Before anything is shared: what is refused alone is refused inside, too (H2).
            let (engine, mode) = self.options.checked()?;
            if let Some(detached) = &self.adopts
                && engine.holds(self.options.key(), detached.owner())
            {
                let key = self.options.key().clone();
                return Poll::Ready(Err(LockError::NotDetached { key }));
            }
            if self.options.is_group() {
                let group = GroupAcquiring::new(self.options.clone());
                self.stage = Stage::Group(Box::new(group));
            } else {
                let nested = self.nested(engine)?;
                if let Some(lease) = nested {
                    return Poll::Ready(Ok(lease));
                }
                let behind = std::mem::take(&mut self.behind);
                let mut caller = Caller::new(self.options.key().clone(), mode, &behind);
                if cfg!(debug_assertions) && !self.options.is_scoped {
                    caller.set_origin(self.options.place());
                }
                let caller = Arc::new(caller);
                self.stage = Stage::Queued(caller.clone());
                if let Some(token) = self.arrive(&caller) {
                    return Poll::Ready(Ok(self.lease(caller, token)));
                }
            }
        }
        if let Stage::Group(group) = &mut self.stage {
            return group.poll(cx);
        }
        loop {
            let Stage::Queued(caller) = &self.stage else {
                panic!("an acquiring future polled after it was done");
            };
            let engine = self.options.known_engine();
            match caller.phase_or_wake(cx.waker()) {
                Phase::Waiting => return Poll::Pending,
                Phase::Granted { .. } => {
                    if let Some(token) = engine.take(caller) {
                        let caller = caller.clone();
                        return Poll::Ready(Ok(self.lease(caller, token)));
                    }
                }
                // It was granted the lease, and was not polled for too long.
                Phase::TurnLost => {
                    let waited = caller.waited(engine.view_context.clock.now());
                    let refusal = if self.adopts.is_some() {
                        NotGranted::NothingToAdopt
                    } else if self.waits() && waited >= self.options.wait() {
                        NotGranted::Busy(None)
                    } else {
                        let caller = caller.clone();
                        match self.arrive(&caller) {
                            Some(token) => return Poll::Ready(Ok(self.lease(caller, token))),
                            None => continue,
                        }
                    };
                    engine.leave(caller);
                    return Poll::Ready(Err(self.refused(refusal, caller)));
                }
                Phase::Refused(refusal) => {
                    return Poll::Ready(Err(self.refused(refusal, caller)));
                }
                phase @ (Phase::Left
                | Phase::Held { .. }
                | Phase::Closing { .. }
                | Phase::Ended { .. }
                | Phase::Finishing { .. }
                | Phase::Finished { .. }) => {
                    unreachable!("{phase:?} before the lease was taken")
                }
            }
        }
    }

    /// A wait of zero asks once and does not enter the queue.
    fn waits(&self) -> bool {
        !self.options.wait().is_zero()
    }

    /// Shares the lease of the work that polls this, if the lock is reentrant. If it is not, the
    /// work waits for itself, and builds with debug assertions log that.
    fn nested(&self, engine: &Arc<Engine>) -> Result<Option<Lease>, LockError> {
        let deadlock = cfg!(debug_assertions) && self.waits();
        if !(self.options.reentrant || deadlock) {
            return Ok(None);
        }
        let Some(enclosing) = reentrancy::enclosing(engine, self.options.key()) else {
            let reason = "no work around it holds the key";
            return match self.options.is_nested {
                true => Err(self.options.fault("nested", reason)),
                false => Ok(None),
            };
        };
        if self.options.reentrant {
            // H2: others hold the key beside a reader or a permit. An upgrade would wait for the work around it.
            if enclosing.caller.mode() != Mode::Exclusive {
                let setting = match self.options.is_nested {
                    true => "nested",
                    false => "reentrant",
                };
                let reason = "cannot upgrade the shared lease or permit of the work around it";
                return Err(self.options.fault(setting, reason));
            }
            let (caller, on_finish) = (enclosing.caller, enclosing.on_finish);
            return Ok(Lease::share(engine.clone(), caller, on_finish));
        }
        log!(
            warn,
            key = &**self.options.key(),
            outer = %enclosing.place,
            inner = %self.options.place(),
            "lock awaited inside the work that holds it"
        );
        Ok(None)
    }

    /// A guard does not say what it is for, so only the end of a wait in vain shows that the waiting task may have
    /// waited for itself.
    fn warn_of_own_guard(&self, caller: &Caller) {
        let Some(outer) = self.options.known_engine().guard_of_this_task(caller) else {
            return;
        };
        log!(
            warn,
            key = &**self.options.key(),
            outer = %outer,
            inner = %self.options.place(),
            "lock not acquired: a guard of the same task held it for the whole wait"
        );
    }

    /// Returns the token if the caller has the lease already.
    fn arrive(&self, caller: &Arc<Caller>) -> Option<Token> {
        let engine = self.options.known_engine();
        let mut arrival = self.options.arrival();
        arrival.adopts = self.adopts.as_ref().map(|detached| detached.owner().into());
        engine.arrive(caller, arrival)
    }

    fn lease(&mut self, caller: Arc<Caller>, token: Token) -> Lease {
        let engine = self.options.take_engine();
        Lease::new(engine, caller, token, self.options.on_finish)
    }

    fn refused(&self, refusal: NotGranted, caller: &Caller) -> LockError {
        let engine = self.options.known_engine();
        let key = self.options.key().clone();
        if cfg!(debug_assertions)
            && let NotGranted::Busy(_) = refusal
            && self.waits()
        {
            self.warn_of_own_guard(caller);
        }
        match (refusal, &self.adopts) {
            (NotGranted::Busy(holding), _) => {
                let busy = LockError::NotAcquired {
                    key,
                    waited: match self.waits() {
                        true => caller.waited(engine.view_context.clock.now()),
                        // It has only asked.
                        false => Duration::ZERO,
                    },
                    holder: holding.map(|holding| engine.holder(&holding)),
                };
                log!(debug, "{busy}");
                busy
            }
            (NotGranted::QueueFull, _) => LockError::QueueFull {
                key,
                limit: engine.settings.max_waiters,
            },
            (NotGranted::Failed(source), _) => LockError::Store { key, source },
            (NotGranted::TooSlow { round_trip }, _) => LockError::TooSlow {
                key,
                ttl: self.options.ttl(engine),
                round_trip,
            },
            (NotGranted::NothingToAdopt, Some(detached)) => LockError::Lost {
                key,
                token: detached.token(),
                cause: LossCause::NothingToAdopt,
            },
            (NotGranted::NothingToAdopt, None) => unreachable!("nothing was to be adopted"),
            (NotGranted::Closed, _) => LockError::Closed { key },
        }
    }
}

impl Drop for Acquiring {
    fn drop(&mut self) {
        if let Stage::Queued(caller) = &self.stage {
            self.options.known_engine().leave(caller);
        }
    }
}

/// Future of [`Lock::lease`](crate::Lock::lease) and
/// [`Lock::lease_within`](crate::Lock::lease_within).
#[derive(Debug)]
#[must_use = "futures do nothing unless polled"]
pub struct AcquireLease(pub(crate) Acquiring);

impl Future for AcquireLease {
    type Output = Result<Lease, LockError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.0.poll(cx)
    }
}

impl FusedFuture for AcquireLease {
    fn is_terminated(&self) -> bool {
        self.0.is_done()
    }
}

/// Future of [`Lock::lease_once`](crate::Lock::lease_once).
#[derive(Debug)]
#[must_use = "futures do nothing unless polled"]
pub struct LeaseOnce(pub(crate) Acquiring);

impl Future for LeaseOnce {
    type Output = Result<Option<Lease>, LockError>;

    /// A lock that others hold is `Ok(None)`.
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.0.poll(cx).map(LockError::skip)
    }
}

impl FusedFuture for LeaseOnce {
    fn is_terminated(&self) -> bool {
        self.0.is_done()
    }
}
