//! `fleet-restart`: two thousand registries with a lease each, whose server is away for two seconds and
//! comes back with its data.
//!
//! They come to it through a proxy, which counts whoever tries while the server is away.

use std::time::{Duration, Instant};

use super::super::Round;
use super::super::leases::{Holder, Leases};
use super::{FLEET, PATIENCE, PROCESSES};
use crate::clock::{MILLISECOND, Nanos};
use crate::figures::Figure;
use crate::libs::{Outcome, told};
use crate::net::Proxies;
use crate::server::Server;

const REGISTRIES: usize = 2_000;

const TTL: Duration = Duration::from_secs(30);

const AWAY: Duration = Duration::from_secs(2);

/// Since the server went: by then a lease that was not renewed any more is over.
const WATCH: Duration = Duration::from_secs(32);

const BUSY: Nanos = 100 * MILLISECOND;

pub(super) fn round(round: &mut Round<'_>) -> Outcome<Vec<Figure>> {
    let mut server = Server::with("appendonly yes")?;
    let proxies = Proxies::to(&[server.port()], Duration::ZERO)?;
    let mut fleet = Vec::new();
    for process in 0..PROCESSES {
        let leases = Leases {
            begin: format!("restart-{process}"),
            count: REGISTRIES / PROCESSES,
            registries: REGISTRIES / PROCESSES,
            ttl: TTL,
            within: TTL,
        };
        fleet.push(Holder::hire(round, &proxies.url(0), FLEET, &leases)?);
    }
    let standing = clients(&mut server)?;
    if standing < REGISTRIES {
        return Err(format!("only {standing} of {REGISTRIES} connections stand"));
    }
    let before = proxies.accepted(0).len();
    let begin = Instant::now();
    server.stop();
    std::thread::sleep(AWAY.saturating_sub(begin.elapsed()));
    server.start_again()?;
    let back = Instant::now();
    while clients(&mut server)? < standing {
        if back.elapsed() > PATIENCE {
            return Err("some never came back".to_owned());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let back = back.elapsed().as_secs_f64();
    std::thread::sleep(WATCH.saturating_sub(begin.elapsed()));
    let mut lost = 0;
    for holder in &mut fleet {
        lost += holder.look()?.lost;
    }
    let attempts = &proxies.accepted(0)[before..];
    Ok(vec![
        Figure::new("busiest", busiest(attempts) as f64, "attempts in 0.1 s"),
        Figure::new("attempts", attempts.len() as f64, "attempts"),
        Figure::new("back", back, "s"),
        Figure::new("lost", lost as f64, "leases"),
    ])
}

/// How many clients are connected, the bench aside.
fn clients(server: &mut Server) -> Outcome<usize> {
    let clients = server.info("clients", "connected_clients")?;
    let clients: usize = clients.parse().map_err(told("connected_clients"))?;
    Ok(clients - 1)
}

/// The most of them, which are in order, within a tenth of a second.
fn busiest(attempts: &[Nanos]) -> usize {
    let until = |from: Nanos| attempts.partition_point(|at| *at < from + BUSY);
    let counts = attempts
        .iter()
        .enumerate()
        .map(|(index, at)| until(*at) - index);
    counts.max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_busiest_tenth_of_a_second_begins_anywhere() {
        let at = [0, 10, 90, 100, 150, 185, 189, 300].map(|ms| ms * MILLISECOND);
        assert_eq!(busiest(&at), 5);
        assert_eq!(busiest(&[]), 0);
        assert_eq!(busiest(&at[7..]), 1);
    }
}
