//! A registry's session with a Redis store: takes requests to the node that has their key, and tells
//! the registry what came of them.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use futures::FutureExt;
use futures::channel::oneshot;
use futures::future::BoxFuture;
use redis::aio::MultiplexedConnection;
use tokio::runtime::Handle;
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep_until};

use super::backoff::Backoff;
use super::call::{Job, Wish};
use super::cluster::Address;
use super::fault::{Fault, Refusal};
use super::handshake::{Connected, Purpose};
use super::keys::Names;
use super::node::{NodeTask, Received};
use super::replicas::MinReplicas;
use super::request::Request;
use super::routing::SearchTask;
use super::script::{self, Script};
use super::slots::{Slot, SlotSet};
use super::subscriptions::Subscriptions;
use super::topology::Topology;
use crate::StoreError;
use crate::store::contract::{News, Op, OpError, Opening, Outcome, Scope, Session, Sight};
use crate::store::relay::Relay;
use crate::store::send_window::SendWindow;

/// A node's place in the list of all that a session knows.
pub(super) type NodeId = usize;

pub(super) struct RedisSession {
    shared: Arc<Shared>,
}

/// What a session and its tasks share.
pub(super) struct Shared {
    pub(super) topology: Topology,
    pub(super) opening: Opening,
    pub(super) names: Arc<Names>,
    /// How many replicas must have what is acquired.
    pub(super) min_replicas: Option<MinReplicas>,
    pub(super) script: &'static Script,
    relay: Relay,
    state: Mutex<State>,
    /// Whether a task is to be started as soon as somebody comes with a runtime.
    lacks_task: AtomicBool,
    /// True when the session was dropped.
    closing: watch::Sender<bool>,
}

pub(super) struct State {
    is_closed: bool,
    pub(super) nodes: Vec<Node>,
    /// Of a cluster: one more than the node that has each slot, or 0. `None`: not known yet.
    pub(super) owners: Option<Box<[u16]>>,
    /// What waits until that is known.
    pub(super) unrouted: Vec<Request>,
    /// What is tried again later, by when.
    delayed: BTreeMap<(Instant, u64), Request>,
    /// The number of the last request that was delayed.
    delays: u64,
    /// The slots whose keys wait for a [`News::Up`].
    pub(super) unsettled: SlotSet,
    /// When some of them may be told so.
    settles_at: Option<Instant>,
    /// When the alarm for both rings.
    armed: Option<Instant>,
    /// Whether the registry takes a part of the store to be away.
    owes_complete: bool,
    pub(super) subscriptions: Subscriptions,
    pub(super) search: Search,
    /// What was said in the log already.
    warned: Warned,
    /// Of one server: which run of it answered last.
    identity: Option<Arc<str>>,
}

/// The search for the map of a cluster's slots.
#[derive(Debug, Default)]
pub(super) struct Search {
    pub(super) is_running: bool,
    /// The map is to be asked for (again).
    pub(super) is_due: bool,
    pub(super) backoff: Backoff,
}

#[derive(Debug, Default)]
struct Warned {
    no_push: bool,
    evicts: bool,
    info: bool,
}

/// What a session knows of a node.
pub(super) struct Node {
    pub(super) address: Address,
    /// Its task is to look at what has changed.
    pub(super) wake: Arc<Notify>,
    inbox: Vec<Request>,
    has_task: bool,
    /// A task is to be started without a request: the runtime of the last one has gone.
    resumes: bool,
    /// While it stands.
    pub(super) connection: Option<MultiplexedConnection>,
    /// Its connection was lost, and is needed.
    is_lost: bool,
    backoff: Backoff,
    /// Why it cannot push grants to us, as far as is known.
    pub(super) no_push: Option<String>,
    pub(super) subscriber: super::subscriber::Status,
}

impl State {
    pub(super) fn is_closed(&self) -> bool {
        self.is_closed
    }

    /// The node at an address.
    pub(super) fn node(&mut self, address: &str) -> NodeId {
        let known = self.nodes.iter().position(|node| *node.address == *address);
        known.unwrap_or_else(|| {
            self.nodes.push(Node::new(address.into()));
            self.nodes.len() - 1
        })
    }

