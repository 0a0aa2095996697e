//! `renewals-spread`: how evenly the renewals of a hundred thousand leases are spread over time, after all were taken at
//! once, and after the connection was cut.

use std::time::Duration;

use futures::StreamExt;
use lockstream::store::RedisStore;
use lockstream::{Lease, LockEvent, LockRegistry};
use serde::{Deserialize, Serialize};
use tokio::time::{Instant, timeout_at};

use super::Round;
use super::held::{LEASES, PATIENCE, PERIOD, take_all};
use crate::figures::Figure;
use crate::libs::{Outcome, told};
use crate::worker::{Boss, Job, go, say};

/// So long is each count.
const COUNTED: Duration = Duration::from_secs(2 * PERIOD.as_secs());

/// How many times its share the fullest tenth of a second had.
#[derive(Serialize, Deserialize)]
struct Fullest(f64);

pub(super) fn round(round: &mut Round<'_>) -> Outcome<Vec<Figure>> {
    let mut workers = [round.hire(0, round.secs)?];
    go(&mut workers)?;
    let [mut worker] = workers;
    let taken: Fullest = worker.result("taken", COUNTED + PATIENCE)?;
    // A client that has subscribed is of this type.
    let cut: u64 = round
        .server
        .redis()
        .ask(&["CLIENT", "KILL", "TYPE", "pubsub"])?;
    if cut != 1 {
        return Err(format!("{cut} connections were cut"));
    }
    worker.tell("cut")?;
    let cut: Fullest = worker.result("cut", COUNTED + PATIENCE)?;
    Ok(vec![
        Figure::new("taken", taken.0, "shares"),
        Figure::new("cut", cut.0, "shares"),
    ])
}

pub(super) async fn work(job: &Job, mut boss: Boss) -> Outcome<()> {
    let store = RedisStore::connect(&job.url).await;
    let store = store.map_err(told("connect"))?;
    let registry = LockRegistry::builder(store)
        .build()
        .map_err(told("build"))?;
    boss.ready().await?;

    let leases = take_all(&registry).await?;
    say("taken", &fullest(&registry).await?);
    boss.hear("cut").await?;
    say("cut", &fullest(&registry).await?);
    let lost = leases.iter().filter(|lease: &&Lease| !lease.is_valid());
    let lost = lost.count();
    registry.shutdown().await;
    match lost {
        0 => Ok(()),
        lost => Err(format!("{lost} of {LEASES} leases were lost")),
    }
}

/// Counts from now on. The deadline of a renewed lease tells when that was sent.
async fn fullest(registry: &LockRegistry) -> Outcome<Fullest> {
    let mut events = registry.events();
    let mut deadlines = Vec::new();
    let end = Instant::now() + COUNTED;
    while let Ok(Some(event)) = timeout_at(end, events.next()).await {
        match event {
            LockEvent::Renewed { deadline, .. } => deadlines.push(deadline),
            LockEvent::Missed { count, .. } => return Err(format!("{count} events missed")),
            _ => {}
        }
    }
    deadlines.sort_unstable();
    let first = *deadlines.first().ok_or("nothing was renewed")?;
    let mut tenths = vec![0_usize; COUNTED.as_millis() as usize / 100 + 1];
    for at in &deadlines {
        let tenth = (*at - first).as_millis() as usize / 100;
        let tenth = tenth.min(tenths.len() - 1);
        tenths[tenth] += 1;
    }
    let fullest = tenths.iter().max().copied().unwrap_or_default();
    let share = LEASES as f64 * 0.1 / PERIOD.as_secs_f64();
    Ok(Fullest(fullest as f64 / share))
}
