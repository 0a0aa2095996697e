//! One owner that asks the store for the key: what is asked, and what the answers and grants change.

use std::sync::Arc;
use std::time::Duration;

use super::pending::PendingOp;
use super::repeats::Repeats;
use super::{EarlyGrant, InFlight, KeyState, Tickets, Turnstile};
use crate::base::StoreError;
use crate::store::contract::{Answer, Grant, Occupant, Op, Outcome, Owner, ServerTime};
use crate::turnstile::ids::EventCx;
use crate::turnstile::tenure::Tenure;
use crate::turnstile::time::{Point, deadline, drift};
use crate::turnstile::verdict::{Holding, Refusal};
use crate::turnstile::wait_queue::WaiterId;

/// K3: the store keeps a queue this much longer than its lock.
const QUEUE_MARGIN: Duration = Duration::from_secs(60);

/// W2: how long a ticket waits at most before it is entered again, in milliseconds. The jitter separates registries
/// that began to wait at the same time.
const RECHECK: (u64, u64) = (8_000, 12_000);

/// M5: how long a ticket waits that has become the first of its registry, in milliseconds.
const SOON: (u64, u64) = (1_000, 1_500);

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

/// One owner that asks the store for the key, and what is known about it.
#[derive(Debug)]
pub(super) struct Acquisition {
    owner: Owner,
    /// Fixed when it is first sent (K1, W3).
    ttl: Duration,
    /// When the store is asked (again).
    pub(super) ask_at: Point,
    score: Option<u64>,
    footprint: Footprint,
    /// Whether the store's last answer was that others hold the key.
    is_busy: bool,
    /// Whom that answer has named, and until when that one had the key.
    occupant: Option<Arc<Occupant>>,
    busy_until: Point,
    /// The caller that adopts a lease with it. `None`: it is for the wait queue.
    adopter: Option<WaiterId>,
    pub(super) repeats: Repeats,
    /// If a yield gives it the key: how many tenures in a row no other registry will have wanted the key.
    uncontended: u8,
    /// Whether the store may have had a ticket of it: then a grant may be on the way.
    had_ticket: bool,
    /// How many wins and grants it had: all of them were over on arrival (D4).
    late: u8,
    /// The newest waiter that has seen all of these.
    saw_late: WaiterId,
    first_sent: Option<Point>,
    proof: Option<Proof>,
}

/// One answered command. It was sent at `sent` by our clock, and ran at `at` by the store's.
#[derive(Clone, Copy, Debug)]
struct Proof {
    sent: Point,
    at: ServerTime,
}

impl Acquisition {
    /// Asks at `ask_at`. `uncontended`: see [`Tenure::uncontended`], where a yield asks.
    pub(super) fn new(owner: Owner, ttl: Duration, ask_at: Point, uncontended: u8) -> Self {
        Self {
            owner,
            ttl,
            ask_at,
            score: None,
            footprint: Footprint::Nothing,
            is_busy: false,
            occupant: None,
            busy_until: Point::FOREVER,
            adopter: None,
            repeats: Repeats::default(),
            uncontended,
            had_ticket: false,
            late: 0,
            saw_late: WaiterId(0),
            first_sent: None,
            proof: None,
        }
    }

    pub(super) fn owner(&self) -> Owner {
        self.owner
    }

    pub(super) fn sent(&mut self, now: Point) {
        self.first_sent.get_or_insert(now);
    }

    /// An op may have been done, and left this.
    pub(super) fn raise_footprint(&mut self, footprint: Footprint) {
        self.footprint = self.footprint.max(footprint);
        self.had_ticket |= footprint == Footprint::Ticket;
    }

    /// D4: a win or grant was over on arrival, while `newest` was the newest waiter. Returns whether the store is too
    /// slow for its ttl.
    fn count_late(&mut self, newest: WaiterId) -> bool {
        if self.late == 0 {
            self.saw_late = newest;
        }
        self.late += 1;
        self.late == MOST_LATE
    }

    /// A proof is valid for one connection: the next may lead to another server.
    pub(super) fn forget_proof(&mut self) {
        self.proof = None;
    }