    /// The requests that wait for a node which has not their slot any more.
    pub(super) fn take_misplaced(&mut self) -> Vec<Request> {
        let mut misplaced = Vec::new();
        let Some(owners) = &self.owners else {
            return misplaced;
        };
        for (id, node) in self.nodes.iter_mut().enumerate() {
            let is_misplaced = |request: &mut Request| {
                let owner = usize::from(owners[usize::from(request.slot)]);
                request.asking.is_none() && owner != id + 1
            };
            misplaced.extend(node.inbox.extract_if(.., is_misplaced));
        }
        misplaced
    }
}

impl Node {
    fn new(address: Address) -> Self {
        Self {
            address,
            wake: Arc::default(),
            inbox: Vec::new(),
            has_task: false,
            resumes: false,
            connection: None,
            is_lost: false,
            backoff: Backoff::default(),
            no_push: None,
            subscriber: super::subscriber::Status::default(),
        }
    }
}

/// What follows from a change, once the state is unlocked.
#[derive(Default)]
pub(super) struct Effects {
    pub(super) news: Vec<News>,
    /// Answers to looks at locks.
    looks: Vec<Look>,
    /// Nodes whose tasks are to be started.
    pub(super) nodes: Vec<NodeId>,
    pub(super) subscribers: Vec<NodeId>,
    pub(super) searches: bool,
    /// When delayed requests are to be tried again, or the registry told that it may ask again.
    alarm: Option<Instant>,
    /// What is said in the log, which is the user's code.
    logs: Vec<Box<dyn FnOnce() + Send>>,
}

impl Effects {
    pub(super) fn log(&mut self, say: impl FnOnce() + Send + 'static) {
        self.logs.push(Box::new(say));
    }
}

type Look = (
    oneshot::Sender<Result<Sight, StoreError>>,
    Result<Sight, StoreError>,
);

impl RedisSession {
    pub(super) fn new(
        topology: Topology,
        min_replicas: Option<MinReplicas>,
        opening: Opening,
    ) -> Self {
        let is_cluster = topology.seeds().is_some();
        let (prefix, instance) = (opening.prefix.clone(), opening.instance.clone());
        let names = match is_cluster {
            true => Names::clustered(prefix, instance),
            false => Names::new(prefix, instance),
        };
        let mut nodes = Vec::new();
        if !is_cluster {
            let mut node = Node::new(topology.address().clone());
            // Whoever starts the session is about to ask something.
            node.resumes = true;
            nodes.push(node);
        }
        let state = State {
            is_closed: false,
            nodes,
            owners: None,
            unrouted: Vec::new(),
            delayed: BTreeMap::new(),
            delays: 0,
            unsettled: SlotSet::default(),
            settles_at: None,
            armed: None,
            owes_complete: false,
            subscriptions: Subscriptions::default(),
            search: Search::default(),
            warned: Warned::default(),
            identity: None,
        };
        let shared = Shared {
            topology,
            min_replicas,
            names: Arc::new(names),
            script: match is_cluster {
                true => &script::CLUSTER,
                false => &script::SERVER,
            },
            relay: Relay::new(opening.listener.clone()),
            opening,
            state: Mutex::new(state),
            lacks_task: AtomicBool::new(!is_cluster),
            closing: watch::Sender::new(false),
        };
        Self {
            shared: Arc::new(shared),
        }
    }
}

impl Session for RedisSession {
    fn start(&self) {
        if self.shared.lacks_task.load(Ordering::Relaxed) {
            self.shared.start_tasks();
        }
    }

    fn submit(&self, key: Arc<str>, op: Op) {
        self.shared.submit(Job::new(key, op));
    }

    fn identity(&self) -> Option<Arc<str>> {
        self.shared.lock().identity.clone()
    }

