//! A job that runs once a period, on however many machines. Four of them start it in every period, some later than
//! others. The first one does it and keeps the key, so the others skip it.
//!
//! ```sh
//! cargo run --example cron                                    # a period of 1 s, four times, on a memory store
//! cargo run --example cron -- 10                              # a period of 10 s
//! REDIS_URL=redis://127.0.0.1/ cargo run --example cron       # on a server
//! ```
//!
//! [`Machine::run`] is the one to read. The machines are tasks here. Each has a registry of its own, so they exclude
//! each other as processes do.
//!
//! If a machine crashes in the middle of the job, the key is free when its ttl is over, and the next machine that
//! starts the job in that period does it again. Where that must not be, set the ttl to the period as well.

use std::cell::RefCell;
use std::error::Error as _;
use std::process::ExitCode;
use std::time::Duration;

use futures::future::{join_all, try_join_all};
use lockstream::prelude::*;
use lockstream::store::MemoryStore;
use lockstream::{BuildError, OnFinish, StoreError};
use tokio::time::{Instant, sleep, sleep_until};

const MACHINES: usize = 4;

/// For how many periods it goes on.
const PERIODS: u32 = 4;

/// A start is late by up to this part of a period: clocks differ, and schedulers are late.
const LATE: f64 = 0.1;

/// The key stays for this part of a period. That is less than a period by more than a start may be early, compared with
/// the one before, and the clocks may differ: else an early start finds the last period's key, and skips this period. It
/// is more than a start may be late: else a late machine does the job again.
const KEPT: f64 = 0.8;

/// How wide a period is in the picture.
const COLUMNS: f64 = 20.0;

/// Clocks do not run alike, and a server keeps whole milliseconds.
const DRIFT: Duration = Duration::from_millis(5);

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("usage: cron [SECONDS], with a period of 0.5 s to an hour; 1 if none is given")]
    Usage,
    #[error("the server in REDIS_URL cannot be used")]
    Server(#[from] StoreError),
    #[error(transparent)]
    Build(#[from] BuildError),
    #[error(transparent)]
    Lock(#[from] LockError),
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    match run().await {
        Ok(code) => code,
        Err(error) => {
            let cause = error.source().map(|cause| format!(": {cause}"));
            eprintln!("cron: {error}{}", cause.unwrap_or_default());
            ExitCode::from(if let Error::Usage = error { 2 } else { 1 })
        }
    }
}

fn period() -> Result<Duration, Error> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let seconds = match &arguments[..] {
        [] => 1.0,
        [seconds] => seconds.parse().map_err(|_| Error::Usage)?,
        _ => return Err(Error::Usage),
    };
    if (0.5..=3600.0).contains(&seconds) {
        Ok(Duration::from_secs_f64(seconds))
    } else {
        Err(Error::Usage)
    }
}

/// One of those that have the same job.
struct Machine<'a> {
    number: usize,
    locks: LockRegistry,
    period: Duration,
    log: &'a RefCell<Vec<Start>>,
}

/// One machine's start of the job.
struct Start {
    machine: usize,
    at: Instant,
    /// When the job began, if it was not skipped.
    began: Option<Instant>,
}

impl Machine<'_> {
    /// Starts the job in each period.
    async fn run(&self, beginning: Instant) -> Result<(), LockError> {
        let once_a_period = self
            .locks
            .obtain("report")
            // The time counts from the acquisition. A job that ends earlier keeps the key. After a crash the key is
            // free when its ttl is over. A job that takes longer keeps its lock: the lease is renewed while it runs.
            .on_finish(OnFinish::KeepFor(self.period.mul_f64(KEPT)))
            // A machine that finds the key skips this period, and does not wait.
            .wait(Duration::ZERO);
        for period in 0..PERIODS {
            let due = f64::from(period) + LATE * rand::random::<f64>();
            sleep_until(beginning + self.period.mul_f64(due)).await;
            let at = Instant::now();
            let job = self.report(beginning);
            let began = job.with_lock(&once_a_period).or_skip().await?;
            let machine = self.number;
            self.log.borrow_mut().push(Start { machine, at, began });
        }
        Ok(())
    }

    /// The job; gives when it began.
    async fn report(&self, beginning: Instant) -> Instant {
        let began = Instant::now();
        let since = began.duration_since(beginning).as_secs_f64();
        println!("  {since:5.1} s  machine {} did it", self.number);
        sleep(self.period / 50).await;
        began
    }
}

/// A registry for each machine, and where they are.
async fn registries() -> Result<(Vec<LockRegistry>, &'static str), Error> {
    let mut registries = Vec::new();
    let url = std::env::var("REDIS_URL").unwrap_or_default();
    if url.is_empty() {
        let store = MemoryStore::new();
        for _ in 0..MACHINES {
            registries.push(LockRegistry::builder(store.clone()).build()?);
        }
        return Ok((registries, "on a memory store (set REDIS_URL for a server)"));
    }
    for _ in 0..MACHINES {
        let registry = LockRegistry::builder_for(&url)?.prefix("cron").build()?;
        registry.ping().await?;
        registries.push(registry);
    }
    Ok((registries, "on the server in REDIS_URL"))
}

async fn run() -> Result<ExitCode, Error> {
    let period = period()?;
    let (registries, place) = registries().await?;
    println!("{MACHINES} machines {place}; once in {period:?}, for {PERIODS} periods\n");
    let log = RefCell::default();
    let machines = registries
        .into_iter()
        .zip(1..)
        .map(|(locks, number)| Machine {
            number,
            locks,
            period,
            log: &log,
        });
    let machines: Vec<Machine<'_>> = machines.collect();
    let beginning = Instant::now();
    try_join_all(machines.iter().map(|machine| machine.run(beginning))).await?;
    join_all(machines.iter().map(|machine| machine.locks.shutdown())).await;
    Ok(report(&log.borrow(), beginning, period))
}

/// A line for each machine, and how far apart the runs were.
fn report(log: &[Start], beginning: Instant, period: Duration) -> ExitCode {
    println!();
    for machine in 1..=MACHINES {
        let mut line = vec!['·'; COLUMNS as usize * PERIODS as usize];
        for start in log.iter().filter(|start| start.machine == machine) {
            let at = start.began.unwrap_or(start.at) - beginning;
            let column = at.as_secs_f64() / period.as_secs_f64() * COLUMNS;
            // A start that was late may be beyond the end.
            if let Some(cell) = line.get_mut(column as usize) {
                *cell = if start.began.is_some() { '█' } else { '-' };
            }
        }
        let line: String = line.into_iter().collect();
        println!("  machine {machine}  {line}");
    }
    println!("             █ did it   - skipped it   (a period is {COLUMNS} columns)\n");

    let runs = log
        .iter()
        .filter_map(|start| Some((start.began?, start.at)));
    let mut runs: Vec<(Instant, Instant)> = runs.collect();
    runs.sort();
    let skipped = log.len() - runs.len();
    println!("  done {} times, skipped {skipped} times", runs.len());
    let mut right = !runs.is_empty();
    for pair in runs.windows(2) {
        let ((before, started), (next, _)) = (pair[0], pair[1]);
        println!(
            "  begun {} ms after the run before",
            (next - before).as_millis()
        );
        // The key was acquired between the start and the beginning of the job, and stays from then on.
        right &= next - started + DRIFT >= period.mul_f64(KEPT);
    }
    if right {
        return ExitCode::SUCCESS;
    }
    println!("  no run at all, or two that are too close");
    ExitCode::FAILURE
}
