//! A registry's session with a Redis store: the tasks of its nodes, and when their connections are
//! needed.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures::FutureExt;
use futures::channel::oneshot;
use futures::future::BoxFuture;
use futures::stream::BoxStream;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::time::Instant;

use super::change::{Change, Effects, State};
use super::fault::Fault;
use super::handshake::Connected;
use super::keys::Names;
use super::node::Received;
use super::replicas::MinReplicas;
use super::request::{Request, RequestKind};
use super::scan;
use super::script::{self, Script};
use super::slots::SlotSet;
use super::topology::Topology;
use crate::StoreError;
use crate::store::contract::{
    KeyScope, KeyStatus, Session, SessionConfig, StoreEvent, SubmittedOp, run_task,
};
use crate::store::notifier::OrderedNotifier;
use crate::store::send_window::SendWindow;
use crate::user_code::log;

/// A node's index in the session's list.
pub(super) type NodeId = usize;

pub(super) struct RedisSession {
    shared: Arc<Shared>,
}

/// What a session and its tasks share.
pub(super) struct Shared {
    pub(super) topology: Topology,
    pub(super) config: SessionConfig,
    pub(super) names: Arc<Names>,
    /// How many replicas must have an acquisition.
    pub(super) min_replicas: Option<MinReplicas>,
    pub(super) script: &'static Script,
    notifier: OrderedNotifier,
    state: Mutex<State>,
    warned: Warned,
    /// A task must be started as soon as a caller has a runtime.
    lacks_task: AtomicBool,
    /// True when the session was dropped.
    closing: watch::Sender<bool>,
}

/// What was logged already.
#[derive(Default)]
struct Warned {
    no_push: AtomicBool,
    evicts: AtomicBool,
    no_info: AtomicBool,
}

impl RedisSession {
    pub(super) fn new(
        topology: Topology,
        min_replicas: Option<MinReplicas>,
        config: SessionConfig,
    ) -> Self {
        let is_cluster = topology.seeds().is_some();
        let (prefix, instance) = (config.prefix.clone(), config.instance.clone());
        let (names, script) = match is_cluster {
            true => (Names::clustered(prefix, instance), &script::CLUSTER),
            false => (Names::new(prefix, instance), &script::SERVER),
        };
        let mut state = State::default();
        if !is_cluster {
            state.node(topology.address());
            state.owners = vec![Some(0)];
        }
        let shared = Shared {
            topology,
            min_replicas,
            names: Arc::new(names),
            script,
            notifier: OrderedNotifier::new(config.listener.clone()),
            config,
            state: Mutex::new(state),
            warned: Warned::default(),
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
        let lacks_task = &self.shared.lacks_task;
        if lacks_task.load(Ordering::Relaxed)
            && Handle::try_current().is_ok()
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

    fn inspect(&self, key: Arc<str>) -> BoxFuture<'static, Result<KeyStatus, StoreError>> {
        let shared = self.shared.clone();
        async move {
            let (answer, answered) = oneshot::channel();
            shared.submit(Request::new(RequestKind::Look(key, answer)));
            answered
                .await
                .unwrap_or_else(|_| Err(shared.abandoned_error()))
        }
        .boxed()
    }

    fn scan(&self, start: Arc<str>) -> BoxStream<'static, Result<Vec<Arc<str>>, StoreError>> {
        scan::scan(self.shared.clone(), start)
    }
}

