//! The run: every scenario, round after round, the libraries taking turns.

use std::time::{Duration, Instant};

use rustix::process::{Resource, getrlimit, setrlimit};

use crate::libs::{Lib, Outcome};
use crate::options::Options;
use crate::report::{Entry, Report};
use crate::scenarios::{Round, Scenario};
use crate::target::Target;
use crate::{json, plot, report, speed};

pub(crate) fn run(options: &Options) -> Outcome<()> {
    if let Some(path) = &options.json {
        json::prepare(path)?;
    }
    if let Some(folder) = &options.plot {
        plot::prepare(folder)?;
    }
    allow_many_connections();
    let begin = Instant::now();
    let mut server = Target::start(options.store)?;
    let (version, url, pid) = (server.version(), server.url(), server.pid());
    eprintln!("{version} at {url}, process {pid}");
    let flush = match &server {
        Target::Redis(_) => None,
        Target::Postgres(database) => Some(database.flush()?),
    };
    if let Some(flush) = flush {
        println!("machine {} flush {flush} us", server.version());
    }
    let mut all = Report {
        secs: options.secs,
        rounds: usize::from(options.rounds),
        store: options.store,
        server: server.version().to_owned(),
        flush,
        entries: Vec::new(),
    };
    for scenario in &options.scenarios {
        let entries = run_scenario(*scenario, options, &mut server);
        for entry in &entries {
            report::print(entry);
        }
        all.entries.extend(entries);
    }
    drop(server);
    report::print_ratios(&all);
    eprintln!("the run took {:.0} s", begin.elapsed().as_secs_f64());
    if let Some(path) = &options.json {
        json::write(path, &all)?;
    }
    if let Some(folder) = &options.plot {
        plot::draw(folder, &all)?;
    }
    if options.page {
        json::write(&speed::run_file(), &all)?;
        speed::make()?;
    }
    let failed = all
        .entries
        .iter()
        .filter(|entry| entry.lib == Lib::Lockstream && entry.rounds.iter().any(Result::is_err));
    match failed
        .map(|entry| entry.scenario.name())
        .collect::<Vec<_>>()
    {
        none if none.is_empty() => Ok(()),
        some => Err(format!("lockstream failed at {}", some.join(", "))),
    }
}

/// A fleet has thousands of sockets. The processes and servers that the run starts inherit the limit.
fn allow_many_connections() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        eprintln!("the limit of open files stays as it is: {error}");
    }
}

fn run_scenario(scenario: Scenario, options: &Options, server: &mut Target) -> Vec<Entry> {
    let libs = options.libs.iter().copied();
    let mut entries: Vec<Entry> = libs
        .filter(|lib| scenario.is_of(*lib))
        .map(|lib| Entry {
            scenario,
            lib,
            rounds: Vec::new(),
        })
        .collect();
    let rounds = if scenario.is_ours_alone() {
        1
    } else {
        usize::from(options.rounds)
    };
    for number in 1..=rounds {
        for entry in &mut entries {
            let (name, lib) = (scenario.name(), entry.lib.name());
            eprintln!("{name} {number}/{rounds} {lib}");
            let round = Round {
                scenario,
                lib: entry.lib,
                secs: options.secs,
                round_trip: Duration::from_secs_f64(options.round_trip / 1e3),
                hold: Duration::from_secs_f64(options.hold),
                server,
            };
            let figures = round.run();
            if let Err(error) = &figures {
                eprintln!("{name} {number}/{rounds} {lib} FAILED: {error}");
            }
            entry.rounds.push(figures);
        }
    }
    entries
}