    /// The connection is up again.
    pub(super) fn ask_anew(&mut self, now: Point) {
        self.forget_proof();
        self.repeats.forget_question();
        self.ask_at = now;
    }

    pub(super) fn is_busy(&self) -> bool {
        self.is_busy
    }

    /// Who had the key when the store was asked last, unless what it has said is over by now.
    pub(super) fn holding(&self, now: Point) -> Option<Holding> {
        let occupant = self.occupant.clone().filter(|_| now < self.busy_until)?;
        let has_end = self.busy_until != Point::FOREVER;
        let left = has_end.then(|| self.busy_until.since(now));
        Some(Holding::There { occupant, left })
    }

    pub(super) fn adopts(&self) -> bool {
        self.adopter.is_some()
    }

    /// Whether this connection has confirmed that it has a ticket. Unconfirmed, the owner may hold the lock.
    fn is_queued(&self) -> bool {
        self.footprint == Footprint::Ticket && self.proof.is_some()
    }

    /// The op that removes everything of this acquisition from the store (O6), and for how long the store may keep
    /// that if the op never arrives.
    fn settlement(&self) -> Option<(Op, Duration)> {
        let (owner, ttl) = (self.owner, self.ttl);
        let lock = ttl + drift(ttl);
        match self.footprint {
            Footprint::Nothing => None,
            Footprint::Lock => Some((Op::Release { owner }, lock)),
            Footprint::Subscription => Some((Op::Unlisten { owner }, lock + QUEUE_MARGIN)),
            Footprint::Ticket => Some((Op::Withdraw { owner, ttl }, lock + QUEUE_MARGIN)),
        }
    }

    /// D2: the time on our clock from which the grant's ttl counts. `None`: a newer answer shows that the grant is
    /// outdated.
    fn start_of(&self, grant: &Grant) -> Option<Point> {
        let Some(proof) = self.proof else {
            return self.first_sent;
        };
        let since = Duration::from_micros(grant.at.checked_sub(proof.at)?);
        Some(proof.sent + (since - since / 1000))
    }
}

impl<Caller: Clone> Turnstile<Caller> {
    /// Asks the store for the key if that is due. Returns false if there is nothing to do.
    pub(super) fn ask_store(&mut self, cx: &mut EventCx<'_>) -> bool {
        let now = cx.at();
        let adopter = self.adopters.front();
        let wants_ticket = self.store_has_queue && self.waiters.has_patient();
        let acquisition = match &mut self.state {
            KeyState::Held(_) => return false,
            KeyState::Idle => {
                let waiter = adopter.map(|first| &first.waiter);
                let Some(ttl) = waiter.or(self.waiters.first()).map(|it| it.ttl) else {
                    return false;
                };
                let mut acquisition = Acquisition::new(cx.ids.owner(self.mode), ttl, now, 0);
                acquisition.adopter = adopter.map(|first| first.id);
                self.state = KeyState::Acquiring(acquisition);
                return true;
            }
            KeyState::Acquiring(acquisition) => acquisition,
        };
        if acquisition.adopter != adopter.map(|first| first.id) {
            // A caller that adopts goes first, or it has left, or it has been answered.
            self.abandon(cx);
            return true;
        }
        if adopter.is_none() {
            let misplaced = match acquisition.footprint {
                Footprint::Ticket => !wants_ticket,
                Footprint::Subscription => wants_ticket,
                Footprint::Nothing | Footprint::Lock => false,
            };
            let is_unwanted = self.waiters.is_empty();
            if misplaced || is_unwanted {
                self.abandon(cx);
                return true;
            }
        }
        if acquisition.ask_at > now {
            return false;
        }
        if !cx.asks_for_others && acquisition.is_queued() {
            acquisition.ask_at = now + cx.ids.jitter(RECHECK.0, RECHECK.1);
            return false;
        }
        let (owner, ttl, score) = (acquisition.owner, acquisition.ttl, acquisition.score);
        let (op, footprint) = if let Some(first) = adopter {
            let from = first.from.clone();
            (Op::Adopt { owner, from, ttl }, Footprint::Lock)
        } else if wants_ticket {
            (Op::Enter { owner, ttl, score }, Footprint::Ticket)
        } else if self.waiters.has_patient() {
            (Op::Listen { owner, ttl }, Footprint::Subscription)
        } else {
            (Op::Attempt { owner, ttl }, Footprint::Lock)
        };
        acquisition.sent(now);
        acquisition.uncontended = 0;
        self.send_op(now, op, Some(footprint), false);
        true
    }

