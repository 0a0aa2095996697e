mod state;
mod verdicts;

use std::fmt;
use std::panic::Location;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::task::Waker;
use std::thread::{self, ThreadId};
use std::time::Duration;

use tokio::task;

use self::state::{CallerState, Watcher};
use super::callbacks::Callbacks;
use super::event_bus::EventBus;
use super::lease_log::LeaseLog;
use super::phase::Phase;
use crate::base::clock::Moment;
use crate::base::mutex::Mutex;
use crate::base::sync::AtomicWaker;
use crate::base::{LossCause, Mode, OnFinish, Pauses, Repeat, Token, user_code};
use crate::observe::{LeaseSnapshot, LockEvent, WaiterSnapshot};
use crate::turnstile::{
    EndMode, LeaseEnd, LeaseVerdict, NotGranted, Verdict, WaiterId, WaiterVerdict,
};

pub(super) use self::state::Peers;

/// One caller from its arrival to the end of its lease: what its future and the engine share.
pub(crate) struct Caller {
    key: Arc<str>,
    mode: Mode,
    /// The number of its latest arrival, 0 before the first. Written under the engine's lock.
    id: AtomicU64,
    /// How many share its lease. The last one to leave releases it.
    shares: AtomicU32,
    /// Whether its holder has seen the token.
    is_token_seen: AtomicBool,
    /// Whether the lock's `on_finish` is only for work that succeeds, and it has not yet.
    awaits_success: AtomicBool,
    /// Of a guard: the task that asked for it, and where. In builds with debug assertions.
    origin: Option<Box<Origin>>,
    /// What is cancelled when the lease is lost.
    #[cfg(feature = "tokio-util")]
    pub(crate) cancellation: std::sync::OnceLock<crate::engine::Cancellation>,
    state: Mutex<CallerState>,
}

struct Origin {
    task: CurrentTask,
    place: &'static Location<'static>,
}

/// Which task runs. What a runtime blocks on is none: it stays on its thread.
#[derive(PartialEq, Eq)]
enum CurrentTask {
    Spawned(task::Id),
    BlockedOn(ThreadId),
}

impl CurrentTask {
    fn get() -> Self {
        let thread = || Self::BlockedOn(thread::current().id());
        task::try_id().map_or_else(thread, Self::Spawned)
    }
}

impl Caller {
    /// `behind`: the leases of its group that were acquired before. They are released if its wait ends in vain, or if it
    /// loses its turn (W4).
    pub(crate) fn new(key: Arc<str>, mode: Mode, behind: &[Arc<Self>]) -> Self {
        Self {
            key,
            mode,
            id: AtomicU64::new(0),
            is_token_seen: AtomicBool::new(false),
            awaits_success: AtomicBool::new(false),
            shares: AtomicU32::new(1),
            origin: None,
            #[cfg(feature = "tokio-util")]
            cancellation: std::sync::OnceLock::new(),
            state: Mutex::new(CallerState {
                phase: Phase::Waiting,
                waker: None,
                watchers: Vec::new(),
                waiter: 0,
                since: Moment::ZERO,
                end_mode: EndMode::Release,
                repeats: None,
                closing: false,
                is_arriving: false,
                waits_for_others: false,
                needs_another_poll: false,
                peers: Peers::of(behind, OnFinish::Release),
                has_left_group: false,
                is_forfeited: false,
                deadline: Moment::ZERO,
            }),
        }
    }

    /// Its lease is a guard, which the current task asks for.
    pub(crate) fn set_origin(&mut self, place: &'static Location<'static>) {
        let task = CurrentTask::get();
        self.origin = Some(Box::new(Origin { task, place }));
    }

    /// Where its guard was asked for, if the current task has asked for it, and it has been held since this moment at
    /// least.
    pub(super) fn guard_of_this_task(&self, since: Moment) -> Option<&'static Location<'static>> {
        let origin = self.origin.as_ref()?;
        if origin.task != CurrentTask::get() {
            return None;
        }
        let state = self.state.lock();
        let is_held = matches!(state.phase, Phase::Held { .. }) && state.since <= since;
        is_held.then_some(origin.place)
    }

    pub(crate) fn key(&self) -> &Arc<str> {
        &self.key
    }

    pub(crate) fn mode(&self) -> Mode {
        self.mode
    }

    pub(crate) fn phase(&self) -> Phase {
        self.state.lock().told_phase()
    }

