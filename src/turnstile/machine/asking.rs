//! Asks the store for the key: questions, answers, grants.

use super::acquisition::{Acquisition, Footprint};
use super::pending::PendingOp;
use super::timers::Timer;
use super::{EarlyGrant, InFlight, Tickets, Turnstile};
use crate::base::StoreError;
use crate::store::contract::{Answer, Grant, Outcome};
use crate::turnstile::event_cx::EventCx;
use crate::turnstile::tenure::Win;
use crate::turnstile::time::{Point, drift};
use crate::turnstile::verdict::NotGranted;

/// How long a ticket waits that has become the first of its registry (M5), or may have got the key (D2), in milliseconds.
const SOON: (u64, u64) = (1_000, 1_500);

fn soon<Caller>(cx: &mut EventCx<'_, Caller>) -> Point {
    cx.at() + cx.ids.jitter(SOON.0, SOON.1)
}

impl<Caller: Clone> Turnstile<Caller> {
    /// Asks the store for the key if that is due. Returns false if there is nothing to do.
    pub(super) fn ask_store(&mut self, cx: &mut EventCx<'_, Caller>) -> bool {
        if self.state.tenure().is_some() {
            return false;
        }
        let now = cx.at();
        let adopter = self.adopters.front();
        let is_patient = self.waiters.has_patient();
        let wants_ticket = self.store_has_queue && is_patient;
        let Some(acquisition) = self.state.acquisition() else {
            let waiter = adopter.map(|(_, first)| first).or(self.waiters.first());
            let Some(ttl) = waiter.map(|waiter| waiter.ttl) else {
                return false;
            };
            self.begin_acquisition(cx, ttl, now, adopter.map(|(id, _)| *id));
            return true;
        };
        // A caller that adopts goes before the wait queue.
        let is_next = acquisition.adopts() || adopter.is_none();
        let is_misplaced = !acquisition.adopts() && acquisition.is_misplaced(wants_ticket);
        if !is_next || is_misplaced || !self.is_acquisition_wanted() {
            self.abandon(cx);
            return true;
        }
        if !self.is_due(Timer::Ask, now) {
            return false;
        }
        let adopts = adopter.and_then(|adopter| {
            let from = adopter.1.adopts.clone()?;
            Some((from, self.end_of(adopter).since(now)))
        });
        let Some(acquisition) = self.state.acquisition_mut() else {
            return false;
        };
        if !cx.asks_for_others && acquisition.is_queued() {
            let recheck = now + Acquisition::recheck(cx.ids);
            acquisition.plan_question(recheck);
            return false;
        }
        let (op, footprint) = acquisition.ask(now, adopts, wants_ticket, is_patient);
        self.send_op(cx, op, Some(footprint), false);
        true
    }

    /// The store has answered an op that asks for the key. `footprint`: what the op may have left.
    pub(super) fn on_asked(
        &mut self,
        cx: &mut EventCx<'_, Caller>,
        footprint: Footprint,
        in_flight: &InFlight,
        answer: &Answer,
    ) {
        let Some(acquisition) = self.state.acquisition_mut() else {
            unreachable!("an acquisition stays until its op is answered")
        };
        // Tickets of other lines may be gone as well (M5).
        self.tickets = match answer.outcome {
            Outcome::Won { .. } if acquisition.is_queued() => Tickets::Unknown,
            Outcome::Busy { entered: true, .. } if acquisition.is_queued() => Tickets::Gone,
            _ => Tickets::Kept,
        };
        match answer.outcome {
            Outcome::Won { epoch } => {
                let win = acquisition.on_won(epoch, in_flight.sent);
                self.on_win(cx, win);
            }
            Outcome::Busy { .. } => {
                let has_queue = self.store_has_queue;
                acquisition.on_busy(cx, footprint, in_flight.sent, answer, has_queue);
                self.refuse_busy(cx, in_flight.newest_waiter);
                self.mark_busy(cx);
                self.end_waits(cx);
                if footprint != Footprint::Ticket || !has_queue {
                    self.plan_repeat(cx);
                }
            }
            Outcome::NotOld if acquisition.adopts() => {
                // Neither the old owner nor ours has the lock. A resend cannot change that.
                acquisition.set_footprint(Footprint::Nothing);
                if self.is_acquisition_wanted()
                    && let Some((_, waiter)) = self.adopters.pop_front()
                {
                    cx.refuse(waiter.caller, NotGranted::NothingToAdopt);
                }
            }
            // The store has not done the yield that should have entered it. Its question has been due since the yield was
            // planned: entering it recovers the lock, wherever it is (S3).
            Outcome::NotOld => {}
            Outcome::Gone { .. } | Outcome::Renewed | Outcome::Raised { .. } | Outcome::Lost => {
                unreachable!("{answer:?} to an op that asks for the key")
            }
        }
    }

