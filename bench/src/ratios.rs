//! The few numbers that carry over to other machines.

use crate::figures::median;
use crate::libs::Lib;
use crate::report::{Entry, Report};
use crate::scenarios::Scenario;
use crate::target::Store;

/// What a figure of ours is set against.
#[derive(Clone, Copy)]
enum Basis {
    /// That library.
    Of(Lib),
    /// The most that any other library in the run has.
    BestOther,
    /// Nothing: it is a ratio already, or wants to be known as it is.
    Itself,
}

/// What a ratio should be.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Goal {
    AtLeast(f64),
    AtMost(f64),
    Unset,
}

use Basis::{BestOther, Itself, Of};
use Goal::{AtLeast, AtMost, Unset};

/// Name, scenario, figure, what it is set against, and its goal.
type Row = (&'static str, Scenario, &'static str, Basis, Goal);

#[rustfmt::skip]
const RATIOS: [Row; 52] = [
    ("free-1", Scenario::Free1, "pairs", Of(Lib::Bare), AtLeast(0.95)),
    ("free-8", Scenario::Free8, "pairs", Of(Lib::Bare), AtLeast(0.9)),
    ("free-64", Scenario::Free64, "pairs", Of(Lib::Bare), AtLeast(1.05)),
    ("free-256", Scenario::Free256, "pairs", Of(Lib::Bare), AtLeast(1.4)),
    ("free-64-cpu", Scenario::Free64, "clients-cpu", Of(Lib::Bare), AtMost(1.0)),
    ("free-256-cpu", Scenario::Free256, "clients-cpu", Of(Lib::Bare), AtMost(0.7)),
    ("memory-64", Scenario::Memory64, "pairs", Itself, AtLeast(800_000.0)),
    ("hot-local", Scenario::HotLocal, "acquisitions", BestOther, AtLeast(15.0)),
    ("hot-local-changes", Scenario::HotLocal, "changes", BestOther, AtLeast(100.0)),
    ("hot-local-turns", Scenario::HotLocal, "turns", Itself, AtMost(1.05)),
    ("hot-local-maxwait-ms", Scenario::HotLocal, "maxwait", Itself, AtMost(20.0)),
    ("hot-processes", Scenario::HotProcesses, "acquisitions", BestOther, AtLeast(8.0)),
    ("hot-processes-changes", Scenario::HotProcesses, "changes", BestOther, AtLeast(100.0)),
    ("hot-processes-turns", Scenario::HotProcesses, "turns", Itself, AtMost(1.05)),
    ("nopass-calls", Scenario::HotProcessesNopass, "calls", Itself, AtMost(2.05)),
    ("waiting-1000", Scenario::Waiting1000, "commands", Itself, AtMost(1.0)),
    ("handover-p50-us", Scenario::Handover, "p50", Itself, AtMost(250.0)),
    ("handover-p99-us", Scenario::Handover, "p99", Itself, Unset),
    ("held-100k-bytes", Scenario::Held100k, "bytes", Itself, AtMost(800.0)),
    ("held-100k-cpu", Scenario::Held100k, "cpu", Itself, AtMost(0.035)),
    ("renewals-spread-taken", Scenario::RenewalsSpread, "taken", Itself, AtMost(2.0)),
    ("renewals-spread-cut", Scenario::RenewalsSpread, "cut", Itself, AtMost(2.0)),
    ("many-keys-left", Scenario::ManyKeys, "left", Itself, AtMost(0.0)),
    ("far-1", Scenario::Far1, "acquire-p50", Of(Lib::Bare), AtMost(1.1)),
    ("far-64", Scenario::Far64, "acquire-p50", Of(Lib::Bare), AtMost(1.1)),
    ("far-256", Scenario::Far256, "acquire-p50", Of(Lib::Bare), AtMost(1.1)),
    ("cluster-100k-lost", Scenario::Cluster100k, "lost", Itself, AtMost(0.0)),
    ("cluster-100k-cpu", Scenario::Cluster100k, "cpu", Itself, AtMost(0.15)),
    ("cluster-brief-lost", Scenario::ClusterBrief, "lost", Itself, AtMost(0.0)),
    ("cluster-brief-kept", Scenario::ClusterBrief, "kept", Itself, AtLeast(0.4)),
    ("cluster-moving-lost", Scenario::ClusterMoving, "lost", Itself, AtMost(0.0)),
    ("cluster-waits-reconnects", Scenario::ClusterWaits, "reconnects", Itself, AtMost(0.0)),
    ("cluster-waits-calls", Scenario::ClusterWaits, "calls", Itself, AtMost(0.0)),
    ("cluster-idle", Scenario::ClusterIdle, "connections", Itself, AtMost(1.0)),
    ("fleet-crash-first-ms", Scenario::FleetCrash, "first", Itself, AtMost(100.0)),
    ("fleet-crash-served-ms", Scenario::FleetCrash, "served", Itself, AtMost(1000.0)),
    ("fleet-timeout-standstill-ms", Scenario::FleetTimeout, "standstill", Itself, AtMost(100.0)),
    ("fleet-timeout-lost", Scenario::FleetTimeout, "lost", Itself, AtMost(0.0)),
    ("fleet-restart-busiest", Scenario::FleetRestart, "busiest", Itself, AtMost(1200.0)),
    ("fleet-restart-back-s", Scenario::FleetRestart, "back", Itself, AtMost(4.0)),
    ("fleet-restart-lost", Scenario::FleetRestart, "lost", Itself, AtMost(0.0)),
    ("permits-8", Scenario::Permits8, "acquisitions", Of(Lib::Bare), Unset),
    ("permits-8-maxwait-ms", Scenario::Permits8, "maxwait", Itself, Unset),
    ("permits-8-turns", Scenario::Permits8, "turns", Itself, Unset),
    ("readers-write-maxwait-ms", Scenario::Readers, "write-maxwait", Itself, Unset),
    ("all-3-maxwait-ms", Scenario::All3, "maxwait", Itself, Unset),
    ("pipeline-uniform", Scenario::PipelineUniform, "ratio", Itself, AtLeast(0.97)),
    ("pipeline-skewed", Scenario::PipelineSkewed, "ratio", Itself, AtLeast(1.12)),
    ("pipeline-blocked", Scenario::PipelineBlocked, "ratio", Itself, AtLeast(0.95)),
    ("pipeline-uniform-calls", Scenario::PipelineUniform, "calls-ratio", Itself, AtMost(1.0)),
    ("pipeline-skewed-calls", Scenario::PipelineSkewed, "calls-ratio", Itself, AtMost(1.0)),
    ("pipeline-blocked-calls", Scenario::PipelineBlocked, "calls-ratio", Itself, AtMost(1.0)),
];