    /// How far it has come. While it waits, the waker is woken at the next verdict.
    ///
    /// The first caller of a tenure is polled twice before it takes the key. This makes tokio wake a
    /// second worker thread early, at a moment when no other task can take the turn. Otherwise it is
    /// woken in the middle of a release, and the kernel may run it in place of the thread that
    /// releases: one task then had 1.2 times as many turns as another. docs/fairness.md has the
    /// measurement.
    pub(crate) fn phase_or_wake(&self, waker: &Waker) -> Phase {
        // Wakers are the user's code: they are cloned and dropped when nothing is locked.
        let clone = waker.clone();
        let mut state = self.state.lock();
        if matches!(state.phase, Phase::Granted { .. })
            && std::mem::take(&mut state.needs_another_poll)
        {
            drop(state);
            waker.wake_by_ref();
            return Phase::Waiting;
        }
        if let Phase::Granted { .. }
        | Phase::TurnLost
        | Phase::Refused(_)
        | Phase::Ended { .. }
        | Phase::Finished { .. } = state.told_phase()
        {
            return state.told_phase();
        }
        let before = state.waker.replace(clone);
        let phase = state.told_phase();
        drop(state);
        drop(before);
        phase
    }

    /// The deadline of the lease it holds.
    pub(crate) fn deadline(&self) -> Moment {
        self.state.lock().deadline
    }

    /// Whether it holds its lease, and the deadline has not passed.
    pub(crate) fn is_held(&self, now: Moment) -> bool {
        let state = self.state.lock();
        matches!(state.phase, Phase::Held { .. }) && now < state.deadline
    }

