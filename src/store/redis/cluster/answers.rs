//! What the task makes of what its nodes say: where a wish goes next, and who is told.

use std::sync::Arc;

use tokio::time::Instant;

use super::keys::Hearing;
use super::node::{Event, Node};
use super::parcel::Parcel;
use super::task::{Task, UP_PAUSE};
use crate::StoreError;
use crate::store::contract::{Answer, News, OpError, Outcome, ServerTime};
use crate::store::redis::call::Wish;
use crate::store::redis::endpoint::is_host;
use crate::store::redis::fault::{Fault, Refusal};
use crate::store::redis::reply::Verdict;

/// So often a wish may be sent on at once; after that it is put off each time, so that two nodes that
/// name each other are not kept busy.
const HOPS: u32 = 4;

/// So many nodes that the map does not name are connected to at most, each of which a redirect has named: the map that
/// is asked for then either names them, too, or they are forgotten.
pub(in crate::store::redis) const STRANGERS: usize = 32;

impl Task {
    pub(super) fn on_event(&mut self, index: usize, event: Event, now: Instant) {
        match event {
            Event::Up { deaf } => self.on_up(index, deaf, now),
            Event::Down {
                fault,
                had_stood,
                sent,
                unsent,
            } => self.on_down(index, fault, had_stood, sent, unsent, now),
            Event::Answered {
                parcel,
                at,
                verdict,
            } => self.on_verdict(index, parcel, at, verdict, now),
            Event::Subscribed(key) => {
                let node = &mut self.nodes[index];
                if let Some(listened) = self.keys.get(&key)
                    && listened.node == node.address
                    && listened.hearing == Hearing::Soon
                {
                    listened.hearing = Hearing::Yes;
                    node.traffic.add(listened.waiting.drain(..));
                }
            }
            Event::NotSubscribed(key, refusal) => {
                let node = &self.nodes[index];
                if let Some(listened) = self.keys.get(&key)
                    && listened.node == node.address
                {
                    listened.hearing = Hearing::Not;
                    for parcel in std::mem::take(&mut listened.waiting) {
                        self.on_refused(index, parcel, &refusal, now);
                    }
                }
            }
            Event::Unsubscribed(key) => {
                self.search.want(now);
                let node = &self.nodes[index];
                if let Some(listened) = self.keys.get(&key)
                    && listened.node == node.address
                {
                    let waiting = std::mem::take(&mut listened.waiting);
                    self.owes_up |= self.keys.ended(&key);
                    for parcel in waiting {
                        self.route(parcel, now);
                    }
                }
            }
            Event::Granted { key, grant } => {
                self.keys.granted(&key, &grant, now);
                self.teller.tell(News::Granted { key, grant });
            }
        }
    }

    fn on_up(&mut self, index: usize, deaf: Option<String>, now: Instant) {
        let node = &mut self.nodes[index];
        let address = node.address.clone();
        tracing::debug!(address = &*address, ?deaf, "connected");
        let parked = std::mem::take(&mut node.parked);
        let is_up = node.is_wanted && node.stands();
        self.has_up |= is_up;
        if let Some(reason) = deaf.filter(|_| is_up && !self.was_warned) {
            self.was_warned = true;
            tracing::warn!(
                address = &*address,
                reason,
                "this cluster cannot push grants to us: busy locks are asked for again and again"
            );
        }
        // What stands is known before what waited for it goes.
        self.tell_up(now);
        for parcel in parked {
            self.route(parcel, now);
        }
    }

    /// Says that what was lost may be asked for again. True: it was said.
    pub(super) fn tell_up(&mut self, now: Instant) -> bool {
        let is_time = self.told_up.is_none_or(|told| told + UP_PAUSE <= now);
        let is_due = self.owes_up && is_time && self.all_stand();
        if !is_due && !self.has_up {
            return false;
        }
        self.has_up = false;
        self.owes_up &= !self.all_stand();
        self.told_up = Some(now);
        let mut standing = self
            .nodes
            .iter()
            .filter(|node| node.is_wanted && node.stands());
        let queue = standing.all(Node::hears);
        self.teller.announce(News::Up { queue });
        true
    }

    fn on_down(
        &mut self,
        index: usize,
        fault: Fault,
        had_stood: bool,
        sent: Vec<Parcel>,
        unsent: Vec<Parcel>,
        now: Instant,
    ) {
        let error = StoreError::from(fault);
        let node = &mut self.nodes[index];
        let address = node.address.clone();
        let is_wanted = node.is_wanted;
        tracing::debug!(address = &*address, %error, had_stood, "lost the connections");
        self.owes_up = true;
        self.search.want(now);
        let mut waiting = unsent;
        waiting.append(&mut self.keys.deafen(&address));
        for parcel in sent {
            self.answer(parcel, Err(OpError::Unknown(error.clone())));
        }
        for mut parcel in waiting {
            parcel.asking = None;
            if !is_wanted {
                let why = Refusal::parse("CLUSTERDOWN a node has gone");
                self.put_off(parcel, &address, &why, now);
            } else if had_stood {
                self.nodes[index].parked.push(parcel);
            } else {
                self.answer(parcel, Err(OpError::Unsent(error.clone())));
            }
        }
        if !is_wanted {
            self.nodes[index].forsake();
        }
    }

