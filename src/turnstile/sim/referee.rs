//! Sees everything, on a common clock, and says what is broken.

use std::collections::{BTreeMap, BTreeSet};
use std::mem;
use std::sync::Arc;
use std::time::Duration;

use super::caller::{Caller, CallerId, Stage};
use super::clock::{MILLI, True};
use super::ends::Kept;
use super::process::ProcessId;
use super::profile::Theme;
use super::rounds::Tickets;
use super::world::{KeyId, World};
use crate::base::Mode;
use crate::base::clock::Moment;
use crate::base::holder::KEPT;
use crate::store::contract::{Answer, Op, Outcome, Owner};
use crate::store::memory::Delivery;
use crate::turnstile::WaiterId;

pub(super) struct Referee {
    /// The first thing that was found broken.
    pub(super) breach: Option<String>,
    pub(super) leases: Vec<Vec<Seen>>,
    /// Every lease: when it began, whose, and its token.
    pub(super) log: Vec<(True, ProcessId, u64)>,
    /// Given back by their holders, and not confirmed.
    finished: BTreeMap<CallerId, Seen>,
    /// By key.
    tokens: Vec<Tokens>,
    /// Keys and epochs of tenures that must not be passed on.
    pub(super) sealed: BTreeSet<(KeyId, u64)>,
    /// By key: who began the last tenure.
    last_tenures: Vec<ProcessId>,
    /// How many tenures of a key in a row each registry had begun when it began its last one.
    tenures: BTreeMap<(ProcessId, KeyId), u32>,
    /// By key: since when somebody waits and nobody has the lock.
    pub(super) starving: Vec<Option<True>>,
    /// Leases begun, taken and prolonged, in all.
    pub(super) counts: Counts,
    /// How far the server's clock was stepped in all.
    pub(super) stepped: u64,
    /// The longest that a lease was extended by.
    pub(super) longest_wish: u64,
    pub(super) fence_lost: bool,
    /// Whether tickets were deleted that nobody was told of.
    pub(super) flushed: bool,
    pub(super) longest_gap: u64,
    /// The server refused something for good, and may keep what it would not undo.
    pub(super) refused_for_good: bool,
    /// By key: what was left in the store.
    pub(super) kept: Vec<BTreeMap<String, Kept>>,
    /// Whose leases were adopted.
    pub(super) adopted: BTreeSet<Arc<str>>,
    /// By key: since when no turnstile of a living process is about it.
    pub(super) quiet: Vec<Option<True>>,
    /// By process and key: since when somebody stands there without a ticket, lock or op.
    pub(super) unqueued: BTreeMap<(ProcessId, KeyId), True>,
    /// Whose end the server has seen.
    ended: BTreeSet<(ProcessId, Owner)>,
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counts {
    pub(super) begun: u64,
    pub(super) taken: u64,
    pub(super) prolonged: u64,
    pub(super) passed: u64,
    /// Renewals that the server has seen, and those of them for an owner whose end it had seen.
    pub(super) renewals: u64,
    pub(super) crossed: u64,
    pub(super) kept: u64,
    pub(super) extended: u64,
    pub(super) adopted: u64,
    /// Calls that carried several ops, connections that took several ops along, and ops that were
    /// sent again in place.
    pub(super) shared: u64,
    pub(super) lost: u64,
    pub(super) again: u64,
    /// Wins and grants that did not count.
    pub(super) unconfirmed: u64,
    /// Renewals that were late, and those that were not sent for that.
    pub(super) late: u64,
    pub(super) shed: u64,
    /// Callers that were told that the store is too slow for their ttl.
    pub(super) too_slow: u64,
}

/// The tokens of a key's leases.
#[derive(Clone, Debug, Default)]
struct Tokens {
    /// The last of an exclusive lease.
    exclusive: u64,
    all: BTreeSet<u64>,
}

/// A lease that was given and has not ended.
#[derive(Clone, Debug)]
pub(super) struct Seen {
    pub(super) process: ProcessId,
    pub(super) caller: CallerId,
    pub(super) deadline: Moment,
}

/// M1: whether one with this mode may enter beside these.
pub(super) fn fits_beside(mode: Mode, others: &[Mode]) -> bool {
    let weight_of = |mode: &Mode| match mode {
        Mode::Permits { weight, .. } => Some(u64::from(*weight)),
        Mode::Exclusive | Mode::Shared => None,
    };
    match mode {
        Mode::Exclusive => others.is_empty(),
        Mode::Shared => others.iter().all(|other| *other == Mode::Shared),
        Mode::Permits { limit, weight } => {
            let taken: Option<u64> = others.iter().map(weight_of).sum();
            taken.is_some_and(|taken| taken + u64::from(weight) <= u64::from(limit))
        }
    }
}

/// M1: whether these may have come beside those that were there, in an order that is not known: each fitted beside
/// those, and the last beside all others.
fn may_have_come(came: &[Mode], there: &[Mode]) -> bool {
    let may_be_last = |last| {
        let mut others = [came, there].concat();
        let mode = others.remove(last);
        fits_beside(mode, &others)
    };
    let each = came.iter().all(|mode| fits_beside(*mode, there));
    each && (came.is_empty() || (0..came.len()).any(may_be_last))
}

impl Referee {
    pub(super) fn new(keys: usize) -> Self {
        Self {
            breach: None,
            leases: vec![Vec::new(); keys],
            log: Vec::new(),
            finished: BTreeMap::new(),
            tokens: vec![Tokens::default(); keys],
            sealed: BTreeSet::new(),
            last_tenures: vec![ProcessId::MAX; keys],
            tenures: BTreeMap::new(),
            starving: vec![None; keys],
            counts: Counts::default(),
            stepped: 0,
            longest_wish: 0,
            fence_lost: false,
            flushed: false,
            longest_gap: 0,
            refused_for_good: false,
            kept: vec![BTreeMap::new(); keys],
            adopted: BTreeSet::new(),
            quiet: vec![None; keys],
            unqueued: BTreeMap::new(),
            ended: BTreeSet::new(),
        }
    }
}

impl World {
    pub(super) fn breach(&mut self, what: String) {
        self.note(|_| format!("BROKEN: {what}"));
        self.referee.breach.get_or_insert(what);
    }

