//! How long to wait between two attempts to connect.

use std::time::Duration;

/// No pause at first, then from 10 to 20 ms, doubling up to 0.5 to 1 s. The jitter keeps a fleet
/// from knocking in step at a server that comes back.
#[derive(Debug, Default)]
pub(super) struct Pauses {
    made: u32,
}

const FIRST: Duration = Duration::from_millis(20);

impl Pauses {
    pub(super) const LONGEST: Duration = Duration::from_secs(1);

    pub(super) fn next(&mut self) -> Duration {
        let made = self.made;
        self.made = made.saturating_add(1);
        let Some(doublings) = made.checked_sub(1) else {
            return Duration::ZERO;
        };
        let whole = FIRST
            .saturating_mul(1 << doublings.min(10))
            .min(Self::LONGEST);
        whole.mul_f64(rand::random_range(0.5..=1.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_a_second_and_no_further() {
        let mut pauses = Pauses::default();
        assert_eq!(pauses.next(), Duration::ZERO);
        let first = pauses.next();
        assert!(first >= FIRST / 2 && first <= FIRST, "{first:?}");
        for _ in 0..100 {
            assert!(pauses.next() <= Pauses::LONGEST);
        }
        assert!(pauses.next() >= Pauses::LONGEST / 2);
    }
}
