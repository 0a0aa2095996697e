//! Did every wait end in its time: served, timed out or refused?
//!
//! The time in which its own process was stopped does not count. Nor does the time by which its runtime was late: what the
//! machine has no time for comes later.

use std::collections::{BTreeMap, HashMap};

use super::{Child, Span};

#[derive(Debug, Default)]
pub(crate) struct Waits {
    open: HashMap<(Child, u64), Span>,
    /// When each child was stopped.
    stops: HashMap<Child, Vec<Span>>,
    /// When the runtime of each was slow.
    slow: HashMap<Child, Vec<Span>>,
    /// How many ended how.
    pub(crate) ends: BTreeMap<String, u64>,
    pub(crate) forgotten: Vec<String>,
    /// How long after its time the latest one ended (ns).
    pub(crate) latest: u64,
    /// How long after its time the latest one ended (ns), be it dropped or not.
    latest_of_all: u64,
    bound: u64,
}

impl Waits {
    /// A wait may end so much (ns) after its time: what the library needs to tell, and the machine to let it.
    pub(crate) fn new(bound: u64) -> Self {
        Self {
            bound,
            ..Self::default()
        }
    }

    pub(crate) fn begins(&mut self, child: Child, wait: u64, at: u64, limit: u64) {
        let due = Span {
            from: at,
            to: at.saturating_add(limit),
        };
        self.open.insert((child, wait), due);
    }

    pub(crate) fn ends(&mut self, child: Child, wait: u64, at: u64, how: &str) {
        let Some(due) = self.open.remove(&(child, wait)) else {
            return;
        };
        *self.ends.entry(how.to_owned()).or_default() += 1;
        let late = self.late(child, due, at);
        // Whom nobody waits for any more is not late.
        if how != "dropped" {
            self.latest = self.latest.max(late);
        }
        self.latest_of_all = self.latest_of_all.max(late);
        if late > self.bound {
            self.forgotten.push(format!(
                "child {child}, wait {wait} from {}: {how} only {:.3} s after its time",
                due.from,
                late as f64 / 1e9
            ));
        }
    }

    pub(crate) fn stopped(&mut self, child: Child, span: Span) {
        self.stops.entry(child).or_default().push(span);
    }

    /// A task of the child's runtime was due at the beginning of this span, and went on at its end.
    pub(crate) fn slow(&mut self, child: Child, span: Span) {
        self.slow.entry(child).or_default().push(span);
    }

    /// For how long (ns) the slowest child was slow, apart from its stops.
    pub(crate) fn slowest(&self) -> u64 {
        let slow = self.slow.iter().map(|(child, spans)| {
            let stops = || self.stops.get(child).into_iter().flatten();
            let apart = |span: &Span| {
                let stopped: u64 = stops().map(|stop| stop.within(*span)).sum();
                (span.to - span.from).saturating_sub(stopped)
            };
            spans.iter().map(apart).sum()
        });
        slow.max().unwrap_or(0)
    }

    /// For how long (ns) of this time a child was slow, or stopped.
    pub(crate) fn slow_within(&self, child: Child, span: Span) -> u64 {
        let slow = self.slow.get(&child).into_iter().flatten();
        slow.map(|slow| slow.within(span)).sum()
    }

    /// The waits that ended later than a machine explains that was as slow as [`slowest`](Self::slowest) says.
    pub(crate) fn forgotten(&self) -> &[String] {
        match self.latest_of_all > self.bound + self.slowest() {
            true => &self.forgotten,
            false => &[],
        }
    }

    /// The child was seen dead at this moment: its waits went with it, and were late if they were so by then.
    pub(crate) fn died(&mut self, child: Child, at: u64) {
        let open: Vec<_> = self.open.keys().copied().collect();
        for (_, wait) in open.into_iter().filter(|(whose, _)| *whose == child) {
            self.ends(child, wait, at, "died");
        }
    }

    fn late(&self, child: Child, due: Span, at: u64) -> u64 {
        let whole = Span {
            from: due.from,
            to: at,
        };
        let stops = self.stops.get(&child).into_iter().flatten();
        let stopped: u64 = stops.map(|stop| stop.within(whole)).sum();
        at.saturating_sub(due.to).saturating_sub(stopped)
    }
}
