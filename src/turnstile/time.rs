use std::fmt;
use std::num::NonZeroU64;
use std::ops::{Add, AddAssign, Sub};
use std::time::Duration;

/// A point on the registry's clock: the time since the registry was made, the time in which the
/// machine was suspended included (D3).
pub(crate) type Moment = Duration;

/// Later than anything that happens.
pub(crate) const FOREVER: Moment = Duration::MAX;

/// A moment as a turnstile keeps it: whole nanoseconds, which last for 584 years. With `Moment` in its place a turnstile
/// would have 440 bytes instead of 368.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Point(
    /// One more than the nanoseconds, so that an `Option` costs nothing.
    NonZeroU64,
);

impl Point {
    pub(super) const FOREVER: Self = Self(NonZeroU64::MAX);
    /// The clock's first.
    pub(super) const START: Self = Self(NonZeroU64::MIN);

    pub(super) fn moment(self) -> Moment {
        if self == Self::FOREVER {
            FOREVER
        } else {
            Moment::from_nanos(self.0.get() - 1)
        }
    }

    /// How long it is since an earlier point; nothing if that is the later one.
    pub(super) fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.get().saturating_sub(earlier.0.get()))
    }
}

impl From<Moment> for Point {
    fn from(moment: Moment) -> Self {
        Self::START + moment
    }
}

/// Whatever is too far away is [`Point::FOREVER`].
impl Add<Duration> for Point {
    type Output = Self;

    fn add(self, span: Duration) -> Self {
        Self(self.0.saturating_add(nanos(span)))
    }
}

impl AddAssign<Duration> for Point {
    fn add_assign(&mut self, span: Duration) {
        *self = *self + span;
    }
}

/// Nothing is before the clock's first.
impl Sub<Duration> for Point {
    type Output = Self;

    fn sub(self, span: Duration) -> Self {
        let before = self.0.get().saturating_sub(nanos(span));
        NonZeroU64::new(before).map_or(Self::START, Self)
    }
}

impl fmt::Debug for Point {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.moment().fmt(f)
    }
}

/// The most that a point can be away, if it is more.
fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// The part of a ttl that we do not dare to use: clocks run within 0.1 % of each other, and a
/// server's expiry has a granularity of milliseconds.
pub(super) fn drift(ttl: Duration) -> Duration {
    ttl / 100 + Duration::from_millis(2)
}

/// D1: when a lease of `ttl` is over whose command was sent at `start` or later.
pub(super) fn deadline(start: Point, ttl: Duration) -> Point {
    start + ttl - drift(ttl)
}