    pub(super) fn is_valid(&self, lease: &Seen) -> bool {
        self.processes[lease.process].clock.moment(self.now) < lease.deadline
    }

    pub(super) fn lease_begins(
        &mut self,
        process: ProcessId,
        key: KeyId,
        caller: CallerId,
        token: u64,
        deadline: Moment,
    ) {
        let lease = Seen {
            process,
            caller,
            deadline,
        };
        self.referee.counts.begun += 1;
        self.referee.log.push((self.now, process, token));
        self.referee.counts.passed += u64::from(!token.is_multiple_of(64));
        let is_passed = !token.is_multiple_of(64);
        if is_passed && self.referee.sealed.contains(&(key, token / 64)) {
            self.breach(format!("c{caller} is passed a fenced tenure: {token}"));
        }
        self.referee.starving[key] = None;
        self.referee.finished.remove(&caller);
        if self.callers[caller].mode == Mode::Exclusive {
            self.check_passes(key, process, token % 64);
        }
        if !self.is_valid(&lease) {
            self.breach(format!("D4: c{caller} is given a lease that is over"));
        }
        if self.profile.promised() {
            self.check_alone(key, &lease);
            self.check_proof(key, &lease);
            // Shared leases may be told in another order than they were given.
            let is_exclusive = self.callers[caller].mode == Mode::Exclusive;
            let Tokens { exclusive, all } = &mut self.referee.tokens[key];
            let last = match is_exclusive {
                true => all.last().copied().unwrap_or(0),
                false => *exclusive,
            };
            if is_exclusive {
                *exclusive = token;
            }
            if !all.insert(token) || token <= last {
                self.breach(format!("token {token} of c{caller} does not exceed {last}"));
            }
        }
        self.referee.leases[key].push(lease);
    }

    pub(super) fn lease_prolonged(
        &mut self,
        process: ProcessId,
        key: KeyId,
        caller: CallerId,
        deadline: Moment,
        last: bool,
    ) {
        self.referee.counts.prolonged += 1;
        let leases = &self.referee.leases[key];
        let Some(at) = leases.iter().position(|lease| lease.caller == caller) else {
            return self.breach(format!("c{caller} is prolonged without a lease"));
        };
        let old = self.referee.leases[key].remove(at);
        // That the watchdog comes no more is told also where its coming moved nothing.
        let moved = deadline > old.deadline || (last && deadline == old.deadline);
        if !self.is_valid(&old) || !moved {
            self.breach(format!(
                "c{caller} is prolonged from {:?} to {deadline:?}",
                old.deadline
            ));
        }
        let lease = Seen {
            process,
            deadline,
            ..old
        };
        if self.profile.promised() {
            self.check_alone(key, &lease);
            self.check_proof(key, &lease);
        }
        self.referee.leases[key].push(lease);
    }

