//! The state of a node, and which of its replies count.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::ballot::{NodeReply, Quorum};
use super::fault::Fault;
use crate::base::StoreError;
use crate::store::contract::Outcome;

#[derive(Debug, Default)]
pub(super) struct Node {
    /// Its name, for errors.
    pub(super) name: String,
    pub(super) connection: Connection,
    /// When its connection was last made: the node may have restarted shortly before.
    pub(super) connected_at: Option<Instant>,
    /// The server of its present or last connection.
    pub(super) identity: Option<Arc<str>>,
}

/// The connection to a node.
#[derive(Debug, Default)]
pub(super) enum Connection {
    #[default]
    /// No event came from it yet.
    Unknown,
    Up,
    Away(StoreError),
    /// It was lost, and may not be needed since then. Its session connects again for the next op.
    Idle,
    /// It leads to the server of another node, so its replies do not count. The node only gets releases of what it was
    /// asked for before that was known.
    Duplicate(StoreError),
}

/// Whether too few nodes are up for a majority.
pub(super) fn is_down(nodes: &[Node]) -> bool {
    let quorum = Quorum { size: nodes.len() };
    let away = nodes
        .iter()
        .filter(|node| node.unavailable(false).is_some());
    away.count() > quorum.spare()
}

impl Node {
    pub(super) fn new(name: String) -> Self {
        Self {
            name,
            ..Self::default()
        }
    }

    pub(super) fn is_up(&self) -> bool {
        matches!(self.connection, Connection::Up)
    }

    pub(super) fn ask_again(&mut self) {
        if let Connection::Away(_) = self.connection {
            self.connection = Connection::Idle;
        }
    }

    /// Why it is not asked, if so: for a release, or for anything else.
    pub(super) fn unavailable(&self, is_release: bool) -> Option<&StoreError> {
        match &self.connection {
            Connection::Unknown | Connection::Up | Connection::Idle => None,
            Connection::Duplicate(_) if is_release => None,
            Connection::Away(error) | Connection::Duplicate(error) => Some(error),
        }
    }

    /// The reply as it counts.
    ///
    /// A node that has restarted may have forgotten its votes. Its vote for a new owner does not count until every
    /// lease that it may have voted for is over. A node that does not report its age may have restarted just before its
    /// connection was made.
    pub(super) fn check(
        &self,
        now: Instant,
        quarantine: Option<Duration>,
        reply: NodeReply,
    ) -> NodeReply {
        if let Connection::Duplicate(error) = &self.connection {
            return NodeReply::Never(error.clone());
        }
        let (Some(quarantine), NodeReply::Said(Outcome::Raised { age })) = (quarantine, &reply)
        else {
            return reply;
        };
        let fault = match age {
            Some(age) if *age < quarantine => Fault::TooYoung {
                age: *age,
                quarantine,
            },
            None if self.connected_at.is_none_or(|at| now < at + quarantine) => {
                Fault::UnknownAge { quarantine }
            }
            _ => return reply,
        };
        NodeReply::Never(fault.into())
    }
}
