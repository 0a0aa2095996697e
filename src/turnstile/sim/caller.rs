//! The callers: they come, wait, look or do not, hold, and leave.

use std::sync::Arc;
use std::time::Duration;

use super::clock::{MILLI, SECOND, True};
use super::process::ProcessId;
use super::profile::Theme;
use super::world::{Event, KeyId, World};
use crate::base::clock::Moment;
use crate::base::{Mode, OnFinish};
use crate::turnstile::{
    EndMode, LeaseEnd, LeaseVerdict, NotGranted, Verdict, Waiter, WaiterId, WaiterVerdict,
};

pub(super) type CallerId = usize;

pub(super) const LONGEST_WAIT: u64 = 40 * SECOND;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// Not there: not yet, between two visits, or for good.
    Out,
    Waiting(WaiterId),
    Granted(WaiterId),
    Holding(WaiterId),
    Finishing,
    /// Dropped, while its turnstile is being told.
    Leaving,
}

pub(super) struct Caller {
    pub(super) process: ProcessId,
    pub(super) key: KeyId,
    pub(super) ttl: u64,
    pub(super) stage: Stage,
    pub(super) mode: Mode,
    pub(super) asks_once: bool,
    /// How often its lease is prolonged at most; 0: fixed.
    pub(super) renewals: u32,
    /// What becomes of its key.
    pub(super) on_finish: OnFinish,
    /// Until when its key is to be kept, if it has ended its lease so.
    pub(super) keeps_until: Option<True>,
    /// Whose lease it adopts, if it does not wait in the queue.
    pub(super) adopts: Option<Arc<str>>,
    /// It asked for its lease to last so long: when, and until when by its own clock.
    pub(super) extended: Option<(True, Moment)>,
    /// Of its latest lease.
    pub(super) token: u64,
    /// When it comes, if it adopts.
    pub(super) comes_at: True,
    /// When its wait is over.
    pub(super) until: True,
    /// When it was last granted.
    pub(super) seated_at: True,
    /// It was told that its renewal is late, and of no renewal since.
    pub(super) warned: bool,
    pub(super) visit: u32,
    wait: u64,
    /// How many pauses its policy still names, and how long each is.
    pauses: u64,
    pause: Duration,
}

impl Caller {
    /// One that waits in the queue for the first key, for a lease of a fixed length.
    pub(super) fn standing(process: ProcessId, ttl: u64) -> Self {
        Self {
            process,
            key: 0,
            ttl,
            stage: Stage::Out,
            mode: Mode::Exclusive,
            asks_once: false,
            renewals: 0,
            on_finish: OnFinish::Release,
            keeps_until: None,
            adopts: None,
            extended: None,
            token: 0,
            comes_at: 0,
            until: 0,
            seated_at: 0,
            warned: false,
            visit: 0,
            wait: LONGEST_WAIT,
            pauses: 0,
            pause: Duration::ZERO,
        }
    }

    /// One that adopts what `from` left, and wants to know within `wait`.
    pub(super) fn adopting(
        process: ProcessId,
        key: KeyId,
        ttl: u64,
        from: Arc<str>,
        wait: u64,
    ) -> Self {
        Self {
            key,
            asks_once: true,
            adopts: Some(from),
            wait,
            ..Self::standing(process, ttl)
        }
    }
}

impl World {
    pub(super) fn plan_caller(&mut self) {
        let profile = &self.profile;
        let rng = &mut self.rng;
        let once = rng.chance(150);
        let wait = match rng.below(4) {
            _ if once => profile.response_timeout * 2,
            0 => rng.between(0, 300 * MILLI),
            1 => rng.between(0, 4 * SECOND),
            _ => rng.between(SECOND, LONGEST_WAIT),
        };
        let mode = rng.pick(&profile.modes);
        let caller = Caller {
            process: rng.below(profile.registries as u64) as ProcessId,
            key: rng.below(profile.keys as u64) as KeyId,
            ttl: profile.ttls[rng.below(profile.ttls.len() as u64) as usize],
            stage: Stage::Out,
            mode,
            asks_once: once,
            renewals: if rng.chance(600) {
                rng.pick(&[1, 3, u32::MAX])
            } else {
                0
            },
            on_finish: match rng.chance(profile.keepers) {
                true => rng.pick(&profile.at_ends),
                false => OnFinish::Release,
            },
            keeps_until: None,
            adopts: None,
            extended: None,
            token: 0,
            comes_at: 0,
            until: 0,
            seated_at: 0,
            warned: false,
            visit: 0,
            wait,
            pauses: 0,
            pause: Duration::ZERO,
        };
        let at = rng.below(profile.calm_at);
        // Some come in crowds.
        let at = if rng.chance(400) {
            at - at % (SECOND / 2)
        } else {
            at
        };
        self.callers.push(caller);
        let id = self.callers.len() - 1;
        self.plan(at.saturating_sub(self.now), Event::Arrive(id));
    }

