//! Thousands of registries in a few processes, each with a connection of its own. Each scenario has a
//! server of its own, since a fleet may keep one busy beyond its own end.
//!
//! | file | what it asks |
//! |---|---|
//! | `crash.rs` | all wait for a key whose holder is killed: how soon is each served? |
//! | `timeout.rs` | all waits end at once: for how long does the server stand still? |
//! | `restart.rs` | the server is away for two seconds: how do all come back? |
//! | `ping.rs` | how long does a bystander wait for an answer? |

mod crash;
mod ping;
mod restart;
mod timeout;

use std::time::{Duration, Instant};

use super::{Round, Scenario, leases};
use crate::figures::Figure;
use crate::libs::Outcome;
use crate::server::Server;
use crate::worker::{Boss, Job, Worker};

/// Of how many processes a fleet consists.
const PROCESSES: usize = 4;

/// How long a fleet may take to connect, and to do what all of it does at once.
const PATIENCE: Duration = Duration::from_secs(60);

/// The time over which registries begin to wait: how they all connect at once is another question.
const ARRIVAL: Duration = Duration::from_secs(10);

/// The processes of a fleet have role 0.
const FLEET: usize = 0;

pub(super) fn round(round: &mut Round<'_>) -> Outcome<Vec<Figure>> {
    match round.scenario {
        Scenario::FleetCrash => crash::round(round),
        Scenario::FleetTimeout => timeout::round(round),
        Scenario::FleetRestart => restart::round(round),
        other => unreachable!("{} is in another file", other.name()),
    }
}

pub(super) async fn work(job: &Job, boss: Boss) -> Outcome<()> {
    match (job.scenario, job.role) {
        (Scenario::FleetCrash, FLEET) => crash::work(&job.url, boss).await,
        (Scenario::FleetTimeout, FLEET) => timeout::work(&job.url, boss).await,
        _ => leases::work(&job.url, boss).await,
    }
}

fn hire(round: &Round<'_>, url: &str) -> Outcome<Vec<Worker>> {
    (0..PROCESSES)
        .map(|_| round.hire_at(url, FLEET, round.secs))
        .collect()
}

/// When that registry of a process with so many begins to wait, after the first.
fn arrival(number: usize, count: usize) -> Duration {
    ARRIVAL * number as u32 / count as u32
}

/// Until so many registries are in the queue of a lock.
fn wait_for_queue(server: &mut Server, lock: &str, count: usize, within: Duration) -> Outcome<()> {
    let begin = Instant::now();
    let mut most = 0;
    loop {
        let keys: Vec<String> = server.ask(&["KEYS", &format!("{{lock:{lock}}}:~queue*")])?;
        let mut queued = 0;
        for key in &keys {
            queued += server.ask::<usize>(&["ZCARD", key])?;
        }
        most = most.max(queued);
        if most >= count {
            return Ok(());
        }
        if begin.elapsed() > within {
            return Err(format!("{most} of {count} registries waited, never more"));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}
