//! The nodes, and the keys in use. Time comes in with every event.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::ballot::{Ballot, Question, Quorum};
use super::entry::Entry;
use super::fault::{Fault, too_few};
use super::node::{Connection, Node, is_down};
use super::quarantine::Quarantine;
use crate::base::StoreError;
use crate::store::contract::{Op, OpError, OpResult, StoreEvent, SubmittedOp, dropped_error};

/// No timer sleeps longer: its time may be a ttl away, and the registry dropped by then.
const LONGEST_SLEEP: Duration = Duration::from_secs(1);

/// One registry's view of the nodes and of its keys in use.
#[derive(Debug)]
pub(super) struct QuorumState {
    quorum: Quorum,
    quarantine: Quarantine,
    nodes: Vec<Node>,
    keys: HashMap<Arc<str>, Entry>,
    /// Keys with open requests or subscriptions. Connection events visit only these keys.
    active: HashSet<Arc<str>>,
    /// Keys with a timeout: each once.
    alarms: BTreeSet<(Instant, Arc<str>)>,
    /// When the session's timer ends.
    timer: Option<Instant>,
    last_ballot: u64,
    /// Whether the registry was last told that the store is up.
    told: Option<bool>,
    /// Whether it was logged that two nodes are one server.
    has_logged: bool,
    /// Must be taken after each event.
    pub(super) deferred: Deferred,
}

/// What is done once the state is unlocked.
#[derive(Debug, Default)]
pub(super) struct Deferred {
    pub(super) sends: Vec<(usize, Arc<str>, Op)>,
    pub(super) events: Vec<StoreEvent>,
    /// To be logged later: the log sink is the user's code.
    pub(super) same_server: Option<StoreError>,
}

impl QuorumState {
    /// For nodes with these names.
    pub(super) fn new(names: Vec<String>, quarantine: Quarantine) -> Self {
        Self {
            quorum: Quorum { size: names.len() },
            quarantine,
            nodes: names.into_iter().map(Node::new).collect(),
            keys: HashMap::new(),
            active: HashSet::new(),
            alarms: BTreeSet::new(),
            timer: None,
            last_ballot: 0,
            told: None,
            has_logged: false,
            deferred: Deferred::default(),
        }
    }

    /// Whether anything is in flight or waits to be sent. Reads all active keys.
    pub(super) fn is_busy(&self) -> bool {
        self.active.iter().any(|key| self.keys[key].is_busy())
    }

    /// When to call [`tick`](Self::tick).
    pub(super) fn next_timeout(&self) -> Option<Instant> {
        self.alarms.first().map(|(at, _)| *at)
    }

    /// When a new timer must end, if the present one ends too late or has ended.
    pub(super) fn next_timer(&mut self, now: Instant) -> Option<Instant> {
        self.timer.take_if(|timer| *timer <= now);
        let due = self.next_timeout()?.min(now + LONGEST_SLEEP);
        let is_sooner = self.timer.is_none_or(|timer| due < timer);
        is_sooner.then(|| *self.timer.insert(due))
    }

    #[cfg(test)]
    pub(super) fn keys(&self) -> usize {
        self.keys.len()
    }

    /// The registry submits an op.
    pub(super) fn submit(&mut self, now: Instant, submitted: SubmittedOp) {
        let Some(question) = Question::of(&submitted.op) else {
            // The registry releases instead.
            let result = Err(OpError::Refused(Fault::NoQueue.into()));
            let replied = StoreEvent::Replied { submitted, result };
            return self.deferred.events.push(replied);
        };
        self.last_ballot += 1;
        let (id, key, quorum) = (self.last_ballot, submitted.key.clone(), self.quorum);
        let mut op = submitted.op.clone();
        if let Op::Enter { owner, ttl, .. } = op {
            op = Op::Attempt { owner, ttl };
        }
        let mut ballot = Ballot::new(id, submitted, question, quorum);
        // An adopted lock has its votes already; a restart does not matter.
        if let Op::Attempt { ttl, .. } | Op::Listen { ttl, .. } = op {
            ballot.quarantine = self.quarantine.time(ttl);
        }
        let new = || Entry::new(key.clone(), quorum);
        let entry = self.keys.entry(key.clone()).or_insert_with(new);
        entry.ballots.push(ballot);
        if question == Question::Release {
            let kept_until = match op {
                Op::Keep { left, .. } => Some(now + left),
                _ => None,
            };
            entry.release(op.owner(), Some(id), true, kept_until);
        } else {
            for queue in &mut entry.queues {
                queue.request(op.clone(), Some(id));
            }
        }
        self.change(now, &key, |_, _| {});
    }

    /// A reply of a node.
    pub(super) fn replied(&mut self, now: Instant, node: usize, key: &Arc<str>, result: OpResult) {
        let connection = &mut self.nodes[node].connection;
        if let Err(OpError::Unknown(error) | OpError::Unsent(error)) = &result
            && !matches!(connection, Connection::Duplicate(_))
        {
            *connection = Connection::Away(error.clone());
        } else if let Connection::Unknown | Connection::Idle = connection {
            *connection = Connection::Up;
        }
        self.tell_up();
        self.change(now, key, |entry, nodes| {
            entry.answered(now, node, &nodes[node], result)
        });
        self.tell_down();
    }

