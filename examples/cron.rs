//! At most once a minute, on however many machines: four of them look for work a few times in each
//! period, and in each one does it. The key of who did it stays until the period is over.
//!
//! ```sh
//! REDIS_URL=redis://127.0.0.1/ cargo run --example cron          # a period of a minute, for four minutes
//! REDIS_URL=redis://127.0.0.1/ cargo run --example cron -- 2     # a period of 2 s
//! cargo run --example cron -- 2                                  # without a server: on a memory store
//! ```
//!
//! [`Machine::run`] is the one to read. The machines are tasks here, each with a registry of its own,
//! which to others is a process of its own; run it in two terminals for eight of them.
//!
//! What it does not promise: that the job is done *at least* once. Whoever begins it and crashes
//! leaves the key, and the next run comes a period later.

use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::future::join_all;
use lockstream::prelude::*;
use lockstream::store::{MemoryStore, RedisStore};
use lockstream::{BuildError, OnFinish, StoreError};
use tokio::time::{Instant, sleep};

const MACHINES: usize = 4;

/// For how many periods it goes on.
const PERIODS: u32 = 4;

/// How often each machine looks within a period: only one who looks can find that it is over.
const LOOKS: u32 = 5;

/// How wide a period is in the picture.
const COLUMNS: f64 = 20.0;

/// How long the job takes, as a part of a period: much less, or it would be dropped when that is over.
const JOB: u32 = 50;