    /// The store has answered an op that asks for the key. `footprint`: what the op may have left.
    pub(super) fn on_asked(
        &mut self,
        cx: &mut EventCx<'_>,
        footprint: Footprint,
        in_flight: &InFlight,
        answer: &Answer,
    ) {
        let KeyState::Acquiring(acquisition) = &mut self.state else {
            unreachable!("an acquisition stays until its op is answered")
        };
        // The store may have lost others as well (M5).
        self.tickets = match answer.outcome {
            Outcome::Won { .. } if acquisition.is_queued() => Tickets::Unknown,
            Outcome::Busy { entered: true, .. } if acquisition.is_queued() => Tickets::Gone,
            _ => Tickets::Kept,
        };
        match answer.outcome {
            Outcome::Won { epoch } => {
                acquisition.footprint = Footprint::Lock;
                let ttl = acquisition.ttl;
                self.begin_tenure(cx, epoch, in_flight.sent, ttl);
            }
            Outcome::Busy {
                left,
                score,
                ref holder,
                ..
            } => {
                acquisition.is_busy = true;
                acquisition.occupant.clone_from(holder);
                acquisition.busy_until = left.map_or(Point::FOREVER, |left| cx.at() + left);
                acquisition.uncontended = 0;
                if footprint == Footprint::Ticket {
                    let (sent, at) = (in_flight.sent, answer.at);
                    acquisition.proof = Some(Proof { sent, at });
                    acquisition.score = score.or(acquisition.score);
                    acquisition.raise_footprint(Footprint::Ticket);
                    // W2: the holder may have changed, crashed, or be a foreign lock without a ttl. The connection may
                    // be dead without an error.
                    let jitter = cx.ids.jitter(1, 50);
                    let recheck = cx.ids.jitter(RECHECK.0, RECHECK.1);
                    let next =
                        left.map_or(recheck, |left| recheck.min(left.saturating_add(jitter)));
                    let is_old = self.store_has_queue && acquisition.repeats.take_notice();
                    acquisition.ask_at = if is_old { cx.at() } else { cx.at() + next };
                } else if score.is_some() {
                    acquisition.footprint = Footprint::Subscription;
                } else if acquisition.footprint <= footprint {
                    acquisition.footprint = Footprint::Nothing;
                }
                self.refuse_busy(cx.at(), in_flight.newest_waiter);
                self.waiters.mark_busy();
                self.end_waits(cx.at());
                if footprint != Footprint::Ticket || !self.store_has_queue {
                    self.plan_repeat(cx);
                }
            }
            Outcome::NotOld if acquisition.adopts() => {
                // Neither the old owner nor ours has the lock. A resend cannot change that.
                acquisition.footprint = Footprint::Nothing;
                if self.is_acquisition_wanted()
                    && let Some(adopter) = self.adopters.pop_front()
                {
                    self.refuse(adopter.waiter.caller, Refusal::NothingToAdopt);
                }
            }
            // To a yield. Entering the new owner recovers it, wherever it is (S3).
            Outcome::NotOld => {
                acquisition.uncontended = 0;
                acquisition.ask_at = cx.at();
            }
            Outcome::Gone { .. } | Outcome::Renewed | Outcome::Raised { .. } | Outcome::Lost => {
                unreachable!("{answer:?} to an op that asks for the key")
            }
        }
    }

