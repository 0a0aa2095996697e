//! Where a request goes if several servers have the keys: what answers and redirections say, and the map of the slots.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use futures::channel::oneshot;
use rand::seq::{IteratorRandom, SliceRandom};
use tokio::time::Instant;

use super::backend::{Backend, Next, Refusal, Reply, SlotMap, Trouble};
use super::backoff::Backoff;
use super::change::{Change, Node};
use super::request::{Request, RequestKind};
use super::session::{NodeId, Shared};
use crate::base::StoreError;
use crate::roaming::time::{sleep_until, timeout};
use crate::store::contract::{Answer, KeyScope, OpError, Outcome, StoreEvent};

/// A request is redirected this often without a pause. Then it is delayed, so that two nodes that name each other do
/// not cause a busy loop.
const HOPS: u32 = 4;

pub(super) const STRANGE_CLOCK: Trouble<'static> =
    Trouble::Garbled("the server's clock runs too differently from ours");

/// The map is not asked for more often than this, however many redirections come.
const SEARCH_PAUSE: Duration = Duration::from_millis(50);

/// Answers and redirections.
impl<B: Backend> Change<'_, B> {
    pub(super) fn on_reply(&mut self, id: NodeId, mut request: Request, reply: Reply) {
        let node = &self.state.nodes[id];
        if let Reply::Done { unserved: true, .. } = reply
            && let Some(op) = request.op()
        {
            let (key, owner) = (request.key().clone(), op.owner());
            let unserved = StoreEvent::Unserved { key, owner };
            self.effects.events.push(unserved);
        }
        match reply {
            // Now it enters the queue, after its subscription is confirmed.
            Reply::Done {
                outcome: Outcome::Busy { .. },
                ..
            } if node.no_push.is_none() && request.attempts_first => {
                request.attempts_first = false;
                self.route(request);
            }
            Reply::Done { at, outcome, .. } => {
                let (key, heard) = (request.key().clone(), request.heard);
                let is_busy = matches!(outcome, Outcome::Busy { .. });
                self.answer(request, Ok(Answer { at, outcome }));
                let subscriptions = &self.state.subscriptions;
                if is_busy && heard.is_some_and(|it| !subscriptions.is_heard(&key, it)) {
                    self.effects.doubtful.insert(key);
                }
            }
            Reply::Seen(key_status) => {
                if let RequestKind::Look(_, caller) = request.kind {
                    self.effects.answer(caller, Ok(key_status));
                }
            }
            Reply::Stale | Reply::Again | Reply::InParts | Reply::Later(_) => {
                let error = self.shared.backend.error(&node.address, STRANGE_CLOCK);
                self.answer(request, Err(OpError::Unknown(error)));
            }
            Reply::Refused(refusal) => self.on_refused(request, refusal),
        }
    }

    /// The server did nothing of the request.
    pub(super) fn on_refused(&mut self, mut request: Request, refusal: Refusal) {
        let Refusal { error, next, .. } = refusal;
        match next {
            Next::Nothing => self.answer(request, Err(OpError::Refused(error))),
            Next::Moved(ref to) | Next::Ask(ref to) => {
                let (to, has_moved) = (self.state.node(to), matches!(next, Next::Moved(_)));
                if has_moved {
                    // The slot changes at once, and the rest of the map is asked for.
                    if let Some(known) = self.state.owners.get_mut(usize::from(request.slot))
                        && known.replace(to) != Some(to)
                    {
                        self.state.unsettled.insert(request.slot);
                    }
                    self.search();
                }
                if request.hops >= HOPS {
                    self.delay(request, error);
                } else {
                    request.hops += 1;
                    request.asking = (!has_moved).then_some(to);
                    self.route(request);
                }
            }
            Next::Search => {
                self.search();
                self.delay(request, error);
            }
            Next::Wait => {
                // In time for the caller, who waits for one response time-out at most.
                let patience = self.shared.config.response_timeout / 2;
                request.is_bare |= request.may_be_bare() && request.since.elapsed() > patience;
                self.delay(request, error);
            }
        }
    }

    /// Tries again after a pause, as long as the answer is of use.
    pub(super) fn delay(&mut self, mut request: Request, error: StoreError) {
        let now = Instant::now();
        let within = self.shared.config.response_timeout * 3 / 4;
        let patience = request.since + self.shared.connects_within() + within;
        let patience = request.useful_until().unwrap_or(patience);
        if now >= patience {
            return self.answer(request, Err(OpError::Refused(error)));
        }
        let pause = Duration::from_millis(10 << request.delays.min(4));
        let due = now + pause.mul_f64(rand::random_range(0.5..=1.0));
        request.delays += 1;
        request.hops = 0;
        request.asking = None;
        let task = DelayedRequest {
            shared: self.shared.clone(),
            request: Some(request),
        };
        self.effects.tasks.push(task.run(due.min(patience)).boxed());
    }

    /// Asks for the map after a pause, unless a search is running. After the pause the registry is told
    /// which unsettled keys it may ask for, so that what is refused at once is not asked again at once.
    pub(super) fn search(&mut self) {
        if !self.shared.has_map() {
            return;
        }
        self.state.search.is_due = true;
        if !std::mem::replace(&mut self.state.search.is_running, true) {
            let task = SearchTask {
                shared: self.shared.clone(),
                has_ended: false,
            };
            self.effects.tasks.push(task.run().boxed());
        }
    }

    pub(super) fn install(&mut self, map: SlotMap) {
        self.state.search.backoff = Backoff::default();
        let mut owners = vec![None; self.shared.backend.slots()];
        for (address, slots) in map {
            let owner = Some(self.state.node(&address));
            owners[usize::from(*slots.start())..=usize::from(*slots.end())].fill(owner);
        }
        let mut old = std::mem::replace(&mut self.state.owners, owners);
        old.resize(self.state.owners.len(), None);
        let (owners, subscriptions) = (&self.state.owners, &self.state.subscriptions);
        let changed = (0..).zip(old.iter().zip(owners));
        let changed = changed.filter(|(_, (old, new))| old != new);
        self.state.unsettled.extend(changed.map(|(slot, _)| slot));
        // Requests wait for their slots' new nodes.
        let mut rerouted = std::mem::take(&mut self.state.unrouted);
        for (id, node) in self.state.nodes.iter_mut().enumerate() {
            let is_misplaced = |request: &mut Request| {
                request.asking.is_none() && owners[usize::from(request.slot)] != Some(id)
            };
            rerouted.extend(node.inbox.extract_if(.., is_misplaced));
            let is_needed = owners.contains(&Some(id)) || subscriptions.is_wanted_at(id);
            if !is_needed && node.is_forgettable() {
                *node = Node::default();
            }
        }
        self.shared.note_tried(self.state);
        self.settle();
        for request in rerouted {
            self.route(request);
        }
    }

    /// True: the map must be asked for again.
    fn on_no_map(&mut self, error: StoreError) -> bool {
        self.state.search.backoff.failed(Instant::now(), None);
        self.shared.gave_up_search();
        for request in std::mem::take(&mut self.state.unrouted) {
            self.answer_unsent(request, error.clone());
        }
        let is_wanted = self.state.owners.is_empty() && !self.state.is_closed;
        if is_wanted {
            self.effects.events.push(StoreEvent::down(error));
        }
        is_wanted
    }
}

