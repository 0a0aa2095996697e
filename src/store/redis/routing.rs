//! Where a request goes on a cluster: what answers and redirections say, and the map of the slots.

use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use rand::seq::SliceRandom;
use tokio::time::{Instant, sleep, sleep_until};

use super::backoff::Backoff;
use super::change::Change;
use super::cluster::{Seeds, SlotMap, absolute, ask_map};
use super::fault::{Fault, Refusal};
use super::reply::Verdict;
use super::request::{Request, Wish};
use super::session::{NodeId, Shared};
use super::slots::{SLOTS, SlotSet};
use crate::StoreError;
use crate::store::contract::{Answer, News, OpError, Outcome, Scope, ServerTime};

/// A request is redirected so often at once; then it is delayed, so that two nodes that name each
/// other are not kept busy.
const HOPS: u32 = 4;

/// The map is asked for no more often, however many redirections come.
const SEARCH_PAUSE: Duration = Duration::from_millis(50);

/// Answers and redirections.
impl Change<'_> {
    pub(super) fn on_verdict(
        &mut self,
        id: NodeId,
        mut request: Request,
        at: ServerTime,
        verdict: Verdict,
    ) {
        let node = &self.state.nodes[id];
        match verdict {
            // Now it enters the queue, once the grants of its key are heard.
            Verdict::Done(Outcome::Busy { .. })
                if node.no_push.is_none() && request.restore_enter() =>
            {
                self.route(request);
            }
            Verdict::Done(outcome) => {
                let (key, heard) = (request.key.clone(), request.heard);
                let is_busy = matches!(outcome, Outcome::Busy { .. });
                self.answer(request, Ok(Answer { at, outcome }));
                let subscriptions = &self.state.subscriptions;
                if is_busy && heard.is_some_and(|it| !subscriptions.is_heard(&key, it)) {
                    // The ticket may have been dropped for want of a subscription meanwhile.
                    self.effects.news.push(News::Up {
                        scope: Scope::Keys(Arc::new(move |other| *other == *key)),
                        queue: true,
                        complete: false,
                    });
                }
            }
            Verdict::Seen(sight) => {
                if let Wish::Look(answer) = request.wish {
                    self.effects.looks.push((answer, Ok(sight)));
                }
            }
            Verdict::Stale | Verdict::More => {
                let fault = Fault::Garbled {
                    address: node.address.clone(),
                    what: "the server's clock runs away from ours",
                };
                self.answer(request, Err(OpError::Unknown(fault.into())));
            }
            Verdict::Refused(refusal) => self.on_refused(id, request, &refusal),
        }
    }

    /// Nothing of the call was done.
    pub(super) fn on_refused(&mut self, id: NodeId, mut request: Request, refusal: &Refusal) {
        match refusal.code() {
            _ if !self.shared.is_cluster() => self.refuse(id, request, refusal.clone()),
            code @ ("MOVED" | "ASK") => {
                let to = refusal.text().split(' ').nth(1);
                let to = to.and_then(|to| absolute(to, &self.state.nodes[id].address));
                let Some(to) = to.map(|to| self.state.node(&to)) else {
                    return self.refuse(id, request, refusal.clone());
                };
                if code == "MOVED" {
                    self.on_moved(&request, to);
                }
                if request.hops >= HOPS {
                    self.delay(request, refusal);
                } else {
                    request.hops += 1;
                    request.asking = (code == "ASK").then_some(to);
                    self.route(request);
                }
            }
            "CLUSTERDOWN" | "READONLY" | "LOADING" | "MASTERDOWN" => {
                self.search();
                self.delay(request, refusal);
            }
            "TRYAGAIN" => {
                // In time for the caller, who waits for one response time-out at most.
                let patience = self.shared.opening.response_timeout / 2;
                request.is_bare |= request.is_release() && request.since.elapsed() > patience;
                self.delay(request, refusal);
            }
            _ => self.refuse(id, request, refusal.clone()),
        }
    }

    /// The slot changes at once, and the rest of the map is asked for.
    fn on_moved(&mut self, request: &Request, to: NodeId) {
        let owner = owner_of(to);
        if let Some(owners) = &mut self.state.owners
            && std::mem::replace(&mut owners[usize::from(request.slot)], owner) != owner
        {
            self.state.unsettled.insert(request.slot);
            self.settle_soon();
        }
        self.search();
    }

    /// Asks for the map, unless that is done already.
    pub(super) fn search(&mut self) {
        let search = &mut self.state.search;
        search.is_due = true;
        if !std::mem::replace(&mut search.is_running, true) {
            let task = SearchTask::new(self.shared.clone());
            self.effects.tasks.push(task.run().boxed());
        }
    }

    fn install(&mut self, map: SlotMap) {
        let mut owners = vec![0; SLOTS].into_boxed_slice();
        for (address, slots) in map {
            let owner = owner_of(self.state.node(&address));
            owners[usize::from(*slots.start())..=usize::from(*slots.end())].fill(owner);
        }
        let changed = match &self.state.owners {
            Some(old) => SlotSet::differing(old, &owners),
            None => SlotSet::of(&owners, |owner| *owner > 0),
        };
        // Requests wait for their slots' new nodes.
        let mut rerouted = std::mem::take(&mut self.state.unrouted);
        for (id, node) in self.state.nodes.iter_mut().enumerate() {
            let is_misplaced = |request: &mut Request| {
                request.asking.is_none() && owners[usize::from(request.slot)] != owner_of(id)
            };
            rerouted.extend(node.inbox.extract_if(.., is_misplaced));
        }
        self.state.owners = Some(owners);
        self.state.unsettled.extend(&changed);
        self.settle();
        for request in rerouted {
            self.route(request);
        }
    }

    /// True: the map is to be asked for again.
    fn on_no_map(&mut self, error: StoreError) -> bool {
        self.state.search.backoff.failed(Instant::now(), None);
        for request in std::mem::take(&mut self.state.unrouted) {
            self.answer_unsent(request, error.clone());
        }
        let is_wanted = self.state.owners.is_none() && !self.state.is_closed;
        if is_wanted {
            self.effects.news.push(News::down(error));
        }
        is_wanted
    }
}

impl Shared {
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
                Ok(map) => shared.change(|change| {
                    change.state.search.backoff = Backoff::default();
                    change.install(map);
                }),
                Err(fault) => {
                    let is_wanted = shared.change(|change| change.on_no_map(fault.into()));
                    let listener = shared.opening.listener.upgrade();
                    if is_wanted && listener.is_some_and(|it| it.uses(&Scope::All)) {
                        continue;
                    }
                }
            }
            // Under one lock: a search that is wanted after this starts the next task.
            self.has_ended = shared.change(|change| {
                let again = change.state.search.is_due && !change.state.is_closed;
                change.state.search.is_running = again;
                !again
            });
            if self.has_ended {
                return;
            }
        }
    }

    async fn pause(&self) {
        let (not_before, has_map) = self.shared.change(|change| {
            let search = &mut change.state.search;
            search.is_due = false;
            (search.backoff.not_before(), change.state.owners.is_some())
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
            self.shared.change(|change| {
                change.state.search.is_running = false;
                change.state.search.is_due = true;
            });
            self.shared.lack_task();
        }
    }
}

fn owner_of(id: NodeId) -> u16 {
    u16::try_from(id + 1).expect("a cluster has at most 16,384 primaries")
}