    pub(super) fn caller_arrives(&mut self, id: CallerId) {
        let now = self.now;
        let drops = !self.calm && self.rng.chance(self.profile.droppers);
        let pauses = self.rng.between(0, 400);
        let pause = Duration::from_micros(self.rng.between(MILLI, 100 * MILLI));
        let caller = &mut self.callers[id];
        let (process, key) = (caller.process, caller.key);
        if self.processes[process].closed {
            return;
        }
        if caller.until == 0 {
            caller.until = now + caller.wait;
        }
        caller.visit += 1;
        let visit = caller.visit;
        (caller.pauses, caller.pause) = (pauses, pause);
        let waiter = Waiter {
            caller: id,
            ttl: Duration::from_micros(caller.ttl),
            renewals: caller.renewals,
            adopts: caller.adopts.clone(),
            on_finish: caller.on_finish,
            is_conditional: false,
            asks_once: caller.asks_once,
            hears_of_others: false,
            until: self.processes[process].clock.moment(caller.until),
            answer_by: self.processes[process]
                .clock
                .moment(now + self.profile.response_timeout),
        };
        let mode = caller.mode;
        self.note(|_| format!("r{process} k{key} c{id} arrives: {waiter:?}"));
        let waiter = self.put_in(process, key, |lines, cx| lines.arrive(cx, mode, waiter));
        self.callers[id].stage = Stage::Waiting(waiter);
        self.drain(process, key);
        if drops {
            let delay = self.rng.between(0, self.callers[id].wait);
            self.plan(delay, Event::Leave(id, visit));
        }
    }

    /// The caller's policy is asked where nothing is locked, so much may happen before it has answered.
    pub(super) fn ask_policy(
        &mut self,
        process: ProcessId,
        key: KeyId,
        id: CallerId,
        asked: WaiterId,
    ) {
        let caller = &mut self.callers[id];
        let left = caller.pauses.checked_sub(1);
        caller.pauses = left.unwrap_or_default();
        let pause = left.map(|_| caller.pause);
        let delay = match self.rng.chance(800) {
            true => 0,
            false => self.rng.between(0, 20 * MILLI),
        };
        self.plan(delay, Event::Pause(process, key, asked, pause));
    }

