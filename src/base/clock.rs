//! The registry's own clock: tokio's, so that it can be paused, plus the time in which the
//! machine was suspended (D3).

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

#[cfg(any(target_os = "linux", target_os = "android", target_vendor = "apple"))]
use rustix::time::ClockId;
use tokio::time::Instant;

use crate::base::thread_end;

/// A point on the registry's clock: the time since the registry was created. It includes the time while the machine
/// was suspended (D3).
pub(crate) type Moment = Duration;

/// Later than anything that happens.
pub(crate) const FOREVER: Moment = Duration::MAX;

/// How often somebody who holds something looks whether the machine was suspended.
pub(crate) const SUSPENSION_TICK: Duration = Duration::from_secs(1);

/// The least jump between the clocks that counts as a suspension.
const LEAST_JUMP: Duration = Duration::from_millis(1);

/// Whether a test has paused the clock of this runtime. Then no other thread can know what time it is.
pub(crate) fn is_virtual() -> bool {
    let (virtual_time, real_time) = (thread_end::now(), std::time::Instant::now());
    while real_time.elapsed() < Duration::from_micros(2) {}
    thread_end::now() == virtual_time
}

pub(crate) struct Clock {
    epoch: Instant,
    /// What [`boot_time`] was at the epoch.
    booted: Option<Duration>,
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
            booted: None,
            epoch: Instant::now(),
            before: suspended(),
            suspended: Box::new(suspended),
            slept: AtomicU64::new(0),
        }
    }

    pub(crate) fn system() -> Self {
        // Read before the epoch, or a suspension could seem shorter than it is.
        let booted = boot_time();
        Self {
            booted,
            ..Self::new(suspended())
        }
    }

    pub(crate) fn now(&self) -> Moment {
        let awake = self.awake();
        awake + self.slept(awake)
    }

    /// The time since the epoch on tokio's clock.
    fn awake(&self) -> Duration {
        thread_end::now().saturating_duration_since(self.epoch)
    }

    /// When `moment` comes, if the machine is not suspended again; never for [`FOREVER`].
    pub(crate) fn instant(&self, moment: Moment) -> Instant {
        let awake = moment.saturating_sub(self.slept(self.awake()));
        // tokio's own "far future"; instants cannot be added to without end.
        let far = Duration::from_secs(86_400 * 365 * 30);
        self.epoch + awake.min(far)
    }

    /// `awake` was read just now.
    fn slept(&self, awake: Duration) -> Duration {
        let known = Duration::from_nanos(self.slept.load(Ordering::Relaxed));
        // One clock less to read at each event. While tokio's is paused this tells nothing, and the other way does.
        if let (Some(booted), Some(boot_time)) = (self.booted, boot_time())
            && boot_time.saturating_sub(booted) < awake + known + LEAST_JUMP
        {
            return known;
        }
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

/// The time since this machine booted, on a clock that differs from tokio's by the suspensions alone.
fn boot_time() -> Option<Duration> {
    #[cfg(any(target_os = "linux", target_os = "android"))]
    return Some(read(ClockId::Boottime));
    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    None
}

/// Tells for how long this machine has been suspended since it booted: Linux has a clock for each.
#[cfg(any(target_os = "linux", target_os = "android"))]
fn suspended() -> impl Fn() -> Duration {
    // A thread that is put aside between the two readings makes the difference smaller than it is,
    // never greater: no suspension is ever made up.
    || read(ClockId::Boottime).saturating_sub(read(ClockId::Monotonic))
}

/// Tells for how long this machine has been suspended since this call. `Instant` stands still meanwhile, and
/// `CLOCK_MONOTONIC` goes on.
#[cfg(target_vendor = "apple")]
fn suspended() -> impl Fn() -> Duration {
    let began = std::time::Instant::now();
    jumps(|| read(ClockId::Monotonic), move || began.elapsed())
}

/// `Instant` itself counts suspended time on Windows and OpenBSD. On other systems no clock is known that does.
#[cfg(not(any(target_os = "linux", target_os = "android", target_vendor = "apple")))]
fn suspended() -> impl Fn() -> Duration {
    || Duration::ZERO
}

#[cfg(any(target_os = "linux", target_os = "android", target_vendor = "apple"))]
fn read(clock: ClockId) -> Duration {
    let time = rustix::time::clock_gettime(clock);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    Duration::new(seconds, u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// Adds up by how much the clock `counting`, which counts suspended time, jumps ahead of the clock `awake`, which does
/// not.
///
/// Their rates differ, since only one of them is adjusted to the network's time. So the difference is compared with the
/// one before: since the start it may have shrunk by more than a suspension adds.
#[cfg(any(target_vendor = "apple", test))]
fn jumps(counting: impl Fn() -> Duration, awake: impl Fn() -> Duration) -> impl Fn() -> Duration {
    use crate::base::mutex::Mutex;

    let ahead = move || {
        // Readings that a thread was put aside between say nothing: the next look will tell.
        let before = awake();
        let counted = counting();
        let after = awake();
        let is_close = after.saturating_sub(before) < LEAST_JUMP / 2;
        is_close.then(|| counted.as_nanos().cast_signed() - after.as_nanos().cast_signed())
    };
    let seen = Mutex::new((ahead(), Duration::ZERO));
    move || {
        let mut seen = seen.lock();
        let (last, suspended) = &mut *seen;
        if let Some(ahead) = ahead() {
            let gained = ahead - *last.get_or_insert(ahead);
            let jump = u64::try_from(gained).map_or(Duration::ZERO, Duration::from_nanos);
            if jump >= LEAST_JUMP {
                *suspended += jump;
            }
            // A small gain is left to add up to a jump.
            if gained < 0 || jump >= LEAST_JUMP {
                *last = Some(ahead);
            }
        }
        *suspended
    }
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

    /// D3: the clock that tells of suspensions alone is asked only if the time since the boot has jumped, and then it is
    /// right.
    #[cfg(any(target_os = "linux", target_os = "android"))]
    #[test]
    fn d3_a_jump_of_the_time_since_the_boot_is_looked_into() {
        let told = Arc::new(AtomicU64::new(0));
        let mut clock = clock(&told);
        let minute = Duration::from_secs(60);
        // However long this thread stands still between two readings.
        clock.booted = boot_time().map(|it| it + minute);
        told.store(60_000_000, Ordering::Relaxed);
        assert!(clock.now() < minute, "nothing has jumped");
        clock.booted = clock.booted.map(|it| it.saturating_sub(2 * minute));
        assert!(clock.now() >= minute);
        // Nor is one made up where the time since the boot goes on alone, as while tokio's clock is paused.
        let mut paused = self::clock(&Arc::default());
        paused.booted = Some(Duration::ZERO);
        assert!(paused.now() < minute);
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

    /// Two clocks, of which the test sets what they show, in microseconds, and the suspensions that they show.
    fn two_clocks() -> (Arc<AtomicU64>, Arc<AtomicU64>, impl Fn() -> u128) {
        let clocks = [9_000_000, 1_000_000].map(|micros| Arc::new(AtomicU64::new(micros)));
        let shows = |clock: &Arc<AtomicU64>| {
            let clock = clock.clone();
            move || Duration::from_micros(clock.load(Ordering::Relaxed))
        };
        let suspended = jumps(shows(&clocks[0]), shows(&clocks[1]));
        let [counting, awake] = clocks;
        (counting, awake, move || suspended().as_micros())
    }

    /// D3, where the clocks have no common rate: one of them is behind by 26 s after a month, and a suspension of 20 s is
    /// noticed all the same.
    #[test]
    fn d3_a_jump_between_two_clocks_is_a_suspension_though_one_runs_slow() {
        let (counting, awake, suspended) = two_clocks();
        let go_on = |clock: &AtomicU64, micros| clock.fetch_add(micros, Ordering::Relaxed);
        for _ in 0..1000 {
            go_on(&awake, 2_592_000_000);
            go_on(&counting, 2_592_000_000 - 26_000);
            assert_eq!(suspended(), 0);
        }
        go_on(&counting, 20_000_000);
        assert_eq!(suspended(), 20_000_000);
        assert_eq!(suspended(), 20_000_000, "each counts once");
        go_on(&awake, 5_000_000);
        go_on(&counting, 65_000_000);
        assert_eq!(suspended(), 80_000_000);
        // One that runs fast goes on by a millisecond at a time.
        for micros in [700, 700, 700] {
            go_on(&counting, micros);
            suspended();
        }
        assert_eq!(suspended(), 80_001_400);
    }

    /// A thread that is put aside between the readings sees a difference that is none.
    #[test]
    fn d3_readings_that_are_far_apart_make_up_no_suspension() {
        let now = Arc::new(AtomicU64::new(0));
        let delay = Arc::new(AtomicU64::new(0));
        let reads = |delay: &Arc<AtomicU64>| {
            let (now, delay) = (now.clone(), delay.clone());
            move || {
                let delay = delay.load(Ordering::Relaxed);
                Duration::from_micros(now.fetch_add(delay, Ordering::Relaxed) + delay)
            }
        };
        let suspended = jumps(reads(&delay), reads(&Arc::default()));
        for late in [0, 50_000, 0, 499, 0, 300, 1, 2_000, 0] {
            delay.store(late, Ordering::Relaxed);
            assert_eq!(suspended(), Duration::ZERO, "{late} us");
        }
    }

    /// The clocks of this machine, as they are read where it has none that tells suspensions alone.
    #[cfg(target_os = "linux")]
    #[test]
    fn real_clocks_make_up_no_suspension() {
        let began = std::time::Instant::now();
        let suspended = jumps(|| read(ClockId::Boottime), move || began.elapsed());
        while began.elapsed() < Duration::from_millis(50) {
            assert!(suspended() < Duration::from_secs(5));
        }
    }

    #[test]
    fn this_machine_was_not_suspended_just_now() {
        let clock = Clock::system();
        assert!(clock.now() < Duration::from_secs(5));
    }
}
