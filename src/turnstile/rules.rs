use std::time::Duration;

/// What a registry has settled for all its keys.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rules {
    pub(crate) local_passes: u32,
    pub(crate) local_span: Duration,
    pub(crate) max_waiters: usize,
}