    pub(super) fn verdict(
        &mut self,
        process: ProcessId,
        key: KeyId,
        id: CallerId,
        verdict: Verdict,
    ) {
        self.note(|_| format!("r{process} k{key} c{id} is told {verdict:?}"));
        let caller = &mut self.callers[id];
        let stage = caller.stage;
        match (&verdict, stage) {
            (_, Stage::Leaving) => {}
            (
                Verdict::Waiter(WaiterVerdict::Granted {
                    token, deadline, ..
                }),
                Stage::Waiting(waiter),
            ) => {
                let (token, deadline) = (*token, *deadline);
                caller.seated_at = self.now;
                caller.token = token.get();
                caller.extended = None;
                caller.warned = false;
                caller.stage = Stage::Granted(waiter);
                if caller.adopts.is_some() {
                    self.check_adopted(id);
                } else if caller.mode == Mode::Exclusive {
                    self.check_order(process, key, waiter);
                }
                self.lease_begins(process, key, id, token.get(), deadline);
                let visit = self.callers[id].visit;
                if self.rng.chance(self.profile.sleepers) {
                    let ttl = self.callers[id].ttl;
                    let delay = self.rng.between(0, ttl);
                    let event = if self.rng.chance(500) {
                        Event::Leave(id, visit)
                    } else {
                        Event::Look(id, visit)
                    };
                    self.plan(delay, event);
                } else {
                    let delay = self.rng.between(0, 200);
                    self.plan(delay, Event::Look(id, visit));
                }
            }
            (
                Verdict::Lease(LeaseVerdict::Prolonged { deadline, last }),
                Stage::Granted(_) | Stage::Holding(_),
            ) => {
                self.lease_prolonged(process, key, id, *deadline, *last);
            }
            (Verdict::Lease(LeaseVerdict::Unrenewed(_)), Stage::Holding(_)) => {}
            (Verdict::Lease(LeaseVerdict::RenewalLate), Stage::Holding(_)) => {
                self.check_late(key, id)
            }
            (Verdict::Waiter(WaiterVerdict::TurnLost), Stage::Granted(_)) => {
                self.lease_ends(key, id);
                self.callers[id].stage = Stage::Out;
                // It learns of it when it looks at last.
                let delay = self.rng.between(1, 2000);
                let adopts = self.callers[id].adopts.is_some();
                if !adopts && self.now + delay < self.callers[id].until && self.rng.chance(800) {
                    self.plan(delay, Event::Arrive(id));
                }
            }
            (Verdict::Lease(LeaseVerdict::Ended(LeaseEnd::Lost(_))), Stage::Holding(_)) => {
                self.check_loss(key, id);
                self.check_warned(key, id);
                self.lease_may_be_kept(key, id);
                self.lease_ends(key, id);
                self.check_length(id);
                self.depart(id);
            }
            (Verdict::Lease(LeaseVerdict::Closing), Stage::Holding(_)) => {
                // Its work stops, sooner or later: it holds until then.
                let visit = caller.visit;
                let most = 2 * self.profile.response_timeout;
                let delay = self.rng.between(0, most);
                self.plan(delay, Event::Finish(id, visit));
            }
            (Verdict::Waiter(WaiterVerdict::Refused(NotGranted::Closed)), Stage::Granted(_))
            | (Verdict::Lease(LeaseVerdict::Ended(LeaseEnd::Closed)), Stage::Holding(_)) => {
                if matches!(stage, Stage::Holding(_)) {
                    self.lease_may_be_kept(key, id);
                }
                self.lease_ends(key, id);
                self.callers[id].stage = Stage::Out;
            }
            (
                Verdict::Waiter(WaiterVerdict::Refused(NotGranted::NothingToAdopt)),
                Stage::Waiting(_),
            ) if self.callers[id].adopts.is_some() => {
                self.check_refused(id);
                self.depart(id);
            }
            (
                Verdict::Waiter(WaiterVerdict::Refused(NotGranted::TooSlow { round_trip })),
                Stage::Waiting(_),
            ) => {
                self.check_too_slow(id, *round_trip);
                self.depart(id);
            }
            (
                Verdict::Waiter(WaiterVerdict::Refused(
                    NotGranted::Busy(_)
                    | NotGranted::QueueFull
                    | NotGranted::Failed(_)
                    | NotGranted::Closed,
                )),
                Stage::Waiting(_),
            )
            | (
                Verdict::Lease(LeaseVerdict::Ended(
                    LeaseEnd::Released | LeaseEnd::Lost(_) | LeaseEnd::Failed(_),
                )),
                Stage::Finishing,
            ) => {
                match verdict {
                    Verdict::Lease(LeaseVerdict::Ended(LeaseEnd::Lost(_))) => {
                        self.check_loss(key, id)
                    }
                    Verdict::Lease(LeaseVerdict::Ended(LeaseEnd::Released)) => {
                        self.check_kept_for(id)
                    }
                    _ => {}
                }
                self.depart(id);
            }
            _ => self.breach(format!("c{id} is {stage:?}, and is told {verdict:?}")),
        }
    }

    /// It is done; some come again.
    fn depart(&mut self, id: CallerId) {
        let caller = &mut self.callers[id];
        let refused = matches!(caller.stage, Stage::Waiting(_));
        caller.stage = Stage::Out;
        if !self.calm && caller.adopts.is_none() && self.rng.chance(self.profile.returns) {
            caller.visit += 1;
            caller.until = 0;
            let rest = if refused {
                200 * MILLI
            } else {
                self.rng.pick(&self.profile.rests)
            };
            let delay = self.rng.between(1, 1 + rest);
            self.plan(delay, Event::Arrive(id));
        }
    }

    /// Whether all goes well, and answers take a small part of a ttl.
    pub(super) fn is_quick(&self) -> bool {
        self.profile.theme == Theme::Calm && self.profile.ttls[0] >= 300 * MILLI
    }

    /// Where all goes well, a lease lasts nearly as long as was asked for (W3).
    fn check_length(&mut self, id: CallerId) {
        let caller = &self.callers[id];
        let had = self.now - caller.seated_at;
        // D2's 0.999 of the 12 s that an answer may be old.
        let slack = 16 * MILLI + 3 * self.profile.latency.1 + self.profile.reply_lag;
        let due = (caller.ttl / 100 * 93).saturating_sub(slack);
        if self.is_quick() && had < due {
            self.breach(format!(
                "c{id} has lost a lease of {} us after {had}",
                caller.ttl
            ));
        }
    }