    /// Another holder shares the lease, if it is still held. Returns its token. Only work that runs under
    /// the lease calls this: the enclosing lease keeps the count above zero.
    pub(crate) fn join(&self, now: Moment) -> Option<Token> {
        // Under the lock, or another holder could detach the lease after the look.
        let state = self.state.lock();
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

    /// One holder leaves the lease. Returns true for the last one, who must release it.
    pub(crate) fn part(&self) -> bool {
        self.shares.fetch_sub(1, Ordering::AcqRel) == 1
    }

    /// Whether the lease stays held if one holder leaves.
    pub(crate) fn is_shared(&self) -> bool {
        self.shares.load(Ordering::Acquire) > 1
    }

    /// Returns a waker for the end of a held lease. With `of_deadlines` it also fires on a new deadline and on a
    /// release. Whoever waits registers with it, and looks again after that.
    pub(crate) fn watch(&self, of_deadlines: bool) -> Arc<AtomicWaker> {
        let waker = Arc::default();
        self.watch_with(&waker, of_deadlines);
        waker
    }

    /// The same with a waker that may also watch for the end of other leases.
    pub(crate) fn watch_with(&self, waker: &Arc<AtomicWaker>, of_deadlines: bool) {
        let watcher = Watcher {
            waker: Arc::downgrade(waker),
            of_deadlines,
        };
        let mut state = self.state.lock();
        if state.watchers.len() == state.watchers.capacity() {
            // Not at each call, which would take quadratic time where many watch.
            state.watchers.retain(Watcher::is_alive);
        }
        state.watchers.push(watcher);
    }

    /// Whether anybody would hear that the lease ends.
    pub(super) fn is_watched(&self) -> bool {
        self.state.lock().watchers.iter().any(Watcher::is_alive)
    }

    pub(super) fn id(&self) -> Option<WaiterId> {
        // Relaxed: it is read by the caller that has arrived, or under the engine's lock.
        let id = self.id.load(Ordering::Relaxed);
        (id != 0).then_some(WaiterId(id))
    }

    /// Whether it is known to wait for others, which have the key. Only for those that [want to know](Arrival::hears_of_others).
    pub(crate) fn waits_for_others(&self) -> bool {
        self.state.lock().waits_for_others
    }

    /// When it arrived first, if it has.
    pub(super) fn since(&self) -> Option<Moment> {
        self.id().map(|_| self.state.lock().since)
    }

    /// How long it has waited by now.
    pub(crate) fn waited(&self, now: Moment) -> Duration {
        now.saturating_sub(self.state.lock().since)
    }

    /// Sets the pauses of the wait that is about to begin.
    pub(super) fn set_repeats(&self, repeats: Pauses) {
        let before = self.state.lock().repeats.replace(repeats);
        user_code::discard(before);
    }

    /// Asks the user's policy, or the `usual` one of the registry, for the next pause. Returns `None` if another thread is already asking. Returns
    /// `Some(None)` if the policy has ended.
    pub(super) fn next_pause(&self, id: WaiterId, usual: &Repeat) -> Option<Option<Duration>> {
        let mut state = self.state.lock();
        if !matches!(state.phase, Phase::Waiting) || self.id() != Some(id) {
            // It does not wait any more. The turnstile is to ask the next in the queue.
            return Some(None);
        }
        let mut repeats = state.repeats.take()?.or(usual);
        drop(state);
        let pause = repeats.next();
        let mut state = self.state.lock();
        // Meanwhile it may have been served, or have begun another wait.
        let is_over = !matches!(state.phase, Phase::Waiting) || state.repeats.is_some();
        let over = match is_over {
            true => Some(repeats),
            false => state.repeats.replace(repeats),
        };
        drop(state);
        user_code::discard(over);
        Some(pause)
    }

    /// Enters the queue, perhaps again, in a poll that calls [`end_arrival`](Self::end_arrival).
    pub(super) fn arrive(&self, id: WaiterId, now: Moment, events: &EventBus) {
        self.id.store(id.0, Ordering::Relaxed);
        let mut state = self.state.lock();
        state.phase = Phase::Waiting;
        state.is_arriving = true;
        // One that lost its turn still waits.
        if state.waiter == 0 {
            state.waiter = id.0;
            state.since = now;
            events.send(|| LockEvent::Waiting {
                key: self.key().clone(),
                waiter: id.0,
                mode: self.mode,
            });
        }
    }

    /// Returns the token of its lease if it has taken one since it arrived, even if that is over.
    pub(super) fn end_arrival(&self) -> Option<Token> {
        let mut state = self.state.lock();
        state.is_arriving = false;
        match state.phase {
            Phase::Held { token } | Phase::Closing { token } | Phase::Ended { token, .. } => {
                Some(token)
            }
            _ => None,
        }
    }

    /// Gives up, unless its wait is over already.
    pub(super) fn leave(&self, now: Moment, events: &EventBus) {
        let mut state = self.state.lock();
        if let Phase::Waiting | Phase::Granted { .. } | Phase::TurnLost = state.phase {
            state.phase = Phase::Left;
            events.send(|| state.gave_up(self.key(), now, None));
        }
    }

    /// The caller takes the lease. Another task may hold it from here on. So the waker is returned, to be
    /// dropped when nothing is locked: it may be all that keeps the acquiring task alive.
    pub(super) fn begin_lease(
        &self,
        now: Moment,
        events: &EventBus,
    ) -> Option<(Token, Option<Waker>)> {
        let mut state = self.state.lock();
        let token = state.begin_lease(self, now, events)?;
        Some((token, state.waker.take()))
    }

    /// The holder ends its lease. Returns false if it is not held any more.
    pub(super) fn begin_release(&self, now: Moment, end_mode: EndMode) -> bool {
        let mut state = self.state.lock();
        let (Phase::Held { token } | Phase::Closing { token }) = state.phase else {
            return false;
        };
        let held = now.saturating_sub(state.since);
        state.phase = Phase::Finishing { token, held };
        state.end_mode = end_mode;
        true
    }

    /// Whether its holder has seen the token while it held the lease.
    pub(super) fn has_seen_token(&self) -> bool {
        self.is_token_seen.load(Ordering::Acquire)
    }

    /// Its tenure is not passed on any more.
    pub(super) fn note_seen_token(&self) {
        self.is_token_seen.store(true, Ordering::Release);
    }

    /// Whether the key is to be released, whatever the lock's `on_finish` says, since the work has not succeeded yet.
    pub(crate) fn await_success(&self, awaits: bool) {
        self.awaits_success.store(awaits, Ordering::Relaxed);
    }

    pub(super) fn awaits_success(&self) -> bool {
        self.awaits_success.load(Ordering::Relaxed)
    }

    /// Its group is complete. Returns false if its lease is over already.
    pub(super) fn unite(&self, peers: Option<Arc<Peers>>) -> bool {
        let mut state = self.state.lock();
        state.peers = peers;
        matches!(state.phase, Phase::Held { .. })
    }

    /// The guard of its group leaves it, before it leaves the leases.
    pub(crate) fn leave_group(&self) {
        let mut state = self.state.lock();
        state.peers = None;
        state.has_left_group = true;
    }

    pub(super) fn has_left_group(&self) -> bool {
        self.state.lock().has_left_group
    }

    /// The lease was ended by one of several holders, or with another one of its group. For the others it is lost.
    /// Returns the leases of its group that end with it.
    pub(super) fn forfeit(&self) -> Vec<(Arc<Self>, OnFinish)> {
        let mut state = self.state.lock();
        state.is_forfeited = true;
        let mut callbacks = Callbacks::default();
        state.give_up_peers(&mut callbacks);
        state.wake_watchers(true, &mut callbacks);
        callbacks.wakers.extend(state.waker.take());
        drop(state);
        let given_up = callbacks.take_given_up();
        // It tells of no lease.
        callbacks.run(&LeaseLog::default());
        given_up
    }

    /// The last handle of its lock is dropped while it holds the lease.
    pub(super) fn report_drop(&self, events: &EventBus) {
        if let Phase::Held { token } = self.phase() {
            events.send(|| LockEvent::DroppedWhileHeld {
                key: self.key().clone(),
                token,
            });
        }
    }

    /// The lease that it holds, for a snapshot.
    pub(super) fn lease(&self, events: &EventBus) -> Option<LeaseSnapshot> {
        let state = self.state.lock();
        let (Phase::Held { token } | Phase::Closing { token }) = state.phase else {
            return None;
        };
        Some(LeaseSnapshot {
            waiter: state.waiter,
            mode: self.mode,
            token,
            since: events.instant(state.since),
            deadline: events.instant(state.deadline),
        })
    }

    /// Its wait, for a snapshot.
    pub(super) fn wait(&self, events: &EventBus) -> WaiterSnapshot {
        let state = self.state.lock();
        WaiterSnapshot {
            waiter: state.waiter,
            mode: self.mode,
            since: events.instant(state.since),
        }
    }

    /// Takes a verdict of the turnstile. Returns its id if it takes the lease at once.
    pub(super) fn tell(
        &self,
        verdict: Verdict,
        now: Moment,
        events: &EventBus,
        callbacks: &mut Callbacks,
    ) -> Option<WaiterId> {
        let mut state = self.state.lock();
        if matches!(state.phase, Phase::Left) {
            // The caller left during the same event. It ignores the verdict.
            return None;
        }
        let phase = match verdict {
            Verdict::Waiter(WaiterVerdict::Waits) => {
                state.waits_for_others = true;
                callbacks.wakers.extend(state.waker.take());
                return None;
            }
            Verdict::Waiter(verdict) => {
                if !matches!(verdict, WaiterVerdict::Granted { .. }) {
                    state.give_up_peers(callbacks);
                }
                let over = state.repeats.take();
                let over = over.filter(|over| !matches!(over, Pauses::Usual));
                callbacks.policies.extend(over);
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
        if !state.is_arriving || state.needs_another_poll {
            return None;
        }
        state.begin_lease(self, now, events)?;
        self.id()
    }

    /// The registry has failed, and no verdict follows.
    pub(super) fn close_broken(&self, now: Moment, events: &EventBus, callbacks: &mut Callbacks) {
        let ended = |end| Verdict::Lease(LeaseVerdict::Ended(end));
        let verdict = match self.phase() {
            Phase::Waiting | Phase::Granted { .. } => {
                Verdict::Waiter(WaiterVerdict::Refused(NotGranted::Closed))
            }
            Phase::Held { .. } => ended(LeaseEnd::Lost(LossCause::RegistryFailed)),
            Phase::Closing { .. } | Phase::Finishing { .. } => ended(LeaseEnd::Closed),
            Phase::TurnLost
            | Phase::Left
            | Phase::Refused(_)
            | Phase::Ended { .. }
            | Phase::Finished { .. } => return,
        };
        self.tell(verdict, now, events, callbacks);
    }
}

impl Drop for Caller {
    fn drop(&mut self) {
        let state = self.state.get_mut();
        user_code::discard(state.repeats.take());
        user_code::discard(state.waker.take());
    }
}

impl fmt::Debug for Caller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Caller")
            .field("key", self.key())
            .field("phase", &self.phase())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::task::Poll;

    use shuttle::future::block_on;
    use shuttle::thread;

    use super::*;
    use crate::base::Clock;
    use crate::base::model::check;
    use crate::engine::settings::Settings;

    /// The engine, as far as a caller knows it: it tells verdicts, and then wakes.
    struct Teller {
        caller: Arc<Caller>,
        events: EventBus,
    }

    impl Teller {
        fn new() -> Arc<Self> {
            let clock = Arc::new(Clock::system());
            let events = EventBus::new(&Settings::default(), "1f".into(), clock);
            let caller = Arc::new(Caller::new("k".into(), Mode::Exclusive, &[]));
            caller.arrive(WaiterId(1), Moment::ZERO, &events);
            assert_eq!(caller.end_arrival(), None);
            Arc::new(Self { caller, events })
        }

        fn tell(&self, verdict: Verdict) {
            let mut callbacks = Callbacks::default();
            self.caller
                .tell(verdict, Moment::ZERO, &self.events, &mut callbacks);
            callbacks.run(&LeaseLog::default());
        }

        fn grant(&self) {
            self.tell(Verdict::Waiter(WaiterVerdict::Granted {
                token: Token::new(7).unwrap(),
                deadline: Moment::ZERO,
                needs_another_poll: true,
            }));
        }

        fn end(&self) {
            self.tell(Verdict::Lease(LeaseVerdict::Ended(LeaseEnd::Released)));
        }

        /// Sleeps until its phase is such.
        fn reach(&self, is_such: impl Fn(&Phase) -> bool) {
            block_on(poll_fn(|cx| {
                match is_such(&self.caller.phase_or_wake(cx.waker())) {
                    true => Poll::Ready(()),
                    false => Poll::Pending,
                }
            }));
        }

        fn acquire(&self) {
            self.reach(|phase| matches!(phase, Phase::Granted { .. }));
            let begun = self.caller.begin_lease(Moment::ZERO, &self.events);
            assert!(begun.is_some());
        }
    }

    /// A caller sleeps until it is granted the key, releases it, and sleeps until the store has confirmed that.
    ///
    /// Finds: `phase_or_wake` unlocks between the look at the phase and the waker, or `tell` takes the waker before it
    /// changes the phase, under another lock.
    #[test]
    fn model_a_caller_sleeps_through_no_verdict() {
        check(|| {
            let engine = Teller::new();
            let teller = engine.clone();
            let granted = thread::spawn(move || teller.grant());
            engine.acquire();
            granted.join().unwrap();
            assert!(engine.caller.begin_release(Moment::ZERO, EndMode::Release));
            let teller = engine.clone();
            let ended = thread::spawn(move || teller.end());
            engine.reach(|phase| matches!(phase, Phase::Finished { .. }));
            ended.join().unwrap();
        });
    }

    /// A lease is granted, and ends, while somebody else waits for its end, with a waker of the kind that `lost` and
    /// `extend` use.
    ///
    /// Finds: `tell` looks for those who watch before it changes the phase, under another lock.
    #[test]
    fn model_one_who_watches_sleeps_through_no_end() {
        check(|| {
            let engine = Teller::new();
            engine.grant();
            engine.acquire();
            let (one, two) = (engine.clone(), engine.clone());
            let watches = thread::spawn(move || {
                let watch = one.caller.watch(false);
                block_on(poll_fn(|cx| {
                    watch.register(cx.waker());
                    match one.caller.phase() {
                        Phase::Held { .. } => Poll::Pending,
                        _ => Poll::Ready(()),
                    }
                }));
            });
            let ended = thread::spawn(move || two.end());
            watches.join().unwrap();
            ended.join().unwrap();
        });
    }

    /// A loop that selects on `lost()` makes a watcher in each turn.
    #[test]
    fn watchers_that_are_gone_take_no_room() {
        let caller = Caller::new("k".into(), Mode::Exclusive, &[]);
        let stays = caller.watch(false);
        for _ in 0..1000 {
            drop(caller.watch(false));
        }
        let watchers = caller.state.lock().watchers.len();
        assert!(watchers <= 8, "{watchers}");
        let mut callbacks = Callbacks::default();
        caller.state.lock().wake_watchers(true, &mut callbacks);
        assert_eq!(callbacks.rare().watchers.len(), 1, "the one that stays");
        drop((stays, callbacks));
        assert!(!caller.is_watched());
    }
}
