//! For which keys grants are listened for, where, and for how long.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::map::Address;
use super::parcel::Parcel;
use crate::store::contract::{Answer, Grant, Op, OpError, Outcome, Owner, ServerTime};

/// A key whose last ticket is gone is listened for so much longer, since who waited for it will
/// often do so again; a change of subscription costs as much as a call.
const LINGER: Duration = Duration::from_secs(1);

/// How we listen for a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Hearing {
    Not,
    /// Asked for.
    Soon,
    Yes,
}

/// A key with a subscription, or with wishes for one.
#[derive(Debug)]
pub(super) struct Listened {
    /// Where.
    pub(super) node: Address,
    pub(super) hearing: Hearing,
    /// What goes once grants are heard.
    pub(super) waiting: Vec<Parcel>,
    /// Who stands in the queue, as far as we know.
    ticket: Option<Owner>,
    /// How many are about to.
    entering: usize,
    /// Whose grant was heard while some were, and when it was given: grants come by another connection than
    /// answers do, and the answer that is still to come may be the older of the two.
    granted: Option<(Owner, ServerTime)>,
    /// Since when it has not been needed, as of the last time that it was not.
    needless: Instant,
    /// Whether it is among those that linger.
    lingers: bool,
}

impl Listened {
    fn new(now: Instant) -> Self {
        Self {
            node: "".into(),
            hearing: Hearing::Not,
            waiting: Vec::new(),
            ticket: None,
            entering: 0,
            granted: None,
            needless: now,
            lingers: false,
        }
    }

    /// Somebody stands in the queue: who enters looks whether a grant has been missed (W2).
    pub(super) fn is_waited_for(&self) -> bool {
        self.ticket.is_some()
    }

    /// A grant may come, now or soon.
    pub(super) fn is_needed(&self) -> bool {
        self.ticket.is_some() || self.entering > 0
    }
}

#[derive(Debug, Default)]
pub(super) struct Keys {
    keys: HashMap<Arc<str>, Listened>,
    lingering: VecDeque<(Instant, Arc<str>)>,
    /// Keys that were listened for at a node that had their slot. Mostly it ends that by itself when it has it no more,
    /// but not if it was slow to hear of it and the slot is back by then, nor if it was only said to have lost it.
    strays: VecDeque<(Instant, Arc<str>, Address)>,
}

impl Keys {
    /// One that enters has been handed in. True: its key is listened for, or will be.
    pub(super) fn enters(&mut self, key: &Arc<str>, now: Instant) -> bool {
        let listened = self.keys.entry(key.clone());
        let listened = listened.or_insert_with(|| Listened::new(now));
        listened.entering += 1;
        listened.hearing != Hearing::Not
    }

    pub(super) fn get(&mut self, key: &str) -> Option<&mut Listened> {
        self.keys.get_mut(key)
    }

    /// A key whose slot that node has.
    pub(super) fn listened_at(
        &mut self,
        key: &Arc<str>,
        node: &Address,
        now: Instant,
    ) -> Option<&mut Listened> {
        let listened = self.keys.get_mut(key)?;
        if listened.node != *node {
            self.strays.extend(listened.stray(key, now));
            listened.node = node.clone();
        }
        Some(listened)
    }

