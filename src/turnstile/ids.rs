use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::time::{Moment, Point};
use super::wait_queue::WaiterId;
use crate::store::contract::Owner;

/// How many owners are remembered whose keys were left in the store.
const MOST_KEPT: usize = 10_000;

/// What all turnstiles of a registry draw from: numbers that are never used twice, and chance; and
/// what they must know of each other's past.
#[derive(Debug)]
pub(crate) struct Ids {
    sequence: u64,
    chance: u64,
    /// Owners whose key was left in the store, and when that has let go of it by itself. The
    /// turnstile that left it is forgotten by then.
    kept: BTreeMap<Owner, Point>,
    kept_until: BTreeSet<(Point, Owner)>,
}

impl Ids {
    pub(crate) fn new(seed: u64) -> Self {
        Self {
            sequence: 0,
            chance: seed,
            kept: BTreeMap::new(),
            kept_until: BTreeSet::new(),
        }
    }

    /// The key of a retired owner stays in the store, until then at the latest.
    pub(super) fn remember(&mut self, owner: Owner, now: Point, until: Point) {
        while let Some((end, over)) = self.kept_until.first().copied()
            && end <= now
        {
            self.kept_until.pop_first();
            self.kept.remove(&over);
        }
        self.kept.insert(owner, until);
        self.kept_until.insert((until, owner));
        // A grant that comes late does so by seconds, in which nobody leaves so many keys. The oldest are forgotten,
        // however long their keys stay.
        if self.kept.len() > MOST_KEPT
            && let Some((oldest, until)) = self.kept.pop_first()
        {
            self.kept_until.remove(&(until, oldest));
        }
    }

    /// Whether what the store still has under a retired owner is meant to be there.
    pub(super) fn is_remembered(&self, owner: Owner, now: Point) -> bool {
        self.kept.get(&owner).is_some_and(|until| now < *until)
    }

    pub(super) fn owner(&mut self) -> Owner {
        self.sequence += 1;
        Owner(self.sequence)
    }

    pub(super) fn waiter(&mut self) -> WaiterId {
        self.sequence += 1;
        WaiterId(self.sequence)
    }

    /// A duration of `low` to `high` milliseconds (splitmix64, Steele, Lea and Flood 2014).
    pub(super) fn jitter(&mut self, low: u64, high: u64) -> Duration {
        self.chance = self.chance.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.chance;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^= z >> 31;
        let micros = low * 1000 + z % ((high - low) * 1000 + 1);
        Duration::from_micros(micros)
    }
}

/// What comes in with every event: the time, and the registry's supply.
#[derive(Debug)]
pub(crate) struct EventCx<'a> {
    pub(crate) now: Moment,
    pub(crate) ids: &'a mut Ids,
}

impl EventCx<'_> {
    /// The time, as a turnstile keeps it.
    pub(super) fn at(&self) -> Point {
        self.now.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_very_many_kept_owners_the_latest_are_remembered() {
        let mut ids = Ids::new(1);
        let now = Point::START;
        let until = now + Duration::from_secs(86_400);
        let owners: Vec<_> = (0..MOST_KEPT + 10).map(|_| ids.owner()).collect();
        for owner in &owners {
            ids.remember(*owner, now, until);
        }
        assert_eq!(ids.kept.len(), MOST_KEPT);
        assert_eq!(ids.kept_until.len(), MOST_KEPT);
        let is_remembered = |owner: &Owner| ids.is_remembered(*owner, now);
        assert!(!owners[..10].iter().any(is_remembered));
        assert!(owners[10..].iter().all(is_remembered));
    }
}