#[rustfmt::skip]
const ON_POSTGRES: [Row; 15] = [
    ("free-1", Scenario::Free1, "pairs", Of(Lib::SqlxAdvisory), Unset),
    ("free-8", Scenario::Free8, "pairs", Of(Lib::SqlxAdvisory), Unset),
    ("free-64", Scenario::Free64, "pairs", Of(Lib::SqlxAdvisory), AtLeast(0.7)),
    ("free-64-table", Scenario::Free64, "pairs", Of(Lib::PolledTable), Unset),
    ("free-256", Scenario::Free256, "pairs", Of(Lib::SqlxAdvisory), Unset),
    ("hot-local", Scenario::HotLocal, "acquisitions", BestOther, Unset),
    ("hot-local-turns", Scenario::HotLocal, "turns", Itself, AtMost(1.05)),
    ("hot-processes", Scenario::HotProcesses, "acquisitions", BestOther, Unset),
    ("hot-processes-turns", Scenario::HotProcesses, "turns", Itself, AtMost(1.05)),
    ("waiting-1000", Scenario::Waiting1000, "commands", Itself, AtMost(2.0)),
    ("handover", Scenario::Handover, "p50", Of(Lib::SqlxAdvisory), AtMost(2.2)),
    ("handover-p50-us", Scenario::Handover, "p50", Itself, Unset),
    ("permits-8-maxwait-ms", Scenario::Permits8, "maxwait", Itself, Unset),
    ("readers-write-maxwait-ms", Scenario::Readers, "write-maxwait", Itself, Unset),
    ("all-3-maxwait-ms", Scenario::All3, "maxwait", Itself, Unset),
];

/// A ratio that the run has all parts of.
#[derive(Debug, PartialEq)]
pub(crate) struct Ratio {
    pub(crate) name: &'static str,
    pub(crate) value: f64,
    pub(crate) goal: Goal,
}

impl Goal {
    /// In words, whether a value reaches it.
    pub(crate) fn verdict(self, value: f64) -> Option<String> {
        let (is_reached, words, limit) = match self {
            AtLeast(limit) => (value >= limit, "at least", limit),
            AtMost(limit) => (value <= limit, "at most", limit),
            Unset => return None,
        };
        let verdict = if is_reached { "reached" } else { "missed" };
        Some(format!("{verdict} ({words} {limit})"))
    }
}

