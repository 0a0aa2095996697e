//! `held-100k`: what a hundred thousand leases cost that one process holds and renews.

use std::time::{Duration, Instant};

use futures::{StreamExt, TryStreamExt, stream};
use lockstream::store::RedisStore;
use lockstream::{Lease, LockRegistry, Renewal};
use serde::{Deserialize, Serialize};

use super::Round;
use crate::clock;
use crate::figures::Figure;
use crate::libs::{Outcome, told};
use crate::monitor::Monitor;
use crate::worker::{Boss, Job, go, say};

pub(super) const LEASES: usize = 100_000;

/// So many are asked for at once.
const AT_ONCE: usize = 1_000;

/// A third of the default ttl: in so much time each lease is renewed once.
pub(super) const PERIOD: Duration = Duration::from_secs(10);

pub(super) const PATIENCE: Duration = Duration::from_secs(60);

#[derive(Serialize, Deserialize)]
struct Held {
    start_secs: f64,
    bytes: f64,
}

#[derive(Serialize, Deserialize)]
struct Over {
    /// While they were held: the processor time that the process used.
    used_secs: f64,
    shutdown_secs: f64,
}

pub(super) fn round(round: &mut Round<'_>) -> Outcome<Vec<Figure>> {
    let mut workers = [round.hire(0, round.secs)?];
    go(&mut workers)?;
    let [mut worker] = workers;
    let held: Held = worker.result("held", PATIENCE)?;

    // Asked outside of the count, which counts what the bench asks, too.
    let before = round.server.processor_secs()?;
    let monitor = Monitor::begin(round.server.redis())?;
    let begin = Instant::now();
    worker.tell("watch")?;
    worker.expect("watched", PERIOD + PATIENCE)?;
    let secs = begin.elapsed().as_secs_f64();
    let commands = monitor.end(round.server.redis())?;
    let after = round.server.processor_secs()?;

    worker.tell("end")?;
    let over: Over = worker.result("done", PATIENCE)?;
    let left = round.keys_left()?;
    // The count itself is the server's work, too: its share here is an upper bound.
    Ok(vec![
        Figure::new("bytes", held.bytes, "bytes/lease"),
        Figure::new("cpu", over.used_secs / secs, "cores"),
        Figure::new("server-cpu", (after - before) / secs, "cores"),
        Figure::new("commands", commands as f64 / secs, "commands/s"),
        Figure::new("start", held.start_secs, "s"),
        Figure::new("shutdown", over.shutdown_secs, "s"),
        Figure::new("left", left as f64, "keys"),
    ])
}

pub(super) async fn work(job: &Job, mut boss: Boss) -> Outcome<()> {
    let store = RedisStore::connect(&job.url).await;
    let store = store.map_err(told("connect"))?;
    let registry = LockRegistry::builder(store)
        .build()
        .map_err(told("build"))?;
    drop(take(&registry, LEASES).await?);
    boss.ready().await?;

    let before = clock::resident_bytes()?;
    let begin = Instant::now();
    let leases = take_all(&registry).await?;
    let start_secs = begin.elapsed().as_secs_f64();
    // What was needed only for taking them may be released first.
    tokio::time::sleep(Duration::from_millis(300)).await;
    let bytes = clock::resident_bytes()?.saturating_sub(before) as f64 / LEASES as f64;
    say("held", &Held { start_secs, bytes });

    boss.hear("watch").await?;
    let used = clock::processor_time();
    tokio::time::sleep(PERIOD).await;
    let used = clock::processor_time() - used;
    say("watched", &());
    let lost = leases.iter().filter(|lease| !lease.is_valid()).count();
    if lost > 0 {
        return Err(format!("{lost} of {LEASES} leases were lost"));
    }

    boss.hear("end").await?;
    let begin = Instant::now();
    registry.shutdown().await;
    let over = Over {
        used_secs: used.as_secs_f64(),
        shutdown_secs: begin.elapsed().as_secs_f64(),
    };
    say("done", &over);
    Ok(())
}

pub(super) async fn take_all(registry: &LockRegistry) -> Outcome<Vec<Lease>> {
    stream::iter(0..LEASES)
        .map(|number| take(registry, number))
        .buffer_unordered(AT_ONCE)
        .try_collect()
        .await
}

async fn take(registry: &LockRegistry, number: usize) -> Outcome<Lease> {
    let lock = registry.obtain(format!("held-{number}"));
    let lock = lock.renewal(Renewal::watchdog());
    lock.lease().await.map_err(told("lease"))
}
