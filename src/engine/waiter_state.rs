mod verdicts;

use std::fmt;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::Waker;
use std::time::Duration;

use futures::task::AtomicWaker;
use tokio::runtime::Id;

use super::callbacks::Callbacks;
use super::event_bus::EventBus;
use super::phase::{EndMode, Phase};
use crate::Token;
use crate::events::LockEvent;
use crate::repeat::Repeats;
use crate::snapshot::{LeaseSnapshot, WaiterSnapshot};
use crate::turnstile::{LeaseEnd, LeaseVerdict, Moment, Refusal, Verdict, WaiterId, WaiterVerdict};
use crate::user_code;

/// One caller from its arrival to the end of its lease: what its future and the engine share.
pub(crate) struct WaiterState {
    key: Arc<str>,
    /// The number of its latest arrival, 0 before the first. Written under the engine's lock.
    id: AtomicU64,
    /// How many share its lease: whoever leaves last gives it back.
    shares: AtomicU32,
    state: Mutex<State>,
}

struct State {
    phase: Phase,
    /// Who waits for the next verdict: the caller, or later its release.
    waker: Option<Waker>,
    /// Who watches for the end of a held lease before its holder releases it. First come first.
    watchers: Vec<Watcher>,
    /// The first of its ids: by this others know it.
    waiter: u64,
    /// When it was first in line; once it has a lease, when it took that; and when it has given
    /// that back, how long it had it.
    since: Moment,
    /// What becomes of the lease that it holds no more.
    end_mode: EndMode,
    /// The pauses between its attempts, while it waits.
    repeats: Option<Repeats>,
    /// Whether that was because of a shutdown.
    closing: bool,
    /// Whether it is to look once more before it takes the key.
    leads: bool,
    deadline: Moment,
    /// Where it arrived; once it has a lease, where it took that.
    runtime: Option<Id>,
}

impl WaiterState {
    pub(crate) fn new(key: Arc<str>) -> Self {
        Self {
            key,
            id: AtomicU64::new(0),
            shares: AtomicU32::new(1),
            state: Mutex::new(State {
                phase: Phase::Waiting,
                waker: None,
                watchers: Vec::new(),
                waiter: 0,
                since: Moment::ZERO,
                end_mode: EndMode::Release,
                repeats: None,
                closing: false,
                leads: false,
                deadline: Moment::ZERO,
                runtime: None,
            }),
        }
    }

    pub(crate) fn key(&self) -> &Arc<str> {
        &self.key
    }

    pub(crate) fn phase(&self) -> Phase {
        self.lock().phase.clone()
    }

    /// How far it has come; while it waits, the waker is told of the next verdict.
    ///
    /// Whoever leads a tenure has to look twice. A tenure is a chain of tasks that wake each other, and
    /// the third task of such a chain has tokio wake another of its threads, if one sleeps. Where no
    /// processor is idle, Linux mostly runs that one in place of the thread that woke it: in the
    /// middle of a release, so that this task was not in line again before the tenure was over, and
    /// of two tasks one had 1.2 times the turns of the other. A task that asks to be polled again
    /// has another thread woken just so, but nothing passes it by in that time: it has the key.
    pub(crate) fn phase_or_wake(&self, waker: &Waker) -> Phase {
        // Wakers are the user's code: they are cloned and dropped where nothing is locked.
        let clone = waker.clone();
        let mut state = self.lock();
        if matches!(state.phase, Phase::Granted { .. }) && std::mem::take(&mut state.leads) {
            drop(state);
            waker.wake_by_ref();
            return Phase::Waiting;
        }
        if let Phase::Granted { .. }
        | Phase::TurnLost
        | Phase::Refused(_)
        | Phase::Ended { .. }
        | Phase::Finished { .. } = state.phase
        {
            return state.phase.clone();
        }
        let before = state.waker.replace(clone);
        let phase = state.phase.clone();
        drop(state);
        drop(before);
        phase
    }

    /// The deadline of the lease it holds.
    pub(crate) fn deadline(&self) -> Moment {
        self.lock().deadline
    }

    /// Whether it holds its lease, and the deadline is still to come.
    pub(crate) fn is_held(&self, now: Moment) -> bool {
        let state = self.lock();
        matches!(state.phase, Phase::Held { .. }) && now < state.deadline
    }

    /// One more shares the lease, if it is still held: its token. Only for who is inside of it: the
    /// lease around, which has not left yet, keeps the count from having been down to nothing.
    pub(crate) fn join(&self, now: Moment) -> Option<Token> {
        // Under the lock, or another that shares it could take it away after the look.
        let state = self.lock();
        let Phase::Held { token } = state.phase else {
            return None;
        };
        if now >= state.deadline {
            return None;
        }
        let before = self.shares.fetch_add(1, Ordering::Relaxed);
        debug_assert_ne!(before, 0, "a lease that was given back is not to be shared");
        Some(token)
    }

