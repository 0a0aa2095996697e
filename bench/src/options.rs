//! What the command line says.

use std::path::PathBuf;

use crate::libs::Lib;
use crate::scenarios::Scenario;
use crate::target::Store;

pub(crate) const HELP: &str = "\
Measures lockstream beside its peers, on a server of its own.

usage: cargo bench -p lockstream-bench --bench scenarios -- [SCENARIO…] [OPTION…]

  SCENARIO…     those to run; all, if none is named
  --store NAME  on which server (redis; redis or postgres)
  --secs N      how long each round of each library is measured, in seconds (2; 0.1 to 60)
  --rounds N    how many rounds, the libraries taking turns in each (3; 1 to 100)
  --libs A,B    which libraries (lockstream,bare,rslock,async-redis-lock; on PostgreSQL
                lockstream,sqlx-advisory,polled-table)
  --round-trip MS
                what clients of a cluster wait for an answer at the least (1; 0 to 100)
  --hold SECS   how long cluster-100k holds its leases (60; 1 to 600)
  --json FILE   writes everything there, every round of it
  --plot DIR    draws charts there, as SVG, of a run on Redis
  --page        makes docs/speed.json, docs/speed.svg and the table in docs/speed.md of this run, which must
                be a whole one
  --redraw      makes the latter two of docs/speed.json again, and runs nothing
  --help        says this

