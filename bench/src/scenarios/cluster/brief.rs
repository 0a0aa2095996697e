//! `cluster-brief`: leases with a ttl of 3 s, first some that must all be kept, then more and more, at
//! last twice as many as can be renewed.

use std::ops::RangeInclusive;
use std::time::Duration;

use super::super::Round;
use super::super::leases::{Holder, Kept, Leases};
use super::cluster;
use crate::cluster::Cluster;
use crate::figures::Figure;
use crate::libs::Outcome;

const LEASES: usize = 8_000;

const TTL: Duration = Duration::from_secs(3);

/// How many a registry may be able to renew.
const BOUNDS: RangeInclusive<usize> = 500..=300_000;

pub(super) fn round(round: &mut Round<'_>) -> Outcome<Vec<Figure>> {
    let mut cluster = cluster(round)?;
    let kept = hold(round, &mut cluster, LEASES, 5 * TTL)?;
    let capacity = capacity(kept.valid, |count| {
        Ok(hold(round, &mut cluster, count, 2 * TTL)?.valid)
    })?;
    let overload = 2 * capacity;
    let of_twice = hold(round, &mut cluster, overload, 3 * TTL)?;
    let share = of_twice.valid as f64 / overload as f64;
    Ok(vec![
        Figure::new("lost", kept.lost as f64, "leases"),
        Figure::new("capacity", capacity as f64, "leases"),
        Figure::new("kept", share, "of twice that"),
    ])
}

/// What is left of so many leases after so much time, in a new process.
fn hold(round: &Round<'_>, cluster: &mut Cluster, count: usize, time: Duration) -> Outcome<Kept> {
    for server in &mut cluster.servers {
        server.order(&["FLUSHALL"])?;
    }
    let leases = Leases {
        begin: "brief".to_owned(),
        count,
        registries: 1,
        ttl: TTL,
        within: 5 * TTL,
    };
    let mut holder = Holder::hire(round, &cluster.url(), 0, &leases)?;
    std::thread::sleep(time);
    holder.look()
}

/// The most leases that can be kept; `keep` tells how many of a number are.
///
/// What breaks down if it is asked for too much keeps the most shortly before that, and this finds
/// four fifths of it at the least. What keeps as many as it can keeps the most of far too many.
fn capacity(
    kept_of_the_first: usize,
    mut keep: impl FnMut(usize) -> Outcome<usize>,
) -> Outcome<usize> {
    let keeps = |count: usize, kept: usize| kept * 10 >= count * 9;
    let mut most = kept_of_the_first;
    let mut count = LEASES;
    let grows = keeps(LEASES, kept_of_the_first);
    loop {
        count = if grows { count * 2 } else { count / 2 };
        if !BOUNDS.contains(&count) {
            break;
        }
        let kept = keep(count)?;
        most = most.max(kept);
        if keeps(count, kept) != grows {
            break;
        }
    }
    // Between the last two: it keeps all of one of them, and not of the other.
    let mut fewer = if grows { count / 2 } else { count };
    let mut more = 2 * fewer;
    for _ in 0..2 {
        let middle = fewer.midpoint(more);
        let kept = keep(middle)?;
        most = most.max(kept);
        if keeps(middle, kept) {
            fewer = middle;
        } else {
            more = middle;
        }
    }
    Ok(most.max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    const CAPACITIES: [usize; 8] = [1_100, 5_000, 7_999, 8_000, 9_000, 31_000, 100_000, 250_000];

    #[test]
    fn the_capacity_of_what_breaks_down_is_found() {
        for can in CAPACITIES {
            let keep = |count| Ok(if count <= can { count } else { 0 });
            let found = capacity(keep(LEASES).unwrap(), keep).unwrap();
            assert!(found <= can && found * 5 >= can * 4, "{can}: {found}");
        }
    }

    #[test]
    fn the_capacity_of_what_sheds_is_found() {
        for can in CAPACITIES {
            let keep = |count: usize| Ok(count.min(can));
            let found = capacity(keep(LEASES).unwrap(), keep).unwrap();
            assert!(found <= can && found * 10 >= can * 9, "{can}: {found}");
        }
    }

    #[test]
    fn the_search_has_an_end() {
        assert!(capacity(LEASES, Ok).is_ok());
        assert_eq!(capacity(0, |_| Ok(0)), Ok(1));
    }
}
