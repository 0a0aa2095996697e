//! What one node is asked about one key: one operation at a time, so that a release is done after the
//! operation that it undoes, however late that is answered.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::Instant;

use super::ballot::NodeReply;
use super::fault::Fault;
use super::node::Node;
use crate::StoreError;
use crate::settings::TTL;
use crate::store::contract::{Op, OpError, OpResult, Outcome, Owner};

/// When a release was refused, it is sent again after this.
const RETRY: Duration = Duration::from_millis(250);

/// A node keeps subscriptions for this long after the lock has run out (K3). Others that subscribe prolong
/// that. So a node that was away for longer may notify an owner that we have forgotten.
const SUBSCRIPTION: Duration = Duration::from_secs(60);

/// A node keeps a key for the owner that it notifies for no longer than this.
const RESERVED: Duration = Duration::from_secs(1);

#[cfg(test)]
thread_local! {
    /// How often any queue was looked at, on this thread.
    pub(super) static LOOKS: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

#[derive(Debug, Default)]
pub(super) struct NodeQueue {
    in_flight: Option<NodeOp>,
    /// What is sent next, after the releases.
    requests: Vec<NodeOp>,
    /// In the order in which our owners come to the node. Boxed, as most keys have one at most.
    footprints: BTreeMap<Owner, Box<OwnerRecord>>,
    /// Replies that the ballots have not counted yet.
    pub(super) replies: Vec<(u64, NodeReply)>,
}

/// One operation, and the ballot in which its answer is a vote.
#[derive(Debug)]
struct NodeOp {
    op: Op,
    ballot: Option<u64>,
}

/// What the node may hold for one owner.
#[derive(Debug, Default)]
struct OwnerRecord {
    /// When its lock has run out by itself.
    locked_until: Option<Instant>,
    /// Why the lock counts in no renewal: perhaps too few replicas of the node have it.
    unconfirmed: Option<StoreError>,
    /// When its subscription has run out by itself.
    subscribed_until: Option<Instant>,
    release: Option<PendingRelease>,
}

/// A release that is not in flight.
#[derive(Debug, Default)]
struct PendingRelease {
    ballot: Option<u64>,
    /// Whether the subscription ends, too.
    unlisten: bool,
    /// Whether it is sent next.
    is_ready: bool,
    /// If not, when it is sent, at the latest when the node is back.
    retry_at: Option<Instant>,
}

/// By when a lock of `ttl` that is set now has run out on any node whose clock is right.
fn outlasted(now: Instant, ttl: Duration) -> Instant {
    now + ttl + ttl / 50 + Duration::from_millis(10)
}

impl OwnerRecord {
    /// When the node has forgotten the owner by itself.
    fn until(&self) -> Option<Instant> {
        self.locked_until.max(self.subscribed_until)
    }

    /// It subscribes, to be notified by one who has the lock for `left`.
    fn subscribe(&mut self, now: Instant, left: Duration) {
        let until = outlasted(now, left.min(*TTL.end()) + SUBSCRIPTION);
        self.subscribed_until = self.subscribed_until.max(Some(until));
    }

    /// Notes what an op of the owner has done on the node, or may have done.
    fn update(&mut self, now: Instant, op: &Op, result: &OpResult) {
        let may_be_locked_until = match *op {
            Op::Attempt { ttl, .. }
            | Op::Listen { ttl, .. }
            | Op::Adopt { ttl, .. }
            | Op::Renew { ttl, .. } => self.locked_until.max(Some(outlasted(now, ttl))),
            _ => self.locked_until,
        };
        match result.as_ref().map(|answer| &answer.outcome) {
            Ok(Outcome::Won { .. } | Outcome::Renewed) => {
                self.locked_until = may_be_locked_until;
                self.unconfirmed = None;
            }
            Ok(Outcome::Raised { .. }) => {}
            Ok(Outcome::Busy { .. } | Outcome::NotOld | Outcome::Gone { .. } | Outcome::Lost) => {
                self.locked_until = None;
            }
            Err(OpError::Unknown(error) | OpError::Unconfirmed(error)) => {
                self.locked_until = may_be_locked_until;
                // Nobody knows whether the lost answer was a confirmation.
                if let Op::Attempt { .. } | Op::Listen { .. } | Op::Adopt { .. } = op {
                    self.unconfirmed = Some(error.clone());
                }
            }
            // It was not done.
            Err(OpError::Unsent(_) | OpError::Refused(_) | OpError::TooLate(_)) => {}
        }
        if let (Op::Listen { .. } | Op::Unlisten { .. }, Ok(answer)) = (op, result) {
            self.subscribed_until = None;
            // A notice that came before this answer was for an earlier subscription.
            if let Outcome::Busy { left, score } = answer.outcome
                && score.is_some()
            {
                self.subscribe(now, left.unwrap_or_default());
            }
        }
    }
}

fn is_release(op: &Op) -> bool {
    matches!(op, Op::Release { .. } | Op::Unlisten { .. })
}

const GONE: NodeReply = NodeReply::Said(Outcome::Gone { held: false });

impl NodeQueue {
    /// Sends an op that takes or keeps the lock, when its turn comes.
    pub(super) fn request(&mut self, op: Op, ballot: Option<u64>) {
        if !matches!(op, Op::Renew { .. } | Op::Raise { .. }) {
            // It would take away what is asked for now.
            self.footprint(op.owner()).release = None;
        }
        self.requests.push(NodeOp { op, ballot });
    }

    /// Sees to it that the node holds no lock for the owner, and with `unlisten` no subscription. Requests of
    /// the owner that were not sent yet are not sent.
    pub(super) fn release(&mut self, owner: Owner, ballot: Option<u64>, unlisten: bool) {
        for unsent in self.requests.extract_if(.., |it| it.op.owner() == owner) {
            let reply = NodeReply::Never(Fault::Away.into());
            self.replies.extend(unsent.ballot.map(|id| (id, reply)));
        }
        let op = self.release_op(owner, unlisten);
        if let Some(same) = self.in_flight.as_mut().filter(|it| it.op == op) {
            same.ballot = ballot.or(same.ballot);
            return;
        }
        let release = self.footprint(owner).release.get_or_insert_default();
        release.ballot = ballot.or(release.ballot);
        release.unlisten |= unlisten;
        release.is_ready = true;
    }

    fn release_op(&self, owner: Owner, unlisten: bool) -> Op {
        if unlisten && self.listens(owner) {
            Op::Unlisten { owner }
        } else {
            Op::Release { owner }
        }
    }

    /// The next op to send, if any may be sent now. Those that are not sent get their replies.
    pub(super) fn next_op(&mut self, now: Instant, node: &Node) -> Option<Op> {
        #[cfg(test)]
        LOOKS.set(LOOKS.get() + 1);
        if self.in_flight.is_none() {
            // Not sooner: the op in flight may be about what has run out.
            self.expire(now);
        }
        while self.in_flight.is_none()
            && let Some(request) = self.next_request(now)
        {
            if let Some(reply) = self.reply_unasked(&request, node) {
                self.replies.extend(request.ballot.map(|id| (id, reply)));
                continue;
            }
            let op = request.op.clone();
            if let Op::Listen { owner, ttl } = op {
                // A notice may come before the answer.
                self.footprint(owner).subscribe(now, ttl);
            }
            self.in_flight = Some(request);
            return Some(op);
        }
        self.footprints
            .retain(|_, it| it.until().is_some() || it.release.is_some());
        None
    }

    fn next_request(&mut self, now: Instant) -> Option<NodeOp> {
        let is_due = |release: &mut PendingRelease| {
            release.is_ready || release.retry_at.is_some_and(|at| at <= now)
        };
        let mut footprints = self.footprints.iter_mut();
        let due = footprints.find_map(|(owner, it)| Some((*owner, it.release.take_if(is_due)?)));
        if let Some((owner, release)) = due {
            let (op, ballot) = (self.release_op(owner, release.unlisten), release.ballot);
            return Some(NodeOp { op, ballot });
        }
        (!self.requests.is_empty()).then(|| self.requests.remove(0))
    }

    /// The reply to an op that is not sent: it would change nothing, or the node cannot be asked.
    fn reply_unasked(&mut self, request: &NodeOp, node: &Node) -> Option<NodeReply> {
        let may_hold = self.may_hold(request.op.owner());
        Some(match (&request.op, node.why_not(is_release(&request.op))) {
            (Op::Release { .. }, _) if !may_hold => GONE,
            (Op::Renew { .. } | Op::Raise { .. }, _) if !may_hold => NodeReply::Said(Outcome::Lost),
            (Op::Release { .. } | Op::Unlisten { .. }, Some(_)) => self.postpone(request, None),
            (_, Some(error)) => NodeReply::Never(error.clone()),
            (&Op::Renew { owner, ttl, .. }, None) => {
                let error = self.footprint(owner).unconfirmed.clone()?;
                // A renewal would make up a majority of votes, one of which a fail-over may forget. Instead the
                // node is asked to confirm the lock, for the next renewal.
                let (op, ballot) = (Op::Attempt { owner, ttl }, None);
                self.requests.insert(0, NodeOp { op, ballot });
                NodeReply::Never(error)
            }
            _ => return None,
        })
    }

    /// The node answered the op in flight: the reply, and its ballot.
    pub(super) fn answered(&mut self, now: Instant, result: OpResult) -> Option<(u64, NodeReply)> {
        let request = self.in_flight.take()?;
        let footprint = self.footprint(request.op.owner());
        footprint.update(now, &request.op, &result);
        let reply = match result {
            Ok(answer) => NodeReply::Said(answer.outcome),
            Err(error) if is_release(&request.op) => self.release_failed(now, &request, &error),
            Err(error) => NodeReply::Never(error.store_error().clone()),
        };
        Some((request.ballot?, reply))
    }

    fn release_failed(&mut self, now: Instant, request: &NodeOp, error: &OpError) -> NodeReply {
        let owner = request.op.owner();
        let mut retry_at = None;
        if let OpError::Refused(error) = error {
            if !error.is_retryable() {
                // The lock runs out by itself.
                self.footprint(owner).locked_until = None;
                return NodeReply::Never(error.clone());
            }
            retry_at = Some(now + RETRY);
        }
        // If the owner asks for the lock again by now, the release would take that away.
        if self.requests.iter().any(|it| it.op.owner() == owner) {
            return NodeReply::Later;
        }
        self.postpone(request, retry_at)
    }

    /// Sends a release later, or with one that was asked for meanwhile. Its ballot waits for that only if there
    /// may be a lock.
    fn postpone(&mut self, request: &NodeOp, retry_at: Option<Instant>) -> NodeReply {
        let footprint = self.footprint(request.op.owner());
        let may_hold = footprint.locked_until.is_some();
        let release = footprint.release.get_or_insert_default();
        release.ballot = release.ballot.or(request.ballot.filter(|_| may_hold));
        release.unlisten |= matches!(request.op, Op::Unlisten { .. });
        release.retry_at = retry_at;
        if may_hold { NodeReply::Later } else { GONE }
    }

    /// The node is back, and releases are sent to it. Whether a notice may have been lost with its connection:
    /// that ends the subscription.
    pub(super) fn node_is_back(&mut self) -> bool {
        let releases = self.footprints.values_mut();
        for release in releases.filter_map(|it| it.release.as_mut()) {
            release.is_ready = true;
        }
        self.has_subscriptions()
    }

    /// Forgets what has run out by itself, and gives up the releases of that.
    fn expire(&mut self, now: Instant) {
        for footprint in self.footprints.values_mut() {
            footprint.locked_until.take_if(|until| *until <= now);
            footprint.subscribed_until.take_if(|until| *until <= now);
            if footprint.until().is_none()
                && let Some(release) = footprint.release.take_if(|release| !release.is_ready)
            {
                let reply = NodeReply::Never(Fault::RunOut.into());
                self.replies.extend(release.ballot.map(|id| (id, reply)));
            }
        }
    }

    /// When a release is to be sent again, or something to be forgotten.
    pub(super) fn due(&self) -> Option<Instant> {
        let due = |it: &OwnerRecord| it.release.as_ref().and_then(|release| release.retry_at);
        let dues = self.footprints.values();
        let dues = dues.filter_map(|it| due(it).or(it.until()));
        dues.min().filter(|_| self.in_flight.is_none())
    }

    /// Whether the node may hold the lock for the owner.
    pub(super) fn may_hold(&self, owner: Owner) -> bool {
        let footprint = self.footprints.get(&owner);
        footprint.is_some_and(|it| it.locked_until.is_some())
    }

    /// Whether the node notifies the owner when the key is free, or may do so.
    pub(super) fn listens(&self, owner: Owner) -> bool {
        let footprint = self.footprints.get(&owner);
        footprint.is_some_and(|it| it.subscribed_until.is_some())
    }

    /// The same for any owner.
    pub(super) fn has_subscriptions(&self) -> bool {
        let mut footprints = self.footprints.values();
        footprints.any(|it| it.subscribed_until.is_some())
    }

    /// The node says that the key is free, and keeps it for a moment for the owner that it notifies: whether
    /// that is one of ours. It notifies once for each subscription, and the first of ours first (W7): a notice
    /// for one that has given up must not end the subscription of another.
    pub(super) fn notified(&mut self, now: Instant) -> bool {
        let mut footprints = self.footprints.values_mut();
        let first = footprints.find_map(|it| it.subscribed_until.take().map(|_| it));
        let reserve =
            |it: &mut Box<OwnerRecord>| it.locked_until = it.locked_until.max(Some(now + RESERVED));
        first.map(reserve).is_some()
    }

    /// Whether anything is in flight, or waits.
    pub(super) fn is_busy(&self) -> bool {
        #[cfg(test)]
        LOOKS.set(LOOKS.get() + 1);
        let is_releasing = self.footprints.values().any(|it| it.release.is_some());
        is_releasing || self.in_flight.is_some() || !self.requests.is_empty()
    }

    /// Whether it may be forgotten.
    pub(super) fn is_idle(&self) -> bool {
        !self.is_busy() && self.footprints.is_empty()
    }

    fn footprint(&mut self, owner: Owner) -> &mut OwnerRecord {
        self.footprints.entry(owner).or_default()
    }
}
