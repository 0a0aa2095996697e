use std::time::Duration;

use crate::token::MOST_PASSES;

/// The settings of a registry that hold for all its keys.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rules {
    pub(crate) local_passes: u32,
    pub(crate) local_span: Duration,
    pub(crate) max_waiters: usize,
}

/// The same in the form that a turnstile stores.
#[derive(Debug)]
pub(super) struct Limits {
    pub(super) passes: u8,
    /// For a tenure before which no other registry wanted the key for a while.
    pub(super) passes_alone: u8,
    pub(super) waiters: u32,
    pub(super) span: Duration,
}

impl From<Rules> for Limits {
    fn from(rules: Rules) -> Self {
        let passes = |times: u32| {
            let passes = rules.local_passes.saturating_mul(times).min(MOST_PASSES);
            u8::try_from(passes).expect("63 at most")
        };
        Self {
            passes: passes(1),
            passes_alone: passes(4),
            waiters: u32::try_from(rules.max_waiters).unwrap_or(u32::MAX),
            span: rules.local_span,
        }
    }
}