    /// One leaves the lease; true for the last, alone, who gives it back.
    pub(crate) fn part(&self) -> bool {
        self.shares.fetch_sub(1, Ordering::AcqRel) == 1
    }

    /// Whether the lease stays if one leaves now.
    pub(crate) fn is_shared(&self) -> bool {
        self.shares.load(Ordering::Acquire) > 1
    }

    /// Returns a waker that is woken when the lease ends under its holder, and if it is
    /// `of_deadlines` when it gets a new deadline or is released as well. Whoever waits registers
    /// with it, and looks again after that.
    pub(crate) fn watch(&self, of_deadlines: bool) -> Arc<AtomicWaker> {
        let waker = Arc::default();
        let watcher = Watcher {
            waker: Arc::downgrade(&waker),
            of_deadlines,
        };
        let mut state = self.lock();
        state.watchers.retain(Watcher::is_alive);
        state.watchers.push(watcher);
        waker
    }

    /// Whether anybody would hear that the lease ends.
    pub(super) fn is_watched(&self) -> bool {
        self.lock().watchers.iter().any(Watcher::is_alive)
    }

    pub(super) fn id(&self) -> Option<WaiterId> {
        // Whoever has arrived, or was told so, has it from there.
        let id = self.id.load(Ordering::Relaxed);
        (id != 0).then_some(WaiterId(id))
    }

    /// Since when it waits, if it has arrived before.
    pub(super) fn since(&self) -> Option<Moment> {
        self.id().map(|_| self.lock().since)
    }

    /// How long it has waited by now.
    pub(crate) fn waited(&self, now: Moment) -> Duration {
        now.saturating_sub(self.lock().since)
    }

    /// Whether it belongs to one of these runtimes.
    pub(super) fn is_of(&self, runtimes: &[Id]) -> bool {
        let runtime = self.lock().runtime;
        runtime.is_some_and(|runtime| runtimes.contains(&runtime))
    }

    /// Sets the pauses of the wait that is about to begin.
    pub(super) fn set_repeats(&self, repeats: Repeats) {
        let before = self.lock().repeats.replace(repeats);
        user_code::discard(before);
    }

    /// Asks the policy of this arrival, the user's code, for the next pause. `None`: another thread is asking it, and
    /// tells the turnstile.
    pub(super) fn next_pause(&self, id: WaiterId) -> Option<Option<Duration>> {
        let mut state = self.lock();
        if !matches!(state.phase, Phase::Waiting) || self.id() != Some(id) {
            // It does not wait any more. The turnstile is to ask the next in line.
            return Some(None);
        }
        let mut repeats = state.repeats.take()?;
        drop(state);
        let pause = repeats.next();
        let mut state = self.lock();
        // It may have been served meanwhile, or wait anew.
        let is_over = !matches!(state.phase, Phase::Waiting) || state.repeats.is_some();
        let over = match is_over {
            true => Some(repeats),
            false => state.repeats.replace(repeats),
        };
        drop(state);
        user_code::discard(over);
        Some(pause)
    }

    /// Stands in line (again).
    pub(super) fn arrived(
        &self,
        id: WaiterId,
        runtime: Option<Id>,
        now: Moment,
        events: &EventBus,
    ) {
        self.id.store(id.0, Ordering::Relaxed);
        let mut state = self.lock();
        state.phase = Phase::Waiting;
        state.runtime = runtime;
        // One that lost its turn is waiting still.
        if state.waiter == 0 {
            state.waiter = id.0;
            state.since = now;
            events.send(|| LockEvent::Waiting {
                key: self.key().clone(),
                waiter: id.0,
            });
        }
    }

    /// Gives up, unless its wait is over already.
    pub(super) fn leaves(&self, now: Moment, events: &EventBus) {
        let mut state = self.lock();
        if let Phase::Waiting | Phase::Granted { .. } | Phase::TurnLost = state.phase {
            state.phase = Phase::Left;
            events.send(|| state.gave_up(self.key(), now));
        }
    }

    /// The lease is seen, and held from here on. Its holder need not be the task that acquired
    /// it, whose waker is given back: it may be the last that keeps that task alive, so it is to be
    /// dropped where no lock is held.
    pub(super) fn takes(
        &self,
        runtime: Option<Id>,
        now: Moment,
        events: &EventBus,
    ) -> Option<(Token, Option<Waker>)> {
        let mut state = self.lock();
        let Phase::Granted { token } = state.phase else {
            return None;
        };
        let waited = now.saturating_sub(state.since);
        state.phase = Phase::Held { token };
        state.runtime = runtime;
        state.since = now;
        if token.is_passed() {
            events.send(|| LockEvent::Passed {
                key: self.key().clone(),
                token,
            });
        }
        events.send(|| LockEvent::Acquired {
            key: self.key().clone(),
            waiter: state.waiter,
            token,
            waited,
        });
        Some((token, state.waker.take()))
    }

