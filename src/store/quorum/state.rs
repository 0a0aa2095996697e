//! Which node is asked what, and what follows from its answer. Time comes in with every event.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::ballot::{Called, Elected, Election, GivenBack, Quorum, Return, Roll};
use super::fault::Fault;
use super::lane::{Cast, Lane, Step, Vote};
use crate::StoreError;
use crate::store::contract::{Answer, News, Op, OpError, Outcome, Owner, ServerTime};

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

#[derive(Debug, Default)]
struct Node {
    /// Whether its connection stands, as far as it was heard of.
    up: Option<bool>,
    /// Why not.
    away: Option<StoreError>,
    /// Its connection broke, and it may have been started again: if it does not tell, its votes do
    /// not count until then.
    out_until: Option<Instant>,
}

/// One key in use.
#[derive(Debug)]
struct Entry {
    /// One a node.
    lanes: Vec<Lane>,
    open: Vec<Open>,
}

/// An op that is not answered yet.
#[derive(Debug)]
struct Open {
    id: u64,
    op: Op,
    /// The latest time that a node named.
    at: ServerTime,
    ballot: Ballot,
    /// Whether what it renews was released meanwhile.
    ended: bool,
    /// What nodes said that have no vote.
    troubles: Vec<StoreError>,
}

#[derive(Debug)]
enum Ballot {
    Election(Election),
    /// A renewal, or the raising of a fence: then the age of the youngest that counts.
    Roll(Roll, Option<Option<Duration>>),
    Return(Return),
}

/// What is done once the state is unlocked.
#[derive(Debug, Default)]
pub(super) struct Outbox {
    pub(super) sends: Vec<(usize, Arc<str>, Op)>,
    pub(super) news: Vec<News>,
}

