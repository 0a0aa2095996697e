//! A request to the node that has its key.

use std::sync::Arc;
use std::time::Duration;

use futures::channel::oneshot;
use tokio::time::Instant;

use super::backend::Slot;
use super::session::NodeId;
use crate::base::{Mode, StoreError, thread_end};
use crate::store::contract::{
    Grant, KeyStatus, Op, OpError, OpResult, Owner, StoreEvent, SubmittedOp,
};
use crate::store::send_window::{Priority, Sendable};

/// One request about one lock.
#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) kind: RequestKind,
    /// The slot of its key; 0 if there is one server.
    pub(crate) slot: Slot,
    /// Requests of one line go one at a time: see [`Sendable::line`].
    pub(super) line: u64,
    /// When the session took it.
    pub(crate) since: Instant,
    /// How many requests its call may have: fewer once it was refused with a whole call, perhaps because of another
    /// request (S1).
    pub(crate) most: usize,
    /// The server could not do it yet.
    pub(crate) is_put_off: bool,
    /// Whether the server has refused it once because it came too late (O5).
    pub(crate) was_stale: bool,
    /// Whether it has ended a lease already, and only the rest is to be done.
    pub(crate) has_ended: bool,
    /// The end of a lease with the lock key alone, since its slot is being moved.
    pub(crate) is_bare: bool,
    /// How often it was redirected since it came or was delayed.
    pub(super) hops: u32,
    /// How often it was delayed.
    pub(super) delays: u32,
    /// The node that imports its slot, if that one must be asked.
    pub(crate) asking: Option<NodeId>,
    /// The subscription under which its ticket is entered, if there is one.
    pub(super) heard: Option<u64>,
    /// An enter that is sent as an attempt: a free lock is won without a subscription.
    pub(crate) attempts_first: bool,
    /// It won the lock, and that must be confirmed.
    pub(crate) held: Option<Box<Held>>,
}

#[derive(Debug)]
pub(crate) enum RequestKind {
    Op(SubmittedOp),
    /// An op whose answer is for one caller, and not for the registry.
    Asked(SubmittedOp, oneshot::Sender<OpResult>),
    Look(Arc<str>, oneshot::Sender<Result<KeyStatus, StoreError>>),
}

/// An acquisition that waits for its confirmation.
#[derive(Debug)]
pub(crate) struct Held {
    pub(crate) owner: Owner,
    /// The event to report once it is confirmed.
    pub(crate) event: StoreEvent,
    /// When it is given up, counted from the first question.
    pub(crate) until: Option<Instant>,
}

impl Held {
    /// The event to report if it was not confirmed. For a grant whose connection broke there is none (O3).
    pub(super) fn failed(self, error: OpError) -> Option<StoreEvent> {
        match (self.event, error) {
            (StoreEvent::Replied { submitted, .. }, error) => {
                let result = Err(error);
                Some(StoreEvent::Replied { submitted, result })
            }
            (StoreEvent::Granted { key, grant }, OpError::Unconfirmed(error)) => {
                Some(StoreEvent::Unconfirmed { key, grant, error })
            }
            _ => None,
        }
    }
}

impl Request {
    pub(crate) fn new(kind: RequestKind) -> Self {
        Self {
            kind,
            slot: 0,
            line: 0,
            since: thread_end::now(),
            most: usize::MAX,
            is_put_off: false,
            was_stale: false,
            has_ended: false,
            is_bare: false,
            hops: 0,
            delays: 0,
            asking: None,
            heard: None,
            attempts_first: false,
            held: None,
        }
    }

    /// Asks for a grant to be confirmed.
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
        let until = None;
        let held = Held {
            owner,
            event,
            until,
        };
        self.held = Some(Box::new(held));
    }

    /// A caller that cannot be notified does not subscribe.
    pub(crate) fn listen_to_nothing(&mut self) {
        if let RequestKind::Op(submitted) = &mut self.kind
            && let Op::Listen { owner, ttl } = submitted.op
        {
            submitted.op = Op::Attempt { owner, ttl };
        }
    }

    /// The key, and the number of a shared owner. An eviction may wait for the end of a transaction: nobody waits behind it.
    pub(super) fn line_of(&self) -> (&str, u64) {
        let op = self.op();
        if let Some(Op::Evict { .. }) = op {
            return (self.key(), u64::MAX);
        }
        let owner = op.map(Op::owner);
        let shared = owner.filter(|owner| owner.mode != Mode::Exclusive);
        (self.key(), shared.map_or(0, |owner| owner.sequence))
    }

    pub(crate) fn key(&self) -> &Arc<str> {
        match &self.kind {
            RequestKind::Op(submitted) | RequestKind::Asked(submitted, _) => &submitted.key,
            RequestKind::Look(key, _) => key,
        }
    }

    pub(crate) fn op(&self) -> Option<&Op> {
        match &self.kind {
            RequestKind::Op(submitted) | RequestKind::Asked(submitted, _) => Some(&submitted.op),
            RequestKind::Look(..) => None,
        }
    }

    /// Whether it is for a caller that may be gone when it is sent: it asks for the lock, or about it.
    pub(super) fn asks(&self) -> bool {
        matches!(
            self.op(),
            Some(
                Op::Attempt { .. }
                    | Op::Enter { .. }
                    | Op::Listen { .. }
                    | Op::Adopt { .. }
                    | Op::Verify { .. }
                    | Op::Evict { .. }
            )
        )
    }

    /// It was not done. Whether it is given up at `now` rather than sent again after a pause.
    pub(super) fn gives_up(&self, now: Instant, pause: Duration, within: Duration) -> bool {
        match &self.kind {
            RequestKind::Asked(_, answer) => answer.is_canceled(),
            _ => self
                .of_use_until(within)
                .is_some_and(|until| now + pause >= until),
        }
    }

    /// When an adoption that was put off is given up: an eighth of the response time-out before its caller gives up. What
    /// was sent before has that time to be answered.
    pub(super) fn of_use_until(&self, response_timeout: Duration) -> Option<Instant> {
        match self.op() {
            Some(Op::Adopt { within, .. }) if self.is_put_off => {
                Some(self.since + within.saturating_sub(response_timeout / 8))
            }
            _ => None,
        }
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

    /// When its answer is no longer of use, if it is a renewal or waits for its confirmation.
    pub(crate) fn useful_until(&self) -> Option<Instant> {
        match (&self.held, self.op()) {
            (Some(held), _) => held.until,
            (None, Some(Op::Renew { within, .. })) => Some(self.since + *within),
            _ => None,
        }
    }
}

impl Sendable for Request {
    fn line(&self) -> u64 {
        self.line
    }

    fn priority(&self) -> Priority {
        match self.op() {
            Some(Op::Renew { .. } | Op::Verify { .. }) => Priority::Renew,
            Some(_) => Priority::Change,
            None => Priority::Inspect,
        }
    }

    fn most(&self) -> usize {
        self.most
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
