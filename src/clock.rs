//! The registry's own clock: tokio's, so that it can be paused, plus the time in which the
//! machine was suspended (D3).

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::Instant;

use crate::thread_end;
use crate::turnstile::{FOREVER, Moment};

/// How often somebody who holds something looks whether the machine was suspended.
pub(crate) const SUSPENSION_TICK: Duration = Duration::from_secs(1);

/// The least jump between the clocks that counts as a suspension.
const LEAST_JUMP: Duration = Duration::from_millis(1);

pub(crate) struct Clock {
    epoch: Instant,
    /// Tells for how long the machine has been suspended since it booted.
    suspended: Box<dyn Fn() -> Duration + Send + Sync>,
    /// What that was when the clock was made.
    before: Duration,
    /// Nanoseconds of suspension since then that have been taken into account.
    slept: AtomicU64,
}

impl Clock {
    pub(crate) fn new(suspended: impl Fn() -> Duration + Send + Sync + 'static) -> Self {
        Self {
            epoch: Instant::now(),
            before: suspended(),
            suspended: Box::new(suspended),
            slept: AtomicU64::new(0),
        }
    }

    pub(crate) fn system() -> Self {
        Self::new(suspended)
    }

    pub(crate) fn now(&self) -> Moment {
        let slept = self.slept();
        thread_end::now().saturating_duration_since(self.epoch) + slept
    }

    /// When `moment` comes, if the machine is not suspended again; never for [`FOREVER`].
    pub(crate) fn instant(&self, moment: Moment) -> Instant {
        let awake = moment.saturating_sub(self.slept());
        // tokio's own "far future"; instants cannot be added to without end.
        let far = Duration::from_secs(86_400 * 365 * 30);
        self.epoch + awake.min(far)
    }

    fn slept(&self) -> Duration {
        let known = Duration::from_nanos(self.slept.load(Ordering::Relaxed));
        let told = (self.suspended)().saturating_sub(self.before);
        if told < known + LEAST_JUMP {
            return known;
        }
        let nanos = u64::try_from(told.as_nanos()).unwrap_or(u64::MAX);
        self.slept.fetch_max(nanos, Ordering::Relaxed);
        told
    }

    /// `now` and `wait` later, or never.
    pub(crate) fn after(now: Moment, wait: Duration) -> Moment {
        now.checked_add(wait).unwrap_or(FOREVER)
    }
}

/// For how long this machine has been suspended since it booted.
#[cfg(target_os = "linux")]
fn suspended() -> Duration {
    use rustix::time::{ClockId, clock_gettime};
    let read = |clock| {
        let time = clock_gettime(clock);
        let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
        Duration::new(seconds, u32::try_from(time.tv_nsec).unwrap_or(0))
    };
    // A thread that is put aside between the two readings makes the difference smaller than it is,
    // never greater: no suspension is ever made up.
    let boot = read(ClockId::Boottime);
    boot.saturating_sub(read(ClockId::Monotonic))
}

/// Elsewhere tokio's clock goes on while the machine is suspended, or nobody can tell.
#[cfg(not(target_os = "linux"))]
fn suspended() -> Duration {
    Duration::ZERO
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    fn clock(micros: &Arc<AtomicU64>) -> Clock {
        let micros = micros.clone();
        Clock::new(move || Duration::from_micros(micros.load(Ordering::Relaxed)))
    }

    /// D3: a laptop lid closed for a minute takes a minute off every deadline.
    #[tokio::test(start_paused = true)]
    async fn d3_suspended_time_counts() {
        let told = Arc::new(AtomicU64::new(5_000_000));
        let clock = clock(&told);
        let deadline = clock.now() + Duration::from_secs(90);
        let before = clock.instant(deadline);
        told.fetch_add(60_000_000, Ordering::Relaxed);
        assert_eq!(clock.now(), Duration::from_secs(60));
        assert_eq!(before - clock.instant(deadline), Duration::from_secs(60));
    }

    /// Two clocks are never read at quite the same time: that is no suspension. A jump counts from a millisecond on, in
    /// one or in several parts.
    #[tokio::test(start_paused = true)]
    async fn d3_a_difference_below_a_millisecond_is_no_suspension() {
        let told = Arc::new(AtomicU64::new(0));
        let clock = clock(&told);
        let micros = |micros| told.store(micros, Ordering::Relaxed);
        for jitter in [999, 3, 500, 0, 998] {
            micros(jitter);
            assert_eq!(clock.now(), Duration::ZERO, "{jitter} us");
        }
        micros(1_001);
        assert_eq!(clock.now(), Duration::from_micros(1_001));
        for jitter in [2_000, 1_500, 0] {
            micros(jitter);
            assert_eq!(clock.now(), Duration::from_micros(1_001), "{jitter} us");
        }
        micros(2_100);
        assert_eq!(clock.now(), Duration::from_micros(2_100));
    }

    #[test]
    fn this_machine_was_not_suspended_just_now() {
        let clock = Clock::system();
        assert!(clock.now() < Duration::from_secs(5));
    }
}
