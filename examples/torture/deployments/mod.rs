//! What is tortured: each deployment starts its servers, breaks them and the connection to them, and says what must hold.
//!
//! A new one is a file beside this one and an entry in [`NAMES`] and [`start`]; what can befall it besides what befalls
//! all is in [`Kind::of`](crate::plan::Kind::of).
//!
//! | file | question it answers |
//! |---|---|
//! | `wires.rs` | how is a connection a child's own, and broken? |
//! | `servers.rs` | what is done to a server? |
//! | `watch.rs` | who was a primary when, whoever made it one? |
//! | `single.rs`, `sentinel.rs`, `cluster.rs`, `quorum.rs`, `postgres.rs` | what is of one deployment's own? |

pub(crate) mod cluster;
pub(crate) mod postgres;
mod quorum;
mod sentinel;
mod servers;
mod single;
mod watch;
pub(crate) mod wires;

use std::time::Duration;

use lockstream::store::RedisStore;
use lockstream::{LockRegistry, LockRegistryBuilder, StoreError};
use redis::{Value, from_redis_value};

use self::wires::Wires;
use crate::judge::Child;
use crate::judge::reigns::Reigns;
use crate::plan::Stroke;
use crate::support::{ClientRow, Program, RedisServer};

/// What stands before every name in the store.
pub(crate) const PREFIX: &str = "torture";

/// When a call counts as unanswered, if nothing else is said.
const RESPONSE_TIMEOUT: Duration = Duration::from_millis(400);

/// How long a child that was hit may take to its next lease, if nothing else is said.
// It connects again after pauses of 3.2 s at most for the first three attempts, and of 2 s for each one after that (G1).
// Some faults that come meanwhile cost it another attempt. Waiting adds little: no ttl here is longer than 600 ms, so a
// waiter whose grant was lost asks again within 650 ms (W2).
const LONGEST_RECOVERY: Duration = Duration::from_secs(10);

/// Every deployment that there is.
pub(crate) const NAMES: &[&str] = &[
    "standalone",
    "valkey",
    "sentinel",
    "quorum",
    "cluster",
    "postgres",
    "postgres-async",
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

    /// How many of them give a lock together.
    fn majority(&self) -> usize {
        1
    }

    /// How long a child that was hit may take to its next lease.
    fn longest_recovery(&self) -> Duration {
        LONGEST_RECOVERY
    }

    /// What came of the table that transactions have updated, where there is one.
    fn table(&mut self) -> TableVerdict {
        TableVerdict::default()
    }

    /// What they have said since they were started last, where that tells more than the logs of the children.
    fn log(&self) -> Option<String> {
        None
    }
}

/// A table whose updates were fenced.
#[derive(Clone, Debug, Default)]
pub(crate) struct TableVerdict {
    pub(crate) updates: u64,
    pub(crate) breaches: Vec<String>,
}

/// A lock as it lies in a store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StoredLock {
    pub(crate) key: String,
    pub(crate) owner: String,
    /// `None`: it never runs out.
    pub(crate) left: Option<Duration>,
}

impl StoredLock {
    /// The key as callers name it.
    pub(crate) fn name(&self) -> &str {
        let (_, name) = self.key.rsplit_once(':').unwrap_or(("", &self.key));
        name
    }
}

/// What nobody should find there when all have gone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Leftovers {
    pub(crate) keys: Vec<String>,
    pub(crate) queue_entries: Vec<String>,
    pub(crate) subscriptions: Vec<String>,
    pub(crate) connections: Vec<String>,
    /// Keys on a node that does not serve their slot. Nobody is shown them or may write them there, so they are what
    /// the moving of a slot has left behind, and no breach by themselves.
    pub(crate) misplaced: Vec<String>,
}

/// Starts one by its name, with wires of its own for each child.
pub(crate) fn start(name: &str, slots: usize) -> Option<Deployment> {
    Some(match name {
        "standalone" => single::start(Program::Usual, slots),
        "valkey" => single::start(Program::Valkey, slots),
        "sentinel" => sentinel::start(slots),
        "quorum" => quorum::start(slots),
        "cluster" => cluster::start(slots),
        "postgres" => postgres::start(false, slots),
        "postgres-async" => postgres::start(true, slots),
        _ => return None,
    })
}

/// A child's registry, before its settings.
pub(crate) fn open(urls: &[String]) -> Result<LockRegistryBuilder, StoreError> {
    let [url] = urls else {
        return Ok(LockRegistry::builder(quorum::open(urls)?));
    };
    if postgres::is_here(url) {
        return Ok(LockRegistry::builder(postgres::open(url)?));
    }
    Ok(LockRegistry::builder(redis_store(url)?))
}

/// When a call of a child counts as unanswered.
pub(crate) fn response_timeout(urls: &[String]) -> Duration {
    if postgres::is_here(&urls[0]) {
        return postgres::RESPONSE_TIMEOUT;
    }
    RESPONSE_TIMEOUT
}

