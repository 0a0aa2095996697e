//! What a run looks like: tables and a picture.

use std::fmt::Write;

use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::languages::PEERS;
use super::results::Results;
use super::scenarios::Scenario;
use crate::figures::{median, spread};
use crate::libs::{Outcome, told};
use crate::plot::{FONT, TEXT};
use crate::target::Store;

/// What must be 0, and gets a column only where it is not.
pub(super) const FAULTS: [&str; 5] = ["overlaps", "overlap", "hung", "errors", "never-served"];

/// Of this and of faults the worst round is shown.
const WORST: &str = "both-at-work";

/// What is shown of a figure.
pub(super) fn of_rounds(figure: &str, values: &[f64]) -> Option<f64> {
    match figure == WORST || FAULTS.contains(&figure) {
        true => values.iter().copied().reduce(f64::max),
        false => median(values),
    }
}

/// A table a scenario: a row a peer, a column a figure, each the median of the rounds and how far they are apart.
pub(super) fn tables(results: &Results, scenarios: &[Scenario]) -> String {
    let mut text = String::new();
    for left_out in &results.left_out {
        let _ = writeln!(
            text,
            "left out: {}, for {}\n",
            left_out.peer, left_out.reason
        );
    }
    for scenario in scenarios {
        text.push_str(&table(results, *scenario));
        text.push('\n');
    }
    text
}

fn table(results: &Results, scenario: Scenario) -> String {
    let peers = results.peers(scenario);
    let values = |peer: &str, figure: &str| results.values(scenario, peer, figure);
    let is_told = |figure: &str| {
        let some = |peer: &&str| values(peer, figure).iter().any(|value| *value != 0.0);
        !FAULTS.contains(&figure) || peers.iter().any(some)
    };
    let mut columns = results.columns(scenario);
    columns.retain(|(figure, _)| is_told(figure));
    let has_failed = |peer: &&str| !results.failures(scenario, peer).is_empty();
    let tells_failures = peers.iter().any(has_failed);

    let mut text = format!("### {}\n\n| |", scenario.name());
    for (figure, unit) in &columns {
        let comma = if unit.is_empty() { "" } else { ", " };
        let _ = write!(text, " {figure}{comma}{unit} |");
    }
    if tells_failures {
        text.push_str(" failed |");
    }
    let width = columns.len() + usize::from(tells_failures);
    let _ = writeln!(text, "\n|---|{}", "--:|".repeat(width));
    for peer in peers {
        let _ = write!(text, "| {peer} |");
        for (figure, _) in &columns {
            let _ = write!(text, " {} |", cell(figure, &values(peer, figure)));
        }
        if tells_failures {
            let failures = results.failures(scenario, peer);
            let times = match failures.first() {
                Some(first) => format!(" {}: {first}", failures.len()),
                None => String::new(),
            };
            let _ = write!(text, "{times} |");
        }
        text.push('\n');
    }
    text
}

/// Bars of two scenarios side by side: how often a contended key is taken, and for how long two work at once.
pub(super) fn draw(results: &Results) -> Outcome<String> {
    let hot = (Scenario::HotProcesses, "acquisitions");
    let pause = (Scenario::Pause, "both-at-work");
    let on_redis = |name: &&str| {
        let known = PEERS.iter().find(|peer| peer.name == *name);
        known.is_none_or(|peer| peer.store == Store::Redis)
    };
    let peers: Vec<_> = results.peers(hot.0).into_iter().filter(on_redis).collect();
    let height = 60 + 20 * peers.len() as u32;
    let mut svg = String::new();
    let mut draws = || -> Result<(), Box<dyn std::error::Error>> {
        let area = SVGBackend::with_string(&mut svg, (860, height)).into_drawing_area();
        let style = |size: i32, side| {
            (FONT, size)
                .into_font()
                .color(&TEXT)
                .pos(Pos::new(side, VPos::Center))
        };
        let panels = [
            (
                200,
                hot,
                "4 processes × 4 tasks, one key: acquisitions a second",
            ),
            (600, pause, "a stopped holder goes on: two at work, ms"),
        ];
        for (left, (scenario, name), title) in panels {
            area.draw(&Text::new(title, (left - 60, 20), style(13, HPos::Left)))?;
            let values: Vec<_> = peers
                .iter()
                .map(|peer| of_rounds(name, &results.values(scenario, peer, name)))
                .collect();
            let most = values.iter().flatten().copied().fold(1.0, f64::max);
            for (row, (peer, value)) in peers.iter().zip(&values).enumerate() {
                let y = 50 + 20 * row as i32;
                let colour = match *peer {
                    "lockstream" => RGBColor(0x1f, 0x8f, 0xd6),
                    _ => RGBColor(0x8a, 0x8a, 0x8a),
                };
                let width = value.map_or(0, |value| (180.0 * value / most) as i32);
                area.draw(&Rectangle::new(
                    [(left, y - 6), (left + width, y + 6)],
                    colour.filled(),
                ))?;
                let shown = value.map_or_else(|| "failed".to_owned(), shown);
                area.draw(&Text::new(
                    shown,
                    (left + width + 6, y),
                    style(12, HPos::Left),
                ))?;
                if left == 200 {
                    area.draw(&Text::new(*peer, (left - 8, y), style(12, HPos::Right)))?;
                }
            }
        }
        area.present()?;
        Ok(())
    };
    draws().map_err(told("the picture"))?;
    Ok(svg)
}

