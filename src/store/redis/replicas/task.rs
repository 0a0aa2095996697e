//! The one task that asks the replicas, for as long as its session lives.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use tokio::task::coop;
use tokio::time::{Instant, Sleep, sleep_until};

use super::ledger::{Hint, Round, Said, Seen};
#[cfg(feature = "cluster")]
use super::places::{Slots, Strangers};
use super::session::Core;
use super::wire::Wire;
use crate::store::redis::endpoint::Endpoint;
use crate::store::redis::fault::Fault;
use crate::store::redis::keys::Names;
use crate::store::redis::pauses::Pauses;
use crate::store::redis::session::Place;

pub(super) struct Task {
    core: Arc<Core>,
    names: Arc<Names>,
    guide: Guide,
    /// One for each primary that has been asked.
    lanes: Vec<Lane>,
    /// How many arrivals have been seen.
    arrivals: u64,
    /// Whether the task was ever polled.
    has_begun: bool,
}

/// Who knows where a lock is.
enum Guide {
    /// It is all here.
    Server(Box<Endpoint>),
    #[cfg(feature = "cluster")]
    Cluster(Box<Slots>),
}

/// Where locks are to be asked for in one turn.
enum Places<'a> {
    One(&'a Arc<str>),
    #[cfg(feature = "cluster")]
    Many(&'a Slots, Strangers),
}

impl Places<'_> {
    /// Whom to ask for it, and its slot; `None` while nobody is known.
    #[cfg_attr(not(feature = "cluster"), allow(unused_variables))]
    fn find(&mut self, names: &Names, key: &str, hint: &Hint) -> Option<(Arc<str>, u16)> {
        match self {
            Self::One(address) => Some((address.clone(), 0)),
            #[cfg(feature = "cluster")]
            Self::Many(slots, strangers) => {
                let slot = names.slot(key);
                let to = hint.to.clone().filter(|to| strangers.admits(to));
                Some((to.or_else(|| slots.owner(slot))?, slot))
            }
        }
    }
}

/// A primary, and the round that is under way there.
struct Lane {
    address: Arc<str>,
    wire: Option<Wire>,
    /// How often the session's connection had gone when `wire` was made.
    downs: u64,
    asking: Option<Asking>,
    pauses: Pauses,
    /// After a failure.
    not_before: Option<Instant>,
}

/// Dropped, it takes its connection along: WAIT holds that up.
struct Asking {
    number: u64,
    downs: u64,
    wait: Duration,
    /// May be dropped half-way: it changes nothing in the store.
    answer: BoxFuture<'static, Result<(Wire, Seen), Fault>>,
}

impl Task {
    pub(super) fn new(core: Arc<Core>) -> Self {
        let opening = &core.opening;
        let (prefix, instance) = (opening.prefix.clone(), opening.instance.clone());
        let (names, guide) = match core.place.clone() {
            Place::Server(endpoint) => (Names::new(prefix, instance), Guide::Server(endpoint)),
            #[cfg(feature = "cluster")]
            Place::Cluster(seeds) => {
                let slots = Slots::new(seeds, opening.response_timeout);
                let guide = Guide::Cluster(Box::new(slots));
                (Names::clustered(prefix, instance), guide)
            }
        };
        Self {
            names: Arc::new(names),
            core,
            guide,
            lanes: Vec::new(),
            arrivals: 0,
            has_begun: false,
        }
    }

    pub(super) async fn run(mut self) {
        self.has_begun = true;
        let mut alarm = Box::pin(sleep_until(Instant::now()));
        poll_fn(|cx| self.work(alarm.as_mut(), cx)).await;
    }

