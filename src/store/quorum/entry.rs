//! One key in use: the ops on it that are not answered yet, and what the answers of the nodes make of
//! them.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::fault::{Fault, too_few};
use super::node::{Deferred, Node};
use super::node_queue::{Cast, NodeQueue, Step, Vote};
use super::tally::{
    AcquireTally, AcquireVerdict, Quorum, ReleaseTally, ReleaseVerdict, RenewTally, RenewVerdict,
};
use crate::StoreError;
use crate::store::contract::{
    Answer, Op, OpError, Outcome, Owner, ServerTime, StoreEvent, SubmittedOp,
};

/// One key in use.
#[derive(Debug)]
pub(super) struct Entry {
    /// One a node.
    pub(super) queues: Vec<NodeQueue>,
    pub(super) open: Vec<Open>,
    /// The nodes that have said that the key is free, and when the registry is told whatever the
    /// others say.
    freed: Option<(Vec<usize>, Instant)>,
    /// When it is looked at again, whatever happens until then.
    pub(super) alarm: Option<Instant>,
}

/// How long one node's notice waits for those of a majority: whoever asks when the first node is free
/// may find the others not so yet, and go away again.
const TOGETHER: Duration = Duration::from_millis(3);

/// An op that is not answered yet.
#[derive(Debug)]
pub(super) struct Open {
    pub(super) id: u64,
    pub(super) submitted: SubmittedOp,
    /// The latest time that a node named.
    pub(super) at: ServerTime,
    pub(super) tally: Tally,
    /// Whether what it renews was released meanwhile.
    pub(super) ended: bool,
    /// What nodes said that have no vote.
    pub(super) troubles: Vec<StoreError>,
}

#[derive(Debug)]
pub(super) enum Tally {
    Acquire(AcquireTally),
    /// A renewal, or the raising of a fence: then the age of the youngest that counts.
    Renew(RenewTally, Option<Option<Duration>>),
    Release(ReleaseTally),
}

impl Entry {
    pub(super) fn new(size: usize) -> Self {
        Self {
            queues: std::iter::repeat_with(NodeQueue::default)
                .take(size)
                .collect(),
            open: Vec::new(),
            freed: None,
            alarm: None,
        }
    }

    /// A node says that the key is free: whether the registry is to be told.
    pub(super) fn freed(&mut self, now: Instant, node: usize, quorum: Quorum) -> bool {
        self.queues[node].hears(now) && self.hear(now, node, quorum)
    }

    /// The key is free on a node, or may be: whether enough say so for the registry to be told.
    pub(super) fn hear(&mut self, now: Instant, node: usize, quorum: Quorum) -> bool {
        let (nodes, _) = self.freed.get_or_insert((Vec::new(), now + TOGETHER));
        if !nodes.contains(&node) {
            nodes.push(node);
        }
        nodes.len() >= quorum.majority() && self.freed.take().is_some()
    }

    /// Whether the registry has waited for other nodes for long enough.
    pub(super) fn is_freed(&mut self, now: Instant) -> bool {
        self.freed.take_if(|(_, due)| *due <= now).is_some()
    }

    /// When there is something to do without an event; the last is to forget what has run out.
    pub(super) fn due(&self, now: Instant) -> Option<Instant> {
        let queues = self.queues.iter().filter_map(|queue| queue.due(now));
        let due = queues.chain(self.freed.as_ref().map(|(_, due)| *due)).min();
        let over = || self.queues.iter().filter_map(NodeQueue::over).max();
        due.or_else(|| over().filter(|_| !self.is_busy()))
    }

    /// Whether anything is under way, or to be sent again.
    pub(super) fn is_busy(&self) -> bool {
        self.queues.iter().any(NodeQueue::is_busy)
    }

    /// Whether a node is listened to.
    pub(super) fn listens(&self) -> bool {
        self.queues.iter().any(NodeQueue::has_subscriptions)
    }

    /// Whether it may be forgotten.
    pub(super) fn is_idle(&self) -> bool {
        self.open.is_empty() && self.freed.is_none() && self.queues.iter().all(NodeQueue::is_idle)
    }

    pub(super) fn tick(&mut self, now: Instant) {
        for node in 0..self.queues.len() {
            let casts = self.queues[node].tick(now);
            self.cast_all(node, casts);
        }
    }

