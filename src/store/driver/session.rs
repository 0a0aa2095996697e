//! A registry's session with its store: the tasks of the nodes, and when their connections are needed.

use std::hash::BuildHasher;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use foldhash::fast::RandomState;
use futures::channel::oneshot;
use futures::future::{BoxFuture, try_join_all};
use futures::stream::BoxStream;
use futures::{FutureExt, TryFutureExt};
use tokio::sync::watch;
use tokio::time::Instant;

use super::backend::{Backend, Connected, SlotMap, SlotSet, Trouble};
use super::change::{Change, Effects, Node, SessionState};
use super::node::Received;
use super::request::{Request, RequestKind};
use crate::base::mutex::{Mutex, MutexGuard};
use crate::base::sync::AtomicBool;
use crate::base::user_code::log;
use crate::base::{Check, StoreError};
use crate::roaming::runtime;
use crate::roaming::time::timeout;
use crate::store::contract::{
    KeyScope, KeyStatus, Op, OpError, OpResult, PING, Session, SessionConfig, StoreEvent,
    SubmittedOp,
};
use crate::store::notifier::OrderedNotifier;

/// A node's index in the session's list.
pub(super) type NodeId = usize;

pub(crate) struct DriverSession<B: Backend> {
    pub(super) shared: Arc<Shared<B>>,
}

/// What a session and its tasks share.
pub(super) struct Shared<B: Backend> {
    pub(super) backend: Arc<B>,
    pub(super) config: SessionConfig,
    notifier: OrderedNotifier,
    state: Mutex<SessionState>,
    has_warned: AtomicBool,
    /// Of lines and lanes.
    hasher: RandomState,
    /// A task must be started as soon as a caller has a runtime.
    lacks_task: AtomicBool,
    /// Until the first attempt to connect has ended since a server came into use. While it is true, a caller waits for the
    /// time to connect, too.
    is_first: AtomicBool,
    /// True when the session was dropped.
    closing: watch::Sender<bool>,
}

impl<B: Backend> DriverSession<B> {
    pub(crate) fn new(backend: Arc<B>, config: SessionConfig) -> Self {
        let has_map = backend.slots() > 1;
        let mut state = SessionState::default();
        if !has_map {
            state.node(backend.address());
            state.owners = vec![Some(0)];
        }
        let shared = Shared {
            backend,
            notifier: OrderedNotifier::new(config.listener.clone()),
            config,
            state: Mutex::new(state),
            has_warned: AtomicBool::new(false),
            hasher: RandomState::default(),
            lacks_task: AtomicBool::new(!has_map),
            is_first: AtomicBool::new(true),
            closing: watch::Sender::new(false),
        };
        Self {
            shared: Arc::new(shared),
        }
    }
}

impl<B: Backend> Session for DriverSession<B> {
    fn start(&self) {
        let lacks_task = &self.shared.lacks_task;
        if lacks_task.load(Ordering::Relaxed)
            && runtime().is_some()
            && lacks_task.swap(false, Ordering::Relaxed)
        {
            self.shared.change(|change| change.start_tasks());
        }
    }

    fn submit(&self, submitted: SubmittedOp) {
        self.shared.submit(Request::new(RequestKind::Op(submitted)));
    }

    fn identity(&self) -> Option<Arc<str>> {
        self.shared.lock().identity.clone()
    }

    fn fence(&self) -> Option<Arc<str>> {
        self.shared.backend.fence()
    }

    fn connects_within(&self) -> Duration {
        self.shared.connects_within()
    }

    fn check(&self) -> BoxFuture<'static, Result<Check, StoreError>> {
        let servers = self.shared.backend.check();
        let check = servers.map_ok(|servers| Check {
            servers,
            failed: Vec::new(),
            shares: true,
        });
        check.boxed()
    }

    fn ping(&self, within: Duration) -> BoxFuture<'static, Result<(), StoreError>> {
        let shared = self.shared.clone();
        let asked = shared.change(|change| change.pinged());
        let asked = asked.into_iter().map(|(address, key)| {
            let (shared, answer) = (shared.clone(), self.ask(key, PING));
            async move {
                let silent = |_| Err(shared.backend.error(&address, Trouble::Silent(within)));
                let answer = answer.map(|it| it.map_err(|error| error.store_error().clone()));
                timeout(within, answer).await.unwrap_or_else(silent)
            }
        });
        try_join_all(asked).map_ok(drop).boxed()
    }

    fn ask(&self, key: Arc<str>, op: Op) -> BoxFuture<'static, OpResult> {
        let shared = self.shared.clone();
        async move {
            let (answer, answered) = oneshot::channel();
            let is_eviction = matches!(op, Op::Evict { .. });
            let submitted = SubmittedOp::unattended(key, op);
            let mut request = Request::new(RequestKind::Asked(submitted, answer));
            // Scripts rely on it that no other op of a call is about the same exclusive lock.
            if is_eviction {
                request.most = 1;
            }
            shared.submit(request);
            let abandoned = |_| Err(OpError::Unknown(shared.error(Trouble::Abandoned)));
            answered.await.unwrap_or_else(abandoned)
        }
        .boxed()
    }

    fn inspect(&self, key: Arc<str>) -> BoxFuture<'static, Result<KeyStatus, StoreError>> {
        let shared = self.shared.clone();
        async move {
            let (answer, answered) = oneshot::channel();
            shared.submit(Request::new(RequestKind::Look(key, answer)));
            let abandoned = |_| Err(shared.error(Trouble::Abandoned));
            answered.await.unwrap_or_else(abandoned)
        }
        .boxed()
    }

    fn scan(&self, start: Arc<str>) -> BoxStream<'static, Result<Vec<Arc<str>>, StoreError>> {
        self.shared.backend.scan(start)
    }
}

