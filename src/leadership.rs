use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures::future::FusedFuture;
use futures::stream::FusedStream;
use futures::{Stream, StreamExt};
use pin_project::pin_project;
use tokio::time::Sleep;

use crate::LockError;
use crate::lease::LeaseView;
use crate::plan::Plan;
use crate::renewal::Renewal;
use crate::repeat::{Repeat, Repeats};
use crate::settings::{OnFinish, OnLost};
use crate::user_code::log;
use crate::with_lock::Hold;

/// Who leads, as one candidate sees it: what a [campaign](crate::Lock::leadership) yields.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Leadership {
    /// This candidate leads for as long as the lease is valid, which
    /// [`LeaseView::lost`] tells at once.
    Leader(LeaseView),
    /// Somebody else leads or nobody does: the store may be away, too.
    Follower,
    /// What waiting cannot mend: the registry was shut down, or the key, the ttl or a setting is
    /// invalid. The last item.
    Ended(LockError),
}

/// Stream of [`Lock::leadership`](crate::Lock::leadership).
#[must_use = "a campaign does nothing unless polled, and dropping it resigns"]
pub struct Campaign {
    /// With no end of the wait.
    plan: Plan,
    stage: Stage,
    /// Of this stage: on its way to the lead, or holding it.
    hold: Hold,
    /// Before the hold is tried, after one that failed.
    pause: Option<Pin<Box<Sleep>>>,
    pauses: Repeats,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Nothing was told yet, and the store is asked once.
    SessionConfig,
    Following,
    Leading,
    Ended,
}

impl Campaign {
    pub(crate) fn new(mut plan: Plan) -> Self {
        // The ttl says how soon the next one leads when the leader crashes, not how long it may lead.
        plan.renewal.get_or_insert(Renewal::watchdog());
        plan.on_lost = OnLost::Stop;
        plan.on_finish = OnFinish::Release;
        plan.wait = Some(Duration::ZERO);
        let hold = Hold::new(plan.clone());
        plan.wait = Some(Duration::MAX);
        Self {
            plan,
            stage: Stage::SessionConfig,
            hold,
            pause: None,
            pauses: pauses(),
        }
    }

    /// Gives the lead up, or the place in line, and resolves when the store has confirmed it, after
    /// one response time-out at the latest: then the release goes on in the background.
    ///
    /// Dropping the campaign resigns as well, and does not wait.
    ///
    /// # Cancel safety
    ///
    /// Dropped at any time, polled or not, the release goes on in the background.
    ///
    /// # Examples
    ///
    /// ```
    /// use futures::StreamExt;
    /// use lockstream::{Leadership, LockRegistry};
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), lockstream::LockError> {
    /// let locks = LockRegistry::in_memory();
    /// let mut campaign = locks.obtain("scheduler").leadership();
    /// assert!(matches!(campaign.next().await, Some(Leadership::Leader(_))));
    /// campaign.resign().await;
    /// assert!(locks.obtain("scheduler").lease_once().await?.is_some());
    /// # Ok(()) }
    /// ```
    pub fn resign(mut self) -> Resign {
        if self.stage == Stage::Leading {
            self.hold.release();
        } else {
            self.hold.end();
        }
        let hold = Some(self.hold);
        Resign { hold }
    }

    /// The loss of the lead, which [`concede`](Self::concede) is then to be told: whatever runs
    /// under the lead is to be dropped in between.
    fn poll_loss(&mut self, cx: &mut Context<'_>) -> Option<LockError> {
        self.hold.poll_loss(cx)
    }

    /// The lead is lost: campaigns anew, if that is of any use.
    fn concede(&mut self, loss: LockError) -> Leadership {
        self.hold.end();
        if may_mend(&loss) {
            self.stage = Stage::Following;
            self.hold = Hold::new(self.plan.clone());
            Leadership::Follower
        } else {
            self.stage = Stage::Ended;
            Leadership::Ended(loss)
        }
    }

    /// The lead was not to be had: tries again, if that is of any use. Gives what is to be told.
    fn refused(&mut self, error: LockError) -> Option<Leadership> {
        let opening = self.stage == Stage::SessionConfig;
        // Whoever finds it busy stands in line; every other way to end would end so again at once.
        if !(opening && error.is_not_acquired()) && may_mend(&error) {
            let pause = self
                .pauses
                .next()
                .expect("an exponential policy never ends");
            log!(
                warn,
                key = error.key(),
                error = &error as &(dyn std::error::Error + 'static),
                ?pause,
                "campaign failed, starting over after a pause"
            );
            self.pause = Some(Box::pin(tokio::time::sleep(pause)));
        }
        let told = self.concede(error);
        (opening || self.stage == Stage::Ended).then_some(told)
    }
}

/// Whether trying again may help, be it much later: rights may be granted and servers come back.
fn may_mend(error: &LockError) -> bool {
    matches!(
        error,
        LockError::NotAcquired { .. }
            | LockError::Lost { .. }
            | LockError::QueueFull { .. }
            | LockError::Store { .. }
    )
}

/// Between campaigns that failed. The lock's own policy may be one that spins.
fn pauses() -> Repeats {
    Repeat::exponential(Duration::from_millis(100), Duration::from_secs(5)).start()
}

impl Stream for Campaign {
    type Item = Leadership;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Leadership>> {
        let this = &mut *self;
        loop {
            match this.stage {
                Stage::SessionConfig | Stage::Following => {
                    if let Some(pause) = &mut this.pause {
                        ready!(pause.as_mut().poll(cx));
                        this.pause = None;
                    }
                    match ready!(this.hold.poll_acquire(cx)) {
                        Ok(lease) => {
                            this.stage = Stage::Leading;
                            this.pauses = pauses();
                            return Poll::Ready(Some(Leadership::Leader(lease)));
                        }
                        Err(error) => {
                            if let Some(told) = this.refused(error) {
                                return Poll::Ready(Some(told));
                            }
                        }
                    }
                }
                Stage::Leading => {
                    return match this.poll_loss(cx) {
                        Some(loss) => Poll::Ready(Some(this.concede(loss))),
                        None => Poll::Pending,
                    };
                }
                Stage::Ended => return Poll::Ready(None),
            }
        }
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        match self.stage {
            Stage::Ended => (0, Some(0)),
            _ => (0, None),
        }
    }
}

impl FusedStream for Campaign {
    fn is_terminated(&self) -> bool {
        self.stage == Stage::Ended
    }
}

impl fmt::Debug for Campaign {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Campaign")
            .field("key", self.plan.key())
            .field("stage", &self.stage)
            .finish_non_exhaustive()
    }
}

