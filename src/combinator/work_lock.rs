use std::panic::Location;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::time::{Sleep, sleep};
use tracing::Span;
use tracing::span::Entered;

use crate::base::{LockError, Mode, OnLost, user_code};
use crate::handle::acquire::Acquiring;
use crate::handle::lease::{Lease, LeaseRelease};
use crate::handle::lease_view::{LeaseView, Lost};
use crate::handle::options::LockOptions;
use crate::handle::reentrancy;
use crate::handle::reentrancy::FrameGuard;

/// A lock around some work, from the wait for it to its release. In whatever state it is dropped,
/// its fields leave nothing held.
#[derive(Debug)]
pub(crate) struct WorkLock {
    on_lost: OnLost,
    /// Whether the lock's `on_finish` is only for work that succeeds: until then the key is to be released.
    is_conditional: bool,
    /// Where the lock was asked for.
    place: &'static Location<'static>,
    state: LockState,
}

#[derive(Debug)]
enum LockState {
    Acquiring(Acquiring),
    /// The acquisition has failed, and nobody was told yet.
    Failed(LockError),
    Holding {
        lease: Lease,
        lost: Option<Lost>,
        span: WorkSpan,
        /// Whether it was acquired [ahead](WorkLock::poll_ahead), and the work has not begun.
        is_ahead: bool,
    },
    Releasing {
        release: LeaseRelease,
        timeout: Duration,
        /// Begins when the release is not confirmed at once.
        timer: Option<Pin<Box<Sleep>>>,
    },
    Done,
}

/// The span of the work. Its end is told to the log's subscriber, which is the user's code.
#[derive(Debug)]
struct WorkSpan(Span);

impl Drop for WorkSpan {
    fn drop(&mut self) {
        user_code::discard(std::mem::replace(&mut self.0, Span::none()));
    }
}

/// While it exists, logs carry the key and the token, and a nested lock finds the lease.
pub(crate) struct ScopeGuard<'a> {
    _frame: FrameGuard,
    _entered: Entered<'a>,
}

impl WorkLock {
    pub(crate) fn new(mut options: LockOptions) -> Self {
        options.is_scoped = true;
        Self {
            on_lost: options.on_lost,
            is_conditional: false,
            place: options.place(),
            state: LockState::Acquiring(Acquiring::new(options)),
        }
    }

    /// Put in the place of a lock that is moved out.
    #[cfg(feature = "http")]
    pub(crate) fn done() -> Self {
        Self {
            on_lost: OnLost::default(),
            is_conditional: false,
            place: Location::caller(),
            state: LockState::Done,
        }
    }

    /// The lock's `on_finish` is only for work that succeeds.
    pub(crate) fn make_conditional(&mut self) {
        self.is_conditional = true;
        match &mut self.state {
            LockState::Acquiring(acquiring) => acquiring.make_conditional(),
            LockState::Holding { lease, .. } => self.is_conditional = lease.make_conditional(),
            LockState::Failed(_) | LockState::Releasing { .. } | LockState::Done => {}
        }
    }

    /// The work has succeeded.
    pub(crate) fn succeeded(&mut self) {
        if let LockState::Holding { lease, .. } = &self.state
            && self.is_conditional
        {
            lease.succeed();
        }
    }

    pub(crate) fn is_done(&self) -> bool {
        matches!(self.state, LockState::Done)
    }

    pub(crate) fn is_acquiring(&self) -> bool {
        matches!(self.state, LockState::Acquiring(_))
    }

    pub(crate) fn is_holding(&self) -> bool {
        matches!(self.state, LockState::Holding { .. })
    }

    /// The acquisition, unless it is over.
    pub(crate) fn acquiring(&self) -> Option<&Acquiring> {
        match &self.state {
            LockState::Acquiring(acquiring) => Some(acquiring),
            _ => None,
        }
    }

    /// From now on the acquisition knows when it [waits for others](Acquiring::waits_for_others).
    pub(crate) fn hear_of_others(&mut self) {
        if let LockState::Acquiring(acquiring) = &mut self.state {
            acquiring.hear_of_others();
        }
    }

    pub(crate) fn is_releasing(&self) -> bool {
        matches!(self.state, LockState::Releasing { .. })
    }

    /// Waits for the lock, and does not begin the work. The next poll of the work begins it, or returns the error.
    pub(crate) fn poll_ahead(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if self.is_acquiring()
            && let Err(error) = ready!(self.poll_acquire(cx))
        {
            self.state = LockState::Failed(error);
        }
        if let LockState::Holding { is_ahead, .. } = &mut self.state {
            *is_ahead = true;
        }
        Poll::Ready(())
    }

