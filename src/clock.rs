//! The registry's own clock: tokio's, so that it can be paused, plus the time in which the
//! machine was suspended (D3).

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::Instant;

use crate::turnstile::{FOREVER, Moment};

/// How often somebody who holds something looks whether the machine was suspended.
pub(crate) const SUSPENSION_TICK: Duration = Duration::from_secs(1);

/// The least jump between the clocks that counts as a suspension.
const LEAST_JUMP: Duration = Duration::from_millis(1);

/// Tells for how long the machine has been suspended since it booted.
pub(crate) trait Suspension: Send + Sync {
    fn so_far(&self) -> Duration;

    /// A quick look, where there is one: the time since the machine booted, suspensions included.
    fn since_boot(&self) -> Option<Duration> {
        None
    }
}

pub(crate) struct Clock {
    epoch: Instant,
    suspension: Box<dyn Suspension>,
    /// What the suspension stood at when the clock was made.
    before: Duration,
    /// What the time since boot stood at then.
    booted: Option<Duration>,
    /// Nanoseconds of suspension since then that have been taken into account.
    slept: AtomicU64,
}

impl Clock {
    pub(crate) fn new(suspension: impl Suspension + 'static) -> Self {
        let before = suspension.so_far();
        let (epoch, booted) = epoch(&suspension);
        Self {
            epoch,
            suspension: Box::new(suspension),
            before,
            booted,
            slept: AtomicU64::new(0),
        }
    }

    pub(crate) fn system() -> Self {
        Self::new(Machine)
    }

    pub(crate) fn now(&self) -> Moment {
        let boot = self.since_boot();
        let awake = Instant::now().saturating_duration_since(self.epoch);
        awake + self.slept(boot, awake)
    }

    /// When `moment` comes, if the machine is not suspended again; never for [`FOREVER`].
    pub(crate) fn instant(&self, moment: Moment) -> Instant {
        let boot = self.since_boot();
        let now = Instant::now().saturating_duration_since(self.epoch);
        let awake = moment.saturating_sub(self.slept(boot, now));
        // tokio's own "far future"; instants cannot be added to without end.
        let far = Duration::from_secs(86_400 * 365 * 30);
        self.epoch + awake.min(far)
    }

    /// The time since boot at which the clock was made has gone by by so much.
    fn since_boot(&self) -> Option<Duration> {
        let booted = self.booted?;
        Some(self.suspension.since_boot()?.saturating_sub(booted))
    }

    /// `boot`: the time since boot that was read right before `awake`, tokio's; both since the clock
    /// was made. As long as the two go alike there was no suspension, and the third clock need not be
    /// read, on every event. Where tokio's is paused they do not, and it is asked.
    fn slept(&self, boot: Option<Duration>, awake: Duration) -> Duration {
        let known = Duration::from_nanos(self.slept.load(Ordering::Relaxed));
        if boot.is_some_and(|boot| boot.saturating_sub(awake) < known + LEAST_JUMP) {
            return known;
        }
        let told = self.suspension.so_far().saturating_sub(self.before);
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

/// tokio's clock and the time since boot, read at the same time: a thread that is put aside between
/// the two would hide suspensions of that length for good, so the closest of a few readings counts.
fn epoch(suspension: &impl Suspension) -> (Instant, Option<Duration>) {
    let read = |_| {
        let before = Instant::now();
        let booted = suspension.since_boot();
        (before.elapsed(), before, booted)
    };
    let closest = (0..3).map(read).min_by_key(|(took, ..)| *took);
    let (_, epoch, booted) = closest.expect("there are three");
    (epoch, booted)
}

impl fmt::Debug for Clock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Clock").field(&self.now()).finish()
    }
}

/// The machine this runs on.
struct Machine;

#[cfg(target_os = "linux")]
fn read(clock: rustix::time::ClockId) -> Duration {
    let time = rustix::time::clock_gettime(clock);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    Duration::new(seconds, u32::try_from(time.tv_nsec).unwrap_or(0))
}

impl Suspension for Machine {
    #[cfg(target_os = "linux")]
    fn since_boot(&self) -> Option<Duration> {
        Some(read(rustix::time::ClockId::Boottime))
    }

