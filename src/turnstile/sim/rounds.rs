//! The referee's rounds: every 20 ms it looks for somebody who is stuck, and for what is left over.

use std::sync::Arc;

use super::caller::{Caller, Stage};
use super::clock::{MILLI, SECOND};
use super::process::ProcessId;
use super::profile::Theme;
use super::world::{Event, KeyId, World};
use crate::store::contract::{Op, Outcome, Owner};
use crate::store::memory::Asking;
use crate::turnstile::Patience;

const BEAT: u64 = 20 * MILLI;

/// W2: who stands asks again after this at the latest.
const RECHECK: u64 = 12 * SECOND;

impl World {
    /// Nobody waits for long while nobody has the lock.
    pub(super) fn on_beat(&mut self) {
        self.check_told();
        for key in 0..self.keys.len() {
            self.check_places(key);
            self.check_leftovers(key);
            let waits = self.callers.iter().any(|caller| {
                caller.key == key
                    && caller.patience == Patience::Queue
                    && matches!(caller.stage, Stage::Waiting(_))
                    && self.processes[caller.process].is_patient()
                    && !self.processes[caller.process].stopped
            });
            let leases = &self.referee.leases[key];
            let held = leases.iter().any(|lease| self.is_valid(lease));
            if held || !waits || self.is_strange(key) || self.is_remembered(key) {
                self.referee.starving[key] = None;
                continue;
            }
            let since = *self.referee.starving[key].get_or_insert(self.now);
            let gap = self.now - since;
            self.referee.longest_gap = self.referee.longest_gap.max(gap);
            if self.gap_bound().is_some_and(|bound| gap > bound) {
                self.breach(format!(
                    "k{key} is nobody's for {} ms, and waited for",
                    gap / 1000
                ));
            }
        }
        let waiting = |caller: &Caller| caller.stage != Stage::Out;
        if !self.calm || self.callers.iter().any(waiting) {
            self.plan(BEAT, Event::Beat);
        }
    }

    /// A stranger's plain lock.
    fn is_strange(&mut self, key: KeyId) -> bool {
        let now = self.server.clock.micros(self.now);
        let (prefix, name) = (self.server.prefix.clone(), self.keys[key].clone());
        let key_status = self.server.keyspace.inspect(&prefix, &name, now);
        key_status
            .owner
            .is_some_and(|owner| owner.starts_with("stranger"))
    }

    fn gap_bound(&self) -> Option<u64> {
        let net = 8 * (self.profile.latency.1 + self.profile.reply_lag + self.profile.lateness);
        if self.profile.theme == Theme::Calm {
            // A key that is left to expire may last as long as a lease before it: the store never makes a
            // lease shorter than it was, or was extended to.
            let leaves = self.profile.keepers > 0 || self.profile.detached > 0;
            let longest = self.profile.longest_ttl().max(self.referee.longest_wish);
            let unknown = if leaves { longest.min(RECHECK) } else { 0 };
            return Some(net + 60 * MILLI + unknown);
        }
        // A grant of before may have to run out, or what a holder that crashed had extended its lease
        // to, or the 12 s of W2, and a connection may turn out to be dead only then.
        let longest = self.profile.longest_ttl().max(self.referee.longest_wish);
        let longest = longest + self.referee.stepped;
        let silence = self.profile.response_timeout + 2 * SECOND;
        self.calm.then_some(longest.max(RECHECK) + silence + net)
    }

    /// Whose tickets stand, as the server has them.
    pub(super) fn tickets(&mut self, key: KeyId) -> Vec<(Arc<str>, Owner)> {
        let nobody: Arc<str> = "nobody".into();
        let asking = Asking {
            prefix: &self.server.prefix,
            instance: &nobody,
            key: &self.keys[key],
            now: self.server.clock.micros(self.now),
        };
        self.server.keyspace.tickets(asking)
    }

    pub(super) fn holder(&mut self, key: KeyId) -> Option<String> {
        let now = self.server.clock.micros(self.now);
        let (prefix, name) = (self.server.prefix.clone(), self.keys[key].clone());
        let key_status = self.server.keyspace.inspect(&prefix, &name, now);
        let owner = key_status.owner?;
        owner.split(':').next().map(str::to_owned)
    }

