use std::collections::VecDeque;

use super::time::Point;
use crate::store::contract::{Op, Owner};

/// A finished lease whose end the store has not confirmed yet.
#[derive(Debug)]
pub(super) struct Ending<C> {
    pub(super) who: C,
    /// When the lease expires by itself.
    pub(super) deadline: Point,
}

/// An op that must reach the store whether or not anybody waits: a release, a withdrawal, a yield. It
/// is sent again until it is answered, or until what it would undo has expired.
#[derive(Debug)]
pub(super) struct PendingOp<C> {
    pub(super) op: Op,
    /// The lease that it ends, if its holder waits for the answer.
    pub(super) ending: Option<Ending<C>>,
    /// Whether the store may have done it already.
    pub(super) resent: bool,
    /// After a refusal it is not sent again before this point.
    pub(super) not_before: Point,
    /// When what it would undo has expired by itself.
    pub(super) until: Point,
}

impl<C> PendingOp<C> {
    pub(super) fn new(op: Op, ending: Option<Ending<C>>, until: Point) -> Self {
        Self {
            op,
            ending,
            resent: false,
            not_before: Point::START,
            until,
        }
    }

    /// Whether it removes everything of this owner from the store.
    pub(super) fn settles(&self, owner: Owner) -> bool {
        match self.op {
            Op::Release { owner: settled }
            | Op::Withdraw { owner: settled, .. }
            | Op::Unlisten { owner: settled } => settled == owner,
            Op::Yield { old, .. } => old == owner,
            _ => false,
        }
    }
}

/// Pending operations, in order (O2).
#[derive(Debug)]
pub(super) struct PendingOps<C>(VecDeque<PendingOp<C>>);

impl<C> PendingOps<C> {
    pub(super) fn new() -> Self {
        Self(VecDeque::new())
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    pub(super) fn push_back(&mut self, pending: PendingOp<C>) {
        self.0.push_back(pending);
    }

    pub(super) fn push_front(&mut self, pending: PendingOp<C>) {
        self.0.push_front(pending);
    }

    pub(super) fn front(&self) -> Option<&PendingOp<C>> {
        self.0.front()
    }

    pub(super) fn pop_front(&mut self) -> Option<PendingOp<C>> {
        self.0.pop_front()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &PendingOp<C>> {
        self.0.iter()
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut PendingOp<C>> {
        self.0.iter_mut()
    }

    pub(super) fn any(&self, which: impl Fn(&PendingOp<C>) -> bool) -> bool {
        self.0.iter().any(which)
    }

    pub(super) fn settles(&self, owner: Owner) -> bool {
        self.any(|pending| pending.settles(owner))
    }

    /// Drops operations whose effect has come about by expiry.
    pub(super) fn forget_past(&mut self, now: Point) {
        self.0.retain(|pending| now < pending.until);
    }

    pub(super) fn next_timeout(&self) -> Option<Point> {
        self.0
            .iter()
            .flat_map(|pending| {
                let ending = pending.ending.as_ref().map(|ending| ending.deadline);
                ending.into_iter().chain([pending.until])
            })
            .min()
    }
}
