use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use rand::RngExt;

use crate::turnstile::{Pauses, Repeats};

/// How to try again when an attempt came back empty: the pauses between attempts.
///
/// It serves where the store cannot tell who is next: a server that cannot push (a proxy, an old
/// protocol, a missing right to subscribe). Elsewhere a waiter stands in the store's queue and is
/// told, and `Repeat` is not asked. The lock's `wait` bounds it, on tokio's clock; a policy that
/// ends before that makes the caller see "busy" there and then.
///
/// | policy | the pauses |
/// |---|---|
/// | [`fixed`](Self::fixed) | the same each time, and up to a tenth more |
/// | [`exponential`](Self::exponential) | doubled each time, up to a longest; half of each is random. The default, from 20 ms to 500 ms |
/// | [`decorrelated`](Self::decorrelated) | random, up to three times the last, up to a longest |
/// | [`spin_then`](Self::spin_then) | none at first, then the same each time |
/// | [`from_fn`](Self::from_fn), `backoff` | your own, or the `backoff` crate's |
/// | [`until`](Self::until), on any of them | ended by a condition |
///
/// Of several callers that wait for one key in one registry the first in line asks for all, and its
/// policy says how long to pause. A pause of nothing asks again as soon as the server has answered:
/// that is as many calls as the wire carries, for as long as the policy names it. Timers tick in
/// milliseconds, and a pause that is longer than the rest of the `wait` is cut off by its end.
///
/// # Examples
///
/// ```
/// use std::time::Duration;
/// use lockstream::{LockRegistry, Repeat};
///
/// let locks = LockRegistry::in_memory();
/// let lock = locks.obtain("report").repeat(Repeat::fixed(Duration::from_millis(100)));
/// // ten attempts in all, with pauses that spread callers well
/// let few = Repeat::decorrelated(Duration::from_millis(20), Duration::from_secs(1)).until(|n| n >= 9);
/// let other = locks.obtain("report").repeat(few);
/// # let _ = (lock, other);
/// ```
#[derive(Clone)]
pub struct Repeat {
    policy: Arc<dyn Fn() -> Pauses + Send + Sync>,
    name: Cow<'static, str>,
}

/// What a pause of nothing grows from where a policy makes it grow: nothing would stay nothing.
const LEAST: Duration = Duration::from_millis(1);

impl Repeat {
    /// The same pause each time, and up to a tenth more, so that callers do not march in step.
    pub fn fixed(pause: Duration) -> Self {
        Self::named("fixed", move || {
            move || Some(pause.saturating_add(spread(pause / 10)))
        })
    }

    /// A pause that doubles from `first` up to `longest`; each time, between half of it and all
    /// of it is taken, at random.
    ///
    /// A `first` of nothing counts as 1 ms, and one over `longest` as `longest`.
    pub fn exponential(first: Duration, longest: Duration) -> Self {
        Self::named("exponential", move || {
            let mut pause = first_of(first, longest);
            move || {
                let half = pause / 2;
                pause = pause.saturating_mul(2).min(longest);
                Some(half + spread(half))
            }
        })
    }

    /// A pause at random between `first` and three times the last pause, `longest` at most:
    /// "decorrelated jitter".
    ///
    /// It grows like [`exponential`](Self::exponential), but each caller in steps of its own, so
    /// that those who began together soon ask at different times. The policy is Marc Brooker's,
    /// from "Exponential Backoff And Jitter" on the AWS Architecture Blog (2015).
    ///
    /// A `first` of nothing counts as 1 ms, and one over `longest` as `longest`.
    pub fn decorrelated(first: Duration, longest: Duration) -> Self {
        Self::named("decorrelated", move || {
            let first = first_of(first, longest);
            let mut last = first;
            move || {
                let more = last.saturating_mul(3).saturating_sub(first);
                last = first.saturating_add(spread(more)).min(longest);
                Some(last)
            }
        })
    }

    /// No pause for the first `spins` repeats, then `pause` each time.
    ///
    /// For locks that are held for about as long as a question takes: to spin costs the server a
    /// call a round trip.
    pub fn spin_then(spins: u32, pause: Duration) -> Self {
        Self::named("spin_then", move || {
            let mut left = spins;
            move || {
                Some(if left == 0 {
                    pause
                } else {
                    left -= 1;
                    Duration::ZERO
                })
            }
        })
    }

