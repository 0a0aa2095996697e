//! The one task of a session on a cluster: takes wishes to the primaries that have their slots.

use std::collections::{HashSet, VecDeque};
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use rand::seq::SliceRandom;
use tokio::task::coop;
use tokio::time::{Instant, Sleep, sleep_until};

use super::keys::{Hearing, Keys};
use super::map::{Address, SlotMap};
use super::node::{Common, Node};
use super::parcel::Parcel;
use super::seeds::{Seeds, find_map};
use crate::StoreError;
use crate::store::contract::{Answer, News, Op, OpError, Opening};
use crate::store::redis::call::{Job, Wish};
use crate::store::redis::fault::{Fault, Refusal};
use crate::store::redis::inbox::{Inbox, Pace};
use crate::store::redis::keys::Names;
use crate::store::redis::pauses::Pauses;
use crate::store::redis::teller::Teller;

/// The map is asked for no more often.
const MAP_PAUSE: Duration = Duration::from_millis(50);

/// Tickets are entered again no more often: slots move one after the other, each with its own notice.
pub(super) const UP_PAUSE: Duration = Duration::from_millis(20);

/// The task's state. Dropped, wherever the task stands, it answers every job that it has.
pub(in crate::store::redis) struct Task {
    inbox: Arc<Inbox>,
    seeds: Seeds,
    pub(super) opening: Opening,
    pub(super) names: Names,
    /// The last call's number, over all connections of this task.
    number: u64,
    /// `None`: not known yet.
    pub(super) map: Option<SlotMap>,
    pub(super) search: Search,
    pub(super) nodes: Vec<Node>,
    /// What waits for the first map.
    homeless: Vec<Parcel>,
    /// What is put off, and until when.
    later: Vec<(Instant, Parcel)>,
    pub(super) keys: Keys,
    /// Some keys wait for the word that the store is up: their ops were lost or not sent, or nobody
    /// hears their grants.
    pub(super) owes_up: bool,
    /// A primary stands that did not.
    pub(super) has_up: bool,
    pub(super) told_up: Option<Instant>,
    /// Whether it was said that there is no push.
    pub(super) was_warned: bool,
    pub(super) teller: Teller,
    /// Empty; what came in passes through it.
    room: VecDeque<Job>,
    /// Whether the task was ever polled.
    has_begun: bool,
}

/// The search for the map: one at a time.
#[derive(Default)]
pub(super) struct Search {
    running: Option<BoxFuture<'static, Result<SlotMap, Fault>>>,
    due: Option<Instant>,
    began: Option<Instant>,
    pauses: Pauses,
}

impl Search {
    pub(super) fn want(&mut self, now: Instant) {
        let due = self.began.map_or(now, |began| began + MAP_PAUSE).max(now);
        self.due = Some(self.due.map_or(due, |other| other.min(due)));
    }
}

impl Task {
    pub(in crate::store::redis) fn new(inbox: Arc<Inbox>, seeds: Seeds, opening: Opening) -> Self {
        Self {
            inbox,
            seeds,
            names: Names::clustered(opening.prefix.clone(), opening.instance.clone()),
            teller: Teller::new(opening.listener.clone()),
            opening,
            number: 0,
            map: None,
            search: Search::default(),
            nodes: Vec::new(),
            homeless: Vec::new(),
            later: Vec::new(),
            keys: Keys::default(),
            owes_up: false,
            has_up: false,
            told_up: None,
            was_warned: false,
            room: VecDeque::new(),
            has_begun: false,
        }
    }

    /// Runs until the session is dropped, or the registry has gone.
    pub(in crate::store::redis) async fn run(mut self) {
        self.has_begun = true;
        self.search.want(Instant::now());
        let mut alarm = Box::pin(sleep_until(Instant::now()));
        poll_fn(|cx| self.work(alarm.as_mut(), cx)).await;
    }

