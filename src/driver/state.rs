use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use super::aftermath::Aftermath;
use super::contender::Contender;
use super::core::Driver;
use super::journal::Journal;
use crate::store::contract::{Op, Session};
use crate::turnstile::{Cx, Effect, Moment, Rules, Supply, Turnstile};

/// What a registry knows, under its one lock.
pub(super) struct State {
    /// One entry a key in use; none when idle.
    pub(super) entries: HashMap<Arc<str>, Entry>,
    /// What each entry waits for.
    pub(super) timeouts: BTreeSet<(Moment, Arc<str>)>,
    /// When the timer task will look next by itself.
    pub(super) armed: Option<Moment>,
    pub(super) supply: Supply,
    /// Whether grants can reach us, as far as is known.
    pub(super) queue: bool,
    /// Whether the store was up when it was last heard of.
    pub(super) up: Option<bool>,
    pub(super) closed: bool,
    pub(super) session: Option<Arc<dyn Session>>,
    /// Keeps the registry at work while anything is in use: what its last handle left behind must
    /// still be released.
    pub(super) keep: Option<Arc<Driver>>,
}

pub(super) struct Entry {
    pub(super) turnstile: Turnstile<Arc<Contender>>,
    pub(super) timeout: Option<Moment>,
}

/// What is done once the state is unlocked.
#[derive(Default)]
pub(super) struct Outbox {
    pub(super) sends: Vec<(Arc<str>, Op)>,
    pub(super) aftermath: Aftermath,
    pub(super) session: Option<Arc<dyn Session>>,
    pub(super) earlier: bool,
    pub(super) waits: bool,
    pub(super) idle: bool,
    pub(super) kept: Option<Arc<Driver>>,
}

impl State {
    pub(super) fn make(&mut self, key: &Arc<str>, rules: Rules) {
        if !self.entries.contains_key(key) {
            let mut turnstile = Turnstile::new(rules, self.queue);
            if self.closed {
                let supply = &mut self.supply;
                turnstile.close(&mut Cx {
                    now: Moment::ZERO,
                    supply,
                });
            }
            let timeout = None;
            self.entries
                .insert(key.clone(), Entry { turnstile, timeout });
        }
    }

    /// After hanging up: nobody would answer what a key still owes.
    pub(super) fn forget(&mut self, key: &Arc<str>) {
        if let Some(Entry {
            timeout: Some(timeout),
            ..
        }) = self.entries.remove(key)
        {
            self.timeouts.remove(&(timeout, key.clone()));
        }
    }

    /// Feeds one turnstile, settles its verdicts, and forgets it if it is idle.
    pub(super) fn feed<R>(
        &mut self,
        key: &Arc<str>,
        now: Moment,
        journal: &Journal,
        outbox: &mut Outbox,
        event: impl FnOnce(&mut Turnstile<Arc<Contender>>, &mut Cx<'_>) -> R,
    ) -> Option<R> {
        let entry = self.entries.get_mut(key)?;
        let supply = &mut self.supply;
        let result = event(&mut entry.turnstile, &mut Cx { now, supply });
        while let Some(effect) = entry.turnstile.next_effect() {
            match effect {
                Effect::Send(op) => outbox.sends.push((key.clone(), op)),
                Effect::Wake(contender, verdict) => {
                    contender.tell(verdict, now, journal, &mut outbox.aftermath);
                }
            }
        }
        let timeout = entry.turnstile.next_timeout();
        if timeout != entry.timeout {
            if let Some(before) = entry.timeout {
                self.timeouts.remove(&(before, key.clone()));
            }
            if let Some(after) = timeout {
                self.timeouts.insert((after, key.clone()));
            }
            entry.timeout = timeout;
        }
        if entry.turnstile.is_idle() {
            self.entries.remove(key);
        }
        Some(result)
    }
}
