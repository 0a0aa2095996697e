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

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use languages::{Language, PEERS, Peer};
use scenarios::{Figures, Round, SCENARIOS, Scenario};

use crate::libs::{Outcome, told};
use crate::page;
use crate::target::{Store, Target};
use results::Results;
use show::{draw, tables};

const HELP: &str = "\
Measures lockstream beside other libraries of locks, in the languages that are here, on a server of its own.

usage: cargo run --release -p lockstream-bench --bin peers -- [OPTION…]

  --only A,B      these peers; all, if none is named
  --scenario A,B  these scenarios; all, if none is named
  --list          says which there are, and runs nothing
  --rounds N      how many rounds, the peers taking turns in each (3; 1 to 20)
  --secs N        how long each round of a scenario with many turns is measured, in seconds (3; 0.1 to 60)
  --hold N        how long `held` holds its locks, in seconds (60; 1 to 600)
  --json FILE     writes everything there, every round of it, after each scenario
  --tables FILE   writes the tables there, as Markdown
  --plot FILE     draws a picture there, as SVG
  --pages         puts a run of all scenarios and peers into docs/peers.json, and shows it in docs/peers.md and README.md
  --from FILE     makes no run, and shows the one in this file, which --json wrote
  --help          says this

What a language needs and is not here is said, and its peers are left out. A peer that hangs or fails is shown so.";

struct Options {
    peers: Vec<Peer>,
    scenarios: Vec<Scenario>,
    rounds: usize,
    secs: f64,
    hold: f64,
    json: Option<PathBuf>,
    tables: Option<PathBuf>,
    plot: Option<PathBuf>,
    pages: bool,
    from: Option<PathBuf>,
}

enum Wish {
    Run(Options),
    List,
    Help,
}

pub(crate) fn main(args: impl Iterator<Item = String>) -> ExitCode {
    let done = match parse(args) {
        Ok(Wish::Run(options)) => run(&options),
        Ok(Wish::List) => {
            list();
            Ok(true)
        }
        Ok(Wish::Help) => {
            println!("{HELP}");
            Ok(true)
        }
        Err(error) => Err(format!("{error}\n\n{HELP}")),
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => {
            eprintln!("lockstream failed at a scenario");
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("{error}");
            ExitCode::from(2)
        }
    }
}

fn parse(args: impl Iterator<Item = String>) -> Outcome<Wish> {
    let mut options = Options {
        peers: PEERS.to_vec(),
        scenarios: SCENARIOS.iter().map(|(scenario, ..)| *scenario).collect(),
        rounds: 3,
        secs: 3.0,
        hold: 60.0,
        json: None,
        tables: None,
        plot: None,
        pages: false,
        from: None,
    };
    let (mut args, mut of_a_run) = (args, None);
    while let Some(name) = args.next() {
        if matches!(&*name, "--help" | "-h") {
            return Ok(Wish::Help);
        }
        if name == "--list" {
            return Ok(Wish::List);
        }
        if name == "--pages" {
            options.pages = true;
            continue;
        }
        if ![
            "--only",
            "--scenario",
            "--rounds",
            "--secs",
            "--hold",
            "--json",
            "--tables",
            "--plot",
            "--from",
        ]
        .contains(&&*name)
        {
            return Err(format!("there is no {name:?}"));
        }
        let value = args.next().ok_or_else(|| format!("{name} wants a value"))?;
        let number = |least: f64, most: f64| {
            let number = value
                .parse()
                .ok()
                .filter(|number| (least..=most).contains(number));
            number.ok_or_else(|| {
                format!("{name} wants a number from {least} to {most}, not {value:?}")
            })
        };
        match &*name {
            "--only" => {
                let find = |name: &str| PEERS.into_iter().find(|peer| peer.name == name);
                options.peers = named(&value, "peer", find)?;
            }
            "--scenario" => {
                let find = |name: &str| {
                    SCENARIOS
                        .iter()
                        .find(|(_, its, _)| *its == name)
                        .map(|found| found.0)
                };
                options.scenarios = named(&value, "scenario", find)?;
            }
            "--rounds" => options.rounds = number(1.0, 20.0)? as usize,
            "--secs" => options.secs = number(0.1, 60.0)?,
            "--hold" => options.hold = number(1.0, 600.0)?,
            "--json" => options.json = Some(value.into()),
            "--tables" => options.tables = Some(value.into()),
            "--plot" => options.plot = Some(value.into()),
            _ => options.from = Some(value.into()),
        }
        if ["--only", "--rounds", "--secs", "--hold", "--json"].contains(&&*name) {
            of_a_run = Some(name);
        }
    }
    if let (Some(name), Some(_)) = (of_a_run, &options.from) {
        return Err(format!("--from makes no run, for which {name} would be"));
    }
    let is_whole = options.peers.len() == PEERS.len() && options.scenarios.len() == SCENARIOS.len();
    if options.pages && !is_whole {
        return Err("--pages is of a run with every scenario and peer".to_owned());
    }
    Ok(Wish::Run(options))
}

