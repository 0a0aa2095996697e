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
    /// Asked not to.
    Leaving,
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

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = (&Arc<str>, &mut Listened)> {
        self.keys.iter_mut()
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
        self.lingering.front().map(|(due, _)| *due)
    }

    /// The next key that has not been needed for long enough; it is to be left.
    pub(super) fn next_to_leave(&mut self, now: Instant) -> Option<(Arc<str>, Address)> {
        while self.deadline().is_some_and(|due| due <= now) {
            let (_, key) = self.lingering.pop_front()?;
            let Some(listened) = self.keys.get_mut(&key) else {
                continue;
            };
            listened.lingers = false;
            if listened.is_needed() {
                continue;
            }
            // Needed and left again meanwhile, or its confirmation is still to come.
            if listened.needless + LINGER > now || listened.hearing != Hearing::Yes {
                if listened.hearing != Hearing::Leaving {
                    listened.lingers = true;
                    self.lingering.push_back((now + LINGER, key));
                }
                continue;
            }
            listened.hearing = Hearing::Leaving;
            let node = listened.node.clone();
            return Some((key, node));
        }
        None
    }
}

impl Listened {
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
            assert!(!keys.ended(&key));
            assert!(keys.get(&key).is_none(), "nothing is kept of it");
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