    /// The lease is given back; false if it is not held any more.
    pub(super) fn finishes(&self, now: Moment, end_mode: EndMode) -> bool {
        let mut state = self.lock();
        let (Phase::Held { token } | Phase::Closing { token }) = state.phase else {
            return false;
        };
        state.phase = Phase::Finishing { token };
        state.since = now.saturating_sub(state.since);
        state.end_mode = end_mode;
        true
    }

    /// One of those who shared the lease took it away: to the others it is lost.
    pub(super) fn forfeits(&self) {
        let mut state = self.lock();
        let (Phase::Finishing { token } | Phase::Finished { token, .. }) = state.phase else {
            return;
        };
        state.phase = Phase::Ended {
            token,
            end: LeaseEnd::Lost,
        };
        let mut callbacks = Callbacks::default();
        state.wake_watchers(true, &mut callbacks);
        callbacks.wakers.extend(state.waker.take());
        drop(state);
        callbacks.run();
    }

    /// The last handle of its lock is dropped while it holds.
    pub(super) fn is_dropped(&self, events: &EventBus) {
        if let Phase::Held { token } = self.phase() {
            events.send(|| LockEvent::DroppedWhileHeld {
                key: self.key().clone(),
                token,
            });
        }
    }

    /// The lease that it holds.
    pub(super) fn lease(&self, events: &EventBus) -> Option<LeaseSnapshot> {
        let state = self.lock();
        let (Phase::Held { token } | Phase::Closing { token }) = state.phase else {
            return None;
        };
        Some(LeaseSnapshot {
            waiter: state.waiter,
            token,
            since: events.instant(state.since),
            deadline: events.instant(state.deadline),
        })
    }

    /// Its wait.
    pub(super) fn wait(&self, events: &EventBus) -> WaiterSnapshot {
        let state = self.lock();
        WaiterSnapshot {
            waiter: state.waiter,
            since: events.instant(state.since),
        }
    }

    /// Takes a verdict of the turnstile.
    pub(super) fn tell(
        &self,
        verdict: Verdict,
        now: Moment,
        events: &EventBus,
        callbacks: &mut Callbacks,
    ) {
        let mut state = self.lock();
        if matches!(state.phase, Phase::Left) {
            // It gave up in the very event that brought the verdict.
            return;
        }
        let phase = match verdict {
            Verdict::Waiter(verdict) => {
                callbacks.policies.extend(state.repeats.take());
                Some(state.after_wait(self.key(), verdict, now, events))
            }
            Verdict::Lease(verdict) => {
                state.after_holding(self.key(), verdict, now, events, callbacks)
            }
        };
        if let Some(phase) = phase {
            state.phase = phase;
            callbacks.wakers.extend(state.waker.take());
        }
    }

    /// The registry has failed, and its turnstile tells nothing any more.
    pub(super) fn close_broken(&self, now: Moment, events: &EventBus, callbacks: &mut Callbacks) {
        let ended = |end| Verdict::Lease(LeaseVerdict::Ended(end));
        let verdict = match self.phase() {
            Phase::Waiting | Phase::Granted { .. } => {
                Verdict::Waiter(WaiterVerdict::Refused(Refusal::Closed))
            }
            Phase::Held { .. } => ended(LeaseEnd::Lost),
            Phase::Closing { .. } | Phase::Finishing { .. } => ended(LeaseEnd::Closed),
            Phase::TurnLost
            | Phase::Left
            | Phase::Refused(_)
            | Phase::Ended { .. }
            | Phase::Finished { .. } => return,
        };
        self.tell(verdict, now, events, callbacks);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Every change leaves the state whole, so a panic elsewhere is no reason to stop.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for WaiterState {
    fn drop(&mut self) {
        let state = self.state.get_mut();
        let state = state.unwrap_or_else(PoisonError::into_inner);
        user_code::discard(state.repeats.take());
        user_code::discard(state.waker.take());
    }
}

impl State {
    /// Wakes those who watch: all of them, or those who watch for deadlines.
    fn wake_watchers(&self, all: bool, callbacks: &mut Callbacks) {
        let watchers = self.watchers.iter();
        let watchers = watchers.filter(|watcher| all || watcher.of_deadlines);
        let watchers = watchers.filter_map(|watcher| watcher.waker.upgrade());
        callbacks.watchers.extend(watchers);
    }
}

struct Watcher {
    /// Gone when nobody waits with it any more.
    waker: Weak<AtomicWaker>,
    of_deadlines: bool,
}

impl Watcher {
    fn is_alive(&self) -> bool {
        self.waker.strong_count() > 0
    }
}

impl fmt::Debug for WaiterState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WaiterState")
            .field("key", self.key())
            .field("phase", &self.phase())
            .finish_non_exhaustive()
    }
}
