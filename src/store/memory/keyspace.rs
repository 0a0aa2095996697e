use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::store::contract::{Answer, Grant, Op, Outcome, Owner, ServerTime, Sight};

/// How much longer than its lock a queue is kept, in microseconds (K3).
const QUEUE_MARGIN: u64 = 60_000_000;

/// For so long a lock that was freed is kept for the first that listened (W7).
const RESERVED: Duration = Duration::from_millis(100);

/// After so many ops, what has run out untouched is swept up.
const SWEEP_EVERY: u32 = 1024;

/// The store as data: lock keys, their queues and the fences, with ttls on a clock that comes in
/// with every op. It does what the scripts do on Redis, rule by rule.
#[derive(Debug, Default)]
pub(crate) struct Keyspace {
    /// By prefix and key.
    slots: HashMap<(Arc<str>, Arc<str>), Slot>,
    /// By prefix: the last draw.
    fences: HashMap<Arc<str>, u64>,
    /// When everything was forgotten last.
    born: Option<ServerTime>,
    ops: u32,
}

/// Who asks, and when.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asking<'a> {
    pub(crate) prefix: &'a Arc<str>,
    pub(crate) instance: &'a Arc<str>,
    pub(crate) key: &'a Arc<str>,
    pub(crate) now: ServerTime,
}

/// What a registry is to be told.
#[derive(Clone, Debug)]
pub(crate) struct Delivery {
    pub(crate) instance: Arc<str>,
    /// `None`: the lock was freed, and it listened.
    pub(crate) grant: Option<Grant>,
}

/// `<instance>:<sequence>`.
#[derive(Clone, Debug, PartialEq, Eq)]
struct FullOwner {
    instance: Arc<str>,
    owner: Owner,
}

impl fmt::Display for FullOwner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.instance, self.owner.0)
    }
}

#[derive(Debug, Default)]
struct Slot {
    lock: Option<Held>,
    /// By score.
    queue: BTreeMap<u64, Ticket>,
    /// Who is told when the lock is freed, by score. (On Redis they stand in the queue itself, with
    /// tickets that say so.)
    ears: BTreeMap<u64, FullOwner>,
    /// When the queue runs out. It goes with the last ticket, and whoever enters the next one has
    /// to set it anew (K3).
    queue_ends: Option<ServerTime>,
}

#[derive(Debug)]
struct Held {
    by: FullOwner,
    /// `NEVER` if the lock has no ttl, as a stranger's may.
    until: ServerTime,
}

const NEVER: ServerTime = ServerTime::MAX;

#[derive(Debug)]
struct Ticket {
    owner: FullOwner,
    ttl: Duration,
}

fn micros(ttl: Duration) -> u64 {
    u64::try_from(ttl.as_micros()).unwrap_or(u64::MAX)
}

/// F1: draws grow through the loss of the fence and through a clock set back, each alone.
fn draw(fence: &mut u64, now: ServerTime) -> u64 {
    *fence = (*fence + 1).max(now);
    *fence
}

