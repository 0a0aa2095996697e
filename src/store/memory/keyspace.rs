use std::collections::hash_map::Entry;
use std::mem;
use std::sync::Arc;
use std::time::Duration;

use foldhash::HashMap;

#[cfg(any(test, feature = "test-util"))]
use super::slot::Holders;
use super::slot::{FullOwner, OpCx, StoredKey, Ticket, left, micros};
use crate::store::contract::{
    Answer, Grant, Holder, KeyStatus, MOST_SEEN, MOST_SHOWN, Op, Outcome, Owner, ServerTime,
};

const MOST_SERVED: usize = 64;

/// How many ops pass between two sweeps, which remove what has expired.
const SWEEP_EVERY: u32 = 1024;

/// The data of the store: lock keys, their queues and the fences, with ttls on a clock that comes in with every
/// operation. It does what the scripts do on Redis, rule by rule.
#[derive(Clone, Debug)]
pub(crate) struct Keyspace {
    /// How many tickets one op serves at most (M4).
    pub(crate) most_served: usize,
    /// By prefix and key.
    slots: HashMap<(Arc<str>, Arc<str>), StoredKey>,
    /// By prefix: the last epoch.
    fences: HashMap<Arc<str>, u64>,
    /// When the store last lost its data.
    born: Option<ServerTime>,
    ops: u32,
}

impl Default for Keyspace {
    fn default() -> Self {
        Self {
            most_served: MOST_SERVED,
            slots: HashMap::default(),
            fences: HashMap::default(),
            born: None,
            ops: 0,
        }
    }
}

/// The caller of an operation, and the time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asking<'a> {
    pub(crate) prefix: &'a Arc<str>,
    pub(crate) instance: &'a Arc<str>,
    pub(crate) key: &'a Arc<str>,
    pub(crate) now: ServerTime,
}

/// A message to a registry.
#[derive(Clone, Debug)]
pub(crate) struct Delivery {
    pub(crate) instance: Arc<str>,
    /// `None`: the lock was freed, and the registry had subscribed to that.
    pub(crate) grant: Option<Grant>,
    /// Whether the registry is to serve the rest of the queue (M4).
    pub(crate) unserved: bool,
}

/// What an operation has done.
#[derive(Debug)]
pub(crate) struct Applied {
    pub(crate) answer: Answer,
    pub(crate) deliveries: Vec<Delivery>,
    /// Whether the caller is to serve the rest of the queue (M4).
    pub(crate) unserved: bool,
}

impl Keyspace {
    /// Runs one operation. `is_live` says whether a registry can be reached (S2).
    pub(crate) fn apply(
        &mut self,
        asking: Asking<'_>,
        op: &Op,
        is_live: &dyn Fn(&Arc<str>) -> bool,
    ) -> Applied {
        let now = asking.now;
        self.ops += 1;
        if self.ops >= SWEEP_EVERY {
            self.sweep(now);
        }
        let name = (asking.prefix.clone(), asking.key.clone());
        // Removed by the same look-up, if it is empty in the end.
        let mut entry = match self.slots.entry(name) {
            Entry::Occupied(mut entry) => {
                entry.get_mut().run_out(now);
                entry
            }
            Entry::Vacant(entry) => entry.insert_entry(StoredKey::default()),
        };
        let slot = entry.get_mut();
        let cx = &mut OpCx {
            now,
            prefix: asking.prefix,
            fences: &mut self.fences,
            is_live,
            deliveries: Vec::new(),
            most_served: self.most_served,
            unserved: false,
        };
        let ours = |owner: Owner| FullOwner {
            instance: asking.instance.clone(),
            owner,
        };
        let outcome = match *op {
            Op::Adopt {
                owner,
                ref from,
                ttl,
                ..
            } => {
                let owner = ours(owner);
                let is_from =
                    |it: &FullOwner| it.owner.mode == owner.owner.mode && it.to_string() == **from;
                // A repeated adoption takes nothing more.
                if slot.holders.contains(&owner) || slot.holders.remove_first(is_from) {
                    slot.win(cx, owner, ttl)
                } else {
                    Outcome::NotOld
                }
            }
            Op::Attempt { owner, ttl }
            | Op::Listen { owner, ttl }
            | Op::Enter { owner, ttl, .. } => {
                let (mode, owner) = (owner.mode, ours(owner));
                let place = match *op {
                    Op::Enter { score, .. } => score,
                    _ => None,
                };
                if let Some(won) = slot.claim(cx, &owner, ttl, place) {
                    won
                } else {
                    let (ends, ticket) = (slot.kept_until(now), Ticket { owner, ttl });
                    let entered = match *op {
                        Op::Enter { .. } => Some(slot.queue.add(now, ticket, place, ends)),
                        Op::Listen { .. } => Some(slot.listeners.add(now, ticket, None, ends)),
                        _ => None,
                    };
                    slot.busy(now, mode, entered)
                }
            }
            Op::Withdraw { owner, .. } | Op::Unlisten { owner } | Op::Release { owner } => {
                let owner = ours(owner);
                match op {
                    Op::Withdraw { .. } => slot.queue.remove(&owner),
                    Op::Unlisten { .. } => slot.listeners.remove(&owner),
                    _ => {}
                }
                let held = slot.holders.remove(&owner);
                slot.let_go(cx);
                Outcome::Gone { held }
            }
            Op::Keep { owner, left } => {
                let owner = ours(owner);
                let held = slot.holders.remove(&owner);
                if held {
                    slot.holders.add(owner.kept(), now + micros(left));
                    slot.tell_first(cx);
                }
                Outcome::Gone { held }
            }
            Op::Evict { ref whose } => {
                let held = slot.holders.remove_first(|it| it.to_string() == **whose);
                slot.let_go(cx);
                Outcome::Gone { held }
            }
            Op::Serve { .. } => {
                slot.let_go(cx);
                Outcome::Gone { held: false }
            }
            Op::Yield { old, new, ttl } => {
                if !slot.holders.remove(&ours(old)) {
                    Outcome::NotOld
                } else {
                    slot.serve(cx, None, 0);
                    let owner = ours(new);
                    if slot.holders.is_empty() {
                        slot.win(cx, owner, ttl)
                    } else {
                        let (ends, ticket) = (slot.kept_until(now), Ticket { owner, ttl });
                        let entered = slot.queue.add(now, ticket, None, ends);
                        slot.busy(now, new.mode, Some(entered))
                    }
                }
            }
            Op::Renew { owner, .. } | Op::Verify { owner } | Op::Raise { owner, .. }
                if !slot.holders.contains(&ours(owner)) =>
            {
                Outcome::Lost
            }
            Op::Renew { owner, ttl, .. } => {
                slot.holders.add(ours(owner), now + micros(ttl));
                Outcome::Renewed
            }
            Op::Verify { .. } => Outcome::Renewed,
            Op::Raise { epoch, age, .. } => {
                let fence = cx.fence();
                *fence = epoch.max(*fence);
                let since = now.saturating_sub(self.born.unwrap_or(0));
                let age = age.then_some(Duration::from_micros(since));
                Outcome::Raised { age }
            }
        };
        let (deliveries, unserved) = (mem::take(&mut cx.deliveries), cx.unserved);
        if slot.is_empty() {
            entry.remove();
        }
        Applied {
            answer: Answer { at: now, outcome },
            deliveries,
            unserved,
        }
    }

