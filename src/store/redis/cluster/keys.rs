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
mod tests {
    use super::*;
    use crate::StoreError;

    const TTL: Duration = Duration::from_secs(30);

    fn enter(owner: u64) -> Op {
        Op::Enter {
            owner: Owner(owner),
            ttl: TTL,
            score: None,
        }
    }

    fn answer(outcome: Outcome) -> Result<Answer, OpError> {
        Ok(Answer { at: 1, outcome })
    }

    fn grant(owner: u64, at: ServerTime) -> Grant {
        Grant {
            owner: Owner(owner),
            ttl: TTL,
            draw: 1,
            at,
        }
    }

    fn busy() -> Result<Answer, OpError> {
        answer(Outcome::Busy {
            left: None,
            score: Some(1),
        })
    }

    /// A key whose grants are heard, with an enter under way.
    fn entering(now: Instant) -> (Keys, Arc<str>) {
        let (mut keys, key) = (Keys::default(), Arc::from("k"));
        assert!(!keys.enters(&key, now), "nobody listens yet");
        keys.get(&key).unwrap().hearing = Hearing::Yes;
        (keys, key)
    }

    #[test]
    fn a_key_is_left_when_its_last_ticket_has_been_gone_for_a_while() {
        let now = Instant::now();
        for ended in 0..3 {
            let (mut keys, key) = entering(now);
            assert!(!keys.answered(&key, &enter(1), &busy(), now));
            assert_eq!(keys.deadline(), None, "a ticket stands");
            let held = Outcome::Gone { held: false };
            let ended_at = now + LINGER;
            match ended {
                0 => keys.granted(&key, &grant(1, 1), ended_at),
                1 => {
                    let op = Op::Withdraw { owner: Owner(1) };
                    keys.answered(&key, &op, &answer(held), ended_at);
                }
                _ => {
                    assert!(keys.enters(&key, ended_at));
                    keys.answered(&key, &enter(1), &answer(Outcome::Won { draw: 1 }), ended_at);
                }
            }
            assert!(keys.next_to_leave(ended_at + LINGER / 2).is_none());
            assert!(keys.next_to_leave(ended_at + LINGER).is_some());
            assert!(keys.next_to_leave(ended_at + LINGER).is_none(), "once");
            assert!(keys.get(&key).is_none(), "nothing is kept of it");
            assert_eq!(keys.deadline(), None);
        }
    }

    /// The grant came by one connection before the answer by the other, which is told only now, and tells of no ticket
    /// that still stands. Whoever holds then yields to itself: nobody listens for the old one, for ever.
    #[test]
    fn a_grant_that_is_heard_before_its_enters_answer_took_the_ticket() {
        let now = Instant::now();
        for again in [false, true] {
            let (mut keys, key) = entering(now);
            if again {
                // One that stands, and asks once more.
                keys.answered(&key, &enter(1), &busy(), now);
                assert!(keys.enters(&key, now));
            }
            keys.granted(&key, &grant(1, 1), now);
            assert!(!keys.answered(&key, &enter(1), &busy(), now));
            assert!(!keys.get(&key).unwrap().is_needed());

            // An answer that is the newer one tells of a ticket that does.
            assert!(keys.enters(&key, now));
            keys.granted(&key, &grant(1, 0), now);
            keys.answered(&key, &enter(1), &busy(), now);
            assert!(keys.get(&key).unwrap().is_waited_for());

            // Nor is it another's.
            assert!(keys.enters(&key, now));
            keys.granted(&key, &grant(7, 1), now);
            keys.answered(&key, &enter(1), &busy(), now);
            assert!(keys.get(&key).unwrap().is_waited_for());
            let yields = Op::Yield {
                old: Owner(1),
                new: Owner(2),
                ttl: TTL,
            };
            assert!(keys.enters(&key, now));
            keys.answered(&key, &yields, &answer(Outcome::Won { draw: 2 }), now);
            assert!(!keys.get(&key).unwrap().is_needed());
        }
    }

    #[test]
    fn another_owners_end_and_one_that_is_not_known_leave_the_ticket() {
        let now = Instant::now();
        let (mut keys, key) = entering(now);
        let unknown = Err(OpError::Unknown(StoreError::new("gone")));
        keys.answered(&key, &enter(2), &unknown, now);
        keys.granted(&key, &grant(1, 1), now);
        let op = Op::Withdraw { owner: Owner(2) };
        keys.answered(
            &key,
            &op,
            &Err(OpError::Unknown(StoreError::new("gone"))),
            now,
        );
        assert_eq!(keys.deadline(), None);
        assert!(keys.get(&key).unwrap().is_needed());
    }