    fn on_verdict(
        &mut self,
        index: usize,
        mut parcel: Parcel,
        at: ServerTime,
        verdict: Verdict,
        now: Instant,
    ) {
        if let Verdict::Done(Outcome::Busy { .. }) = verdict
            && parcel.own_up()
        {
            // Now it stands in the queue, once the grants of its key are heard.
            self.route(parcel, now);
            return;
        }
        match (verdict, &mut parcel.job.wish) {
            (Verdict::Refused(refusal), _) => self.on_refused(index, parcel, &refusal, now),
            (
                Verdict::Stale,
                Wish::Op {
                    was_stale: was_stale @ false,
                    ..
                },
            ) => {
                *was_stale = true;
                self.route(parcel, now);
            }
            (Verdict::Stale, _) => {
                let fault = Fault::Garbled {
                    address: self.nodes[index].address.clone(),
                    what: "the server's clock runs away from ours",
                };
                self.answer(parcel, Err(OpError::Unknown(fault.clone().into())));
                let mut events = Vec::new();
                self.nodes[index].give_up(fault, now, &mut events);
                for event in events {
                    self.on_event(index, event, now);
                }
            }
            (Verdict::Done(outcome), _) => self.answer(parcel, Ok(Answer { at, outcome })),
            (Verdict::Seen(sight), _) => {
                if let Wish::Look(answer) = parcel.job.wish {
                    // Whoever asked may have gone.
                    let _ = answer.send(Ok(sight));
                }
            }
        }
    }

    /// Nothing of the call was done.
    fn on_refused(&mut self, index: usize, mut parcel: Parcel, refusal: &Refusal, now: Instant) {
        let address = self.nodes[index].address.clone();
        let mut words = refusal.text().split(' ');
        match refusal.code() {
            code @ ("MOVED" | "ASK") => {
                let Some(to) = words.nth(1).and_then(|to| self.absolute(index, to)) else {
                    self.refuse(index, parcel, refusal);
                    return;
                };
                let is_asked = code == "ASK";
                if self.is_one_too_many(&to) {
                    self.search.want(now);
                    self.put_off(parcel, &address, refusal, now);
                    return;
                }
                if !is_asked {
                    self.search.want(now);
                    if let Some(map) = &mut self.map {
                        map.moved(parcel.slot, &to);
                    }
                }
                if parcel.hops >= HOPS {
                    self.put_off(parcel, &address, refusal, now);
                } else {
                    parcel.hops += 1;
                    parcel.asking = is_asked.then_some(to);
                    self.route(parcel, now);
                }
            }
            "CLUSTERDOWN" | "READONLY" | "LOADING" | "MASTERDOWN" => {
                self.search.want(now);
                self.put_off(parcel, &address, refusal, now);
            }
            "TRYAGAIN" => {
                // In time for whoever waits for the answer, one response time-out at most.
                let patience = self.opening.response_timeout / 2;
                if parcel.is_release() && now.saturating_duration_since(parcel.since) > patience {
                    parcel.is_bare = true;
                }
                self.put_off(parcel, &address, refusal, now);
            }
            _ => self.refuse(index, parcel, refusal),
        }
    }

    /// Where a redirect leads; without a host, to another port of the node's own.
    fn absolute(&self, index: usize, to: &str) -> Option<Arc<str>> {
        let (host, port) = to.rsplit_once(':')?;
        port.parse::<u16>().ok()?;
        if !matches!(host, "" | "?") && !is_host(host) {
            return None;
        }
        if host.is_empty() || host == "?" {
            let (own, _) = self.nodes[index].address.rsplit_once(':')?;
            return Some(format!("{own}:{port}").into());
        }
        Some(to.into())
    }

    /// Whether a node is a stranger, and there are enough of those.
    fn is_one_too_many(&self, address: &str) -> bool {
        let is_known = self.nodes.iter().any(|node| *node.address == *address);
        let strangers = self.nodes.iter().filter(|node| !node.is_wanted);
        !is_known && strangers.count() >= STRANGERS
    }

    pub(super) fn refuse(&mut self, index: usize, parcel: Parcel, refusal: &Refusal) {
        let fault = Fault::Refused {
            address: self.nodes[index].address.clone(),
            refusal: refusal.clone().naming(&self.names),
        };
        self.answer(parcel, Err(OpError::Refused(fault.into())));
    }
}
