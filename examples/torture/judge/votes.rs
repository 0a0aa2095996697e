//! Who had each key, by what several servers that know nothing of each other say?
//!
//! A group may have its first key for its whole wait, and get no lease: a quorum keeps no turns, so it may wait for the
//! next key in vain. No child tells of such a key. But a majority of the servers shows it.

use std::collections::{BTreeMap, BTreeSet};

use crate::deployments::StoredLock;

/// What was seen since a moment without faults.
#[derive(Debug, Default)]
pub(crate) struct Votes {
    /// How many servers give a lock together; `None`: one alone does, and this judge sees nothing.
    majority: Option<usize>,
    /// By key.
    elected: BTreeMap<String, BTreeSet<String>>,
}

impl Votes {
    pub(crate) fn of(majority: Option<usize>) -> Self {
        Self {
            majority,
            ..Self::default()
        }
    }

    /// Counts anew.
    pub(crate) fn begin(&mut self) {
        self.elected.clear();
    }

    /// All locks of all servers, seen at about the same time.
    pub(crate) fn count(&mut self, locks: &[StoredLock]) {
        let Some(majority) = self.majority else {
            return;
        };
        for lock in locks {
            let (key, owner) = (lock.name(), &lock.owner);
            let is_same = |other: &&StoredLock| (other.name(), &other.owner) == (key, owner);
            if locks.iter().filter(is_same).count() >= majority {
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