    /// Takes turns as long as there is something to do; ready when the session was dropped.
    fn work(&mut self, mut alarm: Pin<&mut Sleep>, cx: &mut Context<'_>) -> Poll<()> {
        self.core.bell.register(cx.waker());
        loop {
            if self.core.closed.load(Ordering::Acquire) {
                return Poll::Ready(());
            }
            let now = Instant::now();
            let had_work = self.turn(cx, now);
            if !coop::has_budget_remaining() {
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            if had_work {
                continue;
            }
            let Some(deadline) = self.deadline(now) else {
                return Poll::Pending;
            };
            if alarm.deadline() != deadline {
                alarm.as_mut().reset(deadline);
            }
            if alarm.as_mut().poll(cx).is_pending() {
                return Poll::Pending;
            }
        }
    }

    /// True: something came of it, so there may be more to do.
    fn turn(&mut self, cx: &mut Context<'_>, now: Instant) -> bool {
        let mut had_work = false;
        for index in 0..self.lanes.len() {
            let lane = &mut self.lanes[index];
            let Some(asking) = &mut lane.asking else {
                if let Some(wire) = &mut lane.wire
                    && wire.poll_ended(cx).is_ready()
                {
                    lane.wire = None;
                }
                continue;
            };
            if !self.core.is_wanted(asking.number) {
                // A round of which nothing is left, since the session's connection has gone, is not waited for.
                lane.asking = None;
                had_work = true;
            } else if let Poll::Ready(answer) = asking.answer.poll_unpin(cx) {
                let asking = lane.asking.take().expect("it was just looked at");
                self.on_answer(index, &asking, answer, now);
                had_work = true;
            }
        }
        had_work |= self.begin(now);
        // Last, since each of the others may want one.
        had_work | self.search(cx, now)
    }

    /// Begins a round at every primary that is free and waited for.
    fn begin(&mut self, now: Instant) -> bool {
        let arrivals = self.core.arrivals();
        let is_new = std::mem::replace(&mut self.arrivals, arrivals) != arrivals;
        if !self.core.is_waiting() {
            return false;
        }
        match &mut self.guide {
            // Whoever comes meanwhile is a reason to try at once.
            Guide::Server(_) if is_new => {
                self.lanes
                    .iter_mut()
                    .for_each(|lane| lane.not_before = None);
            }
            Guide::Server(_) => {}
            #[cfg(feature = "cluster")]
            Guide::Cluster(slots) => {
                if !slots.has_map() && slots.due().is_none() {
                    slots.search(now);
                }
            }
        }
        let (mut places, names, lanes) = (self.places(), &self.names, &self.lanes);
        let rounds = self.core.begin(now, |key, hint| {
            let (address, slot) = places.find(names, key, hint)?;
            let is_free =
                |lane: &Lane| lane.asking.is_none() && lane.not_before.is_none_or(|due| due <= now);
            let mut lanes = lanes.iter();
            let lane = lanes.find(|lane| lane.address == address);
            lane.is_none_or(is_free).then_some((address, slot))
        });
        let had_work = !rounds.is_empty();
        for (address, round) in rounds {
            self.ask(address, round);
        }
        had_work
    }

    fn ask(&mut self, address: Arc<str>, round: Round) {
        let index = self.lanes.iter().position(|lane| lane.address == address);
        let index = index.unwrap_or_else(|| {
            self.lanes.push(Lane {
                address,
                wire: None,
                downs: 0,
                asking: None,
                pauses: Pauses::default(),
                not_before: None,
            });
            self.lanes.len() - 1
        });
        let lane = &mut self.lanes[index];
        // One that was made before the session's connection was may lead to the server of that time.
        let wire = lane.wire.take().filter(|_| lane.downs == round.downs);
        let (number, downs, wait) = (round.number, round.downs, round.wait);
        let (endpoint, is_node) = match &self.guide {
            Guide::Server(endpoint) => ((**endpoint).clone(), false),
            #[cfg(feature = "cluster")]
            Guide::Cluster(slots) => (slots.endpoint(&lane.address), true),
        };
        let (names, rule) = (self.names.clone(), self.core.rule);
        let timeout = self.core.opening.response_timeout;
        let answer = async move {
            let mut wire = match wire {
                Some(wire) => wire,
                None => Wire::connect(&endpoint, is_node, timeout).await?,
            };
            let seen = wire.confirm(&names, &round, rule, timeout).await?;
            Ok((wire, seen))
        };
        lane.asking = Some(Asking {
            number,
            downs,
            wait,
            answer: answer.boxed(),
        });
    }

    fn on_answer(
        &mut self,
        index: usize,
        asking: &Asking,
        answer: Result<(Wire, Seen), Fault>,
        now: Instant,
    ) {
        let lane = &mut self.lanes[index];
        match answer {
            Ok((wire, seen)) => {
                lane.pauses = Pauses::default();
                let address = wire.address().clone();
                let has = |what: fn(&Said) -> bool| seen.said.iter().any(what);
                // It may be another server than the session's, after a fail-over. So may the next be, but not for ever.
                let is_another = has(|said| matches!(said, Said::Gone))
                    && !has(|said| matches!(said, Said::Ours));
                if !is_another {
                    lane.wire = Some(wire);
                    lane.downs = asking.downs;
                }
                if is_another || has(|said| matches!(said, Said::Elsewhere(..))) {
                    self.doubt(now);
                }
                self.core
                    .act(|ledger| ledger.seen(now, asking.number, &seen, &address));
            }
            Err(fault) => {
                tracing::debug!(%fault, "could not ask the replicas");
                lane.not_before = Some(now + lane.pauses.next().min(asking.wait));
                self.doubt(now);
                let source = Box::new(fault);
                let error = Fault::Unasked { source }.into();
                self.core
                    .act(|ledger| ledger.failed(now, asking.number, &error));
            }
        }
    }

    fn places(&self) -> Places<'_> {
        match &self.guide {
            Guide::Server(endpoint) => Places::One(endpoint.address()),
            #[cfg(feature = "cluster")]
            Guide::Cluster(slots) => {
                let asked = self.lanes.iter().map(|lane| &lane.address);
                Places::Many(slots, Strangers::new(slots, asked))
            }
        }
    }