    #[cfg(target_os = "linux")]
    fn so_far(&self) -> Duration {
        use rustix::time::ClockId;
        // A thread that is put aside between the two readings makes the difference smaller than
        // it is, never greater: no suspension is ever made up.
        let boot = read(ClockId::Boottime);
        boot.saturating_sub(read(ClockId::Monotonic))
    }

    /// Elsewhere tokio's clock goes on while the machine is suspended, or nobody can tell.
    #[cfg(not(target_os = "linux"))]
    fn so_far(&self) -> Duration {
        Duration::ZERO
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    struct Told(Arc<AtomicU64>);

    impl Suspension for Told {
        fn so_far(&self) -> Duration {
            Duration::from_micros(self.0.load(Ordering::Relaxed))
        }
    }

    /// D3: a laptop lid closed for a minute takes a minute off every deadline.
    #[tokio::test(start_paused = true)]
    async fn d3_suspended_time_counts() {
        let told = Arc::new(AtomicU64::new(5_000_000));
        let clock = Clock::new(Told(told.clone()));
        let deadline = clock.now() + Duration::from_secs(90);
        let before = clock.instant(deadline);
        told.fetch_add(60_000_000, Ordering::Relaxed);
        assert_eq!(clock.now(), Duration::from_secs(60));
        assert_eq!(before - clock.instant(deadline), Duration::from_secs(60));
    }

    /// Two clocks are never read at quite the same time: that is no suspension. A jump counts from a millisecond on, in
    /// one or in several parts.
    #[tokio::test(start_paused = true)]
    async fn d3_a_difference_below_a_millisecond_is_none() {
        let told = Arc::new(AtomicU64::new(0));
        let clock = Clock::new(Told(told.clone()));
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

    /// Both clocks of a machine, and how often the one that costs more was asked.
    struct Both {
        boot: Arc<AtomicU64>,
        slept: Arc<AtomicU64>,
        asked: Arc<AtomicU64>,
    }

    impl Suspension for Both {
        fn since_boot(&self) -> Option<Duration> {
            Some(Duration::from_micros(self.boot.load(Ordering::Relaxed)))
        }

        fn so_far(&self) -> Duration {
            self.asked.fetch_add(1, Ordering::Relaxed);
            Duration::from_micros(self.slept.load(Ordering::Relaxed))
        }
    }

    /// D3 with a quick look: the same is seen, and the suspension asked for only when the time since
    /// boot has left tokio's behind. Where tokio's is paused it always has, and no suspension is made up.
    #[tokio::test(start_paused = true)]
    async fn d3_a_quick_look_sees_the_same() {
        let [boot, slept, asked] = [7_000_000, 5_000_000, 0].map(|at| Arc::new(AtomicU64::new(at)));
        let clock = Clock::new(Both {
            boot: boot.clone(),
            slept: slept.clone(),
            asked: asked.clone(),
        });
        let passes = |boots: u64, sleeps: u64| {
            boot.fetch_add(boots, Ordering::Relaxed);
            slept.fetch_add(sleeps, Ordering::Relaxed);
        };
        let was_asked = || asked.swap(0, Ordering::Relaxed) > 0;
        assert!(was_asked(), "when it was made");
        let second = Duration::from_secs(1);
        tokio::time::advance(second).await;
        passes(1_000_999, 0);
        assert_eq!(clock.now(), second);
        assert!(!was_asked(), "they went alike");
        let deadline = second * 90;
        let before = clock.instant(deadline);
        passes(60_000_000, 60_000_000);
        assert_eq!(clock.now(), second * 61);
        assert!(was_asked());
        assert_eq!(before - clock.instant(deadline), second * 60);
        was_asked();
        tokio::time::advance(second).await;
        passes(1_000_000, 0);
        assert_eq!(clock.now(), second * 62);
        assert!(!was_asked(), "what is known is no news");
        // Real time goes by while tokio's is paused, and the other way round.
        passes(30_000_000, 0);
        assert_eq!(clock.now(), second * 62);
        assert!(was_asked());
        tokio::time::advance(second * 100).await;
        assert_eq!(clock.now(), second * 162);
    }

    #[test]
    fn this_machine_was_not_suspended_just_now() {
        let clock = Clock::system();
        assert!(clock.now() < Duration::from_secs(5));
    }
}