/// Asks for the map until it is found; with an older one at hand only once.
///
/// Made before it is spawned, so its drop reports even if the runtime never ran it.
struct SearchTask<B: Backend> {
    shared: Arc<Shared<B>>,
    has_ended: bool,
}

impl<B: Backend> SearchTask<B> {
    async fn run(mut self) {
        let shared = self.shared.clone();
        while !self.has_ended {
            let not_before = shared.change(|change| {
                let search = &mut change.state.search;
                search.is_due = false;
                // Jitter: a fleet hears of a change at the same moment.
                let jitter = SEARCH_PAUSE.mul_f64(rand::random_range(0.5..=1.5));
                let has_map = !change.state.owners.is_empty();
                let jitter = has_map.then(|| Instant::now() + jitter);
                search.backoff.not_before().or(jitter)
            });
            if let Some(until) = not_before {
                tokio::select! {
                    () = self.settling(sleep_until(until)) => {}
                    () = shared.closed() => {}
                }
            }
            shared.change(|change| change.settle());
            let mut is_wanted = false;
            match self.settling(self.find_map()).await {
                Ok(map) => shared.change(|change| change.install(map)),
                Err(error) => {
                    is_wanted = shared.change(|change| change.on_no_map(error));
                    let listener = shared.config.listener.upgrade();
                    is_wanted &= listener.is_some_and(|it| it.uses(&KeyScope::All));
                }
            }
            // Under one lock: a search that is wanted after this starts the next task.
            self.has_ended = shared.change(|change| {
                let search = &mut change.state.search;
                search.is_running = (search.is_due || is_wanted) && !change.state.is_closed;
                !search.is_running
            });
        }
    }

