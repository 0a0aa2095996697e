//! `fleet-timeout`: four thousand registries wait for one key, and all give up at the same moment.

use std::time::Duration;

use lockstream::LockError;
use tokio::task::JoinSet;

use super::super::Round;
use super::super::leases::{self, Holder, Leases};
use super::ping::Ping;
use super::{FLEET, PATIENCE, PROCESSES, arrival, hire, wait_for_queue};
use crate::clock::{self, MILLISECOND, Nanos, SECOND};
use crate::figures::Figure;
use crate::libs::{Outcome, told};
use crate::server::Server;
use crate::worker::{Boss, go, say};

const REGISTRIES: usize = 4_000;

const BYSTANDERS: usize = 100;

const TTL: Duration = Duration::from_secs(3);

/// From the start until all give up.
const WAIT: Nanos = 30 * SECOND;

/// By then all of them wait.
const QUEUED: Duration = Duration::from_secs(29);

/// From when the bystanders are watched until all give up.
const BEFORE: Nanos = 500 * MILLISECOND;

/// After that nothing is left to be done, also not in the background.
const AFTER: Duration = Duration::from_secs(5);

const LOCK: &str = "timeout";

pub(super) fn round(round: &mut Round<'_>) -> Outcome<Vec<Figure>> {
    let mut server = Server::start()?;
    let bystanders = Leases {
        begin: "bystander".to_owned(),
        count: BYSTANDERS,
        registries: BYSTANDERS,
        ttl: TTL,
        within: TTL,
    };
    let key = format!("lock:{LOCK}");
    server.order(&["SET", &key, "another", "PX", "600000"])?;
    let mut bystanders = Holder::hire(round, &server.url(), FLEET + 1, &bystanders)?;
    let mut fleet = hire(round, &server.url())?;
    let begin = go(&mut fleet)?;
    wait_for_queue(&mut server, LOCK, REGISTRIES, QUEUED)?;
    let lost_before = bystanders.look()?.lost;
    let left = (begin + WAIT - BEFORE).checked_sub(clock::now());
    let left = left.ok_or("the fleet took too long to begin to wait")?;
    std::thread::sleep(Duration::from_nanos(left));

    let ping = Ping::begin(server.port())?;
    for process in &mut fleet {
        process.expect("over", PATIENCE + AFTER)?;
    }
    std::thread::sleep(AFTER);
    let standstill = ping.end()?;
    let lost = bystanders.look()?.lost;
    Ok(vec![
        Figure::new("standstill", standstill.as_secs_f64() * 1e3, "ms"),
        Figure::new("lost", lost as f64, "leases"),
        Figure::new("lost-before", lost_before as f64, "leases"),
    ])
}

pub(super) async fn work(url: &str, mut boss: Boss) -> Outcome<()> {
    let begin = boss.ready().await?;
    let mut waiters = JoinSet::new();
    let count = REGISTRIES / PROCESSES;
    for number in 0..count {
        let url = url.to_owned();
        waiters.spawn(async move {
            tokio::time::sleep(arrival(number, count)).await;
            let registry = leases::registry(&url)?;
            let left = (begin + WAIT).saturating_sub(clock::now());
            let lock = registry.obtain(LOCK);
            match lock.lease_within(Duration::from_nanos(left)).await {
                // One whose server stood still for long may be told of that instead.
                Err(LockError::NotAcquired { .. } | LockError::Store { .. }) => Ok(registry),
                Err(error) => Err(format!("{error:?}")),
                Ok(_) => Err("a waiter got the lock while it was held".to_owned()),
            }
        });
    }
    let registries: Outcome<Vec<_>> = waiters.join_all().await.into_iter().collect();
    let _kept = registries.map_err(told("wait"))?;
    say("over", &());
    boss.hear("end").await.map(drop)
}