/// Those that the run has all parts of.
///
/// Each is the median of the rounds' own ratios: what slowed a round down slowed all of its
/// libraries.
pub(crate) fn of(report: &Report) -> Vec<Ratio> {
    let ratio = |(name, scenario, figure, basis, goal)| {
        let value = one(report, scenario, figure, basis)?;
        Some(Ratio { name, value, goal })
    };
    let rows = match report.store {
        Store::Redis => RATIOS.as_slice(),
        Store::Postgres => &ON_POSTGRES,
    };
    rows.iter().copied().filter_map(ratio).collect()
}

fn one(report: &Report, scenario: Scenario, figure: &str, basis: Basis) -> Option<f64> {
    let ours = report.entry(scenario, Lib::Lockstream)?;
    let is_basis = |entry: &&Entry| {
        entry.scenario == scenario
            && match basis {
                Of(lib) => entry.lib == lib,
                BestOther => entry.lib != Lib::Lockstream,
                Itself => false,
            }
    };
    let others: Vec<&Entry> = report.entries.iter().filter(is_basis).collect();
    let in_round = |round| {
        let ours = ours.value(round, figure)?;
        if matches!(basis, Itself) {
            return Some(ours);
        }
        let others = others.iter().filter_map(|entry| entry.value(round, figure));
        // Of rates, less than one a second counts as one, so that the ratio stays a number.
        others.reduce(f64::max).map(|best| ours / best.max(1.0))
    };
    let rounds: Vec<f64> = (0..ours.rounds.len()).filter_map(in_round).collect();
    median(&rounds)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::figures::Figure;
    use crate::libs::Outcome;

    fn entry(scenario: Scenario, lib: Lib, rounds: &[Option<f64>], name: &'static str) -> Entry {
        let round = |value: &Option<f64>| -> Outcome<Vec<Figure>> {
            let value = value.ok_or("hung")?;
            Ok(vec![Figure::new(name, value, "/s")])
        };
        Entry {
            scenario,
            lib,
            rounds: rounds.iter().map(round).collect(),
        }
    }

    fn report(entries: Vec<Entry>) -> Report {
        Report {
            secs: 1.0,
            rounds: 3,
            store: crate::target::Store::Redis,
            flush: None,
            server: String::new(),
            entries,
        }
    }

    fn values(report: &Report) -> Vec<(&'static str, f64)> {
        let ratios = of(report).into_iter();
        ratios.map(|ratio| (ratio.name, ratio.value)).collect()
    }

    #[test]
    fn a_goal_is_reached_or_missed() {
        assert_eq!(
            AtMost(0.0).verdict(0.0).as_deref(),
            Some("reached (at most 0)")
        );
        assert_eq!(
            AtMost(1.1).verdict(1.2).as_deref(),
            Some("missed (at most 1.1)")
        );
        assert_eq!(
            AtLeast(0.4).verdict(0.39).as_deref(),
            Some("missed (at least 0.4)")
        );
        assert_eq!(Unset.verdict(1.0), None);
    }

    #[test]
    fn rounds_are_set_against_each_other() {
        // The second round was slow for all.
        let ours = [Some(100.0), Some(10.0), Some(120.0)];
        let bare = [Some(50.0), Some(5.0), Some(40.0)];
        let report = report(vec![
            entry(Scenario::Free8, Lib::Lockstream, &ours, "pairs"),
            entry(Scenario::Free8, Lib::Bare, &bare, "pairs"),
            entry(Scenario::Free8, Lib::Rslock, &[Some(1e6); 3], "pairs"),
        ]);
        assert_eq!(values(&report), [("free-8", 2.0)]);
    }

    #[test]
    fn the_best_of_the_others_counts_and_a_failed_round_does_not() {
        let hot = |lib, rounds: &[_]| entry(Scenario::HotLocal, lib, rounds, "acquisitions");
        let report = report(vec![
            hot(Lib::Lockstream, &[Some(100.0), Some(400.0)]),
            hot(Lib::Bare, &[Some(20.0), None]),
            hot(Lib::Rslock, &[Some(50.0), None]),
        ]);
        assert_eq!(values(&report), [("hot-local", 2.0)]);
    }

    #[test]
    fn without_an_other_there_is_no_ratio_to_it() {
        let ours = |scenario, name| entry(scenario, Lib::Lockstream, &[Some(3.0)], name);
        let report = report(vec![
            ours(Scenario::Free1, "pairs"),
            ours(Scenario::Held100k, "bytes"),
        ]);
        assert_eq!(values(&report), [("held-100k-bytes", 3.0)]);
    }
}
