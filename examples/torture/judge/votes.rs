//! Who had each key, by what the servers say?
//!
//! A group may have its first key for its whole wait, and get no lease: where turns are slow, or where nobody keeps them,
//! as in a quorum, it may wait for the next key in vain. No child tells of such a key. But the servers show it.

use std::collections::{BTreeMap, BTreeSet};

use super::Child;
use crate::deployments::StoredLock;

/// What was seen since a moment without faults.
#[derive(Debug)]
pub(crate) struct Votes {
    /// How many servers give a lock together.
    majority: usize,
    /// By key.
    elected: BTreeMap<String, BTreeSet<String>>,
}

impl Votes {
    pub(crate) fn of(majority: usize) -> Self {
        Self {
            majority,
            elected: BTreeMap::new(),
        }
    }

    /// Counts anew.
    pub(crate) fn begin(&mut self) {
        self.elected.clear();
    }

    /// All locks of all servers, seen at about the same time. What is given to a child that has gone does not count.
    pub(crate) fn count(&mut self, locks: &[StoredLock], at_work: &[Child]) {
        for lock in locks {
            let (key, owner) = (lock.name(), &lock.owner);
            let is_of = |child: &Child| owner.starts_with(&format!("{child}~"));
            let is_same = |other: &&StoredLock| (other.name(), &other.owner) == (key, owner);
            let votes = locks.iter().filter(is_same).count();
            if at_work.iter().any(is_of) && votes >= self.majority {
                let owners = self.elected.entry(key.to_owned()).or_default();
                owners.insert(owner.clone());
            }
        }
    }

    /// Whether somebody got the key. The first that was seen may have had it before.
    pub(crate) fn changed(&self, key: &str) -> bool {
        let owners = self.elected.get(key);
        owners.is_some_and(|owners| owners.len() > 1)
    }
}
