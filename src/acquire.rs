use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures::future::FusedFuture;

use crate::LockError;
use crate::engine::{Arrival, Engine, Phase, WaiterState};
use crate::handle::Handle;
use crate::lease::Lease;
use crate::nesting;
use crate::plan::Plan;
use crate::turnstile::{Patience, Verdict};
use crate::user_code::log;

/// A caller on its way to a lease: what every acquiring future wraps.
///
/// Dropped while it waits, it leaves the line; dropped when the key is its but it has not looked,
/// the key is given on.
pub(crate) struct Acquiring {
    plan: Plan,
    patience: Patience,
    wait: Duration,
    stage: Stage,
}

enum Stage {
    Unpolled,
    InLine(Arc<WaiterState>),
    Done,
}

/// How an acquisition ends, errors aside.
pub(crate) enum Acquired {
    Lease(Lease),
    /// Others had the key for all of that time.
    Busy {
        waited: Duration,
    },
}

impl Acquiring {
    pub(crate) fn once(plan: Plan) -> Self {
        Self::new(plan, Patience::Once, Duration::ZERO)
    }

    pub(crate) fn within(plan: Plan, wait: Duration) -> Self {
        let patience = if wait.is_zero() {
            Patience::Once
        } else {
            Patience::Queue
        };
        Self::new(plan, patience, wait)
    }

    /// With the lock's own wait, else the registry's.
    pub(crate) fn patient(plan: Plan) -> Self {
        let wait = plan.wait();
        Self::within(plan, wait)
    }

    fn new(plan: Plan, patience: Patience, wait: Duration) -> Self {
        Self {
            plan,
            patience,
            wait,
            stage: Stage::Unpolled,
        }
    }

    pub(crate) fn is_done(&self) -> bool {
        matches!(self.stage, Stage::Done)
    }

    pub(crate) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<Acquired, LockError>> {
        loop {
            match &self.stage {
                Stage::Done => panic!("an acquiring future polled after it was done"),
                Stage::Unpolled => {
                    let nested = match self.plan.engine() {
                        Ok(engine) => self.nested(engine),
                        Err(fault) => {
                            self.stage = Stage::Done;
                            return Poll::Ready(Err(fault));
                        }
                    };
                    if let Some(lease) = nested {
                        self.stage = Stage::Done;
                        return Poll::Ready(Ok(Acquired::Lease(lease)));
                    }
                    let caller = WaiterState::new(self.plan.hashed_key().clone());
                    self.stage = Stage::InLine(Arc::new(caller));
                    self.arrive();
                }
                Stage::InLine(caller) => match caller.phase_or_wake(cx.waker()) {
                    Phase::Waiting => return Poll::Pending,
                    Phase::Granted { .. } => {
                        if let Some(token) = self.plan.registry().take(caller)
                            && let Stage::InLine(caller) =
                                std::mem::replace(&mut self.stage, Stage::Done)
                        {
                            let (engine, on_finish) =
                                (self.plan.take_registry(), self.plan.on_finish);
                            let lease = Lease::new(engine, caller, token, on_finish);
                            return Poll::Ready(Ok(Acquired::Lease(lease)));
                        }
                    }
                    Phase::TurnLost => {
                        let engine = self.plan.registry();
                        let waited = caller.waited(engine.clock().now());
                        if waited >= self.wait && self.patience == Patience::Queue {
                            engine.leave(caller);
                            self.stage = Stage::Done;
                            return Poll::Ready(Ok(Acquired::Busy { waited }));
                        }
                        self.arrive();
                    }
                    Phase::Refused(verdict) => {
                        let now = self.plan.registry().clock().now();
                        let waited = caller.waited(now);
                        let refused = self.refused(verdict, waited);
                        self.stage = Stage::Done;
                        return Poll::Ready(refused);
                    }
                    phase => unreachable!("{phase:?} before it was taken"),
                },
            }
        }
    }

    /// The lease that this is asked for inside of, if it may be shared. Else who waits for it does
    /// so in vain, which is said where it may be mended.
    fn nested(&self, engine: &Arc<Engine>) -> Option<Lease> {
        let in_vain = cfg!(debug_assertions) && self.patience == Patience::Queue;
        if !(self.plan.reentrant || in_vain) {
            return None;
        }
        let around = nesting::around(engine, self.plan.key())?;
        if self.plan.reentrant {
            return Lease::share(engine.clone(), around.caller, around.on_finish);
        }
        log!(warn,
            key = &**self.plan.key(),
            outer = %around.place,
            inner = %self.plan.place(),
            "a lock is waited for inside the work that holds it, which is in vain: nothing frees \
             it before that work goes on. Take it once, or ask for the inner one with `reentrant()`"
        );
        None
    }