    /// A lease is over: a renewal of it that is under way must not give it to a node again.
    pub(super) fn end(&mut self, owner: Owner) {
        for open in &mut self.open {
            open.ended |= matches!(open.op(), Op::Renew { owner: of, .. } if *of == owner);
        }
    }

    pub(super) fn cast_all(&mut self, node: usize, casts: Vec<Cast>) {
        for cast in casts {
            self.cast(node, cast);
        }
    }

    pub(super) fn heard_at(&mut self, tally: u64, at: ServerTime) {
        if let Some(open) = self.open.iter_mut().find(|open| open.id == tally) {
            open.at = open.at.max(at);
        }
    }

    /// How old a node must be for its vote to count in a ballot.
    pub(super) fn quarantine(&self, tally: u64) -> Option<Duration> {
        let open = self.open.iter().find(|open| open.id == tally)?;
        match &open.tally {
            Tally::Acquire(election) => election.quarantine(),
            Tally::Renew(..) | Tally::Release(_) => None,
        }
    }

    /// Counts a vote, if its ballot is still open.
    pub(super) fn cast(&mut self, node: usize, Cast { tally, vote }: Cast) {
        let Some(open) = self.open.iter_mut().find(|open| open.id == tally) else {
            return;
        };
        match (&mut open.tally, vote) {
            (Tally::Acquire(election), Vote::Said(outcome)) => match outcome {
                Outcome::Won { epoch } => election.won(node, epoch),
                Outcome::Busy { left, .. } => election.against(node, left),
                Outcome::NotOld => election.against(node, None),
                Outcome::Raised { .. } => election.raised(node),
                _ => {
                    open.troubles.push(Fault::Forgot.into());
                    election.absent(node);
                }
            },
            (Tally::Renew(roll, youngest), Vote::Said(outcome)) => match outcome {
                Outcome::Raised { age } => {
                    *youngest = Some(youngest.map_or(age, |youngest| youngest.min(age)));
                    roll.has(node);
                }
                Outcome::Renewed => roll.has(node),
                _ => roll.lacks(node),
            },
            (Tally::Release(back), Vote::Said(outcome)) => {
                back.gone(node, outcome == Outcome::Gone { held: true });
            }
            (tally, Vote::Later(error)) => {
                open.troubles.push(error);
                match tally {
                    Tally::Release(back) => back.later(node),
                    Tally::Acquire(election) => election.absent(node),
                    Tally::Renew(roll, _) => roll.absent(node),
                }
            }
            (tally, Vote::Never(error)) => {
                open.troubles.push(error);
                match tally {
                    Tally::Release(back) => back.never(node),
                    Tally::Acquire(election) => election.absent(node),
                    Tally::Renew(roll, _) => roll.absent(node),
                }
            }
        }
    }

    /// Sends what may go, and counts what need not be sent.
    pub(super) fn step(
        &mut self,
        now: Instant,
        nodes: &[Node],
        key: &Arc<str>,
        deferred: &mut Deferred,
    ) {
        for (node, it) in nodes.iter().enumerate() {
            let gives_back = it.same.is_some();
            while let Some(step) = self.queues[node].step(now, it.away(), gives_back) {
                match step {
                    Step::Send(op) => deferred.sends.push((node, key.clone(), op)),
                    Step::Cast(cast) => self.cast(node, cast),
                }
            }
        }
    }

    /// Has the fences of a majority raised to the epoch of the one that is to win; true if any is.
    pub(super) fn raise(&mut self) -> bool {
        let mut raised = false;
        for open in &mut self.open {
            let (Op::Attempt { owner, .. }
            | Op::Listen { owner, .. }
            | Op::Enter { owner, .. }
            | Op::Adopt { owner, .. }) = *open.op()
            else {
                continue;
            };
            if let Tally::Acquire(election) = &mut open.tally
                && let Some((epoch, nodes)) = election.raises()
            {
                raised = true;
                let age = election.quarantine().is_some();
                for node in nodes {
                    self.queues[node].ask(Op::Raise { owner, epoch, age }, Some(open.id));
                }
            }
        }
        raised
    }

