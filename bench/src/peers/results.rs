//! What came of a run, round by round, as it is written to a file and read from it again.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::languages::{PEERS, Peer};
use super::scenarios::{Figures, SCENARIOS, Scenario};
use super::show::FAULTS;
use crate::json::{Machine, machine_of};
use crate::libs::Outcome;

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Results {
    pub(super) machine: Machine,
    pub(super) rounds: usize,
    pub(super) secs: f64,
    pub(super) left_out: Vec<LeftOut>,
    results: Vec<Row>,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct LeftOut {
    pub(super) peer: String,
    pub(super) reason: String,
}

/// One round of one peer: its figures, or why it has none.
#[derive(Debug, Serialize, Deserialize)]
struct Row {
    scenario: String,
    peer: String,
    figures: Vec<Figure>,
    failure: Option<String>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Figure {
    figure: String,
    value: f64,
    unit: String,
}

impl Results {
    pub(super) fn new(servers: &[String], rounds: usize, secs: f64) -> Self {
        Self {
            machine: machine_of(&servers.join(", ")),
            rounds,
            secs,
            left_out: Vec::new(),
            results: Vec::new(),
        }
    }

    pub(super) fn read(path: &Path) -> Outcome<Self> {
        let told = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
        let text = std::fs::read_to_string(path).map_err(|error| told(&error))?;
        serde_json::from_str(&text).map_err(|error| told(&error))
    }

    pub(super) fn write(&self, path: &Path) -> Outcome<()> {
        let text = serde_json::to_string_pretty(self).expect("plain data");
        std::fs::write(path, text + "\n").map_err(|error| format!("{}: {error}", path.display()))
    }

    pub(super) fn leave_out(&mut self, peer: Peer, reason: &str) {
        self.left_out.push(LeftOut {
            peer: peer.name.to_owned(),
            reason: reason.to_owned(),
        });
    }

    pub(super) fn add(&mut self, scenario: Scenario, peer: Peer, outcome: Outcome<Figures>) {
        let (figures, failure) = match outcome {
            Ok(figures) => (figures, None),
            Err(failure) => (Vec::new(), Some(failure)),
        };
        let figures = figures.into_iter().map(|(figure, value, unit)| Figure {
            figure: figure.to_owned(),
            value,
            unit: unit.to_owned(),
        });
        self.results.push(Row {
            scenario: scenario.name().to_owned(),
            peer: peer.name.to_owned(),
            figures: figures.collect(),
            failure,
        });
    }

    /// Whether every peer has had every round of all that it can take part in.
    pub(super) fn is_whole(&self) -> bool {
        let has_all = |scenario: Scenario, peer: &Peer| {
            let rounds = self.of(scenario).filter(|row| row.peer == peer.name);
            !scenario.is_for(*peer) || rounds.count() >= self.rounds
        };
        let scenarios = SCENARIOS.iter().map(|(scenario, ..)| *scenario);
        scenarios
            .into_iter()
            .all(|it| PEERS.iter().all(|peer| has_all(it, peer)))
    }

    /// Whether it could not do something, or did what must not be.
    pub(super) fn has_failed(&self, peer: &str) -> bool {
        let is_bad = |one: &Figure| FAULTS.contains(&&*one.figure) && one.value > 0.0;
        let mut of_it = self.results.iter().filter(|row| row.peer == peer);
        of_it.any(|row| row.failure.is_some() || row.figures.iter().any(is_bad))
    }

    fn of(&self, scenario: Scenario) -> impl Iterator<Item = &Row> {
        let name = scenario.name();
        self.results.iter().filter(move |row| row.scenario == name)
    }

    /// Those that took part, in order.
    pub(super) fn peers(&self, scenario: Scenario) -> Vec<&str> {
        let mut peers: Vec<&str> = Vec::new();
        for row in self.of(scenario) {
            if !peers.contains(&&*row.peer) {
                peers.push(&row.peer);
            }
        }
        peers
    }

    /// Name and unit of each figure.
    pub(super) fn columns(&self, scenario: Scenario) -> Vec<(&str, &str)> {
        let mut measured = self.of(scenario).filter(|row| row.failure.is_none());
        let figures = measured.next().into_iter().flat_map(|row| &row.figures);
        figures.map(|one| (&*one.figure, &*one.unit)).collect()
    }

    /// One of each round that gave one.
    pub(super) fn values(&self, scenario: Scenario, peer: &str, figure: &str) -> Vec<f64> {
        let rounds = self.of(scenario).filter(|row| row.peer == peer);
        let figures = rounds.flat_map(|row| &row.figures);
        let figures = figures.filter(|one| one.figure == figure);
        figures.map(|one| one.value).collect()
    }

    pub(super) fn failures(&self, scenario: Scenario, peer: &str) -> Vec<&str> {
        let rounds = self.of(scenario).filter(|row| row.peer == peer);
        rounds.filter_map(|row| row.failure.as_deref()).collect()
    }
}
