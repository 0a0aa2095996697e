//! `cluster-waits`: one registry waits for a thousand keys of one primary, whose connections are cut
//! once. At the others it holds leases that need no renewal for as long as this takes.

use std::time::Duration;

use lockstream::{Lease, Renewal};
use tokio::task::JoinSet;

use super::super::{Round, leases};
use crate::cluster::Cluster;
use crate::figures::Figure;
use crate::libs::{Outcome, told};
use crate::worker::{Boss, Job, go, say};

const KEYS: usize = 1_000;

/// The primary that has them.
const HOME: usize = 0;

/// Of each of the other primaries.
const HELD: usize = 100;

const TTL: Duration = Duration::from_secs(600);

const ONE_WAY: Duration = Duration::from_micros(2_500);

/// Until all of them are waited for.
const SETTLE: Duration = Duration::from_secs(10);

const WATCH: Duration = Duration::from_secs(30);

pub(super) fn round(round: &mut Round<'_>) -> Outcome<Vec<Figure>> {
    let mut cluster = Cluster::start(ONE_WAY)?;
    let locks = cluster.locks_at(HOME, "waits", KEYS)?;
    for lock in &locks {
        // Whoever else takes a lock in the plain way holds it, too.
        let key = format!("lock:{lock}");
        cluster.servers[HOME].order(&["SET", &key, "another", "PX", "600000"])?;
    }
    let mut held = Vec::new();
    for primary in (0..cluster.servers.len()).filter(|primary| *primary != HOME) {
        held.extend(cluster.locks_at(primary, "held", HELD)?);
    }
    let mut workers = [round.hire_at(&cluster.url(), 0, round.secs)?];
    go(&mut workers)?;
    let [mut worker] = workers;
    let said = serde_json::to_string(&(held, locks)).map_err(told("locks"))?;
    worker.tell(&format!("begin {said}"))?;
    std::thread::sleep(SETTLE);

    let needed = cluster.proxies.open(HOME);
    let accepted = cluster.proxies.accepted(HOME).len();
    let calls = calls(&mut cluster)?;
    cluster.proxies.cut(HOME);
    std::thread::sleep(WATCH);
    let made = cluster.proxies.accepted(HOME).len() - accepted;
    let calls_after = self::calls(&mut cluster)?;
    let queues: Vec<String> = cluster.servers[HOME].ask(&["KEYS", "*:~queue*"])?;
    worker.tell("look")?;
    worker.expect("done", Duration::from_secs(10))?;
    Ok(vec![
        Figure::new(
            "reconnects",
            made.saturating_sub(needed) as f64,
            "connections",
        ),
        Figure::new(
            "calls",
            calls_after.1.saturating_sub(calls.1) as f64,
            "calls",
        ),
        Figure::new(
            "calls-there",
            calls_after.0.saturating_sub(calls.0) as f64,
            "calls",
        ),
        Figure::new("queued", queues.len() as f64, "keys"),
    ])
}

/// Scripts called at the primary that has the keys, and at all others.
fn calls(cluster: &mut Cluster) -> Outcome<(u64, u64)> {
    let (mut here, mut elsewhere) = (0, 0);
    for primary in 0..cluster.servers.len() {
        let calls = cluster.script_calls(primary)?;
        if primary == HOME {
            here += calls;
        } else {
            elsewhere += calls;
        }
    }
    Ok((here, elsewhere))
}

pub(super) async fn work(job: &Job, mut boss: Boss) -> Outcome<()> {
    let registry = leases::registry(&job.url)?;
    boss.ready().await?;
    let locks = boss.hear("begin").await?;
    let (held, locks): (Vec<String>, Vec<String>) =
        serde_json::from_str(&locks).map_err(told("begin"))?;
    let held = held.into_iter().map(|lock| {
        let lock = registry.obtain(lock).ttl(TTL).renewal(Renewal::watchdog());
        async move { lock.lease().await.map_err(told("lease")) }
    });
    let held = futures::future::try_join_all(held).await?;
    let mut waiters = JoinSet::new();
    for lock in locks {
        let lock = registry.obtain(lock).wait(Duration::MAX);
        waiters.spawn(async move { lock.lease().await.map(drop) });
    }
    boss.hear("look").await?;
    if !held.iter().all(Lease::is_valid) {
        return Err("a lease was lost".to_owned());
    }
    match waiters.try_join_next() {
        None => say("done", &()),
        Some(Ok(Err(error))) => return Err(format!("{error:?}")),
        Some(_) => return Err("a waiter got a lock while it was held".to_owned()),
    }
    Ok(())
}