    /// The work is about to begin. Fails if the lease was lost since it was acquired ahead, whatever is to become of work
    /// that has begun.
    pub(crate) fn check_ahead(&mut self, cx: &mut Context<'_>) -> Result<(), LockError> {
        if let LockState::Holding { lost, is_ahead, .. } = &mut self.state
            && std::mem::take(is_ahead)
            && let Some(Poll::Ready(loss)) = lost.as_mut().map(|lost| Pin::new(lost).poll(cx))
        {
            return Err(loss);
        }
        Ok(())
    }

    /// Waits for the lock.
    pub(crate) fn poll_acquire(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Result<LeaseView, LockError>> {
        let lease = match &mut self.state {
            LockState::Acquiring(acquiring) => ready!(acquiring.poll(cx))?,
            LockState::Holding { lease, .. } => return Poll::Ready(Ok(lease.view())),
            LockState::Failed(_) => {
                let LockState::Failed(error) = std::mem::replace(&mut self.state, LockState::Done)
                else {
                    unreachable!("it has failed");
                };
                return Poll::Ready(Err(error));
            }
            LockState::Releasing { .. } | LockState::Done => {
                unreachable!("the caller has checked that it is not over")
            }
        };
        if self.is_conditional {
            self.is_conditional = lease.make_conditional();
        }
        let view = lease.view();
        let lost = Some(lease.lost());
        let mode = lease.caller().mode();
        let mode = (mode != Mode::Exclusive).then(|| tracing::field::display(mode));
        let (key, token) = (lease.key(), view.told_token().get());
        let span = WorkSpan(tracing::info_span!("lock", key, token, mode));
        self.state = LockState::Holding {
            lease,
            lost,
            span,
            is_ahead: false,
        };
        Poll::Ready(Ok(view))
    }

    /// Fails if the work must stop: to be called before each poll of the work, and when it has
    /// completed. Otherwise the task is woken when the lease is lost.
    ///
    /// After an error the caller drops the work and then [ends](Self::end) the lock, so that the
    /// work's destructors run before the lock is given back.
    pub(crate) fn check(&mut self, cx: &mut Context<'_>) -> Result<(), LockError> {
        let LockState::Holding { lost, .. } = &mut self.state else {
            return Ok(());
        };
        let Some(Poll::Ready(loss)) = lost.as_mut().map(|lost| Pin::new(lost).poll(cx)) else {
            return Ok(());
        };
        if loss.is_lost() && self.on_lost == OnLost::RunOn {
            *lost = None;
            return Ok(());
        }
        Err(loss)
    }

    /// To be kept while the work is polled or dropped.
    pub(crate) fn enter(&self) -> Option<ScopeGuard<'_>> {
        let LockState::Holding { lease, span, .. } = &self.state else {
            return None;
        };
        Some(ScopeGuard {
            _frame: reentrancy::enter(lease, self.place),
            _entered: span.0.enter(),
        })
    }

    /// Gives back in the background whatever is held or waited for.
    pub(crate) fn end(&mut self) {
        self.state = LockState::Done;
    }

    /// Begins the release, if the lock is held; otherwise [ends](Self::end) the lock.
    pub(crate) fn release(&mut self) {
        if let LockState::Holding { lease, .. } =
            std::mem::replace(&mut self.state, LockState::Done)
        {
            self.state = LockState::Releasing {
                timeout: lease.engine().settings.response_timeout,
                release: lease.finish(),
                timer: None,
            };
        }
    }

    /// Waits until the release is confirmed, for one response time-out at most: after that it goes
    /// on in the background. The error is a loss that the release has found.
    pub(crate) fn poll_release(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), LockError>> {
        let LockState::Releasing {
            release,
            timeout,
            timer,
        } = &mut self.state
        else {
            return Poll::Ready(Ok(()));
        };
        let mut released = Pin::new(release).poll(cx);
        if released.is_pending() {
            let timer = timer.get_or_insert_with(|| Box::pin(sleep(*timeout)));
            released = timer.as_mut().poll(cx).map(Ok);
        }
        let released = ready!(released);
        self.state = LockState::Done;
        Poll::Ready(match released {
            Err(error) if error.is_lost() && self.on_lost == OnLost::Stop => Err(error),
            // The lease was valid until the work completed. A store that could not be told, or a
            // registry that was closed meanwhile, does not undo the work.
            _ => Ok(()),
        })
    }
}