    fn arrive(&self) {
        if let Stage::InLine(caller) = &self.stage {
            let engine = self.plan.registry();
            // One who does not wait gives the store the time in which it must have answered.
            let wait = match self.patience {
                Patience::Once => engine.settings().response_timeout,
                Patience::Queue => self.wait,
            };
            let arrival = Arrival {
                ttl: self.plan.ttl(),
                renewals: self.plan.renewal().times(),
                on_finish: self.plan.on_finish,
                patience: self.patience,
                wait,
                repeats: self.plan.repeats(),
            };
            engine.arrive(caller, arrival);
        }
    }

    fn refused(&self, verdict: Verdict, waited: Duration) -> Result<Acquired, LockError> {
        let key = self.plan.key().clone();
        Err(match verdict {
            Verdict::Busy => return Ok(Acquired::Busy { waited }),
            Verdict::QueueFull => LockError::QueueFull {
                key,
                limit: self.plan.max_waiters(),
            },
            Verdict::Failed(source) => LockError::Store { key, source },
            _ => LockError::Closed { key },
        })
    }
}

impl Drop for Acquiring {
    fn drop(&mut self) {
        if let Stage::InLine(caller) = &self.stage {
            self.plan.registry().leave(caller);
        }
    }
}

impl fmt::Debug for Acquiring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let stage = match self.stage {
            Stage::Unpolled => "not polled yet",
            Stage::InLine(_) => "in line",
            Stage::Done => "done",
        };
        f.debug_struct("Acquiring")
            .field("key", self.plan.key())
            .field("stage", &stage)
            .finish()
    }
}

/// Future of [`Lock::acquire`](crate::Lock::acquire) and its sisters.
#[derive(Debug)]
#[must_use = "futures do nothing unless polled, and the bool that this one yields must be checked: `false` means that the lock is not held"]
pub struct Acquire {
    acquiring: Acquiring,
    /// Kept alive until it resolves; the lease goes into its slot.
    handle: Option<Arc<Handle>>,
}

impl Acquire {
    pub(crate) fn new(acquiring: Acquiring, handle: Arc<Handle>) -> Self {
        let handle = Some(handle);
        Self { acquiring, handle }
    }
}

impl Future for Acquire {
    type Output = Result<bool, LockError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let acquired = std::task::ready!(self.acquiring.poll(cx));
        let handle = self.handle.take().expect("kept until it resolves");
        Poll::Ready(match acquired {
            Ok(Acquired::Lease(lease)) => {
                handle.fill(lease);
                Ok(true)
            }
            Ok(Acquired::Busy { .. }) => Ok(false),
            Err(error) => Err(error),
        })
    }
}

impl FusedFuture for Acquire {
    fn is_terminated(&self) -> bool {
        self.acquiring.is_done()
    }
}

/// Future of [`Lock::lease`](crate::Lock::lease) and
/// [`Lock::lease_within`](crate::Lock::lease_within).
#[derive(Debug)]
#[must_use = "futures do nothing unless polled"]
pub struct AcquireLease {
    acquiring: Acquiring,
}

impl AcquireLease {
    pub(crate) fn new(acquiring: Acquiring) -> Self {
        Self { acquiring }
    }

    /// Turns "busy for the whole wait" into `Ok(None)`; everything else stays an error.
    pub fn or_skip(self) -> crate::future::OrSkip<Self> {
        crate::future::OrSkip::new(self)
    }

    pub(crate) fn poll_skip(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Option<Lease>, LockError>> {
        self.acquiring.poll(cx).map_ok(|acquired| match acquired {
            Acquired::Lease(lease) => Some(lease),
            Acquired::Busy { .. } => None,
        })
    }
}

impl Future for AcquireLease {
    type Output = Result<Lease, LockError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let acquired = std::task::ready!(self.acquiring.poll(cx));
        Poll::Ready(acquired.and_then(|acquired| match acquired {
            Acquired::Lease(lease) => Ok(lease),
            Acquired::Busy { waited } => Err(LockError::NotAcquired {
                key: self.acquiring.plan.key().clone(),
                waited,
            }),
        }))
    }
}

impl FusedFuture for AcquireLease {
    fn is_terminated(&self) -> bool {
        self.acquiring.is_done()
    }
}

/// Future of [`Lock::lease_once`](crate::Lock::lease_once).
#[derive(Debug)]
#[must_use = "futures do nothing unless polled"]
pub struct TryLease {
    acquiring: Acquiring,
}

impl TryLease {
    pub(crate) fn new(acquiring: Acquiring) -> Self {
        Self { acquiring }
    }
}

impl Future for TryLease {
    type Output = Result<Option<Lease>, LockError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.acquiring.poll(cx).map_ok(|acquired| match acquired {
            Acquired::Lease(lease) => Some(lease),
            Acquired::Busy { .. } => None,
        })
    }
}

impl FusedFuture for TryLease {
    fn is_terminated(&self) -> bool {
        self.acquiring.is_done()
    }
}
