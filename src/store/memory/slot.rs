//! One lock and who waits for it.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::keyspace::Delivery;
use crate::store::contract::{Grant, Outcome, Owner, ServerTime};

/// How much longer than its lock a queue is kept, in microseconds (K3).
const QUEUE_MARGIN: u64 = 60_000_000;

/// For so long a lock that was freed is kept for the first that listened (W7).
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

#[derive(Debug, Default)]
pub(super) struct Slot {
    pub(super) lock: Option<Held>,
    /// By score.
    pub(super) queue: BTreeMap<u64, Ticket>,
    /// When the queue runs out. It goes with the last ticket, and whoever enters the next one has
    /// to set it anew (K3).
    queue_ends: Option<ServerTime>,
    /// Who is told when the lock is freed, by score: a set beside the queue, with the same expiry.
    pub(super) ears: BTreeMap<u64, FullOwner>,
    ears_end: Option<ServerTime>,
}

#[derive(Debug)]
pub(super) struct Held {
    pub(super) by: FullOwner,
    /// `NEVER` if the lock has no ttl, as a stranger's may.
    pub(super) until: ServerTime,
}

pub(super) const NEVER: ServerTime = ServerTime::MAX;

#[derive(Debug)]
pub(super) struct Ticket {
    pub(super) owner: FullOwner,
    ttl: Duration,
}

pub(super) fn micros(ttl: Duration) -> u64 {
    u64::try_from(ttl.as_micros()).unwrap_or(u64::MAX)
}

/// F1: draws grow through the loss of the fence and through a clock set back, each alone.
pub(super) fn next_epoch(fence: &mut u64, now: ServerTime) -> u64 {
    *fence = (*fence + 1).max(now);
    *fence
}

