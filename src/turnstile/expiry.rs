//! What expires: waits, grants that nobody takes, leases, tenures and pending operations.

use super::ids::EventCx;
use super::key_state::KeyState;
use super::machine::{Turnstile, no_answer};
use super::pending::{Ending, PendingOp};
use super::tenure::LeasePhase;
use super::time::Point;
use super::verdict::{LeaseEnd, LeaseVerdict, Refusal};
use super::wait_queue::Adopter;
use crate::StoreError;
use crate::store::contract::Op;

impl<C: Clone> Turnstile<C> {
    /// Expires what is over, and sends the renewal that is due. Called first at every event, so that an event that is
    /// handled late does not see a lease that is over.
    pub(super) fn advance_time(&mut self, cx: &mut EventCx<'_>) {
        self.expire_due(cx);
        let now = cx.at();
        let KeyState::Held(tenure) = &mut self.state else {
            return;
        };
        let late = tenure.is_renewal_late(now);
        let renews = !self.down && tenure.is_renewal_due(now);
        if let Some(who) = late {
            self.tell_holder(who, LeaseVerdict::RenewalLate);
        }
        if renews {
            self.renew(now);
        }
    }

    /// Expires what is over. A lease that is about to be released needs no renewal, so `finish` calls this instead of
    /// [`advance_time`](Self::advance_time).
    pub(super) fn expire_due(&mut self, cx: &mut EventCx<'_>) {
        let now = cx.at();
        self.end_waits(now);
        let is_over = |one: &Adopter<C>| Point::from(one.waiter.until) <= now;
        while let Some(at) = self.adopters.iter().position(is_over)
            && let Some(adopter) = self.adopters.remove(at)
        {
            let trouble = self.trouble();
            self.refuse(adopter.waiter.who, Refusal::Failed(trouble));
        }
        if self.in_flight.is_some() || !self.pending.is_empty() {
            self.end_endings(now);
            self.pending.forget_past(now);
        }
        let KeyState::Held(tenure) = &mut self.state else {
            return;
        };
        if now >= tenure.deadline {
            self.expire(now);
        } else if let Some(lease) = tenure.lease.take_if(|lease| lease.is_over(now)) {
            self.lose(lease);
        } else if let Some(lease) = &tenure.lease
            && lease.phase == LeasePhase::Closing
            && now >= lease.end_by
        {
            self.close_lease(cx);
        }
    }

    /// Refuses those whose wait is over: others hold the key, or the store is in trouble.
    pub(super) fn end_waits(&mut self, now: Point) {
        while let Some((waiter, busy)) = self.waiters.pop_ended(now) {
            let refusal = match &self.trouble {
                Some(trouble) => Refusal::Failed(StoreError::clone(trouble)),
                None if busy => Refusal::Busy,
                None => Refusal::Failed(no_answer()),
            };
            self.refuse(waiter.who, refusal);
        }
    }

    /// Fails releases that the store has not confirmed before the deadline of their lease.
    fn end_endings(&mut self, now: Point) {
        for ending in self.take_endings(|ending| now >= ending.deadline) {
            let trouble = self.trouble();
            self.end_lease(ending.who, LeaseEnd::Failed(trouble));
        }
    }

    /// Removes the finished leases for which `over` holds and whose end the store has not confirmed.
    pub(super) fn take_endings(&mut self, over: impl Fn(&mut Ending<C>) -> bool) -> Vec<Ending<C>> {
        let mut ended = Vec::new();
        if let Some(pending) = self.pending_in_flight() {
            ended.extend(pending.ending.take_if(&over));
        }
        for pending in self.pending.iter_mut() {
            ended.extend(pending.ending.take_if(&over));
        }
        ended
    }

    /// D5: the deadline of the tenure has passed by our clock.
    fn expire(&mut self, now: Point) {
        let KeyState::Held(mut tenure) = std::mem::replace(&mut self.state, KeyState::Idle) else {
            unreachable!("only a tenure expires")
        };
        if let Some(lease) = tenure.lease.take() {
            self.lose(lease);
        }
        // The store may hold the key for a little longer.
        let release = Op::Release {
            owner: tenure.owner,
        };
        let until = tenure.runs_out(now);
        self.pending.push_back(PendingOp::new(release, None, until));
    }
}
