//! A request on its way to the node that has its key, and back.

use std::borrow::Borrow;
use std::sync::Arc;

use tokio::time::Instant;

use super::call::{Job, Wish};
use super::replicas::Held;
use super::session::NodeId;
use super::slots::Slot;
use crate::store::contract::{Grant, News, Op, Owner};
use crate::store::send_window::{Priority, Sendable};

#[derive(Debug)]
pub(super) struct Request {
    pub(super) job: Job,
    /// Where its key lies on a cluster; 0 elsewhere.
    pub(super) slot: Slot,
    /// When the session took it.
    pub(super) since: Instant,
    /// How often it was redirected since it was taken or delayed.
    pub(super) hops: u32,
    /// How often it was delayed.
    pub(super) delays: u32,
    /// Which node imports its slot, if that is to be asked (`ASK`).
    pub(super) asking: Option<NodeId>,
    /// Under which subscription it is entered, if it is.
    pub(super) heard: Option<u64>,
    /// The enter that it becomes if the lock is busy.
    enter: Option<Op>,
    /// It got the lock, which replicas are to confirm.
    pub(super) held: Option<Held>,
}

impl Request {
    pub(super) fn new(job: Job, slot: Slot, now: Instant) -> Self {
        Self {
            job,
            slot,
            since: now,
            hops: 0,
            delays: 0,
            asking: None,
            heard: None,
            enter: None,
            held: None,
        }
    }

    /// Has replicas confirm a grant.
    pub(super) fn granted(key: Arc<str>, grant: Grant, slot: Slot, now: Instant) -> Self {
        let op = Op::Enter {
            owner: grant.owner,
            ttl: grant.ttl,
            score: None,
        };
        let mut request = Self::new(Job::new(key.clone(), op), slot, now);
        request.hold(grant.owner, News::Granted { key, grant });
        request
    }

    pub(super) fn hold(&mut self, owner: Owner, news: News) {
        self.hops = 0;
        self.asking = None;
        self.held = Some(Held {
            owner,
            news,
            until: None,
        });
    }

    /// For whom an answer wins the lock.
    pub(super) fn winner(op: &Op) -> Option<Owner> {
        match *op {
            Op::Attempt { owner, .. }
            | Op::Listen { owner, .. }
            | Op::Enter { owner, .. }
            | Op::Adopt { owner, .. }
            | Op::Yield { new: owner, .. } => Some(owner),
            Op::Withdraw { .. }
            | Op::Unlisten { .. }
            | Op::Release { .. }
            | Op::Renew { .. }
            | Op::Raise { .. } => None,
        }
    }

    fn op(&self) -> Option<&Op> {
        match &self.job.wish {
            Wish::Op(op) => Some(op),
            Wish::Look(_) => None,
        }
    }

    /// Makes an enter an attempt: a lock that is free is won without a subscription.
    pub(super) fn attempt_first(&mut self) {
        if let Wish::Op(op) = &mut self.job.wish
            && let Op::Enter { owner, ttl, .. } = *op
        {
            self.enter = Some(std::mem::replace(op, Op::Attempt { owner, ttl }));
        }
    }

    /// Makes it the enter again that it was; false if it was none.
    pub(super) fn restore_enter(&mut self) -> bool {
        match (&mut self.job.wish, self.enter.take()) {
            (Wish::Op(op), Some(enter)) => {
                *op = enter;
                true
            }
            _ => false,
        }
    }

    /// Whether it asks for the lock, for a caller who may have gone by the time that it is sent.
    pub(super) fn asks(&self) -> bool {
        matches!(
            self.op(),
            Some(Op::Attempt { .. } | Op::Enter { .. } | Op::Listen { .. } | Op::Adopt { .. })
        )
    }

    pub(super) fn is_release(&self) -> bool {
        matches!(self.op(), Some(Op::Release { .. }))
    }

    /// Whether it puts a ticket into the queue, so that grants for its key must reach us.
    pub(super) fn enters(&self) -> bool {
        self.held.is_none() && matches!(self.op(), Some(Op::Enter { .. } | Op::Yield { .. }))
    }

    /// When its answer is of no use any more, if it is a renewal or asked replicas.
    pub(super) fn useful_until(&self) -> Option<Instant> {
        match (&self.held, self.op()) {
            (Some(held), _) => held.until,
            (None, Some(Op::Renew { within, .. })) => Some(self.since + *within),
            _ => None,
        }
    }
}

impl Borrow<Job> for Request {
    fn borrow(&self) -> &Job {
        &self.job
    }
}

impl Sendable for Request {
    type Key = Arc<str>;

    fn key(&self) -> &Arc<str> {
        &self.job.key
    }

    fn priority(&self) -> Priority {
        match self.op() {
            Some(Op::Renew { .. }) => Priority::Renew,
            Some(_) => Priority::Change,
            None => Priority::Inspect,
        }
    }

    fn is_alone(&self) -> bool {
        self.job.alone
    }

    /// A call names one slot, and is redirected or not as a whole.
    fn group(&self) -> u16 {
        self.slot | u16::from(self.asking.is_some()) << 15 | u16::from(self.job.is_bare) << 14
    }

    /// The names of lock and queue, and the rest.
    fn size(&self) -> usize {
        2 * self.job.key.len() + 150
    }
}
