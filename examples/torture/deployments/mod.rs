//! What is tortured: each deployment starts its servers, breaks them and the wire to them, and says what must hold.
//!
//! A new one is a file beside this one and an entry in [`NAMES`] and [`start`].

mod single;

use std::time::Duration;

use lockstream::store::RedisStore;
use lockstream::{LockRegistry, LockRegistryBuilder, StoreError};

use crate::plan::{Kind, Stroke};
use crate::support::Program;

/// What stands before every name in the store.
pub(crate) const PREFIX: &str = "torture";

/// Every deployment that there is.
pub(crate) const NAMES: [&str; 2] = ["standalone", "valkey"];

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
        _ => return None,
    })
}

/// A child's registry, before its settings.
pub(crate) fn open(urls: &[String]) -> Result<LockRegistryBuilder, StoreError> {
    let [url] = urls else {
        return Err(StoreError::new("no deployment has several urls"));
    };
    Ok(LockRegistry::builder(RedisStore::connect_lazy(&**url)?))
}
