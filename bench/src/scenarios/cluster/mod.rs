//! One registry on a cluster of three primaries, each behind a proxy that delays.
//!
//! | file | what it asks |
//! |---|---|
//! | `held.rs` | how many leases does a registry keep, and what does that cost? |
//! | `brief.rs` | how many short leases, also of more than it can renew? |
//! | `moving.rs` | what becomes of leases in a slot that is being moved? |
//! | `waits.rs` | what does waiting cost after a connection was lost? |
//! | `idle.rs` | how many connections has a process that does nothing? |

mod brief;
mod held;
mod idle;
mod moving;
mod waits;

use super::{Round, Scenario, leases};
use crate::cluster::Cluster;
use crate::figures::Figure;
use crate::libs::Outcome;
use crate::worker::{Boss, Job};

pub(super) fn round(round: &mut Round<'_>) -> Outcome<Vec<Figure>> {
    match round.scenario {
        Scenario::Cluster100k => held::round(round),
        Scenario::ClusterBrief => brief::round(round),
        Scenario::ClusterMoving => moving::round(round),
        Scenario::ClusterWaits => waits::round(round),
        Scenario::ClusterIdle => idle::round(round),
        other => unreachable!("{} is in another file", other.name()),
    }
}

pub(super) async fn work(job: &Job, boss: Boss) -> Outcome<()> {
    match job.scenario {
        Scenario::ClusterWaits => waits::work(job, boss).await,
        Scenario::ClusterIdle => idle::work(job, boss).await,
        _ => leases::work(&job.url, boss).await,
    }
}

fn cluster(round: &Round<'_>) -> Outcome<Cluster> {
    Cluster::start(round.round_trip / 2)
}
