//! One registry's session with a quorum: a session with each node, and the state that their events change.

use std::any::Any;
use std::cmp::Reverse;
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures::future::{BoxFuture, join_all};
use futures::stream::{self, BoxStream, FuturesUnordered, StreamExt};
use futures::{FutureExt, TryFutureExt};
use tokio::time::Instant;

use super::ballot::Quorum;
use super::fault::{Fault, too_few};
use super::quarantine::Quarantine;
use super::state::QuorumState;
use crate::base::mutex::{Mutex, MutexGuard};
use crate::base::sync::Notify;
use crate::base::user_code::log;
use crate::base::{Check, StoreError, thread_end};
use crate::roaming::runtime;
use crate::roaming::time::{sleep_until, timeout, timeout_at};
use crate::store::LockStore;
use crate::store::contract::{
    Answer, DroppedOps, Holder, KeyScope, KeyStatus, Op, OpError, OpResult, Outcome, Session,
    SessionConfig, StoreEvent, StoreEvents, SubmittedOp,
};
use crate::store::notifier::OrderedNotifier;

pub(super) struct QuorumSession {
    core: Arc<Core>,
}

struct Core {
    config: SessionConfig,
    nodes: Vec<NodeSession>,
    state: Mutex<QuorumState>,
    notifier: OrderedNotifier,
    /// Notified after each change of the state: the drop of a session waits for the last one.
    changed: Notify,
}

struct NodeSession {
    session: Arc<dyn Session>,
    /// The ops that the node sessions have lost: read at each start and timer.
    lost: Arc<DroppedOps>,
    /// The node sessions hold it weakly.
    _listener: Arc<dyn StoreEvents>,
}

/// Receives the events of one node.
struct NodeEvents {
    core: Weak<Core>,
    registry: Weak<dyn StoreEvents>,
    node: usize,
}

impl QuorumSession {
    pub(super) fn new(
        stores: &[Arc<dyn LockStore>],
        quarantine: Quarantine,
        config: SessionConfig,
    ) -> Self {
        let name = |(number, store): (usize, &Arc<dyn LockStore>)| {
            let unnamed = || format!("node {}", number + 1);
            store.place().unwrap_or_else(unnamed)
        };
        let names = stores.iter().enumerate().map(name).collect();
        let core = Arc::new_cyclic(|core: &Weak<Core>| {
            let open = |(node, store): (usize, &Arc<dyn LockStore>)| {
                let listener: Arc<dyn StoreEvents> = Arc::new(NodeEvents {
                    core: core.clone(),
                    registry: config.listener.clone(),
                    node,
                });
                NodeSession {
                    session: store.open(SessionConfig {
                        listener: Arc::downgrade(&listener),
                        ..config.clone()
                    }),
                    lost: Arc::default(),
                    _listener: listener,
                }
            };
            Core {
                nodes: stores.iter().enumerate().map(open).collect(),
                notifier: OrderedNotifier::new(config.listener.clone()),
                state: Mutex::new(QuorumState::new(names, quarantine)),
                changed: Notify::default(),
                config,
            }
        });
        Self { core }
    }

    #[cfg(test)]
    pub(super) fn keys(&self) -> usize {
        self.core.lock().keys()
    }
}