impl Slot {
    pub(super) fn is_empty(&self) -> bool {
        self.lock.is_none() && self.queue.is_empty() && self.ears.is_empty()
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

    pub(super) fn run_out(&mut self, now: ServerTime) {
        self.lock.take_if(|held| held.until <= now);
        if self.queue_ends.is_some_and(|end| end <= now) {
            self.queue.clear();
            self.queue_ends = None;
        }
        if self.ears_end.is_some_and(|end| end <= now) {
            self.ears.clear();
            self.ears_end = None;
        }
    }

    /// The lock is `by`'s for `ttl` from now, or longer if it had it for longer (S3).
    pub(super) fn hold(&mut self, now: ServerTime, by: FullOwner, ttl: Duration) {
        let mut until = now + micros(ttl);
        if let Some(held) = self.lock.as_ref().filter(|held| held.by == by) {
            until = until.max(held.until);
        }
        self.lock = Some(Held { by, until });
    }

    /// Attempt, or enter if a `place` in the queue is wanted.
    #[expect(clippy::too_many_arguments, reason = "one script, its arguments")]
    pub(super) fn claim(
        &mut self,
        now: ServerTime,
        fence: &mut u64,
        live: &dyn Fn(&Arc<str>) -> bool,
        owner: &FullOwner,
        ttl: Duration,
        place: Option<Option<u64>>,
        granted: &mut Option<Delivery>,
    ) -> Outcome {
        let mut won = self.is_held_by(owner);
        if self.lock.is_none() {
            self.drop_dead(live);
            let first = self.queue.first_key_value();
            if first.is_none_or(|(_, ticket)| ticket.owner == *owner) {
                won = true;
            } else {
                *granted = self.hand_over(now, fence, live);
            }
        }
        if won {
            self.take_out(owner);
            self.unlisten(owner);
            self.hold(now, owner.clone(), ttl);
            let epoch = next_epoch(fence, now);
            return Outcome::Won { epoch };
        }
        let score = place.map(|score| self.enter(now, owner, ttl, score));
        let left = self.left(now);
        Outcome::Busy { left, score }
    }

    /// Puts a ticket into the queue, if it is not there (K1, K2); returns its score.
    pub(super) fn enter(
        &mut self,
        now: ServerTime,
        owner: &FullOwner,
        ttl: Duration,
        named: Option<u64>,
    ) -> u64 {
        let standing = self.queue.iter().find(|(_, ticket)| ticket.owner == *owner);
        let score = match standing {
            Some((score, _)) => *score,
            None => {
                let last = self.queue.last_key_value().map_or(0, |(score, _)| *score);
                let named = named.filter(|named| *named <= now);
                let mut score = named.unwrap_or(now.max(last + 1));
                while self.queue.contains_key(&score) {
                    score += 1;
                }
                let owner = owner.clone();
                self.queue.insert(score, Ticket { owner, ttl });
                score
            }
        };
        self.queue_ends = self.queue_ends.max(Some(self.kept_until(now)));
        score
    }

    /// K3: set after every entry, never shorter; an emptied queue had none.
    fn kept_until(&self, now: ServerTime) -> ServerTime {
        now + self.left(now).map_or(0, micros) + QUEUE_MARGIN
    }

    /// W7: its owner is told when the lock is freed, in its turn; returns its place.
    pub(super) fn listen(&mut self, now: ServerTime, owner: FullOwner) -> u64 {
        let standing = self.ears.iter().find(|(_, ear)| **ear == owner);
        let place = match standing {
            Some((place, _)) => *place,
            None => {
                let last = self.ears.last_key_value().map_or(0, |(place, _)| *place);
                let place = now.max(last + 1);
                self.ears.insert(place, owner);
                place
            }
        };
        self.ears_end = self.ears_end.max(Some(self.kept_until(now)));
        place
    }

    /// Takes dead tickets off the front of the queue (S2).
    fn drop_dead(&mut self, live: &dyn Fn(&Arc<str>) -> bool) {
        while let Some(first) = self.queue.first_entry()
            && !live(&first.get().owner.instance)
        {
            first.remove();
        }
        self.forget_empty();
    }

    /// Takes the owner's ticket out of the queue.
    pub(super) fn take_out(&mut self, owner: &FullOwner) {
        self.queue.retain(|_, ticket| ticket.owner != *owner);
        self.forget_empty();
    }

    /// The owner listens no more.
    pub(super) fn unlisten(&mut self, owner: &FullOwner) {
        self.ears.retain(|_, ear| ear != owner);
        self.forget_empty();
    }

    /// As the server deletes a sorted set with its last member, and its expiry with it.
    fn forget_empty(&mut self) {
        if self.queue.is_empty() {
            self.queue_ends = None;
        }
        if self.ears.is_empty() {
            self.ears_end = None;
        }
    }

    /// S2, or else the first that listens is told that the lock is free, and has it for as long as it
    /// may take to ask (W7).
    pub(super) fn let_go(
        &mut self,
        now: ServerTime,
        fence: &mut u64,
        live: &dyn Fn(&Arc<str>) -> bool,
    ) -> Option<Delivery> {
        let granted = self.hand_over(now, fence, live);
        if granted.is_some() {
            return granted;
        }
        let mut told = None;
        while told.is_none()
            && let Some((_, ear)) = self.ears.pop_first()
        {
            if live(&ear.instance) {
                let instance = ear.instance.clone();
                let grant = None;
                told = Some(Delivery { instance, grant });
                self.hold(now, ear, RESERVED);
            }
        }
        self.forget_empty();
        told
    }

    /// S2: the lock is the first live ticket's, or nobody's.
    pub(super) fn hand_over(
        &mut self,
        now: ServerTime,
        fence: &mut u64,
        live: &dyn Fn(&Arc<str>) -> bool,
    ) -> Option<Delivery> {
        self.lock = None;
        self.drop_dead(live);
        let (_, ticket) = self.queue.pop_first()?;
        self.forget_empty();
        let instance = ticket.owner.instance.clone();
        let grant = Grant {
            owner: ticket.owner.owner,
            ttl: ticket.ttl,
            epoch: next_epoch(fence, now),
            at: now,
        };
        self.hold(now, ticket.owner, ticket.ttl);
        let grant = Some(grant);
        Some(Delivery { instance, grant })
    }
}
