use std::time::Duration;

/// A point on the registry's clock: the time since the registry was made, the time in which the
/// machine was suspended included (D3).
pub(crate) type Moment = Duration;

/// Later than anything that happens.
pub(crate) const FOREVER: Moment = Duration::MAX;

/// The part of a ttl that we do not dare to use: clocks run within 0.1 % of each other, and a
/// server's expiry has a granularity of milliseconds.
pub(crate) fn drift(ttl: Duration) -> Duration {
    ttl / 100 + Duration::from_millis(2)
}

/// D1: when a lease of `ttl` is over whose command was sent at `start` or later.
pub(crate) fn deadline(start: Moment, ttl: Duration) -> Moment {
    (start + ttl).saturating_sub(drift(ttl))
}