    fn inspect(&self, key: Arc<str>) -> BoxFuture<'static, Result<Sight, StoreError>> {
        let shared = self.shared.clone();
        async move {
            let (answer, answered) = oneshot::channel();
            shared.submit(Job::of(key, Wish::Look(answer)));
            answered
                .await
                .unwrap_or_else(|_| Err(shared.abandoned_error()))
        }
        .boxed()
    }
}

impl Drop for RedisSession {
    fn drop(&mut self) {
        self.shared.change(|state, _| {
            state.is_closed = true;
            for node in &state.nodes {
                node.wake.notify_one();
            }
        });
        self.shared.closing.send_replace(true);
    }
}

impl fmt::Debug for RedisSession {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisSession")
            .field("topology", &self.shared.topology)
            .field("instance", &self.shared.opening.instance)
            .finish_non_exhaustive()
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the state, and then does what follows from that.
    pub(super) fn change<R>(
        self: &Arc<Self>,
        change: impl FnOnce(&mut State, &mut Effects) -> R,
    ) -> R {
        let mut effects = Effects::default();
        let tells;
        let result = {
            let mut state = self.lock();
            let result = change(&mut state, &mut effects);
            tells = !effects.news.is_empty();
            if tells {
                // Under the lock: it is told in the order of the changes.
                self.relay.put(effects.news.drain(..));
            }
            result
        };
        if tells {
            self.relay.tell();
        }
        for (answer, sight) in effects.looks.drain(..) {
            // Whoever asked may have gone.
            let _ = answer.send(sight);
        }
        effects.logs.drain(..).for_each(|say| say());
        self.spawn(effects);
        result
    }

    fn spawn(self: &Arc<Self>, effects: Effects) {
        let has_work = !effects.nodes.is_empty()
            || !effects.subscribers.is_empty()
            || effects.searches
            || effects.alarm.is_some();
        if !has_work {
            return;
        }
        let Ok(runtime) = Handle::try_current() else {
            self.lacks_task.store(true, Ordering::Relaxed);
            return;
        };
        for id in effects.nodes {
            // Made here and not by the task: if the runtime never runs it, its drop says so.
            if let Some(task) = self.node_task(id) {
                runtime.spawn(task.run());
            }
        }
        for id in effects.subscribers {
            if let Some(task) = self.subscriber_task(id) {
                runtime.spawn(task.run());
            }
        }
        if effects.searches {
            runtime.spawn(SearchTask::new(self.clone()).run());
        }
        if let Some(due) = effects.alarm {
            let mut alarm = Alarm {
                shared: Arc::downgrade(self),
                has_rung: false,
            };
            runtime.spawn(async move {
                sleep_until(due).await;
                alarm.ring();
            });
        }
    }

    fn node_task(self: &Arc<Self>, id: NodeId) -> Option<NodeTask> {
        let mut state = self.lock();
        let node = &mut state.nodes[id];
        if std::mem::replace(&mut node.has_task, true) {
            return None;
        }
        node.resumes = false;
        let (address, wake) = (node.address.clone(), node.wake.clone());
        drop(state);
        Some(NodeTask::new(self.clone(), id, address, wake))
    }

    /// Starts what had to wait for a runtime.
    fn start_tasks(self: &Arc<Self>) {
        if Handle::try_current().is_err() || !self.lacks_task.swap(false, Ordering::Relaxed) {
            return;
        }
        self.change(|state, effects| {
            for (id, node) in state.nodes.iter().enumerate() {
                if !node.has_task && (node.resumes || !node.inbox.is_empty()) {
                    effects.nodes.push(id);
                }
                if node.subscriber.lacks_task(&state.subscriptions, id) {
                    effects.subscribers.push(id);
                }
            }
            if state.search.is_due {
                self.search(state, effects);
            }
            state.armed = None;
            self.arm(state, effects);
            if !state.unsettled.is_empty() {
                self.settle_soon(state, effects);
            }
        });
    }

    /// Where a key lies on a cluster; 0 elsewhere.
    fn slot(&self, key: &str) -> Slot {
        match self.is_cluster() {
            true => self.names.slot(key),
            false => 0,
        }
    }

    pub(super) fn is_cluster(&self) -> bool {
        self.topology.seeds().is_some()
    }

