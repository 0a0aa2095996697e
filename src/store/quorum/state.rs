//! Which node is asked what, and what follows from its answer. Time comes in with every event.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::entry::{Entry, Open, Tally};
use super::fault::{Fault, too_few};
use super::node::{Deferred, Node};
use super::node_queue::{Cast, Vote};
use super::quarantine::Quarantine;
use super::tally::{AcquireTally, Quorum, ReleaseTally, RenewTally};
use crate::StoreError;
use crate::store::contract::{Answer, Op, OpError, Outcome, StoreEvent, SubmittedOp, lost_error};

/// One registry's view of all nodes and of the keys that it uses.
#[derive(Debug)]
pub(super) struct State {
    quorum: Quorum,
    quarantine: Quarantine,
    nodes: Vec<Node>,
    keys: HashMap<Arc<str>, Entry>,
    /// Keys with an op under way, or a release to send again. An event about one key must not look
    /// at all the others.
    busy: HashSet<Arc<str>>,
    /// Keys for whose release a node is listened to.
    listening: HashSet<Arc<str>>,
    /// Keys with something to do at a point in time: each once.
    alarms: BTreeSet<(Instant, Arc<str>)>,
    last_ballot: u64,
    /// Whether the registry was told last that the store is up.
    told: Option<bool>,
    /// Whether the log says that two nodes are one server.
    said_same: bool,
}

impl State {
    /// Of nodes with these names.
    pub(super) fn new(names: Vec<String>, quarantine: Quarantine) -> Self {
        Self {
            quorum: Quorum { size: names.len() },
            quarantine,
            nodes: names.into_iter().map(Node::new).collect(),
            keys: HashMap::new(),
            busy: HashSet::new(),
            listening: HashSet::new(),
            alarms: BTreeSet::new(),
            last_ballot: 0,
            told: None,
            said_same: false,
        }
    }

    /// Whether too few nodes are there for a majority.
    pub(super) fn is_down(&self) -> bool {
        self.count(Some(false)) > self.quorum.spare()
    }

