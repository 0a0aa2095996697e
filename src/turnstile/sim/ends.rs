//! How leases end but by a release: keys that stay in the store, leases that are made to last
//! longer, and those that go from process to process.

use std::collections::BTreeMap;
use std::mem;
use std::sync::Arc;
use std::time::Duration;

use super::caller::{Caller, CallerId, Stage};
use super::clock::{MILLI, SECOND};
use super::link::STRAGGLE;
use super::process::ProcessId;
use super::profile::Theme;
use super::world::{Event, KeyId, World};
use crate::base::OnFinish;
use crate::base::holder::KEPT;
use crate::store::contract::{Op, Outcome, Owner, ServerTime};

/// This many callers adopt at most: those that are done do it again.
const ADOPTERS: usize = 8;

/// What a lease left in the store.
#[derive(Clone, Debug)]
pub(super) struct Kept {
    /// When it runs out by the server's clock.
    until: ServerTime,
    /// It may also have been released.
    maybe: bool,
}

impl World {
    /// Who has the lock, and until when.
    fn lock(&mut self, key: KeyId) -> BTreeMap<String, ServerTime> {
        let now = self.server.clock.micros(self.now);
        let (prefix, name) = (self.server.prefix.clone(), self.keys[key].clone());
        let key_status = self.server.keyspace.inspect_all(&prefix, &name, now);
        let holders = key_status.holders.into_iter().map(|holder| {
            let left = holder.left.unwrap_or(Duration::from_secs(1 << 30));
            (holder.name, now + left.as_micros() as u64)
        });
        holders.collect()
    }

    fn name_of(&self, process: ProcessId, owner: Owner) -> String {
        format!("{}:{}", self.processes[process].instance, owner.sequence)
    }

    /// Whether this caller's lease is proved.
    pub(super) fn has_valid_lease(&self, key: KeyId, caller: CallerId) -> bool {
        let mut leases = self.referee.leases[key].iter();
        let lease = leases.find(|lease| lease.caller == caller);
        lease.is_some_and(|lease| self.is_valid(lease))
    }

    /// A lease is over for its holder, and its key is to stay until its ttl is over.
    pub(super) fn lease_kept(&mut self, id: CallerId, owner: Owner) {
        let (process, key) = (self.callers[id].process, self.callers[id].key);
        let name = self.name_of(process, owner);
        // Outside the promise it may be another's, or nobody's.
        if let Some(until) = self.lock(key).get(&name).copied() {
            self.referee.counts.kept += 1;
            let maybe = false;
            let kept = Kept { until, maybe };
            self.referee.kept[key].insert(name, kept);
        }
    }

    /// M8: the server keeps a key for nobody. From now on it is there until that time, and no longer.
    pub(super) fn key_is_kept(
        &mut self,
        process: ProcessId,
        key: KeyId,
        op: &Op,
        outcome: &Outcome,
    ) {
        if let (&Op::Keep { owner, left }, Outcome::Gone { held: true }) = (op, outcome) {
            self.referee.counts.kept += 1;
            let name = format!(
                "{}{KEPT}:{}",
                self.processes[process].instance, owner.sequence
            );
            let until = self.server.clock.micros(self.now) + left.as_micros() as u64;
            let maybe = false;
            self.referee.kept[key].insert(name, Kept { until, maybe });
        }
    }

    /// M8: a lease was ended, and that is confirmed. Its key is kept for what was asked for from its beginning on.
    pub(super) fn check_kept_for(&mut self, id: CallerId) {
        let caller = &self.callers[id];
        let (process, key) = (caller.process, caller.key);
        let Some(until) = caller.keeps_until.filter(|_| self.is_quick()) else {
            return;
        };
        // D2: a grant may be proved by an answer that is as old as the wait, which is no older than this world. A part of
        // that time is left out, whichever of the two clocks runs faster.
        let clocks = (&self.processes[process].clock, &self.server.clock);
        let old = caller.seated_at / 1000 + clocks.0.apart(clocks.1, caller.seated_at);
        // The first question waits for a connection, and is asked again by a server that does not know the script.
        let latency = 6 * self.profile.latency.1 + 3 * self.profile.reply_lag;
        let slack = 4 * MILLI + latency + old + (until - caller.seated_at) / 500;
        let kept = format!("{}{KEPT}:", self.processes[process].instance);
        let now = self.server.clock.micros(self.now);
        let ends: Vec<_> = self.lock(key).into_iter().collect();
        let mut ends = ends.iter().filter(|(name, _)| name.starts_with(&kept));
        let is_kept = ends.any(|(_, end)| (self.now + (end - now)).abs_diff(until) <= slack);
        if !is_kept && self.now + slack < until {
            self.breach(format!("c{id} leaves its key, to be kept until {until} us"));
        }
    }

