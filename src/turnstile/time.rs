use std::num::NonZeroU64;
use std::ops::{Add, Sub};
use std::time::Duration;

use crate::base::clock::Moment;

/// A `Moment` in 8 bytes, also as an `Option`. It saves memory: a registry may have 100,000 turnstiles. Counts
/// nanoseconds from 1, up to 584 years.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Point(NonZeroU64);

impl Point {
    pub(super) const FIRST: Self = Self(NonZeroU64::MIN);
    pub(super) const FOREVER: Self = Self(NonZeroU64::MAX);

    pub(super) fn moment(self) -> Moment {
        Moment::from_nanos(self.0.get() - 1)
    }

    /// How long it is since an earlier point. Zero if that is the later one.
    pub(super) fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.get().saturating_sub(earlier.0.get()))
    }
}

impl From<Moment> for Point {
    fn from(moment: Moment) -> Self {
        Self::FIRST + moment
    }
}

/// Whatever is too far away is [`Point::FOREVER`].
impl Add<Duration> for Point {
    type Output = Self;

    fn add(self, span: Duration) -> Self {
        let nanos = u64::try_from(span.as_nanos()).unwrap_or(u64::MAX);
        Self(self.0.saturating_add(nanos))
    }
}

/// Whatever is before the first point is the first point.
impl Sub<Duration> for Point {
    type Output = Self;

    fn sub(self, span: Duration) -> Self {
        Self::from(self.moment().saturating_sub(span))
    }
}

/// The part of a ttl that is not used: clocks run within 0.1 % of each other, and a server's expiry
/// has a granularity of milliseconds.
pub(super) fn drift(ttl: Duration) -> Duration {
    ttl / 100 + Duration::from_millis(2)
}

/// D1: the deadline of a lease. `start` is a time before the command was sent.
pub(super) fn deadline(start: Point, ttl: Duration) -> Point {
    start + ttl.saturating_sub(drift(ttl))
}
