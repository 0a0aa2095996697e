//! `many-keys`: what is left of a million different keys that were locked once each.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use lockstream::LockRegistry;
use serde::{Deserialize, Serialize};
use tokio::task::JoinSet;

use super::Round;
use crate::clock;
use crate::figures::Figure;
use crate::libs::{Outcome, told};
use crate::worker::{Boss, Job, go, say};

const KEYS: usize = 1_000_000;
const TASKS: usize = 1_024;

/// After so many the process has all the memory that it works with; what it gains later is left over.
const FIRST: usize = 100_000;

const PATIENCE: Duration = Duration::from_secs(180);

#[derive(Serialize, Deserialize)]
struct Over {
    secs: f64,
    entries: usize,
    bytes: f64,
}

pub(super) fn round(round: &mut Round<'_>) -> Outcome<Vec<Figure>> {
    let mut workers = [round.hire(0, round.secs)?];
    go(&mut workers)?;
    let [mut worker] = workers;
    let over: Over = worker.result("done", PATIENCE)?;
    let keys = round.keys_left()? as f64;
    let entries = over.entries as f64;
    Ok(vec![
        Figure::new("left", entries + keys, "entries+keys"),
        Figure::new("left-entries", entries, "entries"),
        Figure::new("left-keys", keys, "keys"),
        Figure::new("left-bytes", over.bytes, "bytes/key"),
        Figure::new("pairs", KEYS as f64 / over.secs, "pairs/s"),
    ])
}

pub(super) async fn work(job: &Job, mut boss: Boss) -> Outcome<()> {
    let registry = LockRegistry::connect(&job.url).await;
    let registry = registry.map_err(told("connect"))?;
    boss.ready().await?;
    let begin = Instant::now();
    lock_each(&registry, 0..FIRST).await?;
    let before = clock::resident_bytes()?;
    lock_each(&registry, FIRST..KEYS).await?;
    let secs = begin.elapsed().as_secs_f64();
    let bytes = clock::resident_bytes()?.saturating_sub(before);
    say(
        "done",
        &Over {
            secs,
            entries: registry.in_use(),
            bytes: bytes as f64 / (KEYS - FIRST) as f64,
        },
    );
    // The process may not end before the bench has looked at what it left on the server.
    boss.hear("end").await?;
    Ok(())
}

async fn lock_each(registry: &LockRegistry, keys: std::ops::Range<usize>) -> Outcome<()> {
    let next = Arc::new(AtomicUsize::new(keys.start));
    let mut tasks = JoinSet::new();
    for _ in 0..TASKS {
        let (registry, next, end) = (registry.clone(), Arc::clone(&next), keys.end);
        tasks.spawn(async move {
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                if number >= end {
                    return Ok(());
                }
                let lock = registry.obtain(format!("many-{number}"));
                let lease = lock.lease().await.map_err(told("lease"))?;
                lease.release().await.map_err(told("release"))?;
            }
        });
    }
    while let Some(task) = tasks.join_next().await {
        let outcome: Outcome<()> = task.map_err(|panic| panic.to_string())?;
        outcome?;
    }
    Ok(())
}
