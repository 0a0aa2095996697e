//! What a session knows, and how requests, answers and lost connections change it.

use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use futures::channel::oneshot;
use futures::future::BoxFuture;
use redis::aio::MultiplexedConnection;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::backoff::Backoff;
use super::cluster::Address;
use super::fault::{Fault, Refusal};
use super::node::{NodeTask, Received};
use super::request::{Request, Wish};
use super::retry::{Retry, RetryTask};
use super::session::{NodeId, Shared};
use super::slots::{Slot, SlotSet};
use super::subscriber;
use super::subscriptions::Subscriptions;
use crate::StoreError;
use crate::store::contract::{Answer, News, OpError, Outcome, Sight};

/// What a session knows. Nothing is called while it is locked that is not ours.
#[derive(Default)]
pub(super) struct State {
    pub(super) is_closed: bool,
    pub(super) nodes: Vec<Node>,
    /// Of a cluster: one more than the node that has each slot, or 0. `None`: not known yet.
    pub(super) owners: Option<Box<[u16]>>,
    /// What waits until that is known.
    pub(super) unrouted: Vec<Request>,
    /// The slots whose keys wait for a [`News::Up`].
    pub(super) unsettled: SlotSet,
    /// Whether they are told so in a moment.
    pub(super) settles_soon: bool,
    /// Whether the registry takes a part of the store to be away.
    owes_complete: bool,
    pub(super) subscriptions: Subscriptions,
    pub(super) search: Search,
    /// Of one server: which run of it answered last.
    pub(super) identity: Option<Arc<str>>,
}

/// The search for the map of a cluster's slots.
#[derive(Debug, Default)]
pub(super) struct Search {
    pub(super) is_running: bool,
    /// The map is to be asked for (again).
    pub(super) is_due: bool,
    pub(super) backoff: Backoff,
}

/// What a session knows of a node.
#[derive(Default)]
pub(super) struct Node {
    pub(super) address: Address,
    /// Its task is to look at what has changed.
    pub(super) wake: Arc<Notify>,
    pub(super) inbox: Vec<Request>,
    pub(super) has_task: bool,
    /// A task is to be started without a request: the runtime of the last one has gone.
    pub(super) resumes: bool,
    /// While it stands.
    pub(super) connection: Option<MultiplexedConnection>,
    /// Its connection was lost, and is needed.
    pub(super) is_lost: bool,
    pub(super) backoff: Backoff,
    /// Why it cannot push grants to us, as far as is known.
    pub(super) no_push: Option<String>,
    pub(super) subscriber: subscriber::Status,
}

impl State {
    /// The node at an address.
    pub(super) fn node(&mut self, address: &Address) -> NodeId {
        let known = self.nodes.iter().position(|node| node.address == *address);
        known.unwrap_or_else(|| {
            self.nodes.push(Node {
                address: address.clone(),
                ..Node::default()
            });
            self.nodes.len() - 1
        })
    }
}

/// What follows from a change, once the state is unlocked.
#[derive(Default)]
pub(super) struct Effects {
    pub(super) news: Vec<News>,
    /// Answers to looks at locks.
    pub(super) looks: Vec<Look>,
    /// What is to be spawned. Dropped before it was ever polled, each says so to the session.
    pub(super) tasks: Vec<BoxFuture<'static, ()>>,
}

type Look = (
    oneshot::Sender<Result<Sight, StoreError>>,
    Result<Sight, StoreError>,
);

/// A change of the state, which is locked meanwhile.
pub(super) struct Change<'a> {
    pub(super) shared: &'a Arc<Shared>,
    pub(super) state: &'a mut State,
    pub(super) effects: &'a mut Effects,
}