    /// I6 and W1, seen from the server: when nothing goes wrong, who waits in the queue has a ticket
    /// or the lock, and no more than one ticket.
    fn check_places(&mut self, key: KeyId) {
        if !self.calm {
            return;
        }
        let tickets = self.tickets(key);
        let holder = self.holder(key);
        for id in 0..self.processes.len() {
            let process = &self.processes[id];
            let instance = &process.instance;
            let placed = tickets.iter().any(|(whose, _)| whose == instance)
                || holder.as_deref() == Some(&**instance);
            let silent = process
                .link
                .conn
                .is_none_or(|conn| self.server.conns[conn].cut);
            let up = !process.gone && process.is_patient() && !silent;
            let stands = up && self.has_patient(id, key);
            if placed || !stands {
                self.referee.unqueued.remove(&(id, key));
                continue;
            }
            let now = self.now;
            let since = *self.referee.unqueued.entry((id, key)).or_insert(now);
            // A refusal of before may make it pause.
            // And a grant from before a clock that was set back looks old (D2): W2 mends that.
            let stepped = if self.referee.stepped > 0 { RECHECK } else { 0 };
            // A lock that was deleted by hand is not missed before its lease is over.
            let deleted = if self.referee.deleted {
                self.profile.longest_ttl()
            } else {
                0
            };
            // A grant that is long under way may come when it is over: its ticket has gone.
            let underway = if self.profile.spikes > 0 {
                self.profile.spike
            } else {
                self.profile.latency.1
            };
            let longest = self.profile.response_timeout + 2500 * MILLI + stepped + deleted;
            let longest = longest + underway;
            if now - since > longest {
                self.breach(format!("r{id} k{key} waits without a ticket"));
            }
        }
    }

    pub(super) fn has_patient(&self, process: ProcessId, key: KeyId) -> bool {
        self.callers.iter().any(|caller| {
            caller.process == process
                && caller.key == key
                && caller.patience == Patience::Queue
                && matches!(caller.stage, Stage::Waiting(_))
        })
    }

    /// O1, O6: a registry that wants nothing has nothing, shortly after.
    fn check_leftovers(&mut self, key: KeyId) {
        let busy = self.processes.iter().any(|process| {
            let silent = process
                .link
                .conn
                .is_none_or(|conn| self.server.conns[conn].cut);
            let down = silent || !process.link.up;
            !process.gone && (process.entries.contains_key(&key) || down)
        });
        if !self.calm || busy {
            self.referee.quiet[key] = None;
            return;
        }
        let since = *self.referee.quiet[key].get_or_insert(self.now);
        // What a dead connection still does can not be helped, nor what the server will not undo.
        let helpless = !self.profile.kills || self.referee.refused_for_good;
        // A clock set back lets everything stand for longer than its owner is owed for.
        let shortly = SECOND / 10 + self.referee.stepped;
        if helpless || self.now - since < shortly || self.is_remembered(key) {
            return;
        }
        let tickets = self.tickets(key);
        let holder = self.holder(key);
        let living = self.processes.iter().find(|process| {
            let has_ticket = tickets.iter().any(|(whose, _)| *whose == process.instance);
            !process.gone && (has_ticket || holder.as_deref() == Some(&*process.instance))
        });
        if let Some(instance) = living.map(|process| process.instance.clone()) {
            self.breach(format!(
                "{instance} wants k{key} no more, and has {tickets:?}, {holder:?}"
            ));
        }
    }

    /// Nobody wins a free lock past a live ticket.
    pub(super) fn check_barging(
        &mut self,
        key: KeyId,
        op: &Op,
        outcome: &Outcome,
        first: Option<(Arc<str>, Owner)>,
        was_free: bool,
    ) {
        if let Op::Attempt { owner, .. } | Op::Listen { owner, .. } | Op::Enter { owner, .. } = *op
            && let Outcome::Won { .. } = outcome
            && was_free
            && let Some((instance, first)) = first
            && first != owner
        {
            self.breach(format!(
                "k{key}: {op:?} has won past {first:?} of {instance}"
            ));
        }
    }
}
