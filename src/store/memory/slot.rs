//! One lock, its queue and its subscriptions.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::keyspace::Delivery;
use crate::store::contract::{Grant, Outcome, Owner, ServerTime};

/// How much longer than its lock a queue lasts, in microseconds (K3).
const QUEUE_MARGIN: u64 = 60_000_000;

/// How long a freed lock is kept for the first subscriber (W7).
const RESERVED: Duration = Duration::from_millis(100);

/// `<instance>:<sequence>`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct FullOwner {
    pub(super) instance: Arc<str>,
    pub(super) owner: Owner,
}

impl fmt::Display for FullOwner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.instance, self.owner.0)
    }
}

/// What an operation needs besides its key, and the message that it sends.
pub(super) struct OpCx<'a> {
    pub(super) now: ServerTime,
    pub(super) fence: &'a mut u64,
    /// Whether a registry can be reached (S2).
    pub(super) is_live: &'a dyn Fn(&Arc<str>) -> bool,
    pub(super) delivery: Option<Delivery>,
}

impl OpCx<'_> {
    /// F1: epochs grow through the loss of the fence and through a clock that is set back, each alone.
    fn next_epoch(&mut self) -> u64 {
        *self.fence = (*self.fence + 1).max(self.now);
        *self.fence
    }
}

#[derive(Debug, Default)]
pub(super) struct StoredKey {
    pub(super) lock: Option<Held>,
    /// The owners that get the lock next.
    pub(super) queue: Tickets,
    /// The owners that are notified when the lock is free: a set beside the queue, with the same expiry.
    pub(super) listeners: Tickets,
}

#[derive(Debug)]
pub(super) struct Held {
    pub(super) by: FullOwner,
    /// `NEVER` if the lock has no ttl, which a foreign lock may not have.
    pub(super) until: ServerTime,
}

pub(super) const NEVER: ServerTime = ServerTime::MAX;

/// A sorted set, as on the server.
#[derive(Debug, Default)]
pub(super) struct Tickets {
    pub(super) by_score: BTreeMap<u64, Ticket>,
    /// When the set expires.
    ends: ServerTime,
}

#[derive(Debug)]
pub(super) struct Ticket {
    pub(super) owner: FullOwner,
    pub(super) ttl: Duration,
}

impl Tickets {
    /// Adds a ticket if its owner has none (K1, K2), and keeps the set until `ends` at least (K3).
    /// Returns the ticket's score.
    pub(super) fn add(
        &mut self,
        now: ServerTime,
        ticket: Ticket,
        named: Option<u64>,
        ends: ServerTime,
    ) -> u64 {
        if self.by_score.is_empty() {
            // The server deletes a sorted set with its last member, and its expiry with it.
            self.ends = 0;
        }
        self.ends = self.ends.max(ends);
        let mut tickets = self.by_score.iter();
        if let Some((score, _)) = tickets.find(|(_, other)| other.owner == ticket.owner) {
            return *score;
        }
        let last = self.by_score.last_key_value();
        let last = last.map_or(0, |(score, _)| *score);
        let named = named.filter(|named| *named <= now);
        let mut score = named.unwrap_or(now.max(last + 1));
        while self.by_score.contains_key(&score) {
            score += 1;
        }
        self.by_score.insert(score, ticket);
        score
    }

    pub(super) fn remove(&mut self, owner: &FullOwner) {
        self.by_score.retain(|_, ticket| ticket.owner != *owner);
    }

    /// Removes the tickets of unreachable registries from the front (S2).
    fn drop_dead(&mut self, cx: &OpCx<'_>) {
        while let Some(first) = self.by_score.first_entry()
            && !(cx.is_live)(&first.get().owner.instance)
        {
            first.remove();
        }
    }

    fn pop_live(&mut self, cx: &OpCx<'_>) -> Option<Ticket> {
        self.drop_dead(cx);
        self.by_score.pop_first().map(|(_, ticket)| ticket)
    }