/// How many callers of a sort a child has, of so many that it should have. On PostgreSQL an operation costs ten times as
/// much and more, and other calls wait for its transaction: with all of these callers a slow machine gives leases that are
/// over when they come. So there are half as many, but two of those of which there should be two.
pub(crate) fn callers_of_a_sort(urls: &[String], many: u64) -> u64 {
    if postgres::is_here(&urls[0]) {
        return many.div_ceil(2).max(many.min(2));
    }
    many
}

/// How long a call may wait for a connection.
fn connect_timeout(urls: &[String]) -> Duration {
    if postgres::is_here(&urls[0]) {
        return postgres::CONNECT_TIMEOUT;
    }
    RESPONSE_TIMEOUT
}

/// How long a call may take that nobody answers.
pub(crate) fn longest_silence(urls: &[String]) -> Duration {
    connect_timeout(urls) + response_timeout(urls)
}

/// Whether readers and permits are had there: not on a quorum.
pub(crate) fn shares(urls: &[String]) -> bool {
    urls.len() == 1
}

/// A fence, which stays, or a queue.
fn is_side_key(key: &str) -> bool {
    is_fence(key) || is_waiting_set(key)
}

fn is_fence(key: &str) -> bool {
    key.strip_prefix(PREFIX)
        .is_some_and(|rest| rest.starts_with(":~fence"))
}

/// Whether a key holds those who wait, or listen.
fn is_waiting_set(key: &str) -> bool {
    key.contains(":~queue") || key.contains(":~listen")
}

/// The locks in a server; `None`: it has no answer just now, or answers for others.
fn stored_locks(server: &RedisServer) -> Option<Vec<StoredLock>> {
    let keys: Vec<String> = from_redis_value(server.try_cmd(&["KEYS", "*"]).ok()?).ok()?;
    let mut locks = Vec::new();
    // A queue is no lock, and what has gone meanwhile is none.
    for key in keys.into_iter().filter(|key| !is_side_key(key)) {
        // A shared lock is a set of its holders.
        let owner = server
            .try_cmd(&["GET", &key])
            .map(|it| Value::Array(vec![it]));
        let owners = owner.or_else(|error| match error.code() {
            Some("WRONGTYPE") => server.try_cmd(&["ZRANGE", &key, "0", "-1"]),
            _ => Err(error),
        });
        let owners = match owners {
            // One that is on its way to another node, or was left behind; or one that has just changed its kind.
            Err(error) if matches!(error.code(), Some("MOVED" | "ASK" | "WRONGTYPE")) => continue,
            owners => owners.ok()?,
        };
        let left = server.try_cmd(&["PTTL", &key]).ok()?;
        let (owners, left): (Vec<Option<String>>, i64) =
            (from_redis_value(owners).ok()?, from_redis_value(left).ok()?);
        for owner in owners.into_iter().flatten().filter(|_| left != -2) {
            locks.push(StoredLock {
                key: key.clone(),
                owner,
                left: u64::try_from(left).ok().map(Duration::from_millis),
            });
        }
    }
    Some(locks)
}

/// What is in a server, and connected to it if it counts.
fn leftovers(server: &RedisServer, counts: impl Fn(&ClientRow) -> bool) -> Leftovers {
    let mut leftovers = Leftovers {
        subscriptions: server.channels(),
        connections: connections(server, counts),
        ..Leftovers::default()
    };
    for key in server.keys("*") {
        leftovers.add(key, |command| server.cmd(command));
    }
    leftovers
}

/// Who is connected, if it counts.
fn connections(server: &RedisServer, counts: impl Fn(&ClientRow) -> bool) -> Vec<String> {
    let clients = server.clients();
    let counting = clients.iter().filter(|client| counts(client));
    let told = counting.map(|client| format!("{} {}", client.id(), client.last_command()));
    told.collect()
}

impl Leftovers {
    /// Whether places in queues are all that is left, and none of them is of one of these children.
    pub(crate) fn are_places_of_others(&self, children: &[Child]) -> bool {
        let of_one = |entry: &String| {
            let owner = entry.rsplit_once(": ").map_or("", |(_, owner)| owner);
            let named = |child: &Child| owner.starts_with(&format!("{child}~"));
            children.iter().any(named)
        };
        let others = Self {
            queue_entries: Vec::new(),
            ..self.clone()
        };
        others == Self::default() && !self.queue_entries.iter().any(of_one)
    }

    /// A key that was found, and is asked about by `ask`.
    fn add(&mut self, key: String, ask: impl Fn(&[&str]) -> Value) {
        if is_fence(&key) {
            return;
        }
        if !is_waiting_set(&key) {
            return self.keys.push(key);
        }
        let entries: Vec<String> =
            from_redis_value(ask(&["ZRANGE", &key, "0", "-1"])).expect("a queue is a sorted set");
        let entries = entries.into_iter().map(|entry| format!("{key}: {entry}"));
        self.queue_entries.extend(entries);
    }
}

/// A first call waits for a connection as long as one may take to be made: no longer than for any other answer, or a
/// caller whose network is cut off would wait for seconds, and the judge could not tell that from one who was forgotten.
pub(crate) fn redis_store(url: &str) -> Result<RedisStore, StoreError> {
    let store = RedisStore::builder(url).connect_timeout(RESPONSE_TIMEOUT);
    store.connect_lazy()
}
