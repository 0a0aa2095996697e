//! Five servers that know nothing of each other, and for each child a proxy before each of them.
//!
//! What forgets is one server or two at a time, and those are kept out for as long as a lease lasts: nothing that is
//! held overlaps for it. Only what is flushed while its server runs is not noticed by anybody.

use std::time::Duration;

use lockstream::StoreError;
use lockstream::store::{QuorumStore, RedisStore};

use super::single::way;
use super::{Deployment, Leftovers, StoredLock, leftovers, stored_locks};
use crate::callers::TTL;
use crate::plan::{Kind, Stroke};
use crate::support::{Proxy, RedisServer};

const SIZE: usize = 5;
const MAJORITY: usize = SIZE / 2 + 1;

pub(super) struct Quorum {
    servers: Vec<RedisServer>,
    /// By child, then by server.
    wires: Vec<Vec<Proxy>>,
}

/// A child's store.
pub(super) fn open(urls: &[String]) -> Result<QuorumStore, StoreError> {
    let nodes: Result<Vec<_>, _> = urls
        .iter()
        .map(|url| RedisStore::connect_lazy(&**url))
        .collect();
    Ok(QuorumStore::new(nodes?)?.quarantine(TTL))
}

impl Quorum {
    pub(super) fn start(slots: usize) -> Self {
        let server = || RedisServer::builder().keep_data().start();
        let servers: Vec<_> = std::iter::repeat_with(server).take(SIZE).collect();
        let wires = (0..slots)
            .map(|_| servers.iter().map(Proxy::to).collect())
            .collect();
        Self { servers, wires }
    }

    fn struck(&mut self, stroke: &Stroke) -> impl Iterator<Item = &mut RedisServer> {
        let struck = struck(stroke);
        let all = self.servers.iter_mut().enumerate();
        all.filter_map(move |(node, server)| struck.contains(&node).then_some(server))
    }
}

/// Which servers it strikes, or the wires to which: by a number that every stroke has.
fn struck(stroke: &Stroke) -> Vec<usize> {
    let number = usize::try_from(stroke.delay).expect("a few ms");
    let many = match stroke.kind {
        Kind::MajorityStop | Kind::MajorityKill => MAJORITY,
        Kind::ClientKill | Kind::ScriptFlush => 1 + number / SIZE % SIZE,
        // One child may lose its way to any of them, also to all.
        kind if kind.is_of_a_child() => 1 + number / SIZE % SIZE,
        _ => 1 + number / SIZE % (MAJORITY - 1),
    };
    (0..many).map(|nth| (number + nth) % SIZE).collect()
}

impl Deployment for Quorum {
    fn faults(&self) -> Vec<Kind> {
        Kind::IN_A_QUORUM.to_vec()
    }

    fn excludes(&self, kind: Kind) -> bool {
        kind != Kind::FlushAll
    }

    fn urls(&self, slot: usize) -> Vec<String> {
        self.wires[slot].iter().map(Proxy::url).collect()
    }

    fn begin(&mut self, stroke: &Stroke) {
        if stroke.kind.is_of_a_child() {
            let wires = &self.wires[stroke.slot];
            for wire in struck(stroke).into_iter().map(|node| &wires[node]) {
                match stroke.kind {
                    Kind::Cut => wire.cut(),
                    Kind::Refuse => {
                        wire.refuse();
                        wire.cut();
                    }
                    Kind::Delay => {
                        wire.delay(way(stroke.side), Duration::from_millis(stroke.delay));
                    }
                    Kind::HalfClose => wire.half_close(way(stroke.side)),
                    Kind::Blackhole => wire.blackhole(way(stroke.side), true),
                    Kind::Stall => wire.hold(way(stroke.side), true),
                    // Done to children by their parent.
                    _ => {}
                }
            }
            return;
        }
        for server in self.struck(stroke) {
            match stroke.kind {
                Kind::ClientKill => drop(server.client_kill_all()),
                Kind::ClientPause => {
                    let lasts = stroke.lasts.to_string();
                    drop(server.cmd(&["CLIENT", "PAUSE", &lasts, "ALL"]));
                }
                Kind::ScriptFlush => server.script_flush(),
                Kind::FlushAll => server.flushall(),
                Kind::RestartKept | Kind::MajorityKill => server.kill(),
                Kind::RestartEmpty => {
                    server.kill();
                    std::fs::remove_dir_all(server.folder().join("appendonlydir"))
                        .expect("a server that keeps its data has them there");
                }
                Kind::ServerStop | Kind::MajorityStop => server.stop(),
                _ => {}
            }
        }
    }

    fn end(&mut self, stroke: &Stroke) {
        if stroke.kind.is_of_a_child() {
            let wires = &self.wires[stroke.slot];
            for wire in struck(stroke).into_iter().map(|node| &wires[node]) {
                match stroke.kind {
                    Kind::Refuse => wire.accept(),
                    Kind::Delay => wire.delay(way(stroke.side), Duration::ZERO),
                    Kind::Blackhole => {
                        // No wire goes on in the middle of what has vanished.
                        wire.refuse();
                        wire.cut();
                        wire.blackhole(way(stroke.side), false);
                        wire.accept();
                    }
                    Kind::Stall => wire.hold(way(stroke.side), false),
                    _ => {}
                }
            }
            return;
        }
        for server in self.struck(stroke) {
            match stroke.kind {
                Kind::RestartKept | Kind::RestartEmpty | Kind::MajorityKill => server.restart(),
                Kind::ServerStop | Kind::MajorityStop => server.cont(),
                _ => {}
            }
        }
    }

    fn locks(&mut self) -> Vec<StoredLock> {
        let mut all = Vec::new();
        for (node, server) in self.servers.iter().enumerate() {
            for mut lock in stored_locks(server) {
                lock.key = format!("server {node}: {}", lock.key);
                all.push(lock);
            }
        }
        all
    }

    fn leftovers(&mut self) -> Leftovers {
        let mut all = Leftovers::default();
        for server in &self.servers {
            let here = leftovers(server, |_| true);
            all.keys.extend(here.keys);
            all.queue_entries.extend(here.queue_entries);
            all.subscriptions.extend(here.subscriptions);
            all.connections.extend(here.connections);
        }
        all
    }
}
