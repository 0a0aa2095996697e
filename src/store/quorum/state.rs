//! Which node is asked what, and what follows from its answer. Time comes in with every event.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::ballot::{Election, Quorum, Return, Roll};
use super::entry::{Ballot, Entry, Open};
use super::fault::{Fault, too_few};
use super::lane::{Cast, Lane, Vote};
use super::node::{Node, Outbox};
use crate::StoreError;
use crate::store::contract::{Answer, News, Op, OpError, Outcome};

/// After so many ops, what has run out untouched is swept up.
const SWEEP_EVERY: u32 = 1024;

/// One registry's view of all nodes and of the keys that it uses.
#[derive(Debug)]
pub(super) struct State {
    quorum: Quorum,
    quarantine: Option<Duration>,
    nodes: Vec<Node>,
    keys: HashMap<Arc<str>, Entry>,
    /// Keys with a release that is to be sent again, or has run out by itself, and when.
    alarms: BTreeSet<(Instant, Arc<str>)>,
    last_ballot: u64,
    /// Whether the registry was told last that the store is up.
    told: Option<bool>,
    ops: u32,
}

impl State {
    pub(super) fn new(size: usize, quarantine: Option<Duration>) -> Self {
        Self {
            quorum: Quorum { size },
            quarantine,
            nodes: std::iter::repeat_with(Node::default).take(size).collect(),
            keys: HashMap::new(),
            alarms: BTreeSet::new(),
            last_ballot: 0,
            told: None,
            ops: 0,
        }
    }

    /// Whether too few nodes are there for a majority.
    pub(super) fn is_down(&self) -> bool {
        self.count(Some(false)) > self.quorum.spare()
    }

    /// Whether anything is under way, or owed.
    pub(super) fn is_busy(&self) -> bool {
        let mut lanes = self.keys.values().flat_map(|entry| &entry.lanes);
        lanes.any(Lane::is_busy)
    }

    /// When to call [`tick`](Self::tick).
    pub(super) fn next_timeout(&self) -> Option<Instant> {
        self.alarms.first().map(|(at, _)| *at)
    }

    #[cfg(test)]
    pub(super) fn keys(&self) -> usize {
        self.keys.len()
    }

    /// The registry wishes for something.
    pub(super) fn submit(&mut self, now: Instant, key: Arc<str>, op: Op, outbox: &mut Outbox) {
        self.sweep_now_and_then(now, outbox);
        if let Op::Yield { .. } = op {
            // The registry releases instead.
            let result = Err(OpError::Refused(Fault::NoQueue.into()));
            return outbox.news.push(News::Replied { key, op, result });
        }
        self.last_ballot += 1;
        let id = self.last_ballot;
        let (quorum, asks_age) = (self.quorum, self.quarantine.is_some());
        let entry = self.entry(&key);
        let (ballot, asked) = match op {
            Op::Attempt { owner, ttl }
            | Op::Listen { owner, ttl }
            | Op::Enter { owner, ttl, .. } => {
                let election = Election::new(quorum, asks_age, false);
                let asked = match op {
                    Op::Listen { .. } => op.clone(),
                    _ => Op::Attempt { owner, ttl },
                };
                (Ballot::Election(election), asked)
            }
            // Who has it already has a vote that no restart has taken away.
            Op::Adopt { .. } => {
                let election = Election::new(quorum, false, true);
                (Ballot::Election(election), op.clone())
            }
            Op::Renew { .. } | Op::Raise { .. } => {
                (Ballot::Roll(Roll::new(quorum), None), op.clone())
            }
            Op::Release { owner } | Op::Withdraw { owner } => {
                let ballot = Ballot::Return(Return::new(quorum));
                (ballot, Op::Release { owner })
            }
            Op::Yield { .. } => unreachable!("answered above"),
        };
        if let Op::Release { owner } = asked {
            entry.end(owner);
        }
        entry.open.push(Open {
            id,
            op,
            at: 0,
            ballot,
            ended: false,
            troubles: Vec::new(),
        });
        for node in 0..quorum.size {
            if let Op::Release { owner } = asked {
                let casts = entry.lanes[node].leave(owner, Some(id));
                entry.cast_all(node, casts);
            } else {
                entry.lanes[node].ask(asked.clone(), Some(id));
            }
        }
        self.settle(now, &key, outbox);
    }

    /// A node answered.
    pub(super) fn replied(
        &mut self,
        now: Instant,
        node: usize,
        key: &Arc<str>,
        result: Result<Answer, OpError>,
        outbox: &mut Outbox,
    ) {
        let mut is_new = false;
        if let Err(OpError::Unknown(error) | OpError::Unsent(error)) = &result {
            is_new = self.mark_down(node, error.clone());
        } else {
            self.nodes[node].up.get_or_insert(true);
        }
        self.tell_up(outbox);
        let at = result.as_ref().map_or(0, |answer| answer.at);
        let entry = self.keys.get_mut(key);
        let answered = entry.and_then(|entry| {
            let (op, cast) = entry.lanes[node].answered(now, result)?;
            Some((entry, op, cast))
        });
        if let Some((entry, op, cast)) = answered {
            if let Some(mut cast) = cast {
                if let Some(quarantine) = self.quarantine {
                    let out_until = self.nodes[node].out_until;
                    check_age(now, &mut cast, &op, quarantine, out_until);
                }
                entry.heard_at(cast.ballot, at);
                entry.cast(node, cast);
            }
            self.settle(now, key, outbox);
        }
        if is_new {
            self.settle_all(now, outbox);
        }
        self.tell_down(outbox);
    }

