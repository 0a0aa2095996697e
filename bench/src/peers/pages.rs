//! The pages of the repository that show a run: a picture, six rows in the README, and all tables in `docs/peers.md`.
//!
//! `docs/peers.json` is that run. The pages come from there and from nowhere else.

use std::fmt::Write;
use std::path::PathBuf;

use super::results::Results;
use super::scenarios::{SCENARIOS, Scenario};
use super::show::{draw, of_rounds, shown, tables};
use crate::libs::Outcome;
use crate::page::{Page, root, write};

/// One of each library that many know, set up as its pages say.
const COLUMNS: [&str; 8] = [
    "lockstream",
    "redisson",
    "spring-pubsub",
    "rueidislock-1",
    "redsync",
    "redislock",
    "redlock",
    "redis-py",
];

#[derive(Clone, Copy)]
enum Better {
    More,
    Less,
}

use Better::{Less, More};

const ROWS: [(&str, Scenario, &str, Better); 6] = [
    (
        "one task, free keys: pairs/s",
        Scenario::Free(1),
        "pairs",
        More,
    ),
    (
        "64 tasks, free keys: pairs/s",
        Scenario::Free(64),
        "pairs",
        More,
    ),
    (
        "4 processes of 4 tasks, one key: changes of hands/s",
        Scenario::HotProcesses,
        "changes",
        More,
    ),
    (
        "release in one process to held in another, median, µs",
        Scenario::HandOver,
        "p50",
        Less,
    ),
    (
        "1,000 tasks wait: commands/s",
        Scenario::Waiting,
        "commands",
        Less,
    ),
    (
        "a holder that was stopped goes on: both at work, ms",
        Scenario::Pause,
        "both-at-work",
        Less,
    ),
];

/// A page, the mark of its part that is made, and what makes it.
type Part = (&'static str, &'static str, fn(&Results) -> String);

const PARTS: [Part; 2] = [
    ("README.md", "peers", summary),
    ("docs/peers.md", "figures", figures),
];

const PICTURE: &str = "docs/peers.svg";

/// Where the file of the run is.
pub(super) fn run_file() -> PathBuf {
    root().join("docs/peers.json")
}

pub(super) fn make(results: &Results) -> Outcome<()> {
    write(&root().join(PICTURE), &draw(results)?)?;
    for (page, mark, part) in PARTS {
        Page::of(page)?.write(mark, &part(results))?;
    }
    Ok(())
}

/// The picture and the rows.
fn summary(results: &Results) -> String {
    let alt = "Acquisitions of a contended key, and for how long two work at once when a holder was stopped.";
    let (machine, rounds) = (&results.machine, results.rounds);
    format!(
        "![{alt}](docs/peers.svg)\n\nOn {machine}, the median of {rounds} rounds. What is best is bold.\n\n{}",
        rows(results)
    )
}

/// A row a figure, a column a library; what is best is bold.
fn rows(results: &Results) -> String {
    let mut text = format!("| | {} |\n|---|", COLUMNS.join(" | "));
    text.push_str(&"--:|".repeat(COLUMNS.len()));
    text.push('\n');
    for (name, scenario, figure, better) in ROWS {
        let values = COLUMNS.map(|peer| of_rounds(figure, &results.values(scenario, peer, figure)));
        let known = values.iter().flatten().copied();
        let best = match better {
            More => known.fold(f64::MIN, f64::max),
            Less => known.fold(f64::MAX, f64::min),
        };
        let _ = write!(text, "| {name} |");
        for value in values {
            let _ = match value {
                None => write!(text, " – |"),
                Some(value) if value == best => write!(text, " **{}** |", shown(value)),
                Some(value) => write!(text, " {} |", shown(value)),
            };
        }
        text.push('\n');
    }
    text
}

/// Where and how the run was made, and all its tables.
fn figures(results: &Results) -> String {
    let (machine, rounds, secs) = (&results.machine, results.rounds, results.secs);
    let scenarios = SCENARIOS.map(|(scenario, ..)| scenario);
    format!(
        "## Figures\n\n![](peers.svg)\n\nOn {machine}, the median of {rounds} rounds, and how far they are apart. Scenarios with many turns took {secs} s \
         in each.\n\n{}",
        tables(results, &scenarios)
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::peers::languages::PEERS;

    #[test]
    fn the_best_of_each_row_is_bold() {
        let mut results = Results::new(&[], 1, 3.0);
        for (name, pairs) in [("lockstream", 90.0), ("redsync", 100.0)] {
            let peer = PEERS.into_iter().find(|peer| peer.name == name).unwrap();
            results.add(Scenario::Free(1), peer, Ok(vec![("pairs", pairs, "1/s")]));
            results.add(Scenario::HandOver, peer, Ok(vec![("p50", pairs, "µs")]));
        }
        let text = rows(&results);
        let cells = |row: usize| {
            text.lines()
                .nth(row)
                .unwrap()
                .split('|')
                .collect::<Vec<_>>()
        };
        assert_eq!(cells(2)[2..7], [" 90 ", " – ", " – ", " – ", " **100** "]);
        assert_eq!(cells(5)[2..7], [" **90** ", " – ", " – ", " – ", " 100 "]);
        assert_eq!(text.lines().count(), 2 + ROWS.len());
    }

    #[test]
    fn columns_are_names_of_peers() {
        for name in COLUMNS {
            assert!(PEERS.iter().any(|peer| peer.name == name), "{name}");
        }
    }
}