impl Drop for RedisSession {
    fn drop(&mut self) {
        self.shared.lock().is_closed = true;
        self.shared.closing.send_replace(true);
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the state, and then runs the effects of the change.
    pub(super) fn change<R>(self: &Arc<Self>, change: impl FnOnce(&mut Change<'_>) -> R) -> R {
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
        for (answer, key_status) in effects.looks.drain(..) {
            // The caller may have gone.
            let _ = answer.send(key_status);
        }
        for task in effects.tasks {
            // Without a runtime the task is dropped, and its drop tells the session.
            if let Ok(runtime) = Handle::try_current() {
                runtime.spawn(run_task(self.config.listener.clone(), task));
            }
        }
        result
    }

    /// A task was dropped with its runtime. A caller with another runtime starts the next one.
    pub(super) fn lack_task(&self) {
        self.lacks_task.store(true, Ordering::Relaxed);
    }

    /// Whether a task can be started here. If not, a caller with a runtime starts it later.
    pub(super) fn has_runtime(&self) -> bool {
        let has_one = Handle::try_current().is_ok();
        if !has_one {
            self.lack_task();
        }
        has_one
    }

    pub(super) fn is_cluster(&self) -> bool {
        self.topology.seeds().is_some()
    }

    /// Resolves when the session is dropped.
    pub(super) async fn closed(&self) {
        let mut closing = self.closing.subscribe();
        // An error would mean that the sender is dropped.
        let _ = closing.wait_for(|is_closed| *is_closed).await;
    }

    pub(super) fn abandoned_error(&self) -> StoreError {
        let address = self.topology.address().clone();
        Fault::Abandoned { address }.into()
    }

    fn submit(self: &Arc<Self>, mut request: Request) {
        request.slot = self.names.slot(request.key());
        self.change(|change| {
            if self.is_cluster() {
                // Each subscriber to notices needs a subscription of its own, so waiters here poll instead (W7).
                request.listen_to_nothing();
                let is_heard = change.state.subscriptions.contains(request.key());
                request.attempts_first = request.is_enter() && !is_heard;
            }
            change.route(request);
        });
    }

    /// Tells the registry what a node said.
    pub(super) fn received(self: &Arc<Self>, id: NodeId, received: &mut Vec<Received>) {
        if !received.is_empty() {
            self.change(|change| {
                for received in received.drain(..) {
                    change.received(id, received);
                }
            });
        }
    }

    /// Hands a node's requests to its task.
    pub(super) fn take(
        &self,
        id: NodeId,
        window: &mut SendWindow<Request>,
        to_confirm: &mut Vec<Request>,
    ) {
        let mut state = self.lock();
        let inbox = &mut state.nodes[id].inbox;
        to_confirm.extend(inbox.extract_if(.., |request| request.held.is_some()));
        window.add(inbox.drain(..));
    }

    /// The keys in these slots.
    pub(super) fn scope(&self, slots: SlotSet) -> KeyScope {
        if !self.is_cluster() {
            return KeyScope::All;
        }
        let names = self.names.clone();
        KeyScope::Keys(Arc::new(move |key| slots.contains(&names.slot(key))))
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
            let node = &mut change.state.nodes[id];
            node.connection = None;
            if is_needed || !node.inbox.is_empty() {
                return Some(node.backoff.not_before());
            }
            node.has_task = false;
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

    /// The names for a probe of the node, if it has a slot: a lock, its queue and its channel.
    pub(super) fn probe_names(self: &Arc<Self>, id: NodeId) -> Option<[String; 3]> {
        if !self.is_cluster() {
            return Some(self.names.probe());
        }
        let slots = self.change(|change| change.slots_of(id));
        let mut slots = slots.into_iter();
        let slot = slots.find(|slot| self.names.has_locks_in(*slot));
        slot.map(|slot| self.names.probe_in(slot))
    }

    /// A connection to the node stands.
    pub(super) fn connected(self: &Arc<Self>, id: NodeId, address: &str, connected: &Connected) {
        let server = &connected.server;
        log!(debug, address, no_push = ?connected.no_push, "connected");
        if let Some(reason) = &connected.no_push {
            self.warn_of_no_push(address, reason);
        }
        if let Some(policy) = &server.evicts
            && !self.warned.evicts.swap(true, Ordering::Relaxed)
        {
            log!(
                warn,
                address,
                policy,
                "this server may evict locks when its memory is full: set maxmemory-policy to noeviction"
            );
        }
        if let Some(refusal) = &server.refusal
            && !self.warned.no_info.swap(true, Ordering::Relaxed)
        {
            log!(warn,
                address,
                %refusal,
                "no right to INFO: the server's identity and memory policy are unknown"
            );
        }
        self.change(|change| {
            let node = &mut change.state.nodes[id];
            node.no_push.clone_from(&connected.no_push);
            node.connection = Some(connected.pipe.client());
            let was_lost = std::mem::take(&mut node.is_lost);
            if !self.is_cluster() {
                change.state.identity.clone_from(&server.run_id);
            }
            change.answer_old(id);
            let slots = change.slots_of(id);
            change.state.unsettled.extend(&slots);
            change.settle();
            if was_lost {
                change.search();
            }
        });
    }

    pub(super) fn warn_of_no_push(&self, address: &str, reason: &str) {
        if !self.warned.no_push.swap(true, Ordering::Relaxed) {
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
        fault: Fault,
        sent: Vec<Request>,
        mut unsent: Vec<Request>,
        stood_since: Option<Instant>,
    ) {
        self.change(|change| {
            let node = &mut change.state.nodes[id];
            node.is_lost = true;
            node.backoff.failed(Instant::now(), stood_since);
            unsent.append(&mut node.inbox);
            // Unsent requests wait for the next attempt, once.
            let goes_again = |request: &mut Request| {
                request.held.is_none() && (request.asking.is_some() || stood_since.is_some())
            };
            let again: Vec<_> = unsent.extract_if(.., goes_again).collect();
            change.give_up(id, sent, unsent, fault.into());
            for mut request in again {
                request.asking = None;
                change.route(request);
            }
            change.search();
        });
    }

    /// The node's task has ended. `has_begun`: it was polled. Otherwise its runtime is shutting down and has dropped
    /// it; an answer could start the next task on that runtime, without end.
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
                change.give_up(id, sent, unsent, self.abandoned_error());
            }
        });
    }
}

#[cfg(test)]
mod tests;