fn named<T>(names: &str, kind: &str, find: impl Fn(&str) -> Option<T>) -> Outcome<Vec<T>> {
    let find = |name| find(name).ok_or_else(|| format!("there is no {kind} {name:?}: see --list"));
    names.split(',').map(find).collect()
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
fn side_by_side(options: &Options, scenario: Scenario, peers: &[&Built]) -> Vec<Outcome<Figures>> {
    std::thread::scope(|scope| {
        let mut running = Vec::new();
        for built in peers {
            running.push(scope.spawn(|| {
                let mut target = Target::start(built.0.store)?;
                run_one(options, scenario, built, &mut target)
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
    scenario: Scenario,
    (peer, words): &Built,
    target: &mut Target,
) -> Outcome<Figures> {
    let mut round = Round {
        target,
        peer: *peer,
        words,
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
    let tables = tables(&results, &options.scenarios);
    println!("{tables}");
    if let Some(path) = &options.tables {
        page::write(path, &tables)?;
    }
    if let Some(path) = &options.plot {
        draw(&results, path)?;
    }
    if options.pages && !results.is_whole() {
        return Err(
            "--pages wants a whole run: a peer, a scenario or a round is missing".to_owned(),
        );
    }
    if options.pages {
        results.write(&page::root().join("docs/peers.json"))?;
        pages::make(&results)?;
    }
    Ok(!results.has_failed("lockstream"))
}

fn measure(options: &Options) -> Outcome<Results> {
    let scratch = tempfile::tempdir().map_err(told("a folder"))?;
    let mut languages: Vec<(Language, Outcome<Vec<String>>)> = Vec::new();
    let mut left_out = Vec::new();
    let mut peers: Vec<Built> = Vec::new();
    for peer in &options.peers {
        if !languages
            .iter()
            .any(|(language, _)| *language == peer.language)
        {
            eprintln!("builds {:?}", peer.language);
            languages.push((peer.language, peer.language.build(scratch.path())));
        }
        let built = languages
            .iter()
            .find(|(language, _)| *language == peer.language);
        match &built.expect("it was just put there").1 {
            Ok(words) => peers.push((*peer, words.clone())),
            Err(reason) => {
                eprintln!("leaves out {}: {reason}", peer.name);
                left_out.push((*peer, reason.clone()));
            }
        }
    }
    let start = |store| {
        let is_used = peers.iter().any(|(peer, _)| peer.store == store);
        is_used.then(|| Target::start(store)).transpose()
    };
    let mut redis = start(Store::Redis)?;
    let mut postgres = start(Store::Postgres)?;
    let targets = [&redis, &postgres].into_iter().flatten();
    let servers: Vec<_> = targets.map(|target| target.version().to_owned()).collect();
    let mut results = Results::new(&servers, options.rounds, options.secs);
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
    let begin = Instant::now();
    let all = options.rounds * options.scenarios.len();
    for round in 0..options.rounds {
        for (at, scenario) in options.scenarios.iter().enumerate() {
            let done = round * options.scenarios.len() + at;
            eprintln!(
                "round {} of {}: {} ({done} of {all}, {:.0?})",
                round + 1,
                options.rounds,
                scenario.name(),
                begin.elapsed()
            );
            let takes_part = |(peer, _): &&Built| scenario.is_for(*peer);
            let peers: Vec<&Built> = peers.iter().filter(takes_part).collect();
            if scenario.only_waits() {
                for some in peers.chunks(SIDE_BY_SIDE) {
                    for (built, outcome) in some.iter().zip(side_by_side(options, *scenario, some))
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
                let outcome = run_one(options, *scenario, built, target);
                results.add(*scenario, built.0, outcome);
            }
            write(&results)?;
        }
    }
    Ok(results)
}
