use std::collections::BTreeSet;
use std::sync::Arc;

use smallvec::SmallVec;

use super::callbacks::Callbacks;
use super::core::Engine;
use super::event_bus::EventBus;
use super::failure::Caller;
use super::waiter_state::WaiterState;
use crate::StoreError;
use crate::key::{Key, KeyMap};
use crate::store::contract::{Grant, Op, Scope, Session};
use crate::turnstile::{Effect, EffectBuffer, EventCx, Ids, Moment, Rules, Turnstile, WaiterId};

/// What a registry knows, under its one lock.
pub(super) struct State {
    /// One entry a key in use; none when idle.
    ///
    /// Boxed: a table is up to twice as long as what is in it, and copied when it grows.
    pub(super) entries: KeyMap<Box<Entry>>,
    /// When to look after each entry, no later than what it waits for.
    pub(super) timeouts: BTreeSet<(Moment, Key)>,
    /// When the timer task will look next by itself.
    pub(super) armed: Option<Moment>,
    /// When anything was fed last.
    pub(super) latest: Moment,
    pub(super) ids: Ids,
    /// Lent to each turnstile in turn.
    pub(super) buffer: EffectBuffer<Caller>,
    /// Whether grants can reach us, as far as is known.
    pub(super) queue: bool,
    /// What part of the store was away when it was last heard of, and why.
    pub(super) away: Option<(Scope, StoreError)>,
    /// Whether the store was up when it was last heard of.
    pub(super) up: Option<bool>,
    /// Nobody comes in any more: it is drained, or shut down.
    pub(super) closed: bool,
    /// How many entries were brought by grants for keys that were not in use.
    pub(super) unsolicited: usize,
    pub(super) session: Option<Arc<dyn Session>>,
    /// Keeps the registry at work while anything is in use: what its last handle left behind must
    /// still be released.
    pub(super) keep_alive: Option<Arc<Engine>>,
}

pub(super) struct Entry {
    pub(super) turnstile: Turnstile<Caller>,
    /// Where it stands in [`State::timeouts`].
    timeout: Option<Moment>,
    /// Whether a grant brought it, for a key that was not in use.
    is_unsolicited: bool,
}

/// How many keys are in use at most that grants alone have brought. A server that makes grants up
/// must not make us keep them; an honest one has a handful.
pub(super) const MAX_UNSOLICITED: usize = 256;

/// What is done once the state is unlocked. As a rule a list has one element at most, which needs
/// no allocation.
#[derive(Default)]
pub(super) struct Deferred {
    pub(super) sends: SmallVec<[(Arc<str>, Op); 1]>,
    pub(super) callbacks: Callbacks,
    /// Whose policies are to name a pause.
    pub(super) policies: SmallVec<[(Caller, WaiterId); 1]>,
    /// Somebody arrived: the session's tasks are to run.
    pub(super) arrived: bool,
    pub(super) session: Option<Arc<dyn Session>>,
    pub(super) earlier: bool,
    pub(super) waits: bool,
    pub(super) idle: bool,
    pub(super) kept: Option<Arc<Engine>>,
    /// Callers that were dropped by a panic of the user's code, which unwinds.
    pub(super) dropped: Vec<Arc<WaiterState>>,
    /// What a registry had that has failed, and why it did.
    pub(super) broken: Option<Broken>,
    pub(super) failure: Option<String>,
}

/// Dropped once the state is unlocked: destructors are the user's code.
type Broken = (
    KeyMap<Box<Entry>>,
    Vec<Arc<WaiterState>>,
    Option<Arc<dyn Session>>,
);

/// One moment under the lock: everything that is fed then happens at once.
pub(super) struct Now<'a> {
    pub(super) now: Moment,
    pub(super) events: &'a EventBus,
    pub(super) deferred: &'a mut Deferred,
}

impl State {
    /// The time that was read before the lock was had: those who had it first may have read it
    /// later, and for a turnstile it does not go back.
    pub(super) fn no_earlier(&mut self, read: Moment) -> Moment {
        self.latest = self.latest.max(read);
        self.latest
    }

