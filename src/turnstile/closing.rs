//! The end of a registry.

use super::machine::{Standing, Turnstile, Verdict};
use super::supply::Cx;
use super::tenure::Hold;
use super::time::Moment;

impl<C: Clone> Turnstile<C> {
    /// The registry shuts down: nobody comes in any more, everybody is told, everything is given
    /// back. `grace`: until when a holder may end its work first, if it hears of this at all.
    pub(crate) fn close(&mut self, cx: &mut Cx<'_>, grace: impl FnOnce(&C) -> Option<Moment>) {
        self.lapse(cx);
        self.closed = true;
        while let Some((_, waiter)) = self.line.pop_first() {
            self.wake(waiter.who, Verdict::Closed);
        }
        while let Some(adopter) = self.adopters.pop_front() {
            self.wake(adopter.waiter.who, Verdict::Closed);
        }
        if !self.give_grace(grace) {
            self.close_seat(cx);
        }
        self.advance(cx);
    }

    /// Whether somebody holds who has time to end its work.
    fn give_grace(&mut self, grace: impl FnOnce(&C) -> Option<Moment>) -> bool {
        let Standing::Inside(tenure) = &mut self.standing else {
            return false;
        };
        let Some(seat) = tenure.seat.as_mut().filter(|seat| seat.is_taken()) else {
            return false;
        };
        // To be told twice gives nobody more time.
        if seat.hold != Hold::Closing {
            let Some(until) = grace(&seat.who) else {
                return false;
            };
            seat.hold = Hold::Closing;
            seat.end_by = until.into();
            let who = seat.who.clone();
            self.wake(who, Verdict::Closing);
        }
        true
    }

    /// Who holds, or might, holds no more.
    pub(super) fn close_seat(&mut self, cx: &mut Cx<'_>) {
        let Standing::Inside(tenure) = &mut self.standing else {
            return;
        };
        let Some(seat) = tenure.seat.take() else {
            return;
        };
        let keeps = seat.is_taken() && seat.keeps;
        self.wake(seat.who, Verdict::Closed);
        if keeps {
            self.keep(cx);
        }
    }

    /// The registry hangs up: nobody will hear what becomes of what is still owed, and who waits
    /// for that is told.
    pub(crate) fn hang_up(&mut self, cx: &mut Cx<'_>) {
        self.closed = true;
        // Where the process stood still, nobody has seen its time pass.
        self.close_seat(cx);
        self.advance(cx);
        for ending in self.take_endings(|_| true) {
            self.wake(ending.who, Verdict::Closed);
        }
    }
}
