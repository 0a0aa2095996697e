//! One lock, its queue and its subscriptions.

use std::collections::BTreeMap;
use std::fmt;
use std::mem;
use std::sync::Arc;
use std::time::Duration;

use foldhash::HashMap;

use super::keyspace::Delivery;
use crate::base::Mode;
use crate::base::holder::KEPT;
use crate::store::contract::{Grant, Occupant, Outcome, Owner, ServerTime};

/// How much longer than its lock a queue lasts, in microseconds (K3).
const QUEUE_MARGIN: u64 = 60_000_000;

/// How long a freed lock is kept for the first subscriber (W7).
const RESERVED: Duration = Duration::from_millis(100);

/// `<instance>:<sequence>`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct FullOwner {
    pub(super) instance: Arc<str>,
    pub(super) owner: Owner,
}

impl FullOwner {
    /// The owner that has the lock once the lease of this one has ended, if the key is kept (M8).
    pub(super) fn kept(&self) -> Self {
        let (instance, owner) = (format!("{}{KEPT}", self.instance).into(), self.owner);
        Self { instance, owner }
    }
}

impl fmt::Display for FullOwner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.instance, self.owner.sequence)
    }
}

/// What an operation needs besides its key, and the messages that it sends.
pub(super) struct OpCx<'a> {
    pub(super) now: ServerTime,
    pub(super) prefix: &'a Arc<str>,
    /// By prefix: the last epoch.
    pub(super) fences: &'a mut HashMap<Arc<str>, u64>,
    /// Whether a registry can be reached (S2).
    pub(super) is_live: &'a dyn Fn(&Arc<str>) -> bool,
    pub(super) deliveries: Vec<Delivery>,
    /// How many tickets are served at most (M4).
    pub(super) most_served: usize,
    /// Whether more tickets may fit than were served (M4).
    pub(super) unserved: bool,
}

impl OpCx<'_> {
    /// F1: epochs grow through the loss of the fence and through a clock that is set back, each alone.
    fn next_epoch(&mut self) -> u64 {
        let now = self.now;
        let fence = self.fence();
        *fence = (*fence + 1).max(now);
        *fence
    }

    /// The last epoch under the prefix.
    pub(super) fn fence(&mut self) -> &mut u64 {
        self.fences.entry(self.prefix.clone()).or_default()
    }
}

#[derive(Clone, Debug, Default)]
pub(super) struct StoredKey {
    pub(super) holders: Holders,
    /// The owners that get the lock next.
    pub(super) queue: Tickets,
    /// The owners that are notified when the lock is free: a set beside the queue, with the same expiry.
    pub(super) listeners: Tickets,
}

/// Who has the lock, and until when. All of them are of one kind (M1): one exclusive owner, readers, or permits.
#[derive(Clone, Debug, Default)]
pub(super) struct Holders {
    until: BTreeMap<FullOwner, ServerTime>,
}

/// The end of a lock without a ttl, which a foreign lock may be.
pub(super) const NEVER: ServerTime = ServerTime::MAX;

impl Holders {
    pub(super) fn is_empty(&self) -> bool {
        self.until.is_empty()
    }

    pub(super) fn contains(&self, owner: &FullOwner) -> bool {
        self.until.contains_key(owner)
    }

    pub(super) fn remove(&mut self, owner: &FullOwner) -> bool {
        self.until.remove(owner).is_some()
    }

    /// Removes the first that is meant, if there is one.
    pub(super) fn remove_first(&mut self, is_meant: impl Fn(&FullOwner) -> bool) -> bool {
        let first = self.until.keys().find(|owner| is_meant(owner)).cloned();
        first.is_some_and(|owner| self.remove(&owner))
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&FullOwner, ServerTime)> {
        self.until.iter().map(|(owner, until)| (owner, *until))
    }

    /// Gives the lock to `by` until then, or longer if it had it for longer (S3).
    pub(super) fn add(&mut self, by: FullOwner, until: ServerTime) {
        let held = self.until.entry(by).or_insert(until);
        *held = until.max(*held);
    }

    pub(super) fn retain(&mut self, keep: impl Fn(&FullOwner, ServerTime) -> bool) {
        self.until.retain(|owner, until| keep(owner, *until));
    }

    /// The mode of one of them, and so the kind of all.
    fn mode(&self) -> Option<Mode> {
        let first = self.until.first_key_value();
        first.map(|(first, _)| first.owner.mode)
    }

    /// M1: whether one with this mode may join. A permit counts all that is taken against its own limit.
    pub(super) fn admit(&self, mode: Mode) -> bool {
        match (mode, self.mode()) {
            (_, None) | (Mode::Shared, Some(Mode::Shared)) => true,
            (Mode::Permits { limit, weight }, Some(Mode::Permits { .. })) => {
                self.taken() + u64::from(weight) <= u64::from(limit)
            }
            _ => false,
        }
    }

