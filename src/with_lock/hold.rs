use std::panic::Location;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use tokio::time::Sleep;
use tracing::Span;
use tracing::span::Entered;

use crate::LockError;
use crate::acquire::{Acquired, Acquiring};
use crate::engine::Engine;
use crate::lease::{Lease, LeaseRelease, LeaseView, Lost};
use crate::nesting::{self, Inside};
use crate::plan::Plan;
use crate::settings::OnLost;

/// A lock around some work: from the wait to the release. Dropped in any state it leaves nothing
/// held: its fields see to that.
#[derive(Debug)]
pub(crate) struct Hold {
    key: Arc<str>,
    on_lost: OnLost,
    /// Where it was asked for.
    place: &'static Location<'static>,
    state: State,
}

/// In it, work runs under the lock: its logs carry the key and the token, and a nested lock finds
/// the lease.
pub(crate) struct Scope<'a> {
    _inside: Option<Inside>,
    _entered: Option<Entered<'a>>,
}

enum State {
    Acquiring(Acquiring),
    Holding {
        lease: Lease,
        lost: Option<Lost>,
        span: Span,
    },
    Releasing {
        release: LeaseRelease,
        engine: Arc<Engine>,
        /// One response time-out, begun when the release is not confirmed at once.
        patience: Option<Pin<Box<Sleep>>>,
    },
    Done,
}

impl Hold {
    pub(crate) fn new(plan: Plan) -> Self {
        Self {
            key: plan.key().clone(),
            on_lost: plan.on_lost(),
            place: plan.place(),
            state: State::Acquiring(Acquiring::patient(plan)),
        }
    }

    pub(crate) fn is_done(&self) -> bool {
        matches!(self.state, State::Done)
    }

    pub(crate) fn is_acquiring(&self) -> bool {
        matches!(self.state, State::Acquiring(_))
    }

    pub(crate) fn is_releasing(&self) -> bool {
        matches!(self.state, State::Releasing { .. })
    }

    /// Waits for the lock; an error is the end.
    pub(crate) fn poll_acquire(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Result<LeaseView, LockError>> {
        let State::Acquiring(acquiring) = &mut self.state else {
            unreachable!("the caller looked");
        };
        let acquired = ready!(acquiring.poll(cx));
        let error = match acquired {
            Ok(Acquired::Lease(lease)) => {
                let view = lease.view();
                let lost = Some(lease.lost());
                let span =
                    tracing::info_span!("lock", key = lease.key(), token = lease.token().get());
                self.state = State::Holding { lease, lost, span };
                return Poll::Ready(Ok(view));
            }
            Ok(Acquired::Busy { waited }) => LockError::NotAcquired {
                key: self.key.clone(),
                waited,
            },
            Err(error) => error,
        };
        self.state = State::Done;
        Poll::Ready(Err(error))
    }

    /// Whether the work must stop: to be asked before each poll of it, and when it is done. Wakes
    /// the task when the lease is lost. After an error the caller drops the work, and then
    /// [ends](Self::end) the hold: the work's destructors come before what is given back.
    pub(crate) fn poll_loss(&mut self, cx: &mut Context<'_>) -> Option<LockError> {
        let State::Holding { lost, .. } = &mut self.state else {
            return None;
        };
        let Poll::Ready(loss) = Pin::new(lost.as_mut()?).poll(cx) else {
            return None;
        };
        if loss.is_lost() && self.on_lost == OnLost::RunOn {
            *lost = None;
            return None;
        }
        Some(loss)
    }

    /// What the work finds around it: to be kept while it is polled.
    pub(crate) fn scope(&self) -> Scope<'_> {
        match &self.state {
            State::Holding { lease, span, .. } => Scope {
                _inside: Some(nesting::enter(lease, self.place)),
                _entered: Some(span.enter()),
            },
            _ => Scope {
                _inside: None,
                _entered: None,
            },
        }
    }

    /// Whatever is held is given back in the background, and nothing follows.
    pub(crate) fn end(&mut self) {
        self.state = State::Done;
    }

    /// The work is done: begins the release.
    pub(crate) fn release(&mut self) {
        let State::Holding { lease, .. } = std::mem::replace(&mut self.state, State::Done) else {
            return;
        };
        let engine = lease.engine().clone();
        self.state = State::Releasing {
            release: lease.end(),
            engine,
            patience: None,
        };
    }

    /// Waits until the release is confirmed, or one response time-out has passed: then it goes on
    /// in the background. An error is a loss that the release found.
    pub(crate) fn poll_release(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), LockError>> {
        let State::Releasing {
            release,
            engine,
            patience,
        } = &mut self.state
        else {
            return Poll::Ready(Ok(()));
        };
        let released = match Pin::new(release).poll(cx) {
            Poll::Ready(released) => released,
            Poll::Pending => {
                let timeout = engine.settings().response_timeout;
                let patience =
                    patience.get_or_insert_with(|| Box::pin(tokio::time::sleep(timeout)));
                ready!(patience.as_mut().poll(cx));
                Ok(())
            }
        };
        self.state = State::Done;
        Poll::Ready(match released {
            Err(error) if error.is_lost() && self.on_lost == OnLost::Stop => Err(error),
            // The work was done under a lease that held. That the store could not be told, or the
            // registry closed meanwhile, does not undo it.
            _ => Ok(()),
        })
    }
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Acquiring(acquiring) => acquiring.fmt(f),
            Self::Holding { lease, .. } => lease.fmt(f),
            Self::Releasing { .. } => f.write_str("Releasing"),
            Self::Done => f.write_str("Done"),
        }
    }
}
