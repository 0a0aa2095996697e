//! Chance that is the same for the same seed, on every machine and with every version of every crate.

use std::time::Duration;

/// SplitMix64, as its author published it.
#[derive(Clone, Debug)]
pub(crate) struct Dice(u64);

impl Dice {
    /// Dice of their own for one of many that share a seed.
    pub(crate) fn of(seed: u64, which: u64) -> Self {
        let mut dice = Self(seed ^ which.wrapping_mul(0xd134_2543_de82_ef95));
        Self(dice.next())
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// From `low` to `high`, both included.
    pub(crate) fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.next() % (high - low + 1)
    }

    pub(crate) fn micros(&mut self, low: u64, high: u64) -> Duration {
        Duration::from_micros(self.between(low, high))
    }

    pub(crate) fn millis(&mut self, low: u64, high: u64) -> Duration {
        Duration::from_millis(self.between(low, high))
    }

    /// True once in `many`.
    pub(crate) fn once_in(&mut self, many: u64) -> bool {
        self.next().is_multiple_of(many)
    }

    pub(crate) fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[self.between(0, from.len() as u64 - 1) as usize]
    }

    pub(crate) fn shuffle<T>(&mut self, what: &mut [T]) {
        for end in (1..what.len()).rev() {
            what.swap(end, self.between(0, end as u64) as usize);
        }
    }
}
