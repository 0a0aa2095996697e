//! The end of a registry.

use super::ids::EventCx;
use super::machine::{KeyState, Turnstile, Verdict};
use super::tenure::LeasePhase;
use super::time::Moment;

impl<C: Clone> Turnstile<C> {
    /// The registry shuts down: nobody comes in any more, everybody is told, everything is given
    /// back. `grace`: until when a holder may end its work first, if it hears of this at all.
    pub(crate) fn close(&mut self, cx: &mut EventCx<'_>, grace: impl FnOnce(&C) -> Option<Moment>) {
        self.expire_due(cx);
        self.closed = true;
        while let Some((_, waiter)) = self.waiters.pop_first() {
            self.wake(waiter.who, Verdict::Closed);
        }
        while let Some(adopter) = self.adopters.pop_front() {
            self.wake(adopter.waiter.who, Verdict::Closed);
        }
        if !self.give_grace(grace) {
            self.close_lease(cx);
        }
        self.schedule(cx);
    }

    /// Whether somebody holds who has time to end its work.
    fn give_grace(&mut self, grace: impl FnOnce(&C) -> Option<Moment>) -> bool {
        let KeyState::Held(tenure) = &mut self.state else {
            return false;
        };
        let Some(lease) = tenure.lease.as_mut().filter(|lease| lease.is_taken()) else {
            return false;
        };
        // To be told twice gives nobody more time.
        if lease.phase != LeasePhase::Closing {
            let Some(until) = grace(&lease.who) else {
                return false;
            };
            lease.phase = LeasePhase::Closing;
            lease.end_by = until.into();
            let who = lease.who.clone();
            self.wake(who, Verdict::Closing);
        }
        true
    }

    /// Who holds, or might, holds no more.
    pub(super) fn close_lease(&mut self, cx: &mut EventCx<'_>) {
        let KeyState::Held(tenure) = &mut self.state else {
            return;
        };
        let Some(lease) = tenure.lease.take() else {
            return;
        };
        let lets_expire = lease.is_taken() && lease.lets_expire;
        self.wake(lease.who, Verdict::Closed);
        if lets_expire {
            self.let_expire(cx);
        }
    }

    /// The registry hangs up: nobody will hear what becomes of what is still owed, and who waits
    /// for that is told.
    pub(crate) fn disconnect(&mut self, cx: &mut EventCx<'_>) {
        self.closed = true;
        // Where the process stood still, nobody has seen its time pass.
        self.close_lease(cx);
        self.schedule(cx);
        for ending in self.take_endings(|_| true) {
            self.wake(ending.who, Verdict::Closed);
        }
    }
}
