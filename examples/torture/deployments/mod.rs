//! What is tortured: each deployment starts its servers, breaks them and the wire to them, and says what must hold.
//!
//! A new one is a file beside this one and an entry in [`NAMES`] and [`start`]; what can befall it besides what befalls
//! all is in [`Kind::of`](crate::plan::Kind::of).
//!
//! | file | question it answers |
//! |---|---|
//! | `wires.rs` | how is a wire a child's own, and broken? |
//! | `servers.rs` | what is done to a server? |
//! | `watch.rs` | who was a primary when, whoever made it one? |
//! | `single.rs`, `sentinel.rs`, `cluster.rs`, `quorum.rs` | what is of one deployment's own? |

#[cfg(feature = "cluster")]
mod cluster;
mod quorum;
#[cfg(feature = "sentinel")]
mod sentinel;
mod servers;
mod single;
#[cfg(any(feature = "cluster", feature = "sentinel"))]
mod watch;
pub(crate) mod wires;

use std::time::Duration;

use lockstream::store::RedisStore;
use lockstream::{LockRegistry, LockRegistryBuilder, StoreError};
use redis::from_redis_value;

use self::wires::Wires;
use crate::judge::reigns::Reigns;
use crate::plan::Stroke;
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

/// What one run is about.
pub(crate) struct Deployment {
    pub(crate) wires: Wires,
    pub(crate) servers: Box<dyn Servers>,
}

/// The servers of one run, gone when this is dropped.
pub(crate) trait Servers: Send {
    /// Does to them what is not done to a child or to its wires.
    fn begin(&mut self, stroke: &Stroke);

    /// Undoes what lasts, and returns when all is as it was, which may take a fail-over.
    fn end(&mut self, stroke: &Stroke);

    /// The locks that are in the store, to be called while no fault lasts that makes a server silent.
    fn locks(&mut self) -> Vec<StoredLock>;

    /// What is in the store, and connected to it, besides what stays there for ever.
    fn leftovers(&mut self) -> Leftovers;

    /// Which of them gave leases when: what they were made to forget, and nothing else, explains two at a time.
    fn reigns(&self) -> Reigns;
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

/// Starts one by its name, with wires of its own for each child.
pub(crate) fn start(name: &str, slots: usize) -> Option<Deployment> {
    Some(match name {
        "standalone" => single::start(Program::Usual, slots),
        "valkey" => single::start(Program::Valkey, slots),
        #[cfg(feature = "sentinel")]
        "sentinel" => sentinel::start(slots),
        "quorum" => quorum::start(slots),
        #[cfg(feature = "cluster")]
        "cluster" => cluster::start(slots),
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

/// A fence, which stays, or a queue.
fn is_side_key(key: &str) -> bool {
    is_fence(key) || key.contains(":~queue")
}

fn is_fence(key: &str) -> bool {
    key.strip_prefix(PREFIX)
        .is_some_and(|rest| rest.starts_with(":~fence"))
}

/// The locks in a server; `None`: it has no answer just now, or answers for others.
fn stored_locks(server: &RedisServer) -> Option<Vec<StoredLock>> {
    let keys: Vec<String> = from_redis_value(server.try_cmd(&["KEYS", "*"]).ok()?).ok()?;
    let mut locks = Vec::new();
    // A queue is no lock, and what has gone meanwhile is none.
    for key in keys.into_iter().filter(|key| !is_side_key(key)) {
        let owner = server.try_cmd(&["GET", &key]).ok()?;
        let left = server.try_cmd(&["PTTL", &key]).ok()?;
        let (owner, left): (Option<String>, i64) =
            (from_redis_value(owner).ok()?, from_redis_value(left).ok()?);
        let Some(owner) = owner.filter(|_| left != -2) else {
            continue;
        };
        locks.push(StoredLock {
            key,
            owner,
            left: u64::try_from(left).ok().map(Duration::from_millis),
        });
    }
    Some(locks)
}

/// What is in a server, and connected to it if it counts.
fn leftovers(server: &RedisServer, counts: impl Fn(&ClientRow) -> bool) -> Leftovers {
    let mut leftovers = Leftovers::default();
    for key in server.keys("*").into_iter().filter(|key| !is_fence(key)) {
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