    /// A lease ends by itself. Its key may be to stay.
    pub(super) fn lease_may_be_kept(&mut self, key: KeyId, caller: CallerId) {
        let caller = &self.callers[caller];
        if caller.on_finish != OnFinish::LetExpire {
            return;
        }
        let instance = self.processes[caller.process].instance.clone();
        for (name, until) in self.lock(key) {
            if name.split(':').next() == Some(&*instance) {
                let maybe = true;
                let kept = self.referee.kept[key].entry(name);
                kept.or_insert(Kept { until, maybe });
            }
        }
    }

    /// Whether somebody has the lock whose lease is over.
    pub(super) fn is_remembered(&mut self, key: KeyId) -> bool {
        let lock = self.lock(key);
        let kept = &self.referee.kept[key];
        lock.keys().any(|name| kept.contains_key(name))
    }

    /// Nothing is sent for an owner whose lease is over and whose key is to stay; and nobody is entered
    /// who does not wait (G3).
    pub(super) fn check_sent(&mut self, process: ProcessId, key: KeyId, op: &Op) {
        if matches!(op, Op::Enter { .. }) && !self.has_patient(process, key) {
            self.breach(format!("r{process} k{key} sends {op:?} for nobody"));
        }
        let now = self.server.clock.micros(self.now);
        let kept = self.referee.kept[key].get(&self.name_of(process, op.owner()));
        // Within a clock's inaccuracy it may have run out by ours.
        let slack = 2 * MILLI + self.profile.longest_ttl() / 500;
        let stays = kept.is_some_and(|kept| !kept.maybe && now + slack < kept.until);
        if self.profile.promised() && stays {
            self.breach(format!("r{process} k{key}: {op:?} for what is to stay"));
        }
    }

    /// The server did an op: what is to stay is there until its time is over, no longer, or was
    /// adopted.
    pub(super) fn check_kept(&mut self, key: KeyId, op: &Op, process: ProcessId) {
        if self.referee.kept[key].is_empty() {
            return;
        }
        let now = self.server.clock.micros(self.now);
        let lock = self.lock(key);
        // A renewal that was under way; or what a dead connection still had.
        let may_grow = matches!(op, Op::Renew { .. }) || !self.profile.kills;
        let mut kept = mem::take(&mut self.referee.kept[key]);
        kept.retain(|name, kept| {
            let before = kept.until;
            let is_promised = self.profile.promised() && !kept.maybe;
            let Some(until) = lock.get(name).copied() else {
                let is_adopted = matches!(op, Op::Adopt { from, .. } if **from == **name);
                if now < before && is_promised && !is_adopted {
                    self.breach(format!(
                        "r{process} k{key}: {op:?} takes what is to stay until {before}"
                    ));
                }
                return false;
            };
            let may_grow = may_grow && !name.contains(KEPT);
            if is_promised && (until < before || until > before && !may_grow) {
                self.breach(format!(
                    "r{process} k{key}: {op:?} moves the end of what is to stay from {before} to {until}"
                ));
            }
            kept.until = until;
            true
        });
        self.referee.kept[key] = kept;
    }

