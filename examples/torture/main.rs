//! Whatever breaks: child processes lock and unlock, wait and are dropped, pass and renew, over a handful of keys, while
//! a plan made from the seed kills and stops them, breaks their wires, and does to the server what can befall one.
//!
//! ```sh
//! cargo run --release --all-features --example torture -- --minutes 5 --seed 1 --deployment sentinel
//! cargo run --release --all-features --example torture -- --seconds 30 --seed 1 --plan  # what would happen, and when
//! ```
//!
//! Exit code 0: nothing was found. 1: something was; it is told, with the seed, and the logs are kept. 2: the arguments.
//! 3: something was late, but the machine stood still or the servers were slow, so the run says nothing.
//!
//! | file | question it answers |
//! |---|---|
//! | `plan.rs`, `dice.rs` | what breaks, and when? |
//! | `callers.rs` | what do the callers do meanwhile? |
//! | `child.rs` | how is a child a process of its own? |
//! | `log.rs` | what does it write down? |
//! | `resource.rs`, `table.rs` | what do the callers write to, and what does it refuse? |
//! | `deployments/` | which servers are there, what can befall them, and what do they promise? |
//! | `run.rs`, `children.rs`, `row.rs` | how do they all come together? |
//! | `judge/` | what was seen that must not be? |
//! | `report.rs` | what came out? |

mod callers;
mod child;
mod children;
mod deployments;
mod dice;
mod judge;
mod log;
mod plan;
mod report;
mod resource;
mod row;
mod run;
#[path = "../../tests/support/mod.rs"]
mod support;
mod table;

use std::fmt::Display;
use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

use self::child::Role;
use self::run::Wish;

const USAGE: &str =
    "usage: torture [--minutes N | --seconds N] [--seed N] [--deployment NAME] [--plan]";

/// The exit code of such a run.
const SAYS_NOTHING: u8 = 3;

fn main() -> ExitCode {
    let mut arguments: Vec<String> = std::env::args().skip(1).collect();
    if arguments.first().is_some_and(|first| first == Role::MARK) {
        arguments.remove(0);
        let role = Role::parse(&arguments).expect("the parent gives what a child needs");
        return role.play();
    }
    let (wish, plan_only) = match parse(&arguments) {
        Ok(wish) => wish,
        Err(fault) => {
            eprintln!("torture: {fault}\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    let Some(deployment) = deployments::start(&wish.deployment, run::SLOTS) else {
        let names = deployments::NAMES.join(", ");
        eprintln!(
            "torture: there is no deployment {:?}; there are: {names}\n{USAGE}",
            wish.deployment
        );
        return ExitCode::from(2);
    };
    if plan_only {
        for stroke in wish.plan() {
            say(stroke);
        }
        return ExitCode::SUCCESS;
    }
    say(format_args!(
        "{} for {:?}, seed {}: {} children, {} keys",
        wish.deployment,
        wish.length,
        wish.seed,
        run::SLOTS,
        callers::KEYS.len()
    ));
    let report = run::run(&wish, deployment);
    say(format_args!("\n{report}"));
    if report.is_clean() {
        say(format_args!(
            "{}, seed {}: clean",
            wish.deployment, wish.seed
        ));
        return ExitCode::SUCCESS;
    }
    if report.says_nothing() {
        say(format_args!(
            "{}, seed {}: says nothing, for the machine stood still for {:.1?}, and answers were late by {:.1?}: run it again",
            wish.deployment, wish.seed, report.stood_still, report.late_answers
        ));
        return ExitCode::from(SAYS_NOTHING);
    }
    say(format_args!(
        "{}, seed {}: BREACHED",
        wish.deployment, wish.seed
    ));
    if let Some(folder) = &report.folder {
        say(format_args!("the logs are kept in {}", folder.display()));
    }
    ExitCode::FAILURE
}

/// A line for whoever reads; a pipe that nobody reads any more ends no run.
pub(crate) fn say(line: impl Display) {
    let _ = writeln!(std::io::stdout(), "{line}");
}

/// What is wished, and whether only to be told the plan.
fn parse(arguments: &[String]) -> Result<(Wish, bool), String> {
    let mut wish = Wish {
        deployment: "standalone".to_owned(),
        length: Duration::from_secs(60),
        seed: 1,
    };
    let mut plan_only = false;
    let mut arguments = arguments.iter();
    while let Some(name) = arguments.next() {
        if name == "--plan" {
            plan_only = true;
            continue;
        }
        if !["--minutes", "--seconds", "--seed", "--deployment"].contains(&&**name) {
            return Err(format!("{name:?} is no option"));
        }
        let value = arguments.next().ok_or(format!("{name} wants a value"))?;
        let number = || {
            let number = value.parse::<u64>();
            number.map_err(|_| format!("{name} wants a whole number, not {value:?}"))
        };
        match &**name {
            "--minutes" => wish.length = Duration::from_secs(number()?.saturating_mul(60)),
            "--seconds" => wish.length = Duration::from_secs(number()?),
            "--seed" => wish.seed = number()?,
            _ => wish.deployment.clone_from(value),
        }
    }
    if wish.length.is_zero() || wish.length > Duration::from_secs(24 * 60 * 60) {
        return Err("a run lasts from a second to a day".to_owned());
    }
    Ok((wish, plan_only))
}
