//! What came of a run: tables, JSON and a picture.

use std::fmt::Write;
use std::path::Path;

use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use serde_json::{Value, json};

use super::languages::Peer;
use super::scenarios::{Figures, Scenario};
use crate::figures::{median, spread};
use crate::libs::{Outcome, told};
use crate::plot::{FONT, TEXT};
use crate::target::Store;

#[derive(Default)]
pub(super) struct Results {
    pub(super) servers: Vec<String>,
    left_out: Vec<(Peer, String)>,
    rounds: Vec<(Scenario, Peer, Outcome<Figures>)>,
}

impl Results {
    pub(super) fn leave_out(&mut self, peer: Peer, reason: &str) {
        self.left_out.push((peer, reason.to_owned()));
    }

    pub(super) fn add(&mut self, scenario: Scenario, peer: Peer, outcome: Outcome<Figures>) {
        self.rounds.push((scenario, peer, outcome));
    }

    pub(super) fn has_failed(&self, name: &str) -> bool {
        let mut of_it = self.rounds.iter().filter(|(_, peer, _)| peer.name == name);
        of_it.any(|(_, _, outcome)| outcome.is_err())
    }

    fn of(&self, scenario: Scenario, peer: Peer) -> impl Iterator<Item = &Outcome<Figures>> {
        let of_it = self.rounds.iter();
        let of_it = of_it.filter(move |(its, by, _)| *its == scenario && by.name == peer.name);
        of_it.map(|(.., outcome)| outcome)
    }

    /// Those that took part, in order.
    fn peers(&self, scenario: Scenario) -> Vec<Peer> {
        let mut peers: Vec<Peer> = Vec::new();
        for (its, peer, _) in &self.rounds {
            if *its == scenario && !peers.iter().any(|known| known.name == peer.name) {
                peers.push(*peer);
            }
        }
        peers
    }

    /// Name and unit of each figure.
    fn columns(&self, scenario: Scenario) -> Vec<(&'static str, &'static str)> {
        let rounds = self.rounds.iter().filter(|(its, ..)| *its == scenario);
        let first = rounds
            .filter_map(|(.., outcome)| outcome.as_ref().ok())
            .next();
        let figures = first.into_iter().flatten();
        figures.map(|(name, _, unit)| (*name, *unit)).collect()
    }

    fn values(&self, scenario: Scenario, peer: Peer, name: &str) -> Vec<f64> {
        let rounds = self
            .of(scenario, peer)
            .filter_map(|outcome| outcome.as_ref().ok());
        let figures = rounds.flatten().filter(|(its, ..)| *its == name);
        figures.map(|(_, value, _)| *value).collect()
    }

    fn failures(&self, scenario: Scenario, peer: Peer) -> Vec<&str> {
        let of_it = self.of(scenario, peer);
        of_it
            .filter_map(|outcome| outcome.as_ref().err().map(String::as_str))
            .collect()
    }

    /// A table a scenario: a row a peer, a column a figure, each the median of the rounds and how far they are apart.
    pub(super) fn tables(&self, scenarios: &[Scenario]) -> String {
        let mut text = String::new();
        for (peer, reason) in &self.left_out {
            let _ = writeln!(text, "left out: {}, for {reason}\n", peer.name);
        }
        for scenario in scenarios {
            let columns = self.columns(*scenario);
            let _ = write!(text, "### {}\n\n| |", scenario.name());
            for (name, unit) in &columns {
                let comma = if unit.is_empty() { "" } else { ", " };
                let _ = write!(text, " {name}{comma}{unit} |");
            }
            let _ = writeln!(text, " failed |\n|---|{}", "--:|".repeat(columns.len() + 1));
            for peer in self.peers(*scenario) {
                let _ = write!(text, "| {} |", peer.name);
                for (name, _) in &columns {
                    let _ = write!(text, " {} |", cell(&self.values(*scenario, peer, name)));
                }
                let failures = self.failures(*scenario, peer);
                let first = failures.first().copied().unwrap_or_default();
                let times = match failures.len() {
                    0 => String::new(),
                    times => format!("{times}: {first}"),
                };
                let _ = writeln!(text, " {times} |");
            }
            text.push('\n');
        }
        text
    }

