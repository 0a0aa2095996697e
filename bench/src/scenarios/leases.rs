//! A process that takes leases, holds and renews them, and tells how many it still has.

use std::time::{Duration, Instant};

use futures::{StreamExt, future, stream};
use lockstream::store::RedisStore;
use lockstream::{Lease, LockRegistry, Renewal};
use serde::{Deserialize, Serialize};

use super::Round;
use crate::clock;
use crate::libs::{Outcome, told};
use crate::worker::{Boss, Worker, go, say};

/// So many are asked for at once.
const AT_ONCE: usize = 1_000;

/// How long a process may take to answer, on a machine that is overloaded.
const PATIENCE: Duration = Duration::from_secs(60);

/// What a process holds.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Leases {
    /// Their names begin so, and end in a number.
    pub(super) begin: String,
    pub(super) count: usize,
    /// Of how many registries, each with connections of its own.
    pub(super) registries: usize,
    pub(super) ttl: Duration,
    /// What has not been taken by then is not taken.
    pub(super) within: Duration,
}

/// The process as the bench sees it.
pub(super) struct Holder {
    worker: Worker,
    count: usize,
    begin: Instant,
}

/// What it says at last.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Seen {
    valid: usize,
    used: Duration,
}

/// What became of the leases.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kept {
    pub(super) valid: usize,
    /// Those that were never taken among them.
    pub(super) lost: usize,
    /// The part of a core that the process used since it had taken them.
    pub(super) cores: f64,
}

impl Holder {
    /// Starts a process, and waits until it has taken its leases.
    pub(super) fn hire(
        round: &Round<'_>,
        url: &str,
        role: usize,
        leases: &Leases,
    ) -> Outcome<Self> {
        let mut workers = [round.hire_at(url, role, round.secs)?];
        go(&mut workers)?;
        let [mut worker] = workers;
        let said = serde_json::to_string(leases).map_err(told("leases"))?;
        worker.tell(&format!("take {said}"))?;
        worker.expect("taken", leases.within + PATIENCE)?;
        Ok(Self {
            worker,
            count: leases.count,
            begin: Instant::now(),
        })
    }

    /// Has it look at its leases, which it goes on holding.
    pub(super) fn look(&mut self) -> Outcome<Kept> {
        self.worker.tell("look")?;
        let seen: Seen = self.worker.result("seen", PATIENCE)?;
        Ok(Kept {
            valid: seen.valid,
            lost: self.count - seen.valid,
            cores: seen.used.as_secs_f64() / self.begin.elapsed().as_secs_f64(),
        })
    }
}

/// The process's half.
pub(super) async fn work(url: &str, mut boss: Boss) -> Outcome<()> {
    boss.ready().await?;
    let wanted: Leases = serde_json::from_str(&boss.hear("take").await?).map_err(told("take"))?;
    let registries = (0..wanted.registries).map(|_| registry(url));
    let registries = registries.collect::<Outcome<Vec<_>>>()?;
    let over = tokio::time::sleep(wanted.within);
    let leases: Vec<Lease> = stream::iter(0..wanted.count)
        .map(|number| take(&registries[number % registries.len()], &wanted, number))
        .buffer_unordered(AT_ONCE)
        .filter_map(future::ready)
        .take_until(over)
        .collect()
        .await;
    let before = clock::processor_time();
    say("taken", &());
    loop {
        boss.hear("look").await?;
        let seen = Seen {
            valid: leases.iter().filter(|lease| lease.is_valid()).count(),
            used: clock::processor_time() - before,
        };
        say("seen", &seen);
    }
}

/// One that opens its connections when it first needs them.
pub(super) fn registry(url: &str) -> Outcome<LockRegistry> {
    let store = RedisStore::connect_lazy(url).map_err(told("open"))?;
    LockRegistry::builder(store).build().map_err(told("build"))
}

async fn take(registry: &LockRegistry, wanted: &Leases, number: usize) -> Option<Lease> {
    let lock = registry.obtain(format!("{}-{number}", wanted.begin));
    let lock = lock.ttl(wanted.ttl).renewal(Renewal::watchdog());
    // One that cannot be had is missing at the end, and counts as lost.
    lock.lease_within(wanted.within).await.ok()
}
