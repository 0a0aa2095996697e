//! Operations that must reach the store whether or not anybody waits, and the answers to them.

use std::mem;

use super::acquisition::Footprint;
use super::{KeyState, Turnstile};
use crate::base::{LossCause, StoreError};
use crate::store::contract::{Op, Owner};
use crate::turnstile::ids::EventCx;
use crate::turnstile::time::Point;
use crate::turnstile::verdict::LeaseEnd;

/// A finished lease whose end the store has not confirmed yet.
#[derive(Debug)]
pub(super) struct Ending<Caller> {
    pub(super) caller: Caller,
    /// When the lease expires by itself.
    pub(super) deadline: Point,
}

/// A release, withdrawal, unsubscription or yield, or the end of a lease whose key is kept. It is sent again until an
/// answer arrives, or until the stored entry has expired.
#[derive(Debug)]
pub(super) struct PendingOp<Caller> {
    op: Op,
    /// The lease that it ends, if its holder waits for the answer.
    pub(super) ending: Option<Ending<Caller>>,
    /// Whether the store may have done it already.
    may_be_done: bool,
    /// It was refused or lost, and is sent again then.
    pub(super) retry_at: Option<Point>,
    /// When what it would undo has expired by itself.
    until: Point,
    /// Until when it keeps the key, if it does.
    kept_until: Option<Point>,
}

impl<Caller> PendingOp<Caller> {
    pub(super) fn new(op: Op, ending: Option<Ending<Caller>>, until: Point) -> Self {
        Self {
            op,
            ending,
            may_be_done: false,
            retry_at: None,
            until,
            kept_until: None,
        }
    }

    /// Keeps a key until `kept_until` (M8).
    pub(super) fn keep(
        owner: Owner,
        kept_until: Point,
        ending: Option<Ending<Caller>>,
        until: Point,
    ) -> Self {
        Self {
            kept_until: Some(kept_until),
            ..Self::new(Op::Release { owner }, ending, until)
        }
    }

    /// Whether it removes everything of this owner from the store.
    pub(super) fn settles(&self, owner: Owner) -> bool {
        match self.op {
            Op::Release { owner: settled }
            | Op::Keep { owner: settled, .. }
            | Op::Withdraw { owner: settled, .. }
            | Op::Unlisten { owner: settled }
            | Op::Yield { old: settled, .. } => settled == owner,
            _ => false,
        }
    }

    pub(super) fn is_yield(&self) -> bool {
        matches!(self.op, Op::Yield { .. })
    }
}

impl<Caller: Clone> Turnstile<Caller> {
    /// Sends the first pending operation if that is due. It stays the first until it is answered. Returns false if
    /// it is not due.
    pub(super) fn send_pending(&mut self, cx: &mut EventCx<'_>) -> bool {
        let now = cx.at();
        let first = self.pending.front_mut().expect("the caller looked");
        if first.retry_at.is_some_and(|at| at > now) {
            return false;
        }
        if let Some(until) = first.kept_until {
            // Counted anew each time that it is sent. A key whose time is over is released.
            let (owner, left) = (first.op.owner(), until.since(now));
            first.op = if left.is_zero() {
                Op::Release { owner }
            } else {
                Op::Keep { owner, left }
            };
        }
        if let Op::Yield { old, .. } = first.op {
            if self.waiters.is_empty() || !self.store_has_queue {
                // No local waiter needs a new ticket any more. So release the old owner. If the new owner may have a
                // ticket, withdraw it afterwards (O6).
                first.op = Op::Release { owner: old };
                if !first.may_be_done {
                    self.state = KeyState::Idle;
                }
            } else if let KeyState::Acquiring(acquisition) = &mut self.state {
                acquisition.sent(now);
            }
        }
        let asks = first.is_yield().then_some(Footprint::Ticket);
        let op = first.op.clone();
        self.send_op(now, op, asks, true);
        true
    }

    /// The store may have done the first pending operation, or not.
    pub(super) fn pending_unknown(&mut self) {
        if let Some(first) = self.pending.front_mut() {
            first.may_be_done = true;
        }
    }

    /// The store has done the first pending operation. `ours`: whether the key was ours until then. A release that was
    /// sent twice finds the key gone if the first one was done.
    pub(super) fn pending_done(&mut self, ours: bool) {
        let first = self.pending.pop_front().expect("it was in flight");
        let end = if ours || first.may_be_done {
            LeaseEnd::Released
        } else {
            LeaseEnd::Lost(LossCause::Taken)
        };
        if let Some(ending) = first.ending {
            self.end_lease(ending.caller, end);
        }
    }

    /// The store would not do the first pending operation.
    pub(super) fn on_pending_refused(&mut self, cx: &mut EventCx<'_>, error: StoreError) {
        let retry_at = cx.at() + self.retry_pause(cx);
        self.on_refused(cx.at(), &error);
        let first = self.pending.front_mut().expect("it was in flight");
        if let Op::Yield { old, .. } = first.op {
            // Release instead. S1: a yield is refused if the next owner cannot be notified. The lock may be free then.
            // So a release that finds no lock is no loss.
            first.op = Op::Release { owner: old };
            first.may_be_done = true;
        } else if error.is_retryable() {
            first.retry_at = Some(retry_at);
        } else if let Some(PendingOp { ending, .. }) = self.pending.pop_front()
            && let Some(ending) = ending
        {
            self.end_lease(ending.caller, LeaseEnd::Failed(error));
        }
    }

    /// Fails releases that the store has not confirmed before the deadline of their lease, and drops operations that
    /// are no longer needed, because the key has expired.
    pub(super) fn expire_pending(&mut self, now: Point) {
        if self.pending.is_empty() {
            return;
        }
        for ending in self.take_endings(|ending| now >= ending.deadline) {
            let store_error = self.store_error();
            self.end_lease(ending.caller, LeaseEnd::Failed(store_error));
        }
        let mut in_flight = self.is_pending_in_flight();
        self.pending
            .retain(|pending| mem::take(&mut in_flight) || now < pending.until);
    }

    /// Removes the finished leases for which `over` holds and whose end the store has not confirmed.
    pub(super) fn take_endings(
        &mut self,
        over: impl Fn(&mut Ending<Caller>) -> bool,
    ) -> Vec<Ending<Caller>> {
        let pending = self.pending.iter_mut();
        pending
            .filter_map(|pending| pending.ending.take_if(&over))
            .collect()
    }

    /// The answer to a renewal has come after the end of its lease, or was lost. So a release of the key stays pending
    /// until `until`, when the key is over in any case.
    pub(super) fn prolong_pending(&mut self, owner: Owner, until: Point) {
        let removals = self.pending.iter_mut().filter(|it| it.settles(owner));
        removals.for_each(|pending| pending.until = pending.until.max(until));
    }

    /// When [`expire_pending`](Self::expire_pending) has something to do next.
    pub(super) fn pending_timeout(&self) -> Option<Point> {
        let endings = self.pending.iter();
        let endings = endings.filter_map(|pending| Some(pending.ending.as_ref()?.deadline));
        let unsent = self.pending.iter();
        let unsent = unsent.skip(usize::from(self.is_pending_in_flight()));
        endings.chain(unsent.map(|pending| pending.until)).min()
    }

    fn is_pending_in_flight(&self) -> bool {
        let in_flight = self.in_flight.as_ref();
        in_flight.is_some_and(|in_flight| in_flight.is_pending)
    }
}
