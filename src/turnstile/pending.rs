//! Operations that must reach the store whether or not anybody waits, and the answers to them.

use std::mem;

use super::acquisition::{Footprint, QUEUE_MARGIN};
use super::ids::EventCx;
use super::machine::{InFlight, KeyState, Turnstile};
use super::time::Point;
use super::verdict::LeaseEnd;
use crate::store::contract::{Answer, Op, OpError, Outcome, Owner};

/// A finished lease whose end the store has not confirmed yet.
#[derive(Debug)]
pub(super) struct Ending<C> {
    pub(super) who: C,
    /// When the lease expires by itself.
    pub(super) deadline: Point,
}

/// A release, a withdrawal or a yield. It is sent again until it is answered, or until what it would undo has expired.
#[derive(Debug)]
pub(super) struct PendingOp<C> {
    pub(super) op: Op,
    /// The lease that it ends, if its holder waits for the answer.
    pub(super) ending: Option<Ending<C>>,
    /// Whether the store may have done it already.
    resent: bool,
    /// It was refused or lost, and is sent again then.
    pub(super) retry_at: Option<Point>,
    /// When what it would undo has expired by itself.
    pub(super) until: Point,
}

impl<C> PendingOp<C> {
    pub(super) fn new(op: Op, ending: Option<Ending<C>>, until: Point) -> Self {
        Self {
            op,
            ending,
            resent: false,
            retry_at: None,
            until,
        }
    }

    /// Whether it removes everything of this owner from the store.
    pub(super) fn settles(&self, owner: Owner) -> bool {
        match self.op {
            Op::Release { owner: settled }
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

impl<C: Clone> Turnstile<C> {
    /// Sends the first pending operation if that is due. It stays the first until it is answered. Returns false if
    /// it is not due.
    pub(super) fn send_pending(&mut self, cx: &mut EventCx<'_>) -> bool {
        let now = cx.at();
        let first = self.pending.front_mut().expect("the caller looked");
        if first.retry_at.is_some_and(|at| at > now) {
            return false;
        }
        if let Op::Yield { old, new, ttl } = first.op {
            if self.waiters.is_empty() || !self.queue {
                // Nobody is left to yield for. Release the old owner, then withdraw the new one (O6).
                first.op = Op::Release { owner: old };
                self.state = KeyState::Idle;
                if first.resent {
                    let op = Op::Withdraw { owner: new, ttl };
                    let withdraw = PendingOp::new(op, None, first.until + QUEUE_MARGIN);
                    self.pending.insert(1, withdraw);
                }
            } else if let KeyState::Acquiring(acquisition) = &mut self.state {
                acquisition.sent(now);
            }
        }
        let op = self.pending[0].op.clone();
        self.send_op(now, op, None);
        true
    }

    /// The store has answered the first pending operation.
    pub(super) fn on_pending(
        &mut self,
        cx: &mut EventCx<'_>,
        in_flight: &InFlight,
        result: Result<Answer, OpError>,
    ) {
        let mut first = self.pending.pop_front().expect("it is in flight");
        match result {
            Ok(answer) => {
                let ours = match answer.outcome {
                    Outcome::Gone { held } => held,
                    Outcome::Won { .. } | Outcome::Busy { .. } => true,
                    Outcome::NotOld => false,
                    Outcome::Renewed | Outcome::Raised { .. } | Outcome::Lost => {
                        unreachable!("{:?} to {:?}", answer.outcome, first.op)
                    }
                };
                let is_yield = first.is_yield();
                self.confirm_end(first, ours);
                if is_yield {
                    self.on_answer(cx, Footprint::Ticket, in_flight, answer);
                }
            }
            Err(OpError::Unconfirmed(error)) => {
                // A yield: the old owner has released the key, and the new one has it unconfirmed.
                let is_yield = first.is_yield();
                self.confirm_end(first, true);
                if is_yield {
                    self.on_unconfirmed(cx, Footprint::Lock, &error);
                }
            }
            Err(OpError::Unknown(error)) => {
                first.resent = true;
                if let KeyState::Acquiring(acquisition) = &mut self.state
                    && first.is_yield()
                {
                    acquisition.raise_footprint(Footprint::Ticket);
                }
                self.pending.push_front(first);
                self.on_down(&error);
            }
            Err(OpError::Unsent(error)) => {
                self.pending.push_front(first);
                self.on_down(&error);
            }
            Err(OpError::Refused(error) | OpError::TooLate(error)) => {
                let retry_at = cx.at() + self.retry_pause(cx);
                self.on_refused(&error);
                if let Op::Yield { old, .. } = first.op {
                    // Release instead. S1: the refused yield may have freed the lock, if it could not tell the next
                    // owner. Then it is no loss that the release does not find the lock.
                    first.op = Op::Release { owner: old };
                    first.resent = true;
                } else if error.is_retryable() {
                    first.retry_at = Some(retry_at);
                } else {
                    if let Some(ending) = first.ending {
                        self.end_lease(ending.who, LeaseEnd::Failed(error));
                    }
                    return;
                }
                self.pending.push_front(first);
            }
        }
    }

    /// Ends a finished lease by whether the key was ours until its end. A release that was sent twice finds the key gone
    /// if the first one was done.
    fn confirm_end(&mut self, pending: PendingOp<C>, ours: bool) {
        let end = if ours || pending.resent {
            LeaseEnd::Released
        } else {
            LeaseEnd::Lost
        };
        if let Some(ending) = pending.ending {
            self.end_lease(ending.who, end);
        }
    }

    /// Fails releases that the store has not confirmed before the deadline of their lease, and drops operations whose
    /// effect has come about by expiry.
    pub(super) fn expire_pending(&mut self, now: Point) {
        for ending in self.take_endings(|ending| now >= ending.deadline) {
            let trouble = self.trouble();
            self.end_lease(ending.who, LeaseEnd::Failed(trouble));
        }
        let mut in_flight = self.is_pending_in_flight();
        self.pending
            .retain(|pending| mem::take(&mut in_flight) || now < pending.until);
    }

    /// Removes the finished leases for which `over` holds and whose end the store has not confirmed.
    pub(super) fn take_endings(&mut self, over: impl Fn(&mut Ending<C>) -> bool) -> Vec<Ending<C>> {
        let pending = self.pending.iter_mut();
        pending
            .filter_map(|pending| pending.ending.take_if(&over))
            .collect()
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
        in_flight.is_some_and(|in_flight| !in_flight.is_question())
    }
}