    /// A task was dropped with its runtime: somebody with another runtime is to start the next one.
    pub(super) fn lack_task(&self) {
        self.lacks_task.store(true, Ordering::Relaxed);
    }

    /// The known nodes, and the connections of those that stand.
    pub(super) fn nodes(&self) -> Vec<(Address, Option<MultiplexedConnection>)> {
        let state = self.lock();
        let nodes = state.nodes.iter();
        nodes
            .map(|node| (node.address.clone(), node.connection.clone()))
            .collect()
    }

    /// Resolves when the session is dropped.
    pub(super) async fn closed(&self) {
        // An error would mean that this sender is gone.
        let _ = self
            .closing
            .subscribe()
            .wait_for(|is_closed| *is_closed)
            .await;
    }

    pub(super) fn abandoned_error(&self) -> StoreError {
        let address = self.topology.address().clone();
        Fault::Abandoned { address }.into()
    }

    // ---- requests on their way

    fn submit(self: &Arc<Self>, mut job: Job) {
        let slot = self.slot(&job.key);
        if self.is_cluster() {
            // Notices that a lock is free need a subscription each: who listens asks by its policy
            // instead (W7).
            job.listen_to_nothing();
        }
        let mut request = Request::new(job, slot, Instant::now());
        self.change(|state, effects| {
            if self.is_cluster()
                && request.enters()
                && !state.subscriptions.contains(&request.job.key)
            {
                request.attempt_first();
            }
            self.route(state, request, effects);
        });
    }

    pub(super) fn owner(&self, state: &State, slot: Slot) -> Option<NodeId> {
        if !self.is_cluster() {
            return Some(0);
        }
        let owner = state.owners.as_ref()?[usize::from(slot)];
        usize::from(owner).checked_sub(1)
    }

    pub(super) fn route(&self, state: &mut State, request: Request, effects: &mut Effects) {
        let owner = request.asking.or_else(|| self.owner(state, request.slot));
        match owner {
            Some(id) if self.is_cluster() && request.enters() && request.asking.is_none() => {
                self.enter(state, id, request, effects);
            }
            Some(id) => self.hand_to(state, id, request, effects),
            None if state.owners.is_none() => {
                state.unrouted.push(request);
                self.search(state, effects);
            }
            None => {
                self.search(state, effects);
                let refusal = Refusal::parse("CLUSTERDOWN nobody has the slot");
                self.delay(state, request, &refusal, effects);
            }
        }
    }

    pub(super) fn hand_to(
        &self,
        state: &mut State,
        id: NodeId,
        request: Request,
        effects: &mut Effects,
    ) {
        let node = &mut state.nodes[id];
        node.inbox.push(request);
        if node.has_task {
            node.wake.notify_one();
        } else {
            effects.nodes.push(id);
        }
    }

    /// A ticket is entered once the grants of its key are heard.
    fn enter(&self, state: &mut State, id: NodeId, request: Request, effects: &mut Effects) {
        if let Some(reason) = state.nodes[id].no_push.clone() {
            // The registry is told in a moment that it must not stand in a queue there (W5).
            let address = state.nodes[id].address.clone();
            let error = OpError::Unsent(Fault::NoPush { address, reason }.into());
            self.answer(state, request, Err(error), effects);
            self.settle_soon(state, effects);
            return;
        }
        match state.subscriptions.enter(id, request) {
            Some(request) => self.hand_to(state, id, request, effects),
            None => self.wake_subscribers(state, effects),
        }
    }

    /// Tries again after a pause, as long as the answer is of use.
    pub(super) fn delay(
        &self,
        state: &mut State,
        mut request: Request,
        refusal: &Refusal,
        effects: &mut Effects,
    ) {
        let now = Instant::now();
        let patience = request.since + self.opening.response_timeout * 3 / 4;
        let patience = request.useful_until().unwrap_or(patience);
        if now >= patience {
            let owner = self.owner(state, request.slot);
            let owner = owner.map(|id| &state.nodes[id].address);
            let fault = Fault::Refused {
                address: owner.unwrap_or(self.topology.address()).clone(),
                refusal: refusal.clone(),
            };
            self.answer(state, request, Err(OpError::Refused(fault.into())), effects);
            return;
        }
        let pause = std::time::Duration::from_millis(10 << request.delays.min(4));
        let due = now + pause.mul_f64(rand::random_range(0.5..=1.0));
        let due = due.min(patience);
        request.delays += 1;
        request.hops = 0;
        request.asking = None;
        state.delays += 1;
        state.delayed.insert((due, state.delays), request);
        self.arm(state, effects);
    }