impl Core {
    fn lock(&self) -> MutexGuard<'_, QuorumState> {
        self.state.lock()
    }

    fn quorum(&self) -> Quorum {
        let size = self.nodes.len();
        Quorum { size }
    }

    /// Awaits the answer of a node, for as long as it may take with the time for a first connection.
    async fn in_time<T>(
        &self,
        node: &NodeSession,
        answer: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        let within = self.config.response_timeout + node.session.connects_within();
        let away = |_| Err(Fault::Away.into());
        timeout(within, answer).await.unwrap_or_else(away)
    }

    /// Asks all nodes, until `decide` has a result: it gets each answer, or `None` for an error, and how many are to come.
    async fn ask_all<'a, T, R, F: Future<Output = Result<T, StoreError>>>(
        &'a self,
        ask: impl Fn(&'a NodeSession) -> F,
        mut decide: impl FnMut(Option<T>, usize) -> Option<R>,
    ) -> Result<R, StoreError> {
        let mut asked: FuturesUnordered<_> = self.nodes.iter().map(ask).collect();
        let mut errors = Vec::new();
        while let Some(answer) = asked.next().await {
            let answer = answer.map_err(|error| errors.push(error)).ok();
            if let Some(result) = decide(answer, asked.len()) {
                return Ok(result);
            }
        }
        Err(too_few(self.quorum(), errors.iter()))
    }

    /// Changes the state, and does what follows once it is unlocked.
    fn handle(self: &Arc<Self>, event: impl FnOnce(&mut QuorumState, Instant)) {
        let mut state = self.lock();
        let now = thread_end::now();
        event(&mut state, now);
        let timer = state.next_timer(now);
        let mut deferred = std::mem::take(&mut state.deferred);
        self.notifier.put(deferred.events.drain(..));
        drop(state);
        self.changed.notify_one();
        if let Some(error) = &deferred.same_server {
            log!(error, %error, "a node of the quorum has no vote");
        }
        // At most one op for each node and key is in flight, so any thread may send it.
        for (node, key, op) in deferred.sends {
            let node = &self.nodes[node];
            node.session.submit(SubmittedOp::new(key, op, &node.lost));
        }
        if let Some(end) = timer
            && let Some(runtime) = runtime()
        {
            let core = Arc::downgrade(self);
            self.config.spawn(&runtime, async move {
                sleep_until(end).await;
                if let Some(core) = core.upgrade() {
                    core.tick();
                }
            });
        }
        self.notifier.tell();
    }

    /// Does what is due, and handles lost ops.
    fn tick(self: &Arc<Self>) {
        self.handle(|state, now| {
            for (at, node) in self.nodes.iter().enumerate() {
                for (key, op) in node.lost.take() {
                    state.op_dropped(now, at, &key, &op);
                }
            }
            state.tick(now);
        });
    }
}

impl StoreEvents for NodeEvents {
    fn on_events(&self, events: Vec<StoreEvent>) {
        if let Some(core) = self.core.upgrade() {
            core.handle(|state, now| {
                for event in events {
                    match event {
                        StoreEvent::Replied {
                            mut submitted,
                            result,
                        } => {
                            submitted.answered();
                            state.replied(now, self.node, &submitted.key, result);
                        }
                        StoreEvent::Up { .. } => {
                            let identity = core.nodes[self.node].session.identity();
                            state.came_up(now, self.node, identity);
                        }
                        StoreEvent::Down { error, .. } => state.went_down(self.node, error),
                        StoreEvent::Freed { key } => state.freed(now, self.node, &key),
                        // None of our tickets is in a node's queue.
                        StoreEvent::Granted { .. }
                        | StoreEvent::Unconfirmed { .. }
                        | StoreEvent::Unserved { .. } => {}
                    }
                }
            });
        }
    }

    /// A vote that must be released is reason enough for a connection.
    fn uses(&self, scope: &KeyScope) -> bool {
        let is_busy = |core: Arc<Core>| core.lock().is_busy();
        let registry = self.registry.upgrade();
        registry.is_some_and(|it| it.uses(scope)) || self.core.upgrade().is_some_and(is_busy)
    }

    fn failed(&self, panicked: &(dyn Any + Send)) {
        if let Some(registry) = self.registry.upgrade() {
            registry.failed(panicked);
        }
    }

    /// None of our tickets is in a node's queue.
    fn waits(&self, _: &str) -> bool {
        false
    }
}

impl Session for QuorumSession {
    fn start(&self) {
        self.core.nodes.iter().for_each(|node| node.session.start());
        // The runtime of the timer may have ended.
        let is_overdue = self.core.lock().start(Instant::now());
        if is_overdue || self.core.nodes.iter().any(|node| !node.lost.is_empty()) {
            self.core.tick();
        }
    }

    fn submit(&self, submitted: SubmittedOp) {
        self.core.handle(|state, now| state.submit(now, submitted));
    }

    fn connects_within(&self) -> Duration {
        let nodes = self.core.nodes.iter();
        let each = nodes.map(|node| node.session.connects_within());
        each.max().unwrap_or_default()
    }

