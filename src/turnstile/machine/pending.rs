//! Sends operations that must reach the store whether or not anybody waits, and handles the answers to them.

use std::mem;

use super::Turnstile;
use crate::base::StoreError;
use crate::store::contract::Owner;
use crate::turnstile::acquisition::Footprint;
use crate::turnstile::ids::EventCx;
use crate::turnstile::pending_op::PendingOp;
use crate::turnstile::time::Point;
use crate::turnstile::verdict::LeaseEnd;

impl<Caller: Clone> Turnstile<Caller> {
    /// Sends the first pending operation. It stays the first until it is answered.
    pub(super) fn send_pending(&mut self, cx: &EventCx<'_>) {
        let now = cx.at();
        let first = self.pending.front_mut().expect("the caller looked");
        if first.is_yield() {
            if self.store_has_queue && !self.waiters.is_empty() {
                if let Some(acquisition) = self.state.acquisition_mut() {
                    acquisition.sent(now);
                }
            } else {
                // No local waiter needs a new ticket any more. So release the old owner. If the new owner may have a
                // ticket, withdraw it afterwards (O6).
                first.release_instead();
                if !first.may_be_done() {
                    self.abandon(cx);
                }
            }
        }
        let first = self.pending.front_mut().expect("the caller looked");
        let asks = first.is_yield().then_some(Footprint::Ticket);
        let op = first.to_send(now);
        self.send_op(now, op, asks, true);
    }

    /// The store may have done the first pending operation, or not.
    pub(super) fn pending_unknown(&mut self) {
        if let Some(first) = self.pending.front_mut() {
            first.on_unknown();
        }
    }

    /// The store has done the first pending operation. `ours`: whether the key was ours until then.
    pub(super) fn pending_done(&mut self, ours: bool) {
        let first = self.pending.pop_front().expect("it was in flight");
        if let Some((caller, end)) = first.on_done(ours) {
            self.end_lease(caller, end);
        }
    }

    /// The store would not do the first pending operation.
    pub(super) fn on_pending_refused(&mut self, cx: &mut EventCx<'_>, error: StoreError) {
        let send_at = cx.at() + self.retry_pause(cx);
        self.on_refused(cx.at(), &error);
        let first = self.pending.front_mut().expect("it was in flight");
        if first.is_yield() {
            // Release instead. S1: a yield is refused if the next owner cannot be notified. The lock may be free then.
            // So a release that finds no lock is no loss.
            first.release_instead();
            first.on_unknown();
        } else if error.is_retryable() {
            first.send_again(send_at);
        } else {
            let caller = first.take_caller(Point::FOREVER);
            self.pending.pop_front();
            if let Some(caller) = caller {
                self.end_lease(caller, LeaseEnd::Failed(error));
            }
        }
    }

    /// Finished leases that have expired by `now`, and whose end the store has not confirmed, get this verdict.
    pub(super) fn end_pending_leases(&mut self, now: Point, end: &LeaseEnd) {
        let pending = self.pending.iter_mut();
        let callers: Vec<_> = pending.filter_map(|it| it.take_caller(now)).collect();
        for caller in callers {
            self.end_lease(caller, end.clone());
        }
    }

    /// Drops operations that are no longer needed, because what they would remove has expired.
    pub(super) fn drop_expired_pending(&mut self, now: Point) {
        let mut in_flight = self.is_pending_in_flight();
        self.pending
            .retain(|pending| mem::take(&mut in_flight) || now < pending.until());
    }

    /// The answer to a renewal has come after the end of its lease, or was lost. So a release of the key stays pending
    /// until `until`, when the key is over in any case.
    pub(super) fn prolong_pending(&mut self, owner: Owner, until: Point) {
        let removals = self.pending.iter_mut().filter(|it| it.settles(owner));
        removals.for_each(|pending| pending.prolong(until));
    }

    /// The pending operations without the one in flight.
    pub(super) fn unsent(&self) -> impl Iterator<Item = &PendingOp<Caller>> {
        let pending = self.pending.iter();
        pending.skip(usize::from(self.is_pending_in_flight()))
    }

    fn is_pending_in_flight(&self) -> bool {
        let in_flight = self.in_flight.as_ref();
        in_flight.is_some_and(|in_flight| in_flight.is_pending)
    }
}