impl Keyspace {
    /// Does one op. `live` tells whether a registry can be reached (S2).
    pub(crate) fn apply(
        &mut self,
        asking: Asking<'_>,
        op: &Op,
        live: &dyn Fn(&Arc<str>) -> bool,
    ) -> (Answer, Option<Delivery>) {
        let now = asking.now;
        self.sweep_now_and_then(now);
        let name = (asking.prefix.clone(), asking.key.clone());
        let fence = self.fences.entry(asking.prefix.clone()).or_default();
        let slot = self.slots.entry(name.clone()).or_default();
        slot.run_out(now);
        let ours = |owner: Owner| FullOwner {
            instance: asking.instance.clone(),
            owner,
        };
        let mut granted = None;
        let outcome = match *op {
            Op::Adopt {
                owner,
                ref from,
                ttl,
            } => {
                if slot.is_held_by(&ours(owner)) || slot.is_called(from) {
                    slot.hold(now, ours(owner), ttl);
                    let draw = draw(fence, now);
                    Outcome::Won { draw }
                } else {
                    Outcome::NotOld
                }
            }
            Op::Attempt { owner, ttl } => {
                slot.claim(now, fence, live, &ours(owner), ttl, None, &mut granted)
            }
            Op::Listen { owner, ttl } => {
                let owner = ours(owner);
                match slot.claim(now, fence, live, &owner, ttl, None, &mut granted) {
                    Outcome::Busy { left, .. } => {
                        let score = Some(slot.listen(now, owner));
                        Outcome::Busy { left, score }
                    }
                    won => won,
                }
            }
            Op::Enter { owner, ttl, score } => {
                let place = Some(score);
                slot.claim(now, fence, live, &ours(owner), ttl, place, &mut granted)
            }
            Op::Withdraw { owner } => {
                let owner = ours(owner);
                slot.take_out(&owner);
                let held = slot.is_held_by(&owner);
                if held || slot.lock.is_none() {
                    granted = slot.let_go(now, fence, live);
                }
                Outcome::Gone { held }
            }
            Op::Release { owner } => {
                let held = slot.is_held_by(&ours(owner));
                if held || slot.lock.is_none() {
                    granted = slot.let_go(now, fence, live);
                }
                Outcome::Gone { held }
            }
            Op::Yield { old, new, ttl } => {
                if slot.is_held_by(&ours(old)) {
                    granted = slot.hand_over(now, fence, live);
                    if granted.is_none() {
                        slot.hold(now, ours(new), ttl);
                        let draw = draw(fence, now);
                        Outcome::Won { draw }
                    } else {
                        let score = slot.enter(now, &ours(new), ttl, None);
                        let left = slot.left(now);
                        Outcome::Busy {
                            left,
                            score: Some(score),
                        }
                    }
                } else {
                    Outcome::NotOld
                }
            }
            Op::Renew { owner, ttl } => {
                if slot.is_held_by(&ours(owner)) {
                    slot.hold(now, ours(owner), ttl);
                    Outcome::Renewed
                } else {
                    Outcome::Lost
                }
            }
            Op::Raise { owner, draw, age } => {
                if slot.is_held_by(&ours(owner)) {
                    *fence = (*fence).max(draw);
                    let since = now.saturating_sub(self.born.unwrap_or(0));
                    let age = age.then_some(Duration::from_micros(since));
                    Outcome::Raised { age }
                } else {
                    Outcome::Lost
                }
            }
        };
        if slot.is_empty() {
            self.slots.remove(&name);
        }
        (Answer { at: now, outcome }, granted)
    }

    pub(crate) fn inspect(&mut self, prefix: &Arc<str>, key: &Arc<str>, now: ServerTime) -> Sight {
        let slot = self.slots.get_mut(&(prefix.clone(), key.clone()));
        let Some(slot) = slot else {
            return Sight {
                owner: None,
                left: None,
                tickets: 0,
            };
        };
        slot.run_out(now);
        let owner = slot.lock.as_ref().map(|held| &held.by);
        Sight {
            owner: owner.map(FullOwner::to_string),
            left: slot.left(now),
            tickets: slot.queue.len() as u64,
        }
    }

    /// Lets the locks of a key run out at once, under whatever prefix.
    #[cfg(any(test, feature = "test-util"))]
    pub(crate) fn expire(&mut self, key: &str) {
        for ((_, name), slot) in &mut self.slots {
            if &**name == key {
                slot.lock = None;
            }
        }
    }

    /// Everything is gone, as after a restart without data.
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

/// What others do to the server, for tests.
#[cfg(test)]
impl Keyspace {
    /// A stranger's `SET NX`, with or without `PX`; false if the key is taken.
    pub(crate) fn seize(&mut self, asking: Asking<'_>, ttl: Option<Duration>) -> bool {
        let name = (asking.prefix.clone(), asking.key.clone());
        let slot = self.slots.entry(name).or_default();
        slot.run_out(asking.now);
        let free = slot.lock.is_none();
        if free {
            let by = FullOwner {
                instance: asking.instance.clone(),
                owner: Owner(0),
            };
            let until = ttl.map_or(NEVER, |ttl| asking.now + micros(ttl));
            slot.lock = Some(Held { by, until });
        }
        free
    }

    /// The stranger's plain delete, without a look at the queue.
    pub(crate) fn unseize(&mut self, asking: Asking<'_>) {
        let name = (asking.prefix.clone(), asking.key.clone());
        if let Some(slot) = self.slots.get_mut(&name) {
            slot.lock
                .take_if(|held| held.by.instance == *asking.instance);
        }
    }

    /// Whose tickets stand for a key, first come first: instance and owner.
    pub(crate) fn tickets(&mut self, asking: Asking<'_>) -> Vec<(Arc<str>, Owner)> {
        let name = (asking.prefix.clone(), asking.key.clone());
        let Some(slot) = self.slots.get_mut(&name) else {
            return Vec::new();
        };
        slot.run_out(asking.now);
        let tickets = slot.queue.values().map(|ticket| &ticket.owner);
        tickets.map(|by| (by.instance.clone(), by.owner)).collect()
    }

    /// Who listens for a key, first come first: instance and owner.
    pub(crate) fn ears(&mut self, asking: Asking<'_>) -> Vec<(Arc<str>, Owner)> {
        let name = (asking.prefix.clone(), asking.key.clone());
        let Some(slot) = self.slots.get_mut(&name) else {
            return Vec::new();
        };
        slot.run_out(asking.now);
        let ears = slot.ears.values();
        ears.map(|by| (by.instance.clone(), by.owner)).collect()
    }

