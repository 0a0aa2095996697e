use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::machine::Rules;
use super::time::Point;
use super::wait_queue::WaiterId;
use crate::base::Mode;
use crate::store::contract::Owner;

/// The golden ratio less 1, as a part of 2^64.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// So many leases in a row are renewed together: their state is likely to be together in memory, too.
const TOGETHER: u8 = 32;

/// What the turnstiles of a registry share: its settings, numbers that are never used twice, random numbers, and the
/// owners whose keys were left in the store.
#[derive(Clone, Debug)]
pub(crate) struct Ids {
    pub(super) rules: Rules,
    sequence: u64,
    random: u64,
    /// The latest result of [`place_in`](Self::place_in), as a part of 2^64, and how many more calls get the same.
    place: u64,
    more: u8,
    /// Owners whose key was left in the store, and when it has expired there. The turnstile that left it
    /// may be gone by then.
    kept: BTreeMap<Owner, Point>,
    /// The same owners by that time.
    kept_by_end: BTreeSet<(Point, Owner)>,
}

impl Ids {
    pub(crate) fn new(rules: Rules, seed: u64) -> Self {
        Self {
            rules,
            sequence: 0,
            random: seed,
            place: seed.wrapping_mul(GOLDEN),
            more: 0,
            kept: BTreeMap::new(),
            kept_by_end: BTreeSet::new(),
        }
    }

    /// Remembers an owner whose key was left in the store, until the key has expired there: at `until` at the latest.
    pub(super) fn remember(&mut self, owner: Owner, now: Point, until: Point) {
        while let Some((end, over)) = self.kept_by_end.first().copied()
            && end <= now
        {
            self.kept_by_end.pop_first();
            self.kept.remove(&over);
        }
        if let Some(before) = self.kept.insert(owner, until) {
            self.kept_by_end.remove(&(before, owner));
        }
        self.kept_by_end.insert((until, owner));
    }

    /// Whether what the store still has under a retired owner is meant to be there.
    pub(super) fn is_remembered(&self, owner: Owner, now: Point) -> bool {
        self.kept.get(&owner).is_some_and(|until| now < *until)
    }

    #[cfg(test)]
    pub(super) fn remembered(&self) -> usize {
        self.kept.len()
    }

    /// The random numbers begin anew: what follows depends on nothing that was drawn before.
    #[cfg(test)]
    pub(super) fn reseed(&mut self) {
        (self.random, self.place, self.more) = (0, 0, 0);
    }

    pub(super) fn owner(&mut self, mode: Mode) -> Owner {
        self.sequence += 1;
        Owner {
            sequence: self.sequence,
            mode,
        }
    }

    pub(super) fn waiter(&mut self) -> WaiterId {
        self.sequence += 1;
        WaiterId(self.sequence)
    }

    /// A duration of `low` to `high` milliseconds.
    pub(super) fn jitter(&mut self, low: u64, high: u64) -> Duration {
        Duration::from_millis(low) + self.within(Duration::from_millis(high - low))
    }

    /// A duration of less than `most`. A few calls in a row get the same part of their `most`. These parts are spread
    /// evenly: each is the last plus the golden ratio, modulo 1.
    pub(super) fn place_in(&mut self, most: Duration) -> Duration {
        if self.more == 0 {
            self.more = TOGETHER;
            self.place = self.place.wrapping_add(GOLDEN);
        }
        self.more -= 1;
        let nanos = (most.as_nanos() * u128::from(self.place)) >> 64;
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    }

    /// A duration of `most` at most (splitmix64, Steele, Lea and Flood 2014).
    pub(super) fn within(&mut self, most: Duration) -> Duration {
        self.random = self.random.wrapping_add(GOLDEN);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^= z >> 31;
        let most = u64::try_from(most.as_micros()).unwrap_or(u64::MAX - 1);
        Duration::from_micros(z % (most + 1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::turnstile::tests::rules;

    /// Each is forgotten when its own time is over, in whatever order they came.
    #[test]
    fn kept_owners_are_remembered_for_their_time_and_no_longer() {
        let mut ids = Ids::new(rules(), 1);
        let now = Point::from(Duration::ZERO);
        let at = |millis| now + Duration::from_millis(millis);
        let long = ids.owner(Mode::Exclusive);
        ids.remember(long, now, at(100_000));
        let owners: Vec<_> = (0..20_000).map(|_| ids.owner(Mode::Exclusive)).collect();
        for (owner, n) in owners.iter().zip(1..) {
            ids.remember(*owner, now, at(n));
        }
        assert_eq!(ids.remembered(), 20_001);
        assert!(ids.is_remembered(owners[9_999], at(9_999)));
        assert!(!ids.is_remembered(owners[9_999], at(10_000)));
        // Those that are over are forgotten with the next. One whose key stays for longer after all is not.
        ids.remember(owners[0], at(1), at(100_000));
        let last = ids.owner(Mode::Exclusive);
        ids.remember(last, at(20_000), at(20_001));
        assert_eq!(ids.remembered(), 3);
        for owner in [long, owners[0]] {
            assert!(ids.is_remembered(owner, at(99_999)));
        }
        assert_eq!(ids.kept.len(), ids.kept_by_end.len());
    }
}
