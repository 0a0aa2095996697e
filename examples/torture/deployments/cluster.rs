//! A cluster of three primaries, each with a replica, which children find by any of the six.
//!
//! A primary tells its replica after it has answered: what it told last is forgotten when the replica takes its place
//! without being asked to. Where it is asked to, it waits until it has all.

use super::{Deployment, Leftovers, PREFIX, StoredLock, leftovers, stored_locks};
use crate::callers::KEYS;
use crate::plan::{Kind, Stroke};
use crate::support::{ClientRow, Cluster};

/// No server that is only stopped for a moment, or started again, is taken for dead.
const NODE_TIMEOUT: &str = "cluster-node-timeout 3000";

pub(super) struct OfShards {
    cluster: Cluster,
    /// Which server the fault that lasts has struck.
    struck: usize,
    /// The slot that is on its way, from one shard's primary to another's.
    moving: Option<(u16, usize, usize)>,
}

impl OfShards {
    pub(super) fn start() -> Self {
        // Every write is in the file before its reply is sent, as for a server alone.
        let config = [NODE_TIMEOUT, "appendonly yes", "appendfsync no"];
        Self {
            cluster: Cluster::replicated(&config),
            struck: 0,
            moving: None,
        }
    }

    fn primaries(&self) -> [usize; 3] {
        [0, 1, 2].map(|shard| self.cluster.primary_of(shard))
    }

    /// Where a slot is, and another primary.
    fn route_of(&self, slot: u16, number: usize) -> (usize, usize) {
        let primaries = self.primaries();
        let has = |index: &usize| self.cluster.has_slot(*index, slot);
        let from = primaries.iter().position(has);
        let from = from.expect("somebody has the slot");
        (primaries[from], primaries[(from + 1 + number % 2) % 3])
    }
}

/// Which of all of these it strikes, by a number that every stroke has.
fn pick(stroke: &Stroke, of: usize) -> usize {
    usize::try_from(stroke.delay).expect("a few ms") % of
}

/// Replicas and primaries stay connected.
fn is_a_caller(client: &ClientRow) -> bool {
    !client.field("flags").contains(['M', 'S'])
}

impl Deployment for OfShards {
    fn faults(&self) -> Vec<Kind> {
        Kind::IN_A_CLUSTER.to_vec()
    }

    fn excludes(&self, kind: Kind) -> bool {
        !matches!(kind, Kind::PrimaryKill | Kind::PrimaryStop)
    }

    fn urls(&self, _: usize) -> Vec<String> {
        vec![self.cluster.url()]
    }

    fn begin(&mut self, stroke: &Stroke) {
        // Done to children by their parent.
        if stroke.kind.is_of_a_child() {
            return;
        }
        self.cluster.wait_until_whole();
        self.struck = self.cluster.primary_of(pick(stroke, 3));
        let replica = Cluster::other_of(self.struck);
        match stroke.kind {
            Kind::ClientKill => {
                for primary in self.primaries() {
                    self.cluster.server(primary).client_kill_all();
                }
            }
            Kind::ClientPause => {
                let lasts = stroke.lasts.to_string();
                let server = self.cluster.server(self.struck);
                server.cmd(&["CLIENT", "PAUSE", &lasts, "ALL"]);
            }
            Kind::ScriptFlush => {
                for primary in self.primaries() {
                    self.cluster.server(primary).script_flush();
                }
            }
            Kind::RestartKept | Kind::PrimaryKill => self.cluster.server_mut(self.struck).kill(),
            Kind::ServerStop | Kind::PrimaryStop => self.cluster.server(self.struck).stop(),
            Kind::FailOver => {
                let replica = self.cluster.server(replica);
                replica.cmd(&["CLUSTER", "FAILOVER"]);
            }
            Kind::SlotMove => {
                let key = KEYS[pick(stroke, KEYS.len())];
                let slot = self.cluster.slot(&format!("{PREFIX}:{key}"));
                let (from, to) = self.route_of(slot, stroke.slot + pick(stroke, 7));
                self.cluster.begin_move(slot, from, to);
                // Half of what mostly is there.
                self.cluster.move_keys(slot, from, to, 2);
                self.moving = Some((slot, from, to));
            }
            _ => {}
        }
    }

    fn end(&mut self, stroke: &Stroke) {
        if stroke.kind.is_of_a_child() {
            return;
        }
        let replica = Cluster::other_of(self.struck);
        match stroke.kind {
            Kind::RestartKept => self.cluster.server_mut(self.struck).restart(),
            Kind::ServerStop => self.cluster.server(self.struck).cont(),
            Kind::FailOver => self.cluster.wait_until_primary(replica),
            Kind::PrimaryKill => {
                self.cluster.wait_until_primary(replica);
                self.cluster.server_mut(self.struck).restart();
            }
            Kind::PrimaryStop => {
                self.cluster.wait_until_primary(replica);
                self.cluster.server(self.struck).cont();
            }
            Kind::SlotMove => {
                if let Some((slot, from, to)) = self.moving.take() {
                    while self.cluster.move_keys(slot, from, to, 100) > 0 {}
                    self.cluster.end_move(slot, from, to);
                }
            }
            _ => {}
        }
        self.cluster.wait_until_whole();
    }

    fn locks(&mut self) -> Vec<StoredLock> {
        let mut locks = Vec::new();
        for primary in self.primaries() {
            locks.extend(stored_locks(self.cluster.server(primary)));
        }
        locks
    }

    fn leftovers(&mut self) -> Leftovers {
        self.cluster.wait_until_whole();
        let mut all = Leftovers::default();
        for primary in self.primaries() {
            // Replicas delete a key when their primary does.
            let here = leftovers(self.cluster.server(primary), is_a_caller);
            all.keys.extend(here.keys);
            all.queue_entries.extend(here.queue_entries);
            for index in [primary, Cluster::other_of(primary)] {
                let there = leftovers(self.cluster.server(index), is_a_caller);
                all.subscriptions.extend(there.subscriptions);
                all.connections.extend(there.connections);
            }
        }
        all.subscriptions.extend(self.cluster.channels());
        all
    }
}