impl<B: Backend> Drop for DriverSession<B> {
    fn drop(&mut self) {
        self.shared.lock().is_closed = true;
        self.shared.closing.send_replace(true);
    }
}

impl<B: Backend> Shared<B> {
    fn lock(&self) -> MutexGuard<'_, SessionState> {
        self.state.lock()
    }

    /// Notes whether a server is left to which no connection was tried.
    pub(super) fn note_tried(&self, state: &SessionState) {
        // A forgotten node has no address.
        let mut nodes = state.nodes.iter().filter(|node| !node.address.is_empty());
        let is_first = nodes.any(|node| !node.has_tried);
        self.is_first.store(is_first, Ordering::Relaxed);
    }

    /// No server says which of them has which keys.
    pub(super) fn gave_up_search(&self) {
        self.is_first.store(false, Ordering::Relaxed);
    }

    pub(super) fn connects_within(&self) -> Duration {
        match self.is_first.load(Ordering::Relaxed) {
            true => self.backend.connect_timeout(),
            false => Duration::ZERO,
        }
    }

    /// Changes the state, and then runs the effects of the change.
    pub(super) fn change<R>(self: &Arc<Self>, change: impl FnOnce(&mut Change<'_, B>) -> R) -> R {
        let mut effects = Effects::default();
        let mut state = self.lock();
        let result = change(&mut Change {
            shared: self,
            state: &mut state,
            effects: &mut effects,
        });
        let doubtful = std::mem::take(&mut effects.doubtful);
        if !doubtful.is_empty() {
            // After all answers of the change: these tickets are entered again.
            effects.events.push(StoreEvent::Up {
                scope: KeyScope::Keys(Arc::new(move |key| doubtful.contains(key))),
                queue: true,
                complete: false,
            });
        }
        let tells = !effects.events.is_empty();
        if tells {
            // Queued under the lock, so events keep the order of the changes.
            self.notifier.put(effects.events.drain(..));
        }
        drop(state);
        effects.woken.iter().for_each(|node| node.notify_one());
        if tells {
            self.notifier.tell();
        }
        effects.answers.into_iter().for_each(|answer| answer());
        for task in effects.tasks {
            // Without a runtime the task is dropped, and its drop tells the session.
            if let Some(runtime) = runtime() {
                self.config.spawn(&runtime, task);
            }
        }
        result
    }

    /// A task was dropped with its runtime. A caller with another runtime starts the next one.
    pub(super) fn lack_task(&self) {
        self.lacks_task.store(true, Ordering::Relaxed);
    }

    /// Whether several servers have the keys.
    pub(super) fn has_map(&self) -> bool {
        self.backend.slots() > 1
    }

    /// Resolves when the session is dropped.
    pub(super) async fn closed(&self) {
        let mut closing = self.closing.subscribe();
        // An error would mean that the sender is dropped.
        let _ = closing.wait_for(|is_closed| *is_closed).await;
    }

    /// An error about the store as a whole.
    pub(super) fn error(&self, trouble: Trouble<'_>) -> StoreError {
        self.backend.error(self.backend.address(), trouble)
    }

    fn submit(self: &Arc<Self>, mut request: Request) {
        request.slot = self.backend.slot(request.key());
        request.line = self.hasher.hash_one(request.line_of());
        self.change(|change| {
            if self.has_map() {
                // Each subscriber to notices needs a subscription of its own, so waiters here poll instead (W7).
                request.listen_to_nothing();
                let is_heard = change.state.subscriptions.contains(request.key());
                request.attempts_first = request.is_enter() && !is_heard;
            }
            change.route(request);
        });
    }

    /// By which connection of a link the calls about a key go.
    pub(super) fn lane_of(&self, request: &Request) -> usize {
        match self.backend.lanes() {
            1 => 0,
            lanes => self.hasher.hash_one(request.key()) as usize % lanes,
        }
    }

    /// Tells the registry what a node said.
    pub(super) fn received(self: &Arc<Self>, id: NodeId, received: &mut Vec<Received>) {
        if !received.is_empty() {
            self.change(|change| {
                change.effects.events.reserve(received.len());
                for received in received.drain(..) {
                    change.received(id, received);
                }
            });
        }
    }

    /// Hands a node's requests to its task. Returns who asks for the map.
    pub(super) fn take(
        &self,
        id: NodeId,
        requests: &mut Vec<Request>,
    ) -> Vec<oneshot::Sender<SlotMap>> {
        let mut state = self.lock();
        let Node { inbox, maps, .. } = &mut state.nodes[id];
        std::mem::swap(inbox, requests);
        std::mem::take(maps)
    }

    /// The keys in these slots.
    pub(super) fn scope(&self, slots: SlotSet) -> KeyScope {
        if !self.has_map() {
            return KeyScope::All;
        }
        let backend = self.backend.clone();
        KeyScope::Keys(Arc::new(move |key| slots.contains(&backend.slot(key))))
    }

    /// Whether the registry holds or waits for a key of this node.
    pub(super) fn is_needed(self: &Arc<Self>, id: NodeId) -> bool {
        let slots = self.change(|change| change.slots_of(id));
        // Not under our lock: the registry takes its own.
        let listener = self.config.listener.upgrade();
        listener.is_some_and(|listener| listener.uses(&self.scope(slots)))
    }

    /// When the node's task connects next. `None`: never, and the task ends.
    pub(super) fn next_attempt(self: &Arc<Self>, id: NodeId) -> Option<Option<Instant>> {
        let is_needed = self.is_needed(id);
        self.change(|change| {
            let has_pending = change.state.subscriptions.has_pending(id);
            let node = &mut change.state.nodes[id];
            node.is_connected = false;
            node.maps.clear();
            if is_needed || has_pending || !node.inbox.is_empty() {
                return Some(node.backoff.not_before());
            }
            node.has_task = false;
            // A connection that was closed while nobody used it says nothing of the next attempt.
            node.has_tried = node.has_failed;
            self.note_tried(change.state);
            change.state.subscriptions.forget(id);
            // Nobody waits for grants there.
            let slots = change.slots_of(id);
            change.state.unsettled.retain(|slot| !slots.contains(slot));
            if slots.is_empty() {
                // Its slots are elsewhere by now.
                change.state.nodes[id].is_lost = false;
                change.settle();
            }
            None
        })
    }

    /// A connection to the node stands.
    pub(super) fn connected(
        self: &Arc<Self>,
        id: NodeId,
        address: &str,
        connected: &Connected<B::Link>,
    ) {
        log!(debug, address, no_push = ?connected.no_push, "connected");
        if let Some(reason) = &connected.no_push {
            self.warn_of_no_push(address, reason);
        }
        self.change(|change| {
            let node = &mut change.state.nodes[id];
            node.no_push.clone_from(&connected.no_push);
            node.is_connected = true;
            let was_lost = std::mem::take(&mut node.is_lost);
            let mut within = self.config.response_timeout;
            if !std::mem::replace(&mut node.has_tried, true) {
                within += self.backend.connect_timeout();
            }
            node.has_failed = false;
            if !self.has_map() {
                change.state.identity.clone_from(&connected.identity);
            }
            change.answer_old(id, within);
            self.note_tried(change.state);
            match connected.no_push {
                Some(_) => change.cannot_push(id),
                None => change.state.subscriptions.renew(id),
            }
            let slots = change.slots_of(id);
            change.state.unsettled.extend(&slots);
            change.settle();
            if was_lost {
                change.search();
            }
        });
    }

    pub(super) fn warn_of_no_push(&self, address: &str, reason: &str) {
        if !self.has_warned.swap(true, Ordering::Relaxed) {
            log!(
                warn,
                address,
                reason,
                "this server cannot push grants, so waiters poll"
            );
        }
    }

    /// A connection was lost, or could not be made.
    pub(super) fn lost(
        self: &Arc<Self>,
        id: NodeId,
        error: StoreError,
        sent: Vec<Request>,
        mut unsent: Vec<Request>,
        stood_since: Option<Instant>,
    ) {
        self.change(|change| {
            let node = &mut change.state.nodes[id];
            node.is_lost = true;
            node.has_tried = true;
            node.has_failed = stood_since.is_none();
            node.backoff.failed(Instant::now(), stood_since);
            unsent.append(&mut node.inbox);
            self.note_tried(change.state);
            unsent.extend(change.state.subscriptions.lost(id));
            // Unsent requests wait for the next attempt, once.
            let goes_again = |request: &mut Request| {
                request.held.is_none() && (request.asking.is_some() || stood_since.is_some())
            };
            let again: Vec<_> = unsent.extract_if(.., goes_again).collect();
            change.give_up(id, sent, unsent, error);
            for mut request in again {
                request.asking = None;
                change.route(request);
            }
            change.search();
        });
    }

    /// The node's task has ended. `has_begun`: it was polled. Otherwise its runtime is shutting down and has dropped
    /// it: nothing is answered then, since an answer would start the task on that runtime again and again.
    pub(super) fn abandoned(
        self: &Arc<Self>,
        id: NodeId,
        has_begun: bool,
        sent: Vec<Request>,
        mut unsent: Vec<Request>,
    ) {
        self.change(|change| {
            let node = &mut change.state.nodes[id];
            node.has_task = false;
            self.lack_task();
            if has_begun {
                unsent.append(&mut node.inbox);
                unsent.extend(change.state.subscriptions.lost(id));
                change.give_up(id, sent, unsent, self.error(Trouble::Abandoned));
            }
        });
    }
}

#[cfg(test)]
mod tests;
