//! One owner that asks the store for the key, and what its answers have told.

use std::mem;
use std::sync::Arc;
use std::time::Duration;

use super::policy::Repeats;
use crate::store::contract::{Answer, Grant, Occupant, Op, Outcome, Owner, ServerTime};
use crate::turnstile::event_cx::EventCx;
use crate::turnstile::ids::Ids;
use crate::turnstile::tenure::Win;
use crate::turnstile::time::{Point, drift};
use crate::turnstile::verdict::Holding;
use crate::turnstile::wait_queue::WaiterId;

/// K3: the store keeps a queue this much longer than its lock.
const QUEUE_MARGIN: Duration = Duration::from_secs(60);

/// W2: how long a ticket waits at most before it is entered again, in milliseconds. The jitter separates registries
/// that began to wait at the same time.
const RECHECK: (u64, u64) = (8_000, 12_000);

/// D4: so many wins and grants in a row that are over on arrival show that the store is too slow for the ttl. One or two
/// may be late because the process was stopped.
const MOST_LATE: u8 = 3;

/// What the store may hold under one of our owners.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Footprint {
    Nothing,
    /// The lock, by an attempt whose answer never came.
    Lock,
    /// A subscription to the release, or the lock.
    Subscription,
    /// A ticket, or the lock granted to it.
    Ticket,
}

#[derive(Clone, Debug)]
pub(super) struct Acquisition {
    owner: Owner,
    /// Fixed when it is first sent (K1, W3).
    ttl: Duration,
    repeats: Repeats,
    score: Option<u64>,
    footprint: Footprint,
    /// Whether the store's last answer was that others hold the key.
    is_busy: bool,
    /// The holder that the last busy answer named, and until when its lease lasts.
    occupant: Option<Arc<Occupant>>,
    busy_until: Point,
    /// The caller that adopts a lease with it. `None`: it is for the wait queue.
    adopter: Option<WaiterId>,
    /// What [`Win::uncontended`] is if our yield wins the key straight back.
    uncontended: u8,
    /// Whether the store may have had a ticket of it: then a grant may be on the way.
    had_ticket: bool,
    /// How many wins and grants it had: all of them were over on arrival (D4).
    late: u8,
    /// The newest waiter that was there for all of these.
    saw_late: WaiterId,
    first_sent: Option<Point>,
    proof: Option<Proof>,
    /// Whether a grant has come since that looks older than the proof (D2).
    is_doubtful: bool,
}

/// One answered command. It was sent at `sent` by our clock, and ran at `at` by the store's.
#[derive(Clone, Copy, Debug)]
struct Proof {
    sent: Point,
    at: ServerTime,
}

impl Acquisition {
    pub(super) fn new(
        owner: Owner,
        ttl: Duration,
        ask_at: Point,
        adopter: Option<WaiterId>,
        uncontended: u8,
    ) -> Self {
        Self {
            owner,
            ttl,
            repeats: Repeats::new(ask_at),
            score: None,
            footprint: Footprint::Nothing,
            is_busy: false,
            occupant: None,
            busy_until: Point::FOREVER,
            adopter,
            uncontended,
            had_ticket: false,
            late: 0,
            saw_late: WaiterId(0),
            first_sent: None,
            proof: None,
            is_doubtful: false,
        }
    }

    pub(super) fn owner(&self) -> Owner {
        self.owner
    }

    pub(super) fn adopter(&self) -> Option<WaiterId> {
        self.adopter
    }

    pub(super) fn adopts(&self) -> bool {
        self.adopter.is_some()
    }

    pub(super) fn is_busy(&self) -> bool {
        self.is_busy
    }

    /// The newest waiter that was there for all late wins, and their ttl.
    pub(super) fn late_wins(&self) -> (WaiterId, Duration) {
        (self.saw_late, self.ttl)
    }

    /// When the store is asked (again).
    pub(super) fn ask_at(&self) -> Point {
        self.repeats.ask_at
    }

    pub(super) fn plan_question(&mut self, ask_at: Point) {
        self.repeats.ask_at = ask_at;
    }

    /// The store is asked at that time, unless it is asked earlier.
    pub(super) fn ask_by(&mut self, at: Point) {
        self.repeats.ask_at = self.repeats.ask_at.min(at);
    }