    /// A node's session has lost an op. The node is not marked as down for that, since no event would mark it as up
    /// again.
    pub(super) fn op_dropped(&mut self, now: Instant, node: usize, key: &Arc<str>, op: &Op) {
        let error = match op {
            // It is sent again after a pause, not when the node is back.
            Op::Release { .. } | Op::Keep { .. } | Op::Unlisten { .. } => OpError::Refused,
            _ => OpError::Unknown,
        };
        let result = Err(error(dropped_error()));
        self.change(now, key, |entry, nodes| {
            entry.answered(now, node, &nodes[node], result)
        });
    }

    /// A node says that a key is free there. If the registry subscribed, it is told when a majority says so, or a
    /// moment later.
    pub(super) fn freed(&mut self, now: Instant, node: usize, key: &Arc<str>) {
        self.change(now, key, |entry, _| entry.freed(now, node));
    }

    /// A node's connection is lost, or could not be made. The ops that were lost with it have answers of their own.
    pub(super) fn went_down(&mut self, node: usize, error: StoreError) {
        self.nodes[node].connection = Connection::Away(error);
        self.tell_down();
    }

    /// Nodes that are down are asked again. If nothing needed their connections, no event will mark them as up. Returns
    /// whether the last timer should have ended by now.
    pub(super) fn start(&mut self, now: Instant) -> bool {
        if self.active.is_empty() {
            self.nodes.iter_mut().for_each(Node::ask_again);
        }
        self.timer.is_some_and(|timer| timer <= now)
    }

    /// A node's connection is up, to the server of this identity, if known.
    pub(super) fn came_up(&mut self, now: Instant, node: usize, identity: Option<Arc<str>>) {
        let connection = self.same_server(node, identity.as_ref());
        let connection = connection.map_or(Connection::Up, Connection::Duplicate);
        let it = &mut self.nodes[node];
        it.identity = identity;
        it.connection = connection;
        it.connected_at = Some(now);
        let active: Vec<_> = self.active.iter().cloned().collect();
        for key in active {
            self.change(now, &key, |entry, _| entry.node_is_back(now, node));
        }
        self.tell_up();
        self.tell_down();
    }

    /// Time has passed.
    pub(super) fn tick(&mut self, now: Instant) {
        while self.alarms.first().is_some_and(|(at, _)| *at <= now)
            && let Some((_, key)) = self.alarms.pop_first()
        {
            self.change(now, &key, |_, _| {});
        }
    }

    /// Why a node has no vote if it is the same server as another node: two votes of one server make no majority.
    /// Names do not show that, since a server may have several.
    fn same_server(&mut self, node: usize, identity: Option<&Arc<str>>) -> Option<StoreError> {
        let is_same = |(other, it): &(usize, &Node)| {
            *other != node && it.is_up() && it.identity.as_ref() == identity
        };
        identity?;
        let (_, first) = self.nodes.iter().enumerate().find(is_same)?;
        let (first, second) = (first.name.clone(), self.nodes[node].name.clone());
        let error = StoreError::from(Fault::SameServer { first, second });
        if !std::mem::replace(&mut self.has_logged, true) {
            self.deferred.same_server = Some(error.clone());
        }
        Some(error)
    }

    /// Changes a key, if it is in use, and does what follows.
    fn change(&mut self, now: Instant, key: &Arc<str>, change: impl FnOnce(&mut Entry, &[Node])) {
        let Some(entry) = self.keys.get_mut(key) else {
            return;
        };
        change(entry, &self.nodes);
        entry.settle(now, &self.nodes, &mut self.deferred);
        if entry.is_active() {
            self.active.insert(key.clone());
        } else {
            self.active.remove(key);
        }
        let due = entry.due();
        if let Some(alarm) = std::mem::replace(&mut entry.alarm, due) {
            self.alarms.remove(&(alarm, key.clone()));
        }
        self.alarms.extend(due.map(|due| (due, key.clone())));
        if entry.is_idle() {
            self.keys.remove(key);
        }
    }

    /// Sends `Up` when a majority is connected, before any answers. Until then the registry assumes that the store has
    /// a queue.
    fn tell_up(&mut self) {
        let up = self.nodes.iter().filter(|node| node.is_up()).count();
        if self.told != Some(true) && up >= self.quorum.majority() {
            self.told = Some(true);
            self.deferred.events.push(StoreEvent::up(false));
        }
    }

    /// Reports that no majority is up, after the answers to the ops that failed. The registry sends releases again.
    fn tell_down(&mut self) {
        if self.told == Some(false) || !is_down(&self.nodes) {
            return;
        }
        self.told = Some(false);
        let errors = self.nodes.iter().filter_map(|node| node.unavailable(false));
        let error = too_few(self.quorum, errors);
        for key in &self.active {
            let entry = self.keys.get_mut(key).expect("an active key is in use");
            let is_release = |it: &mut Ballot| it.question == Question::Release;
            for ballot in entry.ballots.extract_if(.., is_release) {
                let (submitted, result) = (ballot.submitted, Err(OpError::Unknown(error.clone())));
                let replied = StoreEvent::Replied { submitted, result };
                self.deferred.events.push(replied);
            }
        }
        self.deferred.events.push(StoreEvent::down(error));
    }
}
