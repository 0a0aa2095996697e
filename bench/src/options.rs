//! What the command line says.

use std::ops::RangeInclusive;
use std::path::PathBuf;

use clap::error::ErrorKind;
use clap::{CommandFactory, Error, Parser, value_parser};

use crate::libs::Lib;
use crate::scenarios::Scenario;
use crate::target::Store;

/// Measures lockstream beside its peers, on a server of its own.
///
/// It prints `SCENARIO LIB FIGURE VALUE UNIT`, VALUE being the median of the rounds, and FIGURE-spread how far the rounds
/// were apart, in percent of it; and at the end `ratio NAME VALUE GOAL`, GOAL being `reached` or `missed` and what was to
/// be reached.
#[derive(Clone, Debug, PartialEq, Parser)]
#[command(bin_name = "cargo bench -p lockstream-bench --bench scenarios --")]
pub(crate) struct Options {
    /// Those to run; all, if none is named.
    #[arg(value_name = "SCENARIO", value_parser = named("scenario", &Scenario::ALL, Scenario::name))]
    pub(crate) scenarios: Vec<Scenario>,
    /// On which server: redis or postgres.
    #[arg(long, value_name = "NAME", default_value = "redis", value_parser = named("store", &Store::ALL, Store::name))]
    pub(crate) store: Store,
    /// Which libraries; all of the store, if none is named.
    #[arg(long, value_name = "A,B", value_delimiter = ',', value_parser = named("library", &Lib::ALL, Lib::name))]
    pub(crate) libs: Vec<Lib>,
    /// How long each round of each library is measured, in seconds.
    #[arg(long, value_name = "N", default_value = "2", value_parser = number(0.1..=60.0))]
    pub(crate) secs: f64,
    /// How many rounds, the libraries taking turns in each.
    #[arg(long, value_name = "N", default_value = "3", value_parser = value_parser!(u8).range(1..=100))]
    pub(crate) rounds: u8,
    /// What clients of a cluster wait for an answer at the least, in milliseconds.
    #[arg(long, value_name = "MS", default_value = "1", value_parser = number(0.0..=100.0), allow_negative_numbers = true)]
    pub(crate) round_trip: f64,
    /// How long `cluster-100k` holds its leases, in seconds.
    #[arg(long, value_name = "SECS", default_value = "60", value_parser = number(1.0..=600.0))]
    pub(crate) hold: f64,
    /// Writes everything there, every round of it.
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
    /// Draws charts there, as SVG, of a run on Redis.
    #[arg(long, value_name = "DIR")]
    pub(crate) plot: Option<PathBuf>,
    /// Makes docs/speed.json, docs/speed.svg and the table in docs/speed.md of this run, which must be a whole one.
    #[arg(long, conflicts_with_all = ["scenarios", "libs"])]
    pub(crate) page: bool,
    /// Makes the latter two of docs/speed.json again, and runs nothing.
    #[arg(long)]
    pub(crate) redraw: bool,
    /// Cargo says this to every bench.
    #[arg(long, hide = true)]
    bench: bool,
}

pub(crate) fn parse(args: impl IntoIterator<Item = String>) -> Result<Options, Error> {
    let name = "scenarios".to_owned();
    let mut options = Options::try_parse_from(std::iter::once(name).chain(args))?;
    let refused = |why: String| Err(Options::command().error(ErrorKind::ValueValidation, why));
    let (libs, scenarios) = (Lib::of(options.store), Scenario::on(options.store));
    if options.store != Store::Redis {
        let of_redis = [(options.plot.is_some(), "--plot"), (options.page, "--page")];
        if let Some((_, option)) = of_redis.iter().find(|(is_said, _)| *is_said) {
            return refused(format!("{option} is of runs on Redis"));
        }
    }
    let store = options.store.name();
    if let Some(other) = options.libs.iter().find(|it| !libs.contains(it)) {
        return refused(format!("{} has no locks in {store}", other.name()));
    }
    if let Some(other) = options.scenarios.iter().find(|it| !scenarios.contains(it)) {
        let name = other.name();
        return refused(format!("{name} is not a scenario of --store {store}"));
    }
    options.libs = all_or(&options.libs, libs);
    options.scenarios = all_or(&options.scenarios, &scenarios);
    Ok(options)
}

/// What was named, once each; all, if nothing was.
fn all_or<T: Copy + PartialEq>(named: &[T], all: &[T]) -> Vec<T> {
    let mut once = Vec::new();
    for one in if named.is_empty() { all } else { named } {
        if !once.contains(one) {
            once.push(*one);
        }
    }
    once
}

/// One of those with a name.
pub(crate) fn named<T: Copy + Send + Sync>(
    what: &'static str,
    all: &'static [T],
    name: impl Fn(T) -> &'static str + Clone + Send + Sync,
) -> impl Fn(&str) -> Result<T, String> + Clone + Send + Sync {
    move |said| {
        let found = all.iter().find(|one| name(**one) == said);
        found.copied().ok_or_else(|| {
            let known: Vec<_> = all.iter().map(|one| name(*one)).collect();
            format!(
                "there is no {what} {said:?}; there are: {}",
                known.join(", ")
            )
        })
    }
}

/// A number from the first to the last of these.
pub(crate) fn number(
    range: RangeInclusive<f64>,
) -> impl Fn(&str) -> Result<f64, String> + Clone + Send + Sync {
    move |said| {
        let number = said.parse().ok().filter(|number| range.contains(number));
        let (least, most) = (range.start(), range.end());
        number.ok_or_else(|| format!("a number from {least} to {most} is wanted"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn say(line: &str) -> Result<Options, Error> {
        parse(line.split_whitespace().map(str::to_owned))
    }

    fn options(line: &str) -> Options {
        say(line).unwrap_or_else(|error| panic!("{line}: {error}"))
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
        assert!(options("--redraw").redraw);
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
            let error = say(line).expect_err(line).to_string();
            assert!(error.contains(names), "{line}: {error}");
        }
    }
}
