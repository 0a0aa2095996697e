//! One key in use: the operations on it that are not answered yet, and what follows from the nodes' replies.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::ballot::{Ballot, Quorum};
use super::fault::too_few;
use super::node::{Node, is_down};
use super::node_queue::NodeQueue;
use super::state::Deferred;
use crate::store::contract::{Answer, Op, OpError, OpResult, Outcome, Owner, StoreEvent};

/// How long the first notice waits for those of a majority. A waiter that asks when the first node is free may find
/// the others still locked.
const TOGETHER: Duration = Duration::from_millis(3);

#[derive(Debug)]
pub(super) struct Entry {
    key: Arc<str>,
    quorum: Quorum,
    /// One queue for each node.
    pub(super) queues: Vec<NodeQueue>,
    pub(super) ballots: Vec<Ballot>,
    /// The nodes that have notified us that the key is free, and when the registry is told if they stay fewer than a
    /// majority.
    freed: Option<(HashSet<usize>, Instant)>,
    /// The time of this key's entry in `QuorumState::alarms`.
    pub(super) alarm: Option<Instant>,
}

impl Entry {
    pub(super) fn new(key: Arc<str>, quorum: Quorum) -> Self {
        let queues = std::iter::repeat_with(NodeQueue::default);
        Self {
            key,
            quorum,
            queues: queues.take(quorum.size).collect(),
            ballots: Vec::new(),
            freed: None,
            alarm: None,
        }
    }

    /// A node has notified us that the key is free. It counts if one of our owners was notified.
    pub(super) fn freed(&mut self, now: Instant, node: usize) {
        if self.queues[node].notified(now) {
            self.may_be_free(now, node);
        }
    }

    fn may_be_free(&mut self, now: Instant, node: usize) {
        let (nodes, _) = self.freed.get_or_insert((HashSet::new(), now + TOGETHER));
        nodes.insert(node);
    }

    pub(super) fn node_is_back(&mut self, now: Instant, node: usize) {
        // Waiters ask again, and that subscribes again.
        if self.queues[node].node_is_back() {
            self.may_be_free(now, node);
        }
    }

    /// When it needs a call without an event.
    pub(super) fn due(&self) -> Option<Instant> {
        let dues = self.queues.iter().filter_map(NodeQueue::due);
        dues.chain(self.freed.as_ref().map(|(_, due)| *due)).min()
    }

    /// Whether anything is in flight or waits to be sent.
    pub(super) fn is_busy(&self) -> bool {
        self.queues.iter().any(NodeQueue::is_busy)
    }

    /// Whether it depends on the connection to a node.
    pub(super) fn is_active(&self) -> bool {
        self.is_busy() || self.queues.iter().any(NodeQueue::has_subscriptions)
    }

    /// Whether it may be forgotten.
    pub(super) fn is_idle(&self) -> bool {
        self.ballots.is_empty()
            && self.freed.is_none()
            && self.queues.iter().all(NodeQueue::is_idle)
    }

    /// A node answered.
    pub(super) fn answered(&mut self, now: Instant, at: usize, node: &Node, result: OpResult) {
        if let Some((id, reply)) = self.queues[at].answered(now, result)
            && let Some(ballot) = self.ballots.iter_mut().find(|ballot| ballot.id == id)
        {
            ballot.count(at, node.check(now, ballot.quarantine, reply));
        }
    }

    /// Does what follows from the nodes' replies.
    pub(super) fn settle(&mut self, now: Instant, nodes: &[Node], deferred: &mut Deferred) {
        self.send(now, nodes, deferred);
        while self.raise() | self.conclude(nodes, deferred) {
            self.send(now, nodes, deferred);
        }
        let majority = self.quorum.majority();
        let is_told = |(nodes, due): &mut (HashSet<_>, _)| nodes.len() >= majority || *due <= now;
        if self.freed.take_if(is_told).is_some() {
            let key = self.key.clone();
            deferred.events.push(StoreEvent::Freed { key });
        }
    }

