//! What time ends: waits, seats, leases, tenures, and what is owed.

use super::errand::{Ending, Errand};
use super::line::Patience;
use super::machine::{Standing, Turnstile, Verdict, no_answer};
use super::supply::Cx;
use super::tenure::Hold;
use super::time::Point;
use crate::StoreError;
use crate::store::contract::Op;

impl<C: Clone> Turnstile<C> {
    /// Tells everybody whose time is over, and prolongs what is due. Comes first at every event, so that an event that is
    /// handled late does not see a lease that is over.
    pub(super) fn pass_time(&mut self, cx: &mut Cx<'_>) {
        self.lapse(cx);
        let now = cx.at();
        let Standing::Inside(tenure) = &mut self.standing else {
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

    /// Tells everybody whose time is over. All of [`pass_time`](Self::pass_time) where a lease is about to be given back:
    /// one that is due for a renewal right then needs none.
    pub(super) fn lapse(&mut self, cx: &mut Cx<'_>) {
        let now = cx.at();
        while let Some(waiter) = self.line.pop_ended(now) {
            let verdict = match (&self.trouble, waiter.patience) {
                (Some(trouble), _) => Verdict::Failed(StoreError::clone(trouble)),
                (None, Patience::Once) => Verdict::Failed(no_answer()),
                (None, Patience::Stand) => Verdict::Busy,
            };
            self.wake(waiter.who, verdict);
        }
        while let Some(adopter) = self
            .adopters
            .remove_first(|one| Point::from(one.waiter.until) <= now)
        {
            let trouble = self.trouble();
            self.wake(adopter.waiter.who, Verdict::Failed(trouble));
        }
        if self.flight.is_some() || !self.owed.is_empty() {
            self.end_endings(now);
            self.owed.forget_past(now);
        }
        let Standing::Inside(tenure) = &mut self.standing else {
            return;
        };
        if now >= tenure.deadline {
            self.expire(now);
        } else if let Some(seat) = tenure.seat.take_if(|seat| seat.is_over(now)) {
            let verdict = seat.loss();
            self.wake(seat.who, verdict);
        } else if let Some(seat) = &tenure.seat
            && seat.hold == Hold::Closing
            && now >= seat.end_by
        {
            self.close_seat(cx);
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
        if let Some(errand) = self.errand_in_flight() {
            ended.extend(errand.ending.take_if(&over));
        }
        for errand in self.owed.iter_mut() {
            ended.extend(errand.ending.take_if(&over));
        }
        ended
    }

    /// D5: the tenure is over by our clock.
    fn expire(&mut self, now: Point) {
        let Standing::Inside(mut tenure) = std::mem::replace(&mut self.standing, Standing::Out)
        else {
            unreachable!("only a tenure expires")
        };
        if let Some(seat) = tenure.seat.take() {
            let verdict = seat.loss();
            self.wake(seat.who, verdict);
        }
        // The store may hold the key a little longer than we dare to.
        let release = Op::Release {
            owner: tenure.owner,
        };
        let until = tenure.runs_out(now);
        self.owed.push_back(Errand::new(release, None, until));
    }
}
