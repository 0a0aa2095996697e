//! What a session knows, and how requests, answers and lost connections change it.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use futures::channel::oneshot;
use futures::future::BoxFuture;
use smallvec::SmallVec;
use tokio::time::Instant;

use super::backend::{Address, Backend, Slot, SlotMap, SlotSet, Trouble};
use super::backoff::Backoff;
use super::node::{NodeTask, Received};
use super::request::{Request, RequestKind};
use super::session::{NodeId, Shared};
use super::subscriptions::Subscriptions;
use crate::base::StoreError;
use crate::base::sync::Notify;
use crate::roaming::runtime;
use crate::store::contract::{Op, OpError, OpResult, Outcome, StoreEvent, SubmittedOp};

/// How many keys are tried for each server that is to be asked.
const PING_TRIES: usize = 64;

/// What a session knows. While it is locked, no code but ours is called.
#[derive(Default)]
pub(super) struct SessionState {
    pub(super) is_closed: bool,
    pub(super) nodes: Vec<Node>,
    /// The node of each slot, if known. A single server has slot 0 alone. Empty until the map is known.
    pub(super) owners: Vec<Option<NodeId>>,
    /// Requests that wait for the map.
    pub(super) unrouted: Vec<Request>,
    /// The slots whose keys wait for a [`StoreEvent::Up`].
    pub(super) unsettled: SlotSet,
    /// Whether the registry believes that a part of the store is down.
    owes_complete: bool,
    pub(super) subscriptions: Subscriptions,
    pub(super) search: Search,
    /// Of a single server: its name, as it last said.
    pub(super) identity: Option<Arc<str>>,
}

/// The search for the map of the slots.
#[derive(Debug, Default)]
pub(super) struct Search {
    pub(super) is_running: bool,
    /// The map must be asked for (again).
    pub(super) is_due: bool,
    pub(super) backoff: Backoff,
}

/// What a session knows of a node.
#[derive(Default)]
pub(super) struct Node {
    pub(super) address: Address,
    /// Its task must look for changes.
    pub(super) wake: Arc<Notify>,
    pub(super) inbox: Vec<Request>,
    pub(super) has_task: bool,
    /// Those who ask it for the map.
    pub(super) maps: Vec<oneshot::Sender<SlotMap>>,
    pub(super) is_connected: bool,
    /// Its connection was lost, and is needed.
    pub(super) is_lost: bool,
    /// Whether a connection was made, or could not be made, since somebody began to use it.
    pub(super) has_tried: bool,
    /// Whether the last attempt at a connection failed.
    pub(super) has_failed: bool,
    pub(super) backoff: Backoff,
    /// Why it cannot push grants to us, as far as is known.
    pub(super) no_push: Option<String>,
}

impl SessionState {
    /// The node at an address.
    pub(super) fn node(&mut self, address: &Address) -> NodeId {
        let find = |address: &str| self.nodes.iter().position(|it| *it.address == *address);
        // A forgotten node has no address; its index is used again.
        let id = find(address).or_else(|| find(""));
        let id = id.unwrap_or(self.nodes.len());
        self.nodes
            .resize_with(self.nodes.len().max(id + 1), Node::default);
        self.nodes[id].address = address.clone();
        id
    }
}

impl Node {
    /// Whether the session may forget it once it has no slot.
    pub(super) fn is_forgettable(&self) -> bool {
        let not_before = self.backoff.not_before();
        let pauses = not_before.is_some_and(|at| Instant::now() < at);
        !self.has_task && !pauses && self.inbox.is_empty()
    }
}

/// What a change causes once the state is unlocked.
#[derive(Default)]
pub(super) struct Effects {
    pub(super) events: Vec<StoreEvent>,
    /// Keys without a subscription for a while: their tickets may have been dropped, and their grants missed.
    pub(super) doubtful: HashSet<Arc<str>>,
    /// What single callers have asked for is sent to them.
    pub(super) answers: Vec<Box<dyn FnOnce() + Send>>,
    /// Nodes with a new request. They are notified without the lock, since a woken task may run at once.
    pub(super) woken: SmallVec<[Arc<Notify>; 1]>,
    /// Tasks to spawn. A task that is dropped before its first poll tells the session.
    pub(super) tasks: Vec<BoxFuture<'static, ()>>,
}

impl Effects {
    pub(super) fn answer<T: Send + 'static>(&mut self, caller: oneshot::Sender<T>, answer: T) {
        // The caller may have gone.
        self.answers.push(Box::new(|| drop(caller.send(answer))));
    }
}

/// A change of the state, which is locked meanwhile.
pub(super) struct Change<'a, B: Backend> {
    pub(super) shared: &'a Arc<Shared<B>>,
    pub(super) state: &'a mut SessionState,
    pub(super) effects: &'a mut Effects,
}

