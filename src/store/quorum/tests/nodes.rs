//! Nodes that can be broken: a keyspace each, behind connections that take time, break and lose replies.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use tokio::time::{Instant, sleep};

use crate::base::StoreError;
use crate::store::contract::{
    Answer, KeyScope, KeyStatus, Op, OpError, OpResult, Outcome, Session, SessionConfig,
    StoreEvent, SubmittedOp,
};
use crate::store::memory::{Applied, Asking, Keyspace};
use crate::store::{LockStore, sealed};

/// Microseconds; far enough from zero for clocks that are set back.
const EPOCH: u64 = 1_700_000_000_000_000;

pub(super) const fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// Of so many nodes.
pub(super) fn names(size: usize) -> Vec<String> {
    (0..size).map(|node| format!("node {node}")).collect()
}

/// One server. Clones share it.
#[derive(Clone)]
pub(super) struct Node(Arc<Inner>);

struct Inner {
    me: Weak<Inner>,
    began: Instant,
    state: Mutex<State>,
}

struct State {
    keyspace: Keyspace,
    /// How far its clock is ahead, in microseconds.
    ahead: u64,
    mode: Mode,
    /// How long a message is on its way, at most; drawn again for each.
    delay: Duration,
    /// In a thousand: replies that are lost, and their connection with them.
    loses: u64,
    /// In a thousand: ops that are refused.
    refuses: u64,
    /// This many of the next releases are refused.
    keeps: u32,
    /// Whether releases are refused for good.
    lasting: bool,
    /// Whether too few know of what is won.
    lonely: bool,
    /// How many ops its sessions drop.
    drops: u64,
    /// Whether it does not tell its age.
    ageless: bool,
    /// Whether notices are lost.
    mute: bool,
    /// How many were sent.
    told: u64,
    /// Registries that cannot reach it.
    parted: HashSet<Arc<str>>,
    chance: u64,
    lines: HashMap<Arc<str>, Weak<Line>>,
    flights: BTreeMap<u64, Flight>,
    last: u64,
    /// What was done, in order.
    done: Vec<(Arc<str>, Op)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Up,
    /// Nobody listens.
    Away,
    /// Connections stand, and nothing is answered.
    Stuck,
}

struct Flight {
    line: Arc<Line>,
    submitted: SubmittedOp,
    answer: Option<Result<Answer, OpError>>,
}

/// One registry's connection.
struct Line {
    node: Arc<Inner>,
    config: SessionConfig,
    /// Whether the connection stands.
    up: Mutex<bool>,
}

struct NodeSession(Arc<Line>);

fn broken() -> StoreError {
    StoreError::new("the connection broke")
}

impl Node {
    pub(super) fn new() -> Self {
        Self(Arc::new_cyclic(|me| Inner {
            me: me.clone(),
            began: Instant::now(),
            state: Mutex::new(State {
                keyspace: Keyspace::default(),
                ahead: 0,
                mode: Mode::Up,
                delay: Duration::ZERO,
                loses: 0,
                refuses: 0,
                keeps: 0,
                lasting: false,
                lonely: false,
                drops: 0,
                ageless: false,
                mute: false,
                told: 0,
                parted: HashSet::new(),
                chance: 1,
                lines: HashMap::new(),
                flights: BTreeMap::new(),
                last: 0,
                done: Vec::new(),
            }),
        }))
    }

    /// So many, whose clocks differ by 300 ms each: the later, the further behind.
    pub(super) fn many(size: usize) -> Vec<Self> {
        let nodes: Vec<_> = std::iter::repeat_with(Self::new).take(size).collect();
        for (i, node) in nodes.iter().rev().enumerate() {
            node.0.lock().ahead = i as u64 * 300_000;
        }
        nodes
    }

    pub(super) fn set_delay(&self, delay: Duration) {
        self.0.lock().delay = delay;
    }

    /// In a thousand.
    pub(super) fn set_faults(&self, seed: u64, loses: u64, refuses: u64) {
        let mut state = self.0.lock();
        (state.chance, state.loses, state.refuses) = (seed, loses, refuses);
    }

    /// The next release, or one more.
    pub(super) fn refuse_release(&self) {
        self.0.lock().keeps += 1;
    }

    /// So many ops more are dropped by its sessions, without an answer.
    pub(super) fn set_drops(&self, drops: u64) {
        self.0.lock().drops = drops;
    }

