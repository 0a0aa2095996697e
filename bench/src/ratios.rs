//! The few numbers that carry over to other machines.

use crate::figures::median;
use crate::libs::Lib;
use crate::report::{Entry, Report};
use crate::scenarios::Scenario;

/// What a figure of ours is set against.
#[derive(Clone, Copy)]
enum Basis {
    Bare,
    /// The most that any other library in the run has.
    BestOther,
    /// Nothing: it is a ratio already, or wants to be known as it is.
    Itself,
}

use Basis::{Bare, BestOther, Itself};

const RATIOS: [(&str, Scenario, &str, Basis); 18] = [
    ("free-1", Scenario::Free1, "pairs", Bare),
    ("free-8", Scenario::Free8, "pairs", Bare),
    ("free-64", Scenario::Free64, "pairs", Bare),
    ("free-256", Scenario::Free256, "pairs", Bare),
    ("hot-local", Scenario::HotLocal, "acquisitions", BestOther),
    (
        "hot-local-changes",
        Scenario::HotLocal,
        "changes",
        BestOther,
    ),
    ("hot-local-turns", Scenario::HotLocal, "turns", Itself),
    (
        "hot-local-maxwait-ms",
        Scenario::HotLocal,
        "maxwait",
        Itself,
    ),
    (
        "hot-processes",
        Scenario::HotProcesses,
        "acquisitions",
        BestOther,
    ),
    (
        "hot-processes-changes",
        Scenario::HotProcesses,
        "changes",
        BestOther,
    ),
    (
        "hot-processes-turns",
        Scenario::HotProcesses,
        "turns",
        Itself,
    ),
    (
        "nopass-calls",
        Scenario::HotProcessesNopass,
        "calls",
        Itself,
    ),
    ("waiting-1000", Scenario::Waiting1000, "commands", Itself),
    ("handover-p50-us", Scenario::Handover, "p50", Itself),
    ("handover-p99-us", Scenario::Handover, "p99", Itself),
    ("held-100k-bytes", Scenario::Held100k, "bytes", Itself),
    ("held-100k-cpu", Scenario::Held100k, "cpu", Itself),
    ("many-keys-left", Scenario::ManyKeys, "left", Itself),
];

/// Those that the run has all parts of.
///
/// Each is the median of the rounds' own ratios: what slowed a round down slowed all of its
/// libraries.
pub(crate) fn of(report: &Report) -> Vec<(&'static str, f64)> {
    let ratio =
        |(name, scenario, figure, basis)| Some((name, one(report, scenario, figure, basis)?));
    RATIOS.into_iter().filter_map(ratio).collect()
}

fn one(report: &Report, scenario: Scenario, figure: &str, basis: Basis) -> Option<f64> {
    let ours = report.entry(scenario, Lib::Lockstream)?;
    let is_basis = |entry: &&Entry| {
        entry.scenario == scenario
            && match basis {
                Bare => entry.lib == Lib::Bare,
                BestOther => !entry.lib.is_ours(),
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
        // All are rates: less than one a second counts as one, so that the ratio stays a number.
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
            server: String::new(),
            entries,
        }
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
        assert_eq!(of(&report), [("free-8", 2.0)]);
    }

    #[test]
    fn the_best_of_the_others_counts_and_a_failed_round_does_not() {
        let hot = |lib, rounds: &[_]| entry(Scenario::HotLocal, lib, rounds, "acquisitions");
        let report = report(vec![
            hot(Lib::Lockstream, &[Some(100.0), Some(400.0)]),
            hot(Lib::Bare, &[Some(20.0), None]),
            hot(Lib::Rslock, &[Some(50.0), None]),
        ]);
        assert_eq!(of(&report), [("hot-local", 2.0)]);
    }

    #[test]
    fn without_an_other_there_is_no_ratio_to_it() {
        let ours = |scenario, name| entry(scenario, Lib::Lockstream, &[Some(3.0)], name);
        let report = report(vec![
            ours(Scenario::Free1, "pairs"),
            ours(Scenario::Held100k, "bytes"),
        ]);
        assert_eq!(of(&report), [("held-100k-bytes", 3.0)]);
    }
}