    /// Settles now and then until `future` ends: slots whose node is known and connected do not wait for the map.
    async fn settling<T>(&self, future: impl Future<Output = T>) -> T {
        let mut future = pin!(future);
        loop {
            match timeout(SEARCH_PAUSE, &mut future).await {
                Ok(output) => return output,
                Err(_) => self.shared.change(|change| change.settle()),
            }
        }
    }

    async fn find_map(&self) -> Result<SlotMap, StoreError> {
        // A node that is silent leaves time for the others, however long an answer may take (G2).
        let response_timeout = self.shared.config.response_timeout;
        let within = response_timeout.min(self.shared.backend.connect_timeout() / 3);
        if let Some(map) = self.ask_connected(within).await {
            return Ok(map);
        }
        let mut known = self.shared.change(|change| {
            let known = change.state.nodes.iter().map(|node| node.address.clone());
            known.filter(|it| !it.is_empty()).collect::<Vec<_>>()
        });
        known.shuffle(&mut rand::rng());
        self.shared.backend.find_map(known).await
    }

    /// The map as a node has it whose connection stands.
    async fn ask_connected(&self, within: Duration) -> Option<SlotMap> {
        let answered = self.shared.change(|change| {
            let nodes = change.state.nodes.iter_mut();
            let node = nodes
                .filter(|it| it.is_connected)
                .choose(&mut rand::rng())?;
            let (asked, answered) = oneshot::channel();
            node.maps.push(asked);
            change.effects.woken.push(node.wake.clone());
            Some(answered)
        })?;
        timeout(within, answered).await.ok()?.ok()
    }
}

impl<B: Backend> Drop for SearchTask<B> {
    fn drop(&mut self) {
        if !self.has_ended {
            self.shared.change(|change| {
                change.state.search.is_running = false;
                change.state.search.is_due = true;
            });
            self.shared.lack_task();
        }
    }
}

/// A request that is routed again after a pause. If its runtime ends before that, it is answered when it is dropped.
struct DelayedRequest<B: Backend> {
    shared: Arc<Shared<B>>,
    request: Option<Request>,
}

impl<B: Backend> DelayedRequest<B> {
    async fn run(mut self, due: Instant) {
        sleep_until(due).await;
        if let Some(request) = self.request.take() {
            self.shared.change(|change| change.route(request));
        }
    }
}

impl<B: Backend> Drop for DelayedRequest<B> {
    fn drop(&mut self) {
        if let Some(request) = self.request.take() {
            let error = self.shared.error(Trouble::Abandoned);
            self.shared
                .change(|change| change.answer_unsent(request, error));
            // The key is settled once there is a runtime.
            self.shared.lack_task();
        }
    }
}