    /// The registries that have come to it.
    pub(super) fn instances(&self) -> HashSet<Arc<str>> {
        self.0.lock().lines.keys().cloned().collect()
    }

    /// A registry has no connection to it for now, and it is there for all others.
    pub(super) fn part_from(&self, instance: &str) {
        let mut state = self.0.lock();
        let line = state.lines.get(instance).and_then(Weak::upgrade).unwrap();
        state.parted.insert(instance.into());
        drop(state);
        line.break_up();
    }

    pub(super) fn rejoin(&self, instance: &str) {
        let mut state = self.0.lock();
        let line = state.lines.get(instance).and_then(Weak::upgrade).unwrap();
        state.parted.remove(instance);
        drop(state);
        line.come_up();
    }

    /// Whether too few know from now on of what is won there.
    pub(super) fn set_lonely(&self, lonely: bool) {
        self.0.lock().lonely = lonely;
    }

    /// It does not tell its age: the right is missing.
    pub(super) fn hide_age(&self) {
        self.0.lock().ageless = true;
    }

    /// Whether its notices are lost from now on.
    pub(super) fn set_mute(&self, mute: bool) {
        self.0.lock().mute = mute;
    }

    /// How many notices it has sent.
    pub(super) fn told(&self) -> u64 {
        self.0.lock().told
    }

    /// Tells a registry that a key is free, whatever is so.
    pub(super) fn lie(&self, key: &str) {
        let lines = self.0.lock().lines();
        for line in lines {
            line.tell(StoreEvent::Freed { key: key.into() });
        }
    }

    pub(super) fn refuse_releases_for_good(&self) {
        self.0.lock().lasting = true;
    }

    /// Nobody listens any more; what was under way is done or not.
    pub(super) fn go_away(&self) {
        self.0.lock().mode = Mode::Away;
        self.break_all();
    }

    /// Nothing is answered any more.
    pub(super) fn get_stuck(&self) {
        self.0.lock().mode = Mode::Stuck;
    }

    /// It is there again, and so are the connections to it.
    pub(super) fn come_back(&self) {
        let lines = {
            let mut state = self.0.lock();
            state.mode = Mode::Up;
            state.lines()
        };
        for line in lines {
            line.come_up();
        }
    }

    /// Started again, without its data.
    pub(super) fn forget(&self) {
        self.go_away();
        let now = self.0.now();
        self.0.lock().keyspace.forget(now);
        self.come_back();
    }

    /// Whether a connection of this registry is needed, as its session would ask.
    pub(super) fn is_used_by(&self, instance: &str) -> bool {
        let line = self.0.lock().lines[instance].upgrade().unwrap();
        let listener = line.config.listener.upgrade().unwrap();
        listener.uses(&KeyScope::All)
    }

    pub(super) fn break_all(&self) {
        let lines = self.0.lock().lines();
        for line in lines {
            line.break_up();
        }
    }

    /// Its clock is set forward: what is held runs out earlier.
    pub(super) fn jump(&self, ahead: Duration) {
        self.0.lock().ahead += ahead.as_micros() as u64;
    }

    pub(super) fn keys(&self) -> usize {
        let now = self.0.now();
        self.0.lock().keyspace.len(now)
    }

    /// The owner of a key under the usual prefix.
    pub(super) fn owner(&self, key: &str) -> Option<String> {
        let now = self.0.now();
        let mut state = self.0.lock();
        state
            .keyspace
            .inspect(&"lock".into(), &key.into(), now, &|_| true)
            .owner()
    }

    pub(super) fn seize(&self, key: &str, ttl: Duration) {
        let now = self.0.now();
        let (prefix, instance, key) = ("lock".into(), "stranger".into(), key.into());
        let asking = Asking {
            prefix: &prefix,
            instance: &instance,
            key: &key,
            now,
        };
        assert!(self.0.lock().keyspace.seize(asking, Some(ttl)));
    }

    /// What was done since this was asked last.
    pub(super) fn done(&self) -> Vec<Op> {
        let done = std::mem::take(&mut self.0.lock().done);
        done.into_iter().map(|(_, op)| op).collect()
    }
}

impl State {
    fn random(&mut self, below: u64) -> u64 {
        self.chance = self.chance.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.chance;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % below.max(1)
    }

    fn delay(&mut self) -> Duration {
        let most = self.delay.as_micros() as u64;
        Duration::from_micros(self.random(most + 1))
    }

