//! A request to the node that has its key.

use std::sync::Arc;

use futures::channel::oneshot;
use tokio::time::Instant;

use super::replicas::Held;
use super::session::NodeId;
use super::slots::Slot;
use crate::StoreError;
use crate::store::contract::{Grant, KeyStatus, Mode, Op, Owner, StoreEvent, SubmittedOp};
use crate::store::send_window::{Priority, Sendable};
use crate::thread_end;

/// One request about one lock.
#[derive(Debug)]
pub(super) struct Request {
    pub(super) kind: RequestKind,
    /// The slot of its key on a cluster; 0 elsewhere.
    pub(super) slot: Slot,
    /// When the session took it.
    pub(super) since: Instant,
    /// Whether it was refused with its whole call, perhaps because of another request (S1).
    pub(super) alone: bool,
    /// Whether the server has refused it once because it came too late (O5).
    pub(super) was_stale: bool,
    /// The end of a lease with the lock key alone, since its slot is being moved.
    pub(super) is_bare: bool,
    /// How often it was redirected since it came or was delayed.
    pub(super) hops: u32,
    /// How often it was delayed.
    pub(super) delays: u32,
    /// The node that imports its slot, if that one must be asked (`ASK`).
    pub(super) asking: Option<NodeId>,
    /// The subscription under which its ticket is entered, if there is one.
    pub(super) heard: Option<u64>,
    /// An enter that is sent as an attempt: a free lock is won without a subscription.
    pub(super) attempts_first: bool,
    /// It won the lock, and replicas must confirm that.
    pub(super) held: Option<Held>,
}

#[derive(Debug)]
pub(super) enum RequestKind {
    Op(SubmittedOp),
    Look(Arc<str>, oneshot::Sender<Result<KeyStatus, StoreError>>),
}

impl Request {
    pub(super) fn new(kind: RequestKind) -> Self {
        Self {
            kind,
            slot: 0,
            since: thread_end::now(),
            alone: false,
            was_stale: false,
            is_bare: false,
            hops: 0,
            delays: 0,
            asking: None,
            heard: None,
            attempts_first: false,
            held: None,
        }
    }

    /// Asks replicas to confirm a grant.
    pub(super) fn granted(key: Arc<str>, grant: Grant, slot: Slot) -> Self {
        let Grant { owner, ttl, .. } = grant;
        let score = None;
        let op = Op::Enter { owner, ttl, score };
        let mut request = Self::new(RequestKind::Op(SubmittedOp::unattended(key.clone(), op)));
        request.slot = slot;
        request.hold(owner, StoreEvent::Granted { key, grant });
        request
    }

    pub(super) fn hold(&mut self, owner: Owner, event: StoreEvent) {
        self.hops = 0;
        self.asking = None;
        self.held = Some(Held {
            owner,
            event,
            until: None,
        });
    }

    /// A caller that cannot be notified does not subscribe.
    pub(super) fn listen_to_nothing(&mut self) {
        if let RequestKind::Op(submitted) = &mut self.kind
            && let Op::Listen { owner, ttl } = submitted.op
        {
            submitted.op = Op::Attempt { owner, ttl };
        }
    }

    /// The owner that an answer may give the lock.
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
            | Op::Keep { .. }
            | Op::Renew { .. }
            | Op::Raise { .. }
            | Op::Serve { .. } => None,
        }
    }

    pub(super) fn key(&self) -> &Arc<str> {
        match &self.kind {
            RequestKind::Op(submitted) => &submitted.key,
            RequestKind::Look(key, _) => key,
        }
    }

    fn op(&self) -> Option<&Op> {
        match &self.kind {
            RequestKind::Op(submitted) => Some(&submitted.op),
            RequestKind::Look(..) => None,
        }
    }

    /// Whether it asks for the lock, for a caller that may be gone when it is sent.
    pub(super) fn asks(&self) -> bool {
        matches!(
            self.op(),
            Some(Op::Attempt { .. } | Op::Enter { .. } | Op::Listen { .. } | Op::Adopt { .. })
        )
    }

    pub(super) fn is_enter(&self) -> bool {
        matches!(self.op(), Some(Op::Enter { .. }))
    }

    /// Whether it ends a lease, and may name the lock alone.
    pub(super) fn may_be_bare(&self) -> bool {
        matches!(self.op(), Some(Op::Release { .. } | Op::Keep { .. }))
    }

    /// Whether it enters the queue, so that grants of its key must arrive.
    pub(super) fn enters(&self) -> bool {
        let is_ticket = matches!(self.op(), Some(Op::Enter { .. } | Op::Yield { .. }));
        is_ticket && self.held.is_none() && !self.attempts_first
    }

    /// When its answer is no longer of use, if it is a renewal or waits for replicas.
    pub(super) fn useful_until(&self) -> Option<Instant> {
        match (&self.held, self.op()) {
            (Some(held), _) => held.until,
            (None, Some(Op::Renew { within, .. })) => Some(self.since + *within),
            _ => None,
        }
    }
}

impl Sendable for Request {
    type Line = (Arc<str>, u64);

    fn line(&self) -> Self::Line {
        let owner = self.op().map(Op::owner);
        let shared = owner.filter(|owner| owner.mode != Mode::Exclusive);
        let sequence = shared.map_or(0, |owner| owner.sequence);
        (self.key().clone(), sequence)
    }

    fn priority(&self) -> Priority {
        match self.op() {
            Some(Op::Renew { .. }) => Priority::Renew,
            Some(_) => Priority::Change,
            None => Priority::Inspect,
        }
    }

    fn is_alone(&self) -> bool {
        self.alone
    }

    /// A call is about one slot, and is redirected as a whole.
    fn group(&self) -> u16 {
        self.slot | u16::from(self.asking.is_some()) << 15 | u16::from(self.is_bare) << 14
    }

    /// The names of lock and queue, and the rest.
    fn size(&self) -> usize {
        2 * self.key().len() + 150
    }
}