    /// Sees to it that the alarm rings for whatever comes first.
    fn arm(&self, state: &mut State, effects: &mut Effects) {
        let delayed = state.delayed.first_key_value().map(|((due, _), _)| *due);
        let Some(due) = delayed.into_iter().chain(state.settles_at).min() else {
            return;
        };
        if state.armed.is_none_or(|armed| due < armed) {
            state.armed = Some(due);
            effects.alarm = Some(due);
        }
    }

    /// Routes what was delayed, and tells the registry of what it may ask again.
    fn try_again(self: &Arc<Self>) {
        self.change(|state, effects| {
            let now = Instant::now();
            state.armed = None;
            while let Some(first) = state.delayed.first_entry()
                && first.key().0 <= now
            {
                let request = first.remove();
                self.route(state, request, effects);
            }
            if state.settles_at.is_some_and(|due| due <= now) {
                state.settles_at = None;
                self.settle(state, effects);
            }
            self.arm(state, effects);
        });
    }

    // ---- answers on their way

    /// Tells the registry what a node said.
    pub(super) fn received(self: &Arc<Self>, id: NodeId, received: &mut Vec<Received>) {
        if received.is_empty() {
            return;
        }
        self.change(|state, effects| {
            for received in received.drain(..) {
                match received {
                    Received::Granted { key, grant } if self.min_replicas.is_some() => {
                        let slot = self.slot(&key);
                        let request = Request::granted(key, grant, slot, Instant::now());
                        self.route(state, request, effects);
                    }
                    Received::Granted { key, grant } => {
                        effects.news.push(News::Granted { key, grant });
                    }
                    Received::Confirmed { request } => {
                        effects.news.extend(request.held.map(|held| held.news));
                    }
                    Received::Refused { request, refusal } => {
                        self.on_refused(state, id, request, &refusal, effects);
                    }
                    Received::Unconfirmed { request, fault } => {
                        let error = OpError::Unconfirmed(fault.into());
                        self.answer(state, request, Err(error), effects);
                    }
                    Received::Freed { key } => effects.news.push(News::Freed { key }),
                    Received::TooLate { request } => {
                        let address = state.nodes[id].address.clone();
                        let error = OpError::TooLate(Fault::TooLate { address }.into());
                        self.answer(state, request, Err(error), effects);
                    }
                    Received::Answer {
                        request,
                        at,
                        verdict,
                    } => self.on_verdict(state, id, request, at, verdict, effects),
                }
            }
        });
    }

    pub(super) fn refuse(
        &self,
        state: &mut State,
        id: NodeId,
        request: Request,
        refusal: &Refusal,
        effects: &mut Effects,
    ) {
        let address = state.nodes[id].address.clone();
        let fault = match self.is_cluster() {
            true => Fault::Refused {
                address,
                refusal: refusal.clone().naming(&self.names),
            },
            false => Fault::refused(address, refusal.clone(), &self.names),
        };
        self.answer(state, request, Err(OpError::Refused(fault.into())), effects);
    }

