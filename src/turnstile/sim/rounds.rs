//! The referee's rounds: every 20 ms it looks for somebody who is stuck, and for what is left over.

use std::sync::Arc;

use super::caller::{Caller, Stage};
use super::clock::{MILLI, SECOND};
use super::link::BATCH;
use super::process::ProcessId;
use super::profile::Theme;
use super::referee::fits_beside;
use super::world::{Event, KeyId, World};
use crate::base::Mode;
use crate::store::contract::{Op, Outcome, Owner};
use crate::store::memory::Asking;
use crate::store::send_window::Limits;

/// Whose tickets stand, or who holds.
pub(super) type Tickets = Vec<(Arc<str>, Owner)>;

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
                    && !caller.asks_once
                    && matches!(caller.stage, Stage::Waiting(_))
                    && self.processes[caller.process].is_patient()
                    && !self.processes[caller.process].stopped
            });
            let leases = &self.referee.leases[key];
            let held = leases.iter().any(|lease| self.is_valid(lease));
            let held = held && !self.front_fits(key);
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
        let holders = self.holders(key);
        holders.iter().any(|(whose, _)| &**whose == "stranger")
    }

    fn gap_bound(&self) -> Option<u64> {
        let net = 8 * (self.profile.latency.1 + self.profile.reply_lag + self.profile.lateness);
        // Where an answer may take longer than a lease lasts, callers are refused one after the other (D4), or keep the key
        // from each other meanwhile. Nobody has it, and no time is too long for that before the net is quick.
        let is_in_time = self.longest_answer() < self.profile.shortest_lease();
        if self.profile.theme == Theme::Calm && is_in_time {
            // A key that is left to expire may last as long as a lease before it: the store never makes a
            // lease shorter than it was, or was extended to.
            let leaves = self.profile.keepers > 0 || self.profile.detached > 0;
            let longest = self.profile.longest_ttl().max(self.referee.longest_wish);
            // A shared waiter that was not the first of its registry has not heard how long (M5).
            let longest = match self.profile.has_shared() {
                true => RECHECK,
                false => longest.min(RECHECK),
            };
            let unknown = if leaves { longest } else { 0 };
            return Some(net + 60 * MILLI + unknown);
        }
        // A grant of before may have to run out, or what a holder that crashed had extended its lease
        // to, or the 12 s of W2, and a connection may turn out to be dead only then.
        let longest = self.profile.longest_ttl().max(self.referee.longest_wish);
        let longest = longest + self.referee.stepped;
        let silence = self.profile.response_timeout + 2 * SECOND;
        self.calm.then_some(longest.max(RECHECK) + silence + net)
    }

    /// How long an answer may take. An op waits while as many calls are in flight as may be (G4): for one of these, and for
    /// the calls of those before it. Each line has one op (O2), and beside it a renewal, or what its caller had left before.
    fn longest_answer(&self) -> u64 {
        let Limits {
            requests, calls, ..
        } = self.profile.limits;
        let lines = match self.profile.has_shared() {
            true => self.callers.len(),
            false => self.keys.len(),
        };
        let ops = 2 * lines;
        let turns = match ops <= calls {
            true => 1,
            false => 2 + ops / requests.saturating_mul(calls),
        };
        let trip = BATCH + 2 * self.profile.latency.1 + self.profile.reply_lag;
        trip * turns as u64
    }

    /// Whose tickets stand, as the server has them.
    pub(super) fn tickets(&mut self, key: KeyId) -> Tickets {
        let nobody: Arc<str> = "nobody".into();
        let asking = Asking {
            prefix: &self.server.prefix,
            instance: &nobody,
            key: &self.keys[key],
            now: self.server.clock.micros(self.now),
        };
        self.server.keyspace.tickets(asking)
    }

    /// Who has a key, as the server has it.
    pub(super) fn holders(&mut self, key: KeyId) -> Tickets {
        let nobody: Arc<str> = "nobody".into();
        let asking = Asking {
            prefix: &self.server.prefix,
            instance: &nobody,
            key: &self.keys[key],
            now: self.server.clock.micros(self.now),
        };
        self.server.keyspace.holders(asking)
    }

    /// Whether the first ticket whose registry lives may have the key now.
    pub(super) fn front_fits(&mut self, key: KeyId) -> bool {
        let Some((_, first)) = self.first_live(key) else {
            return false;
        };
        let holders = self.holders(key);
        let modes: Vec<_> = holders.iter().map(|(_, owner)| owner.mode).collect();
        fits_beside(first.mode, &modes)
    }

    /// I6 and W1, seen from the server: when nothing goes wrong, who waits in the queue has a ticket
    /// or the lock, and no more than one ticket.
    fn check_places(&mut self, key: KeyId) {
        if !self.calm {
            return;
        }
        let tickets = self.tickets(key);
        let holders = self.holders(key);
        for id in 0..self.processes.len() {
            let process = &self.processes[id];
            let instance = &process.instance;
            let ours = |(whose, _): &&(_, _)| whose == instance;
            let in_store = holders.iter().filter(ours).count();
            let placed = in_store + tickets.iter().filter(ours).count();
            let leases = self.referee.leases[key].iter();
            let held = leases.filter(|lease| lease.process == id).count();
            let placed = placed >= held + self.places_needed(id, key);
            // A lock that was deleted or wiped is not missed before its lease is over, if no renewal arrives.
            let is_missed = in_store >= held;
            let silent = process
                .link
                .conn
                .is_none_or(|conn| self.server.conns[conn].cut);
            let up = !process.gone && process.is_patient() && !silent;
            let stands = up && is_missed && self.has_patient(id, key);
            if placed || !stands {
                self.referee.unqueued.remove(&(id, key));
                continue;
            }
            let now = self.now;
            let since = *self.referee.unqueued.entry((id, key)).or_insert(now);
            // A refusal of before may make it pause.
            // And a grant from before a clock that was set back looks old (D2): W2 mends that.
            let stepped = if self.referee.stepped > 0 || self.referee.flushed {
                RECHECK
            } else {
                0
            };
            // A grant that is long under way may come when it is over: its ticket has gone.
            let underway = if self.profile.spikes > 0 {
                self.profile.spike
            } else {
                self.profile.latency.1
            };
            let longest = self.profile.response_timeout + 2500 * MILLI + stepped;
            let longest = longest + underway;
            if now - since > longest {
                self.breach(format!("r{id} k{key} waits without a ticket"));
            }
        }
    }

    /// How many tickets or leases its waiters need: one for all exclusive ones, and one for each shared one (M6).
    fn places_needed(&self, process: ProcessId, key: KeyId) -> usize {
        let waiting = self.callers.iter().filter(|caller| {
            (caller.process, caller.key, caller.asks_once) == (process, key, false)
                && matches!(caller.stage, Stage::Waiting(_))
        });
        let (exclusive, shared): (Vec<_>, Vec<_>) =
            waiting.partition(|caller| caller.mode == Mode::Exclusive);
        let leases = self.referee.leases[key].iter();
        let mut leases = leases.filter(|lease| lease.process == process);
        // Those who wait behind a local holder have its lease.
        let has_lease = leases.any(|lease| self.callers[lease.caller].mode == Mode::Exclusive);
        usize::from(!exclusive.is_empty() && !has_lease) + shared.len()
    }

    pub(super) fn has_patient(&self, process: ProcessId, key: KeyId) -> bool {
        self.callers.iter().any(|caller| {
            caller.process == process
                && caller.key == key
                && !caller.asks_once
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
        let holders = self.holders(key);
        let living = self.processes.iter().find(|process| {
            let mut there = tickets.iter().chain(&holders);
            !process.gone && there.any(|(whose, _)| *whose == process.instance)
        });
        if let Some(instance) = living.map(|process| process.instance.clone()) {
            self.breach(format!(
                "{instance} wants k{key} no more, and has {tickets:?}, {holders:?}"
            ));
        }
    }

    /// The live tickets that are before the owner of an op in the queue, or before its place there (K2).
    pub(super) fn tickets_ahead(&mut self, key: KeyId, op: &Op) -> Tickets {
        let now = self.server.clock.micros(self.now);
        let nobody: Arc<str> = "nobody".into();
        let asking = Asking {
            prefix: &self.server.prefix,
            instance: &nobody,
            key: &self.keys[key],
            now,
        };
        let place = match op {
            Op::Enter { score, .. } => score.filter(|score| *score <= now),
            _ => None,
        };
        let all = self.server.keyspace.tickets(asking);
        let scores = self.server.keyspace.scores(asking);
        let ahead = all.into_iter().zip(scores);
        let ahead = ahead.take_while(|((_, owner), score)| {
            *owner != op.owner() && place.is_none_or(|place| *score < place)
        });
        let ahead: Vec<_> = ahead.map(|(ticket, _)| ticket).collect();
        let live = self.live_tickets(key);
        ahead.into_iter().filter(|it| live.contains(it)).collect()
    }

    /// M2: nobody wins past a live ticket. M3: after an op that names the queue, its front does not fit. `before`: the
    /// live tickets ahead of the owner, and the holders, before the op.
    pub(super) fn check_queue(
        &mut self,
        key: KeyId,
        op: &Op,
        outcome: &Outcome,
        before: (Tickets, Tickets),
        unserved: bool,
    ) {
        let (tickets, holders) = before;
        self.check_entries(key, &holders);
        let winner = op.owner();
        let asks = matches!(
            op,
            Op::Attempt { .. } | Op::Listen { .. } | Op::Enter { .. }
        );
        let is_new = !holders.iter().any(|(_, holder)| *holder == winner);
        if asks && is_new && matches!(outcome, Outcome::Won { .. }) {
            let left = self.tickets(key);
            if let Some(overtaken) = tickets.iter().find(|ticket| left.contains(ticket)) {
                self.breach(format!("k{key}: {op:?} has won past {overtaken:?}"));
            }
        }
        let serves = !matches!(
            op,
            Op::Renew { .. } | Op::Keep { .. } | Op::Adopt { .. } | Op::Raise { .. }
        );
        if serves && !unserved && !matches!(outcome, Outcome::NotOld) && self.front_fits(key) {
            self.breach(format!("k{key}: {op:?} leaves a ticket that fits in front"));
        }
    }
}