    pub(super) fn lease_taken(&mut self, key: KeyId, caller: CallerId) {
        self.referee.counts.taken += 1;
        let lease = self.referee.leases[key]
            .iter()
            .find(|lease| lease.caller == caller);
        let lease = lease.expect("a lease begins before it is taken").clone();
        if !self.is_valid(&lease) {
            self.breach(format!("c{caller} takes a lease that is over"));
        }
    }

    pub(super) fn lease_ends(&mut self, key: KeyId, caller: CallerId) {
        self.referee.leases[key].retain(|lease| lease.caller != caller);
        self.referee.finished.remove(&caller);
    }

    /// Given back: others may have it from now on, but it is not confirmed.
    pub(super) fn lease_finishes(&mut self, key: KeyId, caller: CallerId) {
        let lease = self.referee.leases[key]
            .iter()
            .find(|lease| lease.caller == caller);
        let lease = lease.expect("a lease begins before it is finished").clone();
        self.lease_ends(key, caller);
        self.referee.finished.insert(caller, lease);
    }

    /// Within the promise nothing is lost before its deadline.
    pub(super) fn check_loss(&mut self, key: KeyId, caller: CallerId) {
        let finished = self.referee.finished.remove(&caller);
        let held = self.referee.leases[key]
            .iter()
            .find(|lease| lease.caller == caller);
        let lease = finished.or_else(|| held.cloned());
        if self.profile.promised() && lease.is_some_and(|lease| self.is_valid(&lease)) {
            self.breach(format!("c{caller} is told that it has lost a valid lease"));
        }
    }

    /// A renewal is late: told once, while the lease lasts, and never where all goes well.
    pub(super) fn check_late(&mut self, key: KeyId, caller: CallerId) {
        self.referee.counts.late += 1;
        let told = std::mem::replace(&mut self.callers[caller].warned, true);
        let lease = self.referee.leases[key].iter();
        let valid = lease.clone().find(|lease| lease.caller == caller);
        let valid = valid.filter(|lease| self.is_valid(lease));
        // An extension that was wanted in the last moments of a lease is late soon.
        let was_last = valid.zip(self.callers[caller].extended);
        let was_last = was_last.is_some_and(|(lease, (asked, _))| {
            let asked = self.processes[lease.process].clock.moment(asked);
            lease.deadline.saturating_sub(asked) < Duration::from_millis(50)
        });
        let valid = valid.is_some();
        if told || !valid || self.is_quick() && !was_last {
            self.breach(format!(
                "c{caller} is told that its renewal is late, before: {told}, in time: {valid}"
            ));
        }
    }

    /// D4: the store is too slow for whoever is told so.
    pub(super) fn check_too_slow(&mut self, caller: CallerId, round_trip: Duration) {
        self.referee.counts.too_slow += 1;
        let ttl = Duration::from_micros(self.callers[caller].ttl);
        let is_valid_for = ttl - ttl / 100 - Duration::from_millis(2);
        if self.is_quick() || round_trip < is_valid_for {
            self.breach(format!(
                "c{caller} is told that {round_trip:?} is too slow for {ttl:?}"
            ));
        }
    }

    /// Its lease may be told of the next late one, also if its deadline does not move.
    pub(super) fn renewal_confirmed(&mut self, process: ProcessId, key: KeyId) {
        let of = |caller: &&mut Caller| (caller.process, caller.key) == (process, key);
        for caller in self.callers.iter_mut().filter(of) {
            caller.warned = false;
        }
    }

