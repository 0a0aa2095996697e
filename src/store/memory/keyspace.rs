use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use super::slot::{FullOwner, OpCx, StoredKey, Ticket};
use crate::store::contract::{Answer, Grant, KeyStatus, Op, Outcome, Owner, ServerTime};

/// How many ops pass between two sweeps, which remove what has expired.
const SWEEP_EVERY: u32 = 1024;

/// The data of the store: lock keys, their queues and the fences, with ttls on a clock that comes in with every
/// operation. It does what the scripts do on Redis, rule by rule.
#[derive(Debug, Default)]
pub(crate) struct Keyspace {
    /// By prefix and key.
    slots: HashMap<(Arc<str>, Arc<str>), StoredKey>,
    /// By prefix: the last epoch.
    fences: HashMap<Arc<str>, u64>,
    /// When the store last lost its data.
    born: Option<ServerTime>,
    ops: u32,
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
}

impl Keyspace {
    /// Runs one operation. `is_live` says whether a registry can be reached (S2).
    pub(crate) fn apply(
        &mut self,
        asking: Asking<'_>,
        op: &Op,
        is_live: &dyn Fn(&Arc<str>) -> bool,
    ) -> (Answer, Option<Delivery>) {
        let now = asking.now;
        self.sweep_now_and_then(now);
        let name = (asking.prefix.clone(), asking.key.clone());
        let slot = self.slots.entry(name.clone()).or_default();
        slot.run_out(now);
        let cx = &mut OpCx {
            now,
            fence: self.fences.entry(asking.prefix.clone()).or_default(),
            is_live,
            delivery: None,
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
            } => {
                if slot.is_held_by(&ours(owner)) || slot.is_called(from) {
                    slot.win(cx, ours(owner), ttl)
                } else {
                    Outcome::NotOld
                }
            }
            Op::Attempt { owner, ttl }
            | Op::Listen { owner, ttl }
            | Op::Enter { owner, ttl, .. } => {
                let owner = ours(owner);
                if slot.claim(cx, &owner) {
                    slot.win(cx, owner, ttl)
                } else {
                    let ends = slot.kept_until(now);
                    let ticket = Ticket { owner, ttl };
                    let score = match *op {
                        Op::Enter { score, .. } => Some(slot.queue.add(now, ticket, score, ends)),
                        Op::Listen { .. } => Some(slot.listeners.add(now, ticket, None, ends)),
                        _ => None,
                    };
                    let left = slot.left(now);
                    Outcome::Busy { left, score }
                }
            }
            Op::Withdraw { owner, .. } | Op::Unlisten { owner } | Op::Release { owner } => {
                let owner = ours(owner);
                match op {
                    Op::Withdraw { .. } => slot.queue.remove(&owner),
                    Op::Unlisten { .. } => slot.listeners.remove(&owner),
                    _ => {}
                }
                let held = slot.is_held_by(&owner);
                if held || slot.lock.is_none() {
                    slot.let_go(cx);
                }
                Outcome::Gone { held }
            }
            Op::Yield { old, new, ttl } => {
                if slot.is_held_by(&ours(old)) {
                    slot.hand_over(cx);
                    if slot.lock.is_none() {
                        slot.win(cx, ours(new), ttl)
                    } else {
                        let (owner, ends) = (ours(new), slot.kept_until(now));
                        let score = slot.queue.add(now, Ticket { owner, ttl }, None, ends);
                        let (left, score) = (slot.left(now), Some(score));
                        Outcome::Busy { left, score }
                    }
                } else {
                    Outcome::NotOld
                }
            }
            Op::Renew { owner, ttl, .. } => {
                if slot.is_held_by(&ours(owner)) {
                    slot.hold(now, ours(owner), ttl);
                    Outcome::Renewed
                } else {
                    Outcome::Lost
                }
            }
            Op::Raise { owner, epoch, age } => {
                if slot.is_held_by(&ours(owner)) {
                    *cx.fence = (*cx.fence).max(epoch);
                    let since = now.saturating_sub(self.born.unwrap_or(0));
                    let age = age.then_some(Duration::from_micros(since));
                    Outcome::Raised { age }
                } else {
                    Outcome::Lost
                }
            }
        };
        let delivery = cx.delivery.take();
        if slot.is_empty() {
            self.slots.remove(&name);
        }
        (Answer { at: now, outcome }, delivery)
    }

    pub(crate) fn inspect(
        &mut self,
        prefix: &Arc<str>,
        key: &Arc<str>,
        now: ServerTime,
    ) -> KeyStatus {
        let mut free = StoredKey::default();
        let slot = self.slots.get_mut(&(prefix.clone(), key.clone()));
        let slot = slot.unwrap_or(&mut free);
        slot.run_out(now);
        let owner = slot.lock.as_ref().map(|held| &held.by);
        KeyStatus {
            owner: owner.map(FullOwner::to_string),
            left: slot.left(now),
            tickets: slot.queue.by_score.len() as u64,
        }
    }

    /// Expires the locks of a key at once, under any prefix.
    #[cfg(any(test, feature = "test-util"))]
    pub(crate) fn expire(&mut self, key: &str) {
        for ((_, name), slot) in &mut self.slots {
            if &**name == key {
                slot.lock = None;
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

    fn sweep_now_and_then(&mut self, now: ServerTime) {
        self.ops += 1;
        if self.ops >= SWEEP_EVERY {
            self.sweep(now);
        }
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