    #[test]
    fn a_ticket_that_nobody_hears_for_is_told_of() {
        let now = Instant::now();
        let (mut keys, key) = entering(now);
        // Taken away while the enter was under way.
        assert!(!keys.ended(&key), "no ticket yet");
        assert!(keys.answered(&key, &enter(1), &busy(), now));
        keys.get(&key).unwrap().hearing = Hearing::Yes;
        assert!(keys.ended(&key));
    }

    fn node(name: &str) -> Address {
        name.into()
    }

    /// A key that is listened for at `a`, and was needed until now.
    fn listened(now: Instant) -> (Keys, Arc<str>) {
        let (mut keys, key) = (Keys::default(), Arc::from("k"));
        keys.enters(&key, now);
        keys.listened_at(&key, &node("a"), now).unwrap().hearing = Hearing::Yes;
        keys.answered(&key, &enter(1), &answer(Outcome::Won { draw: 1 }), now);
        (keys, key)
    }

    /// It was kept for ever, and looked at once a second.
    #[test]
    fn a_key_that_nobody_needs_goes_with_its_connection() {
        let now = Instant::now();
        let (mut keys, key) = listened(now);
        assert!(keys.deafen(&node("a")).is_empty());
        assert_eq!(keys.next_to_leave(now + LINGER), None);
        assert!(keys.get(&key).is_none());
        assert_eq!(keys.deadline(), None);
    }

    /// It may have lost the slot, and will say so; or not.
    #[test]
    fn the_node_that_a_key_is_not_listened_for_at_any_more_is_left_after_a_while() {
        let now = Instant::now();
        let (a, b) = (node("a"), node("b"));
        let left_at_a = || Some((Arc::from("k"), node("a")));
        for home in [None, Some(&b)] {
            let (mut keys, _) = listened(now);
            let (waiting, are_needed) = keys.move_to(|_| home, now);
            assert!(waiting.is_empty() && !are_needed);
            assert_eq!(keys.next_to_leave(now + LINGER / 2), None);
            assert_eq!(keys.next_to_leave(now + LINGER), left_at_a());
            assert_eq!(keys.next_to_leave(now + LINGER), None);
            assert_eq!(keys.deadline(), None);
        }

        // Who goes on at another.
        let (mut keys, key) = listened(now);
        keys.enters(&key, now);
        let listened_at_b = keys.listened_at(&key, &b, now).unwrap();
        assert_eq!(listened_at_b.hearing, Hearing::Not);
        listened_at_b.hearing = Hearing::Yes;
        assert_eq!(keys.next_to_leave(now + LINGER), left_at_a());
        assert_eq!(keys.next_to_leave(now + LINGER), None, "it is needed there");

        // Who is back by then does not leave.
        let (mut keys, key) = listened(now);
        keys.move_to(|_| None, now);
        keys.enters(&key, now);
        let again = keys.listened_at(&key, &a, now).unwrap();
        assert_eq!(again.hearing, Hearing::Not, "it asks once more");
        again.hearing = Hearing::Soon;
        assert_eq!(keys.next_to_leave(now + LINGER), None);
        // But once its wish is over as well it does.
        keys.answered(&key, &enter(1), &busy(), now);
        keys.move_to(|_| Some(&b), now + LINGER);
        assert_eq!(keys.next_to_leave(now + 2 * LINGER), left_at_a());
    }

    #[test]
    fn a_key_that_is_needed_again_lingers_anew() {
        let now = Instant::now();
        let (mut keys, key) = entering(now);
        let won = || answer(Outcome::Won { draw: 1 });
        keys.answered(&key, &enter(1), &won(), now);
        let later = now + LINGER * 3 / 4;
        assert!(keys.enters(&key, later));
        assert!(keys.next_to_leave(now + LINGER).is_none(), "it is needed");
        keys.answered(&key, &enter(1), &won(), later);
        assert!(keys.next_to_leave(later + LINGER / 2).is_none());
        assert!(keys.next_to_leave(later + 2 * LINGER).is_some());
    }
}