impl Node {
    fn away(&self) -> Option<&StoreError> {
        self.away.as_ref()
    }
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
            Op::Attempt { owner, ttl } | Op::Enter { owner, ttl, .. } => {
                let election = Election::new(quorum, asks_age, false);
                (Ballot::Election(election), Op::Attempt { owner, ttl })
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
                let casts = entry.lanes[node].let_go(owner, Some(id));
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
        let it = &mut self.nodes[node];
        if it.up.replace(true).is_some() {
            it.out_until = quarantine.map(|quarantine| now + quarantine);
        }
        it.away = None;
        for entry in self.keys.values_mut() {
            entry.lanes[node].node_is_back();
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
        self.keys.entry(key.clone()).or_insert_with(|| Entry {
            lanes: std::iter::repeat_with(Lane::default).take(size).collect(),
            open: Vec::new(),
        })
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
        if let Some(due) = entry.lanes.iter().filter_map(|it| it.due(now)).min() {
            self.alarms.insert((due, key.clone()));
        }
        if entry.open.is_empty() && entry.lanes.iter().all(Lane::is_idle) {
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

impl Entry {
    fn tick(&mut self, now: Instant) {
        for node in 0..self.lanes.len() {
            let casts = self.lanes[node].tick(now);
            self.cast_all(node, casts);
        }
    }

    /// A lease is over: a renewal of it that is under way must not give it to a node again.
    fn end(&mut self, owner: Owner) {
        for open in &mut self.open {
            open.ended |= matches!(open.op, Op::Renew { owner: of, .. } if of == owner);
        }
    }

    fn cast_all(&mut self, node: usize, casts: Vec<Cast>) {
        for cast in casts {
            self.cast(node, cast);
        }
    }

    fn heard_at(&mut self, ballot: u64, at: ServerTime) {
        if let Some(open) = self.open.iter_mut().find(|open| open.id == ballot) {
            open.at = open.at.max(at);
        }
    }

    /// Counts a vote, if its ballot is still open.
    fn cast(&mut self, node: usize, Cast { ballot, vote }: Cast) {
        let Some(open) = self.open.iter_mut().find(|open| open.id == ballot) else {
            return;
        };
        match (&mut open.ballot, vote) {
            (Ballot::Election(election), Vote::Said(outcome)) => match outcome {
                Outcome::Won { draw } => election.won(node, draw),
                Outcome::Busy { left, .. } => election.against(node, left),
                Outcome::NotOld => election.against(node, None),
                Outcome::Raised { .. } => election.raised(node),
                _ => {
                    open.troubles.push(Fault::Forgot.into());
                    election.absent(node);
                }
            },
            (Ballot::Roll(roll, youngest), Vote::Said(outcome)) => match outcome {
                Outcome::Raised { age } => {
                    *youngest = Some(youngest.map_or(age, |youngest| youngest.min(age)));
                    roll.has(node);
                }
                Outcome::Renewed => roll.has(node),
                _ => roll.lacks(node),
            },
            (Ballot::Return(back), Vote::Said(outcome)) => {
                back.gone(node, outcome == Outcome::Gone { held: true });
            }
            (ballot, Vote::Later(error)) => {
                open.troubles.push(error);
                match ballot {
                    Ballot::Return(back) => back.later(node),
                    Ballot::Election(election) => election.absent(node),
                    Ballot::Roll(roll, _) => roll.absent(node),
                }
            }
            (ballot, Vote::Never(error)) => {
                open.troubles.push(error);
                match ballot {
                    Ballot::Return(back) => back.never(node),
                    Ballot::Election(election) => election.absent(node),
                    Ballot::Roll(roll, _) => roll.absent(node),
                }
            }
        }
    }

    /// Sends what may go, and counts what need not be sent.
    fn step(&mut self, now: Instant, nodes: &[Node], key: &Arc<str>, outbox: &mut Outbox) {
        for (node, it) in nodes.iter().enumerate() {
            while let Some(step) = self.lanes[node].step(now, it.away()) {
                match step {
                    Step::Send(op) => outbox.sends.push((node, key.clone(), op)),
                    Step::Cast(cast) => self.cast(node, cast),
                }
            }
        }
    }

    /// Has the fences of a majority raised to the draw of the one that is to win; true if any is.
    fn raise(&mut self) -> bool {
        let mut raised = false;
        for open in &mut self.open {
            let (Op::Attempt { owner, .. } | Op::Enter { owner, .. } | Op::Adopt { owner, .. }) =
                open.op
            else {
                continue;
            };
            if let Ballot::Election(election) = &mut open.ballot
                && let Some((draw, nodes)) = election.raises()
            {
                raised = true;
                let age = election.asks_age();
                for node in nodes {
                    self.lanes[node].ask(Op::Raise { owner, draw, age }, Some(open.id));
                }
            }
        }
        raised
    }

    /// Answers ops whose ballots have a verdict; true if any has.
    fn conclude(
        &mut self,
        quorum: Quorum,
        down: bool,
        key: &Arc<str>,
        outbox: &mut Outbox,
    ) -> bool {
        let decided = |open: &mut Open| open.outcome().is_some();
        let answered: Vec<_> = self.open.extract_if(.., decided).collect();
        let any = !answered.is_empty();
        for open in answered {
            let outcome = open.outcome().expect("it was just decided").ok();
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
            let (key, op) = (key.clone(), open.op);
            outbox.news.push(News::Replied { key, op, result });
        }
        any
    }

    /// What a verdict brings about on the nodes.
    fn follow(&mut self, open: &Open, outcome: Option<&Outcome>) {
        match (&open.op, outcome) {
            (_, Some(Outcome::Won { .. })) => {}
            // Every vote that is not known to have refused is given back, and that behind its
            // answer, however late that comes.
            (Op::Attempt { owner, .. } | Op::Enter { owner, .. }, _)
            | (Op::Adopt { owner, .. }, Some(Outcome::NotOld))
            | (Op::Renew { owner, .. }, Some(Outcome::Lost)) => {
                for node in 0..self.lanes.len() {
                    let casts = self.lanes[node].let_go(*owner, None);
                    self.cast_all(node, casts);
                }
            }
            // A node that was away, or has lost the lock, is given it again if it is free: not to
            // make up this majority, but so that the next can do without another node.
            (&Op::Renew { owner, ttl }, Some(Outcome::Renewed)) if !open.ended => {
                for lane in &mut self.lanes {
                    if !lane.is_stained(owner) && !lane.is_busy() {
                        lane.ask(Op::Attempt { owner, ttl }, None);
                    }
                }
            }
            // Whoever adopts asks again, or else gives back.
            _ => {}
        }
    }
}

impl Open {
    /// The verdict as the registry is to hear it; `Err` if too few nodes could be asked.
    fn outcome(&self) -> Option<Result<Outcome, ()>> {
        match &self.ballot {
            Ballot::Election(election) => election.verdict().map(|verdict| match verdict {
                Elected::Won { draw } => Ok(Outcome::Won { draw }),
                Elected::Refused { .. } if matches!(self.op, Op::Adopt { .. }) => {
                    Ok(Outcome::NotOld)
                }
                Elected::Refused { left } => Ok(Outcome::Busy { left, score: None }),
                Elected::Failed => Err(()),
            }),
            Ballot::Roll(roll, youngest) => roll.verdict().map(|verdict| match verdict {
                Called::Has => Ok(youngest.map_or(Outcome::Renewed, |age| Outcome::Raised { age })),
                Called::Lacks => Ok(Outcome::Lost),
                Called::Unknown => Err(()),
            }),
            Ballot::Return(back) => back.verdict().map(|verdict| match verdict {
                GivenBack::Gone { held } => Ok(Outcome::Gone { held }),
                GivenBack::Failed => Err(()),
            }),
        }
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

/// What is told where no majority could be asked: what the nodes said, and what will not mend by
/// itself above all, if it is that which stands in the way.
fn too_few(quorum: Quorum, troubles: &[StoreError]) -> StoreError {
    let lasting: Vec<_> = troubles.iter().filter(|it| !it.is_retryable()).collect();
    let source = if lasting.len() > quorum.spare() {
        lasting.last().copied()
    } else {
        troubles.iter().rfind(|it| it.is_retryable())
    };
    let source = source.cloned().unwrap_or_else(|| Fault::Away.into());
    let fault = Fault::TooFew {
        away: troubles.len().min(quorum.size),
        size: quorum.size,
        majority: quorum.majority(),
        source,
    };
    fault.into()
}