/// Requests on their way to a node.
impl Change<'_> {
    pub(super) fn submit(&mut self, mut request: Request) {
        let is_heard = self.state.subscriptions.contains(&request.key);
        if self.shared.is_cluster() && request.enters() && !is_heard {
            request.attempt_first();
        }
        self.route(request);
    }

    fn owner(&self, slot: Slot) -> Option<NodeId> {
        if !self.shared.is_cluster() {
            return Some(0);
        }
        let owner = self.state.owners.as_ref()?[usize::from(slot)];
        usize::from(owner).checked_sub(1)
    }

    pub(super) fn route(&mut self, request: Request) {
        let owner = request.asking.or_else(|| self.owner(request.slot));
        match owner {
            Some(id)
                if self.shared.is_cluster() && request.enters() && request.asking.is_none() =>
            {
                self.enter(id, request);
            }
            Some(id) => self.hand_to(id, request),
            None if self.state.owners.is_none() => {
                self.state.unrouted.push(request);
                self.search();
            }
            None => {
                self.search();
                let refusal = Refusal::parse("CLUSTERDOWN nobody has the slot");
                self.delay(request, &refusal);
            }
        }
    }

    pub(super) fn hand_to(&mut self, id: NodeId, request: Request) {
        let node = &mut self.state.nodes[id];
        node.inbox.push(request);
        node.wake.notify_one();
        self.start_node(id);
    }

    fn start_node(&mut self, id: NodeId) {
        let node = &mut self.state.nodes[id];
        if !node.has_task && self.shared.has_runtime() {
            node.has_task = true;
            node.resumes = false;
            let (address, wake) = (node.address.clone(), node.wake.clone());
            let task = NodeTask::new(self.shared.clone(), id, address, wake);
            self.effects.tasks.push(task.run().boxed());
        }
    }

    /// A ticket is entered once the grants of its key are heard.
    fn enter(&mut self, id: NodeId, request: Request) {
        let node = &self.state.nodes[id];
        if let Some(reason) = node.no_push.clone() {
            // The registry is told in a moment that it must not stand in a queue there (W5).
            let address = node.address.clone();
            self.answer_unsent(request, Fault::NoPush { address, reason });
            self.settle_soon();
            return;
        }
        match self.state.subscriptions.enter(id, request) {
            Some(request) => self.hand_to(id, request),
            None => self.wake_subscribers(),
        }
    }

    /// Tries again after a pause, as long as the answer is of use.
    pub(super) fn delay(&mut self, mut request: Request, refusal: &Refusal) {
        let now = Instant::now();
        let patience = request.since + self.shared.opening.response_timeout * 3 / 4;
        let patience = request.useful_until().unwrap_or(patience);
        if now >= patience {
            let owner = self.owner(request.slot);
            let owner = owner.map(|id| &self.state.nodes[id].address);
            let fault = Fault::Refused {
                address: owner.unwrap_or(self.shared.topology.address()).clone(),
                refusal: refusal.clone(),
            };
            self.answer(request, Err(OpError::Refused(fault.into())));
            return;
        }
        let pause = Duration::from_millis(10 << request.delays.min(4));
        let due = now + pause.mul_f64(rand::random_range(0.5..=1.0));
        request.delays += 1;
        request.hops = 0;
        request.asking = None;
        self.try_again(due.min(patience), Retry::Request(Box::new(request)));
    }

    fn try_again(&mut self, due: Instant, what: Retry) {
        let task = RetryTask::new(self.shared, what);
        self.effects.tasks.push(task.run(due).boxed());
    }

    /// Starts what had to wait for a runtime.
    pub(super) fn start_tasks(&mut self) {
        for id in 0..self.state.nodes.len() {
            let node = &self.state.nodes[id];
            if node.resumes || !node.inbox.is_empty() {
                self.start_node(id);
            }
            if self.state.subscriptions.is_wanted_at(id) {
                self.start_subscriber(id);
            }
        }
        if self.state.search.is_due {
            self.search();
        }
        if !self.state.unsettled.is_empty() || self.state.owes_complete {
            self.settle_soon();
        }
    }
}