    /// The store would not do what was asked. The same owner asks again after a pause.
    pub(super) fn on_question_refused(&mut self, cx: &mut EventCx<'_>, error: &StoreError) {
        let pause = self.retry_pause(cx);
        if let KeyState::Acquiring(acquisition) = &mut self.state {
            acquisition.ask_at = cx.at() + pause;
            if acquisition.adopts() {
                // Some quorum nodes may already have moved the lock to our owner. A release would destroy the lease to
                // adopt. So the same owner asks again (S3).
                acquisition.footprint = Footprint::Lock;
            }
        }
        self.on_refused(cx.at(), error);
    }

    /// The store gave us the key, but too few replicas confirmed it. The key is released, and a new owner asks for it
    /// after a pause, behind everybody in the store's queue. The old owner is retired (O1).
    pub(super) fn on_unconfirmed(
        &mut self,
        cx: &mut EventCx<'_>,
        footprint: Footprint,
        error: &StoreError,
    ) {
        let ask_at = cx.at() + self.retry_pause(cx);
        if let KeyState::Acquiring(acquisition) = &mut self.state {
            acquisition.footprint = footprint;
        }
        self.on_refused(cx.at(), error);
        self.abandon(cx);
        if let Some(ttl) = self.waiters.first().map(|first| first.ttl) {
            let acquisition = Acquisition::new(cx.ids.owner(self.mode), ttl, ask_at, 0);
            self.state = KeyState::Acquiring(acquisition);
        }
    }

    /// Handles a grant that came now, or one that waited for a reply (O3).
    pub(super) fn on_grant(&mut self, cx: &mut EventCx<'_>, received: EarlyGrant) {
        let now = cx.at();
        let grant = &received.grant;
        let acquisition = match &mut self.state {
            KeyState::Acquiring(acquisition) if acquisition.owner == grant.owner => acquisition,
            KeyState::Held(tenure) if tenure.owner() == grant.owner => return,
            // The grant of a tenure that has ended, whose key is meant to stay.
            _ if cx.ids.is_remembered(grant.owner, now) => return,
            _ => {
                // O1: it is for an owner that is retired or unknown. It is released, if that is not pending.
                if !self.pending.iter().any(|it| it.settles(grant.owner)) {
                    let op = Op::Release { owner: grant.owner };
                    let until = now + grant.ttl + drift(grant.ttl);
                    self.pending.push_back(PendingOp::new(op, None, until));
                }
                return;
            }
        };
        if self.down {
            // O3: its connection is not up yet, or no longer. Entering the owner again recovers the grant.
            return;
        }
        if let Some(in_flight) = &mut self.in_flight {
            // O3: the reply in flight may be older or newer.
            in_flight.grant = Some(Box::new(received));
            return;
        }
        if self.pending.iter().any(PendingOp::is_yield) {
            // The session has lost the yield to this owner. Pending operations go first, and recover the grant.
            return;
        }
        if acquisition.footprint != Footprint::Ticket {
            // As far as is known it has no ticket. The answer to its next op shows whether it holds the lock.
            acquisition.ask_at = now;
            return;
        }
        let Some(start) = acquisition.start_of(grant) else {
            return;
        };
        if let Some(fault) = &received.fault {
            self.on_unconfirmed(cx, Footprint::Ticket, fault);
        } else if start > received.at {
            // D2: the store's clock has stepped. Asking again proves the lock, or releases it if nobody waits.
            acquisition.forget_proof();
            acquisition.ask_at = now;
        } else {
            // W6: the lock was granted while our ticket waited, so another registry had wanted the key, too.
            acquisition.uncontended = 0;
            // K1: the ttl on its ticket, which the store rounds up.
            let ttl = acquisition.ttl.min(grant.ttl);
            self.begin_tenure(cx, grant.epoch, start, ttl);
        }
    }

