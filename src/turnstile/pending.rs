use std::collections::VecDeque;

use super::time::Point;
use crate::store::contract::{Op, Owner};

/// A finished lease whose end the store has not confirmed yet.
#[derive(Debug)]
pub(super) struct Ending<C> {
    pub(super) who: C,
    /// Until then it is worth trying.
    pub(super) deadline: Point,
}

/// An op that must reach the store whether or not anybody waits: a release, a withdrawal, a
/// yield. It is sent again until it is answered, or not worth it any more.
#[derive(Debug)]
pub(super) struct PendingOp<C> {
    pub(super) op: Op,
    /// Who waits for its end.
    pub(super) ending: Option<Ending<C>>,
    /// Whether an earlier sending may have been done.
    pub(super) resent: bool,
    /// After a refusal, the store is left in peace until then.
    pub(super) not_before: Point,
    /// By then what it should undo has run out by itself.
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

    /// Whether it will see to it that nothing is left of this owner.
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

/// What is owed to the store, in order (O2).
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

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut PendingOp<C>> {
        self.0.iter_mut()
    }

    pub(super) fn any(&self, which: impl Fn(&PendingOp<C>) -> bool) -> bool {
        self.0.iter().any(which)
    }

    pub(super) fn settles(&self, owner: Owner) -> bool {
        self.any(|pending| pending.settles(owner))
    }

    /// Drops what is not worth sending any more.
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
