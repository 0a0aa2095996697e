//! How long to wait between two attempts to connect (G1).

use std::time::Duration;

use tokio::time::Instant;

/// The longest pauses after a lost connection and after the attempts that follow.
const LONGEST: [Duration; 3] = [
    Duration::from_millis(200),
    Duration::from_secs(1),
    Duration::from_secs(2),
];

/// The longest pause once an outage has lasted for [`OUTAGE`].
const LONGEST_IN_OUTAGE: Duration = Duration::from_secs(10);

const OUTAGE: Duration = Duration::from_secs(60);

/// A connection that stood for so long starts over.
const STEADY: Duration = Duration::from_secs(10);

/// The pauses of one connection: uniformly random, so that a fleet does not come back in step.
#[derive(Debug, Default)]
pub(super) struct Backoff {
    failures: usize,
    /// When the first of these failures was seen.
    since: Option<Instant>,
    not_before: Option<Instant>,
}

impl Backoff {
    /// When the next attempt may begin; `None`: at once.
    pub(super) fn not_before(&self) -> Option<Instant> {
        self.not_before
    }

    /// A connection was lost that had stood since `stood_since`, or could not be made.
    pub(super) fn failed(&mut self, now: Instant, stood_since: Option<Instant>) {
        let stood = stood_since.is_some_and(|since| now.saturating_duration_since(since) >= STEADY);
        // A failure of long ago is no part of this outage.
        let before = self.not_before;
        if stood || before.is_some_and(|it| now.saturating_duration_since(it) >= OUTAGE) {
            *self = Self::default();
        }
        let since = *self.since.get_or_insert(now);
        let longest = if now.saturating_duration_since(since) >= OUTAGE {
            LONGEST_IN_OUTAGE
        } else {
            LONGEST[self.failures.min(LONGEST.len() - 1)]
        };
        self.failures += 1;
        self.not_before = Some(now + longest.mul_f64(rand::random()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn longest_pause(backoff: &mut Backoff, now: Instant, stood_since: Option<Instant>) -> f64 {
        let pauses = (0..300).map(|_| {
            let mut tried = Backoff {
                failures: backoff.failures,
                since: backoff.since,
                not_before: None,
            };
            tried.failed(now, stood_since);
            (tried.not_before().unwrap() - now).as_secs_f64()
        });
        let longest = pauses.fold(0.0, f64::max);
        backoff.failed(now, stood_since);
        longest
    }

    #[test]
    fn g1_pauses_are_random_and_grow_with_the_outage() {
        let begin = Instant::now();
        let mut backoff = Backoff::default();
        assert_eq!(backoff.not_before(), None, "the first attempt has no pause");
        for longest in [0.2, 1.0, 2.0, 2.0] {
            let pause = longest_pause(&mut backoff, begin, None);
            assert!((longest * 0.9..=longest).contains(&pause), "{pause}");
        }
        let later = begin + OUTAGE;
        assert!(longest_pause(&mut backoff, later, None) > 9.0);
        // A connection that breaks at once is as good as none.
        let stood = Some(later - Duration::from_secs(9));
        assert!(longest_pause(&mut backoff, later, stood) > 9.0);
        let stood = Some(later - STEADY);
        assert!(longest_pause(&mut backoff, later, stood) <= 0.2);
    }
}