/// Requests on their way to a node.
impl<B: Backend> Change<'_, B> {
    pub(super) fn owner(&self, slot: Slot) -> Option<NodeId> {
        *self.state.owners.get(usize::from(slot))?
    }

    /// A key of each server in use, to ask the server about; of any server if none is in use.
    pub(super) fn pinged(&self) -> Vec<(Address, Arc<str>)> {
        let nodes = &self.state.nodes;
        let in_use = |id: &NodeId| nodes[*id].has_task;
        let owners = self.state.owners.iter().flatten();
        let mut wanted: BTreeSet<_> = owners.copied().filter(in_use).collect();
        let mut pinged = Vec::new();
        // One with very few slots is not worth more tries.
        for number in 0..PING_TRIES * wanted.len() {
            let key: Arc<str> = format!("ping {number}").into();
            if let Some(id) = self.owner(self.shared.backend.slot(&key))
                && wanted.remove(&id)
            {
                pinged.push((nodes[id].address.clone(), key));
            }
            if wanted.is_empty() {
                break;
            }
        }
        if pinged.is_empty() {
            pinged.push((self.shared.backend.address().clone(), "ping".into()));
        }
        pinged
    }

    pub(super) fn route(&mut self, request: Request) {
        let subscribes = self.shared.has_map() && request.enters() && request.asking.is_none();
        match request.asking.or_else(|| self.owner(request.slot)) {
            Some(id) if subscribes => self.enter(id, request),
            Some(id) => self.hand_to(id, request),
            None => {
                self.search();
                if self.state.owners.is_empty() {
                    self.state.unrouted.push(request);
                } else {
                    let error = self.shared.error(Trouble::NoOwner);
                    self.delay(request, error);
                }
            }
        }
    }

    pub(super) fn hand_to(&mut self, id: NodeId, request: Request) {
        let node = &mut self.state.nodes[id];
        node.inbox.push(request);
        self.effects.woken.push(node.wake.clone());
        self.start_node(id);
    }

    fn start_node(&mut self, id: NodeId) {
        let node = &mut self.state.nodes[id];
        if node.has_task {
            return;
        } else if runtime().is_none() {
            // A caller with a runtime starts it later.
            return self.shared.lack_task();
        }
        node.has_task = true;
        let (address, wake) = (node.address.clone(), node.wake.clone());
        let task = NodeTask::new(self.shared.clone(), id, address, wake);
        self.effects.tasks.push(task.run().boxed());
    }

    /// A ticket is entered only after the subscription to its grants is confirmed.
    fn enter(&mut self, id: NodeId, request: Request) {
        let node = &self.state.nodes[id];
        if let Some(reason) = &node.no_push {
            // The registry will be told that it must not use a queue there (W5).
            let trouble = Trouble::NoPush(reason);
            let error = self.shared.backend.error(&node.address, trouble);
            self.answer_unsent(request, error);
            self.search();
            return;
        }
        match self.state.subscriptions.enter(id, request) {
            Some(request) => self.hand_to(id, request),
            None => self.follow_orders(),
        }
    }

    /// The nodes have new orders.
    pub(super) fn follow_orders(&mut self) {
        let nodes: Vec<_> = self.state.subscriptions.nodes_with_orders().collect();
        for id in nodes {
            self.effects.woken.push(self.state.nodes[id].wake.clone());
            self.start_node(id);
        }
    }

    /// Starts what had to wait for a runtime.
    pub(super) fn start_tasks(&mut self) {
        for id in 0..self.state.nodes.len() {
            // A forgotten node has no task, and another may get its index before the task runs.
            if self.state.nodes[id].address.is_empty() {
                continue;
            }
            // The task ends at once if nobody needs the node.
            self.start_node(id);
        }
        let is_unsettled = !self.state.unsettled.is_empty() || self.state.owes_complete;
        if self.state.search.is_due || is_unsettled {
            self.search();
        }
    }
}