    pub(super) fn json(&self, rounds: usize) -> String {
        let results = self.rounds.iter().map(|(scenario, peer, outcome)| {
            let figures = outcome.as_ref().ok().map(|figures| {
                let figures = figures
                    .iter()
                    .map(|(name, value, _)| ((*name).to_owned(), json!(value)));
                Value::Object(figures.collect())
            });
            json!({
                "scenario": scenario.name(),
                "peer": peer.name,
                "figures": figures,
                "failure": outcome.as_ref().err(),
            })
        });
        let left_out = self
            .left_out
            .iter()
            .map(|(peer, reason)| json!({ "peer": peer.name, "reason": reason }));
        let all = json!({
            "machine": crate::json::machine_of(&self.servers.join(", ")),
            "rounds": rounds,
            "left_out": left_out.collect::<Vec<_>>(),
            "results": results.collect::<Vec<_>>(),
        });
        serde_json::to_string_pretty(&all).expect("plain data") + "\n"
    }

    /// Bars of two scenarios side by side: how often a contended key is taken, and for how long two work at once.
    pub(super) fn draw(&self, path: &Path) -> Outcome<()> {
        let hot = (Scenario::HotProcesses, "acquisitions");
        let pause = (Scenario::Pause, "both-at-work");
        let peers: Vec<Peer> = self
            .peers(hot.0)
            .into_iter()
            .filter(|peer| peer.store == Store::Redis)
            .collect();
        let height = 60 + 20 * peers.len() as u32;
        let area = SVGBackend::new(path, (860, height)).into_drawing_area();
        let draws = || -> Result<(), Box<dyn std::error::Error>> {
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
                    .map(|peer| median(&self.values(scenario, *peer, name)))
                    .collect();
                let most = values.iter().flatten().copied().fold(1.0, f64::max);
                for (row, (peer, value)) in peers.iter().zip(&values).enumerate() {
                    let y = 50 + 20 * row as i32;
                    let colour = match peer.name {
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
                        area.draw(&Text::new(peer.name, (left - 8, y), style(12, HPos::Right)))?;
                    }
                }
            }
            area.present()?;
            Ok(())
        };
        draws().map_err(told("the picture"))
    }
}

fn cell(values: &[f64]) -> String {
    match (median(values), spread(values)) {
        (Some(median), Some(apart)) if values.len() > 1 && apart >= 1.0 => {
            format!("{} ±{:.0} %", shown(median), apart / 2.0)
        }
        (Some(median), _) => shown(median),
        _ => "–".to_owned(),
    }
}

fn shown(value: f64) -> String {
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
    use crate::peers::languages::PEERS;

    #[test]
    fn figures_are_shown_with_their_spread() {
        assert_eq!(cell(&[1_000.0, 1_100.0, 1_200.0]), "1,100 ±9 %");
        assert_eq!(cell(&[0.0, 0.0]), "0");
        assert_eq!(cell(&[12.345]), "12.3");
        assert_eq!(cell(&[]), "–");
        assert_eq!(shown(1_234_567.0), "1,234,567");
    }

    #[test]
    fn a_peer_that_failed_is_in_the_table_and_in_the_json() {
        let mut results = Results::default();
        let (one, other) = (PEERS[0], PEERS[1]);
        results.add(Scenario::First, one, Ok(vec![("held-after", 2.0, "ms")]));
        results.add(Scenario::First, other, Err("hung: not \"held\"".to_owned()));
        let tables = results.tables(&[Scenario::First]);
        assert!(tables.contains("| lockstream | 2 |  |"), "{tables}");
        assert!(
            tables.contains("| bare | – | 1: hung: not \"held\" |"),
            "{tables}"
        );
        assert!(results.has_failed("bare") && !results.has_failed("lockstream"));
        let json: Value = serde_json::from_str(&results.json(1)).unwrap();
        assert_eq!(json["results"][1]["failure"], "hung: not \"held\"");
    }
}