    /// Feeds one turnstile, settles its verdicts, and forgets it if it is idle. Where there is none,
    /// `rules` are those of the one to make, if any.
    pub(super) fn feed<R>(
        &mut self,
        at: &mut Now<'_>,
        key: &Key,
        rules: Option<Rules>,
        event: impl FnOnce(&mut Turnstile<Caller>, &mut EventCx<'_>) -> R,
    ) -> Option<R> {
        let (now, ids) = (at.now, &mut self.ids);
        // Nearly always there, and found without a clone of the key.
        let entry = match self.entries.get_mut(key) {
            Some(entry) => entry,
            None => {
                let mut turnstile = Turnstile::new(rules?, self.queue);
                if let Some((scope, error)) = &self.away
                    && scope.contains(key.name())
                {
                    turnstile.suspect(error.clone());
                }
                if self.closed {
                    turnstile.drain(&mut EventCx { now, ids });
                }
                let entry = Box::new(Entry {
                    turnstile,
                    timeout: None,
                    is_unsolicited: false,
                });
                self.entries.entry(key.clone()).or_insert(entry)
            }
        };
        entry.turnstile.lend_buffer(&mut self.buffer);
        let result = event(&mut entry.turnstile, &mut EventCx { now, ids });
        while let Some(effect) = entry.turnstile.next_effect() {
            match effect {
                Effect::Send(op) => at.deferred.sends.push((key.name().clone(), op)),
                Effect::Wake(caller, verdict) => {
                    caller.tell(verdict, now, at.events, &mut at.deferred.callbacks);
                }
                Effect::AskPolicy(caller, id) => at.deferred.policies.push((caller, id)),
            }
        }
        self.buffer = entry.turnstile.take_buffer();
        // After hanging up nobody would answer what a key still owes.
        if entry.turnstile.is_idle() || self.session.is_none() {
            if let Some(timeout) = entry.timeout {
                self.timeouts.remove(&(timeout, key.clone()));
            }
            self.unsolicited -= usize::from(entry.is_unsolicited);
            self.entries.remove(key);
        } else if let Some(next) = entry.turnstile.next_timeout()
            // One that moves to a later moment, as most do at most events, is found there when the
            // earlier one is over: that halves what the tree costs a lease.
            && entry.timeout.is_none_or(|timeout| next < timeout)
        {
            if let Some(timeout) = entry.timeout.replace(next) {
                self.timeouts.remove(&(timeout, key.clone()));
            }
            self.timeouts.insert((next, key.clone()));
        }
        Some(result)
    }

    /// Feeds a grant to the turnstile of its key. What was granted for a key that is not in use is
    /// given back. `doubt`: why it does not count, if it does not.
    pub(super) fn feed_grant(
        &mut self,
        at: &mut Now<'_>,
        key: &Key,
        rules: Rules,
        grant: Grant,
        doubt: Option<StoreError>,
    ) {
        let is_unsolicited = !self.entries.contains_key(key);
        if is_unsolicited && self.unsolicited >= MAX_UNSOLICITED {
            return;
        }
        self.feed(at, key, Some(rules), |turnstile, cx| {
            turnstile.grant_received(cx, grant, doubt)
        });
        if is_unsolicited && let Some(entry) = self.entries.get_mut(key) {
            entry.is_unsolicited = true;
            self.unsolicited += 1;
        }
    }

    /// Feeds `event` to every turnstile whose time has come, once: one that names a time in the past again must not keep
    /// the registry locked for ever.
    pub(super) fn feed_due(
        &mut self,
        at: &mut Now<'_>,
        mut event: impl FnMut(&mut Turnstile<Caller>, &mut EventCx<'_>),
    ) {
        let mut due = Vec::new();
        while self
            .timeouts
            .first()
            .is_some_and(|(moment, _)| *moment <= at.now)
        {
            due.extend(self.timeouts.pop_first().map(|(_, key)| key));
        }
        for key in due {
            if let Some(entry) = self.entries.get_mut(&key) {
                entry.timeout = None;
            }
            self.feed(at, &key, None, &mut event);
        }
    }
}