    /// Whoever loses what is renewed for ever has been told before.
    pub(super) fn check_warned(&mut self, key: KeyId, caller: CallerId) {
        let lease = self.referee.leases[key].iter();
        let lease = lease.clone().find(|lease| lease.caller == caller);
        let over = lease.is_some_and(|lease| !self.is_valid(lease));
        let caller = &self.callers[caller];
        // Told in time, and taken in time, so that its renewal was due for a while.
        let runs = matches!(self.profile.theme, Theme::Cuts | Theme::Unhelped);
        let steady = runs && caller.ttl >= 300 * MILLI && 10 * self.profile.reply_lag <= caller.ttl;
        let long = self.now - caller.seated_at > caller.ttl / 10 * 9;
        let renewed = caller.renewals == u32::MAX;
        // A renewal of another shared lease counts as one of this.
        let known = !self.profile.has_shared();
        if over && steady && long && renewed && known && !caller.warned {
            self.breach(format!("a lease on k{key} is lost without a warning"));
        }
    }

    /// D5: whose lease is over is told so.
    pub(super) fn check_told(&mut self) {
        let lateness = self.profile.lateness.max(MILLI) + 2 * MILLI;
        let untold = self.referee.leases.iter().flatten().find(|lease| {
            let process = &self.processes[lease.process];
            let at = self.now.saturating_sub(lateness);
            !process.stopped && process.clock.moment(at) >= lease.deadline
        });
        if let Some(untold) = untold.cloned() {
            self.breach(format!("D5: {untold:?} is over, and nobody says so"));
        }
    }

    /// W6: more passes than were settled are only for one who has had the key for two tenures.
    fn check_passes(&mut self, key: KeyId, process: ProcessId, passes: u64) {
        // By its holder's clock a tenure may go on after the store, whose clock was set forward, has given the key to
        // another.
        let in_a_row = self.referee.tenures.entry((process, key)).or_default();
        if passes == 0 {
            let last = mem::replace(&mut self.referee.last_tenures[key], process);
            *in_a_row = if last == process { *in_a_row + 1 } else { 1 };
        }
        let in_a_row = *in_a_row;
        let settled = u64::from(self.profile.local_passes);
        let most = if in_a_row > 2 {
            63.min(settled * 4)
        } else {
            settled
        };
        if passes > most {
            self.breach(format!(
                "W6: r{process} passes k{key} {passes} times in its tenure number {in_a_row}"
            ));
        }
    }

    /// M1: the valid leases of a key, over all registries, may be held together.
    fn check_alone(&mut self, key: KeyId, lease: &Seen) {
        let others = self.referee.leases[key].iter();
        let others: Vec<_> = others.filter(|other| self.is_valid(other)).collect();
        let all = [lease].into_iter().chain(others.iter().copied());
        let modes: Vec<_> = all.map(|it| self.callers[it.caller].mode).collect();
        if !may_have_come(&modes, &[]) {
            let others = format!("{others:?}");
            self.breach(format!("on k{key} {lease:?} meets {others}: {modes:?}"));
        }
    }

    /// M1: whom an op of the store let in may be there, beside those that had the lock before.
    pub(super) fn check_entries(&mut self, key: KeyId, before: &Tickets) {
        let after = self.holders(key).into_iter();
        // A lease whose key is kept has another name, and has not come anew (M8).
        let was_there = |(instance, owner): &(Arc<str>, Owner)| {
            let lease = instance.strip_suffix(KEPT).unwrap_or(instance);
            let mut before = before.iter();
            before.any(|(name, it)| it == owner && [lease, &**instance].contains(&&**name))
        };
        let (stayed, came): (Tickets, Tickets) = after.partition(was_there);
        let modes = |all: &Tickets| all.iter().map(|(_, it)| it.mode).collect::<Vec<_>>();
        if !may_have_come(&modes(&came), &modes(&stayed)) {
            self.breach(format!("M1: k{key} is given to {came:?} beside {stayed:?}"));
        }
    }

    /// The store holds the key for this registry to the deadline at least.
    fn check_proof(&mut self, key: KeyId, lease: &Seen) {
        let now = self.server.clock.micros(self.now);
        let (prefix, name) = (self.server.prefix.clone(), self.keys[key].clone());
        let key_status = self.server.keyspace.inspect_all(&prefix, &name, now);
        let process = &self.processes[lease.process];
        let mode = self.callers[lease.caller].mode;
        let ours = key_status.holders.iter().filter(|holder| {
            holder.mode == mode && holder.name.split(':').next() == Some(&*process.instance)
        });
        // Of several leases of this registry, it is not known here whose is whose.
        let left = ours
            .map(|it| it.left.map_or(0, |left| left.as_micros() as u64))
            .max();
        let ends = self.now + self.server.clock.lasts(left.unwrap_or(0));
        let believed = process.clock.when(lease.deadline);
        if left.is_none() || believed > ends {
            self.breach(format!(
                "k{key}: {lease:?} is believed to {believed} us, the store has {key_status:?}, to {ends} us"
            ));
        }
    }

