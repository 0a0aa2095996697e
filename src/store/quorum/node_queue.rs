//! What one node is asked about one key. It has one operation at a time, so a release is done after the operation that
//! it undoes, however late that is answered.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::Instant;

use super::ballot::NodeReply;
use super::fault::Fault;
use super::node::Node;
use crate::base::StoreError;
use crate::base::limits::TTL;
use crate::store::contract::{Op, OpError, OpResult, Outcome, Owner};

/// A refused release is sent again after this.
const RETRY: Duration = Duration::from_millis(250);

/// A node keeps subscriptions for this long after the lock has expired (K3). Others that subscribe extend that. So a
/// node that was down for longer may notify an owner that we have forgotten.
const SUBSCRIPTION: Duration = Duration::from_secs(60);

/// After a notice, assume for this long that the node may hold the lock for us.
const RESERVED: Duration = Duration::from_secs(1);

#[cfg(test)]
thread_local! {
    /// How often any queue was read, on this thread.
    pub(super) static LOOKS: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

#[derive(Debug, Default)]
pub(super) struct NodeQueue {
    in_flight: Option<NodeOp>,
    /// The ops to send after the releases.
    requests: Vec<NodeOp>,
    /// By owner, in the order in which they came to the node. Boxed, since most keys have one at most.
    records: BTreeMap<Owner, Box<OwnerRecord>>,
    /// Replies that their ballots have not counted yet.
    pub(super) replies: Vec<(u64, NodeReply)>,
}

/// An op, and the ballot that counts its reply.
#[derive(Debug)]
struct NodeOp {
    op: Op,
    ballot: Option<u64>,
}

/// What the node may hold for one owner.
#[derive(Debug, Default)]
struct OwnerRecord {
    /// When its lock has expired.
    locked_until: Option<Instant>,
    /// Why the lock does not count in renewals: perhaps too few replicas of the node have it.
    unconfirmed: Option<StoreError>,
    /// When its subscription has expired.
    subscribed_until: Option<Instant>,
    /// Until when the lock is kept, if its lease has ended (M8).
    kept_until: Option<Instant>,
    release: Option<PendingRelease>,
}

/// A release that is not in flight.
#[derive(Debug, Default)]
struct PendingRelease {
    ballot: Option<u64>,
    /// Whether it also unsubscribes.
    unlisten: bool,
    /// Whether it is sent next.
    is_ready: bool,
    /// Otherwise, when it is sent: then, or when the node is back.
    retry_at: Option<Instant>,
}

/// When a lock of `ttl` that is set now has expired on any node with a correct clock.
fn outlasted(now: Instant, ttl: Duration) -> Instant {
    now + ttl + ttl / 50 + Duration::from_millis(10)
}

impl OwnerRecord {
    /// When the node has nothing of this owner any more.
    fn until(&self) -> Option<Instant> {
        self.locked_until.max(self.subscribed_until)
    }

    /// It subscribes, and the present holder has the lock for `left`.
    fn subscribe(&mut self, now: Instant, left: Duration) {
        let until = outlasted(now, left.min(*TTL.end()) + SUBSCRIPTION);
        self.subscribed_until = self.subscribed_until.max(Some(until));
    }

    /// Notes what an op of the owner has done, or may have done, on the node.
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
            // A notice that came before this answer belongs to an earlier subscription.
            if let Outcome::Busy { left, score, .. } = answer.outcome
                && score.is_some()
            {
                self.subscribe(now, left.unwrap_or_default());
            }
        }
    }
}

fn is_release(op: &Op) -> bool {
    matches!(
        op,
        Op::Release { .. } | Op::Keep { .. } | Op::Unlisten { .. }
    )
}

const GONE: NodeReply = NodeReply::Said(Outcome::Gone { held: false });

impl NodeQueue {
    /// Queues an op that takes or renews the lock.
    pub(super) fn request(&mut self, op: Op, ballot: Option<u64>) {
        if !matches!(op, Op::Renew { .. } | Op::Raise { .. }) {
            // A pending release would remove what this op asks for.
            self.record(op.owner()).release = None;
        }
        self.requests.push(NodeOp { op, ballot });
    }

