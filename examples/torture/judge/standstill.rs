//! For how long did the machine stand still in the time that a delay may take?

use std::time::Duration;

/// When (ns) a watch was asked, and for how long the machine had stood still by then.
#[derive(Debug, Default)]
pub(crate) struct Standstills(Vec<(u64, Duration)>);

impl Standstills {
    pub(crate) fn seen(&mut self, at: u64, in_all: Duration) {
        self.0.push((at, in_all));
    }

    /// The most in any time of this length. Between two answers nobody knows when it was, so that counts in full.
    pub(crate) fn most_within(&self, length: Duration) -> Duration {
        let length = length.as_nanos() as u64;
        let mut before = 0;
        let most = self.0.iter().map(|(at, in_all)| {
            let is_long_ago = |(then, _): &(u64, Duration)| then + length <= *at;
            while self.0.get(before + 1).is_some_and(is_long_ago) {
                before += 1;
            }
            *in_all - self.0[before].1
        });
        most.max().unwrap_or_default()
    }
}
