//! Five servers that know nothing of each other, and for each child a proxy before each of them.
//!
//! What forgets is one server or two at a time, and those are kept out for as long as a lease lasts: nothing that is
//! held overlaps for it. Only what is flushed while its server runs is not noticed by anybody.

use lockstream::StoreError;
use lockstream::store::QuorumStore;

use super::wires::Wires;
use super::{
    Deployment, Leftovers, Servers, StoredLock, leftovers, redis_store, servers, stored_locks,
};
use crate::callers::TTL;
use crate::judge::reigns::Reigns;
use crate::log::now;
use crate::plan::{Kind, Stroke};
use crate::support::RedisServer;

const SIZE: usize = 5;
const MAJORITY: usize = SIZE / 2 + 1;

struct Quorum {
    servers: Vec<RedisServer>,
    reigns: Reigns,
}

/// A child's store.
pub(super) fn open(urls: &[String]) -> Result<QuorumStore, StoreError> {
    let nodes: Result<Vec<_>, _> = urls.iter().map(|url| redis_store(url)).collect();
    Ok(QuorumStore::new(nodes?)?.quarantine(TTL))
}

pub(super) fn start(slots: usize) -> Deployment {
    let server = || RedisServer::builder().keep_data().start();
    let servers: Vec<_> = std::iter::repeat_with(server).take(SIZE).collect();
    let ports: Vec<_> = servers.iter().map(RedisServer::port).collect();
    Deployment {
        wires: Wires::of(slots, &ports, struck),
        servers: Box::new(Quorum {
            servers,
            reigns: Reigns::of_the_only_ones(SIZE),
        }),
    }
}

/// Which servers it strikes, or the connection to which: by a number that every stroke has.
fn struck(stroke: &Stroke) -> Vec<usize> {
    let number = stroke.number();
    let many = match stroke.kind {
        Kind::MajorityStop | Kind::MajorityKill => MAJORITY,
        Kind::ClientKill | Kind::ScriptFlush => 1 + number / SIZE % SIZE,
        // One child may lose its way to any of them, also to all.
        kind if kind.is_of_a_child() => 1 + number / SIZE % SIZE,
        _ => 1 + number / SIZE % (MAJORITY - 1),
    };
    (0..many).map(|nth| (number + nth) % SIZE).collect()
}

impl Servers for Quorum {
    fn begin(&mut self, stroke: &Stroke) {
        if struck(stroke).len() >= MAJORITY && servers::silences(stroke.kind) {
            self.reigns.falls_silent(now());
        }
        for node in struck(stroke) {
            // One that comes back without its data is kept out until nothing is held that it has forgotten.
            let forgets = stroke.kind == Kind::FlushAll;
            let reigns = forgets.then_some((&mut self.reigns, node));
            servers::begin(&mut self.servers[node], stroke, reigns);
        }
    }

    fn end(&mut self, stroke: &Stroke) {
        for node in struck(stroke) {
            servers::end(&mut self.servers[node], stroke);
        }
        if struck(stroke).len() >= MAJORITY && servers::silences(stroke.kind) {
            self.reigns.speaks_again(now());
        }
    }

    fn locks(&mut self) -> Vec<StoredLock> {
        let mut all = Vec::new();
        for (node, server) in self.servers.iter().enumerate() {
            for mut lock in stored_locks(server).expect("nothing is done to it just now") {
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

    fn reigns(&self) -> Reigns {
        self.reigns.clone()
    }

    fn majority(&self) -> usize {
        MAJORITY
    }
}