    /// Whom a busy answer names (G8).
    pub(super) fn first_to_end(&self) -> Option<Arc<Occupant>> {
        let by_end = |one: &(&FullOwner, ServerTime), other: &(&FullOwner, ServerTime)| {
            let by_name = || one.0.to_string().cmp(&other.0.to_string());
            one.1.cmp(&other.1).then_with(by_name)
        };
        let (first, _) = self.iter().min_by(by_end)?;
        let others = match first.owner.mode {
            Mode::Permits { weight, .. } => self.taken() - u64::from(weight),
            Mode::Exclusive | Mode::Shared => self.until.len() as u64 - 1,
        };
        Some(Arc::new(Occupant {
            owner: first.to_string().into(),
            mode: first.owner.mode,
            others,
        }))
    }

    /// How much all of them take: permits by their weight, whatever limits they were taken under.
    pub(super) fn taken(&self) -> u64 {
        self.until.keys().map(weight_of).sum()
    }

    /// When one with this mode may join, if nobody renews or releases. `NEVER`: not known.
    fn may_admit_at(&self, mode: Mode) -> ServerTime {
        let last = self.until.values().copied().max().unwrap_or(0);
        let (Mode::Permits { limit, weight }, Some(Mode::Permits { .. })) = (mode, self.mode())
        else {
            return last;
        };
        let mut by_end: Vec<_> = self.iter().collect();
        by_end.sort_unstable_by_key(|(_, until)| *until);
        let mut taken = self.taken();
        let fits = by_end.into_iter().find_map(|(owner, until)| {
            taken -= weight_of(owner);
            (taken + u64::from(weight) <= u64::from(limit)).then_some(until)
        });
        fits.unwrap_or(last)
    }
}

fn weight_of(owner: &FullOwner) -> u64 {
    match owner.owner.mode {
        Mode::Permits { weight, .. } => weight.into(),
        Mode::Exclusive | Mode::Shared => 1,
    }
}

/// A sorted set, as on the server.
#[derive(Clone, Debug, Default)]
pub(super) struct Tickets {
    pub(super) by_score: BTreeMap<u64, Ticket>,
    /// When the set expires.
    ends: ServerTime,
}

#[derive(Clone, Debug)]
pub(super) struct Ticket {
    pub(super) owner: FullOwner,
    pub(super) ttl: Duration,
}

impl Tickets {
    /// Adds a ticket if its owner has none (K1, K2), and keeps the set until `ends` at least (K3).
    /// Returns the ticket's score, and whether it is new.
    pub(super) fn add(
        &mut self,
        now: ServerTime,
        ticket: Ticket,
        named: Option<u64>,
        ends: ServerTime,
    ) -> (u64, bool) {
        if self.by_score.is_empty() {
            // The server deletes a sorted set with its last member, and its expiry with it.
            self.ends = 0;
        }
        self.ends = self.ends.max(ends);
        let mut tickets = self.by_score.iter();
        if let Some((score, _)) = tickets.find(|(_, other)| other.owner == ticket.owner) {
            return (*score, false);
        }
        let last = self.by_score.last_key_value();
        let last = last.map_or(0, |(score, _)| *score);
        let named = named.filter(|named| *named <= now);
        let mut score = named.unwrap_or(now.max(last + 1));
        while self.by_score.contains_key(&score) {
            score += 1;
        }
        self.by_score.insert(score, ticket);
        (score, true)
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
        if self.ends <= now && !self.by_score.is_empty() {
            self.by_score.clear();
        }
    }
}

pub(super) fn micros(ttl: Duration) -> u64 {
    u64::try_from(ttl.as_micros()).unwrap_or(u64::MAX)
}

impl StoredKey {
    pub(super) fn is_empty(&self) -> bool {
        self.holders.is_empty()
            && self.queue.by_score.is_empty()
            && self.listeners.by_score.is_empty()
    }

    /// How long the lock lasts: as long as its last holder.
    pub(super) fn left(&self, now: ServerTime) -> Option<Duration> {
        left(now, self.holders.iter().map(|(_, until)| until).max()?)
    }

    /// The answer to one with this mode, and its place if it has entered. M5: it says when the front of the queue may have
    /// the lock; for a caller without a ticket, when that may have it.
    pub(super) fn busy(
        &self,
        now: ServerTime,
        mode: Mode,
        entered: Option<(u64, bool)>,
    ) -> Outcome {
        let front = self.queue.by_score.first_key_value();
        let mode = front.map_or(mode, |(_, ticket)| ticket.owner.owner.mode);
        Outcome::Busy {
            left: left(now, self.holders.may_admit_at(mode)),
            score: entered.map(|(score, _)| score),
            entered: entered.is_some_and(|(_, is_new)| is_new),
            holder: self.holders.first_to_end(),
        }
    }

