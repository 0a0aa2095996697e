use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use futures::FutureExt;
use futures::future::BoxFuture;

use crate::LockError;
use crate::acquire::{Acquired, Acquiring};
use crate::driver::Driver;
use crate::lease::{Lease, LeaseRelease, LeaseView, Lost};
use crate::lock::Plan;
use crate::settings::OnLost;

/// A lock around some work: from the wait to the release. Dropped in any state it leaves nothing
/// held: its fields see to that.
#[derive(Debug)]
pub(crate) struct Hold {
    key: Arc<str>,
    on_lost: OnLost,
    state: State,
}

enum State {
    Acquiring(Acquiring),
    Holding { lease: Lease, lost: Option<Lost> },
    Releasing(BoxFuture<'static, Result<(), LockError>>),
    Done,
}

impl Hold {
    pub(crate) fn new(plan: Plan) -> Self {
        Self {
            key: plan.key().clone(),
            on_lost: plan.on_lost(),
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
        matches!(self.state, State::Releasing(_))
    }

    /// Waits for the lock; an error is the end.
    pub(crate) fn poll_acquire(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Result<LeaseView, LockError>> {
        let State::Acquiring(acquiring) = &mut self.state else {
            unreachable!("the caller looked");
        };
        let error = match ready!(acquiring.poll(cx)) {
            Ok(Acquired::Lease(lease)) => {
                let view = lease.view();
                let lost = Some(lease.lost());
                self.state = State::Holding { lease, lost };
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

    /// Whatever is held is given back in the background, and nothing follows.
    pub(crate) fn end(&mut self) {
        self.state = State::Done;
    }

    /// The work is done: begins the release.
    pub(crate) fn release(&mut self) {
        let State::Holding { lease, .. } = std::mem::replace(&mut self.state, State::Done) else {
            return;
        };
        let driver = lease.driver().clone();
        let release = lease.release();
        self.state = State::Releasing(give_back(driver, release).boxed());
    }

    /// Waits until the release is confirmed, or one response time-out has passed. An error is a
    /// loss that the release found.
    pub(crate) fn poll_release(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), LockError>> {
        let State::Releasing(releasing) = &mut self.state else {
            return Poll::Ready(Ok(()));
        };
        let released = ready!(releasing.as_mut().poll(cx));
        self.state = State::Done;
        Poll::Ready(match released {
            Err(error) if error.is_lost() && self.on_lost == OnLost::Stop => Err(error),
            // The work was done under a lease that held. That the store could not be told, or the
            // registry closed meanwhile, does not undo it.
            _ => Ok(()),
        })
    }
}

/// Waits for a release, for one response time-out at most; dropped, it goes on in the background.
async fn give_back(driver: Arc<Driver>, release: LeaseRelease) -> Result<(), LockError> {
    let patience = driver.settings().response_timeout;
    match tokio::time::timeout(patience, release).await {
        Ok(released) => released,
        Err(_) => Ok(()),
    }
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Acquiring(acquiring) => acquiring.fmt(f),
            Self::Holding { lease, .. } => lease.fmt(f),
            Self::Releasing(_) => f.write_str("Releasing"),
            Self::Done => f.write_str("Done"),
        }
    }
}
