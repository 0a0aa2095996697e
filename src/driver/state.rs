use std::collections::BTreeSet;
use std::sync::Arc;

use super::aftermath::Aftermath;
use super::contender::Contender;
use super::core::Driver;
use super::few::Few;
use super::journal::Journal;
use crate::StoreError;
use crate::key::{Key, KeyMap};
use crate::store::contract::{Grant, Op, Scope, Session};
use crate::turnstile::{Cx, Effect, Moment, Room, Rules, Supply, Turnstile, WaiterId};

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
    pub(super) supply: Supply,
    /// Lent to each turnstile in turn.
    pub(super) room: Room<Arc<Contender>>,
    /// Whether grants can reach us, as far as is known.
    pub(super) queue: bool,
    /// What part of the store was away when it was last heard of, and why.
    pub(super) away: Option<(Scope, StoreError)>,
    /// Whether the store was up when it was last heard of.
    pub(super) up: Option<bool>,
    pub(super) closed: bool,
    /// How many entries were brought by grants for keys that were not in use.
    pub(super) strange: usize,
    pub(super) session: Option<Arc<dyn Session>>,
    /// Keeps the registry at work while anything is in use: what its last handle left behind must
    /// still be released.
    pub(super) keep: Option<Arc<Driver>>,
}

pub(super) struct Entry {
    pub(super) turnstile: Turnstile<Arc<Contender>>,
    /// Where it stands in [`State::timeouts`].
    timeout: Option<Moment>,
    /// Whether a grant brought it, for a key that was not in use.
    is_strange: bool,
}

/// How many keys are in use at most that grants alone have brought. A server that makes grants up
/// must not make us keep them; an honest one has a handful.
pub(super) const MOST_STRANGE: usize = 256;

/// What is done once the state is unlocked.
#[derive(Default)]
pub(super) struct Outbox {
    pub(super) sends: Few<(Arc<str>, Op)>,
    pub(super) aftermath: Aftermath,
    /// Whose policies are to name a pause.
    pub(super) policies: Few<(Arc<Contender>, WaiterId)>,
    /// Somebody arrived: the session's tasks are to run.
    pub(super) arrived: bool,
    pub(super) session: Option<Arc<dyn Session>>,
    pub(super) earlier: bool,
    pub(super) waits: bool,
    pub(super) idle: bool,
    pub(super) kept: Option<Arc<Driver>>,
}

/// One moment under the lock: everything that is fed then happens at once.
pub(super) struct Now<'a> {
    pub(super) now: Moment,
    pub(super) journal: &'a Journal,
    pub(super) outbox: &'a mut Outbox,
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
        event: impl FnOnce(&mut Turnstile<Arc<Contender>>, &mut Cx<'_>) -> R,
    ) -> Option<R> {
        let (now, supply) = (at.now, &mut self.supply);
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
                    turnstile.close(&mut Cx { now, supply }, |_| None);
                }
                let entry = Box::new(Entry {
                    turnstile,
                    timeout: None,
                    is_strange: false,
                });
                self.entries.entry(key.clone()).or_insert(entry)
            }
        };
        entry.turnstile.lend(&mut self.room);
        let result = event(&mut entry.turnstile, &mut Cx { now, supply });
        while let Some(effect) = entry.turnstile.next_effect() {
            match effect {
                Effect::Send(op) => at.outbox.sends.push((key.name().clone(), op)),
                Effect::Wake(contender, verdict) => {
                    contender.tell(verdict, now, at.journal, &mut at.outbox.aftermath);
                }
                Effect::AskPolicy(contender, id) => at.outbox.policies.push((contender, id)),
            }
        }
        self.room = entry.turnstile.take_back();
        // After hanging up nobody would answer what a key still owes.
        if entry.turnstile.is_idle() || self.session.is_none() {
            if let Some(timeout) = entry.timeout {
                self.timeouts.remove(&(timeout, key.clone()));
            }
            self.strange -= usize::from(entry.is_strange);
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
        let is_strange = !self.entries.contains_key(key);
        if is_strange && self.strange >= MOST_STRANGE {
            return;
        }
        self.feed(at, key, Some(rules), |turnstile, cx| {
            turnstile.granted(cx, grant, doubt)
        });
        if is_strange && let Some(entry) = self.entries.get_mut(key) {
            entry.is_strange = true;
            self.strange += 1;
        }
    }

    /// Feeds every turnstile whose time has come, once: one that names a time in the past again must not keep the
    /// registry locked for ever.
    pub(super) fn feed_due(&mut self, at: &mut Now<'_>) {
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
            self.feed(at, &key, None, Turnstile::tick);
        }
    }
}