    /// It can be used if a majority of the nodes can.
    fn check(&self) -> BoxFuture<'static, Result<Check, StoreError>> {
        let core = self.core.clone();
        async move {
            let quorum = core.quorum();
            let checks = join_all(core.nodes.iter().map(|node| node.session.check())).await;
            let (usable, failed): (Vec<_>, Vec<_>) = checks.into_iter().partition(Result::is_ok);
            let failed: Vec<_> = failed.into_iter().filter_map(Result::err).collect();
            if usable.len() < quorum.majority() {
                return Err(too_few(quorum, failed.iter()));
            }
            let usable = usable.into_iter().flatten();
            Ok(Check {
                servers: usable.flat_map(|check| check.servers).collect(),
                failed,
                shares: false,
            })
        }
        .boxed()
    }

    /// All nodes are asked, and a majority must answer.
    fn ping(&self, within: Duration) -> BoxFuture<'static, Result<(), StoreError>> {
        let core = self.core.clone();
        async move {
            let mut answers = 0;
            let decide = |answer: Option<()>, _| {
                answers += usize::from(answer.is_some());
                (answers >= core.quorum().majority()).then_some(())
            };
            core.ask_all(|node| node.session.ping(within), decide).await
        }
        .boxed()
    }

    /// Asks all nodes whether the owner has the lock, or had it until now: the answer is that of a majority.
    fn ask(&self, key: Arc<str>, op: Op) -> BoxFuture<'static, OpResult> {
        let core = self.core.clone();
        async move {
            let (quorum, mut has, mut has_not) = (core.quorum(), 0, 0);
            let decide = |answer: Option<Answer>, _| {
                match answer?.outcome {
                    Outcome::Renewed | Outcome::Gone { held: true } => has += 1,
                    _ => has_not += 1,
                }
                let has_it = has >= quorum.majority();
                (has_it || has_not > quorum.spare()).then_some(has_it)
            };
            let asked = core.ask_all(
                |node| {
                    let asked = node.session.ask(key.clone(), op.clone());
                    core.in_time(node, asked.map_err(|error| error.store_error().clone()))
                },
                decide,
            );
            let has_it = asked.await.map_err(OpError::Unknown)?;
            let outcome = match (&op, has_it) {
                (Op::Evict { .. }, held) => Outcome::Gone { held },
                (_, true) => Outcome::Renewed,
                (_, false) => Outcome::Lost,
            };
            Ok(Answer { at: 0, outcome })
        }
        .boxed()
    }

    fn inspect(&self, key: Arc<str>) -> BoxFuture<'static, Result<KeyStatus, StoreError>> {
        let core = self.core.clone();
        async move {
            let mut seen = Vec::new();
            let decide = |key_status, to_come| {
                seen.extend(key_status);
                agreed(core.quorum(), &seen, to_come)
            };
            let key = || key.clone();
            core.ask_all(
                |node| core.in_time(node, node.session.inspect(key())),
                decide,
            )
            .await
        }
        .boxed()
    }

    fn scan(&self, _start: Arc<str>) -> BoxStream<'static, Result<Vec<Arc<str>>, StoreError>> {
        let error = StoreError::lasting("a quorum cannot list its keys: scan one of its nodes");
        stream::once(async { Err(error) }).boxed()
    }
}

/// Returns the lock state that a majority reports, or `None` if more replies are needed. `to_come` is the number of
/// outstanding replies. After the last reply, assume that silent nodes agree with the most frequent owner.
fn agreed(quorum: Quorum, seen: &[KeyStatus], to_come: usize) -> Option<KeyStatus> {
    let (majority, silent) = (quorum.majority(), quorum.size - seen.len());
    if seen.len() < majority {
        return None;
    }
    let holders = || seen.iter().filter_map(|it| it.holders.first());
    let lefts = |holder: &Holder| {
        let same = holders().filter(|it| it.name == holder.name);
        same.map(|it| it.left).collect::<Vec<_>>()
    };
    let holder = holders().max_by_key(|it| lefts(it).len());
    let mut agreed = KeyStatus::default();
    if let Some(holder) = holder.filter(|it| lefts(it).len() + silent >= majority) {
        let mut lefts = lefts(holder);
        if lefts.len() < majority && to_come > 0 {
            return None;
        }
        // A majority has it for that long, or longer; no ttl counts as the longest.
        lefts.sort_unstable_by_key(|left| Reverse(left.unwrap_or(Duration::MAX)));
        agreed.taken = 1;
        agreed.holders.push(Holder {
            left: lefts[majority.min(lefts.len()) - 1],
            ..holder.clone()
        });
    }
    Some(agreed)
}

impl Drop for QuorumSession {
    fn drop(&mut self) {
        // Late votes, and those on nodes that are briefly down, must still be released: for as long as a shutdown
        // waits (O6).
        let core = self.core.clone();
        if core.lock().is_busy()
            && let Some(runtime) = runtime()
        {
            let end = Instant::now() + core.config.response_timeout.saturating_mul(3);
            let config = self.core.config.clone();
            config.spawn(&runtime, async move {
                while core.lock().is_busy()
                    && timeout_at(end, core.changed.notified()).await.is_ok()
                {}
            });
        }
    }
}
