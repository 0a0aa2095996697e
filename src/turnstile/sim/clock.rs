use crate::base::clock::Moment;

/// The simulator's own time in microseconds, which nobody in it can read.
pub(super) type True = u64;

pub(super) const MILLI: u64 = 1_000;
pub(super) const SECOND: u64 = 1_000_000;

/// A clock that runs a little fast or slow against true time, and may be stepped.
#[derive(Clone, Debug)]
pub(super) struct Clock {
    /// What it shows at true time 0.
    base: i64,
    /// Parts per million that it runs fast.
    ppm: i64,
}

impl Clock {
    pub(super) fn new(base: u64, ppm: i64) -> Self {
        Self {
            base: base as i64,
            ppm,
        }
    }

    pub(super) fn micros(&self, at: True) -> u64 {
        let at = at as i64;
        (self.base + at + at * self.ppm / 1_000_000) as u64
    }

    pub(super) fn moment(&self, at: True) -> Moment {
        Moment::from_micros(self.micros(at))
    }

    /// The first true time at which it shows `moment` or later.
    pub(super) fn when(&self, moment: Moment) -> True {
        let micros = i64::try_from(moment.as_micros()).unwrap_or(i64::MAX / 4) - self.base;
        let guess = i128::from(micros) * 1_000_000 / i128::from(1_000_000 + self.ppm);
        let mut at = u64::try_from((guess - 2).max(0)).unwrap_or(u64::MAX / 8);
        while at < u64::MAX / 8 && self.moment(at) < moment {
            at += 1;
        }
        at
    }

    /// How long, in true time, what it shows as `micros` takes.
    pub(super) fn lasts(&self, micros: u64) -> u64 {
        (i128::from(micros) * 1_000_000 / i128::from(1_000_000 + self.ppm)) as u64
    }

    /// How far it and another clock get apart in a span of true time, without steps.
    pub(super) fn apart(&self, other: &Self, span: True) -> True {
        span * self.ppm.abs_diff(other.ppm) / 1_000_000
    }

    pub(super) fn step(&mut self, by: i64) {
        self.base += by;
    }
}
