//! What tokio's module has by the same names, for tasks that roam.

use std::fmt;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use pin_project::pin_project;
use tokio::task::unconstrained;
use tokio::time::{self, Instant};

use super::Spot;

/// What tokio's timers count in.
const TICK: Duration = Duration::from_millis(1);

#[pin_project]
pub(crate) struct Sleep {
    #[pin]
    timer: time::Sleep,
    /// Where the timer is registered.
    spot: Spot,
    /// By how many ticks it is still to be put off, one after the other.
    delays: u8,
}

pub(crate) fn sleep_until(deadline: Instant) -> Sleep {
    Sleep {
        timer: time::sleep_until(deadline),
        spot: Spot::here(),
        delays: 0,
    }
}

pub(crate) fn sleep(duration: Duration) -> Sleep {
    sleep_until(after(duration))
}

/// An instant cannot be any time later.
fn after(duration: Duration) -> Instant {
    let far = Duration::from_secs(86_400 * 365 * 30);
    Instant::now() + duration.min(far)
}

impl Sleep {
    #[cfg(feature = "postgres")]
    pub(crate) fn deadline(&self) -> Instant {
        self.timer.deadline()
    }

    #[cfg(any(feature = "redis", feature = "postgres"))]
    pub(crate) fn reset(self: Pin<&mut Self>, deadline: Instant) {
        let this = self.project();
        *this.delays = 0;
        this.timer.reset(deadline);
    }
}

impl Future for Sleep {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let mut this = self.project();
        if this.spot.has_moved() {
            let deadline = this.timer.deadline();
            this.timer.set(time::sleep_until(deadline));
            // The sockets move, too, and an answer that one of them has counts. In each turn the runtime's driver polls
            // sockets first, and then timers. Another thread may be between the two now, so it takes a second turn.
            let is_over = deadline < Instant::now() + TICK;
            *this.delays = if is_over { 2 } else { 0 };
        }
        loop {
            ready!(this.timer.as_mut().poll(cx));
            if *this.delays == 0 {
                return Poll::Ready(());
            }
            *this.delays -= 1;
            this.timer.as_mut().reset(Instant::now() + TICK);
        }
    }
}

/// The time was over.
#[derive(Debug)]
pub(crate) struct Elapsed(());

impl fmt::Display for Elapsed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the time is over")
    }
}

pub(crate) async fn timeout_at<F: Future>(
    deadline: Instant,
    future: F,
) -> Result<F::Output, Elapsed> {
    // A future that does much must not keep the time from being looked at.
    let over = unconstrained(sleep_until(deadline));
    let (mut future, mut over) = (pin!(future), pin!(over));
    poll_fn(|cx| match future.as_mut().poll(cx) {
        Poll::Ready(output) => Poll::Ready(Ok(output)),
        Poll::Pending => over.as_mut().poll(cx).map(|()| Err(Elapsed(()))),
    })
    .await
}

pub(crate) async fn timeout<F: Future>(within: Duration, future: F) -> Result<F::Output, Elapsed> {
    timeout_at(after(within), future).await
}