    /// F1: draws grow in the order in which the store makes them.
    pub(super) fn check_epoch(&mut self, answer: &Answer, deliveries: &[Delivery]) {
        let grants = deliveries.iter().filter_map(|it| it.grant.as_ref());
        let mut epochs: Vec<_> = grants.map(|grant| grant.epoch).collect();
        if let Outcome::Won { epoch } = answer.outcome {
            epochs.push(epoch);
        }
        epochs.sort_unstable();
        for epoch in epochs {
            let last = std::mem::replace(&mut self.server.last_epoch, epoch);
            if epoch <= last && !(self.referee.fence_lost && self.referee.stepped > 0) {
                self.breach(format!("F1: epoch {epoch} after {last}"));
            }
        }
    }

    /// A renewal is for a lease that somebody has: none is sent after it was released or lost.
    pub(super) fn check_watchdog(&mut self, process: ProcessId, key: KeyId, op: &Op) {
        let leases = &self.referee.leases[key];
        let held = leases.iter().any(|lease| lease.process == process);
        if matches!(op, Op::Renew { .. }) && !held {
            self.breach(format!("r{process} k{key} sends {op:?} for nobody"));
        }
    }

    /// Nothing is prolonged after its release, however the two crossed on their way.
    pub(super) fn check_renewal(&mut self, process: ProcessId, op: &Op, outcome: &Outcome) {
        match *op {
            Op::Release { owner }
            | Op::Keep { owner, .. }
            | Op::Withdraw { owner, .. }
            | Op::Unlisten { owner } => {
                self.referee.ended.insert((process, owner));
            }
            Op::Yield { old, .. } if !matches!(outcome, Outcome::NotOld) => {
                self.referee.ended.insert((process, old));
            }
            Op::Renew { owner, .. } => {
                let ended = self.referee.ended.contains(&(process, owner));
                self.referee.counts.renewals += 1;
                self.referee.counts.crossed += u64::from(ended);
                if ended && matches!(outcome, Outcome::Renewed) {
                    self.breach(format!("r{process} {op:?}: renewed after its end"));
                }
            }
            _ => {}
        }
    }

    /// The first in the local queue of exclusive callers is served first.
    pub(super) fn check_order(&mut self, process: ProcessId, key: KeyId, served: WaiterId) {
        let overtaken = self.callers.iter().position(|caller| {
            caller.process == process
                && caller.key == key
                && caller.adopts.is_none()
                && caller.mode == Mode::Exclusive
                && matches!(caller.stage, Stage::Waiting(id) if id < served)
        });
        if let Some(overtaken) = overtaken {
            self.breach(format!("c{overtaken} of r{process} is overtaken"));
        }
    }

    /// I5: an idle turnstile has told everybody.
    pub(super) fn check_forgotten(&mut self, process: ProcessId, key: KeyId) {
        let forgotten = self.callers.iter().position(|caller| {
            caller.process == process
                && caller.key == key
                && !matches!(caller.stage, Stage::Out | Stage::Leaving)
        });
        if let Some(forgotten) = forgotten {
            let stage = self.callers[forgotten].stage;
            self.breach(format!("c{forgotten} is forgotten, while {stage:?}"));
        }
    }

    /// Everybody is served or gone, and nothing is left.
    pub(super) fn check_end(&mut self) {
        for id in 0..self.callers.len() {
            let stage = self.callers[id].stage;
            if stage != Stage::Out {
                self.breach(format!("c{id} is {stage:?} at the end"));
            }
        }
        for id in 0..self.processes.len() {
            let process = &self.processes[id];
            if !process.gone && !process.entries.is_empty() {
                self.breach(format!("r{id} has a turnstile at the end"));
            }
        }
        let now = self.server.clock.micros(self.now);
        if self.server.keyspace.len(now) > 0 {
            let prefix = self.server.prefix.clone();
            let sights: Vec<_> = self
                .keys
                .iter()
                .map(|key| self.server.keyspace.inspect_all(&prefix, key, now))
                .collect();
            self.breach(format!("left in the store: {sights:?}"));
        }
    }
}
