//! `handover`: from the call of release in one process until another, which has waited at least
//! 300 ms, holds the lock.
//!
//! Each hand-over has a key of its own and a time-table that both processes know, so that nothing
//! but the lock goes between them.

use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::task::JoinSet;

use super::{Round, connect};
use crate::clock::{self, MILLISECOND, Nanos};
use crate::figures::{Figure, percentile};
use crate::libs::{Library, Outcome, Passes};
use crate::worker::{Boss, Job, go, say};

/// From one hand-over to the next.
const SPACING: Nanos = 10 * MILLISECOND;

/// When the waiter asks, and when the holder releases at the earliest, after the holder has asked.
const ASK: Nanos = 30 * MILLISECOND;
const RELEASE: Nanos = 350 * MILLISECOND;

/// Releases are spread over so much more: else one who looks every 100 ms would always do so at the
/// same moment after the release.
const SPREAD: Nanos = 200 * MILLISECOND;

const LONG: Nanos = 300 * MILLISECOND;

/// For those that find out late that the lock is free.
const LATE: Nanos = 700 * MILLISECOND;

/// One hand-over as one of the two has seen it; 0 is never.
///
/// The holder notes when it held and when it released, the waiter when it asked and when it held.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
struct Seen {
    first: Nanos,
    second: Nanos,
}

/// When the holder of that number releases, after it has asked: by the golden ratio, so that any few
/// of them in a row are spread evenly.
fn release_after(number: usize) -> Nanos {
    RELEASE + number as Nanos * 123_606_798 % SPREAD
}

fn count(secs: f64) -> usize {
    (clock::nanos(secs) / SPACING).max(1) as usize
}

pub(super) fn round(round: &mut Round<'_>) -> Outcome<Vec<Figure>> {
    let mut pair = [round.hire(0, round.secs)?, round.hire(1, round.secs)?];
    go(&mut pair)?;
    let within = Duration::from_nanos(clock::nanos(round.secs) + RELEASE + SPREAD + LATE);
    let within = within + Duration::from_secs(10);
    let [mut holder, mut waiter] = pair;
    let released: Vec<Seen> = holder.result("done", within)?;
    let taken: Vec<Seen> = waiter.result("done", within)?;
    let times = times(&released, &taken)?;
    let mut figures = Vec::new();
    for (name, percent) in [("p50", 50.0), ("p99", 99.0)] {
        figures.extend(percentile(&times, percent).map(|us| Figure::new(name, us, "us")));
    }
    figures.push(Figure::new("samples", times.len() as f64, "hand-overs"));
    Ok(figures)
}

/// In µs, of those that went by the time-table. One that never came is a failure.
fn times(released: &[Seen], taken: &[Seen]) -> Outcome<Vec<f64>> {
    let mut times = Vec::new();
    for (holder, waiter) in released.iter().zip(taken) {
        let by_the_table = holder.first > 0
            && holder.second > 0
            && waiter.first > holder.first
            && holder.second >= waiter.first + LONG;
        if !by_the_table {
            continue;
        }
        if waiter.second == 0 {
            let late = LATE / MILLISECOND;
            return Err(format!("a waiter had no lock {late} ms after its release"));
        }
        if waiter.second < holder.second {
            return Err("a waiter held the lock before it was released".to_owned());
        }
        times.push((waiter.second - holder.second) as f64 / 1e3);
    }
    if times.len() * 2 < released.len() {
        let (few, all) = (times.len(), released.len());
        return Err(format!("only {few} of {all} went by the time-table"));
    }
    Ok(times)
}

pub(super) async fn work<L: Library>(job: &Job, mut boss: Boss) -> Outcome<()> {
    let lib: Arc<L> = Arc::new(connect(job, Passes::Default, count(job.secs)).await?);
    let all = count(job.secs);
    let begin = boss.ready().await?;
    let mut tasks = JoinSet::new();
    for number in 0..all {
        let lib = Arc::clone(&lib);
        let at = begin + number as Nanos * SPACING;
        let is_holder = job.role == 0;
        tasks.spawn(async move {
            let lock = lib.lock(&format!("handover-{number}"));
            let seen = if is_holder {
                hold(&*lib, &lock, at, at + release_after(number)).await
            } else {
                wait(&*lib, &lock, at).await
            };
            seen.map(|seen| (number, seen))
        });
    }
    let end = begin + all as Nanos * SPACING + RELEASE + SPREAD + LATE;
    let mut seen = vec![Seen::default(); all];
    loop {
        tokio::select! {
            biased;
            task = tasks.join_next() => match task {
                Some(task) => {
                    let (number, one) = task.map_err(|panic| panic.to_string())??;
                    seen[number] = one;
                }
                None => break,
            },
            () = clock::sleep_until(end) => break,
        }
    }
    say("done", &seen);
    Ok(())
}

async fn hold<L: Library>(lib: &L, lock: &L::Lock, at: Nanos, until: Nanos) -> Outcome<Seen> {
    clock::sleep_until(at).await;
    let held = lib.acquire(lock).await?;
    let first = clock::now();
    clock::sleep_until(until).await;
    let second = clock::now();
    lib.release(held).await?;
    Ok(Seen { first, second })
}

async fn wait<L: Library>(lib: &L, lock: &L::Lock, at: Nanos) -> Outcome<Seen> {
    clock::sleep_until(at + ASK).await;
    let first = clock::now();
    let held = lib.acquire(lock).await?;
    let second = clock::now();
    lib.release(held).await?;
    Ok(Seen { first, second })
}