    /// The fences are gone, as after an eviction.
    pub(crate) fn forget_fences(&mut self) {
        self.fences.clear();
    }
}

impl Slot {
    fn is_empty(&self) -> bool {
        self.lock.is_none() && self.queue.is_empty() && self.ears.is_empty()
    }

    fn is_held_by(&self, owner: &FullOwner) -> bool {
        self.lock.as_ref().is_some_and(|held| held.by == *owner)
    }

    /// Whether the value of the lock key is this text.
    fn is_called(&self, text: &str) -> bool {
        let held = self.lock.as_ref();
        held.is_some_and(|held| held.by.to_string() == text)
    }

    fn left(&self, now: ServerTime) -> Option<Duration> {
        let held = self.lock.as_ref().filter(|held| held.until != NEVER)?;
        Some(Duration::from_micros(held.until.saturating_sub(now)))
    }

    fn run_out(&mut self, now: ServerTime) {
        self.lock.take_if(|held| held.until <= now);
        if self.queue_ends.is_some_and(|end| end <= now) {
            self.queue.clear();
            self.ears.clear();
            self.queue_ends = None;
        }
    }

    /// The lock is `by`'s for `ttl` from now, or longer if it had it for longer (S3).
    fn hold(&mut self, now: ServerTime, by: FullOwner, ttl: Duration) {
        let mut until = now + micros(ttl);
        if let Some(held) = self.lock.as_ref().filter(|held| held.by == by) {
            until = until.max(held.until);
        }
        self.lock = Some(Held { by, until });
    }

    /// Attempt, or enter if a `place` in the queue is wanted.
    #[expect(clippy::too_many_arguments, reason = "one script, its arguments")]
    fn claim(
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
            self.hold(now, owner.clone(), ttl);
            let draw = draw(fence, now);
            return Outcome::Won { draw };
        }
        let score = place.map(|score| self.enter(now, owner, ttl, score));
        let left = self.left(now);
        Outcome::Busy { left, score }
    }

    /// Puts a ticket into the queue, if it is not there (K1, K2); returns its score.
    fn enter(
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
        self.keep_queue(now);
        score
    }

    /// K3: after every entry, never shorter; an emptied queue had none.
    fn keep_queue(&mut self, now: ServerTime) {
        let end = now + self.left(now).map_or(0, micros) + QUEUE_MARGIN;
        self.queue_ends = self.queue_ends.max(Some(end));
    }

    /// W7: its owner is told when the lock is freed, in its turn; returns its place.
    fn listen(&mut self, now: ServerTime, owner: FullOwner) -> u64 {
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
        self.keep_queue(now);
        place
    }

    /// Takes dead tickets off the front of the queue (S2).
    fn drop_dead(&mut self, live: &dyn Fn(&Arc<str>) -> bool) {
        while let Some(first) = self.queue.first_entry()
            && !live(&first.get().owner.instance)
        {
            first.remove();
        }
        // Of those that listen, who is passed by on the way.
        let first = self.queue.first_key_value().map(|(place, _)| *place);
        self.ears
            .retain(|place, ear| first.is_some_and(|first| *place > first) || live(&ear.instance));
        self.forget_empty_queue();
    }

    fn take_out(&mut self, owner: &FullOwner) {
        self.queue.retain(|_, ticket| ticket.owner != *owner);
        self.ears.retain(|_, ear| ear != owner);
        self.forget_empty_queue();
    }

    /// As the server deletes a sorted set with its last member, and its expiry with it.
    fn forget_empty_queue(&mut self) {
        if self.queue.is_empty() && self.ears.is_empty() {
            self.queue_ends = None;
        }
    }

    /// S2, or else the first that listens is told that the lock is free, and has it for as long as it
    /// may take to ask (W7).
    fn let_go(
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
        self.forget_empty_queue();
        told
    }

    /// S2: the lock is the first live ticket's, or nobody's.
    fn hand_over(
        &mut self,
        now: ServerTime,
        fence: &mut u64,
        live: &dyn Fn(&Arc<str>) -> bool,
    ) -> Option<Delivery> {
        self.lock = None;
        self.drop_dead(live);
        let (_, ticket) = self.queue.pop_first()?;
        self.forget_empty_queue();
        let instance = ticket.owner.instance.clone();
        let grant = Grant {
            owner: ticket.owner.owner,
            ttl: ticket.ttl,
            draw: draw(fence, now),
            at: now,
        };
        self.hold(now, ticket.owner, ticket.ttl);
        let grant = Some(grant);
        Some(Delivery { instance, grant })
    }
}