    pub(super) fn answer(
        &self,
        state: &mut State,
        mut request: Request,
        result: Result<crate::store::contract::Answer, OpError>,
        effects: &mut Effects,
    ) {
        request.restore_enter();
        if let Err(OpError::Unknown(_) | OpError::Unsent(_)) = &result {
            state.unsettled.insert(request.slot);
        }
        if let Some(held) = request.held {
            let failed = result.err().and_then(|error| held.failed(error));
            effects.news.extend(failed);
            return;
        }
        if let (Some(_), Wish::Op { op, .. }, Ok(answer)) =
            (self.min_replicas, &request.job.wish, &result)
            && let (Outcome::Won { .. }, Some(owner)) = (&answer.outcome, Request::winner(op))
        {
            // It is told when replicas have it.
            let (key, op) = (request.job.key.clone(), op.clone());
            request.hold(owner, News::Replied { key, op, result });
            self.route(state, request, effects);
            return;
        }
        match request.job.wish {
            Wish::Op { op, .. } => effects.news.push(News::Replied {
                key: request.job.key,
                op,
                result,
            }),
            Wish::Look(answer) => {
                if let Err(error) = result {
                    effects
                        .looks
                        .push((answer, Err(error.store_error().clone())));
                }
            }
        }
    }

    pub(super) fn answer_look(
        &self,
        answer: oneshot::Sender<Result<Sight, StoreError>>,
        sight: Sight,
        effects: &mut Effects,
    ) {
        effects.looks.push((answer, Ok(sight)));
    }

    // ---- connections

    /// The slots of a node; of one server the one that stands for all.
    pub(super) fn slots_of(&self, state: &State, id: NodeId) -> SlotSet {
        match &state.owners {
            Some(owners) => SlotSet::of(owners, |owner| usize::from(*owner) == id + 1),
            None if self.is_cluster() => SlotSet::default(),
            None => SlotSet::from_iter([0]),
        }
    }

    /// The keys in these slots.
    pub(super) fn scope(&self, slots: SlotSet) -> Scope {
        if !self.is_cluster() {
            return Scope::All;
        }
        let names = self.names.clone();
        Scope::Keys(Arc::new(move |key| slots.contains(names.slot(key))))
    }

    /// Whether the registry holds or waits for a key of this node.
    pub(super) fn is_needed(&self, id: NodeId) -> bool {
        let slots = self.slots_of(&self.lock(), id);
        let scope = self.scope(slots);
        let listener = self.opening.listener.upgrade();
        listener.is_some_and(|listener| listener.uses(&scope))
    }

    /// When the node's task is to connect; `None`: not at all, and the task ends.
    pub(super) fn next_attempt(self: &Arc<Self>, id: NodeId) -> Option<Option<Instant>> {
        let has_requests = {
            let state = self.lock();
            // Of one that is closed, `abandoned` answers what is left.
            state.is_closed || !state.nodes[id].inbox.is_empty()
        };
        // Without the lock: it asks the registry, which has a lock of its own.
        let is_needed = has_requests || self.is_needed(id);
        self.change(|state, effects| {
            let node = &mut state.nodes[id];
            if is_needed || !node.inbox.is_empty() {
                return Some(node.backoff.not_before());
            }
            node.has_task = false;
            // Nobody there waits to be told.
            let slots = self.slots_of(state, id);
            state.unsettled.take(&slots);
            if slots.is_empty() {
                // Its slots are elsewhere by now.
                state.nodes[id].is_lost = false;
                self.settle(state, effects);
            }
            None
        })
    }

    /// What the node's connection is for.
    pub(super) fn purpose(&self, id: NodeId) -> Purpose {
        if !self.is_cluster() {
            return Purpose::Server;
        }
        let state = self.lock();
        match self.names.only_slot() {
            Some(slot) if self.owner(&state, slot) == Some(id) => Purpose::Primary(slot),
            Some(_) => Purpose::Importing,
            None => match self.slots_of(&state, id).iter().next() {
                Some(slot) => Purpose::Primary(slot),
                None => Purpose::Importing,
            },
        }
    }