    /// Tells a registry that a key is free, a little later, if notices are not lost.
    fn notify(&mut self, instance: Arc<str>, key: Arc<str>) {
        let delay = self.delay();
        let line = self.lines.get(&instance).cloned();
        if let Some(line) = line.filter(|_| !self.mute) {
            self.told += 1;
            tokio::spawn(async move {
                sleep(delay).await;
                if let Some(line) = line.upgrade()
                    && *line.up.lock().unwrap()
                {
                    line.tell(StoreEvent::Freed { key });
                }
            });
        }
    }

    fn lines(&self) -> Vec<Arc<Line>> {
        let mut lines: Vec<_> = self.lines.values().filter_map(Weak::upgrade).collect();
        lines.sort_by(|a, b| a.config.instance.cmp(&b.config.instance));
        lines
    }
}

impl Inner {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    fn now(&self) -> u64 {
        let since = Instant::now() - self.began;
        EPOCH + self.lock().ahead + since.as_micros() as u64
    }

    /// Does what is under way, if it is still.
    fn run(&self, id: u64) {
        let now = self.now();
        let mut guard = self.lock();
        let state = &mut *guard;
        let refused = state.random(1000) < state.refuses;
        let Some(in_flight) = state.flights.get_mut(&id) else {
            return;
        };
        let kept = state.keeps > 0 && matches!(in_flight.submitted.op, Op::Release { .. });
        state.keeps -= u32::from(kept);
        if state.lasting && matches!(in_flight.submitted.op, Op::Release { .. }) {
            let error = StoreError::lasting("no right to do that");
            in_flight.answer = Some(Err(OpError::Refused(error)));
            return;
        }
        if refused || kept {
            let error = StoreError::new("refused");
            in_flight.answer = Some(Err(OpError::Refused(error)));
            return;
        }
        let config = &in_flight.line.config;
        let asking = Asking {
            prefix: &config.prefix,
            instance: &config.instance,
            key: &in_flight.submitted.key,
            now,
        };
        let Applied {
            answer, deliveries, ..
        } = state
            .keyspace
            .apply(asking, &in_flight.submitted.op, &|_| true);
        let key = in_flight.submitted.key.clone();
        let done = (key.clone(), in_flight.submitted.op.clone());
        in_flight.answer = Some(match answer.outcome {
            Outcome::Won { .. } if state.lonely => {
                Err(OpError::Unconfirmed(StoreError::new("too few know it")))
            }
            Outcome::Raised { .. } if state.ageless => Ok(Answer {
                outcome: Outcome::Raised { age: None },
                ..answer
            }),
            _ => Ok(answer),
        });
        for told in deliveries {
            assert!(told.grant.is_none(), "a quorum never stands in a queue");
            state.notify(told.instance, key.clone());
        }
        state.done.push(done);
    }
}

impl Line {
    fn tell(&self, event: StoreEvent) {
        if let Some(listener) = self.config.listener.upgrade() {
            listener.on_event(event);
        }
    }

    fn reply(&self, in_flight: Flight, result: Result<Answer, OpError>) {
        let submitted = in_flight.submitted;
        self.tell(StoreEvent::Replied { submitted, result });
    }

    /// Takes what is under way along: each op is done or not.
    fn break_up(self: &Arc<Self>) {
        if !std::mem::replace(&mut *self.up.lock().unwrap(), false) {
            return;
        }
        let flights: Vec<_> = {
            let state = self.node.lock();
            let ours = state.flights.iter();
            let ours = ours.filter(|(_, in_flight)| Arc::ptr_eq(&in_flight.line, self));
            ours.map(|(id, in_flight)| (*id, in_flight.answer.is_none()))
                .collect()
        };
        for (id, open) in flights {
            if open && self.node.lock().random(2) == 0 {
                self.node.run(id);
            }
            let in_flight = self.node.lock().flights.remove(&id).unwrap();
            self.reply(in_flight, Err(OpError::Unknown(broken())));
        }
        self.tell(StoreEvent::down(broken()));
        let pause = ms(5 + self.node.lock().random(50));
        let line = Arc::downgrade(self);
        tokio::spawn(async move {
            sleep(pause).await;
            let Some(line) = line.upgrade() else { return };
            let is_up = line.node.lock().mode == Mode::Up;
            if is_up {
                line.come_up();
            }
        });
    }