It prints `SCENARIO LIB FIGURE VALUE UNIT`, VALUE being the median of the rounds, and FIGURE-spread
how far the rounds were apart, in percent of it; and at the end `ratio NAME VALUE GOAL`,
GOAL being `reached` or `missed` and what was to be reached.";

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Options {
    pub(crate) store: Store,
    pub(crate) scenarios: Vec<Scenario>,
    pub(crate) libs: Vec<Lib>,
    pub(crate) secs: f64,
    pub(crate) rounds: usize,
    /// In milliseconds, to a cluster.
    pub(crate) round_trip: f64,
    /// In seconds.
    pub(crate) hold: f64,
    pub(crate) json: Option<PathBuf>,
    pub(crate) plot: Option<PathBuf>,
    pub(crate) page: bool,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Wish {
    Run(Options),
    Redraw,
    Help,
}

pub(crate) fn parse(args: impl IntoIterator<Item = String>) -> Result<Wish, String> {
    let mut args = args.into_iter();
    let mut named_libs = None;
    let mut options = Options {
        store: Store::Redis,
        scenarios: Vec::new(),
        libs: Vec::new(),
        secs: 2.0,
        rounds: 3,
        round_trip: 1.0,
        hold: 60.0,
        json: None,
        plot: None,
        page: false,
    };
    while let Some(arg) = args.next() {
        let (name, joined) = match arg.split_once('=') {
            Some((name, value)) if name.starts_with("--") => (name, Some(value.to_owned())),
            _ => (arg.as_str(), None),
        };
        let mut value = || {
            let value = joined.clone().or_else(|| args.next());
            value.ok_or_else(|| format!("{name} wants a value"))
        };
        match name {
            // Cargo says this to every bench.
            "--bench" => {}
            "--page" => options.page = true,
            "--redraw" => return Ok(Wish::Redraw),
            "--help" | "-h" => return Ok(Wish::Help),
            "--secs" => options.secs = number(name, &value()?, 0.1..=60.0)?,
            "--round-trip" => options.round_trip = number(name, &value()?, 0.0..=100.0)?,
            "--hold" => options.hold = number(name, &value()?, 1.0..=600.0)?,
            "--rounds" => options.rounds = whole(name, &value()?, 1..=100)?,
            "--libs" => named_libs = Some(value()?),
            "--store" => {
                let found = one_of("store", &value()?, &Store::ALL.map(Store::name))?;
                options.store = Store::ALL[found];
            }
            "--json" => options.json = Some(PathBuf::from(value()?)),
            "--plot" => options.plot = Some(PathBuf::from(value()?)),
            _ if name.starts_with('-') => return Err(format!("there is no option {name}")),
            _ => {
                let known = Scenario::ALL.map(Scenario::name);
                let found = one_of("scenario", name, &known)?;
                push_new(&mut options.scenarios, Scenario::ALL[found]);
            }
        }
    }
    let (libs, scenarios) = (Lib::of(options.store), Scenario::on(options.store));
    options.libs = match &named_libs {
        Some(names) => libs_named(names, libs)?,
        None => libs.to_vec(),
    };
    if options.plot.is_some() && options.store != Store::Redis {
        return Err("--plot draws runs on Redis".to_owned());
    }
    let is_whole = options.scenarios.is_empty()
        && libs.iter().all(|lib| options.libs.contains(lib))
        && options.store == Store::Redis;
    if options.page && !is_whole {
        return Err(
            "--page is of a whole run on Redis, with every scenario and library".to_owned(),
        );
    }
    if let Some(other) = options.scenarios.iter().find(|it| !scenarios.contains(it)) {
        let (name, store) = (other.name(), options.store.name());
        return Err(format!("{name} is not a scenario of --store {store}"));
    }
    if options.scenarios.is_empty() {
        options.scenarios = scenarios;
    }
    Ok(Wish::Run(options))
}

fn libs_named(names: &str, all: &[Lib]) -> Result<Vec<Lib>, String> {
    let known: Vec<_> = all.iter().map(|lib| lib.name()).collect();
    let mut libs = Vec::new();
    for name in names.split(',') {
        push_new(&mut libs, all[one_of("library", name.trim(), &known)?]);
    }
    Ok(libs)
}

fn one_of(what: &str, name: &str, known: &[&str]) -> Result<usize, String> {
    let found = known.iter().position(|one| *one == name);
    found.ok_or_else(|| {
        let known = known.join(", ");
        format!("there is no {what} {name:?}; there are: {known}")
    })
}

fn push_new<T: PartialEq>(list: &mut Vec<T>, one: T) {
    if !list.contains(&one) {
        list.push(one);
    }
}

fn number(name: &str, text: &str, range: std::ops::RangeInclusive<f64>) -> Result<f64, String> {
    let number: f64 = text.parse().unwrap_or(f64::NAN);
    let (least, most) = (range.start(), range.end());
    if range.contains(&number) {
        Ok(number)
    } else {
        Err(format!("{name} is {text}, and goes from {least} to {most}"))
    }
}

fn whole(name: &str, text: &str, range: std::ops::RangeInclusive<usize>) -> Result<usize, String> {
    match text.parse::<usize>() {
        Ok(number) if range.contains(&number) => Ok(number),
        _ => {
            let (least, most) = (range.start(), range.end());
            Err(format!(
                "{name} is {text}, and is a whole number from {least} to {most}"
            ))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn say(line: &str) -> Result<Wish, String> {
        parse(line.split_whitespace().map(str::to_owned))
    }

    fn options(line: &str) -> Options {
        match say(line) {
            Ok(Wish::Run(options)) => options,
            other => panic!("{line}: {other:?}"),
        }
    }

    #[test]
    fn nothing_said_is_everything() {
        let all = options("--bench");
        assert_eq!(all.scenarios, Scenario::ALL);
        assert_eq!(all.libs, Lib::of(Store::Redis));
        assert_eq!((all.secs, all.rounds), (2.0, 3));
    }

    #[test]
    fn what_is_said_is_taken() {
        let some = options(
            "hot-local free-8 hot-local --secs 0.5 --rounds=1 --libs bare,lockstream --json f --plot=d \
             --round-trip 5 --hold 10",
        );
        assert_eq!(some.scenarios, [Scenario::HotLocal, Scenario::Free8]);
        assert_eq!(some.libs, [Lib::Bare, Lib::Lockstream]);
        assert_eq!((some.secs, some.rounds), (0.5, 1));
        assert_eq!((some.round_trip, some.hold), (5.0, 10.0));
        assert_eq!(some.json, Some(PathBuf::from("f")));
        assert_eq!(some.plot, Some(PathBuf::from("d")));
    }

    #[test]
    fn a_store_has_libraries_and_scenarios_of_its_own() {
        let all = options("--store postgres");
        assert_eq!(all.libs, Lib::of(Store::Postgres));
        assert!(all.scenarios.contains(&Scenario::Handover));
        assert!(!all.scenarios.contains(&Scenario::Cluster100k));
    }

    #[test]
    fn the_page_is_of_everything() {
        let all = options("--page --secs 1");
        assert!(all.page && !options("").page);
        assert_eq!(all.scenarios, Scenario::ALL);
        assert_eq!(say("--redraw"), Ok(Wish::Redraw));
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (line, names) in [
            ("free-2", "free-2"),
            ("--libs bare,redlock", "redlock"),
            ("--libs", "--libs"),
            ("--secs 0", "--secs"),
            ("--secs NaN", "--secs"),
            ("--secs 1e9", "--secs"),
            ("--rounds 0", "--rounds"),
            ("--round-trip -1", "--round-trip"),
            ("--hold 0", "--hold"),
            ("--rounds 1.5", "--rounds"),
            ("--round 1", "--round"),
            ("--page free-8", "--page"),
            ("--page --libs bare", "--page"),
            ("--page --store postgres", "--page"),
            ("--store postgres --plot d", "--plot"),
            ("--store mysql", "mysql"),
            ("--store postgres far-1", "far-1"),
            ("--store postgres --libs bare", "bare"),
        ] {
            let error = say(line).expect_err(line);
            assert!(error.contains(names), "{line}: {error}");
        }
    }
}
