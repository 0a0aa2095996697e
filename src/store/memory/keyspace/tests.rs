//! What others do to the server, and what a test sees there.

use std::sync::Arc;
use std::time::Duration;

use super::super::slot::{FullOwner, NEVER, micros};
use super::{Asking, Keyspace};
use crate::store::contract::Owner;

impl Keyspace {
    /// A stranger's `SET NX`, with or without `PX`; false if the key is taken.
    pub(crate) fn seize(&mut self, asking: Asking<'_>, ttl: Option<Duration>) -> bool {
        let name = (asking.prefix.clone(), asking.key.clone());
        let slot = self.slots.entry(name).or_default();
        slot.run_out(asking.now);
        let free = slot.holders.is_empty();
        if free {
            let by = FullOwner {
                instance: asking.instance.clone(),
                owner: Owner::exclusive(0),
            };
            let until = ttl.map_or(NEVER, |ttl| asking.now + micros(ttl));
            slot.holders.add(by, until);
        }
        free
    }

    /// The stranger's plain delete, without a look at the queue.
    pub(crate) fn unseize(&mut self, asking: Asking<'_>) {
        let name = (asking.prefix.clone(), asking.key.clone());
        if let Some(slot) = self.slots.get_mut(&name) {
            slot.holders
                .retain(|held, _| held.instance != *asking.instance);
        }
    }

    /// Whose tickets stand for a key, first come first: instance and owner.
    pub(crate) fn tickets(&mut self, asking: Asking<'_>) -> Vec<(Arc<str>, Owner)> {
        let name = (asking.prefix.clone(), asking.key.clone());
        let Some(slot) = self.slots.get_mut(&name) else {
            return Vec::new();
        };
        slot.run_out(asking.now);
        let tickets = slot.queue.by_score.values().map(|ticket| &ticket.owner);
        tickets.map(|by| (by.instance.clone(), by.owner)).collect()
    }

    /// The scores of these tickets.
    pub(crate) fn scores(&mut self, asking: Asking<'_>) -> Vec<u64> {
        let name = (asking.prefix.clone(), asking.key.clone());
        let slot = self.slots.get(&name);
        slot.map_or_else(Vec::new, |slot| {
            slot.queue.by_score.keys().copied().collect()
        })
    }

    /// Who has a key: instances and owners.
    pub(crate) fn holders(&mut self, asking: Asking<'_>) -> Vec<(Arc<str>, Owner)> {
        let name = (asking.prefix.clone(), asking.key.clone());
        let Some(slot) = self.slots.get_mut(&name) else {
            return Vec::new();
        };
        slot.run_out(asking.now);
        let holders = slot.holders.iter().map(|(by, _)| by);
        holders.map(|by| (by.instance.clone(), by.owner)).collect()
    }

    /// The subscribers of a key in order: instance and owner.
    pub(crate) fn listeners(&mut self, asking: Asking<'_>) -> Vec<(Arc<str>, Owner)> {
        let name = (asking.prefix.clone(), asking.key.clone());
        let Some(slot) = self.slots.get_mut(&name) else {
            return Vec::new();
        };
        slot.run_out(asking.now);
        let listeners = slot.listeners.by_score.values();
        let listeners = listeners.map(|ticket| &ticket.owner);
        listeners
            .map(|by| (by.instance.clone(), by.owner))
            .collect()
    }

    /// The fences are gone, as after an eviction.
    pub(crate) fn forget_fences(&mut self) {
        self.fences.clear();
    }
}