    /// The store would not do what was asked. The same owner asks again after a pause. For an adoption it does not in the
    /// last eighth of the time that is left for an answer: it might be done when its caller has given up.
    pub(super) fn on_question_refused(&mut self, cx: &mut EventCx<'_, Caller>, error: &StoreError) {
        let mut ask_at = cx.at() + self.retry_pause(cx);
        let adopter = self.adopters.front().map(|adopter| self.end_of(adopter));
        if let Some(acquisition) = self.state.acquisition_mut() {
            if let Some(end) = adopter.filter(|_| acquisition.adopts())
                && end.since(ask_at) < cx.ids.rules.response_timeout / 8
            {
                ask_at = ask_at.max(end);
            }
            acquisition.on_refused(ask_at);
        }
        self.on_refused(cx, error);
    }

    /// The store gave us the key, but too few replicas confirmed it. The key is released, and a new owner asks for it
    /// after a pause, behind everybody in the store's queue. The old owner is retired (O1).
    pub(super) fn on_unconfirmed(
        &mut self,
        cx: &mut EventCx<'_, Caller>,
        footprint: Footprint,
        error: &StoreError,
    ) {
        let ask_at = cx.at() + self.retry_pause(cx);
        if let Some(acquisition) = self.state.acquisition_mut() {
            acquisition.set_footprint(footprint);
        }
        self.on_refused(cx, error);
        self.abandon(cx);
        if let Some(ttl) = self.waiters.first().map(|first| first.ttl) {
            self.begin_acquisition(cx, ttl, ask_at, None);
        }
    }

    /// Handles a grant that came now, or one that waited for a reply (O3).
    pub(super) fn on_grant(&mut self, cx: &mut EventCx<'_, Caller>, received: EarlyGrant) {
        let grant = &received.grant;
        let acquisition = self.state.acquisition_mut();
        let Some(acquisition) = acquisition.filter(|it| it.owner() == grant.owner) else {
            return self.give_back(cx, grant);
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
            // The session has dropped the yield to this owner. Pending operations go first, and recover the grant.
            return;
        }
        if !acquisition.has_ticket() {
            // As far as is known it has no ticket. The answer to its next op shows whether it holds the lock.
            acquisition.plan_question(cx.at());
            return;
        }
        let Some(start) = acquisition.start_of(grant) else {
            let soon = soon(cx).min(cx.at() + grant.ttl / 3);
            acquisition.on_old_grant(soon);
            return;
        };
        if let Some(fault) = &received.fault {
            self.on_unconfirmed(cx, Footprint::Ticket, fault);
        } else if let Some(win) = acquisition.on_granted(grant, start, received.at, cx.at()) {
            self.on_win(cx, win);
        }
    }