    /// Whether anything is under way, or owed.
    pub(super) fn is_busy(&self) -> bool {
        !self.busy.is_empty()
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
    pub(super) fn submit(&mut self, now: Instant, submitted: SubmittedOp, deferred: &mut Deferred) {
        let (key, op) = (submitted.key.clone(), &submitted.op);
        if let Op::Yield { .. } = op {
            // The registry releases instead.
            let result = Err(OpError::Refused(Fault::NoQueue.into()));
            return deferred
                .events
                .push(StoreEvent::Replied { submitted, result });
        }
        self.last_ballot += 1;
        let id = self.last_ballot;
        let (quorum, quarantine) = (self.quorum, self.quarantine);
        let entry = self.entry(&key);
        let (tally, asked) = match *op {
            Op::Attempt { owner, ttl }
            | Op::Listen { owner, ttl }
            | Op::Enter { owner, ttl, .. } => {
                let election = AcquireTally::new(quorum, quarantine.time(ttl), false);
                let asked = match op {
                    Op::Listen { .. } => op.clone(),
                    _ => Op::Attempt { owner, ttl },
                };
                (Tally::Acquire(election), asked)
            }
            // Who has it already has a vote that no restart has taken away.
            Op::Adopt { .. } => {
                let election = AcquireTally::new(quorum, None, true);
                (Tally::Acquire(election), op.clone())
            }
            Op::Renew { .. } | Op::Raise { .. } => {
                (Tally::Renew(RenewTally::new(quorum), None), op.clone())
            }
            Op::Release { owner } | Op::Withdraw { owner, .. } | Op::Unlisten { owner } => {
                let tally = Tally::Release(ReleaseTally::new(quorum));
                (tally, Op::Release { owner })
            }
            Op::Yield { .. } => unreachable!("answered above"),
        };
        if let Op::Release { owner } = asked {
            entry.end(owner);
        }
        entry.open.push(Open {
            id,
            submitted,
            at: 0,
            tally,
            ended: false,
            troubles: Vec::new(),
        });
        for node in 0..quorum.size {
            if let Op::Release { owner } = asked {
                let casts = entry.queues[node].leave(owner, Some(id));
                entry.cast_all(node, casts);
            } else {
                entry.queues[node].ask(asked.clone(), Some(id));
            }
        }
        self.settle(now, &key, deferred);
    }

    /// A node answered.
    pub(super) fn replied(
        &mut self,
        now: Instant,
        node: usize,
        key: &Arc<str>,
        result: Result<Answer, OpError>,
        deferred: &mut Deferred,
    ) {
        if let Err(OpError::Unknown(error) | OpError::Unsent(error)) = &result {
            self.mark_down(node, error.clone());
        } else {
            self.nodes[node].up.get_or_insert(true);
        }
        self.tell_up(deferred);
        self.answered(now, node, key, result, deferred);
        self.tell_down(deferred);
    }

    /// A node's session has lost an op. The node is not taken to be away for that: nobody would tell that it is back.
    pub(super) fn op_lost(
        &mut self,
        now: Instant,
        node: usize,
        key: &Arc<str>,
        op: &Op,
        deferred: &mut Deferred,
    ) {
        let error = match op {
            // It is sent again after a pause, not when the node is back.
            Op::Release { .. } | Op::Unlisten { .. } => OpError::Refused,
            _ => OpError::Unknown,
        };
        self.answered(now, node, key, Err(error(lost_error())), deferred);
    }

    /// Counts what a node's answer says.
    fn answered(
        &mut self,
        now: Instant,
        node: usize,
        key: &Arc<str>,
        result: Result<Answer, OpError>,
        deferred: &mut Deferred,
    ) {
        let at = result.as_ref().map_or(0, |answer| answer.at);
        if let Some(entry) = self.keys.get_mut(key) {
            if let Some(mut cast) = entry.queues[node].answered(now, result) {
                if let Some(quarantine) = entry.quarantine(cast.tally) {
                    check_age(now, &mut cast, quarantine, self.nodes[node].back_at);
                }
                // What a server says counts once, whatever it is called.
                if let Some(error) = &self.nodes[node].same {
                    cast.vote = Vote::Never(error.clone());
                }
                entry.heard_at(cast.tally, at);
                entry.cast(node, cast);
            }
            self.settle(now, key, deferred);
        }
    }

    /// A node says that a key is free there: the registry, if it listens, is told when a majority says
    /// so, or a moment later.
    pub(super) fn freed(
        &mut self,
        now: Instant,
        node: usize,
        key: Arc<str>,
        deferred: &mut Deferred,
    ) {
        let quorum = self.quorum;
        let Some(entry) = self.keys.get_mut(&key) else {
            return;
        };
        if entry.freed(now, node, quorum) {
            let key = key.clone();
            deferred.events.push(StoreEvent::Freed { key });
        }
        self.settle(now, &key, deferred);
    }

    /// A node's connection is gone, or could not be made. Each op that it took along is answered by
    /// itself.
    pub(super) fn went_down(&mut self, node: usize, error: StoreError, deferred: &mut Deferred) {
        self.nodes[node].same = None;
        self.mark_down(node, error);
        self.tell_down(deferred);
    }

    /// A node's connection stands, to the server of this identity, if that is known.
    pub(super) fn came_up(
        &mut self,
        now: Instant,
        node: usize,
        identity: Option<Arc<str>>,
        deferred: &mut Deferred,
    ) {
        let quorum = self.quorum;
        let same = self.same_server(node, identity.as_ref(), deferred);
        let it = &mut self.nodes[node];
        if it.up.replace(same.is_none()).is_some() {
            it.back_at = Some(now);
        }
        (it.away, it.same, it.identity) = (same.clone(), same, identity);
        let waiting: Vec<_> = self.busy.union(&self.listening).cloned().collect();
        for key in waiting {
            let entry = self.keys.get_mut(&key).expect("it is in use");
            entry.queues[node].node_is_back();
            // It may have told us while we were deaf, and then has no ear of ours any more: whoever waits
            // asks, and so listens there again.
            if entry.queues[node].has_subscriptions() && entry.hear(now, node, quorum) {
                deferred.events.push(StoreEvent::Freed { key: key.clone() });
            }
            self.settle(now, &key, deferred);
        }
        self.tell_up(deferred);
        self.tell_down(deferred);
    }

    /// Time went by.
    pub(super) fn tick(&mut self, now: Instant, deferred: &mut Deferred) {
        while let Some((at, key)) = self.alarms.first().cloned()
            && at <= now
        {
            self.alarms.pop_first();
            let entry = self.keys.get_mut(&key).expect("it is in use");
            entry.alarm = None;
            entry.tick(now);
            self.settle(now, &key, deferred);
        }
    }

    /// What is wrong if a node that is up is the same server: two votes of one server make no
    /// majority. It is not told by the places of nodes, since a server may have several names.
    fn same_server(
        &mut self,
        node: usize,
        identity: Option<&Arc<str>>,
        deferred: &mut Deferred,
    ) -> Option<StoreError> {
        let is_same = |(other, it): &(usize, &Node)| {
            *other != node && it.up == Some(true) && it.identity.as_ref() == identity
        };
        identity?;
        let (_, first) = self.nodes.iter().enumerate().find(is_same)?;
        let (first, second) = (first.name.clone(), self.nodes[node].name.clone());
        let error = StoreError::from(Fault::SameServer { first, second });
        if !std::mem::replace(&mut self.said_same, true) {
            deferred.same_server = Some(error.clone());
        }
        Some(error)
    }

    fn mark_down(&mut self, node: usize, error: StoreError) {
        let node = &mut self.nodes[node];
        node.away = Some(error);
        node.up = Some(false);
    }

    fn entry(&mut self, key: &Arc<str>) -> &mut Entry {
        let size = self.quorum.size;
        let new = || Entry::new(size);
        self.keys.entry(key.clone()).or_insert_with(new)
    }

    fn count(&self, up: Option<bool>) -> usize {
        self.nodes.iter().filter(|node| node.up == up).count()
    }

    /// Does what the votes on a key now ask for.
    fn settle(&mut self, now: Instant, key: &Arc<str>, deferred: &mut Deferred) {
        let down = self.is_down();
        let Some(entry) = self.keys.get_mut(key) else {
            return;
        };
        loop {
            entry.step(now, &self.nodes, key, deferred);
            let raised = entry.raise();
            let answered = entry.conclude(self.quorum, down, deferred);
            if !raised && !answered {
                break;
            }
        }
        if entry.is_freed(now) {
            let key = key.clone();
            deferred.events.push(StoreEvent::Freed { key });
        }
        note(&mut self.busy, key, entry.is_busy());
        note(&mut self.listening, key, entry.listens());
        // An alarm that is too early stays, and is set anew when it rings: each renewal would move it.
        let due = entry.due(now);
        let sooner = due.filter(|due| entry.alarm.is_none_or(|alarm| *due < alarm));
        let is_idle = entry.is_idle();
        if (sooner.is_some() || is_idle)
            && let Some(alarm) = std::mem::replace(&mut entry.alarm, sooner)
        {
            self.alarms.remove(&(alarm, key.clone()));
        }
        if let Some(sooner) = sooner {
            self.alarms.insert((sooner, key.clone()));
        }
        if is_idle {
            self.keys.remove(key);
        }
    }

    /// Tells of a majority, before what it answered: until then a registry takes the store for one
    /// with a queue.
    fn tell_up(&mut self, deferred: &mut Deferred) {
        let is_up = match self.told {
            Some(true) => return,
            Some(false) => !self.is_down(),
            None => self.count(Some(true)) >= self.quorum.majority(),
        };
        if is_up {
            self.told = Some(true);
            deferred.events.push(StoreEvent::up(false));
        }
    }

    /// Tells that no majority is there, after what that took along: a release is sent again by the
    /// registry.
    fn tell_down(&mut self, deferred: &mut Deferred) {
        if !self.is_down() || self.told == Some(false) {
            return;
        }
        self.told = Some(false);
        let away: Vec<_> = self.nodes.iter().filter_map(Node::away).cloned().collect();
        let error = too_few(self.quorum, &away);
        for key in &self.busy {
            let entry = self.keys.get_mut(key).expect("it is in use");
            let returns = |open: &mut Open| matches!(open.tally, Tally::Release(_));
            for Open { submitted, .. } in entry.open.extract_if(.., returns) {
                let result = Err(OpError::Unknown(error.clone()));
                deferred
                    .events
                    .push(StoreEvent::Replied { submitted, result });
            }
        }
        deferred.events.push(StoreEvent::down(error));
    }
}

/// Puts a key into a set, or takes it out.
fn note(keys: &mut HashSet<Arc<str>>, key: &Arc<str>, belongs: bool) {
    if !belongs {
        keys.remove(key);
    } else if !keys.contains(key) {
        keys.insert(key.clone());
    }
}

/// A node that was started again lately may have forgotten for whom it voted: its vote for somebody
/// else does not count before every lease that it may have been part of is over. One that does not
/// tell its age may have been started again when it came back.
fn check_age(now: Instant, cast: &mut Cast, quarantine: Duration, back_at: Option<Instant>) {
    let Vote::Said(Outcome::Raised { age }) = cast.vote else {
        return;
    };
    let is_old = match age {
        Some(age) => age >= quarantine,
        None => back_at.is_none_or(|back_at| back_at + quarantine <= now),
    };
    if !is_old {
        let age = age.map_or("lately, perhaps".to_owned(), |age| format!("{age:?} ago"));
        cast.vote = Vote::Never(Fault::TooYoung { age, quarantine }.into());
    }
}
