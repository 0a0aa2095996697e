//! What is tortured: each deployment starts its servers, breaks them and the wire to them, and says what must hold.
//!
//! A new one is a file beside this one and an entry in [`NAMES`] and [`start`].

#[cfg(feature = "cluster")]
mod cluster;
mod quorum;
mod sentinel;
mod single;

use std::time::Duration;

use lockstream::store::RedisStore;
use lockstream::{LockRegistry, LockRegistryBuilder, StoreError};

use crate::plan::{Kind, Stroke};
use crate::support::{ClientRow, Program, RedisServer};

/// What stands before every name in the store.
pub(crate) const PREFIX: &str = "torture";

/// Every deployment that there is.
pub(crate) const NAMES: &[&str] = &[
    "standalone",
    "valkey",
    #[cfg(feature = "sentinel")]
    "sentinel",
    "quorum",
    #[cfg(feature = "cluster")]
    "cluster",
];

/// The servers of one run, gone when this is dropped.
pub(crate) trait Deployment {
    /// Which faults it can take.
    fn faults(&self) -> Vec<Kind>;

    /// Whether two never hold a key at once, also while this happens: false where what was acknowledged may be forgotten.
    fn excludes(&self, kind: Kind) -> bool;

    /// Where the child in this slot finds its store: what its [`open`] gets.
    fn urls(&self, slot: usize) -> Vec<String>;

    /// Does it, to a server or to a child's wire. Children are not this one's.
    fn begin(&mut self, stroke: &Stroke);

    /// Undoes what lasts.
    fn end(&mut self, stroke: &Stroke);

    /// The locks that are in the store, to be called while no fault lasts that makes a server silent.
    fn locks(&mut self) -> Vec<StoredLock>;

    /// What is in the store, and connected to it, besides what stays there for ever.
    fn leftovers(&mut self) -> Leftovers;
}

/// A lock as it lies in a store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StoredLock {
    pub(crate) key: String,
    pub(crate) owner: String,
    /// `None`: it never runs out.
    pub(crate) left: Option<Duration>,
}

/// What nobody should find there when all have gone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Leftovers {
    pub(crate) keys: Vec<String>,
    pub(crate) queue_entries: Vec<String>,
    pub(crate) subscriptions: Vec<String>,
    pub(crate) connections: Vec<String>,
}

/// Starts one by its name, with a wire of its own for each child.
pub(crate) fn start(name: &str, slots: usize) -> Option<Box<dyn Deployment>> {
    Some(match name {
        "standalone" => Box::new(single::Single::start(Program::Usual, slots)),
        "valkey" => Box::new(single::Single::start(Program::Valkey, slots)),
        "sentinel" if cfg!(feature = "sentinel") => Box::new(sentinel::Sentinel::start()),
        "quorum" => Box::new(quorum::Quorum::start(slots)),
        #[cfg(feature = "cluster")]
        "cluster" => Box::new(cluster::OfShards::start()),
        _ => return None,
    })
}

/// A child's registry, before its settings.
pub(crate) fn open(urls: &[String]) -> Result<LockRegistryBuilder, StoreError> {
    let [url] = urls else {
        return Ok(LockRegistry::builder(quorum::open(urls)?));
    };
    Ok(LockRegistry::builder(RedisStore::connect_lazy(&**url)?))
}

/// Keys of the prefix, apart from the fences, which stay.
fn keys(server: &RedisServer) -> Vec<String> {
    let fence = format!("{PREFIX}:~fence");
    let mut keys = server.keys("*");
    keys.retain(|key| !key.starts_with(&fence));
    keys
}

/// The locks in a server.
fn stored_locks(server: &RedisServer) -> Vec<StoredLock> {
    let mut locks = Vec::new();
    for key in keys(server) {
        // A queue is no lock, and what has gone meanwhile is none.
        if key.contains(":~queue") {
            continue;
        }
        let Some(owner) = server.get(&key) else {
            continue;
        };
        let left = server.pttl(&key);
        if left == -2 {
            continue;
        }
        locks.push(StoredLock {
            key,
            owner,
            left: u64::try_from(left).ok().map(Duration::from_millis),
        });
    }
    locks
}

/// What is in a server, and connected to it if it counts.
fn leftovers(server: &RedisServer, counts: impl Fn(&ClientRow) -> bool) -> Leftovers {
    let mut leftovers = Leftovers::default();
    for key in keys(server) {
        match key.contains(":~queue") {
            true => {
                let entries: Vec<String> = server.ask(&["ZRANGE", &key, "0", "-1"]);
                let entries = entries.into_iter().map(|entry| format!("{key}: {entry}"));
                leftovers.queue_entries.extend(entries);
            }
            false => leftovers.keys.push(key),
        }
    }
    leftovers.subscriptions = server.channels();
    let clients = server.clients();
    leftovers.connections = clients
        .iter()
        .filter(|client| counts(client))
        .map(|client| format!("{} {}", client.id(), client.last_command()))
        .collect();
    leftovers
}
