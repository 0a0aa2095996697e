//! An operation that must reach the store whether or not anybody waits for it.

use super::time::Point;
use super::verdict::LeaseEnd;
use crate::base::LossCause;
use crate::store::contract::{Op, Owner};

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

    /// Keeps a key until `kept_until` (M8).
    pub(super) fn keep(
        owner: Owner,
        kept_until: Point,
        ending: Option<Ending<Caller>>,
        until: Point,
    ) -> Self {
        Self {
            kept_until: Some(kept_until),
            ..Self::release(owner, ending, until)
        }
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

    pub(super) fn until(&self) -> Point {
        self.until
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

    pub(super) fn may_be_done(&self) -> bool {
        self.may_be_done
    }

    /// The op to send.
    pub(super) fn to_send(&mut self, now: Point) -> Op {
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
    pub(super) fn release_instead(&mut self) {
        if let Op::Yield { old, .. } = self.op {
            self.op = Op::Release { owner: old };
        }
    }

    pub(super) fn send_again(&mut self, at: Point) {
        self.send_at = at;
    }

    /// The store may have done it, or not.
    pub(super) fn on_unknown(&mut self) {
        self.may_be_done = true;
    }

    /// It is needed until then at least.
    pub(super) fn prolong(&mut self, until: Point) {
        self.until = self.until.max(until);
    }

    /// The store has done it. `ours`: whether the key was ours until then. Returns who waits, and how its lease has ended.
    pub(super) fn on_done(self, ours: bool) -> Option<(Caller, LeaseEnd)> {
        // A release that was sent twice finds the key gone if the first one was done.
        let end = if ours || self.may_be_done {
            LeaseEnd::Released
        } else {
            LeaseEnd::Lost(LossCause::Taken)
        };
        Some((self.ending?.caller, end))
    }

    /// The caller that waits for the answer waits no more, if its lease has expired at `now`.
    pub(super) fn take_caller(&mut self, now: Point) -> Option<Caller> {
        let ending = self.ending.take_if(|ending| ending.deadline <= now);
        ending.map(|ending| ending.caller)
    }
}