fn cell(figure: &str, values: &[f64]) -> String {
    let Some(value) = of_rounds(figure, values) else {
        return "–".to_owned();
    };
    let apart = spread(values).filter(|apart| *apart >= 1.0 && Some(value) == median(values));
    match apart {
        Some(apart) if value != 0.0 => format!("{} ±{:.0} %", shown(value), apart / 2.0),
        _ => shown(value),
    }
}

pub(super) fn shown(value: f64) -> String {
    match value.abs() {
        whole if whole >= 100.0 || whole.fract() == 0.0 => {
            let digits = format!("{value:.0}");
            let (sign, digits) = digits
                .strip_prefix('-')
                .map_or(("", &*digits), |rest| ("-", rest));
            let mut text = String::from(sign);
            for (at, digit) in digits.chars().enumerate() {
                if at > 0 && (digits.len() - at) % 3 == 0 {
                    text.push(',');
                }
                text.push(digit);
            }
            text
        }
        some if some >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_shown_with_their_spread() {
        assert_eq!(cell("pairs", &[1_000.0, 1_100.0, 1_200.0]), "1,100 ±9 %");
        assert_eq!(cell("pairs", &[0.0, 0.0]), "0");
        assert_eq!(cell("pairs", &[12.345]), "12.3");
        assert_eq!(cell("pairs", &[]), "–");
        assert_eq!(cell("hung", &[0.0, 0.0, 5.0]), "5");
        assert_eq!(cell("both-at-work", &[0.0, 0.0, 5.0]), "5");
        assert_eq!(shown(1_234_567.0), "1,234,567");
    }

    #[test]
    fn a_peer_that_failed_is_in_the_table_and_in_the_file() {
        let mut results = Results::new(&["redis 7".to_owned()], 1, 3.0);
        let (one, other) = (PEERS[0], PEERS[1]);
        let figures = vec![("held-after", 2.0, "ms"), ("hung", 0.0, "")];
        results.add(Scenario::First, one, Ok(figures));
        results.add(Scenario::First, other, Err("hung: not \"held\"".to_owned()));
        let told = tables(&results, &[Scenario::First]);
        let rows: Vec<_> = told.lines().skip(2).collect();
        assert_eq!(
            rows,
            [
                "| | held-after, ms | failed |",
                "|---|--:|--:|",
                "| lockstream | 2 | |",
                "| bare | – | 1: hung: not \"held\" |",
                "",
            ]
        );
        assert!(results.has_failed("bare") && !results.has_failed("lockstream"));
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("peers.json");
        results.write(&file).unwrap();
        assert_eq!(
            tables(&Results::read(&file).unwrap(), &[Scenario::First]),
            told
        );
    }

    #[test]
    fn what_must_not_be_has_a_column_where_it_was() {
        let mut results = Results::new(&[], 1, 3.0);
        let figures = vec![("overlaps", 1.0, ""), ("hung", 0.0, "")];
        results.add(Scenario::Hot, PEERS[0], Ok(figures));
        let told = tables(&results, &[Scenario::Hot]);
        assert!(told.contains("| | overlaps |\n"), "{told}");
    }
}
