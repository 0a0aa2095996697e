//! Libraries of other languages beside lockstream: each is a program that does as it is told by its arguments, and what it
//! says and writes is judged here, in the same way for all.
//!
//! | file | what is in it |
//! |---|---|
//! | `languages` | the peers, and how their programs are built |
//! | `scenarios` | what they do, and what befalls them |
//! | `process` | one of their processes |
//! | `judge` | who held what when |
//! | `results` | what came of a run, in memory and in a file |
//! | `show`, `pages` | tables and a picture, and the repository's pages with them |

mod judge;
mod languages;
mod pages;
mod process;
mod results;
mod scenarios;
mod show;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::{Parser, value_parser};
use languages::{Language, PEERS, Peer};
use scenarios::{Figures, Round, SCENARIOS, Scenario};

use crate::libs::{Outcome, told};
use crate::options::{named, number};
use crate::page;
use crate::target::{Store, Target};
use results::Results;
use show::{draw, tables};

/// Measures lockstream beside other libraries of locks, in the languages that are here, on a server of its own.
///
/// What a language needs and is not here is said, and its peers are left out. A peer that hangs or fails is shown so.
#[derive(Debug, Parser)]
#[command(bin_name = "cargo run --release -p lockstream-bench --bin peers --")]
struct Options {
    /// These peers; all, if none is named.
    #[arg(long = "only", value_name = "A,B", value_delimiter = ',', value_parser = named("peer", &PEERS, |peer| peer.name))]
    peers: Vec<Peer>,
    /// These scenarios; all, if none is named.
    #[arg(long = "scenario", value_name = "A,B", value_delimiter = ',', value_parser = named("scenario", &SCENARIOS, |it| it.1))]
    scenarios: Vec<(Scenario, &'static str, &'static str)>,
    /// Says which there are, and runs nothing.
    #[arg(long)]
    list: bool,
    /// How many rounds, the peers taking turns in each.
    #[arg(long, value_name = "N", default_value = "3", value_parser = value_parser!(u8).range(1..=20))]
    rounds: u8,
    /// How long each round of a scenario with many turns is measured, in seconds.
    #[arg(long, value_name = "N", default_value = "3", value_parser = number(0.1..=60.0))]
    secs: f64,
    /// How long `held` holds its locks, in seconds.
    #[arg(long, value_name = "N", default_value = "60", value_parser = number(1.0..=600.0))]
    hold: f64,
    /// Writes everything there, every round of it, after each scenario.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Writes the tables there, as Markdown.
    #[arg(long, value_name = "FILE")]
    tables: Option<PathBuf>,
    /// Draws a picture there, as SVG.
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
    /// Puts a run of all scenarios and peers into docs/peers.json, and shows it in docs/peers.md and README.md.
    #[arg(long, conflicts_with_all = ["peers", "scenarios"])]
    pages: bool,
    /// Makes no run, and shows the one in this file, which --json wrote.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["peers", "rounds", "secs", "hold", "json"])]
    from: Option<PathBuf>,
}

impl Options {
    fn peers(&self) -> &[Peer] {
        if self.peers.is_empty() {
            &PEERS
        } else {
            &self.peers
        }
    }

    fn scenarios(&self) -> Vec<Scenario> {
        let all = &SCENARIOS[..];
        let scenarios = if self.scenarios.is_empty() {
            all
        } else {
            &self.scenarios
        };
        scenarios.iter().map(|(scenario, ..)| *scenario).collect()
    }
}

pub(crate) fn main() -> ExitCode {
    let options = Options::parse();
    if options.list {
        list();
        return ExitCode::SUCCESS;
    }
    match run(&options) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => {
            eprintln!("lockstream failed at a scenario, or did what nobody may");
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("{error}");
            ExitCode::from(2)
        }
    }
}

fn list() {
    println!("peers:");
    for peer in PEERS {
        println!("  {:<22}{:?}", peer.name, peer.language);
    }
    println!("scenarios:");
    for (_, name, what) in SCENARIOS {
        println!("  {name:<22}{what}");
    }
}

/// A peer, and the words that start it.
type Built = (Peer, Vec<String>);

/// How many peers do at a time what only waits: few enough that the machine stays idle.
const SIDE_BY_SIDE: usize = 6;

/// Measures them at the same time, each with a server of its own.
fn side_by_side(
    options: &Options,
    number: usize,
    scenario: Scenario,
    peers: &[&Built],
) -> Vec<Outcome<Figures>> {
    std::thread::scope(|scope| {
        let mut running = Vec::new();
        for built in peers {
            running.push(scope.spawn(|| {
                let mut target = Target::start(built.0.store)?;
                run_one(options, number, scenario, built, &mut target)
            }));
        }
        let joined = running
            .into_iter()
            .map(|one| one.join().expect("a measurement panics nowhere"));
        joined.collect()
    })
}

fn run_one(
    options: &Options,
    number: usize,
    scenario: Scenario,
    (peer, words): &Built,
    target: &mut Target,
) -> Outcome<Figures> {
    let mut round = Round {
        target,
        peer: *peer,
        words,
        number,
        millis: (options.secs * 1e3) as u64,
        hold: Duration::from_secs_f64(options.hold),
    };
    let outcome = round.run(scenario);
    if let Err(error) = &outcome {
        eprintln!("  {}: {error}", peer.name);
    }
    outcome
}