    /// Sends the next ops, and counts the replies that need no node.
    fn send(&mut self, now: Instant, nodes: &[Node], deferred: &mut Deferred) {
        for (at, (queue, node)) in self.queues.iter_mut().zip(nodes).enumerate() {
            if let Some(op) = queue.next_op(now, node) {
                deferred.sends.push((at, self.key.clone(), op));
            }
            for (id, reply) in queue.replies.drain(..) {
                if let Some(ballot) = self.ballots.iter_mut().find(|ballot| ballot.id == id) {
                    ballot.count(at, reply);
                }
            }
        }
    }

    /// Sends ops that raise the fences of a majority to the winning epoch. Returns true if there were any.
    fn raise(&mut self) -> bool {
        let mut is_raising = false;
        for ballot in &mut self.ballots {
            if let Some((epoch, nodes)) = ballot.raises() {
                is_raising = true;
                let (owner, age) = (ballot.submitted.op.owner(), ballot.quarantine.is_some());
                for node in nodes {
                    let op = Op::Raise { owner, epoch, age };
                    self.queues[node].request(op, Some(ballot.id));
                }
            }
        }
        is_raising
    }

    /// Answers the ops whose ballots have a result. Returns true if there were any.
    fn conclude(&mut self, nodes: &[Node], deferred: &mut Deferred) -> bool {
        let is_decided = |ballot: &mut Ballot| ballot.result().is_some();
        let decided: Vec<_> = self.ballots.extract_if(.., is_decided).collect();
        let any = !decided.is_empty();
        for ballot in decided {
            let op = &ballot.submitted.op;
            // Each node has a list of subscribers, but the quorum has none. So the score is 0.
            let listens = matches!(op, Op::Listen { .. })
                && self.queues.iter().any(|it| it.listens(op.owner()));
            let outcome = ballot.outcome(listens.then_some(0));
            self.send_follow_ups(op, outcome.as_ref());
            let error = || too_few(self.quorum, ballot.errors());
            let result = match outcome {
                // A quorum has no clock, and no grants that need one.
                Some(outcome) => Ok(Answer { at: 0, outcome }),
                // The registry asks again when it hears that the store is up.
                None if is_down(nodes) => Err(OpError::Unknown(error())),
                // The registry asks again after a pause.
                None => Err(OpError::Refused(error())),
            };
            let submitted = ballot.submitted;
            let replied = StoreEvent::Replied { submitted, result };
            deferred.events.push(replied);
        }
        any
    }

    /// What follows on the nodes from an answer.
    fn send_follow_ups(&mut self, op: &Op, outcome: Option<&Outcome>) {
        let owner = op.owner();
        let mut queues = self.queues.iter();
        let is_kept = queues.any(|queue| queue.may_hold(owner) && !queue.is_busy());
        match (op, outcome) {
            (_, Some(Outcome::Won { .. })) => {}
            // The registry assumes that this op did nothing, so it will not unsubscribe. Remove all subscriptions
            // here, including those of late answers.
            (Op::Listen { .. }, None) => self.release(owner, None, true, None),
            // Every vote that was not refused is released after its answer, however late that comes.
            (Op::Attempt { .. } | Op::Listen { .. } | Op::Enter { .. }, _)
            | (_, Some(Outcome::NotOld | Outcome::Lost)) => self.release(owner, None, false, None),
            // A node that was down, or has lost the lock, gets it again if it is free there. That does not count for
            // this majority, but the next one can do without another node. If the lease was released meanwhile, each
            // node that still has it has a release pending, and no node gets the lock again.
            (&Op::Renew { ttl, .. }, Some(Outcome::Renewed)) if is_kept => {
                for queue in &mut self.queues {
                    if !queue.may_hold(owner) && !queue.is_busy() {
                        queue.request(Op::Attempt { owner, ttl }, None);
                    }
                }
            }
            // The registry asks again, or else releases.
            _ => {}
        }
    }

    /// Releases a lock on all nodes, or keeps it until then (M8); with `unlisten` it also ends the subscriptions.
    pub(super) fn release(
        &mut self,
        owner: Owner,
        ballot: Option<u64>,
        unlisten: bool,
        kept_until: Option<Instant>,
    ) {
        for queue in &mut self.queues {
            queue.release(owner, ballot, unlisten, kept_until);
        }
    }
}
