//! How long after a fault was there the next lease, as far as anybody could give one?
//!
//! Sentinels may take long to replace a primary, if their first choice comes to nothing, and the next fault may take the
//! new one away at once. The next fault of the same child may keep it away as well. No client has a part in that, so such
//! time is not counted.

use std::collections::BTreeMap;

use crate::judge::Span;
use crate::plan::Kind;

/// A fault as it came.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Struck {
    pub(crate) kind: Kind,
    pub(crate) slot: usize,
    /// From when till when (ns).
    pub(crate) lasted: Span,
}

/// Of one kind: how often it struck, and the longest (ns) from its end to the next lease of anybody, and of the child
/// that was hit, as far as it is counted. `None`: there was none any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Recovery {
    pub(crate) times: u64,
    pub(crate) anybody: Option<u64>,
    pub(crate) hit: Option<u64>,
}

/// The leases are those of [`Holds::arrivals`](super::holds::Holds::arrivals), and nobody could give one during the
/// [`vacancies`](super::reigns::Reigns::vacancies).
pub(crate) fn recoveries(
    struck: &[Struck],
    leases: &[(u64, usize)],
    vacancies: &[Span],
) -> BTreeMap<Kind, Recovery> {
    let mut slots: BTreeMap<usize, Slot> = BTreeMap::new();
    for (at, slot) in leases {
        slots.entry(*slot).or_default().leases.push(*at);
    }
    for fault in struck.iter().filter(|fault| keeps_away(fault.kind)) {
        let slot = slots.entry(fault.slot).or_default();
        slot.uncounted.push(fault.lasted);
    }
    for slot in slots.values_mut() {
        slot.uncounted.extend(vacancies);
        slot.uncounted.sort_unstable_by_key(|span| span.from);
    }
    let all = Slot {
        leases: leases.iter().map(|(at, _)| *at).collect(),
        uncounted: vacancies.to_vec(),
    };
    let mut found = BTreeMap::new();
    for fault in struck {
        let anybody = all.recovery(fault.lasted.to);
        let hit = match fault.kind.is_of_a_child() {
            true => slots
                .get(&fault.slot)
                .and_then(|slot| slot.recovery(fault.lasted.to)),
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

/// The children of one slot, or all.
#[derive(Default)]
struct Slot {
    /// When they took leases.
    leases: Vec<u64>,
    /// When they could take none, whatever the client did; the first first.
    uncounted: Vec<Span>,
}

impl Slot {
    /// How long it takes from then to the next lease.
    fn recovery(&self, from: u64) -> Option<u64> {
        let next = self.leases.partition_point(|at| *at < from);
        let to = *self.leases.get(next)?;
        let (mut counted, mut from) = (0, from);
        for span in &self.uncounted {
            counted += span.from.min(to).saturating_sub(from);
            from = from.max(span.to);
        }
        Some(counted + to.saturating_sub(from))
    }
}

/// Whether a child that it strikes cannot reach the store, or is not there, while it lasts.
fn keeps_away(kind: Kind) -> bool {
    matches!(
        kind,
        Kind::Kill
            | Kind::Leave
            | Kind::Stop
            | Kind::LongStop
            | Kind::Compute
            | Kind::Refuse
            | Kind::Blackhole
            | Kind::Stall
    )
}