    /// The keys under the prefix that begin with `start`, also those that have expired.
    pub(crate) fn scan(&self, prefix: &Arc<str>, start: &str) -> Vec<Arc<str>> {
        let names = self.slots.keys();
        let names = names.filter(|(of, key)| of == prefix && key.starts_with(start));
        names.map(|(_, key)| key.clone()).collect()
    }

    /// `is_live` says whether a registry can be reached.
    pub(crate) fn inspect(
        &mut self,
        prefix: &Arc<str>,
        key: &Arc<str>,
        now: ServerTime,
        is_live: &dyn Fn(&Arc<str>) -> bool,
    ) -> KeyStatus {
        self.look(prefix, key, now, is_live, MOST_SHOWN)
    }

    /// The same for a judge, who must not take for lost what is only not shown: all holders, and all waiters of the first
    /// that are looked at.
    #[cfg(test)]
    pub(crate) fn inspect_all(
        &mut self,
        prefix: &Arc<str>,
        key: &Arc<str>,
        now: ServerTime,
    ) -> KeyStatus {
        self.look(prefix, key, now, &|_| true, usize::MAX)
    }

    fn look(
        &mut self,
        prefix: &Arc<str>,
        key: &Arc<str>,
        now: ServerTime,
        is_live: &dyn Fn(&Arc<str>) -> bool,
        most: usize,
    ) -> KeyStatus {
        let mut free = StoredKey::default();
        let slot = self.slots.get_mut(&(prefix.clone(), key.clone()));
        let slot = slot.unwrap_or(&mut free);
        slot.run_out(now);
        let holders = slot.holders.iter();
        let mut holders: Vec<_> = holders
            .map(|(it, until)| (until, it.to_string(), it))
            .collect();
        holders.sort_unstable();
        let queue = slot.queue.by_score.values().map(|ticket| &ticket.owner);
        let tickets = queue.len();
        let seen = queue.take(MOST_SEEN);
        let (live, dead): (Vec<_>, Vec<_>) = seen.partition(|owner| is_live(&owner.instance));
        KeyStatus {
            taken: slot.holders.taken(),
            holders: holders
                .into_iter()
                .take(most)
                .map(|(until, name, owner)| Holder {
                    name,
                    mode: owner.owner.mode,
                    left: left(now, until),
                })
                .collect(),
            tickets: (tickets - dead.len()) as u64,
            queue: live
                .into_iter()
                .take(most)
                .map(|owner| (owner.to_string(), owner.owner.mode))
                .collect(),
        }
    }

    /// Expires the locks of a key at once, under any prefix.
    #[cfg(any(test, feature = "test-util"))]
    pub(crate) fn expire(&mut self, key: &str) {
        for ((_, name), slot) in &mut self.slots {
            if &**name == key {
                slot.holders = Holders::default();
            }
        }
    }

    /// Deletes everything, as a restart without data does.
    #[cfg(any(test, feature = "test-util"))]
    pub(crate) fn forget(&mut self, now: ServerTime) {
        *self = Self {
            born: Some(now),
            ..Self::default()
        };
    }

    /// How many keys there are, queues and locks together.
    #[cfg(any(test, feature = "test-util"))]
    pub(crate) fn len(&mut self, now: ServerTime) -> usize {
        self.sweep(now);
        self.slots.len()
    }

    fn sweep(&mut self, now: ServerTime) {
        self.ops = 0;
        self.slots.retain(|_, slot| {
            slot.run_out(now);
            !slot.is_empty()
        });
    }
}

#[cfg(test)]
mod tests;