/// Gives whether lockstream did all that it was to do.
fn run(options: &Options) -> Outcome<bool> {
    let results = match &options.from {
        Some(file) => Results::read(file)?,
        None => measure(options)?,
    };
    let tables = tables(&results, &options.scenarios());
    println!("{tables}");
    if let Some(path) = &options.tables {
        page::write(path, &tables)?;
    }
    if let Some(path) = &options.plot {
        page::write(path, &draw(&results)?)?;
    }
    if options.pages && !results.is_whole() {
        return Err(
            "--pages wants a whole run: a peer, a scenario or a round is missing".to_owned(),
        );
    }
    if options.pages {
        results.write(&pages::run_file())?;
        pages::make(&results)?;
    }
    let ours = ["lockstream", "lockstream-postgres"];
    Ok(!ours.iter().any(|peer| results.has_failed(peer)))
}

/// Those of the peers that can be run here, and why the others cannot.
#[derive(Default)]
struct Here {
    peers: Vec<Built>,
    left_out: Vec<(Peer, String)>,
}

impl Here {
    /// Builds what their languages need, below this folder.
    fn build(peers: &[Peer], folder: &Path) -> Self {
        let mut here = Self::default();
        let mut languages: Vec<(Language, Outcome<Vec<String>>)> = Vec::new();
        for peer in peers {
            if !languages
                .iter()
                .any(|(language, _)| *language == peer.language)
            {
                eprintln!("builds {:?}", peer.language);
                languages.push((peer.language, peer.language.build(folder)));
            }
            let built = languages
                .iter()
                .find(|(language, _)| *language == peer.language);
            match &built.expect("it was just put there").1 {
                Ok(words) => here.peers.push((*peer, words.clone())),
                Err(reason) => here.leave_out(*peer, reason),
            }
        }
        here
    }

    /// Starts a server for those who need such a one.
    fn start(&mut self, store: Store) -> Option<Target> {
        let needs_it = |(peer, _): &Built| peer.store == store;
        if !self.peers.iter().any(needs_it) {
            return None;
        }
        match Target::start(store) {
            Ok(target) => Some(target),
            Err(reason) => {
                let (without, others): (Vec<_>, _) = self.peers.drain(..).partition(needs_it);
                self.peers = others;
                for (peer, _) in without {
                    self.leave_out(peer, &reason);
                }
                None
            }
        }
    }

    fn leave_out(&mut self, peer: Peer, reason: &str) {
        eprintln!("leaves out {}: {reason}", peer.name);
        self.left_out.push((peer, reason.to_owned()));
    }
}

fn measure(options: &Options) -> Outcome<Results> {
    let scratch = tempfile::tempdir().map_err(told("a folder"))?;
    let mut here = Here::build(options.peers(), scratch.path());
    let mut redis = here.start(Store::Redis);
    let mut postgres = here.start(Store::Postgres);
    if options.pages && !here.left_out.is_empty() {
        return Err("--pages wants a whole run, and peers are left out".to_owned());
    }
    let Here { peers, left_out } = here;
    if peers.is_empty() {
        return Err("nobody is left to be measured".to_owned());
    }
    let targets = [&redis, &postgres].into_iter().flatten();
    let servers: Vec<_> = targets.map(|target| target.version().to_owned()).collect();
    let rounds = usize::from(options.rounds);
    let mut results = Results::new(&servers, rounds, options.secs);
    for (peer, reason) in left_out {
        results.leave_out(peer, &reason);
    }
    // A run takes hours: what has been measured is not lost with the rest of it.
    let write = |results: &Results| {
        options
            .json
            .as_ref()
            .map_or(Ok(()), |path| results.write(path))
    };
    let (begin, scenarios) = (Instant::now(), options.scenarios());
    let all = rounds * scenarios.len();
    for round in 0..rounds {
        for (at, scenario) in scenarios.iter().enumerate() {
            let done = round * scenarios.len() + at;
            eprintln!(
                "round {} of {}: {} ({done} of {all}, {:.0?})",
                round + 1,
                rounds,
                scenario.name(),
                begin.elapsed()
            );
            let takes_part = |(peer, _): &&Built| scenario.is_for(*peer);
            let peers: Vec<&Built> = peers.iter().filter(takes_part).collect();
            if scenario.only_waits() {
                for some in peers.chunks(SIDE_BY_SIDE) {
                    for (built, outcome) in some
                        .iter()
                        .zip(side_by_side(options, round, *scenario, some))
                    {
                        results.add(*scenario, built.0, outcome);
                    }
                }
                write(&results)?;
                continue;
            }
            for built in peers {
                let target = match built.0.store {
                    Store::Redis => &mut redis,
                    Store::Postgres => &mut postgres,
                };
                let target = target.as_mut().expect("it was started");
                target.empty()?;
                let outcome = run_one(options, round, *scenario, built, target);
                results.add(*scenario, built.0, outcome);
            }
            write(&results)?;
        }
    }
    Ok(results)
}
