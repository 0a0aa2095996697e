//! What to do next: grant a turn, send a pending operation, or ask the store.

use super::acquisition::{Acquisition, Footprint};
use super::pending::{Ending, PendingOp};
use super::{Effect, InFlight, KeyState, Turnstile};
use crate::store::contract::Op;
use crate::turnstile::ids::EventCx;
use crate::turnstile::time::Point;
use crate::turnstile::verdict::{LeaseEnd, Refusal, WaiterVerdict};
use crate::turnstile::wait_queue::{Request, WaiterId};

impl<Caller: Clone> Turnstile<Caller> {
    /// Does what the state requires.
    pub(super) fn schedule(&mut self, cx: &mut EventCx<'_>) {
        loop {
            if let KeyState::Held(tenure) = &self.state {
                let has_no_lease = tenure.lease().is_none();
                // Our own owner holds the key. So there is no detached lease to adopt.
                self.refuse_adopters(&Refusal::NothingToAdopt);
                if has_no_lease {
                    self.next_turn(cx, None);
                }
            }
            if self.in_flight.is_some() {
                return;
            }
            if self.down {
                return self.abandon_unwanted(cx);
            }
            let is_done = if self.pending.is_empty() {
                !self.ask_store(cx)
            } else {
                !self.send_pending(cx)
            };
            if is_done {
                return;
            }
        }
    }

    /// Nobody holds the key in our tenure: passes it to the next local waiter. If it may not be passed, the store gives it
    /// to another registry, by a yield if we have waiters, since they queue again, or else by a release. `ending`: the
    /// turn that has just ended, if this is not the first of a tenure.
    pub(super) fn next_turn(&mut self, cx: &mut EventCx<'_>, ending: Option<Ending<Caller>>) {
        let now = cx.at();
        let KeyState::Held(tenure) = &self.state else {
            return;
        };
        let next = self.waiters.first();
        let next_ttl = next.map(|next| next.ttl);
        if next.is_some_and(|next| tenure.may_grant(&cx.ids.rules, next, now))
            && let Some((id, waiter)) = self.waiters.pop_first()
        {
            if let Some(ending) = ending {
                self.end_lease(ending.caller, LeaseEnd::Released);
            }
            return self.grant_lease(cx, id, waiter);
        }
        let (old, until) = (tenure.owner(), tenure.expires_by(now));
        let (op, state) = match next_ttl {
            Some(ttl) if self.store_has_queue && self.waiters.has_patient() => {
                let new = cx.ids.owner(self.mode);
                let acquisition = Acquisition::new(new, ttl, now, tenure.uncontended_after_yield());
                let state = KeyState::Acquiring(acquisition);
                (Op::Yield { old, new, ttl }, state)
            }
            _ => (Op::Release { owner: old }, KeyState::Idle),
        };
        self.state = state;
        self.pending.push_back(PendingOp::new(op, ending, until));
    }

    /// Grants the key to a waiter in our tenure.
    pub(super) fn grant_lease(&mut self, cx: &EventCx<'_>, id: WaiterId, waiter: Request<Caller>) {
        let KeyState::Held(tenure) = &mut self.state else {
            return;
        };
        let caller = waiter.caller.clone();
        let (token, deadline) = tenure.grant(id, waiter, cx.at());
        let verdict = WaiterVerdict::Granted {
            token,
            deadline: deadline.moment(),
            is_first_of_several: !token.is_passed()
                && cx.ids.rules.local_passes > 0
                && self.waiters.has_patient(),
        };
        self.wake_waiter(caller, verdict);
        self.refuse_busy(cx.at(), WaiterId::LAST);
        self.waiters.mark_busy();
    }

    /// `asks`, `is_pending`: see [`InFlight`].
    pub(super) fn send_op(
        &mut self,
        now: Point,
        op: Op,
        asks: Option<Footprint>,
        is_pending: bool,
    ) {
        self.in_flight = Some(InFlight {
            asks,
            is_pending,
            sent: now,
            newest_waiter: self.waiters.last_id(),
            grant: None,
        });
        self.effect(Effect::Send(op));
    }

    /// Refuses those who ask once and arrived no later than `newest_waiter`.
    pub(super) fn refuse_once(&mut self, newest_waiter: WaiterId, refusal: &Refusal) {
        for waiter in self.waiters.take_once(newest_waiter) {
            self.refuse(waiter.caller, refusal.clone());
        }
    }

    /// The same, since others have the key.
    pub(super) fn refuse_busy(&mut self, now: Point, newest_waiter: WaiterId) {
        for waiter in self.waiters.take_once(newest_waiter) {
            let holding = self.holding(now);
            self.refuse(waiter.caller, Refusal::Busy(holding));
        }
    }

    pub(super) fn refuse_adopters(&mut self, refusal: &Refusal) {
        while let Some(adopter) = self.adopters.pop_front() {
            self.refuse(adopter.waiter.caller, refusal.clone());
        }
    }

    pub(super) fn refuse_all(&mut self, refusal: &Refusal) {
        self.refuse_adopters(refusal);
        while let Some((_, waiter)) = self.waiters.pop_first() {
            self.refuse(waiter.caller, refusal.clone());
        }
    }
}