    fn run_out(&mut self, now: ServerTime) {
        if self.ends <= now {
            self.by_score.clear();
        }
    }
}

pub(super) fn micros(ttl: Duration) -> u64 {
    u64::try_from(ttl.as_micros()).unwrap_or(u64::MAX)
}

impl StoredKey {
    pub(super) fn is_empty(&self) -> bool {
        self.lock.is_none() && self.queue.by_score.is_empty() && self.listeners.by_score.is_empty()
    }

    pub(super) fn is_held_by(&self, owner: &FullOwner) -> bool {
        self.lock.as_ref().is_some_and(|held| held.by == *owner)
    }

    /// Whether the value of the lock key is this text.
    pub(super) fn is_called(&self, text: &str) -> bool {
        let held = self.lock.as_ref();
        held.is_some_and(|held| held.by.to_string() == text)
    }

    pub(super) fn left(&self, now: ServerTime) -> Option<Duration> {
        let held = self.lock.as_ref().filter(|held| held.until != NEVER)?;
        Some(Duration::from_micros(held.until.saturating_sub(now)))
    }

    /// K3: how long a queue lasts if a ticket is added now.
    pub(super) fn kept_until(&self, now: ServerTime) -> ServerTime {
        now + self.left(now).map_or(0, micros) + QUEUE_MARGIN
    }

    pub(super) fn run_out(&mut self, now: ServerTime) {
        self.lock.take_if(|held| held.until <= now);
        self.queue.run_out(now);
        self.listeners.run_out(now);
    }

    /// Gives the lock to `by` for `ttl` from now, or longer if it had it for longer (S3).
    pub(super) fn hold(&mut self, now: ServerTime, by: FullOwner, ttl: Duration) {
        let mut until = now + micros(ttl);
        if let Some(held) = self.lock.as_ref().filter(|held| held.by == by) {
            until = until.max(held.until);
        }
        self.lock = Some(Held { by, until });
    }

    pub(super) fn win(&mut self, cx: &mut OpCx<'_>, owner: FullOwner, ttl: Duration) -> Outcome {
        self.hold(cx.now, owner, ttl);
        let epoch = cx.next_epoch();
        Outcome::Won { epoch }
    }

    /// Whether the owner may have the lock now. A free lock goes to the first in the queue.
    pub(super) fn claim(&mut self, cx: &mut OpCx<'_>, owner: &FullOwner) -> bool {
        if self.lock.is_none() {
            self.queue.drop_dead(cx);
            let first = self.queue.by_score.first_key_value();
            if first.is_some_and(|(_, ticket)| ticket.owner != *owner) {
                self.hand_over(cx);
            }
        }
        let is_won = self.lock.is_none() || self.is_held_by(owner);
        if is_won {
            self.queue.remove(owner);
            self.listeners.remove(owner);
        }
        is_won
    }

    /// S2: gives the lock to the first live ticket, or frees it.
    pub(super) fn hand_over(&mut self, cx: &mut OpCx<'_>) {
        self.lock = None;
        let Some(Ticket { owner, ttl }) = self.queue.pop_live(cx) else {
            return;
        };
        let grant = Grant {
            owner: owner.owner,
            ttl,
            epoch: cx.next_epoch(),
            at: cx.now,
        };
        cx.delivery = Some(Delivery {
            instance: owner.instance.clone(),
            grant: Some(grant),
        });
        self.hold(cx.now, owner, ttl);
    }

    /// S2. If the queue is empty, the first subscriber is told that the lock is free. The lock is kept for it as long
    /// as a question may take (W7).
    pub(super) fn let_go(&mut self, cx: &mut OpCx<'_>) {
        self.hand_over(cx);
        if self.lock.is_none()
            && let Some(listener) = self.listeners.pop_live(cx)
        {
            cx.delivery = Some(Delivery {
                instance: listener.owner.instance.clone(),
                grant: None,
            });
            self.hold(cx.now, listener.owner, RESERVED);
        }
    }
}