    /// K3: how long a queue lasts if a ticket is added now.
    pub(super) fn kept_until(&self, now: ServerTime) -> ServerTime {
        now + self.left(now).map_or(0, micros) + QUEUE_MARGIN
    }

    pub(super) fn run_out(&mut self, now: ServerTime) {
        self.holders.retain(|_, until| until > now);
        self.queue.run_out(now);
        self.listeners.run_out(now);
    }

    pub(super) fn win(&mut self, cx: &mut OpCx<'_>, owner: FullOwner, ttl: Duration) -> Outcome {
        self.holders.add(owner, cx.now + micros(ttl));
        let epoch = cx.next_epoch();
        Outcome::Won { epoch }
    }

    /// Gives the lock to the owner if it may have it now, after those that are before it in the queue (M2, M3). `place`:
    /// its place there before the connection broke (K2).
    pub(super) fn claim(
        &mut self,
        cx: &mut OpCx<'_>,
        owner: &FullOwner,
        ttl: Duration,
        place: Option<u64>,
    ) -> Option<Outcome> {
        let place = place.filter(|place| *place <= cx.now).unwrap_or(u64::MAX);
        let is_held = self.holders.contains(owner);
        let served = match is_held {
            true => 0,
            false => self.serve(cx, Some((owner, place)), 0),
        };
        let first = self.queue.by_score.first_key_value();
        let is_next = first.is_none_or(|(score, ticket)| ticket.owner == *owner || place < *score);
        let may_have_it = is_held || is_next && self.holders.admit(owner.owner.mode);
        if !may_have_it {
            return None;
        }
        self.queue.remove(owner);
        self.listeners.remove(owner);
        let won = self.win(cx, owner.clone(), ttl);
        self.serve(cx, None, served);
        Some(won)
    }

    /// S2, M3: serves tickets from the front of the queue as long as they fit, up to the place of `until`. `served`
    /// tickets were served before in the same call. Returns how many that makes.
    pub(super) fn serve(
        &mut self,
        cx: &mut OpCx<'_>,
        until: Option<(&FullOwner, u64)>,
        mut served: usize,
    ) -> usize {
        while self.holders.mode() != Some(Mode::Exclusive) {
            self.queue.drop_dead(cx);
            let Some(first) = self.queue.by_score.first_entry() else {
                break;
            };
            let owner = &first.get().owner;
            let is_reached =
                until.is_some_and(|(other, place)| other == owner || place < *first.key());
            if is_reached || !self.holders.admit(owner.owner.mode) {
                return served;
            }
            if served == cx.most_served {
                if !mem::replace(&mut cx.unserved, true)
                    && let Some(last) = cx.deliveries.last_mut()
                {
                    last.unserved = true;
                }
                return served;
            }
            let Ticket { owner, ttl } = first.remove();
            let grant = Grant {
                owner: owner.owner,
                ttl,
                epoch: cx.next_epoch(),
                at: cx.now,
            };
            cx.deliveries.push(Delivery {
                instance: owner.instance.clone(),
                grant: Some(grant),
                unserved: false,
            });
            self.holders.add(owner, cx.now + micros(ttl));
            served += 1;
        }
        served
    }

    /// Serves the queue. If the lock is free then, the first subscriber is told, and the lock is kept for it as long as a
    /// question may take (W7).
    pub(super) fn let_go(&mut self, cx: &mut OpCx<'_>) {
        self.serve(cx, None, 0);
        if self.holders.is_empty()
            && let Some(listener) = self.listeners.pop_live(cx)
        {
            cx.deliveries.push(Delivery {
                instance: listener.owner.instance.clone(),
                grant: None,
                unserved: false,
            });
            self.holders.add(listener.owner, cx.now + micros(RESERVED));
        }
    }

    /// The end of the lock has moved: the first in the queue is told to ask (M8).
    pub(super) fn tell_first(&mut self, cx: &mut OpCx<'_>) {
        self.queue.drop_dead(cx);
        let first = self.queue.by_score.first_key_value();
        cx.deliveries.extend(first.map(|(_, ticket)| Delivery {
            instance: ticket.owner.instance.clone(),
            grant: None,
            unserved: false,
        }));
    }
}

pub(super) fn left(now: ServerTime, until: ServerTime) -> Option<Duration> {
    (until != NEVER).then(|| Duration::from_micros(until.saturating_sub(now)))
}