    /// O1: a grant for an owner that is retired or unknown is released, if that is not pending.
    fn give_back(&mut self, cx: &EventCx<'_, Caller>, grant: &Grant) {
        let (owner, now) = (grant.owner, cx.at());
        let is_held = self.owner() == Some(owner);
        // That of a tenure that has ended, whose key is meant to stay.
        let is_left = cx.ids.is_remembered(owner, now);
        if !is_held && !is_left && !self.pending.iter().any(|it| it.settles(owner)) {
            let until = now + grant.ttl + drift(grant.ttl);
            let release = PendingOp::release(owner, None, until);
            self.pending.push_back(release);
        }
    }

    /// The store gave us the key. A tenure begins, unless the key is of no use to us.
    fn on_win(&mut self, cx: &mut EventCx<'_, Caller>, win: Win) {
        let now = cx.at();
        let is_wanted = self.is_acquisition_wanted();
        let Some(acquisition) = self.state.acquisition_mut() else {
            return;
        };
        let adopts = acquisition.adopts();
        if adopts && !is_wanted {
            // Its caller has left. The local waiters may not have it: they would overtake the store's queue. The
            // acquisition is abandoned next.
            return;
        }
        if win.deadline() <= now && is_wanted {
            let is_too_slow = acquisition.on_late_win(now, self.waiters.last_id());
            if !adopts {
                self.waiters.mark_answered();
            }
            if is_too_slow {
                let round_trip = now.since(win.start);
                self.give_up_late(cx, &NotGranted::TooSlow { round_trip });
            }
            return;
        }
        self.become_held(win, now);
        // The tenure may have expired already, if nobody waits for it. In that case end it here.
        self.expire_due(cx);
        if adopts && let Some((id, waiter)) = self.adopters.pop_front() {
            self.grant_lease(cx, id, waiter);
        }
    }

    /// D4: each time that we ask, the key is ours for another ttl, and is over when the answer comes. It is given back.
    /// Callers that have waited since the first time and want no longer ttl are refused.
    fn give_up_late(&mut self, cx: &mut EventCx<'_, Caller>, refusal: &NotGranted) {
        let Some(acquisition) = self.state.acquisition() else {
            return;
        };
        let refused: Vec<_> = if acquisition.adopts() {
            let adopter = self.adopters.pop_front();
            adopter.map(|(_, waiter)| waiter).into_iter().collect()
        } else {
            let (newest, ttl) = acquisition.late_wins();
            self.waiters.take_within(newest, ttl)
        };
        for waiter in refused {
            cx.refuse(waiter.caller, refusal.clone());
        }
        self.abandon(cx);
    }

    /// Our ticket may be gone, or its grant on the way: asks at once. `all_ask`: all lines ask, so what the store has said
    /// before counts no longer.
    pub(in crate::turnstile) fn ask_again(&mut self, cx: &mut EventCx<'_, Caller>, all_ask: bool) {
        self.advance_time(cx);
        if let Some(acquisition) = self.state.acquisition_mut() {
            acquisition.doubt_ticket(cx.at(), all_ask);
        }
        self.schedule(cx);
    }

    /// The line that asked for this ticket, too, is gone (M5): this one asks soon, unless it is served before.
    pub(in crate::turnstile) fn ask_soon(&mut self, cx: &mut EventCx<'_, Caller>) {
        self.advance_time(cx);
        let soon = soon(cx);
        if let Some(acquisition) = self.state.acquisition_mut() {
            acquisition.ask_by(soon);
        }
        self.schedule(cx);
    }

    /// Abandons an acquisition that nobody needs while the store is away. One that belongs to a pending yield stays.
    pub(super) fn abandon_unwanted(&mut self, cx: &EventCx<'_, Caller>) {
        if !self.is_acquisition_wanted() && !self.pending.iter().any(PendingOp::is_yield) {
            self.abandon(cx);
        }
    }

    /// Whether a caller waits for the acquisition, if there is one.
    fn is_acquisition_wanted(&self) -> bool {
        match self.state.acquisition().map(Acquisition::adopter) {
            None => true,
            Some(None) => !self.waiters.is_empty(),
            Some(adopter) => adopter == self.adopters.front().map(|(id, _)| *id),
        }
    }
}
