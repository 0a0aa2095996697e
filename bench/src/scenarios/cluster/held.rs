//! `cluster-100k`: a hundred thousand leases that one registry holds and renews.

use std::time::{Duration, Instant};

use super::super::Round;
use super::super::leases::{Holder, Leases};
use super::cluster;
use crate::figures::Figure;
use crate::libs::Outcome;

const LEASES: usize = 100_000;

pub(super) fn round(round: &mut Round<'_>) -> Outcome<Vec<Figure>> {
    let cluster = cluster(round)?;
    let leases = Leases {
        begin: "held".to_owned(),
        count: LEASES,
        registries: 1,
        ttl: Duration::from_secs(30),
        within: Duration::from_secs(60),
    };
    let begin = Instant::now();
    let mut holder = Holder::hire(round, &cluster.url(), 0, &leases)?;
    let start = begin.elapsed().as_secs_f64();
    std::thread::sleep(round.hold);
    let kept = holder.look()?;
    Ok(vec![
        Figure::new("lost", kept.lost as f64, "leases"),
        Figure::new("cpu", kept.cores, "cores"),
        Figure::new("start", start, "s"),
    ])
}
