use std::sync::Mutex;

use proptest::prelude::*;

use super::*;

/// Pauses begin when the first is asked for, once.
#[test]
fn pauses_begin_when_they_are_asked_for() {
    let begun = Arc::new(std::sync::atomic::AtomicU32::new(0));
    let counter = begun.clone();
    let mut repeats = Pauses::Fresh(Arc::new(move || {
        counter.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let mut pause = ms(1);
        Box::new(move || {
            pause *= 2;
            Some(pause)
        })
    }));
    let times = || begun.load(std::sync::atomic::Ordering::Relaxed);
    assert_eq!(times(), 0);
    assert_eq!([repeats.next(), repeats.next()], [Some(ms(2)), Some(ms(4))]);
    assert_eq!(times(), 1);
}

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
fn spins_come_first_in_each_wait() {
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
        (any::<u64>(), 0_u32..1_000_000_000).prop_map(|(secs, nanos)| Duration::new(secs, nanos)),
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