    /// A connection to the node stands.
    pub(super) fn connected(self: &Arc<Self>, id: NodeId, connected: &mut Connected) {
        let no_push = connected.no_push.clone();
        self.change(|state, effects| {
            let was_lost = {
                let node = &mut state.nodes[id];
                let (address, no_push) = (node.address.clone(), no_push.clone());
                node.no_push.clone_from(&no_push);
                effects.log(move || {
                    tracing::debug!(address = &*address, ?no_push, "connected");
                });
                node.connection = Some(connected.link.connection.clone());
                std::mem::take(&mut node.is_lost)
            };
            self.warn(state, id, connected, effects);
            if !self.is_cluster() {
                state.identity.clone_from(&connected.server.run_id);
            }
            // What waited for longer than an answer may take is asked anew, if it is still wanted.
            let now = Instant::now();
            let is_old =
                |it: &mut Request| it.asks() && it.since + self.opening.response_timeout <= now;
            let old: Vec<_> = state.nodes[id].inbox.extract_if(.., is_old).collect();
            for request in old {
                let address = state.nodes[id].address.clone();
                let within = self.opening.response_timeout;
                let error = OpError::Unsent(Fault::Silent { address, within }.into());
                self.answer(state, request, Err(error), effects);
            }
            state.unsettled.extend(&self.slots_of(state, id));
            self.settle(state, effects);
            if was_lost && self.is_cluster() {
                self.search(state, effects);
            }
        });
    }

    fn warn(&self, state: &mut State, id: NodeId, connected: &Connected, effects: &mut Effects) {
        if let Some(reason) = &connected.no_push {
            self.warn_of_no_push(state, id, reason.clone(), effects);
        }
        let address = state.nodes[id].address.clone();
        let server = &connected.server;
        if let Some(policy) = &server.evicts
            && !std::mem::replace(&mut state.warned.evicts, true)
        {
            let (address, policy) = (address.clone(), policy.clone());
            effects.log(move || {
                tracing::warn!(
                    address = &*address,
                    policy,
                    "this server may evict locks when its memory is full: set maxmemory-policy to noeviction"
                );
            });
        }
        if let Some(refusal) = &server.refusal
            && !std::mem::replace(&mut state.warned.info, true)
        {
            let refusal = refusal.clone();
            effects.log(move || {
                tracing::warn!(
                    address = &*address,
                    %refusal,
                    "no right to INFO: the server's identity and memory policy are unknown"
                );
            });
        }
    }

    pub(super) fn warn_of_no_push(
        &self,
        state: &mut State,
        id: NodeId,
        reason: String,
        effects: &mut Effects,
    ) {
        if !std::mem::replace(&mut state.warned.no_push, true) {
            let address = state.nodes[id].address.clone();
            effects.log(move || {
                tracing::warn!(
                    address = &*address,
                    reason,
                    "this server cannot push grants to us: busy locks are asked for again and again"
                );
            });
        }
    }

    /// Hands a node's requests to its task; true: the session was dropped.
    pub(super) fn take(
        &self,
        id: NodeId,
        window: &mut SendWindow<Request, Instant>,
        to_confirm: &mut Vec<Request>,
    ) -> bool {
        let mut state = self.lock();
        let inbox = &mut state.nodes[id].inbox;
        to_confirm.extend(inbox.extract_if(.., |request| request.held.is_some()));
        window.add(inbox.drain(..));
        state.is_closed
    }

    /// A connection was closed for want of use.
    pub(super) fn closed_idle(&self, id: NodeId) {
        self.lock().nodes[id].connection = None;
    }

    /// A connection was lost, or could not be made.
    pub(super) fn lost(
        self: &Arc<Self>,
        id: NodeId,
        fault: Fault,
        mut sent: Vec<Request>,
        unsent: Vec<Request>,
        stood_since: Option<Instant>,
    ) {
        let error = StoreError::from(fault);
        self.change(|state, effects| {
            let node = &mut state.nodes[id];
            let (address, told) = (node.address.clone(), error.clone());
            effects.log(move || {
                tracing::debug!(address = &*address, error = %told, "lost the connection");
            });
            node.connection = None;
            node.is_lost = true;
            node.backoff.failed(Instant::now(), stood_since);
            let mut waiting = unsent;
            sent.extend(node.inbox.extract_if(.., |request| request.held.is_some()));
            waiting.append(&mut node.inbox);
            for request in sent {
                self.answer(
                    state,
                    request,
                    Err(OpError::Unknown(error.clone())),
                    effects,
                );
            }
            for mut request in waiting {
                let asked = request.asking.take().is_some();
                if asked || stood_since.is_some() {
                    // Not sent: it waits for the next attempt.
                    self.route(state, request, effects);
                } else {
                    self.answer(state, request, Err(OpError::Unsent(error.clone())), effects);
                }
            }
            let slots = self.slots_of(state, id);
            state.unsettled.extend(&slots);
            self.tell_down(state, slots, error, effects);
            if self.is_cluster() {
                self.search(state, effects);
                self.settle_soon(state, effects);
            }
        });
    }

