//! Tokio's clock, paused for one script.

use std::{panic::Location, time::Duration};

use futures::FutureExt;
use tokio::{
    runtime::{Handle, RuntimeFlavor},
    task::coop::unconstrained,
    time::{self, Instant},
};

use super::error::VerifyError;

/// The granularity of tokio's timers: each fires at the first whole tick at or after its deadline.
const TICK: Duration = Duration::from_millis(1);

/// Keeps the clock paused until it is dropped.
pub(super) struct VirtualTime {
    runtime: Handle,
}

impl VirtualTime {
    /// Pauses the clock of the runtime that this runs on; `place` is where the script was made.
    pub(super) async fn begin(place: &'static Location<'static>) -> Result<Self, VerifyError> {
        let runtime = Handle::try_current().map_err(|_| VerifyError::NoRuntime { place })?;
        // Each of these makes `pause` panic, with a message that knows nothing of scripts.
        if runtime.runtime_flavor() != RuntimeFlavor::CurrentThread {
            return Err(VerifyError::SeveralThreads { place });
        }
        if is_paused() {
            return Err(VerifyError::ClockPaused { place });
        }
        time::pause();
        let paused = Self { runtime };
        align().await;
        Ok(paused)
    }
}

impl Drop for VirtualTime {
    fn drop(&mut self) {
        // A script that is dropped unfinished may be dropped outside of its runtime.
        let _inside = self.runtime.enter();
        // A step may have resumed the clock itself, and `resume` panics on a clock that runs.
        if is_paused() {
            time::resume();
        }
    }
}

/// Whether tokio's clock stands still. Tokio does not tell, so this looks at it twice, a tick of
/// the real clock apart. Nothing can move a paused clock meanwhile: only the runtime's thread does,
/// when it is idle, and that is this one.
fn is_paused() -> bool {
    let before = Instant::now();
    let real = std::time::Instant::now();
    while std::time::Instant::now() <= real {
        std::hint::spin_loop();
    }
    Instant::now() == before
}

/// Moves the paused clock on to a whole tick.
///
/// A clock paused between two ticks stays between two: auto-advance moves it by whole ticks alone.
/// Each sleep would then end a tick late, and waits of one after another would drift away from an
/// interval beside them. On a whole tick, timers of whole milliseconds are exact.
async fn align() {
    // After a sleep the timer has seen every tick up to now; only then does `is_over` tell the
    // truth.
    time::sleep(TICK).await;
    let now = Instant::now();
    // How far past its last tick the clock stands is the least span by which a deadline must lie
    // back to be over.
    let (mut least, mut over) = (0, TICK.subsec_nanos());
    while least < over {
        let middle = least.midpoint(over);
        if is_over(now - Duration::from_nanos(middle.into())) {
            over = middle;
        } else {
            least = middle + 1;
        }
    }
    if over > 0 {
        time::advance(TICK - Duration::from_nanos(over.into())).await;
    }
}

fn is_over(deadline: Instant) -> bool {
    // Unconstrained, since a task that has used up its budget finds every timer pending.
    unconstrained(time::sleep_until(deadline))
        .now_or_never()
        .is_some()
}