    /// It is polled, and takes what it was given.
    pub(super) fn caller_looks(&mut self, id: CallerId, visit: u32) {
        let caller = &self.callers[id];
        let (process, key) = (caller.process, caller.key);
        let Stage::Granted(waiter) = caller.stage else {
            return;
        };
        if caller.visit != visit {
            return;
        }
        let taken = self.feed(process, key, |lines, cx| {
            lines.feed(cx, waiter, |line, cx| line.take(cx, waiter))
        });
        self.note(|_| format!("r{process} k{key} c{id} takes it: {taken}"));
        let stage = self.callers[id].stage;
        if taken != (stage == Stage::Granted(waiter)) {
            self.breach(format!("c{id} takes its turn: {taken}, but is {stage:?}"));
        }
        if taken {
            self.callers[id].stage = Stage::Holding(waiter);
            let slept = self.now - self.callers[id].seated_at;
            let third = self.profile.longest_ttl() / 3;
            // By its own clock, which may run 0.1 % slow.
            if slept > third + third / 1000 + MILLI {
                self.breach(format!(
                    "W4: c{id} did not look for {slept} us, and has its turn"
                ));
            }
            self.lease_taken(key, id);
            if self.rng.chance(self.profile.seals) {
                let token = self.callers[id].token;
                self.note(|_| format!("r{process} k{key} c{id} sees its token {token}"));
                self.referee.sealed.insert((key, token / 64));
                self.feed(process, key, |lines, cx| {
                    lines.feed(cx, waiter, |line, _| line.forbid_passes(waiter))
                });
            }
            let holds = &self.profile.holds;
            let most = holds[self.rng.below(holds.len() as u64) as usize];
            let hold = self.rng.between(0, most);
            self.plan(hold, Event::Finish(id, visit));
            if self.rng.chance(self.profile.extensions) {
                let delay = self.rng.between(0, hold);
                self.plan(delay, Event::Extend(id, visit));
            }
        }
    }

    /// It is dropped: in the queue, or granted and not taken.
    pub(super) fn caller_leaves(&mut self, id: CallerId, visit: u32) {
        let caller = &mut self.callers[id];
        let (process, key) = (caller.process, caller.key);
        if caller.visit != visit {
            return;
        }
        let (Stage::Waiting(waiter) | Stage::Granted(waiter)) = caller.stage else {
            return;
        };
        caller.stage = Stage::Leaving;
        self.note(|_| format!("r{process} k{key} c{id} is dropped"));
        self.lease_ends(key, id);
        self.feed(process, key, |lines, cx| {
            lines.feed(cx, waiter, |line, cx| line.leave(cx, waiter))
        });
        self.callers[id].stage = Stage::Out;
    }

    pub(super) fn caller_finishes(&mut self, id: CallerId, visit: u32) {
        let caller = &mut self.callers[id];
        let (process, key) = (caller.process, caller.key);
        let Stage::Holding(waiter) = caller.stage else {
            return;
        };
        if caller.visit != visit {
            return;
        }
        if self.grace_is_over(process) {
            return self.caller_finishes_too_late(id, waiter);
        }
        let caller = &mut self.callers[id];
        caller.stage = Stage::Finishing;
        let is_exclusive = caller.mode == Mode::Exclusive;
        let detaches = is_exclusive && !self.calm && self.rng.chance(self.profile.detached);
        self.note(|_| format!("r{process} k{key} c{id} finishes, detaches: {detaches}"));
        self.check_extended(id);
        let is_valid = self.has_valid_lease(key, id);
        self.callers[id].keeps_until = match self.callers[id].on_finish {
            OnFinish::KeepFor(time) if is_valid && !detaches => {
                Some(self.callers[id].seated_at + time.as_micros() as u64)
            }
            _ => None,
        };
        self.lease_finishes(key, id);
        let end_mode = match detaches {
            true => EndMode::Detach,
            false => EndMode::Keep,
        };
        let kept = self.feed(process, key, |lines, cx| {
            lines.feed(cx, waiter, |line, cx| line.finish(cx, waiter, end_mode))
        });
        let Some(owner) = kept else {
            return;
        };
        if is_valid {
            self.lease_kept(id, owner);
        }
        if detaches {
            self.plan_adopters(process, key, owner);
        }
    }

    /// The process was shut down and stood still until the grace was over, and its caller ends its
    /// work before anything else has shown the turnstile the time. The turnstile then ends the lease
    /// itself, at the latest now. It gives the lease back as at any end of a grace, and has nothing
    /// left that the caller could finish: the caller is told `Closed`, and nothing after that.
    fn caller_finishes_too_late(&mut self, id: CallerId, waiter: WaiterId) {
        let caller = &self.callers[id];
        let (process, key) = (caller.process, caller.key);
        self.note(|_| format!("r{process} k{key} c{id} finishes after the grace"));
        // As one that holds it is told of the end.
        let kept = self.feed(process, key, |lines, cx| {
            lines.feed(cx, waiter, |line, cx| {
                line.finish(cx, waiter, EndMode::Keep)
            })
        });
        let stage = self.callers[id].stage;
        if stage != Stage::Out || kept.is_some() {
            self.breach(format!(
                "c{id} finishes after the grace, is {stage:?}, and has kept {kept:?}"
            ));
        }
    }

    pub(super) fn callers_gone(&mut self, process: ProcessId) {
        for id in 0..self.callers.len() {
            if self.callers[id].process == process {
                self.callers[id].stage = Stage::Out;
                self.lease_ends(self.callers[id].key, id);
            }
        }
    }
}
