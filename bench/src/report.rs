//! What all rounds came to, and how it is printed.

use std::io::Write;

use crate::figures::{Figure, median, spread};
use crate::libs::{Lib, Outcome};
use crate::ratios;
use crate::scenarios::Scenario;
use crate::target::Store;

/// A whole run.
pub(crate) struct Report {
    pub(crate) secs: f64,
    pub(crate) rounds: usize,
    pub(crate) store: Store,
    /// The server's kind and version.
    pub(crate) server: String,
    /// How long its disk takes to flush, in µs, where answers wait for that.
    pub(crate) flush: Option<f64>,
    pub(crate) entries: Vec<Entry>,
}

/// One library at one scenario.
pub(crate) struct Entry {
    pub(crate) scenario: Scenario,
    pub(crate) lib: Lib,
    pub(crate) rounds: Vec<Outcome<Vec<Figure>>>,
}

impl Report {
    pub(crate) fn entry(&self, scenario: Scenario, lib: Lib) -> Option<&Entry> {
        let mut entries = self.entries.iter();
        entries.find(|entry| entry.scenario == scenario && entry.lib == lib)
    }

    /// The median of a figure, if it was measured.
    pub(crate) fn median(&self, scenario: Scenario, lib: Lib, name: &str) -> Option<f64> {
        median(&self.entry(scenario, lib)?.values(name))
    }
}

impl Entry {
    /// The value of a figure in a round, unless that failed.
    pub(crate) fn value(&self, round: usize, name: &str) -> Option<f64> {
        let figures = self.rounds.get(round)?.as_ref().ok()?;
        let figure = figures.iter().find(|figure| figure.name == name)?;
        Some(figure.value)
    }

    /// The values of a figure in all rounds that have it.
    pub(crate) fn values(&self, name: &str) -> Vec<f64> {
        let rounds = 0..self.rounds.len();
        rounds.filter_map(|round| self.value(round, name)).collect()
    }

    /// Every figure that some round has, by name and unit, in their order.
    pub(crate) fn names(&self) -> Vec<(&'static str, &'static str)> {
        let mut names = Vec::new();
        for figure in self.rounds.iter().flatten().flatten() {
            if !names.contains(&(figure.name, figure.unit)) {
                names.push((figure.name, figure.unit));
            }
        }
        names
    }

    /// What went wrong in the rounds that failed.
    pub(crate) fn failures(&self) -> Vec<&str> {
        let rounds = self.rounds.iter();
        rounds
            .filter_map(|round| round.as_ref().err())
            .map(String::as_str)
            .collect()
    }

    /// Its lines: `SCENARIO LIB FIGURE VALUE UNIT`.
    fn lines(&self) -> Vec<String> {
        let head = format!("{} {}", self.scenario.name(), self.lib.name());
        let mut lines = Vec::new();
        for (name, unit) in self.names() {
            let values = self.values(name);
            let value = median(&values).expect("a round has it");
            lines.push(format!("{head} {name} {} {unit}", shown(value)));
            if values.len() > 1 {
                let spread = spread(&values).expect("a round has it");
                lines.push(format!("{head} {name}-spread {} %", shown(spread)));
            }
        }
        let failures = self.failures();
        if !failures.is_empty() {
            lines.push(format!("{head} failed {} rounds", failures.len()));
        }
        lines
    }
}

pub(crate) fn print(entry: &Entry) {
    print_lines(entry.lines());
}

pub(crate) fn print_ratios(report: &Report) {
    let ratios = ratios::of(report);
    print_lines(ratios.iter().map(|ratio| {
        let (name, value) = (ratio.name, shown(ratio.value));
        match ratio.goal.verdict(ratio.value) {
            Some(verdict) => format!("ratio {name} {value} {verdict}"),
            None => format!("ratio {name} {value}"),
        }
    }));
}

/// Unlike `println!`, does not mind a reader that has gone: the rest of the run is still written.
fn print_lines(lines: impl IntoIterator<Item = String>) {
    let mut out = std::io::stdout().lock();
    for line in lines {
        let _ = writeln!(out, "{line}");
    }
    let _ = out.flush();
}

/// A number with four digits of meaning, and no exponent.
pub(crate) fn shown(value: f64) -> String {
    if value == 0.0 || !value.is_finite() {
        return value.to_string();
    }
    let magnitude = value.abs().log10().floor() as i32;
    let decimals = (3 - magnitude).clamp(0, 9) as usize;
    let text = format!("{value:.decimals$}");
    if text.contains('.') {
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    } else {
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_plain() {
        for (value, text) in [
            (0.0, "0"),
            (143_219.4, "143219"),
            (1_000.0, "1000"),
            (9.123_456, "9.123"),
            (1.5, "1.5"),
            (0.012_345_6, "0.01235"),
            (-2.5, "-2.5"),
        ] {
            assert_eq!(shown(value), text);
        }
    }

    #[test]
    fn a_line_has_the_median_and_a_spread_and_tells_failures() {
        let round = |value| Ok(vec![Figure::new("pairs", value, "pairs/s")]);
        let entry = Entry {
            scenario: Scenario::Free8,
            lib: Lib::Rslock,
            rounds: vec![
                round(10.0),
                Err("hung".to_owned()),
                round(30.0),
                round(20.0),
            ],
        };
        assert_eq!(
            entry.lines(),
            [
                "free-8 rslock pairs 20 pairs/s",
                "free-8 rslock pairs-spread 100 %",
                "free-8 rslock failed 1 rounds",
            ]
        );
        assert_eq!(entry.failures(), ["hung"]);
    }
}
