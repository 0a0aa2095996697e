//! `cluster-idle`: how many connections a process has that used keys of one primary, and holds a lease
//! there, after a minute in which it did nothing else.

use std::time::Duration;

use lockstream::LockRegistry;

use super::super::{Round, leases};
use super::cluster;
use crate::figures::Figure;
use crate::libs::{Outcome, told};
use crate::worker::{Boss, Job, go, say};

/// How many keys it uses.
const USED: usize = 10;

/// What is idle is closed after a minute.
const IDLE: Duration = Duration::from_secs(70);

pub(super) fn round(round: &mut Round<'_>) -> Outcome<Vec<Figure>> {
    let mut cluster = cluster(round)?;
    let locks = cluster.locks_at(0, "idle", USED)?;
    let mut workers = [round.hire_at(&cluster.url(), 0, round.secs)?];
    go(&mut workers)?;
    let [mut worker] = workers;
    let said = serde_json::to_string(&locks).map_err(told("locks"))?;
    worker.tell(&format!("use {said}"))?;
    worker.expect("held", Duration::from_secs(10))?;
    let first = cluster.connections()?;
    std::thread::sleep(IDLE);
    let last = cluster.connections()?;
    worker.tell("look")?;
    worker.expect("done", Duration::from_secs(10))?;
    Ok(vec![
        Figure::new("connections", last as f64, "connections"),
        Figure::new("in-use", first as f64, "connections"),
    ])
}

pub(super) async fn work(job: &Job, mut boss: Boss) -> Outcome<()> {
    let registry = leases::registry(&job.url)?;
    boss.ready().await?;
    let locks = boss.hear("use").await?;
    let locks: Vec<String> = serde_json::from_str(&locks).map_err(told("use"))?;
    for lock in &locks {
        let lease = lease(&registry, lock).await?;
        lease.release().await.map_err(told("release"))?;
    }
    let held = lease(&registry, &locks[0]).await?;
    say("held", &());
    boss.hear("look").await?;
    if !held.is_valid() {
        return Err("the lease was lost".to_owned());
    }
    say("done", &());
    Ok(())
}

async fn lease(registry: &LockRegistry, lock: &str) -> Outcome<lockstream::Lease> {
    registry.obtain(lock).lease().await.map_err(told("lease"))
}
