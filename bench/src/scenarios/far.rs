//! `far-*`: tasks that take locks of their own over a network with a round trip of 1 ms, and pause
//! between two.

use std::time::Duration;

use super::{Round, turns};
use crate::figures::Figure;
use crate::libs::Outcome;
use crate::net::Proxies;

const ONE_WAY: Duration = Duration::from_micros(500);

pub(super) fn round(round: &mut Round<'_>) -> Outcome<Vec<Figure>> {
    let proxies = Proxies::to(&[round.server.redis().port()], ONE_WAY)?;
    turns::round_at(round, &proxies.url(0))
}
