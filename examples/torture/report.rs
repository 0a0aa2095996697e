//! What came out of a run, for people; and whether it is as it must be.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use crate::deployments::{Leftovers, TableVerdict};
use crate::judge::recovery::Recovery;
use crate::judge::waits::Waits;
use crate::judge::{holds, linear};
use crate::plan::Kind;
use crate::run::BUSY;

const NO_RECOVERY: &str = "no recovery";

/// So many breaches of one sort are told in full.
const TOLD: usize = 5;

#[derive(Debug, Default)]
pub(crate) struct Report {
    pub(crate) holds: holds::Verdict,
    pub(crate) waits: Waits,
    pub(crate) linear: linear::Verdict,
    /// How often another became the primary.
    pub(crate) changes: u64,
    pub(crate) recoveries: BTreeMap<Kind, Recovery>,
    /// How long they may take.
    pub(crate) longest_recovery: Duration,
    /// Writes that the resource took, and asks that it refused.
    pub(crate) writes: u64,
    pub(crate) refused: u64,
    /// Writes made on purpose when the lease was over, and how many of them were refused.
    pub(crate) late_writes: u64,
    pub(crate) late_refused: u64,
    pub(crate) stuck: Vec<String>,
    /// The keys that nobody got any more.
    pub(crate) unused: Vec<String>,
    pub(crate) tasks_left: u64,
    pub(crate) table: TableVerdict,
    pub(crate) leftovers: Leftovers,
    /// Errors that nobody should get, panics, children that do not end.
    pub(crate) wrong: Vec<String>,
    /// For how long the machine stood still in the time that a delay may take, at most.
    pub(crate) stood_still: Duration,
    /// How much longer the servers took to answer than they may, in all.
    pub(crate) late_answers: Duration,
    /// Where the logs of a run with a breach are.
    pub(crate) folder: Option<PathBuf>,
}

impl Report {
    /// What must be empty, with its name, be the machine slow or not.
    fn wrongs(&self) -> Vec<(&'static str, Vec<String>)> {
        vec![
            ("overlaps within validity", self.holds.overlaps.clone()),
            ("tokens out of order", self.holds.tokens.clone()),
            ("stale writes let through", self.holds.stale_writes.clone()),
            ("histories not linearizable", self.linear.breaches.clone()),
            ("updates lost from the table", self.table.breaches.clone()),
        ]
    }

    /// What must be empty as well, unless the machine stood still.
    fn delays(&self) -> Vec<(&'static str, Vec<String>)> {
        let left = &self.leftovers;
        let tasks = match self.tasks_left {
            0 => Vec::new(),
            tasks => vec![format!("{tasks} on the runtimes of children")],
        };
        vec![
            ("keys stuck beyond their ttl", self.stuck.clone()),
            ("keys left behind", left.keys.clone()),
            ("queue entries left behind", left.queue_entries.clone()),
            ("subscriptions left behind", left.subscriptions.clone()),
            ("connections left behind", left.connections.clone()),
            ("waiters forgotten", self.waits.forgotten().to_vec()),
            ("tasks left", tasks),
            (NO_RECOVERY, self.without_recovery()),
            ("errors that nobody should get", self.wrong.clone()),
        ]
    }

    fn without_recovery(&self) -> Vec<String> {
        let longest = self.longest_recovery + Duration::from_nanos(self.waits.slowest());
        let beyond =
            |time: Option<u64>| time.is_none_or(|time| Duration::from_nanos(time) > longest);
        let all = self.recoveries.iter();
        all.filter(|(_, recovery)| beyond(recovery.hit) || beyond(recovery.anybody))
            .map(|(kind, recovery)| format!("{}: {recovery:?}", kind.name()))
            .chain(self.unused.iter().cloned())
            .collect()
    }

    /// A run in which nothing happened is none.
    pub(crate) fn is_clean(&self) -> bool {
        self.holds.leases > 0
            && self.writes > 0
            && self.linear.windows > 0
            && self.is_right()
            && self.delays().iter().all(|(_, found)| found.is_empty())
    }

    fn is_right(&self) -> bool {
        self.wrongs().iter().all(|(_, found)| found.is_empty())
    }

