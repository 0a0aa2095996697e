use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use foldhash::HashMap;
use smallvec::SmallVec;
use tokio::time::Instant;

use super::callbacks::Callbacks;
use super::caller::Caller;
use super::core::Engine;
use super::event_bus::EventBus;
use super::failure::CallerHandle;
use crate::base::StoreError;
use crate::base::clock::{FOREVER, Moment};
use crate::base::once_a_minute::OnceAMinute;
use crate::store::contract::{KeyScope, Op, Session};
use crate::turnstile::{self, Ids, WaiterId};

// The turnstile's types, with `CallerHandle` as their caller.
pub(super) type Effect = turnstile::Effect<CallerHandle>;
pub(super) type EventCx<'a> = turnstile::EventCx<'a, CallerHandle>;
pub(super) type Lines = turnstile::Lines<CallerHandle>;
pub(super) type Turnstile = turnstile::Turnstile<CallerHandle>;

/// How many turnstiles are fed before the lock is given to others (G5).
pub(super) const PIECE: usize = 1000;

/// How soon after its first event a turnstile's place in [`EngineState::timeouts`] comes, at the latest. Most turnstiles are
/// gone by then. With a place that early their timeouts may change meanwhile, and the place need not.
const FIRST_TICK: Duration = Duration::from_secs(1);

/// For how many effects there is a buffer between two events.
const MOST_EFFECTS: usize = 64;

/// The state of a registry, under its one lock.
pub(super) struct EngineState {
    /// One entry for each key in use.
    ///
    /// Boxed, since a table has up to twice as many places as entries, and is copied when it grows.
    pub(super) entries: HashMap<Arc<str>, Box<Entry>>,
    /// When to tick each turnstile next. The time may be too early, but never too late.
    pub(super) timeouts: BTreeSet<(Moment, Arc<str>)>,
    /// The effects of the event that is being fed. Between two events it is empty, and keeps its buffer.
    pub(super) effects: VecDeque<Effect>,
    /// When the timer task wakes next.
    pub(super) armed: Option<Moment>,
    /// When a turnstile was fed last.
    pub(super) latest: Moment,
    pub(super) ids: Ids,
    /// Whether grants can reach us, as far as is known.
    pub(super) queue: bool,
    /// Whether the store has been up.
    pub(super) was_up: bool,
    /// While the store, or a part of it, is unreachable.
    pub(super) outage: Option<Outage>,
    /// The server of the last connection, if it has told which it is.
    pub(super) server: Option<Arc<str>>,
    /// No new callers are taken: the registry is drained, or shut down.
    pub(super) closed: bool,
    pub(super) session: Option<Arc<dyn Session>>,
    /// Keeps the registry alive while a key is in use: after its last handle is dropped, leases must
    /// still be released.
    pub(super) keep_alive: Option<Arc<Engine>>,
}

/// An outage, and what the log has of it.
pub(super) struct Outage {
    pub(super) since: Instant,
    /// The last of its errors.
    pub(super) error: StoreError,
    /// Which part of the store was unreachable last while it was used, and why.
    pub(super) away: Option<(KeyScope, StoreError)>,
    pub(super) log: OnceAMinute,
    pub(super) is_told: bool,
}

impl Outage {
    pub(super) fn new(error: StoreError) -> Self {
        Self {
            since: Instant::now(),
            error,
            away: None,
            log: OnceAMinute::default(),
            is_told: false,
        }
    }
}

pub(super) struct Entry {
    pub(super) lines: Lines,
    /// Its place in [`EngineState::timeouts`].
    timeout: Option<Moment>,
}

/// What is done once the state is unlocked. Most changes send one op at most, which needs no allocation.
#[derive(Default)]
pub(super) struct Deferred {
    pub(super) sends: SmallVec<[(Arc<str>, Op); 1]>,
    pub(super) callbacks: Callbacks,
    /// Callers whose policies are to be asked for a pause.
    pub(super) policies: Vec<(CallerHandle, WaiterId)>,
    /// A caller arrived: the session's tasks must run.
    pub(super) arrived: bool,
    pub(super) session: Option<Arc<dyn Session>>,
    /// The next timeout is earlier than the one that the timer sleeps for.
    pub(super) wakes_timer: bool,
    /// There is a timeout.
    pub(super) needs_timer: bool,
    /// No key is in use any more.
    pub(super) became_idle: bool,
    /// What kept the engine alive until its last release: dropped once the state is unlocked.
    pub(super) released_engine: Option<Arc<Engine>>,
    pub(super) remains: Option<Box<Remains>>,
}

/// What a panic leaves. It is dropped once the state is unlocked: destructors are the user's code.
#[derive(Default)]
pub(super) struct Remains {
    /// Callers that were dropped while it unwinds.
    pub(super) dropped: Vec<Arc<Caller>>,
    /// Of a registry that has failed.
    pub(super) entries: HashMap<Arc<str>, Box<Entry>>,
    pub(super) effects: VecDeque<Effect>,
    pub(super) session: Option<Arc<dyn Session>>,
    /// Why it has.
    pub(super) failure: Option<String>,
}