    /// Not listened for any more is what is at another node now. Tells what has waited for that, and whether some of
    /// it is needed.
    pub(super) fn move_to<'a>(
        &mut self,
        home: impl Fn(&str) -> Option<&'a Address>,
        now: Instant,
    ) -> (Vec<Parcel>, bool) {
        let (mut waiting, mut are_needed) = (Vec::new(), false);
        for (key, listened) in &mut self.keys {
            if home(key) != Some(&listened.node) {
                self.strays.extend(listened.stray(key, now));
                waiting.append(&mut listened.waiting);
                are_needed |= listened.is_needed();
            }
        }
        (waiting, are_needed)
    }

    /// Nothing is heard from a node any more. Tells what has waited for that.
    pub(super) fn deafen(&mut self, node: &Address) -> Vec<Parcel> {
        let mut waiting = Vec::new();
        for listened in self.keys.values_mut() {
            if listened.node == *node {
                listened.hearing = Hearing::Not;
                waiting.append(&mut listened.waiting);
            }
        }
        waiting
    }

    /// All that waits for a confirmation.
    pub(super) fn take_waiting(&mut self) -> Vec<Parcel> {
        let all = self.keys.values_mut();
        all.flat_map(|listened| std::mem::take(&mut listened.waiting))
            .collect()
    }

    /// Learns from an op's end who stands in the queue. True: somebody does who hears nothing.
    pub(super) fn answered(
        &mut self,
        key: &Arc<str>,
        op: &Op,
        result: &Result<Answer, OpError>,
        now: Instant,
    ) -> bool {
        let Some(listened) = self.keys.get_mut(key) else {
            return false;
        };
        let outcome = result.as_ref().map(|answer| &answer.outcome);
        match op {
            Op::Enter { owner, .. } | Op::Yield { new: owner, .. } => {
                listened.entering = listened.entering.saturating_sub(1);
                if let (Op::Yield { old, .. }, Ok(_)) = (op, outcome) {
                    listened.forget(*old);
                }
                let at = result.as_ref().map(|answer| answer.at);
                let granted = listened.granted.take_if(|(of, _)| of == owner);
                let is_over = granted.is_some_and(|(_, granted)| at.is_ok_and(|at| at <= granted));
                match outcome {
                    Ok(Outcome::Busy { .. }) if is_over => {}
                    Ok(Outcome::Busy { .. }) | Err(OpError::Unknown(_)) => {
                        listened.ticket = Some(*owner);
                    }
                    Ok(_) => listened.forget(*owner),
                    Err(_) => {}
                }
            }
            Op::Withdraw { owner } | Op::Release { owner } | Op::Attempt { owner, .. } => {
                if result.is_ok() {
                    listened.forget(*owner);
                }
            }
            Op::Listen { .. } | Op::Renew { .. } | Op::Adopt { .. } | Op::Raise { .. } => {}
        }
        let is_lost = listened.ticket.is_some() && listened.hearing != Hearing::Yes;
        self.settle(key, now);
        is_lost
    }

    /// A grant took the owner's ticket out of the queue.
    pub(super) fn granted(&mut self, key: &Arc<str>, grant: &Grant, now: Instant) {
        if let Some(listened) = self.keys.get_mut(key) {
            listened.forget(grant.owner);
            if listened.entering > 0 {
                listened.granted = Some((grant.owner, grant.at));
            }
            self.settle(key, now);
        }
    }

    /// A subscription has ended. True: somebody stands in the queue who hears nothing.
    pub(super) fn ended(&mut self, key: &Arc<str>) -> bool {
        let Some(listened) = self.keys.get_mut(key) else {
            return false;
        };
        listened.hearing = Hearing::Not;
        if listened.is_needed() {
            return listened.ticket.is_some();
        }
        self.keys.remove(key);
        false
    }

    /// What need not be heard any more goes after a while.
    fn settle(&mut self, key: &Arc<str>, now: Instant) {
        let Some(listened) = self.keys.get_mut(key) else {
            return;
        };
        if listened.is_needed() {
            return;
        }
        if listened.hearing == Hearing::Not {
            self.keys.remove(key);
            return;
        }
        listened.needless = now;
        if !std::mem::replace(&mut listened.lingers, true) {
            self.lingering.push_back((now + LINGER, key.clone()));
        }
    }

    pub(super) fn deadline(&self) -> Option<Instant> {
        let lingering = self.lingering.front().map(|(due, _)| *due);
        let stray = self.strays.front().map(|(due, ..)| *due);
        lingering.into_iter().chain(stray).min()
    }

    /// The next key that has not been needed for long enough at a node; it is to be left.
    pub(super) fn next_to_leave(&mut self, now: Instant) -> Option<(Arc<str>, Address)> {
        while self.strays.front().is_some_and(|(due, ..)| *due <= now) {
            let (_, key, node) = self.strays.pop_front()?;
            // Wanted there again.
            let listened = self.keys.get(&key);
            if !listened.is_some_and(|it| it.node == node && it.hearing != Hearing::Not) {
                return Some((key, node));
            }
        }
        while self.lingering.front().is_some_and(|(due, _)| *due <= now) {
            let (_, key) = self.lingering.pop_front()?;
            let Some(listened) = self.keys.get_mut(&key) else {
                continue;
            };
            listened.lingers = false;
            if listened.is_needed() {
                continue;
            }
            let is_early = match listened.hearing {
                // There is nothing to leave.
                Hearing::Not => false,
                // Its confirmation is still to come.
                Hearing::Soon => true,
                // Needed and left again meanwhile.
                Hearing::Yes => listened.needless + LINGER > now,
            };
            if is_early {
                listened.lingers = true;
                self.lingering.push_back((now + LINGER, key));
                continue;
            }
            let listened = self.keys.remove(&key).expect("it was just looked at");
            if listened.hearing == Hearing::Yes {
                return Some((key, listened.node));
            }
        }
        None
    }
}

impl Listened {
    /// It is not listened for there any more; where it was, that is to be ended if nobody else does.
    fn stray(&mut self, key: &Arc<str>, now: Instant) -> Option<(Instant, Arc<str>, Address)> {
        let was = std::mem::replace(&mut self.hearing, Hearing::Not);
        (was != Hearing::Not).then(|| (now + LINGER, key.clone(), self.node.clone()))
    }

    fn forget(&mut self, owner: Owner) {
        if self.ticket == Some(owner) {
            self.ticket = None;
        }
    }
}

#[cfg(test)]
mod tests;
