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
use crate::base::clock::is_virtual;

/// What tokio's timers count in.
const TICK: Duration = Duration::from_millis(1);

/// A timer that comes so long after its time is late: the process was stopped, or its runtime was busy, or it moved.
const LATE: Duration = Duration::from_millis(2);

/// In each turn a runtime's driver asks the sockets, and then looks at the timers. Another thread may be between the two
/// now, so it takes a second turn until all that had come to the sockets was seen.
const TURNS: u8 = 2;

/// If it is late, it ends when what has come to sockets meanwhile was seen: that counts, though its time is over.
#[pin_project]
pub(crate) struct Sleep {
    /// Set to the deadline, and then for each turn that it is put off.
    #[pin]
    timer: time::Sleep,
    /// Where the timer is registered.
    spot: Spot,
    deadline: Instant,
    /// How many turns it was put off.
    turns: u8,
}

/// A timer that is set when its deadline is over already is not late: nothing has been awaited so far.
pub(crate) fn sleep_until(deadline: Instant) -> Sleep {
    Sleep {
        timer: time::sleep_until(deadline),
        spot: Spot::here(),
        deadline: deadline.max(Instant::now()),
        turns: 0,
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
    #[cfg(any(feature = "redis", feature = "postgres"))]
    pub(crate) fn deadline(&self) -> Instant {
        self.deadline
    }

    /// If the deadline is over already, the timer is late: what was awaited until then may have come.
    #[cfg(any(feature = "redis", feature = "postgres"))]
    pub(crate) fn reset(self: Pin<&mut Self>, deadline: Instant) {
        let this = self.project();
        this.timer.reset(deadline);
        *this.deadline = deadline;
        *this.turns = 0;
    }
}

impl Future for Sleep {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let mut this = self.project();
        if this.spot.has_moved() {
            let next = this.timer.deadline();
            this.timer.set(time::sleep_until(next));
            *this.turns = 0;
        }
        loop {
            ready!(this.timer.as_mut().poll(cx));
            let now = Instant::now();
            let is_late = now >= *this.deadline + LATE && !is_virtual();
            if !is_late || *this.turns == TURNS {
                // Also when it is polled again.
                *this.turns = TURNS;
                return Poll::Ready(());
            }
            *this.turns += 1;
            this.timer.as_mut().reset(now + TICK);
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