/// Answers on their way to the registry.
impl Change<'_> {
    pub(super) fn received(&mut self, id: NodeId, received: Received) {
        match received {
            Received::Granted { key, grant } if self.shared.min_replicas.is_some() => {
                let slot = self.shared.slot(&key);
                self.route(Request::granted(key, grant, slot));
            }
            Received::Granted { key, grant } => {
                self.effects.news.push(News::Granted { key, grant });
            }
            Received::Confirmed { request } => {
                let confirmed = request.held.map(|held| held.news);
                self.effects.news.extend(confirmed);
            }
            Received::Refused { request, refusal } => self.on_refused(id, request, &refusal),
            Received::Failed { request, error } => self.answer(request, Err(error)),
            Received::Freed { key } => self.effects.news.push(News::Freed { key }),
            Received::Answer {
                request,
                at,
                verdict,
            } => self.on_verdict(id, request, at, verdict),
        }
    }

    pub(super) fn refuse(&mut self, id: NodeId, request: Request, refusal: Refusal) {
        let (address, names) = (self.state.nodes[id].address.clone(), &self.shared.names);
        let fault = match self.shared.is_cluster() {
            true => Fault::Refused {
                address,
                refusal: refusal.naming(names),
            },
            false => Fault::refused(address, refusal, names),
        };
        self.answer(request, Err(OpError::Refused(fault.into())));
    }

    /// Nothing of the request was sent.
    pub(super) fn answer_unsent(&mut self, request: Request, error: impl Into<StoreError>) {
        self.answer(request, Err(OpError::Unsent(error.into())));
    }

    pub(super) fn answer(&mut self, mut request: Request, result: Result<Answer, OpError>) {
        request.restore_enter();
        if let Err(OpError::Unknown(_) | OpError::Unsent(_)) = &result {
            self.state.unsettled.insert(request.slot);
        }
        if let Some(held) = request.held {
            let failed = result.err().and_then(|error| held.failed(error));
            self.effects.news.extend(failed);
            return;
        }
        if let (Some(_), Wish::Op(op), Ok(answer)) =
            (self.shared.min_replicas, &request.wish, &result)
            && let (Outcome::Won { .. }, Some(owner)) = (&answer.outcome, Request::winner(op))
        {
            // It is told when replicas have it.
            let (key, op) = (request.key.clone(), op.clone());
            request.hold(owner, News::Replied { key, op, result });
            self.route(request);
            return;
        }
        match (request.wish, result) {
            (Wish::Op(op), result) => {
                let key = request.key;
                self.effects.news.push(News::Replied { key, op, result });
            }
            (Wish::Look(answer), Err(error)) => {
                let error = error.store_error().clone();
                self.effects.looks.push((answer, Err(error)));
            }
            (Wish::Look(_), Ok(_)) => {}
        }
    }

    /// What waited longer for its connection than an answer may take is asked anew, if it is still
    /// wanted.
    pub(super) fn answer_old(&mut self, id: NodeId) {
        let (now, within) = (Instant::now(), self.shared.opening.response_timeout);
        let node = &mut self.state.nodes[id];
        let address = node.address.clone();
        let is_old = |it: &mut Request| it.asks() && it.since + within <= now;
        let old: Vec<_> = node.inbox.extract_if(.., is_old).collect();
        for request in old {
            let address = address.clone();
            self.answer_unsent(request, Fault::Silent { address, within });
        }
    }
}

/// Connections that are lost, and stand again.
impl Change<'_> {
    /// The slots of a node; of one server the one that stands for all.
    pub(super) fn slots_of(&self, id: NodeId) -> SlotSet {
        match &self.state.owners {
            Some(owners) => SlotSet::of(owners, |owner| usize::from(*owner) == id + 1),
            None if self.shared.is_cluster() => SlotSet::default(),
            None => SlotSet::from_iter([0]),
        }
    }

    /// A connection to the node has ended: `sent` may be done or not.
    pub(super) fn give_up(
        &mut self,
        id: NodeId,
        sent: Vec<Request>,
        unsent: Vec<Request>,
        error: StoreError,
    ) {
        self.state.nodes[id].connection = None;
        for request in sent {
            self.answer(request, Err(OpError::Unknown(error.clone())));
        }
        for request in unsent {
            // What replicas were to confirm was done before.
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
            self.effects.news.push(News::Down { scope, error });
        }
    }

    /// Tells the registry that it may ask again for keys whose node stands.
    pub(super) fn settle(&mut self) {
        let is_known = self.state.owners.is_some() || !self.shared.is_cluster();
        let complete = is_known && !self.state.nodes.iter().any(|node| node.is_lost);
        let mut ups = Vec::new();
        for id in 0..self.state.nodes.len() {
            if self.state.unsettled.is_empty() {
                break;
            }
            let slots = self.slots_of(id);
            let node = &self.state.nodes[id];
            if node.connection.is_some() {
                let slots = self.state.unsettled.take(&slots);
                if !slots.is_empty() {
                    ups.push((slots, node.no_push.is_none()));
                }
            } else if self.state.unsettled.intersects(&slots) {
                // It ends at once if nobody needs it.
                self.start_node(id);
            }
        }
        if ups.is_empty() && complete && self.state.owes_complete {
            ups.push((SlotSet::default(), true));
        }
        for (slots, queue) in ups {
            self.state.owes_complete = !complete;
            self.effects.news.push(News::Up {
                scope: self.shared.scope(slots),
                queue,
                complete,
            });
        }
    }

    /// The same in a moment: what is refused at once is not asked again at once.
    pub(super) fn settle_soon(&mut self) {
        if !std::mem::replace(&mut self.state.settles_soon, true) {
            let pause = Duration::from_millis(rand::random_range(20..=50));
            self.try_again(Instant::now() + pause, Retry::Settle);
        }
    }
}
