//! `waiters-10k`: what ten thousand tasks of one process cost that wait for a key which another
//! process holds, and how long it takes until each has had its turn once it is released.

use std::sync::Arc;
use std::time::Duration;

use lockstream::LockRegistry;
use lockstream::store::RedisStore;
use serde::{Deserialize, Serialize};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use super::Round;
use crate::clock::{self, Nanos};
use crate::figures::Figure;
use crate::libs::{Outcome, told};
use crate::monitor::Monitor;
use crate::worker::{Boss, Job, go, say};

const WAITERS: usize = 10_000;

/// Until memory that was needed only for beginning to wait is released.
const SETTLE: Duration = Duration::from_millis(300);

const PATIENCE: Duration = Duration::from_secs(20);

const HOLDER: usize = 0;
const QUEUE: usize = 1;
/// Has as many tasks that wait for a semaphore of tokio's: the tasks themselves cost memory, too.
const TASKS: usize = 2;

#[derive(Serialize, Deserialize)]
struct Served {
    first: Nanos,
    last: Nanos,
    used_secs: f64,
}

pub(super) fn round(round: &mut Round<'_>) -> Outcome<Vec<Figure>> {
    let task_bytes: f64 = {
        let mut tasks = [round.hire(TASKS, round.secs)?];
        go(&mut tasks)?;
        tasks[0].result("waiting", PATIENCE)?
    };
    let mut holder = round.hire(HOLDER, round.secs)?;
    let mut queue = [round.hire(QUEUE, round.secs)?];
    go(&mut queue)?;
    let [mut queue] = queue;
    let bytes: f64 = queue.result("waiting", PATIENCE)?;
    let monitor = Monitor::begin(round.server.redis())?;
    go(std::slice::from_mut(&mut holder))?;
    let released: Nanos = holder.result("released", PATIENCE)?;
    let served: Served = queue.result("done", PATIENCE)?;
    let commands = monitor.end(round.server.redis())?;
    let took = served.last.saturating_sub(released) as f64;
    let first = served.first.saturating_sub(released) as f64;
    let turns = WAITERS as f64;
    Ok(vec![
        Figure::new("bytes", bytes, "bytes/waiter"),
        Figure::new("task-bytes", task_bytes, "bytes/task"),
        Figure::new("own-bytes", bytes - task_bytes, "bytes/waiter"),
        Figure::new("first", first / 1e3, "us"),
        Figure::new("served", took / 1e6, "ms"),
        Figure::new("turn", took / 1e3 / turns, "us/turn"),
        Figure::new("clients-cpu", served.used_secs * 1e6 / turns, "us/turn"),
        Figure::new("commands", commands as f64, "commands"),
    ])
}

pub(super) async fn work(job: &Job, boss: Boss) -> Outcome<()> {
    if job.role == TASKS {
        return wait_for_a_semaphore(boss).await;
    }
    let store = RedisStore::connect(&job.url).await;
    let registry = LockRegistry::builder(store.map_err(told("connect"))?)
        .build()
        .map_err(told("build"))?;
    if job.role == HOLDER {
        hold(&registry, boss).await
    } else {
        queue(&registry, boss).await
    }
}

async fn hold(registry: &LockRegistry, mut boss: Boss) -> Outcome<()> {
    let held = registry.obtain("crowded").lease().await;
    let held = held.map_err(told("lease"))?;
    let begin = boss.ready().await?;
    clock::sleep_until(begin).await;
    let released = clock::now();
    held.release().await.map_err(told("release"))?;
    say("released", &released);
    // The connection stays for as long as commands are counted.
    boss.hear("end").await.map(drop)
}

async fn queue(registry: &LockRegistry, mut boss: Boss) -> Outcome<()> {
    // What is needed only for the first lock is not a waiter's.
    let warm = registry.obtain("warm").lease().await;
    let warm = warm.map_err(told("lease"))?;
    warm.release().await.map_err(told("release"))?;
    boss.ready().await?;

    let before = clock::resident_bytes()?;
    let mut waiters = JoinSet::new();
    for _ in 0..WAITERS {
        let lock = registry.obtain("crowded");
        waiters.spawn(async move {
            let lease = lock.lease().await.map_err(told("lease"))?;
            let held = clock::now();
            lease.release().await.map_err(told("release"))?;
            Ok(held)
        });
    }
    tokio::time::sleep(SETTLE).await;
    let bytes = clock::resident_bytes()?.saturating_sub(before) as f64 / WAITERS as f64;
    let keys = registry.snapshot().keys;
    let waiting: usize = keys.iter().map(|key| key.waiting.len()).sum();
    if waiting != WAITERS {
        return Err(format!("{waiting} wait instead of {WAITERS}"));
    }
    let used = clock::processor_time();
    say("waiting", &bytes);

    let (mut first, mut last) = (Nanos::MAX, 0);
    while let Some(turn) = waiters.join_next().await {
        let turn: Outcome<Nanos> = turn.map_err(|panic| panic.to_string())?;
        let held = turn?;
        (first, last) = (first.min(held), last.max(held));
    }
    let used_secs = (clock::processor_time() - used).as_secs_f64();
    say(
        "done",
        &Served {
            first,
            last,
            used_secs,
        },
    );
    boss.hear("end").await.map(drop)
}

async fn wait_for_a_semaphore(mut boss: Boss) -> Outcome<()> {
    let semaphore = Arc::new(Semaphore::new(0));
    boss.ready().await?;
    let before = clock::resident_bytes()?;
    let mut waiters: JoinSet<Outcome<Nanos>> = JoinSet::new();
    for _ in 0..WAITERS {
        let semaphore = Arc::clone(&semaphore);
        waiters.spawn(async move {
            let permit = semaphore.acquire().await.map_err(told("permit"))?;
            let held = clock::now();
            drop(permit);
            Ok(held)
        });
    }
    tokio::time::sleep(SETTLE).await;
    let bytes = clock::resident_bytes()?.saturating_sub(before) as f64 / WAITERS as f64;
    say("waiting", &bytes);
    boss.hear("end").await.map(drop)
}
