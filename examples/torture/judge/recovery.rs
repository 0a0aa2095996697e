//! How long after a fault was there the next lease?

use std::collections::BTreeMap;

use crate::plan::Kind;

/// A fault as it came.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Struck {
    pub(crate) kind: Kind,
    pub(crate) slot: usize,
    /// When it ended (ns).
    pub(crate) to: u64,
}

/// Of one kind: how often it struck, and the longest (ns) from its end to the next lease of anybody, and of the child
/// that was hit. `None`: there was none any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Recovery {
    pub(crate) times: u64,
    pub(crate) anybody: Option<u64>,
    pub(crate) hit: Option<u64>,
}

/// The leases are those of [`Holds::arrivals`](super::holds::Holds::arrivals).
pub(crate) fn recoveries(struck: &[Struck], leases: &[(u64, usize)]) -> BTreeMap<Kind, Recovery> {
    let mut slots: BTreeMap<usize, Vec<u64>> = BTreeMap::new();
    for (at, slot) in leases {
        slots.entry(*slot).or_default().push(*at);
    }
    let all: Vec<u64> = leases.iter().map(|(at, _)| *at).collect();
    let next = |moments: &[u64], to: u64| {
        let next = moments.get(moments.partition_point(|at| *at < to))?;
        Some(next - to)
    };
    let mut found = BTreeMap::new();
    for fault in struck {
        let anybody = next(&all, fault.to);
        let hit = match fault.kind.is_of_a_child() {
            true => next(slots.get(&fault.slot).map_or(&[], Vec::as_slice), fault.to),
            false => anybody,
        };
        let recovery = found.entry(fault.kind).or_insert(Recovery {
            times: 0,
            anybody: Some(0),
            hit: Some(0),
        });
        recovery.times += 1;
        // None is longer than any.
        let longer = |one: Option<u64>, other: Option<u64>| Some(one?.max(other?));
        recovery.anybody = longer(recovery.anybody, anybody);
        recovery.hit = longer(recovery.hit, hit);
    }
    found
}
