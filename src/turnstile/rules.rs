use std::time::Duration;

use super::time::Span;

/// F2: a token has six bits for the passes.
pub(super) const MOST_PASSES: u32 = 63;

/// What a registry has settled for all its keys.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rules {
    pub(crate) local_passes: u32,
    pub(crate) local_span: Duration,
    pub(crate) max_waiters: usize,
}

/// The rules as a turnstile keeps them.
#[derive(Debug)]
pub(super) struct Limits {
    pub(super) passes: u32,
    /// Of a tenure before which none but this registry wanted the key for a while.
    pub(super) passes_alone: u32,
    pub(super) span: Span,
    pub(super) waiters: usize,
}

impl From<Rules> for Limits {
    fn from(rules: Rules) -> Self {
        let passes = rules.local_passes.min(MOST_PASSES);
        Self {
            passes,
            passes_alone: (passes * 4).min(MOST_PASSES),
            span: rules.local_span.into(),
            waiters: rules.max_waiters,
        }
    }
}