    /// Answers ops whose ballots have a verdict; true if any has.
    pub(super) fn conclude(&mut self, quorum: Quorum, down: bool, deferred: &mut Deferred) -> bool {
        let decided = |open: &mut Open| open.outcome().is_some();
        let answered: Vec<_> = self.open.extract_if(.., decided).collect();
        let any = !answered.is_empty();
        for open in answered {
            let mut outcome = open.outcome().expect("it was just decided").ok();
            if let (Op::Listen { owner, .. }, Some(Outcome::Busy { score, .. })) =
                (open.op(), &mut outcome)
            {
                // It has a place on each of them, and none among all.
                *score = self.queues.iter().any(|it| it.listens(*owner)).then_some(0);
            }
            // Down, and it asks again when it is told that the store is up; else after a pause.
            let failed = if down {
                OpError::Unknown
            } else {
                OpError::Refused
            };
            self.follow(&open, outcome.as_ref());
            let result = match outcome {
                Some(outcome) => {
                    let at = open.at;
                    Ok(Answer { at, outcome })
                }
                None => Err(failed(too_few(quorum, &open.troubles))),
            };
            let submitted = open.submitted;
            deferred
                .events
                .push(StoreEvent::Replied { submitted, result });
        }
        any
    }

    /// What a verdict brings about on the nodes.
    fn follow(&mut self, open: &Open, outcome: Option<&Outcome>) {
        match (open.op(), outcome) {
            (_, Some(Outcome::Won { .. })) => {}
            // It is told as if nothing had been done, so that nobody will withdraw a subscription that one of
            // the nodes has, or gets by an answer that comes late.
            (Op::Listen { owner, .. }, None) => {
                for node in 0..self.queues.len() {
                    let casts = self.queues[node].leave(*owner, None);
                    self.cast_all(node, casts);
                }
            }
            // Every vote that is not known to have refused is given back, and that behind its
            // answer, however late that comes.
            (Op::Attempt { owner, .. } | Op::Listen { owner, .. } | Op::Enter { owner, .. }, _)
            | (Op::Adopt { owner, .. }, Some(Outcome::NotOld))
            | (Op::Renew { owner, .. }, Some(Outcome::Lost)) => {
                for node in 0..self.queues.len() {
                    let casts = self.queues[node].let_go(*owner);
                    self.cast_all(node, casts);
                }
            }
            // A node that was away, or has lost the lock, is given it again if it is free: not to
            // make up this majority, but so that the next can do without another node.
            (&Op::Renew { owner, ttl, .. }, Some(Outcome::Renewed)) if !open.ended => {
                for queue in &mut self.queues {
                    if !queue.is_residual(owner) && !queue.is_busy() {
                        queue.ask(Op::Attempt { owner, ttl }, None);
                    }
                }
            }
            // Whoever adopts asks again, or else gives back.
            _ => {}
        }
    }
}

impl Open {
    fn op(&self) -> &Op {
        &self.submitted.op
    }

    /// The verdict as the registry is to hear it; `Err` if too few nodes could be asked.
    fn outcome(&self) -> Option<Result<Outcome, ()>> {
        match &self.tally {
            Tally::Acquire(election) => election.verdict().map(|verdict| match verdict {
                AcquireVerdict::Won { epoch } => Ok(Outcome::Won { epoch }),
                AcquireVerdict::Refused { .. } if matches!(self.op(), Op::Adopt { .. }) => {
                    Ok(Outcome::NotOld)
                }
                AcquireVerdict::Refused { left } => Ok(Outcome::Busy { left, score: None }),
                AcquireVerdict::Failed => Err(()),
            }),
            Tally::Renew(roll, youngest) => roll.verdict().map(|verdict| match verdict {
                RenewVerdict::Has => {
                    Ok(youngest.map_or(Outcome::Renewed, |age| Outcome::Raised { age }))
                }
                RenewVerdict::Lacks => Ok(Outcome::Lost),
                RenewVerdict::Unknown => Err(()),
            }),
            Tally::Release(back) => back.verdict().map(|verdict| match verdict {
                ReleaseVerdict::Gone { held } => Ok(Outcome::Gone { held }),
                ReleaseVerdict::Failed => Err(()),
            }),
        }
    }
}