    fn come_up(&self) {
        if self.node.lock().parted.contains(&self.config.instance) {
            return;
        }
        if !std::mem::replace(&mut *self.up.lock().unwrap(), true) {
            self.tell(StoreEvent::up(true));
        }
    }
}

impl Session for NodeSession {
    fn start(&self) {}

    fn identity(&self) -> Option<Arc<str>> {
        Some(format!("{:p}", self.0.node).into())
    }

    fn submit(&self, submitted: SubmittedOp) {
        let line = self.0.clone();
        if !*line.up.lock().unwrap() {
            let result = Err(OpError::Unsent(broken()));
            return line.tell(StoreEvent::Replied { submitted, result });
        }
        let mut state = line.node.lock();
        if state.drops > 0 {
            state.drops -= 1;
            // Under the node's lock: nothing is called that would take it.
            drop(submitted);
            return;
        }
        let same = |in_flight: &&Flight| {
            Arc::ptr_eq(&in_flight.line, &line) && in_flight.submitted.key == submitted.key
        };
        let before = state.flights.values().find(same);
        if let Some(before) = before {
            panic!(
                "{submitted:?} while {:?} is under way to the same node",
                before.submitted
            );
        }
        state.last += 1;
        let id = state.last;
        let (there, back) = (state.delay(), state.delay());
        let lost = state.loses > state.random(1000);
        let in_flight = Flight {
            line: line.clone(),
            submitted,
            answer: None,
        };
        state.flights.insert(id, in_flight);
        drop(state);
        if there.is_zero() && back.is_zero() && line.node.lock().mode == Mode::Up && !lost {
            line.node.run(id);
            return arrive(&line, id);
        }
        let overdue = Instant::now() + line.config.response_timeout;
        tokio::spawn(async move {
            sleep(there).await;
            if line.node.lock().mode == Mode::Up {
                line.node.run(id);
            }
            sleep(back).await;
            let answered = {
                let state = line.node.lock();
                let in_flight = state.flights.get(&id);
                let Some(in_flight) = in_flight else { return };
                in_flight.answer.is_some() && state.mode == Mode::Up
            };
            if answered && !lost {
                return arrive(&line, id);
            }
            if !lost {
                tokio::time::sleep_until(overdue).await;
            }
            if line.node.lock().flights.contains_key(&id) {
                line.break_up();
            }
        });
    }

    fn check(&self) -> BoxFuture<'static, Result<crate::base::Check, StoreError>> {
        unreachable!("nobody asks")
    }

    fn ask(&self, _: Arc<str>, _: Op) -> BoxFuture<'static, OpResult> {
        unreachable!("nobody asks")
    }

    fn inspect(&self, key: Arc<str>) -> BoxFuture<'static, Result<KeyStatus, StoreError>> {
        let line = self.0.clone();
        async move {
            if !*line.up.lock().unwrap() {
                return Err(broken());
            }
            while line.node.lock().mode == Mode::Stuck {
                sleep(ms(100)).await;
            }
            let now = line.node.now();
            let mut state = line.node.lock();
            Ok(state
                .keyspace
                .inspect(&line.config.prefix, &key, now, &|_| true))
        }
        .boxed()
    }
}

fn arrive(line: &Arc<Line>, id: u64) {
    let in_flight = line.node.lock().flights.remove(&id);
    if let Some(mut in_flight) = in_flight {
        let result = in_flight.answer.take().unwrap();
        line.reply(in_flight, result);
    }
}

impl LockStore for Node {
    fn open(&self, config: SessionConfig) -> Arc<dyn Session> {
        let mut state = self.0.lock();
        let up = Mutex::new(state.mode != Mode::Away);
        let instance = config.instance.clone();
        let node = self.0.me.upgrade().unwrap();
        let line = Arc::new(Line { node, config, up });
        state.lines.insert(instance, Arc::downgrade(&line));
        Arc::new(NodeSession(line))
    }
}

impl sealed::Sealed for Node {}

impl fmt::Debug for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Node").finish_non_exhaustive()
    }
}

impl fmt::Debug for NodeSession {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NodeSession").finish_non_exhaustive()
    }
}

/// The owners of a key, each counted once a node.
pub(super) fn owners(nodes: &[Node], key: &str) -> HashSet<String> {
    nodes.iter().filter_map(|node| node.owner(key)).collect()
}