    /// The key is ours for what the ticket asked for, as is proved from `start` on.
    fn begin_tenure(&mut self, cx: &mut EventCx<'_>, epoch: u64, start: Point, ttl: Duration) {
        let now = cx.at();
        let is_wanted = self.is_acquisition_wanted();
        let KeyState::Acquiring(acquisition) = &mut self.state else {
            return;
        };
        let adopter = acquisition.adopter;
        if adopter.is_some() && !is_wanted {
            // Its caller has left. The local waiters may not have it: they would overtake the store's queue. The
            // acquisition is abandoned next.
            return;
        }
        if deadline(start, ttl) <= now && is_wanted {
            // D4: proved, but over. The same owner asks again, and the answer is a new proof (S3). Its ticket is gone.
            let is_too_slow = acquisition.count_late(self.waiters.last_id());
            acquisition.forget_proof();
            acquisition.ask_at = now;
            if adopter.is_none() {
                self.waiters.mark_answered();
            }
            if is_too_slow {
                self.give_up_late(cx, now.since(start));
            }
            return;
        }
        let (owner, had_ticket) = (acquisition.owner, acquisition.had_ticket);
        let uncontended = acquisition.uncontended;
        let tenure = Tenure::new(owner, had_ticket, ttl, epoch, start, now, uncontended);
        self.state = KeyState::Held(tenure);
        // The tenure may have expired already, if nobody waits for it. In that case end it here.
        self.expire_due(cx);
        if adopter.is_some()
            && let Some(adopter) = self.adopters.pop_front()
        {
            self.grant_lease(cx, adopter.id, adopter.waiter);
        }
    }

    /// D4: each time that we ask, the key is ours for another ttl, and is over when we hear of it. It is given back.
    /// Those who want no longer ttl, and have waited all the time, are refused.
    fn give_up_late(&mut self, cx: &EventCx<'_>, round_trip: Duration) {
        let KeyState::Acquiring(acquisition) = &self.state else {
            return;
        };
        let refused: Vec<_> = if acquisition.adopts() {
            let adopter = self.adopters.pop_front();
            adopter.map(|adopter| adopter.waiter).into_iter().collect()
        } else {
            let (newest, ttl) = (acquisition.saw_late, acquisition.ttl);
            self.waiters.take_within(newest, ttl)
        };
        for waiter in refused {
            self.refuse(waiter.caller, Refusal::TooSlow { round_trip });
        }
        self.abandon(cx);
    }

    /// The store may have lost our ticket, or its grant: asks it at once. `all_ask`: so do the others, whatever comes
    /// of this.
    pub(in crate::turnstile) fn ask_again(&mut self, cx: &mut EventCx<'_>, all_ask: bool) {
        self.advance_time(cx);
        if let KeyState::Acquiring(acquisition) = &mut self.state
            && acquisition.is_queued()
        {
            if all_ask {
                acquisition.forget_proof();
            }
            acquisition.ask_at = cx.at();
        }
        self.schedule(cx);
    }

    /// Those who asked for this ticket, too, are gone (M5): it asks soon, unless it is served before.
    pub(in crate::turnstile) fn ask_soon(&mut self, cx: &mut EventCx<'_>) {
        self.advance_time(cx);
        let soon = cx.at() + cx.ids.jitter(SOON.0, SOON.1);
        if let KeyState::Acquiring(acquisition) = &mut self.state {
            acquisition.ask_at = acquisition.ask_at.min(soon);
        }
        self.schedule(cx);
    }

    /// Abandons an acquisition that nobody needs while the store is away. One that belongs to a pending yield stays.
    pub(super) fn abandon_unwanted(&mut self, cx: &EventCx<'_>) {
        if !self.is_acquisition_wanted() && !self.pending.iter().any(PendingOp::is_yield) {
            self.abandon(cx);
        }
    }

    fn is_acquisition_wanted(&self) -> bool {
        let KeyState::Acquiring(acquisition) = &self.state else {
            return true;
        };
        match acquisition.adopter {
            None => !self.waiters.is_empty(),
            adopter => adopter == self.adopters.front().map(|first| first.id),
        }
    }

    /// Ends an acquisition that is not needed, and removes it from the store.
    fn abandon(&mut self, cx: &EventCx<'_>) {
        if let KeyState::Acquiring(acquisition) = &self.state
            && let Some((op, lasts)) = acquisition.settlement()
        {
            // O5: if the answer was lost, the store may do it for as long as that.
            let until = cx.at() + cx.ids.rules.response_timeout + lasts;
            let pending = PendingOp::new(op, None, until);
            self.pending.push_back(pending);
        }
        self.state = KeyState::Idle;
    }
}