    /// Makes sure that the node has no lock for the owner, and with `unlisten` no subscription. With `kept_until` the
    /// lock is kept, also if it is released again later. Ops of the owner that were not sent yet are dropped.
    pub(super) fn release(
        &mut self,
        owner: Owner,
        ballot: Option<u64>,
        unlisten: bool,
        kept_until: Option<Instant>,
    ) {
        for unsent in self.requests.extract_if(.., |it| it.op.owner() == owner) {
            let reply = NodeReply::Never(Fault::Away.into());
            self.replies.extend(unsent.ballot.map(|id| (id, reply)));
        }
        let record = self.record(owner);
        record.kept_until = record.kept_until.or(kept_until);
        let op = self.release_op(owner, unlisten);
        let is_same = |it: &&mut NodeOp| {
            it.op == op || matches!(it.op, Op::Keep { owner: of, .. } if of == owner)
        };
        if let Some(same) = self.in_flight.as_mut().filter(is_same) {
            same.ballot = ballot.or(same.ballot);
            return;
        }
        let release = self.record(owner).release.get_or_insert_default();
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

    /// The op that keeps the lock instead, if its time is not over.
    fn keep_op(&self, now: Instant, owner: Owner) -> Option<Op> {
        let kept_until = self.records.get(&owner)?.kept_until?;
        let left = kept_until.saturating_duration_since(now);
        (!left.is_zero() && self.may_hold(owner)).then_some(Op::Keep { owner, left })
    }

    /// The next op to send, if one may be sent now. Ops that need not be sent get their replies here.
    pub(super) fn next_op(&mut self, now: Instant, node: &Node) -> Option<Op> {
        #[cfg(test)]
        LOOKS.set(LOOKS.get() + 1);
        if self.in_flight.is_none() {
            // Not earlier: the op in flight may be about a record that has expired.
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
                self.record(owner).subscribe(now, ttl);
            }
            self.in_flight = Some(request);
            return Some(op);
        }
        self.records
            .retain(|_, it| it.until().is_some() || it.release.is_some());
        None
    }

    fn next_request(&mut self, now: Instant) -> Option<NodeOp> {
        let is_due = |release: &mut PendingRelease| {
            release.is_ready || release.retry_at.is_some_and(|at| at <= now)
        };
        let mut records = self.records.iter_mut();
        let due = records.find_map(|(owner, it)| Some((*owner, it.release.take_if(is_due)?)));
        if let Some((owner, release)) = due {
            let op = self.keep_op(now, owner);
            let op = op.unwrap_or_else(|| self.release_op(owner, release.unlisten));
            let ballot = release.ballot;
            return Some(NodeOp { op, ballot });
        }
        (!self.requests.is_empty()).then(|| self.requests.remove(0))
    }

    /// The reply to an op that is not sent, because it would change nothing or the node is down.
    fn reply_unasked(&mut self, request: &NodeOp, node: &Node) -> Option<NodeReply> {
        let may_hold = self.may_hold(request.op.owner());
        let unavailable = node.unavailable(is_release(&request.op));
        Some(match (&request.op, unavailable) {
            (Op::Release { .. } | Op::Keep { .. }, _) if !may_hold => GONE,
            (Op::Renew { .. } | Op::Raise { .. }, _) if !may_hold => NodeReply::Said(Outcome::Lost),
            (op, Some(_)) if is_release(op) => self.postpone(request, None),
            (_, Some(error)) => NodeReply::Never(error.clone()),
            (&Op::Renew { owner, ttl, .. }, None) => {
                let error = self.record(owner).unconfirmed.clone()?;
                // A renewal would complete a majority with a vote that a fail-over may lose. Instead the node is asked
                // to confirm the lock, for the next renewal.
                let (op, ballot) = (Op::Attempt { owner, ttl }, None);
                self.requests.insert(0, NodeOp { op, ballot });
                NodeReply::Never(error)
            }
            _ => return None,
        })
    }

