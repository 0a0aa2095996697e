//! A process: its turnstiles, its clock, and what the engine does with them.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use super::caller::CallerId;
use super::clock::{Clock, True};
use super::link::Link;
use super::profile::Profile;
use super::world::{Event, KeyId, World};
use crate::base::clock::Moment;
use crate::base::{Mode, StoreError};
use crate::store::contract::{Answer, Grant, Op, OpError, Owner};
use crate::turnstile::{Effect, EventCx, Ids, Lines, Rules, Turnstile, WaiterId};

pub(super) type ProcessId = usize;

pub(super) struct Process {
    pub(super) instance: Arc<str>,
    pub(super) clock: Clock,
    pub(super) link: Link,
    /// SIGSTOP: what it would see piles up.
    pub(super) stopped: bool,
    pub(super) backlog: Vec<Event>,
    pub(super) gone: bool,
    /// Shut down: it lets nobody in.
    pub(super) closed: bool,
    /// Until when, after the shutdown, a holder that heard of it may end its work.
    grace: Option<Moment>,
    pub(super) entries: BTreeMap<KeyId, Entry>,
    ids: Ids,
    /// Whether grants reach it, as far as it knows.
    queue: bool,
    inbox: VecDeque<StoreEvent>,
    /// The lines with an op in flight (O2).
    flying: BTreeSet<(KeyId, u64)>,
}

pub(super) struct Entry {
    lines: Lines<CallerId>,
    effects: VecDeque<Effect<CallerId>>,
    armed: Option<True>,
}

/// What the session tells, as in the contract.
pub(super) enum StoreEvent {
    Replied(KeyId, Op, Result<Answer, OpError>),
    Granted(KeyId, Grant),
    Unconfirmed(KeyId, Grant, StoreError),
    Freed(KeyId),
    Unserved(KeyId, Owner),
    Up { queue: bool },
    Down(StoreError),
}

impl Process {
    pub(super) fn new(id: ProcessId, clock: Clock, seed: u64, profile: &Profile) -> Self {
        let rules = Rules {
            local_passes: profile.local_passes,
            local_span: Duration::from_micros(profile.local_span),
            max_waiters: profile.max_waiters,
            response_timeout: Duration::from_micros(profile.response_timeout),
        };
        Self {
            instance: format!("r{id}").into(),
            clock,
            link: Link::new(profile.limits),
            stopped: false,
            backlog: Vec::new(),
            gone: false,
            closed: false,
            grace: None,
            entries: BTreeMap::new(),
            ids: Ids::new(rules, seed),
            queue: true,
            inbox: VecDeque::new(),
            flying: BTreeSet::new(),
        }
    }

    pub(super) fn is_patient(&self) -> bool {
        self.queue && self.link.up
    }
}

/// What has one op in flight at most: the exclusive owners of a key together, and each shared one (O2).
pub(super) fn line_of(key: KeyId, op: &Op) -> (KeyId, u64) {
    let Owner { sequence, mode } = op.owner();
    match (op, mode) {
        (Op::Serve { .. }, _) => (key, u64::MAX),
        (_, Mode::Exclusive) => (key, 0),
        _ => (key, sequence),
    }
}

