//! A primary and two replicas, and three sentinels, which children ask where the primary is.
//!
//! A primary tells its replicas after it has answered: what it told last is forgotten when another takes its place.

use super::{Deployment, Leftovers, StoredLock, leftovers, stored_locks};
use crate::plan::{Kind, Stroke};
use crate::support::{ClientRow, Watched};

pub(super) struct Sentinel {
    watched: Watched,
    /// Who was the primary before the fault that lasts.
    old: usize,
}

impl Sentinel {
    pub(super) fn start() -> Self {
        let watched = Watched::start();
        Self { watched, old: 0 }
    }
}

/// Sentinels and replicas stay connected.
fn is_a_caller(client: &ClientRow) -> bool {
    let of_a_server = client.field("flags").contains(['M', 'S']);
    !of_a_server && !client.name().starts_with("sentinel-")
}

impl Deployment for Sentinel {
    fn faults(&self) -> Vec<Kind> {
        Kind::UNDER_SENTINELS.to_vec()
    }

    fn excludes(&self, kind: Kind) -> bool {
        !matches!(kind, Kind::FailOver | Kind::PrimaryKill)
    }

    fn urls(&self, _: usize) -> Vec<String> {
        vec![self.watched.url()]
    }

    fn begin(&mut self, stroke: &Stroke) {
        match stroke.kind {
            Kind::FailOver => {
                self.watched.wait_until_whole();
                self.old = self.watched.begin_fail_over();
            }
            Kind::PrimaryKill => {
                self.watched.wait_until_whole();
                self.old = self.watched.kill_primary();
            }
            Kind::ClientKill => drop(self.watched.primary().client_kill_all()),
            Kind::ScriptFlush => self.watched.primary().script_flush(),
            // Done to children by their parent.
            _ => {}
        }
    }

    fn end(&mut self, stroke: &Stroke) {
        match stroke.kind {
            Kind::FailOver => {
                self.watched.wait_until_promoted(self.old);
                self.watched.demote(self.old);
            }
            Kind::PrimaryKill => {
                self.watched.wait_until_promoted(self.old);
                self.watched.rejoin(self.old);
            }
            _ => {}
        }
    }

    fn locks(&mut self) -> Vec<StoredLock> {
        let primary = self.watched.primary();
        // Sentinels that change its role end all connections, this process's too: here it is made again.
        primary.role();
        stored_locks(primary)
    }

    fn leftovers(&mut self) -> Leftovers {
        self.watched.wait_until_whole();
        // Replicas delete a key when their primary does.
        let mut left = leftovers(self.watched.primary(), is_a_caller);
        for server in &self.watched.servers {
            let others = leftovers(server, is_a_caller);
            left.subscriptions.extend(others.subscriptions);
            left.connections.extend(others.connections);
        }
        left.subscriptions.retain(|it| it != "__sentinel__:hello");
        left
    }
}