    /// A node says that a key is free there: the registry, if it listens, is told when a majority says
    /// so, or a moment later.
    pub(super) fn freed(&mut self, now: Instant, node: usize, key: Arc<str>, outbox: &mut Outbox) {
        let quorum = self.quorum;
        let Some(entry) = self.keys.get_mut(&key) else {
            return;
        };
        if entry.freed(now, node, quorum) {
            outbox.news.push(News::Freed { key });
        } else {
            self.settle(now, &key, outbox);
        }
    }

    /// A node's connection is gone, or could not be made.
    pub(super) fn went_down(
        &mut self,
        now: Instant,
        node: usize,
        error: StoreError,
        outbox: &mut Outbox,
    ) {
        if self.mark_down(node, error) {
            self.settle_all(now, outbox);
        }
        self.tell_down(outbox);
    }

    /// A node's connection stands.
    pub(super) fn came_up(&mut self, now: Instant, node: usize, outbox: &mut Outbox) {
        let quarantine = self.quarantine;
        let quorum = self.quorum;
        let it = &mut self.nodes[node];
        if it.up.replace(true).is_some() {
            it.out_until = quarantine.map(|quarantine| now + quarantine);
        }
        it.away = None;
        for (key, entry) in &mut self.keys {
            entry.lanes[node].node_is_back();
            // It may have told us while we were deaf, and then has no ear of ours any more: whoever waits
            // asks, and so listens there again.
            if entry.lanes[node].has_ears() && entry.hear(now, node, quorum) {
                outbox.news.push(News::Freed { key: key.clone() });
            }
        }
        self.settle_all(now, outbox);
        self.tell_up(outbox);
    }

    /// Time went by.
    pub(super) fn tick(&mut self, now: Instant, outbox: &mut Outbox) {
        while let Some((at, key)) = self.alarms.first().cloned()
            && at <= now
        {
            self.alarms.pop_first();
            if let Some(entry) = self.keys.get_mut(&key) {
                entry.tick(now);
                self.settle(now, &key, outbox);
            }
        }
    }

    /// True if it was not known to be.
    fn mark_down(&mut self, node: usize, error: StoreError) -> bool {
        let node = &mut self.nodes[node];
        node.away = Some(error);
        node.up.replace(false) != Some(false)
    }

    fn entry(&mut self, key: &Arc<str>) -> &mut Entry {
        let size = self.quorum.size;
        let new = || Entry::new(size);
        self.keys.entry(key.clone()).or_insert_with(new)
    }

    fn count(&self, up: Option<bool>) -> usize {
        self.nodes.iter().filter(|node| node.up == up).count()
    }

    fn sweep_now_and_then(&mut self, now: Instant, outbox: &mut Outbox) {
        self.ops += 1;
        if self.ops >= SWEEP_EVERY {
            self.ops = 0;
            for entry in self.keys.values_mut() {
                entry.tick(now);
            }
            self.settle_all(now, outbox);
        }
    }

    fn settle_all(&mut self, now: Instant, outbox: &mut Outbox) {
        let keys: Vec<_> = self.keys.keys().cloned().collect();
        for key in keys {
            self.settle(now, &key, outbox);
        }
    }

    /// Does what the votes on a key now ask for.
    fn settle(&mut self, now: Instant, key: &Arc<str>, outbox: &mut Outbox) {
        let down = self.is_down();
        let Some(entry) = self.keys.get_mut(key) else {
            return;
        };
        loop {
            entry.step(now, &self.nodes, key, outbox);
            let raised = entry.raise();
            let answered = entry.conclude(self.quorum, down, key, outbox);
            if !raised && !answered {
                break;
            }
        }
        if entry.is_freed(now) {
            let key = key.clone();
            outbox.news.push(News::Freed { key });
        }
        if let Some(due) = entry.due(now) {
            self.alarms.insert((due, key.clone()));
        }
        if entry.is_idle() {
            self.keys.remove(key);
        }
    }

    /// Tells of a majority, before what it answered: until then a registry takes the store for one
    /// with a queue.
    fn tell_up(&mut self, outbox: &mut Outbox) {
        let is_up = match self.told {
            Some(true) => return,
            Some(false) => !self.is_down(),
            None => self.count(Some(true)) >= self.quorum.majority(),
        };
        if is_up {
            self.told = Some(true);
            outbox.news.push(News::Up { queue: false });
        }
    }

    /// Tells that no majority is there, after what that took along: a release is sent again by the
    /// registry.
    fn tell_down(&mut self, outbox: &mut Outbox) {
        if !self.is_down() || self.told == Some(false) {
            return;
        }
        self.told = Some(false);
        let away: Vec<_> = self.nodes.iter().filter_map(Node::away).cloned().collect();
        let error = too_few(self.quorum, &away);
        for (key, entry) in &mut self.keys {
            let returns = |open: &mut Open| matches!(open.ballot, Ballot::Return(_));
            for Open { op, .. } in entry.open.extract_if(.., returns) {
                let (key, result) = (key.clone(), Err(OpError::Unknown(error.clone())));
                outbox.news.push(News::Replied { key, op, result });
            }
        }
        outbox.news.push(News::Down(error));
    }
}

/// A node that was started again lately may have forgotten for whom it voted: its vote for somebody
/// else does not count before every lease that it may have been part of is over.
fn check_age(
    now: Instant,
    cast: &mut Cast,
    op: &Op,
    quarantine: Duration,
    out_until: Option<Instant>,
) {
    let (Vote::Said(Outcome::Raised { age }), Op::Raise { age: true, .. }) = (&cast.vote, op)
    else {
        return;
    };
    let is_old = match age {
        Some(age) => *age >= quarantine,
        None => out_until.is_none_or(|until| until <= now),
    };
    if !is_old {
        let age = age.map_or("lately, perhaps".to_owned(), |age| format!("{age:?} ago"));
        cast.vote = Vote::Never(Fault::TooYoung { age }.into());
    }
}