/// One change under the lock. All that it feeds happens at the same moment.
pub(super) struct ChangeCx<'a> {
    pub(super) now: Moment,
    pub(super) events: &'a EventBus,
    pub(super) deferred: &'a mut Deferred,
}

impl EngineState {
    /// The time was read before the lock was taken. Another thread may have read a later time and taken
    /// the lock first. For a turnstile time does not go back.
    pub(super) fn no_earlier(&mut self, read: Moment) -> Moment {
        self.latest = self.latest.max(read);
        self.latest
    }

    /// Feeds one turnstile, applies its verdicts, and removes it if it is idle. `makes`: if there is none, one is made.
    pub(super) fn feed<R>(
        &mut self,
        at: &mut ChangeCx<'_>,
        key: &Arc<str>,
        makes: bool,
        event: impl FnOnce(&mut Lines, &mut EventCx<'_>) -> R,
    ) -> Option<R> {
        let now = at.now;
        let mut cx = EventCx::new(now, &mut self.ids, &mut self.effects);
        cx.leases = self.entries.len();
        let mut tick_by = FOREVER;
        // It nearly always exists. This look-up clones no key.
        let entry = match self.entries.get_mut(key) {
            Some(entry) => entry,
            None if !makes => return None,
            None => {
                let mut lines = Lines::new(self.queue);
                if let Some(outage) = &self.outage
                    && let Some((scope, error)) = &outage.away
                    && scope.contains(key)
                {
                    lines.assume_down(error.clone());
                }
                if self.closed {
                    lines.feed_all(&mut cx, Turnstile::drain);
                }
                let entry = Box::new(Entry {
                    lines,
                    timeout: None,
                });
                tick_by = now + FIRST_TICK;
                self.entries.entry(key.clone()).or_insert(entry)
            }
        };
        let result = event(&mut entry.lines, &mut cx);
        while let Some(effect) = cx.effects.pop_front() {
            match effect {
                Effect::Send(op) => at.deferred.sends.push((key.clone(), op)),
                Effect::Wake(caller, verdict) => {
                    let callbacks = &mut at.deferred.callbacks;
                    if let Some(id) = caller.tell(verdict, now, at.events, callbacks) {
                        let taken = entry.lines.feed(&mut cx, id, |line, cx| line.take(cx, id));
                        debug_assert!(taken, "it was granted at this moment");
                    }
                }
                Effect::AskPolicy(caller, id) => at.deferred.policies.push((caller, id)),
            }
        }
        self.effects.shrink_to(MOST_EFFECTS);
        // Without a session nobody would answer what is still pending.
        if entry.lines.is_idle() || self.session.is_none() {
            if let Some(timeout) = entry.timeout {
                self.timeouts.remove(&(timeout, key.clone()));
            }
            self.entries.remove(key);
        } else if let Some(next) = entry.lines.next_timeout().map(|next| next.min(tick_by))
            // Most events move a timeout to a later moment. The earlier one is kept, and moved when it is
            // due: that halves the cost of the tree (`bench held`).
            && entry.timeout.is_none_or(|timeout| next < timeout)
        {
            if let Some(timeout) = entry.timeout.replace(next) {
                self.timeouts.remove(&(timeout, key.clone()));
            }
            self.timeouts.insert((next, key.clone()));
        }
        Some(result)
    }

    pub(super) fn feed_keys(
        &mut self,
        at: &mut ChangeCx<'_>,
        keys: &[Arc<str>],
        event: impl Fn(&mut Turnstile, &mut EventCx<'_>),
    ) {
        for key in keys {
            self.feed(at, key, false, |lines, cx| lines.feed_all(cx, &event));
        }
    }

    /// Feeds `event` to the turnstiles whose time has come, each once: one that stays due must not keep the registry
    /// locked for ever. Returns whether others may be due.
    pub(super) fn feed_due(
        &mut self,
        at: &mut ChangeCx<'_>,
        mut event: impl FnMut(&mut Lines, &mut EventCx<'_>),
    ) -> bool {
        let mut due = Vec::new();
        while due.len() < PIECE
            && self
                .timeouts
                .first()
                .is_some_and(|(moment, _)| *moment <= at.now)
        {
            due.extend(self.timeouts.pop_first().map(|(_, key)| key));
        }
        let is_full = due.len() == PIECE;
        for key in due {
            let Some(entry) = self.entries.get_mut(&key) else {
                continue;
            };
            match entry.lines.next_timeout() {
                // Its place was too early.
                Some(next) if next > at.now => {
                    entry.timeout = Some(next);
                    self.timeouts.insert((next, key));
                }
                _ => {
                    entry.timeout = None;
                    self.feed(at, &key, false, &mut event);
                }
            }
        }
        is_full
    }
}
