//! What is known of a node, and what it and the registry are to be told.

use std::sync::Arc;

use tokio::time::Instant;

use crate::StoreError;
use crate::store::contract::{News, Op};

/// One node, as far as it was heard of.
#[derive(Debug, Default)]
pub(super) struct Node {
    /// Whether its connection stands; `None`: nothing was heard of that.
    pub(super) up: Option<bool>,
    /// Why not.
    pub(super) away: Option<StoreError>,
    /// Its connection broke, and it may have been started again: if it does not tell, its votes do
    /// not count until then.
    pub(super) out_until: Option<Instant>,
}

impl Node {
    pub(super) fn away(&self) -> Option<&StoreError> {
        self.away.as_ref()
    }
}

/// What is done once the state is unlocked.
#[derive(Debug, Default)]
pub(super) struct Outbox {
    pub(super) sends: Vec<(usize, Arc<str>, Op)>,
    pub(super) news: Vec<News>,
}