    /// Takes turns as long as there is something to do.
    fn work(&mut self, mut alarm: Pin<&mut Sleep>, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            if !self.teller.has_listener() {
                return Poll::Ready(());
            }
            let now = Instant::now();
            let had_work = self.turn(cx, now);
            self.teller.tell_all();
            if self.inbox.is_closed() {
                return Poll::Ready(());
            }
            if !coop::has_budget_remaining() {
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            if had_work {
                continue;
            }
            let Some(deadline) = self.deadline() else {
                return Poll::Pending;
            };
            if deadline <= now {
                continue;
            }
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
        if self.inbox.poll_hurried(cx).is_ready() {
            had_work = true;
            self.inbox.take(&mut self.room);
            if self.room.is_empty() {
                self.hurry(now);
            }
            for job in std::mem::take(&mut self.room) {
                self.accept(job, now);
            }
        }
        had_work |= self.take_up_later(now);
        while let Some((key, address)) = self.keys.next_to_leave(now) {
            had_work = true;
            if let Some(index) = self.find(&address) {
                self.nodes[index].leave(&self.names, &key, now);
            }
        }
        had_work |= self.search(cx, now);

        let mut events = Vec::new();
        for index in 0..self.nodes.len() {
            let mut common = Common {
                names: &self.names,
                response_timeout: self.opening.response_timeout,
                number: &mut self.number,
            };
            self.nodes[index].poll(cx, &mut common, now, &mut events);
            had_work |= !events.is_empty();
            for event in events.drain(..) {
                self.on_event(index, event, now);
            }
        }
        had_work |= self.tell_up(now);
        let waits = |node: &Node| node.is_wanted && !node.stands();
        let is_pausing = self.map.is_none() || self.nodes.iter().any(waits);
        self.inbox.set_pace(if is_pausing {
            Pace::Pausing
        } else {
            Pace::Running
        });
        had_work
    }

    fn deadline(&self) -> Option<Instant> {
        let timeout = self.opening.response_timeout;
        let nodes = self.nodes.iter().filter_map(|node| node.deadline(timeout));
        let later = self.later.iter().map(|(due, _)| *due);
        let search = self.search.due.filter(|_| self.search.running.is_none());
        let up = self.told_up.map(|told| told + UP_PAUSE);
        let up = up.filter(|_| self.owes_up && self.all_stand());
        nodes
            .chain(later)
            .chain(search)
            .chain(up)
            .chain(self.keys.deadline())
            .min()
    }

    /// Somebody arrived: nobody pauses before the next attempt.
    fn hurry(&mut self, now: Instant) {
        for node in &mut self.nodes {
            node.hurry(now);
        }
        if self.search.due.is_some() {
            self.search.want(now);
        }
    }

    // ---- where a wish goes

    fn accept(&mut self, mut job: Job, now: Instant) {
        // To be told that a lock is free would take a subscription to its channel, as grants do: who
        // listens asks by its policy instead (W7).
        job.listen_to_nothing();
        let slot = self.names.slot(&job.key);
        let mut parcel = Parcel::new(job, slot, now);
        if parcel.enters() && !self.keys.enters(&parcel.job.key, now) {
            parcel.try_first();
        }
        self.route(parcel, now);
    }

    pub(super) fn route(&mut self, parcel: Parcel, now: Instant) {
        let Some(map) = &self.map else {
            self.homeless.push(parcel);
            self.search.want(now);
            return;
        };
        let asking = parcel.asking.clone();
        let Some(address) = asking.or_else(|| map.owner(parcel.slot).cloned()) else {
            self.search.want(now);
            let address = self.seeds.address().clone();
            let why = Refusal::parse("CLUSTERDOWN nobody has the slot");
            self.put_off(parcel, &address, &why, now);
            return;
        };
        let index = self.node(&address, now);
        let node = &mut self.nodes[index];
        if !node.stands() {
            node.hurry(now);
            node.parked.push(parcel);
        } else if parcel.enters() && parcel.asking.is_none() {
            self.enter(index, parcel, now);
        } else {
            node.traffic.add([parcel]);
        }
    }

    /// Sends what puts a ticket into the queue once the grants of its key are heard.
    fn enter(&mut self, index: usize, parcel: Parcel, now: Instant) {
        let node = &mut self.nodes[index];
        if !node.hears() {
            let reason = "ERR no grants reach us from there";
            self.refuse(index, parcel, &Refusal::parse(reason));
            return;
        }
        let Some(listened) = self.keys.listened_at(&parcel.job.key, &node.address, now) else {
            node.traffic.add([parcel]);
            return;
        };
        match listened.hearing {
            Hearing::Yes => {
                if listened.is_waited_for() {
                    node.test_ears(now);
                }
                node.traffic.add([parcel]);
            }
            Hearing::Soon => listened.waiting.push(parcel),
            Hearing::Not => {
                listened.hearing = Hearing::Soon;
                node.listen(&self.names, &parcel.job.key, now);
                listened.waiting.push(parcel);
            }
        }
    }

    /// Tries again after a pause, for most of the response time-out: after that its caller would not
    /// learn the reason any more. `address`: who has refused.
    pub(super) fn put_off(
        &mut self,
        mut parcel: Parcel,
        address: &Address,
        why: &Refusal,
        now: Instant,
    ) {
        let patience = self.opening.response_timeout * 3 / 4;
        if now.saturating_duration_since(parcel.since) >= patience {
            let fault = Fault::Refused {
                address: address.clone(),
                refusal: why.clone(),
            };
            self.answer(parcel, Err(OpError::Refused(fault.into())));
            return;
        }
        let pause = Duration::from_millis(10 << parcel.pauses.min(4));
        parcel.pauses += 1;
        parcel.hops = 0;
        parcel.asking = None;
        let due = now + pause.mul_f64(rand::random_range(0.5..=1.0));
        // The last time is early enough, too.
        let due = due.min(parcel.since + patience);
        self.later.push((due, parcel));
    }

    fn take_up_later(&mut self, now: Instant) -> bool {
        let due = |(due, _): &mut (Instant, Parcel)| *due <= now;
        let parcels: Vec<_> = self.later.extract_if(.., due).collect();
        let had_work = !parcels.is_empty();
        for (_, parcel) in parcels {
            self.route(parcel, now);
        }
        had_work
    }

    fn find(&self, address: &str) -> Option<usize> {
        self.nodes.iter().position(|node| *node.address == *address)
    }

    fn node(&mut self, address: &str, now: Instant) -> usize {
        self.find(address).unwrap_or_else(|| {
            let endpoint = self.seeds.node(address);
            self.nodes.push(Node::new(endpoint, address.into(), now));
            self.nodes.len() - 1
        })
    }

    pub(super) fn all_stand(&self) -> bool {
        let mut wanted = self.nodes.iter().filter(|node| node.is_wanted).peekable();
        wanted.peek().is_some() && wanted.all(Node::stands)
    }

    // ---- where the nodes are

    fn search(&mut self, cx: &mut Context<'_>, now: Instant) -> bool {
        let search = &mut self.search;
        if search.running.is_none() && search.due.is_some_and(|due| due <= now) {
            search.due = None;
            search.began = Some(now);
            let mut nodes: Vec<_> = self.nodes.iter().map(|node| &node.address).collect();
            nodes.shuffle(&mut rand::rng());
            let mut endpoints: Vec<_> = nodes.iter().map(|node| self.seeds.node(node)).collect();
            for seed in self.seeds.endpoints() {
                if !nodes.contains(&seed.address()) {
                    endpoints.push(seed.clone());
                }
            }
            let finding = find_map(endpoints, self.opening.response_timeout);
            search.running = Some(finding.boxed());
        }
        let Some(running) = &mut search.running else {
            return false;
        };
        let Poll::Ready(found) = running.poll_unpin(cx) else {
            return false;
        };
        search.running = None;
        match found {
            Ok(map) => self.on_map(map, now),
            Err(fault) => self.on_no_map(&fault.into(), now),
        }
        true
    }

    fn on_map(&mut self, map: SlotMap, now: Instant) {
        let wanted = map.wanted(self.names.only_slot());
        self.map = Some(map);
        let named: HashSet<&Address> = wanted.iter().map(|(address, _)| address).collect();
        for node in &mut self.nodes {
            node.is_wanted &= named.contains(&node.address);
        }
        for (address, slot) in wanted {
            let index = self.node(&address, now);
            let node = &mut self.nodes[index];
            // It may have been forsaken.
            if !std::mem::replace(&mut node.is_wanted, true) {
                node.hurry(now);
            }
            node.slot = Some(slot);
        }
        let mut homeless = std::mem::take(&mut self.homeless);
        for node in &mut self.nodes {
            if !node.is_wanted {
                homeless.append(&mut node.parked);
                homeless.extend(node.traffic.cancel());
            }
        }
        self.nodes.retain(|node| node.is_wanted || !node.is_idle());
        let map = self.map.as_ref().expect("it was just put there");
        let homes = |key: &str| map.owner(self.names.slot(key));
        let (mut moved, are_needed) = self.keys.move_to(homes, now);
        homeless.append(&mut moved);
        self.owes_up |= are_needed;
        for parcel in homeless {
            self.route(parcel, now);
        }
        if self.all_stand() {
            self.search.pauses = Pauses::default();
        }
    }

    fn on_no_map(&mut self, error: &StoreError, now: Instant) {
        tracing::debug!(%error, "found no node of the cluster");
        let due = now + self.search.pauses.next().max(MAP_PAUSE);
        self.search.due = Some(due);
        for parcel in std::mem::take(&mut self.homeless) {
            self.answer(parcel, Err(OpError::Unsent(error.clone())));
        }
        if !self.nodes.iter().any(Node::stands) {
            self.owes_up = true;
            self.teller.announce(News::Down(error.clone()));
        }
    }

    // ---- what is told

    pub(super) fn answer(&mut self, mut parcel: Parcel, result: Result<Answer, OpError>) {
        parcel.own_up();
        match parcel.job.wish {
            Wish::Op { op, .. } => {
                let key = parcel.job.key;
                self.learn(&key, &op, &result);
                self.teller.tell(News::Replied { key, op, result });
            }
            Wish::Look(answer) => {
                if let Err(error) = result {
                    // Whoever asked may have gone.
                    let _ = answer.send(Err(error.store_error().clone()));
                }
            }
        }
    }

    fn learn(&mut self, key: &Arc<str>, op: &Op, result: &Result<Answer, OpError>) {
        self.owes_up |= matches!(result, Err(OpError::Unknown(_) | OpError::Unsent(_)));
        self.owes_up |= self.keys.answered(key, op, result, Instant::now());
    }
}

impl Drop for Task {
    /// As for a link: the session was dropped, or the runtime has gone.
    fn drop(&mut self) {
        if !self.has_begun {
            self.inbox.set_pace(Pace::Absent);
            return;
        }
        let now = Instant::now();
        for job in self.inbox.resign() {
            let slot = self.names.slot(&job.key);
            self.homeless.push(Parcel::new(job, slot, now));
        }
        let address = self.seeds.address().clone();
        let error = StoreError::from(Fault::Abandoned { address });
        let mut unsent = std::mem::take(&mut self.homeless);
        unsent.extend(self.later.drain(..).map(|(_, parcel)| parcel));
        unsent.append(&mut self.keys.take_waiting());
        let mut sent = Vec::new();
        for node in &mut self.nodes {
            sent.extend(node.traffic.crash());
            unsent.extend(node.traffic.cancel());
            unsent.append(&mut node.parked);
        }
        for parcel in sent {
            self.answer(parcel, Err(OpError::Unknown(error.clone())));
        }
        for parcel in unsent {
            self.answer(parcel, Err(OpError::Unsent(error.clone())));
        }
        self.teller.announce(News::Down(error));
    }
}
