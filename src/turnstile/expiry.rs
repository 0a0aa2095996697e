//! What time ends: waits, seats, leases, tenures, and what is owed.

use super::ids::EventCx;
use super::machine::{KeyState, Turnstile, Verdict, no_answer};
use super::pending::{Ending, PendingOp};
use super::tenure::LeasePhase;
use super::time::Point;
use super::wait_queue::{Adopter, Patience};
use crate::StoreError;
use crate::store::contract::Op;

impl<C: Clone> Turnstile<C> {
    /// Tells everybody whose time is over, and prolongs what is due. Comes first at every event, so that an event that is
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
            self.wake(who, Verdict::RenewalLate);
        }
        if renews {
            self.renew(now);
        }
    }

    /// Tells everybody whose time is over. All of [`advance_time`](Self::advance_time) where a lease is about to be given back:
    /// one that is due for a renewal right then needs none.
    pub(super) fn expire_due(&mut self, cx: &mut EventCx<'_>) {
        let now = cx.at();
        while let Some(waiter) = self.waiters.pop_ended(now) {
            let verdict = match (&self.trouble, waiter.patience) {
                (Some(trouble), _) => Verdict::Failed(StoreError::clone(trouble)),
                (None, Patience::Once) => Verdict::Failed(no_answer()),
                (None, Patience::Queue) => Verdict::Busy,
            };
            self.wake(waiter.who, verdict);
        }
        let is_over = |one: &Adopter<C>| Point::from(one.waiter.until) <= now;
        while let Some(at) = self.adopters.iter().position(is_over)
            && let Some(adopter) = self.adopters.remove(at)
        {
            let trouble = self.trouble();
            self.wake(adopter.waiter.who, Verdict::Failed(trouble));
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
            let verdict = lease.loss();
            self.wake(lease.who, verdict);
        } else if let Some(lease) = &tenure.lease
            && lease.phase == LeasePhase::Closing
            && now >= lease.end_by
        {
            self.close_lease(cx);
        }
    }

    /// Finished leases whose deadline passes before the store has confirmed their end.
    fn end_endings(&mut self, now: Point) {
        for ending in self.take_endings(|ending| now >= ending.deadline) {
            let trouble = self.trouble();
            self.wake(ending.who, Verdict::Failed(trouble));
        }
    }

    /// Takes out the finished leases whose end the store has not confirmed, as far as they are
    /// `over`.
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

    /// D5: the tenure is over by our clock.
    fn expire(&mut self, now: Point) {
        let KeyState::Held(mut tenure) = std::mem::replace(&mut self.state, KeyState::Idle) else {
            unreachable!("only a tenure expires")
        };
        if let Some(lease) = tenure.lease.take() {
            let verdict = lease.loss();
            self.wake(lease.who, verdict);
        }
        // The store may hold the key a little longer than we dare to.
        let release = Op::Release {
            owner: tenure.owner,
        };
        let until = tenure.runs_out(now);
        self.pending.push_back(PendingOp::new(release, None, until));
    }
}
