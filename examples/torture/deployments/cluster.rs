//! A cluster of three primaries, each with a replica, which children find by any of the six. Each child has a proxy of
//! its own before all of them, and hears from nodes the ports of those.
//!
//! A primary tells its replica after it has answered: what it told last is forgotten when the replica takes its place
//! without being asked to. Where it is asked to, it waits until it has all.

use super::watch::Watch;
use super::wires::Wires;
use super::{
    Deployment, Leftovers, PREFIX, Servers, StoredLock, connections, servers, stored_locks,
};
use crate::callers::KEYS;
use crate::judge::Span;
use crate::judge::reigns::Reigns;
use crate::log::now;
use crate::plan::{Kind, Stroke};
use crate::support::{ClientRow, Cluster};

/// No server that is only stopped for a moment, or started again, is taken for dead.
const NODE_TIMEOUT: &str = "cluster-node-timeout 3000";

const NODES: usize = 6;
const SHARDS: usize = 3;

struct OfShards {
    // Dropped first: it looks at the servers all the time.
    watch: Watch,
    cluster: Cluster,
    /// Which server the fault that lasts has struck, and since when.
    struck: usize,
    since: u64,
    /// The slot that is on its way, from one shard's primary to another's.
    moving: Option<(u16, usize, usize)>,
}

pub(super) fn start(slots: usize) -> Deployment {
    // Every write is in the file before its reply is sent, as for a server alone.
    let config = [NODE_TIMEOUT, "appendonly yes", "appendfsync no"];
    let cluster = Cluster::replicated(&config);
    let nodes = (0..NODES).map(|index| (cluster.server(index), index % SHARDS));
    let ports: Vec<_> = nodes.clone().map(|(server, _)| server.port()).collect();
    let servers = OfShards {
        watch: Watch::over(nodes),
        cluster,
        struck: 0,
        since: 0,
        moving: None,
    };
    servers.house();
    Deployment {
        wires: Wires::of(slots, &ports, wires)
            .told_of(&ports)
            .with_url(|hosts| format!("redis+cluster://{}/", hosts.join(","))),
        servers: Box::new(servers),
    }
}

impl OfShards {
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

    fn slot(&self, key: &str) -> u16 {
        self.cluster.slot(&format!("{PREFIX}:{key}"))
    }

    /// Tells the judges which keys are where.
    fn house(&self) {
        let keys = self.primaries().map(|primary| {
            let here = |key: &&str| self.cluster.has_slot(primary, self.slot(key));
            KEYS.into_iter().filter(here).map(str::to_owned).collect()
        });
        self.watch.reigns().housed(now(), keys.to_vec());
    }
}

/// Which of a child's wires.
fn wires(stroke: &Stroke) -> Vec<usize> {
    let number = stroke.number();
    let many = 1 + number / NODES % NODES;
    (0..many).map(|nth| (number + nth) % NODES).collect()
}

/// Replicas and primaries stay connected.
fn is_a_caller(client: &ClientRow) -> bool {
    !client.field("flags").contains(['M', 'S'])
}

/// What lies on its primaries. Replicas have the same, and delete a key when their primary does; they are not asked, since
/// they would send us on to it.
pub(crate) fn leftovers_in(cluster: &Cluster) -> Leftovers {
    let mut all = Leftovers {
        subscriptions: cluster.channels(),
        ..Leftovers::default()
    };
    for index in 0..NODES {
        let server = cluster.server(index);
        all.subscriptions.extend(server.channels());
        all.connections.extend(connections(server, is_a_caller));
    }
    for index in (0..SHARDS).map(|shard| cluster.primary_of(shard)) {
        for key in cluster.server(index).keys("*") {
            let (serves, _) = cluster.served(&key, &["PTTL", &key]);
            if serves == index {
                all.add(key.clone(), |command| cluster.cmd(&key, command));
            } else {
                let text = format!("{key}: lies on server {index}, and server {serves} serves it");
                all.misplaced.push(text);
            }
        }
    }
    all
}

impl Servers for OfShards {
    fn begin(&mut self, stroke: &Stroke) {
        self.cluster.wait_until_whole();
        self.house();
        self.since = now();
        self.struck = self.cluster.primary_of(stroke.number() % SHARDS);
        match stroke.kind {
            Kind::ClientKill | Kind::ScriptFlush => {
                for primary in self.primaries() {
                    let server = self.cluster.server_mut(primary);
                    servers::begin(server, stroke, Some((&mut self.watch.reigns(), primary)));
                }
            }
            Kind::FailOver => {
                let replica = self.cluster.server(Cluster::other_of(self.struck));
                replica.cmd(&["CLUSTER", "FAILOVER"]);
            }
            Kind::SlotMove => {
                let key = KEYS[stroke.number() % KEYS.len()];
                let slot = self.slot(key);
                let (from, to) = self.route_of(slot, stroke.slot + stroke.number() % 7);
                self.cluster.begin_move(slot, from, to);
                // Half of what mostly is there.
                self.cluster.move_keys(slot, from, to, 2);
                self.moving = Some((slot, from, to));
            }
            _ => {
                let server = self.cluster.server_mut(self.struck);
                servers::begin(
                    server,
                    stroke,
                    Some((&mut self.watch.reigns(), self.struck)),
                );
            }
        }
    }

    fn end(&mut self, stroke: &Stroke) {
        let replica = Cluster::other_of(self.struck);
        match stroke.kind {
            Kind::FailOver => {
                self.cluster.wait_until_primary(replica);
                let during = Span {
                    from: self.since,
                    to: now(),
                };
                let shard = self.struck % SHARDS;
                self.watch.reigns().handed_over(shard, during);
            }
            Kind::PrimaryKill | Kind::PrimaryStop => {
                self.cluster.wait_until_primary(replica);
                servers::end(self.cluster.server_mut(self.struck), stroke);
            }
            Kind::SlotMove => {
                if let Some((slot, from, to)) = self.moving.take() {
                    while self.cluster.move_keys(slot, from, to, 100) > 0 {}
                    self.cluster.end_move(slot, from, to);
                }
            }
            _ => servers::end(self.cluster.server_mut(self.struck), stroke),
        }
        self.cluster.wait_until_whole();
        self.house();
    }

    fn locks(&mut self) -> Vec<StoredLock> {
        // They may change places just now, though nobody has asked for it.
        let servers = (0..NODES).map(|index| self.cluster.server(index));
        let primaries = servers.filter(|it| it.try_role().as_deref() == Some("master"));
        primaries.filter_map(stored_locks).flatten().collect()
    }

    fn leftovers(&mut self) -> Leftovers {
        self.cluster.wait_until_whole();
        leftovers_in(&self.cluster)
    }

    fn reigns(&self) -> Reigns {
        self.watch.reigns().clone()
    }
}
