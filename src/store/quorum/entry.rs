//! One key in use: the operations on it that are not answered yet, and what follows from the nodes' replies.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::ballot::{Ballot, Quorum};
use super::fault::too_few;
use super::node::{Node, is_down};
use super::node_queue::NodeQueue;
use super::state::Deferred;
use crate::store::contract::{Answer, Op, OpError, OpResult, Outcome, Owner, StoreEvent};

/// How long one node's notice waits for those of a majority. Whoever asks when the first node is free may
/// find the others still locked, and go away again.
const TOGETHER: Duration = Duration::from_millis(3);

#[derive(Debug)]
pub(super) struct Entry {
    key: Arc<str>,
    quorum: Quorum,
    /// One for each node.
    pub(super) queues: Vec<NodeQueue>,
    pub(super) ballots: Vec<Ballot>,
    /// The nodes that have said that the key is free, and when the registry is told of fewer than a majority.
    freed: Option<(Vec<usize>, Instant)>,
    /// Its entry among the alarms of all keys.
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

    /// A node says that the key is free: that counts if it has notified one of ours.
    pub(super) fn freed(&mut self, now: Instant, node: usize) {
        if self.queues[node].notified(now) {
            self.may_be_free(now, node);
        }
    }

    fn may_be_free(&mut self, now: Instant, node: usize) {
        let (nodes, _) = self.freed.get_or_insert((Vec::new(), now + TOGETHER));
        if !nodes.contains(&node) {
            nodes.push(node);
        }
    }

    pub(super) fn node_is_back(&mut self, now: Instant, node: usize) {
        let queue = &mut self.queues[node];
        queue.node_is_back();
        // Its notice may have been lost with the connection, and the subscription ends with the notice. So those
        // who wait ask again, and subscribe again by that.
        if queue.has_subscriptions() {
            self.may_be_free(now, node);
        }
    }

    pub(super) fn tick(&mut self, now: Instant) {
        self.queues.iter_mut().for_each(|queue| queue.tick(now));
    }

    /// When there is something to do without an event.
    pub(super) fn due(&self) -> Option<Instant> {
        let dues = self.queues.iter().filter_map(NodeQueue::due);
        dues.chain(self.freed.as_ref().map(|(_, due)| *due)).min()
    }

    /// Whether anything is in flight, or to be sent.
    pub(super) fn is_busy(&self) -> bool {
        self.queues.iter().any(NodeQueue::is_busy)
    }

    /// Whether the connection to a node matters to it.
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
        let time = result.as_ref().map_or(0, |answer| answer.at);
        if let Some((id, reply)) = self.queues[at].answered(now, result)
            && let Some(ballot) = self.ballots.iter_mut().find(|ballot| ballot.id == id)
        {
            ballot.at = ballot.at.max(time);
            ballot.count(at, node.check(now, ballot.quarantine, reply));
        }
    }

    /// Does what the nodes' replies ask for.
    pub(super) fn settle(&mut self, now: Instant, nodes: &[Node], deferred: &mut Deferred) {
        loop {
            self.send(now, nodes, deferred);
            let is_raising = self.raise();
            if !self.conclude(nodes, deferred) && !is_raising {
                break;
            }
        }
        let majority = self.quorum.majority();
        let is_told = |(nodes, due): &mut (Vec<_>, _)| nodes.len() >= majority || *due <= now;
        if self.freed.take_if(is_told).is_some() {
            let key = self.key.clone();
            deferred.events.push(StoreEvent::Freed { key });
        }
    }

    /// Sends what may be sent, and counts the replies for which no node need be asked.
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

    /// Has the fences of a majority raised to the epoch that is to win; true if any is.
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

    /// Answers the ops whose ballots have a verdict; true if any has.
    fn conclude(&mut self, nodes: &[Node], deferred: &mut Deferred) -> bool {
        let is_decided = |ballot: &mut Ballot| ballot.verdict().is_some();
        let decided: Vec<_> = self.ballots.extract_if(.., is_decided).collect();
        let any = !decided.is_empty();
        for ballot in decided {
            let mut outcome = ballot.outcome();
            if let (Op::Listen { owner, .. }, Some(Outcome::Busy { score, .. })) =
                (&ballot.submitted.op, &mut outcome)
            {
                // It has a place on each node, and none among all.
                *score = self.queues.iter().any(|it| it.listens(*owner)).then_some(0);
            }
            self.follow(&ballot.submitted.op, outcome.as_ref());
            let at = ballot.at;
            let result = outcome
                .map(|outcome| Answer { at, outcome })
                .ok_or_else(|| {
                    // If the store is down, the registry asks again when it is up; else after a pause.
                    let failed = if is_down(nodes) {
                        OpError::Unknown
                    } else {
                        OpError::Refused
                    };
                    failed(too_few(self.quorum, ballot.errors()))
                });
            deferred.reply(ballot.submitted, result);
        }
        any
    }

    /// What an answer brings about on the nodes.
    fn follow(&mut self, op: &Op, outcome: Option<&Outcome>) {
        match (op, outcome) {
            (_, Some(Outcome::Won { .. })) => {}
            // It is answered as if nothing had been done. So nobody will withdraw a subscription that one of the
            // nodes has, or gets by an answer that comes late.
            (Op::Listen { owner, .. }, None) => self.release(*owner, None, true),
            // Every vote that is not known to have refused is given back, after its answer, however late that
            // comes.
            (Op::Attempt { owner, .. } | Op::Listen { owner, .. } | Op::Enter { owner, .. }, _)
            | (Op::Adopt { owner, .. }, Some(Outcome::NotOld))
            | (Op::Renew { owner, .. }, Some(Outcome::Lost)) => {
                self.release(*owner, None, false);
            }
            // A node that was away, or has lost the lock, is given it again if it is free there: not for this
            // majority, but so that the next can do without another node. If the lease was released meanwhile,
            // each node that has it still is busy with that, and no node is given it again.
            (&Op::Renew { owner, ttl, .. }, Some(Outcome::Renewed))
                if self
                    .queues
                    .iter()
                    .any(|it| it.may_hold(owner) && !it.is_busy()) =>
            {
                for queue in &mut self.queues {
                    if !queue.may_hold(owner) && !queue.is_busy() {
                        queue.request(Op::Attempt { owner, ttl }, None);
                    }
                }
            }
            // Whoever adopts asks again, or else gives back.
            _ => {}
        }
    }

    /// Gives a lock back on all nodes, and with `unlisten` ends the subscriptions.
    pub(super) fn release(&mut self, owner: Owner, ballot: Option<u64>, unlisten: bool) {
        for queue in &mut self.queues {
            queue.release(owner, ballot, unlisten);
        }
    }
}