    /// The reply to the op in flight, and its ballot.
    pub(super) fn answered(&mut self, now: Instant, result: OpResult) -> Option<(u64, NodeReply)> {
        let request = self.in_flight.take()?;
        let record = self.record(request.op.owner());
        record.update(now, &request.op, &result);
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
                // The lock expires by itself.
                self.record(owner).locked_until = None;
                return NodeReply::Never(error.clone());
            }
            retry_at = Some(now + RETRY);
        }
        // If the owner asks for the lock again by now, the release would remove that.
        if self.requests.iter().any(|it| it.op.owner() == owner) {
            return NodeReply::Later;
        }
        self.postpone(request, retry_at)
    }

    /// Queues the release again, or merges it with a newer one. The ballot waits only if the node may hold the lock.
    fn postpone(&mut self, request: &NodeOp, retry_at: Option<Instant>) -> NodeReply {
        let record = self.record(request.op.owner());
        let may_hold = record.locked_until.is_some();
        let release = record.release.get_or_insert_default();
        release.ballot = release.ballot.or(request.ballot.filter(|_| may_hold));
        release.unlisten |= matches!(request.op, Op::Unlisten { .. });
        release.retry_at = retry_at;
        if may_hold { NodeReply::Later } else { GONE }
    }

    /// The node is back: pending releases are sent. Returns whether a notice may have been lost with its connection,
    /// which ends the subscription.
    pub(super) fn node_is_back(&mut self) -> bool {
        let releases = self.records.values_mut();
        for release in releases.filter_map(|it| it.release.as_mut()) {
            release.is_ready = true;
        }
        self.has_subscriptions()
    }

    /// Forgets expired records, and gives up their releases.
    fn expire(&mut self, now: Instant) {
        for record in self.records.values_mut() {
            record.locked_until.take_if(|until| *until <= now);
            record.subscribed_until.take_if(|until| *until <= now);
            if record.until().is_none()
                && let Some(release) = record.release.take_if(|release| !release.is_ready)
            {
                let reply = NodeReply::Never(Fault::RunOut.into());
                self.replies.extend(release.ballot.map(|id| (id, reply)));
            }
        }
    }

    /// When a release must be sent again, or a record expires.
    pub(super) fn due(&self) -> Option<Instant> {
        let due = |it: &OwnerRecord| it.release.as_ref().and_then(|release| release.retry_at);
        let dues = self.records.values();
        let dues = dues.filter_map(|it| due(it).or(it.until()));
        dues.min().filter(|_| self.in_flight.is_none())
    }

    /// Whether the node may have the lock for the owner.
    pub(super) fn may_hold(&self, owner: Owner) -> bool {
        let record = self.records.get(&owner);
        record.is_some_and(|it| it.locked_until.is_some())
    }

    /// Whether the node notifies the owner when the key is free, or may do so.
    pub(super) fn listens(&self, owner: Owner) -> bool {
        let record = self.records.get(&owner);
        record.is_some_and(|it| it.subscribed_until.is_some())
    }

    /// The same for any owner.
    pub(super) fn has_subscriptions(&self) -> bool {
        let mut records = self.records.values();
        records.any(|it| it.subscribed_until.is_some())
    }

    /// The node says that the key is free, and keeps it for a moment for the owner that it notifies. Returns whether
    /// that is one of ours. A node sends one notice for each subscription, oldest first (W7). So one notice ends only
    /// the oldest subscription.
    pub(super) fn notified(&mut self, now: Instant) -> bool {
        let mut records = self.records.values_mut();
        let first = records.find_map(|it| it.subscribed_until.take().map(|_| it));
        let reserve =
            |it: &mut Box<OwnerRecord>| it.locked_until = it.locked_until.max(Some(now + RESERVED));
        first.map(reserve).is_some()
    }

    /// Whether anything is in flight or waits to be sent.
    pub(super) fn is_busy(&self) -> bool {
        #[cfg(test)]
        LOOKS.set(LOOKS.get() + 1);
        let is_releasing = self.records.values().any(|it| it.release.is_some());
        is_releasing || self.in_flight.is_some() || !self.requests.is_empty()
    }

    /// Whether it may be dropped.
    pub(super) fn is_idle(&self) -> bool {
        !self.is_busy() && self.records.is_empty()
    }

    fn record(&mut self, owner: Owner) -> &mut OwnerRecord {
        self.records.entry(owner).or_default()
    }
}
