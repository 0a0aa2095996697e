//! What is known of a node, and what it and the registry are to be told.

use std::sync::Arc;

use tokio::time::Instant;

use crate::StoreError;
use crate::store::contract::{Op, StoreEvent};

/// One node, as far as it was heard of.
#[derive(Debug)]
pub(super) struct Node {
    /// For errors.
    pub(super) name: String,
    /// Whether its connection stands; `None`: nothing was heard of that.
    pub(super) up: Option<bool>,
    /// Why not.
    pub(super) away: Option<StoreError>,
    /// When its connection was made again: it may have been started again shortly before.
    pub(super) back_at: Option<Instant>,
    /// Which server it is, by its connection that stands, or the last that did.
    pub(super) identity: Option<Arc<str>>,
    /// It is the server of another node, and nothing that it says counts. It is asked only to take back
    /// what it may have been asked for before that was known.
    pub(super) same: Option<StoreError>,
}

impl Node {
    pub(super) fn new(name: String) -> Self {
        Self {
            name,
            up: None,
            away: None,
            back_at: None,
            identity: None,
            same: None,
        }
    }

    pub(super) fn away(&self) -> Option<&StoreError> {
        self.away.as_ref()
    }
}

/// What is done once the state is unlocked.
#[derive(Debug, Default)]
pub(super) struct Deferred {
    pub(super) sends: Vec<(usize, Arc<str>, Op)>,
    pub(super) events: Vec<StoreEvent>,
    /// To be logged: the log sink is the user's code.
    pub(super) same_server: Option<StoreError>,
}