    /// A lease was detached: one other or two try to adopt it, soon or too late.
    pub(super) fn plan_adopters(&mut self, process: ProcessId, key: KeyId, owner: Owner) {
        let from: Arc<str> =
            format!("{}:{}", self.processes[process].instance, owner.sequence).into();
        for _ in 0..self.rng.between(1, 2) {
            let to = self.rng.below(self.profile.registries as u64) as ProcessId;
            let ttl = self.rng.pick(&self.profile.ttls);
            // Some wait for longer than a connection may be silent, so that they ask on the next.
            let wait = self.profile.response_timeout * self.rng.pick(&[1, 4]);
            let mut caller = Caller::adopting(to, key, ttl, from.clone(), wait);
            let idle = self
                .callers
                .iter()
                .position(|caller| caller.adopts.is_some() && caller.is_done(self.now));
            let adopters = self.callers.iter().filter(|one| one.adopts.is_some());
            let id = match idle {
                Some(id) => {
                    // What is still planned for its last visit is not for this one.
                    caller.visit = self.callers[id].visit + 1;
                    id
                }
                None if adopters.count() < ADOPTERS => {
                    self.callers.push(Caller::standing(to, ttl));
                    self.callers.len() - 1
                }
                None => return,
            };
            let most = self.rng.pick(&[MILLI, ttl / 2, ttl + ttl / 5]);
            let delay = self.rng.between(0, most);
            caller.comes_at = self.now + delay;
            self.callers[id] = caller;
            self.plan(delay, Event::Arrive(id));
        }
    }

    /// One who adopts was given a lease: as nobody else was.
    pub(super) fn check_adopted(&mut self, id: CallerId) {
        self.referee.counts.adopted += 1;
        let Some(from) = self.callers[id].adopts.clone() else {
            return;
        };
        if !self.referee.adopted.insert(from.clone()) && self.profile.promised() {
            self.breach(format!("c{id} adopts what {from} left, as another has"));
        }
    }

    /// One who adopts was told that it is too late: then it is.
    pub(super) fn check_refused(&mut self, id: CallerId) {
        let caller = &self.callers[id];
        let (key, from) = (caller.key, caller.adopts.clone());
        let is_there = from
            .as_deref()
            .is_some_and(|from| self.lock(key).contains_key(from));
        if is_there && self.profile.promised() {
            self.breach(format!(
                "c{id} is not given what {from:?} left, and it is there"
            ));
        }
    }

    pub(super) fn caller_extends(&mut self, id: CallerId, visit: u32) {
        let caller = &self.callers[id];
        let (process, key) = (caller.process, caller.key);
        let Stage::Holding(waiter) = caller.stage else {
            return;
        };
        if caller.visit != visit {
            return;
        }
        let ttl = self.rng.pick(&[caller.ttl / 2, caller.ttl, 3 * caller.ttl]);
        let ttl = ttl.max(10 * MILLI);
        self.note(|_| format!("r{process} k{key} c{id} wants {ttl} us more"));
        let until = self.feed(process, key, |lines, cx| {
            lines.feed(cx, waiter, |line, cx| {
                line.extend(cx, waiter, Duration::from_micros(ttl))
            })
        });
        let stage = self.callers[id].stage;
        let may = stage == Stage::Holding(waiter) && !self.processes[process].closed;
        if until.is_some() != may {
            self.breach(format!("c{id} is extended to {until:?}, but is {stage:?}"));
        }
        if let Some(until) = until {
            self.referee.counts.extended += 1;
            self.referee.longest_wish = self.referee.longest_wish.max(ttl);
            self.callers[id].extended = Some((self.now, until));
        }
    }

    /// Where all goes well, a lease lasts as long as was asked for.
    pub(super) fn check_extended(&mut self, id: CallerId) {
        let caller = &self.callers[id];
        let Some((asked, until)) = caller.extended else {
            return;
        };
        // The renewal that was on its way when it was asked for, and its own.
        let late = if self.profile.stragglers > 0 {
            2 * STRAGGLE
        } else {
            0
        };
        let net = 6 * self.profile.latency.1 + self.profile.reply_lag + 3 * MILLI + late;
        let timely = self.now - asked > net;
        let quick = self.profile.theme == Theme::Calm && !self.profile.batches;
        let lease = self.referee.leases[caller.key].iter();
        let short = lease
            .filter(|lease| lease.caller == id)
            .any(|lease| lease.deadline < until);
        if quick && timely && short {
            self.breach(format!(
                "c{id} asked at {asked} us for its lease to last until {until:?}, in vain"
            ));
        }
    }
}

impl Caller {
    /// Whether it has been there, or will not come any more.
    fn is_done(&self, now: u64) -> bool {
        self.stage == Stage::Out && self.comes_at + 10 * SECOND < now
    }
}
