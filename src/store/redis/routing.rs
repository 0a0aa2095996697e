//! Where a request goes on a cluster: what answers and redirections say, and the map of the slots.

use std::sync::Arc;
use std::time::Duration;

use rand::seq::SliceRandom;
use tokio::time::{Instant, sleep, sleep_until};

use super::backoff::Backoff;
use super::call::Wish;
use super::cluster::{Seeds, SlotMap, absolute, ask_map};
use super::fault::{Fault, Refusal};
use super::reply::Verdict;
use super::request::Request;
use super::session::{Effects, NodeId, Shared, State};
use super::slots::{SLOTS, SlotSet};
use crate::StoreError;
use crate::store::contract::{Answer, News, OpError, Outcome, Scope, ServerTime};

/// A request is redirected so often at once; then it is delayed, so that two nodes that name each
/// other are not kept busy.
const HOPS: u32 = 4;

/// The map is asked for no more often, however many redirections come.
const SEARCH_PAUSE: Duration = Duration::from_millis(50);

impl Shared {
    pub(super) fn on_verdict(
        &self,
        state: &mut State,
        id: NodeId,
        mut request: Request,
        at: ServerTime,
        verdict: Verdict,
        effects: &mut Effects,
    ) {
        match verdict {
            // Now it enters the queue, once the grants of its key are heard.
            Verdict::Done(Outcome::Busy { .. })
                if state.nodes[id].no_push.is_none() && request.restore_enter() =>
            {
                self.route(state, request, effects);
            }
            Verdict::Done(outcome) => {
                let (key, heard) = (request.job.key.clone(), request.heard);
                let is_busy = matches!(outcome, Outcome::Busy { .. });
                self.answer(state, request, Ok(Answer { at, outcome }), effects);
                if is_busy && heard.is_some_and(|it| !state.subscriptions.is_heard(&key, it)) {
                    // The ticket may have been dropped for want of a subscription meanwhile.
                    effects.news.push(News::Up {
                        scope: Scope::Keys(Arc::new(move |other| *other == *key)),
                        queue: true,
                        complete: false,
                    });
                }
            }
            Verdict::Seen(sight) => {
                if let Wish::Look(answer) = request.job.wish {
                    self.answer_look(answer, sight, effects);
                }
            }
            Verdict::Stale | Verdict::More => {
                let fault = Fault::Garbled {
                    address: state.nodes[id].address.clone(),
                    what: "the server's clock runs away from ours",
                };
                self.answer(state, request, Err(OpError::Unknown(fault.into())), effects);
            }
            Verdict::Refused(refusal) => self.on_refused(state, id, request, &refusal, effects),
        }
    }

    /// Nothing of the call was done.
    pub(super) fn on_refused(
        &self,
        state: &mut State,
        id: NodeId,
        mut request: Request,
        refusal: &Refusal,
        effects: &mut Effects,
    ) {
        if !self.is_cluster() {
            self.refuse(state, id, request, refusal, effects);
            return;
        }
        match refusal.code() {
            code @ ("MOVED" | "ASK") => {
                let to = refusal.text().split(' ').nth(1);
                let to = to.and_then(|to| absolute(to, &state.nodes[id].address));
                let Some(to) = to.map(|to| state.node(&to)) else {
                    self.refuse(state, id, request, refusal, effects);
                    return;
                };
                if code == "MOVED" {
                    self.on_moved(state, &request, to, effects);
                }
                if request.hops >= HOPS {
                    self.delay(state, request, refusal, effects);
                } else {
                    request.hops += 1;
                    request.asking = (code == "ASK").then_some(to);
                    self.route(state, request, effects);
                }
            }
            "CLUSTERDOWN" | "READONLY" | "LOADING" | "MASTERDOWN" => {
                self.search(state, effects);
                self.delay(state, request, refusal, effects);
            }
            "TRYAGAIN" => {
                // In time for the caller, who waits for one response time-out at most.
                let patience = self.opening.response_timeout / 2;
                request.is_bare |= request.is_release() && request.since.elapsed() > patience;
                self.delay(state, request, refusal, effects);
            }
            _ => self.refuse(state, id, request, refusal, effects),
        }
    }

    /// The slot changes at once, and the rest of the map is asked for.
    fn on_moved(&self, state: &mut State, request: &Request, to: NodeId, effects: &mut Effects) {
        let owner = owner_of(to);
        if let Some(owners) = &mut state.owners
            && std::mem::replace(&mut owners[usize::from(request.slot)], owner) != owner
        {
            state.unsettled.insert(request.slot);
            self.settle_soon(state, effects);
        }
        self.search(state, effects);
    }