    /// The node's task has ended. `has_begun`: it was polled; else a runtime on its way down has
    /// dropped it, and an answer could start the next task on that runtime, without end.
    pub(super) fn abandoned(
        self: &Arc<Self>,
        id: NodeId,
        has_begun: bool,
        mut sent: Vec<Request>,
        unsent: Vec<Request>,
    ) {
        self.change(|state, effects| {
            let node = &mut state.nodes[id];
            if !std::mem::take(&mut node.has_task) {
                return;
            }
            node.connection = None;
            node.resumes = true;
            self.lack_task();
            if !has_begun {
                return;
            }
            let mut waiting = unsent;
            sent.extend(node.inbox.extract_if(.., |request| request.held.is_some()));
            waiting.append(&mut node.inbox);
            let error = self.abandoned_error();
            for request in sent {
                self.answer(
                    state,
                    request,
                    Err(OpError::Unknown(error.clone())),
                    effects,
                );
            }
            for request in waiting {
                self.answer(state, request, Err(OpError::Unsent(error.clone())), effects);
            }
            let slots = self.slots_of(state, id);
            state.unsettled.extend(&slots);
            self.tell_down(state, slots, error, effects);
        });
    }

    fn tell_down(
        &self,
        state: &mut State,
        slots: SlotSet,
        error: StoreError,
        effects: &mut Effects,
    ) {
        if !slots.is_empty() {
            state.owes_complete = true;
            let scope = self.scope(slots);
            effects.news.push(News::Down { scope, error });
        }
    }

    /// Tells the registry that it may ask again for keys whose node stands.
    pub(super) fn settle(&self, state: &mut State, effects: &mut Effects) {
        let is_known = state.owners.is_some() || !self.is_cluster();
        let complete = is_known && !state.nodes.iter().any(|node| node.is_lost);
        let mut ups = Vec::new();
        for id in 0..state.nodes.len() {
            if state.unsettled.is_empty() {
                break;
            }
            let slots = self.slots_of(state, id);
            if state.nodes[id].connection.is_some() {
                let slots = state.unsettled.take(&slots);
                if !slots.is_empty() {
                    ups.push((slots, state.nodes[id].no_push.is_none()));
                }
            } else if !state.nodes[id].has_task && state.unsettled.intersects(&slots) {
                // It ends at once if nobody needs it.
                effects.nodes.push(id);
            }
        }
        if ups.is_empty() && complete && state.owes_complete {
            ups.push((SlotSet::default(), true));
        }
        for (slots, queue) in ups {
            state.owes_complete = !complete;
            effects.news.push(News::Up {
                scope: self.scope(slots),
                queue,
                complete,
            });
        }
    }

    /// The same in a moment: what is refused at once is not asked again at once.
    pub(super) fn settle_soon(&self, state: &mut State, effects: &mut Effects) {
        let pause = std::time::Duration::from_millis(rand::random_range(20..=50));
        state.settles_at.get_or_insert(Instant::now() + pause);
        self.arm(state, effects);
    }
}

/// Rings when something is to be tried again. Dropped before that, its runtime has gone.
struct Alarm {
    shared: Weak<Shared>,
    has_rung: bool,
}

impl Alarm {
    fn ring(&mut self) {
        self.has_rung = true;
        if let Some(shared) = self.shared.upgrade() {
            shared.try_again();
        }
    }
}

impl Drop for Alarm {
    fn drop(&mut self) {
        if !self.has_rung
            && let Some(shared) = self.shared.upgrade()
        {
            shared.lack_task();
        }
    }
}
