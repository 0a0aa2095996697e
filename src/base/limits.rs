//! What is refused, whoever asks for it.

use std::ops::RangeInclusive;
use std::time::Duration;

/// The shortest and the longest ttl.
pub(crate) const TTL: RangeInclusive<Duration> =
    Duration::from_millis(10)..=Duration::from_secs(24 * 60 * 60);

/// The shortest and the longest time for which a key is kept. A year of some parsers has 365.25 days.
pub(crate) const KEEP: RangeInclusive<Duration> =
    Duration::from_millis(10)..=Duration::from_secs(366 * 24 * 60 * 60);

/// The shortest and the longest response time-out. Without an upper bound, the connection to a server
/// that has gone would never be closed.
pub(crate) const RESPONSE_TIMEOUT: RangeInclusive<Duration> =
    Duration::from_millis(1)..=Duration::from_secs(24 * 60 * 60);

/// Owners begin with it, so it holds nothing that means something in a ticket or a channel's name.
pub(crate) fn is_name(name: &str) -> bool {
    let is_plain = |c: u8| c.is_ascii_alphanumeric() || b"._-".contains(&c);
    (1..=64).contains(&name.len()) && name.bytes().all(is_plain)
}
