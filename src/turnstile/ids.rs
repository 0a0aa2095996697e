use std::collections::BTreeMap;
use std::time::Duration;

use super::time::{Moment, Point};
use super::wait_queue::WaiterId;
use crate::store::contract::{Mode, Owner};

/// How many owners are remembered whose keys were left in the store.
const MOST_KEPT: usize = 10_000;

/// What the turnstiles of a registry share: numbers that are never used twice, random numbers, and the owners whose
/// keys were left in the store.
#[derive(Debug)]
pub(crate) struct Ids {
    sequence: u64,
    random: u64,
    /// Owners whose key was left in the store, and when it has expired there. The turnstile that left it
    /// may be gone by then.
    kept: BTreeMap<Owner, Point>,
}

impl Ids {
    pub(crate) fn new(seed: u64) -> Self {
        Self {
            sequence: 0,
            random: seed,
            kept: BTreeMap::new(),
        }
    }

    /// Remembers an owner whose key was left in the store. The key expires at `until` at the latest.
    pub(super) fn remember(&mut self, owner: Owner, now: Point, until: Point) {
        self.kept.insert(owner, until);
        let is_over = |(_, until): (&Owner, &Point)| *until <= now;
        // Late grants are late by seconds only. Nobody leaves 10,000 keys within seconds. So forgetting the oldest
        // owners is safe.
        while self.kept.len() > MOST_KEPT || self.kept.first_key_value().is_some_and(is_over) {
            self.kept.pop_first();
        }
    }

    /// Whether what the store still has under a retired owner is meant to be there.
    pub(super) fn is_remembered(&self, owner: Owner, now: Point) -> bool {
        self.kept.get(&owner).is_some_and(|until| now < *until)
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

    /// A duration of `most` at most (splitmix64, Steele, Lea and Flood 2014).
    pub(super) fn within(&mut self, most: Duration) -> Duration {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^= z >> 31;
        let most = u64::try_from(most.as_micros()).unwrap_or(u64::MAX - 1);
        Duration::from_micros(z % (most + 1))
    }
}

/// What comes in with every event: the time, and what the registry's turnstiles share.
#[derive(Debug)]
pub(crate) struct EventCx<'a> {
    pub(crate) now: Moment,
    pub(crate) ids: &'a mut Ids,
    /// Whether its ticket is asked about while it stands in the queue. Of the tickets of a registry only the first is
    /// (M5).
    pub(super) asks_for_others: bool,
    /// How many leases the registry may have: the renewals of many are spread (G5).
    pub(crate) leases: usize,
}

impl<'a> EventCx<'a> {
    pub(crate) fn new(now: Moment, ids: &'a mut Ids) -> Self {
        Self {
            now,
            ids,
            asks_for_others: true,
            leases: 1,
        }
    }

    /// The time, as a turnstile stores it.
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
        let now = Point::from(Duration::ZERO);
        let until = now + Duration::from_secs(86_400);
        let owners: Vec<_> = (0..MOST_KEPT + 10)
            .map(|_| ids.owner(Mode::Exclusive))
            .collect();
        for owner in &owners {
            ids.remember(*owner, now, until);
        }
        assert_eq!(ids.kept.len(), MOST_KEPT);
        let is_remembered = |owner: &Owner| ids.is_remembered(*owner, now);
        assert!(!owners[..10].iter().any(is_remembered));
        assert!(owners[10..].iter().all(is_remembered));
        // Those that are over are forgotten with the next.
        let last = ids.owner(Mode::Exclusive);
        ids.remember(last, until, until + Duration::from_secs(1));
        assert_eq!(ids.kept.len(), 1);
        assert!(ids.is_remembered(last, until));
    }
}
