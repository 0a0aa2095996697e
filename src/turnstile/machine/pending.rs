//! Operations that must reach the store whether or not anybody waits, and the answers to them.

use std::mem;

use super::Turnstile;
use super::acquisition::Footprint;
use crate::base::{LossCause, StoreError};
use crate::store::contract::{Op, Owner};
use crate::turnstile::event_cx::EventCx;
use crate::turnstile::time::Point;
use crate::turnstile::verdict::LeaseEnd;

/// A finished lease whose end the store has not confirmed yet.
#[derive(Clone, Debug)]
pub(super) struct Ending<Caller> {
    pub(super) caller: Caller,
    /// When the lease expires by itself.
    pub(super) deadline: Point,
}

/// A release, withdrawal, unsubscription or yield, or the end of a lease whose key is kept. It is sent again until an
/// answer arrives, or until the stored entry has expired.
#[derive(Clone, Debug)]
pub(super) struct PendingOp<Caller> {
    op: Op,
    /// The lease that it ends, if its holder waits for the answer.
    ending: Option<Ending<Caller>>,
    /// Whether the store may have done it already.
    may_be_done: bool,
    /// Not before then: it was refused or dropped.
    send_at: Point,
    /// When the entry that it would remove has expired by itself.
    until: Point,
    /// Until when the key stays, if it is kept (M8).
    kept_until: Option<Point>,
}

impl<Caller> PendingOp<Caller> {
    pub(super) fn new(op: Op, ending: Option<Ending<Caller>>, until: Point) -> Self {
        Self {
            op,
            ending,
            may_be_done: false,
            send_at: Point::FIRST,
            until,
            kept_until: None,
        }
    }

    pub(super) fn release(owner: Owner, ending: Option<Ending<Caller>>, until: Point) -> Self {
        Self::new(Op::Release { owner }, ending, until)
    }

    /// The key is kept until then, and not released (M8).
    pub(super) fn kept(self, until: Point) -> Self {
        let kept_until = Some(until);
        Self { kept_until, ..self }
    }

    /// The caller that waits for the answer.
    pub(super) fn caller(&self) -> Option<&Caller> {
        self.ending.as_ref().map(|ending| &ending.caller)
    }

    /// When it is sent at the earliest.
    pub(super) fn send_at(&self) -> Point {
        self.send_at
    }

    /// When the lease that it ends expires by itself.
    pub(super) fn deadline(&self) -> Option<Point> {
        self.ending.as_ref().map(|ending| ending.deadline)
    }

    /// Whether it removes everything of this owner from the store.
    pub(super) fn settles(&self, owner: Owner) -> bool {
        self.op.owner() == owner
    }

    pub(super) fn is_yield(&self) -> bool {
        matches!(self.op, Op::Yield { .. })
    }

    /// The op to send.
    fn op_to_send(&mut self, now: Point) -> Op {
        if let Some(kept_until) = self.kept_until {
            // Counted anew each time that it is sent. A key whose time is over is released.
            let (owner, left) = (self.op.owner(), kept_until.since(now));
            self.op = if left.is_zero() {
                Op::Release { owner }
            } else {
                Op::Keep { owner, left }
            };
        }
        self.op.clone()
    }

    /// A yield becomes a release of its old owner.
    fn release_instead(&mut self) {
        if let Op::Yield { old, .. } = self.op {
            self.op = Op::Release { owner: old };
        }
    }

    pub(super) fn send_again(&mut self, at: Point) {
        self.send_at = at;
    }

    /// The store has done it. `ours`: whether the key was ours until then. Returns who waits, and how its lease has ended.
    fn on_done(self, ours: bool) -> Option<(Caller, LeaseEnd)> {
        // A release that was sent twice finds the key gone if the first one was done.
        let end = if ours || self.may_be_done {
            LeaseEnd::Released
        } else {
            LeaseEnd::Lost(LossCause::Taken)
        };
        Some((self.ending?.caller, end))
    }

    /// The caller that waits for the answer waits no more, if its lease has expired at `now`.
    fn take_caller(&mut self, now: Point) -> Option<Caller> {
        let ending = self.ending.take_if(|ending| ending.deadline <= now);
        ending.map(|ending| ending.caller)
    }
}

impl<Caller: Clone> Turnstile<Caller> {
    /// Sends the first pending operation. It stays the first until it is answered.
    pub(super) fn send_pending(&mut self, cx: &mut EventCx<'_, Caller>) {
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
                if !first.may_be_done {
                    self.abandon(cx);
                }
            }
        }
        let first = self.pending.front_mut().expect("the caller looked");
        let asks = first.is_yield().then_some(Footprint::Ticket);
        let op = first.op_to_send(now);
        self.send_op(cx, op, asks, true);
    }

    /// The store may have done the first pending operation, or not.
    pub(super) fn pending_unknown(&mut self) {
        if let Some(first) = self.pending.front_mut() {
            first.may_be_done = true;
        }
    }

    /// The store has done the first pending operation. `ours`: whether the key was ours until then.
    pub(super) fn pending_done(&mut self, cx: &mut EventCx<'_, Caller>, ours: bool) {
        let first = self.pending.pop_front().expect("it was in flight");
        if let Some((caller, end)) = first.on_done(ours) {
            cx.end_lease(caller, end);
        }
    }

    /// The store would not do the first pending operation.
    pub(super) fn on_pending_refused(&mut self, cx: &mut EventCx<'_, Caller>, error: StoreError) {
        let send_at = cx.at() + self.retry_pause(cx);
        self.on_refused(cx, &error);
        let first = self.pending.front_mut().expect("it was in flight");
        if first.is_yield() {
            // Release instead. S1: a yield is refused if the next owner cannot be notified. The lock may be free then.
            // So a release that finds no lock is no loss.
            first.release_instead();
            first.may_be_done = true;
        } else if error.is_retryable() {
            first.send_again(send_at);
        } else {
            let caller = first.take_caller(Point::FOREVER);
            self.pending.pop_front();
            if let Some(caller) = caller {
                cx.end_lease(caller, LeaseEnd::Failed(error));
            }
        }
    }

    /// Finished leases that have expired by `now`, and whose end the store has not confirmed, get this verdict.
    pub(super) fn end_pending_leases(
        &mut self,
        cx: &mut EventCx<'_, Caller>,
        now: Point,
        end: &LeaseEnd,
    ) {
        for caller in self.pending.iter_mut().filter_map(|it| it.take_caller(now)) {
            cx.end_lease(caller, end.clone());
        }
    }

    /// Drops operations that are no longer needed, because what they would remove has expired.
    pub(super) fn drop_expired_pending(&mut self, now: Point) {
        let mut in_flight = self.is_pending_in_flight();
        self.pending
            .retain(|pending| mem::take(&mut in_flight) || now < pending.until);
    }

    /// The answer to a renewal has come after the end of its lease, or none came. So a release of the key stays pending
    /// until `until`, when the key has expired in any case.
    pub(super) fn prolong_pending(&mut self, owner: Owner, until: Point) {
        let removals = self.pending.iter_mut().filter(|it| it.settles(owner));
        removals.for_each(|pending| pending.until = pending.until.max(until));
    }

    /// When the first of the pending operations is no longer needed, except for the one in flight.
    pub(super) fn pending_expires(&self) -> Option<Point> {
        let unsent = self.pending.iter();
        let unsent = unsent.skip(usize::from(self.is_pending_in_flight()));
        unsent.map(|pending| pending.until).min()
    }

    fn is_pending_in_flight(&self) -> bool {
        let in_flight = self.in_flight.as_ref();
        in_flight.is_some_and(|in_flight| in_flight.is_pending)
    }
}
