//! `fleet-crash`: two thousand registries wait for a key whose holder is killed.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::task::JoinSet;

use super::super::Round;
use super::super::leases::{self, Holder, Leases};
use super::{FLEET, PATIENCE, PROCESSES, arrival, hire, wait_for_queue};
use crate::clock::{self, MILLISECOND, Nanos};
use crate::figures::Figure;
use crate::libs::{Outcome, told};
use crate::server::Server;
use crate::worker::{Boss, go, say};

const REGISTRIES: usize = 2_000;

const TTL: Duration = Duration::from_secs(10);

const HOLDER: usize = FLEET + 1;

const LOCK: &str = "crash-0";

/// When the first and the last of a process's registries had the lock.
#[derive(Serialize, Deserialize)]
struct Served {
    first: Nanos,
    last: Nanos,
}

pub(super) fn round(round: &mut Round<'_>) -> Outcome<Vec<Figure>> {
    let mut server = Server::start()?;
    let leases = Leases {
        begin: "crash".to_owned(),
        count: 1,
        registries: 1,
        ttl: TTL,
        within: TTL,
    };
    let mut holder = Holder::hire(round, &server.url(), HOLDER, &leases)?;
    let mut fleet = hire(round, &server.url())?;
    go(&mut fleet)?;
    wait_for_queue(&mut server, LOCK, REGISTRIES, PATIENCE)?;
    if holder.look()?.lost > 0 {
        return Err("the holder lost its lease before it was killed".to_owned());
    }
    drop(holder);
    let left: i64 = server.ask(&["PTTL", &format!("lock:{LOCK}")])?;
    let left = u64::try_from(left).map_err(told("the holder had no lock"))?;
    let end = clock::now() + left * MILLISECOND;

    let (mut first, mut last) = (Nanos::MAX, 0);
    for process in &mut fleet {
        let served: Served = process.result("served", TTL + PATIENCE)?;
        (first, last) = (first.min(served.first), last.max(served.last));
    }
    let after = |at: Nanos| at.saturating_sub(end) as f64 / MILLISECOND as f64;
    Ok(vec![
        Figure::new("first", after(first), "ms"),
        Figure::new("served", after(last), "ms"),
    ])
}

pub(super) async fn work(url: &str, mut boss: Boss) -> Outcome<()> {
    let mut waiters = JoinSet::new();
    let begin = boss.ready().await?;
    clock::sleep_until(begin).await;
    let count = REGISTRIES / PROCESSES;
    for number in 0..count {
        let url = url.to_owned();
        waiters.spawn(async move {
            tokio::time::sleep(arrival(number, count)).await;
            let registry = leases::registry(&url)?;
            let lock = registry.obtain(LOCK).wait(Duration::MAX);
            let lease = lock.lease().await.map_err(told("lease"))?;
            let held = clock::now();
            lease.release().await.map_err(told("release"))?;
            // The registry stays, as that of a service does.
            Ok((held, registry))
        });
    }
    let turns: Outcome<Vec<_>> = waiters.join_all().await.into_iter().collect();
    let turns = turns?;
    let held = || turns.iter().map(|(held, _)| *held);
    let served = Served {
        first: held().min().unwrap_or(Nanos::MAX),
        last: held().max().unwrap_or(0),
    };
    say("served", &served);
    boss.hear("end").await.map(drop)
}