    /// Whether the machine stood still for longer than it is given for whatever takes time: what came too late, or not at
    /// all, says nothing then. Nor do missing leases where the servers were so slow that leases came when they were over.
    pub(crate) fn says_nothing(&self) -> bool {
        let delays = self.delays();
        let other = delays
            .iter()
            .any(|(name, found)| *name != NO_RECOVERY && !found.is_empty());
        let is_late = self.stood_still > BUSY || self.late_answers > BUSY && !other;
        is_late && self.is_right() && !self.is_clean()
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let row = |f: &mut fmt::Formatter<'_>, name: &str, value: &dyn fmt::Display| {
            writeln!(f, "{name:<32}{value}")
        };
        let holds = &self.holds;
        row(f, "leases", &holds.leases)?;
        for (mode, leases) in &holds.modes {
            row(f, &format!("  {mode}"), leases)?;
        }
        row(f, "hand-overs between processes", &holds.hand_overs)?;
        row(f, "taken when they were over", &holds.dead_on_arrival)?;
        let explained: u64 = holds.explained.values().map(|it| it.times).sum();
        row(f, "overlaps of forgotten leases", &explained)?;
        for (cause, explained) in &holds.explained {
            let (longest, lasted) = (explained.longest, explained.lasted);
            let told = format!(
                "{} of {} leases, {:.1?} at most, within {:.1?}",
                explained.times,
                explained.leases,
                Duration::from_nanos(longest),
                Duration::from_nanos(lasted)
            );
            row(f, &format!("  {}", cause.name()), &told)?;
        }
        row(f, "permits beyond forgotten ones", &holds.crowds)?;
        row(f, "work not yet told of a shutdown", &holds.after_shutdown)?;
        row(f, "primaries replaced", &self.changes)?;
        row(f, "writes taken by the resource", &self.writes)?;
        row(f, "stale asks refused by it", &self.refused)?;
        let late = format!(
            "{}, of which {} refused",
            self.late_writes, self.late_refused
        );
        row(f, "writes made late on purpose", &late)?;
        row(f, "fenced updates of the table", &self.table.updates)?;
        let misplaced = &self.leftovers.misplaced;
        row(f, "keys that a slot left behind", &misplaced.len())?;
        for text in misplaced.iter().take(TOLD) {
            writeln!(f, "    {text}")?;
        }
        let linear = &self.linear;
        let checked = format!(
            "{} in {} windows, {} of them concurrent",
            linear.steps, linear.windows, linear.concurrent
        );
        row(f, "steps checked by stateright", &checked)?;
        let ends = self.waits.ends.iter();
        let ends: Vec<String> = ends.map(|(how, many)| format!("{many} {how}")).collect();
        row(f, "waits", &ends.join(", "))?;
        let latest = Duration::from_nanos(self.waits.latest);
        row(
            f,
            "latest end of one",
            &format!("{latest:.1?} after its time"),
        )?;
        let slowest = Duration::from_nanos(self.waits.slowest());
        row(
            f,
            "slowest runtime of a child",
            &format!("{slowest:.1?} late in all"),
        )?;
        let late = self.late_answers;
        row(
            f,
            "late answers of the servers",
            &format!("{late:.1?} in all"),
        )?;

        writeln!(
            f,
            "\nfault                       times   next lease   of the one hit (longest)"
        )?;
        let time = |time: Option<u64>| match time {
            Some(time) => format!("{:.1?}", Duration::from_nanos(time)),
            None => "never".to_owned(),
        };
        for (kind, recovery) in &self.recoveries {
            let (anybody, hit) = (time(recovery.anybody), time(recovery.hit));
            writeln!(
                f,
                "{:<25}{:>8}{anybody:>13}{hit:>17}",
                kind.name(),
                recovery.times
            )?;
        }

        writeln!(f)?;
        for (name, found) in self.wrongs().into_iter().chain(self.delays()) {
            row(f, name, &found.len())?;
            for text in found.iter().take(TOLD) {
                writeln!(f, "    {text}")?;
            }
        }
        Ok(())
    }
}
