//! The chart and the table of `docs/speed.md`, made of one run: `--page`.
//!
//! `docs/speed.json` is that run, as `--json` writes it. The chart and the table come from there and
//! from nowhere else, and a test sees to it that they are those of the run.

mod chart;
mod table;

use std::path::PathBuf;

use serde_json::Value;

use crate::json::Machine;
use crate::libs::{Lib, Outcome, told};
use crate::page::{Page, read, root, write};
use crate::scenarios::Scenario;

/// The page, and what stands around the part of it that is made here.
const PAGE: &str = "docs/speed.md";
const MARK: &str = "speed";

/// The run that the page shows.
pub(crate) struct Speed(Value);

impl Speed {
    fn parse(text: &str) -> Outcome<Self> {
        serde_json::from_str(text)
            .map(Self)
            .map_err(told("docs/speed.json"))
    }

    fn median(&self, scenario: Scenario, lib: Lib, figure: &str) -> Option<f64> {
        let entry = self.0["results"].as_array()?.iter().find(|entry| {
            entry["scenario"].as_str() == Some(scenario.name())
                && entry["lib"].as_str() == Some(lib.name())
        });
        let figures = entry?["figures"].as_array()?;
        let figure = figures
            .iter()
            .find(|one| one["figure"].as_str() == Some(figure));
        figure?["median"].as_f64()
    }

    fn ratio(&self, name: &str) -> Option<f64> {
        self.0["ratios"][name].as_f64()
    }

    /// Where and how it was taken, in words.
    fn place(&self) -> String {
        let machine: Machine = serde_json::from_value(self.0["machine"].clone())
            .expect("docs/speed.json names its machine");
        let (secs, rounds) = (&self.0["secs"], &self.0["rounds"]);
        let rounds = match rounds.as_u64() {
            Some(1) | None => format!("one round of {secs} s each"),
            Some(many) => format!("the median of {many} rounds of {secs} s each"),
        };
        format!("{machine}, {rounds}")
    }
}

/// Where the file of the run is.
pub(crate) fn run_file() -> PathBuf {
    root().join("docs/speed.json")
}

/// Makes the chart and the table of the run in `docs/speed.json`.
pub(crate) fn make() -> Outcome<()> {
    let speed = Speed::parse(&read(&run_file())?)?;
    let chart = root().join("docs/speed.svg");
    write(&chart, &chart::draw(&speed)?)?;
    Page::of(PAGE)?.write(MARK, &part(&speed))
}

/// What stands on the page between the marks.
fn part(speed: &Speed) -> String {
    let alt = "How fast it is beside three others. The table below has the same figures.";
    let (place, table) = (speed.place(), table::of(speed));
    let alone = table::of_ours_alone(speed);
    format!(
        "![{alt}](speed.svg)\n\nOn {place}. Scales with marks are logarithmic.\n\n{table}\n{alone}"
    )
}

/// A number with as many digits as a run bears out.
fn short(value: f64) -> String {
    let (value, unit) = match value.abs() {
        1e6.. => (value / 1e6, " M"),
        1e3.. => (value / 1e3, " k"),
        _ => (value, ""),
    };
    let text = match value.abs() {
        100.0.. => return format!("{value:.0}{unit}"),
        10.0.. => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    };
    let text = text.trim_end_matches('0').trim_end_matches('.');
    format!("{text}{unit}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_shows_the_run_that_is_in_docs() {
        let speed = Speed::parse(&read(&run_file()).unwrap()).unwrap();
        let again = "make it anew: cargo bench -p lockstream-bench --bench scenarios -- --redraw";
        assert!(
            Page::of(PAGE).unwrap().has(MARK, &part(&speed)),
            "{PAGE} is not of docs/speed.json; {again}"
        );
        let chart = read(&root().join("docs/speed.svg")).unwrap();
        assert!(
            chart == chart::draw(&speed).unwrap(),
            "docs/speed.svg is not of docs/speed.json; {again}"
        );
    }

    #[test]
    fn numbers_are_short() {
        for (value, text) in [
            (0.0, "0"),
            (0.2, "0.2"),
            (0.034, "0.03"),
            (1.003, "1"),
            (1.026, "1.03"),
            (96.03, "96"),
            (720.4, "720"),
            (1_000.0, "1 k"),
            (9_876.0, "9.88 k"),
            (51_804.0, "51.8 k"),
            (143_219.0, "143 k"),
            (1_250_000.0, "1.25 M"),
        ] {
            assert_eq!(short(value), text);
        }
    }
}
