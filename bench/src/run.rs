//! The run: every scenario, round after round, the libraries taking turns.

use crate::libs::{Lib, Outcome};
use crate::options::Options;
use crate::report::{Entry, Report};
use crate::scenarios::{Round, Scenario};
use crate::server::Server;
use crate::{json, plot, readme, report};

pub(crate) fn run(options: &Options) -> Outcome<()> {
    if let Some(path) = &options.json {
        json::prepare(path)?;
    }
    if let Some(folder) = &options.plot {
        plot::prepare(folder)?;
    }
    let mut server = Server::start()?;
    let (version, url, pid) = (server.version(), server.url(), server.pid());
    eprintln!("{version} at {url}, process {pid}");
    let mut all = Report {
        secs: options.secs,
        rounds: options.rounds,
        server: server.version().to_owned(),
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
    if let Some(path) = &options.json {
        json::write(path, &all)?;
    }
    if let Some(folder) = &options.plot {
        plot::draw(folder, &all)?;
    }
    if options.readme {
        json::write(&readme::run_file(), &all)?;
        readme::make()?;
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

fn run_scenario(scenario: Scenario, options: &Options, server: &mut Server) -> Vec<Entry> {
    let ours_alone = scenario.is_ours_alone();
    let libs = options.libs.iter().copied();
    let mut entries: Vec<Entry> = libs
        .filter(|lib| !ours_alone || *lib == Lib::Lockstream)
        .map(|lib| Entry {
            scenario,
            lib,
            rounds: Vec::new(),
        })
        .collect();
    let rounds = if ours_alone { 1 } else { options.rounds };
    for number in 1..=rounds {
        for entry in &mut entries {
            let (name, lib) = (scenario.name(), entry.lib.name());
            eprintln!("{name} {number}/{rounds} {lib}");
            let round = Round {
                scenario,
                lib: entry.lib,
                secs: options.secs,
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