    /// Any policy: `start` is called for each wait that comes to a pause, and makes the pauses of that
    /// wait; `None`, or a panic, ends it, and the caller sees "busy". Both are called while the registry
    /// is locked, and the pauses may be dropped then: neither they nor what they own must use it, or
    /// block.
    ///
    /// ```
    /// use std::time::Duration;
    /// use lockstream::Repeat;
    ///
    /// // three more attempts, 50 ms apart
    /// let thrice = Repeat::from_fn(|| {
    ///     let mut left = 3;
    ///     move || { left -= 1; (left >= 0).then_some(Duration::from_millis(50)) }
    /// });
    /// # let _ = thrice;
    /// ```
    pub fn from_fn<S, P>(start: S) -> Self
    where
        S: Fn() -> P + Send + Sync + 'static,
        P: FnMut() -> Option<Duration> + Send + 'static,
    {
        Self::named("from_fn", start)
    }

    /// This policy, ended early: before each pause `over` is asked with the number of repeats there
    /// have been in this wait, 0 before the first; true ends it, and the caller sees "busy".
    ///
    /// So `until(|n| n >= 9)` makes ten attempts in all. What ended by itself stays ended. A caller
    /// that [lost its turn](crate::Lock::acquire) begins a new wait. `over` is called
    /// while the registry is locked: it must neither use it nor block. It is asked only where the
    /// policy is, and on behalf of the first in line: a caller in the store's queue waits its `wait`.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use std::sync::atomic::{AtomicBool, Ordering};
    /// use lockstream::Repeat;
    ///
    /// let draining = Arc::new(AtomicBool::new(false));
    /// let seen = draining.clone();
    /// // nobody begins new work while the service drains
    /// let repeat = Repeat::default().until(move |_| seen.load(Ordering::Relaxed));
    /// # let _ = (repeat, draining);
    /// ```
    #[must_use]
    pub fn until<F>(self, over: F) -> Self
    where
        F: Fn(u32) -> bool + Send + Sync + 'static,
    {
        let over = Arc::new(over);
        let Self { policy, name } = self;
        Self::named(format!("{name}, until"), move || {
            let over = over.clone();
            let mut pauses = policy();
            let mut repeats = 0_u32;
            move || {
                if over(repeats) {
                    return None;
                }
                repeats = repeats.saturating_add(1);
                pauses()
            }
        })
    }

    /// Any policy of the `backoff` crate: `start` makes one for each wait.
    ///
    /// An [`ExponentialBackoff`](backoff::ExponentialBackoff)'s own limit (15 minutes of the
    /// standard clock, as it comes) is switched off: the lock's `wait` alone bounds the wait.
    #[cfg(feature = "backoff")]
    pub fn backoff<S, B>(start: S) -> Self
    where
        S: Fn() -> B + Send + Sync + 'static,
        B: backoff::backoff::Backoff + Send + 'static,
    {
        Self::named("backoff", move || {
            let mut policy = start();
            let any: &mut dyn std::any::Any = &mut policy;
            if let Some(exponential) = any.downcast_mut::<backoff::ExponentialBackoff>() {
                exponential.max_elapsed_time = None;
            }
            move || policy.next_backoff()
        })
    }

    /// The pauses of one wait, which begins when the first is asked for.
    pub(crate) fn start(&self) -> Repeats {
        Repeats::Fresh(self.policy.clone())
    }

    fn named<S, P>(name: impl Into<Cow<'static, str>>, start: S) -> Self
    where
        S: Fn() -> P + Send + Sync + 'static,
        P: FnMut() -> Option<Duration> + Send + 'static,
    {
        Self {
            policy: Arc::new(move || Box::new(start())),
            name: name.into(),
        }
    }
}

/// Anything from nothing to `most`.
fn spread(most: Duration) -> Duration {
    // Of a span too long for a double's digits the product may be rounded up past it.
    most.mul_f64(rand::rng().random::<f64>()).min(most)
}

/// Where a pause that grows begins.
fn first_of(first: Duration, longest: Duration) -> Duration {
    if first.is_zero() { LEAST } else { first }.min(longest)
}

impl Default for Repeat {
    fn default() -> Self {
        Self::exponential(Duration::from_millis(20), Duration::from_millis(500))
    }
}

impl fmt::Debug for Repeat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Repeat").field(&self.name).finish()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use proptest::prelude::*;

