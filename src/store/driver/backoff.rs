//! How long to wait between two attempts to connect (G1).

use std::ops::RangeInclusive;
use std::time::Duration;

use tokio::time::Instant;

use crate::base::thread_end;

/// The pauses, in seconds, after a lost connection and after the attempts that follow. The second ones begin after all
/// of a fleet's first attempts.
const PAUSES: [RangeInclusive<f64>; 3] = [0.0..=0.25, 0.25..=1.0, 0.4..=2.0];

/// The pause once an outage has lasted for [`OUTAGE`].
const PAUSE_IN_OUTAGE: RangeInclusive<f64> = 2.0..=10.0;

const OUTAGE: Duration = Duration::from_secs(60);

/// A connection that stood for so long starts over.
const STEADY: Duration = Duration::from_secs(10);

/// The pauses of one connection: uniformly random, so that a fleet does not come back in step.
#[derive(Debug, Default)]
pub(crate) struct Backoff {
    failures: usize,
    /// When the first of these failures was seen.
    since: Option<Instant>,
    not_before: Option<Instant>,
}

impl Backoff {
    /// When the next attempt may begin; `None`: at once.
    pub(crate) fn not_before(&self) -> Option<Instant> {
        self.not_before
    }

    /// A connection was lost that had stood since `stood_since`, or could not be made.
    pub(crate) fn failed(&mut self, now: Instant, stood_since: Option<Instant>) {
        let stood = stood_since.is_some_and(|since| now.saturating_duration_since(since) >= STEADY);
        // A failure of long ago is no part of this outage.
        let before = self.not_before;
        if stood || before.is_some_and(|it| now.saturating_duration_since(it) >= OUTAGE) {
            *self = Self::default();
        }
        let since = *self.since.get_or_insert(now);
        let pause = if now.saturating_duration_since(since) >= OUTAGE {
            PAUSE_IN_OUTAGE
        } else {
            PAUSES[self.failures.min(PAUSES.len() - 1)].clone()
        };
        self.failures += 1;
        let (least, most) = pause.into_inner();
        let pause = least + (most - least) * thread_end::random();
        self.not_before = Some(now + Duration::from_secs_f64(pause));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The shortest and the longest of many pauses.
    fn pauses(backoff: &mut Backoff, now: Instant, stood_since: Option<Instant>) -> [f64; 2] {
        let pauses = (0..300).map(|_| {
            let mut tried = Backoff {
                failures: backoff.failures,
                since: backoff.since,
                not_before: None,
            };
            tried.failed(now, stood_since);
            (tried.not_before().unwrap() - now).as_secs_f64()
        });
        let ends = pauses.fold([f64::MAX, 0.0], |[shortest, longest], pause| {
            [shortest.min(pause), longest.max(pause)]
        });
        backoff.failed(now, stood_since);
        ends
    }

    #[test]
    fn g1_pauses_are_random_and_grow_with_the_outage() {
        let begin = Instant::now();
        let mut backoff = Backoff::default();
        assert_eq!(backoff.not_before(), None, "the first attempt has no pause");
        for [least, most] in [[0.0, 0.25], [0.25, 1.0], [0.4, 2.0], [0.4, 2.0]] {
            let [shortest, longest] = pauses(&mut backoff, begin, None);
            assert!(
                (least..=least + 0.1 * most).contains(&shortest),
                "{shortest}"
            );
            assert!((0.9 * most..=most).contains(&longest), "{longest}");
        }
        let later = begin + OUTAGE;
        let [shortest, longest] = pauses(&mut backoff, later, None);
        assert!(shortest >= 2.0 && longest > 9.0);
        // A connection that breaks at once is as good as none.
        let stood = Some(later - Duration::from_secs(9));
        assert!(pauses(&mut backoff, later, stood)[1] > 9.0);
        let stood = Some(later - STEADY);
        assert!(pauses(&mut backoff, later, stood)[1] <= 0.25);
    }

    /// Two failures are of one outage if less than its length lies between them.
    #[test]
    fn g1_a_failure_of_long_ago_counts_no_more() {
        for (later, failures) in [(OUTAGE - Duration::from_millis(1), 2), (OUTAGE, 1)] {
            let mut backoff = Backoff::default();
            backoff.failed(Instant::now(), None);
            let allowed = backoff.not_before().unwrap();
            backoff.failed(allowed + later, None);
            assert_eq!(backoff.failures, failures, "{later:?}");
        }
    }
}