/// Future of [`Campaign::resign`](crate::stream::Campaign::resign).
#[derive(Debug)]
#[must_use = "the lead is given up in the background; await this to know that it was"]
pub struct Resign {
    /// Dropped with it: what is held is released then.
    hold: Option<Hold>,
}

impl Future for Resign {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let Some(hold) = &mut self.hold else {
            panic!("`Resign` polled after it was done");
        };
        // That the lead was lost before does not matter to one who gives it up.
        let _ = ready!(hold.poll_release(cx));
        self.hold = None;
        Poll::Ready(())
    }
}

impl FusedFuture for Resign {
    fn is_terminated(&self) -> bool {
        self.hold.is_none()
    }
}

/// Future of [`Lock::lead`](crate::Lock::lead).
///
/// `Send` if the work and its output are: it keeps the value while the release runs.
#[pin_project]
#[must_use = "futures do nothing unless polled"]
pub struct Lead<F, Fut: Future> {
    #[pin]
    work: Option<Fut>,
    begin: F,
    /// The value, kept back while the lock is released.
    value: Option<Fut::Output>,
    /// The last field: what the work's destructors do, they do under the lead.
    campaign: Campaign,
}

impl<F, Fut> Lead<F, Fut>
where
    F: FnMut(LeaseView) -> Fut,
    Fut: Future,
{
    pub(crate) fn new(plan: Plan, begin: F) -> Self {
        Self {
            work: None,
            begin,
            value: None,
            campaign: Campaign::new(plan),
        }
    }
}

impl<F, Fut> Future for Lead<F, Fut>
where
    F: FnMut(LeaseView) -> Fut,
    Fut: Future,
{
    type Output = Result<Fut::Output, LockError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut this = self.project();
        let campaign = this.campaign;
        assert!(
            campaign.stage != Stage::Ended,
            "`Lead` polled after it was done"
        );
        loop {
            let told = if campaign.stage != Stage::Leading {
                let told = ready!(campaign.poll_next_unpin(cx));
                let told = told.expect("it has not ended");
                if let Leadership::Leader(lease) = told {
                    let _scope = campaign.hold.scope();
                    this.work.set(Some((this.begin)(lease)));
                    continue;
                }
                told
            } else if campaign.hold.is_releasing() {
                match ready!(campaign.hold.poll_release(cx)) {
                    Ok(()) => {
                        campaign.stage = Stage::Ended;
                        let value = this.value.take().expect("kept back until the release");
                        return Poll::Ready(Ok(value));
                    }
                    Err(loss) => {
                        *this.value = None;
                        campaign.concede(loss)
                    }
                }
            } else if let Some(loss) = campaign.poll_loss(cx) {
                let scope = campaign.hold.scope();
                this.work.set(None);
                drop(scope);
                campaign.concede(loss)
            } else {
                let scope = campaign.hold.scope();
                let work = this.work.as_mut().as_pin_mut();
                let work = work.expect("work begins with the lead and ends with it");
                let value = ready!(work.poll(cx));
                this.work.set(None);
                drop(scope);
                // A lease that ran out during the last poll was no lease for what that poll did.
                match campaign.poll_loss(cx) {
                    Some(loss) => campaign.concede(loss),
                    None => {
                        *this.value = Some(value);
                        campaign.hold.release();
                        continue;
                    }
                }
            };
            if let Leadership::Ended(error) = told {
                return Poll::Ready(Err(error));
            }
        }
    }
}

impl<F, Fut> FusedFuture for Lead<F, Fut>
where
    F: FnMut(LeaseView) -> Fut,
    Fut: Future,
{
    fn is_terminated(&self) -> bool {
        self.campaign.is_terminated()
    }
}

impl<F, Fut: Future> fmt::Debug for Lead<F, Fut> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Lead").field(&self.campaign).finish()
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;
    use crate::Lock;

    #[test]
    fn without_a_registry_there_is_nothing_to_campaign_for() {
        let mut campaign = Lock::new(None, "k").leadership();
        let told = campaign.next().now_or_never();
        assert!(
            matches!(
                told,
                Some(Some(Leadership::Ended(LockError::NoRegistry { .. })))
            ),
            "{told:?}"
        );
        assert!(
            campaign
                .next()
                .now_or_never()
                .expect("it is over")
                .is_none()
        );
    }
}
