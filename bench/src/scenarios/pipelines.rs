//! `pipeline-*`: a stream whose items have locks of their own, as `buffer_keyed` runs it and as `buffer_unordered` does.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::{Stream, StreamExt, stream};
use lockstream::{FutureLockExt, LockError, LockRegistry, StreamLockExt};
use serde::{Deserialize, Serialize};
use tokio::time::sleep;

use super::{Round, Scenario};
use crate::figures::{Figure, percentile};
use crate::libs::{Outcome, told};
use crate::worker::{Boss, Job, Worker, go, say};

/// So many items work at a time.
const WORKING: usize = 16;

const KEYS: usize = 1_000;

/// How long an item works on average.
const WORK: Duration = Duration::from_millis(1);

/// Of so many items one belongs to the key that others hold.
const BLOCKED_EVERY: u64 = 100;

/// The others hold it for so long, and leave it for so long.
const HALF: Duration = Duration::from_millis(500);

/// Before the window that is measured.
const LEAD: Duration = Duration::from_millis(200);

/// The stretch in which calls are counted, and rates are not taken.
const COUNTED_SECS: f64 = 1.0;

const PATIENCE: Duration = Duration::from_secs(20);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Keys {
    Uniform,
    /// By Zipf's law.
    Skewed,
}

/// One stream that is run.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Run {
    is_keyed: bool,
    keys: Keys,
    /// Whether some of its items belong to one key.
    has_busy_key: bool,
    /// Whether others hold that.
    is_blocked: bool,
    secs: f64,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Ran {
    items: f64,
    secs: f64,
    /// How long 99 of 100 items stayed at most, in microseconds.
    p99: f64,
}

impl Ran {
    fn rate(self) -> f64 {
        self.items / self.secs
    }
}

// ---- the bench's half

pub(super) fn round(round: &mut Round<'_>) -> Outcome<Vec<Figure>> {
    let mut workers = [round.hire(0, round.secs)?];
    go(&mut workers)?;
    let [mut worker] = workers;
    let is_blocked = round.scenario == Scenario::PipelineBlocked;
    let keyed = Run {
        is_keyed: true,
        keys: match round.scenario {
            Scenario::PipelineSkewed => Keys::Skewed,
            _ => Keys::Uniform,
        },
        has_busy_key: is_blocked,
        is_blocked,
        secs: round.secs,
    };
    let unordered = Run {
        is_keyed: false,
        ..keyed
    };
    let unblocked = Run {
        is_blocked: false,
        ..keyed
    };
    let (ours, theirs) = (ask(&mut worker, keyed)?, ask(&mut worker, unordered)?);
    let mut figures = vec![
        Figure::new("keyed", ours.rate(), "items/s"),
        Figure::new("unordered", theirs.rate(), "items/s"),
        Figure::new("keyed-p99", ours.p99, "us"),
        Figure::new("unordered-p99", theirs.p99, "us"),
    ];
    let mut basis = theirs.rate();
    if is_blocked {
        basis = ask(&mut worker, unblocked)?.rate();
        figures.push(Figure::new("unblocked", basis, "items/s"));
    }
    figures.push(Figure::new("ratio", ours.rate() / basis, "of it"));
    let ours = calls(round, &mut worker, keyed)?;
    let theirs = calls(round, &mut worker, unordered)?;
    figures.push(Figure::new("keyed-calls", ours, "calls/item"));
    figures.push(Figure::new("unordered-calls", theirs, "calls/item"));
    figures.push(Figure::new("calls-ratio", ours / theirs, "of it"));
    Ok(figures)
}

fn ask(worker: &mut Worker, run: Run) -> Outcome<Ran> {
    let said = serde_json::to_string(&run).map_err(told("a run"))?;
    worker.tell(&format!("run {said}"))?;
    worker.result("ran", Duration::from_secs_f64(run.secs) + PATIENCE)
}

fn calls(round: &mut Round<'_>, worker: &mut Worker, run: Run) -> Outcome<f64> {
    let count = round.server.count()?;
    let secs = COUNTED_SECS;
    let ran = ask(worker, Run { secs, ..run })?;
    // Also those of the items before the window.
    let each = ran.items * (1.0 + LEAD.as_secs_f64() / secs);
    Ok(round.server.counted(count)? as f64 / each)
}

// ---- the process's half

pub(super) async fn work(job: &Job, mut boss: Boss) -> Outcome<()> {
    let connect = async || {
        let registry = LockRegistry::connect(&job.url).await;
        registry.map_err(told("connect"))
    };
    let (here, there) = (connect().await?, connect().await?);
    let skewed = zipf();
    boss.ready().await?;
    loop {
        let run: Run = serde_json::from_str(&boss.hear("run").await?).map_err(told("run"))?;
        let others = run.is_blocked.then(|| tokio::spawn(hold(there.clone())));
        let mut dice = Dice(7);
        let items = stream::iter(0_u64..).map(|number| {
            let key = match run.keys {
                _ if run.has_busy_key && number.is_multiple_of(BLOCKED_EVERY) => KEYS,
                Keys::Uniform => (dice.next() * KEYS as f64) as usize,
                Keys::Skewed => {
                    let at = dice.next();
                    skewed.partition_point(|sum| *sum < at)
                }
            };
            let work = WORK.mul_f64(-(1.0 - dice.next()).ln());
            let began = Instant::now();
            let item = async move {
                sleep(work).await;
                began
            };
            let lock = here.obtain(format!("pipeline-{key}"));
            item.with_lock(lock.wait(Duration::MAX))
        });
        let ran = match run.is_keyed {
            true => tally(items.buffer_keyed(WORKING), run.secs).await,
            false => tally(items.buffer_unordered(WORKING), run.secs).await,
        };
        if let Some(others) = others {
            others.abort();
            let _ = others.await;
        }
        // What was dropped is released.
        while here.in_use() + there.in_use() > 0 {
            sleep(Duration::from_millis(1)).await;
        }
        say("ran", &ran?);
    }
}

async fn tally(items: impl Stream<Item = Result<Instant, LockError>>, secs: f64) -> Outcome<Ran> {
    let begin = Instant::now() + LEAD;
    let end = begin + Duration::from_secs_f64(secs);
    let mut stays = Vec::new();
    let mut items = std::pin::pin!(items.take_until(tokio::time::sleep_until(end.into())));
    while let Some(item) = items.next().await {
        let (began, now) = (item.map_err(told("an item"))?, Instant::now());
        if now >= begin {
            stays.push((now - began).as_secs_f64() * 1e6);
        }
    }
    Ok(Ran {
        items: stays.len() as f64,
        secs,
        p99: percentile(&stays, 99.0).ok_or("stalled: no item was done")?,
    })
}

/// The others hold the busy key for half of each second.
async fn hold(there: LockRegistry) {
    let lock = Arc::new(there.obtain(format!("pipeline-{KEYS}")).wait(Duration::MAX));
    loop {
        if let Ok(lease) = lock.lease().await {
            sleep(HALF).await;
            let _ = lease.release().await;
        }
        sleep(HALF).await;
    }
}

/// The sums of the shares of all keys, up to each.
fn zipf() -> Vec<f64> {
    let shares = (1..=KEYS).map(|rank| (rank as f64).powf(-0.8));
    let all: f64 = shares.clone().sum();
    let sums = shares.scan(0.0, |sum, share| {
        *sum += share / all;
        Some(*sum)
    });
    sums.collect()
}

/// SplitMix64, as numbers from 0 to 1. The same streams in all runs.
struct Dice(u64);

impl Dice {
    fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) >> 11) as f64 / (1_u64 << 53) as f64
    }
}
