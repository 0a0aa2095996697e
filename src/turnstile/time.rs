use std::fmt;
use std::num::NonZeroU64;
use std::ops::{Add, AddAssign, Div, Mul, Sub};
use std::time::Duration;

/// A point on the registry's clock: the time since the registry was made, the time in which the
/// machine was suspended included (D3).
pub(crate) type Moment = Duration;

/// Later than anything that happens.
pub(crate) const FOREVER: Moment = Duration::MAX;

/// A moment as a turnstile keeps it: whole nanoseconds, which last for 584 years. A key that is held keeps a dozen
/// points and spans, and looks at them at every event; `Duration` is twice as large and several times as slow to add
/// and divide.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Point(
    /// One more than the nanoseconds, so that an `Option` costs nothing.
    NonZeroU64,
);

/// A duration as a turnstile keeps it.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Span(u64);

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
    pub(super) fn since(self, earlier: Self) -> Span {
        Span(self.0.get().saturating_sub(earlier.0.get()))
    }
}

impl From<Moment> for Point {
    fn from(moment: Moment) -> Self {
        Self::START + Span::from(moment)
    }
}

/// Whatever is too far away is [`Point::FOREVER`].
impl Add<Span> for Point {
    type Output = Self;

    fn add(self, span: Span) -> Self {
        Self(self.0.saturating_add(span.0))
    }
}

impl AddAssign<Span> for Point {
    fn add_assign(&mut self, span: Span) {
        *self = *self + span;
    }
}

/// Nothing is before the clock's first.
impl Sub<Span> for Point {
    type Output = Self;

    fn sub(self, span: Span) -> Self {
        let before = self.0.get().saturating_sub(span.0);
        NonZeroU64::new(before).map_or(Self::START, Self)
    }
}

impl Span {
    pub(super) const ZERO: Self = Self(0);
    pub(super) const MAX: Self = Self(u64::MAX);

    pub(super) const fn micros(micros: u64) -> Self {
        Self(micros.saturating_mul(1_000))
    }

    pub(super) const fn millis(millis: u64) -> Self {
        Self::micros(millis.saturating_mul(1_000))
    }

    pub(super) const fn secs(secs: u64) -> Self {
        Self::millis(secs.saturating_mul(1_000))
    }

    pub(super) fn duration(self) -> Duration {
        Duration::from_nanos(self.0)
    }
}

impl From<Duration> for Span {
    fn from(duration: Duration) -> Self {
        let secs = Self::secs(duration.as_secs());
        secs + Self(u64::from(duration.subsec_nanos()))
    }
}

impl Add for Span {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }
}

impl Sub for Span {
    type Output = Self;

    fn sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }
}

impl Mul<u64> for Span {
    type Output = Self;

    fn mul(self, by: u64) -> Self {
        Self(self.0.saturating_mul(by))
    }
}

impl Div<u64> for Span {
    type Output = Self;

    fn div(self, by: u64) -> Self {
        Self(self.0 / by)
    }
}

impl fmt::Debug for Point {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.moment().fmt(f)
    }
}

impl fmt::Debug for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.duration().fmt(f)
    }
}

/// The part of a ttl that we do not dare to use: clocks run within 0.1 % of each other, and a
/// server's expiry has a granularity of milliseconds.
pub(super) fn drift(ttl: Span) -> Span {
    ttl / 100 + Span::millis(2)
}

/// D1: when a lease of `ttl` is over whose command was sent at `start` or later.
pub(super) fn deadline(start: Point, ttl: Span) -> Point {
    start + ttl - drift(ttl)
}