/// Clocks do not run alike, and a server keeps whole milliseconds.
const DRIFT: Duration = Duration::from_millis(5);

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("usage: cron [SECONDS], with a period of 0.5 s to an hour; 60 if none is given")]
    Usage,
    #[error("the server in REDIS_URL cannot be used")]
    Server(#[from] StoreError),
    #[error(transparent)]
    Build(#[from] BuildError),
    #[error(transparent)]
    Lock(#[from] LockError),
    #[error("interrupted")]
    Interrupted,
}

#[tokio::main]
async fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let ended = match period(&arguments) {
        Ok(period) => run(period).await,
        Err(error) => Err(error),
    };
    match ended {
        Ok(code) => code,
        Err(error) => {
            let causes =
                std::iter::successors(Some(&error as &dyn std::error::Error), |it| it.source());
            let told: Vec<_> = causes.map(ToString::to_string).collect();
            eprintln!("cron: {}", told.join(": "));
            match error {
                Error::Usage => ExitCode::from(2),
                Error::Interrupted => ExitCode::from(130),
                _ => ExitCode::FAILURE,
            }
        }
    }
}

fn period(arguments: &[String]) -> Result<Duration, Error> {
    let seconds = match arguments {
        [] => 60.0,
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
struct Machine {
    number: usize,
    locks: LockRegistry,
    period: Duration,
    log: Log,
}

/// All that was done and not done.
type Log = Arc<Mutex<Vec<Look>>>;

/// One machine's look for something to do.
struct Look {
    machine: usize,
    at: Instant,
    /// When the job began, if it was to be done.
    began: Option<Instant>,
}

impl Machine {
    /// Looks a few times in each period whether there is something to do, and does it.
    async fn run(&self, until: Instant) -> Result<(), LockError> {
        let once_a_period = self
            .locks
            .obtain("report")
            // A ttl that is set is not renewed: the key goes when the period is over, whether its holder lives or not,
            .ttl(self.period)
            // and not before, though the job is done.
            .on_finish(OnFinish::LetExpire)
            // Whoever finds the key has nothing to do, and does not wait.
            .wait(Duration::ZERO);
        // Each machine has its own times, as on a network whose clocks nobody compares.
        let pause = self.period / LOOKS;
        sleep(pause.mul_f64(rand::random())).await;
        while Instant::now() < until {
            let at = Instant::now();
            let began = self.report().with_lock(&once_a_period).or_skip().await?;
            let machine = self.number;
            self.log().push(Look { machine, at, began });
            sleep(pause).await;
        }
        Ok(())
    }

    /// The job; gives when it began.
    async fn report(&self) -> Instant {
        let began = Instant::now();
        sleep(self.period / JOB).await;
        began
    }

    fn log(&self) -> std::sync::MutexGuard<'_, Vec<Look>> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A registry for each machine, and where they are.
async fn registries() -> Result<(Vec<LockRegistry>, &'static str), Error> {
    let url = std::env::var("REDIS_URL").ok();
    let mut registries = Vec::new();
    let Some(url) = url.filter(|url| !url.is_empty()) else {
        let store = MemoryStore::new();
        for _ in 0..MACHINES {
            registries.push(LockRegistry::builder(store.clone()).build()?);
        }
        return Ok((registries, "on a memory store (set REDIS_URL for a server)"));
    };
    for _ in 0..MACHINES {
        let store = RedisStore::connect(&*url).await?;
        registries.push(LockRegistry::builder(store).prefix("cron").build()?);
    }
    Ok((registries, "on the server in REDIS_URL"))
}

async fn run(period: Duration) -> Result<ExitCode, Error> {
    let (registries, place) = registries().await?;
    let stop = interrupted();
    println!("{MACHINES} machines {place}; at most once in {period:?}, for {PERIODS} periods\n");
    let log = Log::default();
    let began = Instant::now();
    let until = began + period * PERIODS;
    let machines: Vec<Machine> = registries
        .into_iter()
        .enumerate()
        .map(|(number, locks)| Machine {
            number,
            locks,
            period,
            log: log.clone(),
        })
        .collect();
    let ended = tokio::select! {
        ended = join_all(machines.iter().map(|machine| machine.run(until))) => Ok(ended),
        () = stop => Err(Error::Interrupted),
    };
    join_all(machines.iter().map(|machine| machine.locks.shutdown())).await;
    for machine in ended? {
        machine?;
    }
    let log = log.lock().unwrap_or_else(PoisonError::into_inner);
    Ok(report(&log, began, period))
}

/// A lane for each machine, and how far apart the runs were.
fn report(log: &[Look], began: Instant, period: Duration) -> ExitCode {
    for machine in 0..MACHINES {
        let column = |at: Instant| {
            let periods = at.duration_since(began).as_secs_f64() / period.as_secs_f64();
            (periods * COLUMNS) as usize
        };
        let mut lane = vec!['·'; column(began + period * PERIODS)];
        for look in log.iter().filter(|look| look.machine == machine) {
            // The last job may have begun a little late.
            if let Some(cell) = lane.get_mut(column(look.began.unwrap_or(look.at))) {
                *cell = if look.began.is_some() { '█' } else { '-' };
            }
        }
        let lane: String = lane.into_iter().collect();
        println!("  machine {}  {lane}", machine + 1);
    }
    println!(
        "             █ did it   - looked, and had nothing to do   (a period is {COLUMNS} columns)\n"
    );

    let runs = log.iter().filter_map(|look| Some((look.at, look.began?)));
    let mut runs: Vec<(Instant, Instant)> = runs.collect();
    runs.sort();
    println!(
        "  done {} times, skipped {} times",
        runs.len(),
        log.len() - runs.len()
    );
    let mut right = !runs.is_empty();
    for pair in runs.windows(2) {
        let [(looked, before), (_, next)] = pair else {
            continue;
        };
        println!(
            "  begun {} ms after the run before",
            next.duration_since(*before).as_millis()
        );
        // The key was won some time between the look and the beginning, and lasts a period from then on.
        right &= next.duration_since(*looked) + DRIFT >= period;
    }
    if right {
        ExitCode::SUCCESS
    } else {
        println!("  that is not once, or too often");
        ExitCode::FAILURE
    }
}

/// Resolves at a Ctrl-C or SIGTERM, and at one that came before it is polled.
fn interrupted() -> impl Future<Output = ()> {
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        let kinds = [SignalKind::interrupt(), SignalKind::terminate()];
        let [mut int, mut term] = kinds.map(|kind| signal(kind).expect("it can be caught"));
        async move {
            tokio::select! {
                _ = int.recv() => {}
                _ = term.recv() => {}
            }
        }
    }
    #[cfg(not(unix))]
    async {
        let _ = tokio::signal::ctrl_c().await;
    }
}