    pub(super) fn repeats(&mut self) -> &mut Repeats {
        &mut self.repeats
    }

    /// The holder that the last answer named, unless its lease is over by now.
    pub(super) fn holding(&self, now: Point) -> Option<Holding> {
        let occupant = self.occupant.clone().filter(|_| now < self.busy_until)?;
        let has_end = self.busy_until != Point::FOREVER;
        let left = has_end.then(|| self.busy_until.since(now));
        Some(Holding::There { occupant, left })
    }

    /// Whether the store may have a ticket of it.
    pub(super) fn has_ticket(&self) -> bool {
        self.footprint == Footprint::Ticket
    }

    /// Whether this connection has confirmed that it has a ticket. Unconfirmed, the owner may hold the lock.
    pub(super) fn is_queued(&self) -> bool {
        self.has_ticket() && self.proof.is_some() && !self.is_doubtful
    }

    /// Whether it waits in another way than it should: with a ticket, or without.
    pub(super) fn is_misplaced(&self, wants_ticket: bool) -> bool {
        match self.footprint {
            Footprint::Ticket => !wants_ticket,
            Footprint::Subscription => wants_ticket,
            Footprint::Nothing | Footprint::Lock => false,
        }
    }

    /// An op that asks for the key is sent.
    pub(super) fn sent(&mut self, now: Point) {
        self.first_sent.get_or_insert(now);
    }

    /// The op to send, and what it may leave in the store. `adopts`: the owner to adopt from, and
    /// for how long the caller still waits for that.
    pub(super) fn ask(
        &mut self,
        now: Point,
        adopts: Option<(Arc<str>, Duration)>,
        wants_ticket: bool,
        subscribes: bool,
    ) -> (Op, Footprint) {
        self.sent(now);
        self.uncontended = 0;
        let (owner, ttl, score) = (self.owner, self.ttl, self.score);
        if let Some((from, within)) = adopts {
            let op = Op::Adopt {
                owner,
                from,
                ttl,
                within,
            };
            (op, Footprint::Lock)
        } else if wants_ticket {
            (Op::Enter { owner, ttl, score }, Footprint::Ticket)
        } else if subscribes {
            (Op::Listen { owner, ttl }, Footprint::Subscription)
        } else {
            (Op::Attempt { owner, ttl }, Footprint::Lock)
        }
    }

    /// W2: how long a ticket waits at most.
    pub(super) fn recheck(ids: &mut Ids) -> Duration {
        ids.jitter(RECHECK.0, RECHECK.1)
    }

    /// An op may have been done, and left this.
    pub(super) fn raise_footprint(&mut self, footprint: Footprint) {
        self.footprint = self.footprint.max(footprint);
        self.had_ticket |= footprint == Footprint::Ticket;
    }

    /// It is known what the store holds.
    pub(super) fn set_footprint(&mut self, footprint: Footprint) {
        self.footprint = footprint;
    }

    /// D2: a grant came that looks older than the newest answer. It is over; or else the store's clock was set back, and the
    /// store keeps the key for the owner.
    pub(super) fn on_old_grant(&mut self, soon: Point) {
        self.is_doubtful = true;
        self.ask_by(soon);
    }

    /// The store gave it the key, by an op that was sent at `sent`.
    pub(super) fn on_won(&mut self, epoch: u64, sent: Point) -> Win {
        self.footprint = Footprint::Lock;
        self.win(epoch, sent, self.ttl)
    }

    fn win(&self, epoch: u64, start: Point, ttl: Duration) -> Win {
        Win {
            owner: self.owner,
            had_ticket: self.had_ticket,
            uncontended: self.uncontended,
            epoch,
            start,
            ttl,
        }
    }