    /// The map may be out of date.
    #[cfg_attr(not(feature = "cluster"), allow(unused_variables))]
    fn doubt(&mut self, now: Instant) {
        match &mut self.guide {
            Guide::Server(_) => {}
            #[cfg(feature = "cluster")]
            Guide::Cluster(slots) => slots.search(now),
        }
    }

    #[cfg_attr(not(feature = "cluster"), allow(unused_variables))]
    fn search(&mut self, cx: &mut Context<'_>, now: Instant) -> bool {
        #[cfg(feature = "cluster")]
        if let Guide::Cluster(slots) = &mut self.guide {
            let Poll::Ready(found) = slots.poll(cx, now) else {
                return false;
            };
            match found {
                // Whoever has no slot any more is asked no more.
                Ok(()) => {
                    let known = slots.primaries();
                    self.lanes
                        .retain(|lane| lane.asking.is_some() || known.contains(&lane.address));
                }
                Err(fault) if !slots.has_map() => {
                    let source = Box::new(fault);
                    let error = Fault::Unasked { source }.into();
                    self.core.act(|ledger| ledger.adrift(now, &error));
                }
                Err(fault) => tracing::debug!(%fault, "found no node of the cluster"),
            }
            return true;
        }
        false
    }

    /// When there is something to do if nothing comes. What was due at this turn and waits nevertheless waits for
    /// something else.
    fn deadline(&self, turn: Instant) -> Option<Instant> {
        let free = self.lanes.iter().filter(|lane| lane.asking.is_none());
        let pauses = free.filter_map(|lane| lane.not_before);
        let search = match &self.guide {
            Guide::Server(_) => None,
            #[cfg(feature = "cluster")]
            Guide::Cluster(slots) => slots.due(),
        };
        let waits = self.core.is_waiting();
        let due = pauses.chain(self.core.due()).filter(|_| waits);
        due.chain(search).filter(|due| *due > turn).min()
    }
}

impl Drop for Task {
    /// The session was dropped, or the runtime has gone.
    fn drop(&mut self) {
        self.core.runs.store(false, Ordering::Release);
        // A runtime on its way down took the task and dropped it: what waits was never ours, and an answer here could
        // start the next task on the same runtime, without end.
        if self.has_begun {
            let address = self.core.place.address().clone();
            let error = Fault::Abandoned { address }.into();
            self.core.act(|ledger| ledger.give_up(&error));
        }
    }
}