    use super::*;

    const fn ms(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    fn pauses(repeat: &Repeat, n: usize) -> Vec<Option<Duration>> {
        let mut pauses = repeat.start();
        (0..n).map(|_| pauses.next()).collect()
    }

    /// Pauses of a policy that never ends.
    fn endless(repeat: &Repeat, n: usize) -> Vec<Duration> {
        let pauses = pauses(repeat, n).into_iter();
        pauses.map(|pause| pause.expect("it never ends")).collect()
    }

    #[test]
    fn fixed_stays_within_a_tenth() {
        let pause = ms(100);
        for taken in endless(&Repeat::fixed(pause), 100) {
            assert!(taken >= pause && taken <= pause + pause / 10, "{taken:?}");
        }
    }

    #[test]
    fn exponential_doubles_up_to_the_longest() {
        let repeat = Repeat::exponential(ms(10), ms(50));
        for (taken, most) in endless(&repeat, 6)
            .into_iter()
            .zip([10, 20, 40, 50, 50, 50])
        {
            let most = ms(most);
            assert!(taken >= most / 2 && taken <= most, "{taken:?} of {most:?}");
        }
    }

    #[test]
    fn decorrelated_goes_up_to_three_times_the_last() {
        let (first, longest) = (ms(10), ms(400));
        for _ in 0..50 {
            let mut last = first;
            for taken in endless(&Repeat::decorrelated(first, longest), 50) {
                assert!(
                    taken >= first && taken <= longest.min(last * 3),
                    "{taken:?} after {last:?}"
                );
                last = taken;
            }
        }
    }

    /// It grows, it comes back down, and two who began together part.
    #[test]
    fn decorrelated_pauses_are_spread() {
        let repeat = Repeat::decorrelated(ms(10), ms(400));
        let (one, two) = (endless(&repeat, 500), endless(&repeat, 500));
        assert!(
            one.iter().max() == Some(&ms(400)),
            "it never reached the longest"
        );
        assert!(one.windows(2).any(|pair| pair[1] < pair[0]), "it only grew");
        let alike = one
            .iter()
            .zip(&two)
            .filter(|(one, two)| one == two && **one < ms(400));
        assert!(alike.count() < 10, "two callers march in step");
    }

    #[test]
    fn spins_come_first_and_anew_for_each_wait() {
        let pause = Some(ms(5));
        let repeat = Repeat::spin_then(2, ms(5));
        let spin = Some(Duration::ZERO);
        for _ in 0..2 {
            assert_eq!(pauses(&repeat, 4), [spin, spin, pause, pause]);
        }
    }

    #[test]
    fn until_is_asked_before_each_pause_with_the_repeats_so_far() {
        let asked = Arc::new(Mutex::new(Vec::new()));
        let seen = asked.clone();
        let repeat = Repeat::spin_then(0, ms(5)).until(move |repeats| {
            seen.lock().unwrap().push(repeats);
            repeats == 3
        });
        let pause = Some(ms(5));
        // Each wait counts for itself, also while another goes on.
        let mut other = repeat.start();
        assert_eq!(other.next(), pause);
        assert_eq!(pauses(&repeat, 5), [pause, pause, pause, None, None]);
        assert_eq!(
            [other.next(), other.next(), other.next()],
            [pause, pause, None]
        );
        assert_eq!(*asked.lock().unwrap(), [0, 0, 1, 2, 3, 3, 1, 2, 3]);
    }

    #[test]
    fn until_ends_no_policy_later_than_it_ends_itself() {
        fn from(pauses: &'static [u64]) -> Repeat {
            Repeat::from_fn(|| {
                let mut pauses = pauses.iter();
                move || pauses.next().copied().map(ms)
            })
        }
        assert_eq!(pauses(&from(&[5]).until(|_| false), 2), [Some(ms(5)), None]);
        assert_eq!(
            pauses(&from(&[5, 6]).until(|n| n == 1), 2),
            [Some(ms(5)), None]
        );
        let both = from(&[5, 6, 7]).until(|n| n == 2).until(|n| n == 1);
        assert_eq!(pauses(&both, 2), [Some(ms(5)), None]);
        assert_eq!(pauses(&from(&[5]).until(|_| true), 1), [None]);
    }

    #[test]
    fn a_policy_tells_its_name() {
        let repeat = Repeat::default().until(|_| true);
        assert_eq!(format!("{repeat:?}"), r#"Repeat("exponential, until")"#);
    }

    #[cfg(feature = "backoff")]
    #[test]
    fn an_exponential_backoffs_own_limit_is_switched_off() {
        let repeat = Repeat::backoff(|| backoff::ExponentialBackoff {
            max_elapsed_time: Some(Duration::ZERO),
            ..Default::default()
        });
        assert!(pauses(&repeat, 20).iter().all(Option::is_some));
    }

    /// Any duration, and those at the edges often.
    fn any_duration() -> impl Strategy<Value = Duration> {
        prop_oneof![
            Just(Duration::ZERO),
            Just(Duration::from_nanos(1)),
            Just(Duration::MAX),
            Just(Duration::MAX - Duration::from_nanos(1)),
            (0_u64..5_000).prop_map(ms),
            (any::<u64>(), 0_u32..1_000_000_000)
                .prop_map(|(secs, nanos)| Duration::new(secs, nanos)),
        ]
    }

    proptest! {
        #[test]
        fn fixed_takes_any_pause(pause in any_duration()) {
            for taken in endless(&Repeat::fixed(pause), 50) {
                prop_assert!(taken >= pause && taken <= pause.saturating_add(pause / 10));
            }
        }

        #[test]
        fn exponential_takes_any_bounds(first in any_duration(), longest in any_duration()) {
            let mut most = first.max(Duration::from_nanos(1)).min(longest);
            for taken in endless(&Repeat::exponential(first, longest), 120) {
                prop_assert!(taken <= longest);
                prop_assert!(taken >= most / 2, "{taken:?} of {most:?}");
                most = most.saturating_mul(2).min(longest);
            }
            // 2 ^ 120 ns is more than any duration: whatever it began with, it has grown.
            prop_assert!(most == longest);
        }

        #[test]
        fn decorrelated_takes_any_bounds(first in any_duration(), longest in any_duration()) {
            let first_pause = if first.is_zero() { ms(1) } else { first }.min(longest);
            let mut last = first_pause;
            for taken in endless(&Repeat::decorrelated(first, longest), 120) {
                prop_assert!(taken >= first_pause, "{taken:?} before {first_pause:?}");
                prop_assert!(taken <= longest.min(last.saturating_mul(3)), "{taken:?} after {last:?}");
                last = taken;
            }
        }

        #[test]
        fn spin_then_takes_any_pause(spins in 0_u32..40, pause in any_duration()) {
            let taken = endless(&Repeat::spin_then(spins, pause), 50);
            let (spun, paused) = taken.split_at(spins as usize);
            prop_assert!(spun.iter().all(Duration::is_zero));
            prop_assert!(paused.iter().all(|taken| *taken == pause));
        }

        #[test]
        fn until_ends_any_policy_when_it_says(
            which in 0_usize..4,
            first in any_duration(),
            longest in any_duration(),
            most in 0_u32..40,
        ) {
            let policy = match which {
                0 => Repeat::fixed(first),
                1 => Repeat::exponential(first, longest),
                2 => Repeat::decorrelated(first, longest),
                _ => Repeat::spin_then(3, first),
            };
            let repeat = policy.until(move |repeats| repeats >= most);
            let taken = pauses(&repeat, 50);
            let (before, after) = taken.split_at(most as usize);
            prop_assert!(before.iter().all(Option::is_some));
            prop_assert!(after.iter().all(Option::is_none));
        }
    }
}
