//! What must be so in every state.

use std::collections::BTreeSet;
use std::time::Duration;

use super::plan::{Ending, Plan};
use super::world::{Stage, Who, World};
use crate::base::Mode;
use crate::base::clock::Moment;
use crate::store::contract::{Op, OpResult};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rule {
    /// Leases that are valid at the same time are compatible.
    Exclusion,
    /// Tokens grow.
    Tokens,
    /// What an answered release has freed is free, and what is kept is kept.
    Freed,
    /// Each caller gets a verdict that fits its stage, and nothing panics.
    Told,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Breach {
    pub(super) rule: Rule,
    pub(super) what: String,
}

/// What the referee remembers.
#[derive(Clone, Debug, Default)]
pub(super) struct Referee {
    pub(super) breach: Option<Breach>,
    pub(super) leaving: Option<Who>,
    pub(super) has_crashed: bool,
    /// Whether the server may run a request after its connection has ended and the next one has begun.
    pub(super) may_come_late: bool,
    /// The greatest token of an exclusive lease.
    exclusive: u64,
    tokens: BTreeSet<u64>,
    /// Until when a key is kept at least.
    kept: Option<Moment>,
    /// The owners that the store has said to be gone.
    pub(super) ended: BTreeSet<String>,
}

impl World {
    pub(super) fn keeps(&self, rule: Rule) -> bool {
        let breach = self.referee.breach.as_ref();
        breach.is_none_or(|breach| breach.rule != rule)
    }

    pub(super) fn granted(&mut self, (id, at): Who, token: u64) {
        let mode = self.mode_of((id, at));
        let referee = &mut self.referee;
        let last = match mode {
            Mode::Exclusive => referee.tokens.last().copied().unwrap_or(0),
            // The grants of leases that are shared may arrive in another order.
            _ => referee.exclusive,
        };
        let is_new = referee.tokens.insert(token);
        if mode == Mode::Exclusive {
            referee.exclusive = token;
        }
        let kept = referee.kept.filter(|until| self.now < *until);
        if !is_new || token <= last {
            self.breach(Rule::Tokens, format!("token {token} comes after {last}"));
        }
        if let Some(until) = kept {
            let what = format!("caller {at} of r{id} has the key, which is kept until {until:?}");
            self.breach(Rule::Freed, what);
        }
    }

    fn mode_of(&self, (id, at): Who) -> Mode {
        self.registries[id].callers[at].mode
    }

    /// A caller was told that its release was done.
    pub(super) fn released(&mut self, (id, at): Who) {
        let caller = &self.registries[id].callers[at];
        if let Some(time) = caller.keeps {
            self.referee.kept = Some(caller.arrived + time);
        }
    }

    /// The store has answered: what it says is gone never comes back (O1).
    pub(super) fn note_answer(&mut self, id: usize, op: &Op, result: &OpResult) {
        let is_end = matches!(
            op,
            Op::Release { .. } | Op::Keep { .. } | Op::Withdraw { .. } | Op::Yield { .. }
        );
        if is_end && result.is_ok() {
            let owner = op.owner().sequence;
            let name = format!("{}:{owner}", self.registries[id].instance);
            self.referee.ended.insert(name);
            self.check_store();
        }
    }

    /// What must be so in every state.
    pub(super) fn check(&mut self) {
        let valid = self.everybody().filter(|who| self.is_valid(*who));
        let valid: Vec<_> = valid.collect();
        let modes: Vec<_> = valid.iter().map(|who| self.mode_of(*who)).collect();
        let may_be = match modes.first() {
            None => true,
            Some(Mode::Exclusive) => modes.len() == 1,
            Some(Mode::Shared) => modes.iter().all(|mode| *mode == Mode::Shared),
            // Each has looked at its own limit when it entered (M1).
            Some(Mode::Permits { .. }) => {
                let permit = |mode: &Mode| match *mode {
                    Mode::Permits { limit, weight } => Some((limit, u32::from(weight))),
                    _ => None,
                };
                let permits: Option<Vec<_>> = modes.iter().map(permit).collect();
                permits.is_some_and(|mut permits| {
                    // They may have come in this order, if in any.
                    permits.sort_unstable();
                    let mut taken = 0;
                    permits.into_iter().all(|(limit, weight)| {
                        taken += weight;
                        taken <= limit
                    })
                })
            }
        };
        if !may_be {
            self.breach(
                Rule::Exclusion,
                format!("{valid:?} hold the key: {modes:?}"),
            );
        }
        let is_left = self.is_quiet()
            && !self.referee.has_crashed
            && !self.referee.may_come_late
            && self.detached.is_none()
            && !self.is_store_empty()
            && !self.is_kept();
        if is_left {
            let what = "all have gone, and the store is not empty".to_owned();
            self.breach(Rule::Freed, what);
        }
    }

    /// Whether everybody who was not dropped is served, and nothing is left: at the end, and nowhere else.
    pub(super) fn check_end(self, plan: &Plan) -> Result<(), String> {
        let mut end = self.calmed(plan);
        if let Some(breach) = end.referee.breach {
            return Err(format!("{breach:?}"));
        }
        for (id, at) in end.everybody() {
            let caller = &end.registries[id].callers[at];
            let wants = plan.registries[id][at];
            let never_came = wants.ending == Ending::Adopts && end.detached.is_none();
            if caller.stage != Stage::Done && !never_came {
                return Err(format!(
                    "caller {at} of r{id} is {:?} at the end",
                    caller.stage
                ));
            }
            let waits = wants.wait.is_none() && wants.ending != Ending::Adopts;
            if waits && !caller.was_served && !caller.is_excused {
                return Err(format!("caller {at} of r{id} was never served"));
            }
        }
        // The tickets of dead processes stay for a minute after the last lock (K3).
        end.now += Duration::from_secs(120);
        match end.is_store_empty() {
            true => Ok(()),
            false => Err("the store is not empty at the end".to_owned()),
        }
    }
}