impl World {
    /// Feeds an event to a turnstile, does its effects, sets its timer; forgets it when idle.
    pub(super) fn feed<R>(
        &mut self,
        id: ProcessId,
        key: KeyId,
        event: impl FnOnce(&mut Lines<CallerId>, &mut EventCx<'_, CallerId>) -> R,
    ) -> R {
        let result = self.put_in(id, key, event);
        self.drain(id, key);
        result
    }

    pub(super) fn put_in<R>(
        &mut self,
        id: ProcessId,
        key: KeyId,
        event: impl FnOnce(&mut Lines<CallerId>, &mut EventCx<'_, CallerId>) -> R,
    ) -> R {
        let process = &mut self.processes[id];
        let queue = process.queue;
        let now = process.clock.moment(self.now);
        let entry = process.entries.entry(key).or_insert_with(|| Entry {
            lines: Lines::new(queue),
            effects: VecDeque::new(),
            armed: None,
        });
        let mut cx = EventCx::new(now, &mut process.ids, &mut entry.effects);
        // Every other process is one with many leases (G5).
        cx.leases = if id.is_multiple_of(2) { 1 } else { 1000 };
        event(&mut entry.lines, &mut cx)
    }

    pub(super) fn drain(&mut self, id: ProcessId, key: KeyId) {
        let mut effects = 0;
        while let Some(effect) = self.entry(id, key).effects.pop_front() {
            effects += 1;
            match effect {
                Effect::Send(op) => {
                    self.check_sent(id, key, &op);
                    let line = line_of(key, &op);
                    if !matches!(op, Op::Renew { .. }) && !self.processes[id].flying.insert(line) {
                        self.breach(format!("O2: r{id} k{key} sends {op:?} beside another op"));
                    }
                    self.check_watchdog(id, key, &op);
                    self.submit(id, key, op);
                }
                Effect::Wake(caller, verdict) => self.verdict(id, key, caller, verdict),
                Effect::AskPolicy(caller, asked) => self.ask_policy(id, key, caller, asked),
            }
        }
        if effects > 2000 {
            self.breach(format!("{effects} effects of one event"));
        }
        self.arm(id, key);
    }

    fn entry(&mut self, id: ProcessId, key: KeyId) -> &mut Entry {
        let entries = &mut self.processes[id].entries;
        entries.get_mut(&key).expect("it was just fed")
    }

    fn arm(&mut self, id: ProcessId, key: KeyId) {
        let entry = self.entry(id, key);
        if entry.lines.is_idle() {
            self.processes[id].entries.remove(&key);
            return self.check_forgotten(id, key);
        }
        let Some(next) = entry.lines.next_timeout() else {
            entry.armed = None;
            return;
        };
        let at = self.processes[id].clock.when(next).max(self.now);
        let lateness = if self.calm {
            1000
        } else {
            self.profile.lateness
        };
        let at = at + self.rng.between(0, lateness);
        let entry = self.entry(id, key);
        if entry.armed.is_none_or(|armed| armed > at) {
            entry.armed = Some(at);
            let delay = at.saturating_sub(self.now);
            self.plan(delay, Event::Timer(id, key));
        }
    }

    pub(super) fn timer(&mut self, id: ProcessId, key: KeyId) {
        let now = self.now;
        let Some(entry) = self.processes[id].entries.get_mut(&key) else {
            return;
        };
        if entry.armed.is_some_and(|armed| armed <= now) {
            entry.armed = None;
            let (next, now) = self.feed(id, key, |lines, cx| {
                lines.tick(cx);
                (lines.next_timeout(), cx.now)
            });
            if next.is_some_and(|next| next <= now) {
                self.breach(format!(
                    "r{id} k{key} is ticked at {now:?} for {next:?}, and on"
                ));
            }
        }
    }

    pub(super) fn on_pause(
        &mut self,
        id: ProcessId,
        key: KeyId,
        waiter: WaiterId,
        pause: Option<Duration>,
    ) {
        self.note(|_| format!("r{id} k{key} {waiter:?} is to pause for {pause:?}"));
        if self.processes[id].entries.contains_key(&key) {
            self.feed(id, key, |lines, cx| {
                lines.feed(cx, waiter, |line, cx| line.on_pause(cx, waiter, pause))
            });
        }
    }

    pub(super) fn tell(&mut self, id: ProcessId, event: StoreEvent) {
        self.processes[id].inbox.push_back(event);
    }

    pub(super) fn read_inbox(&mut self, id: ProcessId) {
        while let Some(event) = self.processes[id].inbox.pop_front() {
            self.on_store_event(id, event);
        }
    }

    fn on_store_event(&mut self, id: ProcessId, event: StoreEvent) {
        let keys: Vec<_> = self.processes[id].entries.keys().copied().collect();
        match event {
            StoreEvent::Replied(key, op, result) => {
                self.note(|_| format!("r{id} k{key} hears of {op:?}: {result:?}"));
                if !matches!(op, Op::Renew { .. }) {
                    self.processes[id].flying.remove(&line_of(key, &op));
                }
                if !self.calm && self.rng.chance(self.profile.losses) {
                    self.note(|_| format!("r{id} k{key}: its session loses {op:?}"));
                    self.feed(id, key, |lines, cx| lines.op_dropped(cx, &op));
                    return;
                }
                let renewed = matches!(op, Op::Renew { .. }) && result.is_ok();
                self.feed(id, key, |lines, cx| lines.replied(cx, &op, result));
                if renewed {
                    self.renewal_confirmed(id, key);
                }
            }
            StoreEvent::Granted(key, grant) => {
                self.note(|_| format!("r{id} k{key} hears of {grant:?}"));
                self.feed(id, key, |lines, cx| lines.grant_received(cx, grant, None));
            }
            StoreEvent::Unconfirmed(key, grant, error) => {
                self.note(|_| format!("r{id} k{key} hears of {grant:?}, unconfirmed"));
                let fault = Some(error);
                self.feed(id, key, |lines, cx| lines.grant_received(cx, grant, fault));
            }
            StoreEvent::Freed(key) => {
                self.note(|_| format!("r{id} k{key} hears that it is free"));
                if keys.contains(&key) {
                    self.feed(id, key, |lines, cx| lines.feed_all(cx, Turnstile::freed));
                }
            }
            // The answer is of no interest.
            StoreEvent::Unserved(key, owner) => {
                self.note(|_| format!("r{id} k{key} is to serve the rest"));
                self.submit(id, key, Op::Serve { owner });
            }
            StoreEvent::Up { queue } => {
                self.note(|_| format!("r{id} is up, pushes: {queue}"));
                self.processes[id].queue = queue;
                for key in &keys {
                    self.feed(id, *key, |lines, cx| {
                        lines.feed_all(cx, |line, cx| line.up_renew(cx, false))
                    });
                }
                for key in keys {
                    if self.processes[id].entries.contains_key(&key) {
                        self.feed(id, key, |lines, cx| {
                            lines.feed_all(cx, |line, cx| line.up(cx, queue))
                        });
                    }
                }
            }
            StoreEvent::Down(error) => {
                self.note(|_| format!("r{id} is down"));
                for key in keys {
                    self.feed(id, key, |lines, cx| {
                        lines.feed_all(cx, |line, cx| line.down(cx, &error))
                    });
                }
            }
        }
    }

    /// The registry is shut down; the process ends when everything is released, or after a
    /// while.
    pub(super) fn close(&mut self, id: ProcessId) {
        self.note(|_| format!("r{id} is shut down"));
        self.processes[id].closed = true;
        let keys: Vec<_> = self.processes[id].entries.keys().copied().collect();
        let grace = self.profile.response_timeout;
        let until = self.processes[id].clock.moment(self.now + grace);
        // A second shutdown gives nobody more time.
        self.processes[id].grace.get_or_insert(until);
        for key in keys {
            let hears = self.rng.chance(600);
            self.feed(id, key, |lines, cx| {
                lines.feed_all(cx, |line, cx| line.close(cx, |_| hears.then_some(until)))
            });
        }
        self.read_inbox(id);
        self.plan(3 * self.profile.response_timeout, Event::Exit(id));
    }

    /// Whether the process was shut down, and the time is over in which a holder may end its work.
    pub(super) fn grace_is_over(&self, id: ProcessId) -> bool {
        let process = &self.processes[id];
        let now = process.clock.moment(self.now);
        process.grace.is_some_and(|until| now >= until)
    }

    /// The process ends, orderly or not.
    pub(super) fn exit(&mut self, id: ProcessId) {
        let process = &mut self.processes[id];
        if std::mem::replace(&mut process.gone, true) {
            return;
        }
        process.entries.clear();
        process.backlog.clear();
        self.note(|_| format!("r{id} is gone"));
        if let Some(conn) = self.processes[id].link.conn {
            self.cut(conn);
        }
        self.callers_gone(id);
    }
}