/// Answers on their way to the registry.
impl<B: Backend> Change<'_, B> {
    pub(super) fn received(&mut self, id: NodeId, received: Received) {
        match received {
            Received::Heard(StoreEvent::Granted { key, grant })
                if self.shared.backend.confirms() =>
            {
                let slot = self.shared.backend.slot(&key);
                self.route(Request::granted(key, grant, slot));
            }
            Received::Heard(event) => self.effects.events.push(event),
            Received::Unsubscribed { key } => self.unsubscribed(id, key),
            Received::Confirmed { request } => {
                let confirmed = request.held.map(|held| held.event);
                self.effects.events.extend(confirmed);
            }
            Received::Failed { request, error } => self.answer(request, Err(error)),
            Received::Answer { request, reply } => self.on_reply(id, request, reply),
        }
    }

    /// Nothing of the request was sent.
    pub(super) fn answer_unsent(&mut self, request: Request, error: StoreError) {
        self.answer(request, Err(OpError::Unsent(error)));
    }

    pub(super) fn answer(&mut self, mut request: Request, result: OpResult) {
        if let Err(OpError::Unknown(_) | OpError::Unsent(_)) = &result {
            self.state.unsettled.insert(request.slot);
        }
        if let Some(held) = request.held {
            let error = result.err().map(|error| self.unconfirmed(error));
            let failed = error.and_then(|error| held.failed(error));
            return self.effects.events.extend(failed);
        }
        if let (true, RequestKind::Op(submitted), Ok(answer)) =
            (self.shared.backend.confirms(), &mut request.kind, &result)
            && let Outcome::Won { .. } = &answer.outcome
        {
            let owner = match submitted.op {
                Op::Yield { new, .. } => new,
                ref op => op.owner(),
            };
            // It is reported when it is confirmed.
            let asked = SubmittedOp::unattended(submitted.key.clone(), submitted.op.clone());
            let submitted = std::mem::replace(submitted, asked);
            request.hold(owner, StoreEvent::Replied { submitted, result });
            self.route(request);
            return;
        }
        match (request.kind, result) {
            (RequestKind::Op(submitted), result) => {
                let replied = StoreEvent::Replied { submitted, result };
                self.effects.events.push(replied);
            }
            (RequestKind::Asked(_, caller), result) => self.effects.answer(caller, result),
            (RequestKind::Look(_, caller), Err(error)) => {
                let error = error.store_error().clone();
                self.effects.answer(caller, Err(error));
            }
            (RequestKind::Look(..), Ok(_)) => {}
        }
    }

    /// What it means for a lock that was won and not confirmed.
    fn unconfirmed(&self, error: OpError) -> OpError {
        match error {
            OpError::Unsent(error) | OpError::Refused(error) => {
                OpError::Unconfirmed(self.shared.error(Trouble::Unconfirmed(&error)))
            }
            other => other,
        }
    }

    /// Asks again for requests that waited for a connection longer than an answer may take, if they are still wanted.
    pub(super) fn answer_old(&mut self, id: NodeId, within: Duration) {
        let now = Instant::now();
        let node = &mut self.state.nodes[id];
        let is_old = |it: &mut Request| it.asks() && it.since + within <= now;
        let old: Vec<_> = node.inbox.extract_if(.., is_old).collect();
        let trouble = Trouble::Silent(within);
        let error = self.shared.backend.error(&node.address, trouble);
        for request in old {
            self.answer_unsent(request, error.clone());
        }
    }
}

/// Connections that are lost, and stand again.
impl<B: Backend> Change<'_, B> {
    pub(super) fn slots_of(&self, id: NodeId) -> SlotSet {
        let owned = (0..).zip(&self.state.owners);
        let owned = owned.filter(|(_, owner)| **owner == Some(id));
        owned.map(|(slot, _)| slot).collect()
    }

    /// A connection to the node has ended. The requests in `sent` may be done or not.
    pub(super) fn give_up(
        &mut self,
        id: NodeId,
        sent: Vec<Request>,
        unsent: Vec<Request>,
        error: StoreError,
    ) {
        self.state.nodes[id].is_connected = false;
        self.state.nodes[id].maps.clear();
        for request in sent {
            self.answer(request, Err(OpError::Unknown(error.clone())));
        }
        for request in unsent {
            // Those that are to be confirmed were done before.
            match request.held {
                Some(_) => self.answer(request, Err(OpError::Unknown(error.clone()))),
                None => self.answer_unsent(request, error.clone()),
            }
        }
        let slots = self.slots_of(id);
        self.state.unsettled.extend(&slots);
        if !slots.is_empty() {
            self.state.owes_complete = true;
            let scope = self.shared.scope(slots);
            self.effects.events.push(StoreEvent::Down { scope, error });
        }
    }

    /// Tells the registry that it may ask again for keys whose node is connected.
    pub(super) fn settle(&mut self) {
        let is_known = !self.state.owners.is_empty();
        let complete = is_known && !self.state.nodes.iter().any(|node| node.is_lost);
        let mut by_owner = BTreeMap::<_, SlotSet>::new();
        for slot in std::mem::take(&mut self.state.unsettled) {
            by_owner.entry(self.owner(slot)).or_default().insert(slot);
        }
        let mut ups = Vec::new();
        for (owner, slots) in by_owner {
            let node = owner.map(|id| &self.state.nodes[id]);
            if let Some(node) = node.filter(|node| node.is_connected) {
                ups.push((slots, node.no_push.is_none()));
                continue;
            }
            self.state.unsettled.extend(slots);
            if let Some(id) = owner {
                // It ends at once if nobody needs it.
                self.start_node(id);
            }
        }
        if ups.is_empty() && complete && self.state.owes_complete {
            ups.push((SlotSet::default(), true));
        }
        for (slots, queue) in ups {
            self.state.owes_complete = !complete;
            self.effects.events.push(StoreEvent::Up {
                scope: self.shared.scope(slots),
                queue,
                complete,
            });
        }
    }
}