    /// Asks for the map, unless that is done already.
    pub(super) fn search(&self, state: &mut State, effects: &mut Effects) {
        state.search.is_due = true;
        if !std::mem::replace(&mut state.search.is_running, true) {
            effects.searches = true;
        }
    }

    async fn find_map(&self, seeds: &Seeds) -> Result<SlotMap, Fault> {
        let within = self.opening.response_timeout;
        let (standing, mut known) = {
            let nodes = self.nodes();
            let standing = nodes.iter().filter_map(|(address, connection)| {
                let connection = connection.clone()?;
                Some((address.clone(), connection))
            });
            let standing: Vec<_> = standing.collect();
            let known: Vec<_> = nodes.into_iter().map(|(address, _)| address).collect();
            (standing, known)
        };
        let any = rand::random_range(0..standing.len().max(1));
        if let Some((address, mut connection)) = standing.into_iter().nth(any)
            && let Ok(map) = ask_map(&mut connection, &address, within).await
        {
            return Ok(map);
        }
        known.shuffle(&mut rand::rng());
        seeds.find_map_among(&known, within).await
    }

    fn install(self: &Arc<Self>, map: SlotMap) {
        self.change(|state, effects| {
            let mut owners = vec![0; SLOTS].into_boxed_slice();
            for (address, slots) in map {
                let id = state.node(&address);
                owners[usize::from(*slots.start())..=usize::from(*slots.end())].fill(owner_of(id));
            }
            let changed = match &state.owners {
                Some(old) => SlotSet::differing(old, &owners),
                None => SlotSet::of(&owners, |owner| *owner > 0),
            };
            state.owners = Some(owners);
            state.unsettled.extend(&changed);
            self.settle(state, effects);
            let mut rerouted = std::mem::take(&mut state.unrouted);
            rerouted.extend(state.take_misplaced());
            for request in rerouted {
                self.route(state, request, effects);
            }
        });
    }

    /// True: the map is to be asked for again.
    fn on_no_map(self: &Arc<Self>, error: StoreError) -> bool {
        let is_wanted = self.change(|state, effects| {
            state.search.backoff.failed(Instant::now(), None);
            for request in std::mem::take(&mut state.unrouted) {
                self.answer(state, request, Err(OpError::Unsent(error.clone())), effects);
            }
            if state.owners.is_some() || state.is_closed() {
                return false;
            }
            effects.news.push(News::down(error));
            true
        });
        let listener = self.opening.listener.upgrade();
        is_wanted && listener.is_some_and(|listener| listener.uses(&Scope::All))
    }
}

/// Asks for the map until it is found; with an older one at hand only once.
///
/// Made before it is spawned, so that its drop tells also when the runtime never ran it.
pub(super) struct SearchTask {
    shared: Arc<Shared>,
    has_ended: bool,
}

impl SearchTask {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        let has_ended = false;
        Self { shared, has_ended }
    }

    pub(super) async fn run(mut self) {
        let shared = self.shared.clone();
        let Some(seeds) = shared.topology.seeds() else {
            return;
        };
        loop {
            tokio::select! {
                () = self.pause() => {}
                () = shared.closed() => {}
            }
            match shared.find_map(seeds).await {
                Ok(map) => {
                    shared.change(|state, _| state.search.backoff = Backoff::default());
                    shared.install(map);
                }
                Err(fault) => {
                    if shared.on_no_map(fault.into()) {
                        continue;
                    }
                }
            }
            // Under one lock: a search that is wanted after this starts the next task.
            self.has_ended = shared.change(|state, _| {
                let again = state.search.is_due && !state.is_closed();
                state.search.is_running = again;
                !again
            });
            if self.has_ended {
                return;
            }
        }
    }

    async fn pause(&self) {
        let (not_before, has_map) = self.shared.change(|state, _| {
            state.search.is_due = false;
            (state.search.backoff.not_before(), state.owners.is_some())
        });
        if let Some(until) = not_before {
            sleep_until(until).await;
        } else if has_map {
            // A fleet that hears of a change at the same moment does not ask at the same moment.
            sleep(SEARCH_PAUSE.mul_f64(rand::random_range(0.5..=1.5))).await;
        }
    }
}

impl Drop for SearchTask {
    fn drop(&mut self) {
        if !self.has_ended {
            self.shared.change(|state, _| {
                state.search.is_running = false;
                state.search.is_due = true;
            });
            self.shared.lack_task();
        }
    }
}

fn owner_of(id: NodeId) -> u16 {
    u16::try_from(id + 1).expect("a cluster has at most 16,384 primaries")
}
