//! `waiting-1000`: what a thousand waiters on a held key cost the server.

use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;

use super::{Round, connect};
use crate::clock;
use crate::figures::Figure;
use crate::libs::{Lib, Library, Outcome, Passes};
use crate::target::Target;
use crate::worker::{Boss, Job, go, say};

const WAITERS: usize = 1_000;

/// Until all have asked for the first time, and have begun to wait.
const SETTLE: Duration = Duration::from_millis(500);

/// A registry of lockstream asks every 10 s whether it still waits in the queue. A shorter look would
/// see nothing, or five times too much.
const OUR_PERIOD: Duration = Duration::from_secs(10);

const HOLDER: usize = 0;
const QUEUE: usize = 1;

pub(super) fn round(round: &mut Round<'_>) -> Outcome<Vec<Figure>> {
    let window = match round.lib {
        Lib::Lockstream => OUR_PERIOD,
        _ => Duration::from_secs_f64(round.secs),
    };
    let holder = round.hire(HOLDER, round.secs)?;
    let mut queue = [round.hire(QUEUE, round.secs)?];
    go(&mut queue)?;
    queue[0].expect("waiting", SETTLE + Duration::from_secs(10))?;
    std::thread::sleep(SETTLE);
    let count = round.server.count()?;
    std::thread::sleep(window);
    let commands = round.server.counted(count)?;
    let [mut queue] = queue;
    queue.tell("look")?;
    queue.expect("done", Duration::from_secs(5))?;
    let mut figures = vec![Figure::new(
        "commands",
        commands as f64 / window.as_secs_f64(),
        "commands/s",
    )];
    if let Target::Postgres(database) = round.server {
        let connections = database.connections() as f64;
        figures.push(Figure::new("connections", connections, "connections"));
    }
    drop(holder);
    Ok(figures)
}

pub(super) async fn work<L: Library>(job: &Job, mut boss: Boss) -> Outcome<()> {
    let callers = if job.role == HOLDER { 1 } else { WAITERS };
    let lib: Arc<L> = Arc::new(connect(job, Passes::Default, callers).await?);
    if job.role == HOLDER {
        let lock = lib.lock("held");
        let _held = lib.acquire(&lock).await?;
        // Held until the bench ends this process.
        boss.ready().await?;
        return Ok(());
    }
    let begin = boss.ready().await?;
    clock::sleep_until(begin).await;
    let mut waiters = JoinSet::new();
    for _ in 0..WAITERS {
        let lib = Arc::clone(&lib);
        waiters.spawn(async move {
            let lock = lib.lock("held");
            lib.acquire(&lock).await.map(drop)
        });
    }
    say("waiting", &());
    boss.hear("look").await?;
    // All of them must still be at it, else it was something else that was measured.
    match waiters.try_join_next() {
        None => say("done", &()),
        Some(Ok(Err(error))) => return Err(error),
        Some(_) => return Err("a waiter got the lock while it was held".to_owned()),
    }
    Ok(())
}