    /// Others hold the key, as the store has answered to an op that was sent at `sent` and may have left `footprint`.
    pub(super) fn on_busy<Caller>(
        &mut self,
        cx: &mut EventCx<'_, Caller>,
        footprint: Footprint,
        sent: Point,
        answer: &Answer,
        has_queue: bool,
    ) {
        let Outcome::Busy {
            left,
            score,
            ref holder,
            ..
        } = answer.outcome
        else {
            return;
        };
        let now = cx.at();
        self.is_busy = true;
        self.occupant.clone_from(holder);
        self.busy_until = left.map_or(Point::FOREVER, |left| now + left);
        if footprint == Footprint::Ticket {
            let at = answer.at;
            self.proof = Some(Proof { sent, at });
            self.is_doubtful = false;
            self.score = score.or(self.score);
            self.raise_footprint(Footprint::Ticket);
            // W2: the holder may have changed, crashed, or be a foreign lock without a ttl. The connection may
            // be dead without an error.
            let jitter = cx.ids.jitter(1, 50);
            let recheck = Self::recheck(cx.ids);
            let next = left.map_or(recheck, |left| recheck.min(left.saturating_add(jitter)));
            let is_old = has_queue && mem::take(&mut self.repeats.is_notified);
            self.repeats.ask_at = if is_old { now } else { now + next };
        } else if score.is_some() {
            self.footprint = Footprint::Subscription;
        } else if self.footprint <= footprint {
            self.footprint = Footprint::Nothing;
        }
    }

    /// The store has refused an op. It is asked again then.
    pub(super) fn on_refused(&mut self, ask_at: Point) {
        self.repeats.ask_at = ask_at;
        if self.adopts() {
            // Some quorum nodes may already have moved the lock to our owner. A release would destroy the lease to
            // adopt. So the same owner asks again (S3).
            self.footprint = Footprint::Lock;
        }
    }

    /// D2: the time on our clock from which the grant's ttl counts. `None`: a newer answer shows that the grant is
    /// outdated.
    pub(super) fn start_of(&self, grant: &Grant) -> Option<Point> {
        let Some(proof) = self.proof else {
            return self.first_sent;
        };
        let since = Duration::from_micros(grant.at.checked_sub(proof.at)?);
        Some(proof.sent + (since - since / 1000))
    }

    /// The store granted it the key, which counts from `start`. `None`: it asks again instead.
    pub(super) fn on_granted(
        &mut self,
        grant: &Grant,
        start: Point,
        received: Point,
        now: Point,
    ) -> Option<Win> {
        if start > received {
            // D2: the store's clock has stepped. Asking again proves the lock, or releases it if nobody waits.
            self.prove_again(now);
            return None;
        }
        // W6: the lock was granted while our ticket waited, so another registry had wanted the key, too.
        self.uncontended = 0;
        // K1: the ttl on its ticket, which the store rounds up.
        let ttl = self.ttl.min(grant.ttl);
        Some(self.win(grant.epoch, start, ttl))
    }

    /// D4: the key was its, but no longer on arrival, while `newest` was the newest waiter. It asks again: the answer is
    /// a new proof (S3). Its ticket is gone. Returns whether the store is too slow for its ttl.
    pub(super) fn on_late_win(&mut self, now: Point, newest: WaiterId) -> bool {
        if self.late == 0 {
            self.saw_late = newest;
        }
        self.late += 1;
        self.prove_again(now);
        self.late == MOST_LATE
    }

    fn prove_again(&mut self, now: Point) {
        self.forget_proof();
        self.repeats.ask_at = now;
    }

    /// A proof is valid for one connection: the next may lead to another server.
    pub(super) fn forget_proof(&mut self) {
        self.proof = None;
    }

    /// The connection is up again.
    pub(super) fn on_up(&mut self, now: Point) {
        self.prove_again(now);
    }

    /// If the store has confirmed a ticket, it may be gone: asks at once. `all_ask`: the confirmation counts no longer.
    pub(super) fn doubt_ticket(&mut self, now: Point, all_ask: bool) {
        if self.is_queued() {
            if all_ask {
                self.forget_proof();
            }
            self.repeats.ask_at = now;
        }
    }

    /// The op that removes everything of this acquisition from the store (O6), and for how long the store may keep
    /// that if the op never arrives.
    pub(super) fn settlement(&self) -> Option<(Op, Duration)> {
        let (owner, ttl) = (self.owner, self.ttl);
        let lock = ttl + drift(ttl);
        match self.footprint {
            Footprint::Nothing => None,
            Footprint::Lock => Some((Op::Release { owner }, lock)),
            Footprint::Subscription => Some((Op::Unlisten { owner }, lock + QUEUE_MARGIN)),
            Footprint::Ticket => Some((Op::Withdraw { owner, ttl }, lock + QUEUE_MARGIN)),
        }
    }
}
