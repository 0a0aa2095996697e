//! `cluster-moving`: two thousand leases in one slot, which is moved to another primary meanwhile, and
//! lies half here and half there for some seconds.

use std::time::{Duration, Instant};

use super::super::Round;
use super::super::leases::{Holder, Leases};
use super::cluster;
use crate::figures::Figure;
use crate::libs::Outcome;

const LEASES: usize = 2_000;

const TTL: Duration = Duration::from_secs(3);

/// How long the slot lies on both sides: each lease has to be renewed there.
const HALF: Duration = Duration::from_secs(6);

pub(super) fn round(round: &mut Round<'_>) -> Outcome<Vec<Figure>> {
    let mut cluster = cluster(round)?;
    let leases = Leases {
        begin: "{moving}".to_owned(),
        count: LEASES,
        registries: 1,
        ttl: TTL,
        within: 5 * TTL,
    };
    let (slot, from) = cluster.place("{moving}-0")?;
    let to = (from + 1) % cluster.servers.len();
    let mut holder = Holder::hire(round, &cluster.url(), 0, &leases)?;
    std::thread::sleep(TTL);
    let before = holder.look()?;
    let begin = Instant::now();
    cluster.begin_move(slot, from, to)?;
    // Every other key, so that those which a client renews together are on both sides.
    cluster.move_keys(slot, from, to, 2)?;
    std::thread::sleep(HALF);
    while cluster.move_keys(slot, from, to, 1)? > 0 {}
    cluster.end_move(slot, from, to)?;
    let took = begin.elapsed().as_secs_f64();
    std::thread::sleep(2 * TTL);
    let after = holder.look()?;
    Ok(vec![
        Figure::new("lost", after.lost as f64, "leases"),
        Figure::new("lost-before", before.lost as f64, "leases"),
        Figure::new("move", took, "s"),
    ])
}
