use std::collections::{BTreeSet, VecDeque};
use std::fmt;
use std::mem;
use std::panic::Location;
use std::pin::pin;
use std::sync::{Arc, Weak};
use std::time::Duration;

use foldhash::HashMap;
use futures::FutureExt;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout};

use super::caller::{Caller, Peers};
use super::event_bus::EventBus;
use super::failure::CallerHandle;
use super::lease_log::LeaseLog;
use super::state::{Deferred, EngineState, EventCx, Lines, PIECE, Turnstile};
use super::timer::Timer;
use crate::base::clock::{Moment, SUSPENSION_TICK};
use crate::base::mutex::Mutex;
use crate::base::user_code::log;
use crate::base::{Clock, LossCause, OnFinish, Pauses, StoreError, Token, user_code};
use crate::engine::heartbeat::Heartbeat;
use crate::engine::settings::Settings;
use crate::observe::{Events, KeySnapshot, LockEvent, Snapshot};
use crate::roaming::Tasks;
use crate::store::LockStore;
use crate::store::contract::{
    Answer, DroppedOps, KeyScope, Op, Outcome, Owner, Session, SessionConfig,
};
use crate::turnstile::{EndMode, Ids, Request, WaiterId};

const LEAST_SLEEP: Duration = Duration::from_millis(1);

/// A registry's core: callers and leases call it, and it drives their turnstiles.
pub(crate) struct Engine {
    pub(crate) view_context: Arc<ViewContext>,
    /// The registry's id, which begins its owners: its name, if it has one, and random bits.
    instance: Arc<str>,
    pub(crate) settings: Settings,
    /// Every ttl must be longer than this.
    pub(crate) overhead: Duration,
    /// Whether the store has shared locks and permits.
    pub(crate) shares: bool,
    /// A change that panics is caught before it unlocks, and closes the registry: see [`locked`](Self::locked).
    pub(super) state: Mutex<EngineState>,
    /// Events are sent under the state's lock.
    pub(crate) events: EventBus,
    /// Operations that the session has dropped without an answer. The timer's task handles them.
    pub(super) lost: Arc<DroppedOps>,
    /// Notified when no key is in use.
    pub(super) idle: Notify,
    pub(super) heartbeat: Arc<Heartbeat>,
    pub(super) lease_log: LeaseLog,
}

/// The part of a registry that views of a lease need. They do not keep it alive.
pub(crate) struct ViewContext {
    pub(crate) clock: Arc<Clock>,
    pub(crate) engine: Weak<Engine>,
    /// The statement that fences a transaction by a lease, on a store that can.
    pub(crate) fence: Option<Arc<str>>,
    pub(super) timer: Arc<Timer>,
}

impl ViewContext {
    /// Starts the timer's task if its runtime has ended and no other was known then: whoever looks at a lease may bring
    /// another runtime (D7).
    pub(crate) fn ensure_timer(&self) {
        self.timer.ensure_running(&self.engine);
    }
}

/// A caller's request for a lease.
pub(crate) struct Arrival {
    pub(crate) ttl: Duration,
    pub(crate) renewals: u32,
    pub(crate) on_finish: OnFinish,
    /// Whether that is only for work that succeeds.
    pub(crate) is_conditional: bool,
    /// Whether it is refused if the key is busy.
    pub(crate) asks_once: bool,
    /// How long the turnstile tries. For a caller that enters the queue this counts from its first
    /// arrival, for others from each attempt.
    pub(crate) wait: Duration,
    pub(crate) repeats: Pauses,
    /// The owner whose lease in the store it takes over, if it does not want the key itself.
    pub(crate) adopts: Option<Arc<str>>,
}

/// When the timer's task has something to do next.
pub(super) enum Next {
    /// As soon as others had the registry.
    Now,
    At(Instant),
    /// When it is woken.
    Event,
}

/// An event for all turnstiles.
type TurnstileCall<'a> = &'a dyn Fn(&mut Turnstile, &mut EventCx<'_>);

impl Engine {
    pub(crate) fn new(store: &impl LockStore, settings: Settings, clock: Clock) -> Arc<Self> {
        let random = format!("{:032x}", rand::random::<u128>());
        let instance: Arc<str> = match &settings.name {
            Some(name) => format!("{name}~{random}").into(),
            None => random.into(),
        };
        let tasks = Arc::<Tasks>::default();
        Arc::new_cyclic(|me: &Weak<Engine>| {
            let session = store.open(SessionConfig {
                prefix: settings.prefix.clone(),
                instance: instance.clone(),
                ttl: settings.ttl,
                response_timeout: settings.response_timeout,
                listener: me.clone(),
                tasks: tasks.clone(),
            });
            let clock = Arc::new(clock);
            let timer = Timer::new(tasks.clone());
            let lost = Arc::new(DroppedOps::new(timer.wake_up()));
            let heartbeat = Heartbeat::new(tasks.clone(), me.clone(), settings.renew_while_busy);
            let ids = Ids::new(settings.rules(), rand::random());
            let lease_log = LeaseLog::new(settings.prefix.clone(), timer.wake_up());
            Self {
                events: EventBus::new(&settings, instance.clone(), clock.clone()),
                instance,
                overhead: store.overhead(),
                shares: store.shares(),
                settings,
                view_context: Arc::new(ViewContext {
                    clock,
                    engine: me.clone(),
                    fence: session.fence(),
                    timer,
                }),
                state: Mutex::new(EngineState {
                    entries: HashMap::default(),
                    timeouts: BTreeSet::new(),
                    effects: VecDeque::new(),
                    armed: None,
                    latest: Moment::ZERO,
                    ids,
                    queue: true,
                    was_up: false,
                    outage: None,
                    server: None,
                    renews: false,
                    closed: false,
                    session: Some(session),
                    keep_alive: None,
                }),
                lost,
                idle: Notify::new(),
                heartbeat: Arc::new(heartbeat),
                lease_log,
            }
        })
    }

    /// The session with the store, with its tasks started; `None` after a shutdown.
    pub(crate) fn session(&self) -> Option<Arc<dyn Session>> {
        let state = self.state.lock();
        let (session, is_used) = (state.session.clone(), !state.entries.is_empty());
        drop(state);
        if is_used {
            self.note_runtime();
        }
        if let Some(session) = &session {
            session.start();
        }
        session
    }

    /// Why the store, or a part of it, is down, as far as is known.
    pub(crate) fn away(&self) -> Option<StoreError> {
        let state = self.state.lock();
        state.outage.as_ref().map(|outage| outage.error.clone())
    }

    /// A caller waits on this runtime for the end of a lease. The timer's task may move here if its own runtime ends
    /// first.
    pub(crate) fn note_runtime(&self) {
        self.view_context.timer.note_runtime();
        self.view_context.ensure_timer();
    }

    /// The events that follow.
    pub(crate) fn events(&self) -> Events {
        let _state = self.state.lock();
        self.events.subscribe()
    }

    /// The events that follow, without a limit; the reader is not woken.
    #[cfg(feature = "test-util")]
    pub(crate) fn every_event(&self) -> std::sync::mpsc::Receiver<LockEvent> {
        let _state = self.state.lock();
        self.events.subscribe_unbounded()
    }

    /// Where the guard was asked for that holds the caller's key since before its wait began, if the current task has it.
    pub(crate) fn guard_of_this_task(&self, caller: &Caller) -> Option<&'static Location<'static>> {
        let since = caller.since()?;
        let state = self.state.lock();
        let entry = state.entries.get(caller.key())?;
        let mut holders = entry.lines.holders();
        holders.find_map(|holder| holder.guard_of_this_task(since))
    }

    /// The leases and waiters now.
    pub(crate) fn snapshot(&self) -> Snapshot {
        let state = self.state.lock();
        let keys = state.entries.iter().map(|(key, entry)| KeySnapshot {
            key: key.clone(),
            held: entry
                .lines
                .holders()
                .filter_map(|holder| holder.lease(&self.events))
                .collect(),
            waiting: entry
                .lines
                .waiters()
                .map(|waiter| waiter.wait(&self.events))
                .collect(),
        });
        let mut keys: Vec<_> = keys
            .filter(|key| !key.held.is_empty() || !key.waiting.is_empty())
            .collect();
        drop(state);
        keys.sort_unstable_by(|a, b| a.key.cmp(&b.key));
        Snapshot { keys }
    }

    /// Whether any of the keys in use may have a lease that is renewed.
    pub(crate) fn renews(&self) -> bool {
        let mut state = self.state.lock();
        // Forgotten here alone: it costs every acquisition less.
        state.renews &= !state.entries.is_empty();
        state.renews
    }

    /// The runtime of the registry's tasks has been busy for so long, and a thread does what they should.
    pub(crate) fn tell_busy(&self, busy: Duration) {
        let state = self.state.lock();
        let held = state
            .entries
            .values()
            .map(|entry| entry.lines.holders().count());
        let leases = held.sum();
        self.events.send(|| LockEvent::RuntimeBusy { busy, leases });
        drop(state);
        self.events.flush();
        log!(
            warn,
            ?busy,
            leases,
            "the runtime is busy, or nobody runs it: a thread renews its leases. Work that computes or blocks belongs on spawn_blocking"
        );
    }

    /// How many keys are in use.
    #[cfg(any(test, feature = "test-util"))]
    pub(crate) fn in_use(&self) -> usize {
        self.state.lock().entries.len()
    }

    /// A caller wants a lease, in a poll of its future. Returns the token if it has it by the end of that.
    pub(crate) fn arrive(&self, caller: &Arc<Caller>, arrival: Arrival) -> Option<Token> {
        self.view_context.timer.note_runtime();
        let handle = CallerHandle::new(caller.clone());
        caller.set_repeats(arrival.repeats);
        let renewed = (arrival.renewals > 0).then_some(arrival.ttl);
        self.at_once(|state, at| {
            at.deferred.arrived = true;
            state.renews |= renewed.is_some();
            let since = match arrival.asks_once {
                true => at.now,
                false => caller.since().unwrap_or(at.now),
            };
            let session = state.session.as_ref();
            let connects = session.map_or(Duration::ZERO, |it| it.connects_within());
            let request = Request {
                caller: handle,
                ttl: arrival.ttl,
                renewals: arrival.renewals,
                adopts: arrival.adopts,
                on_finish: arrival.on_finish,
                is_conditional: arrival.is_conditional,
                asks_once: arrival.asks_once,
                until: Clock::after(since, arrival.wait),
                answer_by: Clock::after(at.now, self.settings.response_timeout + connects),
            };
            let (key, events) = (caller.key(), at.events);
            state.feed(at, key, true, |lines, cx| {
                let id = lines.arrive(cx, caller.mode(), request);
                // Before the verdict, which follows when this returns.
                caller.arrive(id, cx.now, events);
            });
        });
        if let Some(ttl) = renewed {
            self.heartbeat.need(ttl);
        }
        caller.end_arrival()
    }

    /// A caller gave up before it held anything.
    pub(crate) fn leave(&self, caller: &Caller) {
        if let Some(id) = caller.id() {
            // Also if its key is not in use any more: it may have lost its turn.
            self.at_once(|state, at| {
                caller.leave(at.now, at.events);
                state.feed(at, caller.key(), false, |lines, cx| {
                    lines.feed(cx, id, |turnstile, cx| turnstile.leave(cx, id));
                });
            });
        }
    }

    /// A caller takes the lease that it was granted. Returns its token, unless the turn is over.
    pub(crate) fn take(&self, caller: &Caller) -> Option<Token> {
        self.view_context.timer.note_runtime();
        let taken = self.feed_caller(caller, |turnstile, cx, id| {
            // The turnstile first: the grant may have expired meanwhile.
            if turnstile.take(cx, id) {
                caller.begin_lease(cx.now, &self.events)
            } else {
                None
            }
        })?;
        taken.map(|(token, _waker)| token)
    }

    /// The holder ends its lease. Returns false if it was not held any more.
    pub(crate) fn finish(&self, caller: &Caller, on_finish: OnFinish) -> bool {
        self.end(caller, |turnstile, cx, id| {
            let wants = on_finish != OnFinish::Release && !caller.awaits_success();
            let keeps = wants && turnstile.is_kept(cx, id);
            if keeps {
                EndMode::Keep
            } else {
                EndMode::Release
            }
        })
        .is_some()
    }

    /// The leases of a group are complete. From now on the first loss of one ends all (H4).
    pub(crate) fn unite(&self, callers: &[Arc<Caller>], on_finish: OnFinish) {
        let peers = Peers::of(callers, on_finish);
        let mut is_whole = true;
        for caller in callers {
            is_whole &= caller.unite(peers.clone());
        }
        if !is_whole {
            // One was lost before it knew of the others.
            for caller in callers {
                self.revoke(caller, on_finish);
            }
        }
    }

    /// Ends a lease under its holder: another one of its group is gone.
    pub(super) fn revoke(&self, caller: &Caller, on_finish: OnFinish) {
        // Before the look at the group, which its guard leaves before it leaves the lease.
        let is_shared = caller.is_shared();
        if !caller.has_left_group() && self.finish(caller, on_finish) && is_shared {
            self.forfeit(caller);
        }
    }

    /// Those who share a lease that was ended lose it, and with it those of its group.
    fn forfeit(&self, caller: &Caller) {
        for (peer, on_finish) in caller.forfeit() {
            self.revoke(&peer, on_finish);
        }
    }

    /// The holder leaves its lease in the store. Returns the owner under which it is stored; `None` if it was not held any
    /// more.
    pub(crate) fn detach(&self, caller: &Caller) -> Option<String> {
        let shared = caller.is_shared();
        let owner = self.end(caller, |_, _, _| EndMode::Detach).flatten()?;
        if shared {
            self.forfeit(caller);
        }
        Some(format!("{}:{}", self.instance, owner.sequence))
    }

    /// The owner under which the store has the lease, as it is and as text. `None` if it is not held any more.
    pub(crate) fn owner_of(&self, caller: &Caller) -> Option<(Owner, String)> {
        let id = caller.id()?;
        let state = self.state.lock();
        let lines = &state.entries.get(caller.key())?.lines;
        let owner = lines.turnstile_of(id).owner_of(id)?;
        Some((owner, format!("{}:{}", self.instance, owner.sequence)))
    }

    /// Whether this registry holds the key under this owner.
    pub(crate) fn holds(&self, key: &str, owner: &str) -> bool {
        let sequence = owner.strip_prefix(&*self.instance);
        let sequence = sequence.and_then(|rest| rest.strip_prefix(':')?.parse().ok());
        let state = self.state.lock();
        let entry = state.entries.get(key);
        sequence.is_some_and(|sequence| entry.is_some_and(|entry| entry.lines.holds(sequence)))
    }

    /// The store says that this owner has the key no more: as a renewal would have found out.
    pub(crate) fn found_lost(&self, key: &Arc<str>, owner: Owner) {
        let (ttl, within) = (Duration::ZERO, Duration::ZERO);
        let renewal = Op::Renew { owner, ttl, within };
        let outcome = Outcome::Lost;
        self.feed(key, |lines, cx| {
            lines.replied(cx, &renewal, Ok(Answer { at: 0, outcome }));
        });
    }

    /// Returns `None` if the lease was not held any more, else the owner that was left in the store, if any.
    fn end(
        &self,
        caller: &Caller,
        end_mode: impl FnOnce(&Turnstile, &EventCx<'_>, WaiterId) -> EndMode,
    ) -> Option<Option<Owner>> {
        self.feed_caller(caller, |turnstile, cx, id| {
            let end_mode = end_mode(turnstile, cx, id);
            let finishes = caller.begin_release(cx.now, end_mode);
            finishes.then(|| turnstile.finish(cx, id, end_mode))
        })?
    }

    /// A lease begins anew, with this many renewals at most: its group is complete. From now on its key is kept.
    pub(crate) fn restart(&self, caller: &Caller, renewals: u32, on_finish: OnFinish) {
        self.feed_caller(caller, |turnstile, cx, id| {
            turnstile.restart(cx, id, renewals, on_finish);
        });
        if renewals > 0 {
            self.state.lock().renews = true;
            self.heartbeat.need(self.settings.ttl);
        }
    }

    /// The holder has seen its token, on a store that fences by it.
    pub(crate) fn forbid_passes(&self, caller: &Caller) {
        self.feed_caller(caller, |turnstile, _, id| turnstile.forbid_passes(id));
    }

    /// What the store answers to `asked` within the response time-out.
    pub(crate) async fn in_time<T>(&self, asked: impl Future<Output = T>) -> Result<T, StoreError> {
        let mut asked = pin!(asked);
        // A store that answers at once needs no timer.
        if let Some(answer) = asked.as_mut().now_or_never() {
            return Ok(answer);
        }
        let answer = timeout(self.settings.response_timeout, asked).await;
        answer.map_err(|_| StoreError::new("no answer in time"))
    }

    /// Extends a lease to `ttl` from now. Returns the deadline that was asked for, if it is still held.
    pub(crate) fn extend(&self, caller: &Caller, ttl: Duration) -> Option<Moment> {
        self.feed_caller(caller, |turnstile, cx, id| turnstile.extend(cx, id, ttl))?
    }

    /// Why the lease of a caller is over. Its deadline has passed, and perhaps nobody has told it yet.
    pub(crate) fn cause_of_expiry(&self, caller: &Caller) -> LossCause {
        let now = self.view_context.clock.now();
        let state = self.state.lock();
        let untold = caller.id().and_then(|id| {
            let lines = &state.entries.get(caller.key())?.lines;
            lines.turnstile_of(id).cause_of_expiry(now, id)
        });
        // Under the lock, since it is told under the lock.
        let told = || caller.phase().loss_cause();
        untold.or_else(told).unwrap_or(LossCause::NotRenewed)
    }

    /// The last handle of a held lock is dropped. The lease is released after this.
    pub(crate) fn dropped_while_held(&self, caller: &Caller) {
        let state = self.state.lock();
        caller.report_drop(&self.events);
        drop(state);
        self.events.flush();
    }

    /// Takes no new callers, and refuses those that wait.
    pub(crate) fn drain(&self) {
        self.feed_all(|state| state.closed = true, &[&Turnstile::drain]);
    }

    /// Feeds the turnstiles of a key. Returns `None` if there are none.
    fn feed<R>(
        &self,
        key: &Arc<str>,
        event: impl FnOnce(&mut Lines, &mut EventCx<'_>) -> R,
    ) -> Option<R> {
        self.at_once(|state, at| state.feed(at, key, false, event))?
    }

    /// Feeds the turnstile of a caller. Returns `None` if it has not arrived, or its key is not in use any more.
    fn feed_caller<R>(
        &self,
        caller: &Caller,
        event: impl FnOnce(&mut Turnstile, &mut EventCx<'_>, WaiterId) -> R,
    ) -> Option<R> {
        let id = caller.id()?;
        self.feed(caller.key(), |lines, cx| {
            lines.feed(cx, id, |turnstile, cx| event(turnstile, cx, id))
        })
    }

    /// Changes the state, then feeds all turnstiles. All of them get one event before the next.
    pub(super) fn feed_all(
        &self,
        change: impl FnOnce(&mut EngineState),
        events: &[TurnstileCall<'_>],
    ) {
        self.feed_scope(&KeyScope::All, change, events);
    }

    /// The same for the turnstiles of the keys in `scope`. The lock is given to others between pieces of them (G5).
    pub(super) fn feed_scope(
        &self,
        scope: &KeyScope,
        change: impl FnOnce(&mut EngineState),
        events: &[TurnstileCall<'_>],
    ) {
        let rest = self.at_once(|state, at| {
            change(state);
            let keys = state.entries.keys();
            let keys: Vec<_> = keys.filter(|key| scope.contains(key)).cloned().collect();
            if keys.len() > PIECE {
                return keys;
            }
            for event in events {
                state.feed_keys(at, &keys, event);
            }
            Vec::new()
        });
        for event in events {
            for keys in rest.iter().flat_map(|keys| keys.chunks(PIECE)) {
                self.at_once(|state, at| state.feed_keys(at, keys, event));
            }
        }
    }
}

impl Engine {
    /// Feeds turnstiles whose time has come. Returns when to come back, and keeps the session's
    /// tasks running until then.
    pub(super) fn run_due(&self) -> Next {
        let mut deferred = Deferred::default();
        self.view_context.timer.forget_ended();
        let due = self.locked(&mut deferred, |state, at| {
            for (key, op) in self.lost.take() {
                state.feed(at, &key, false, |lines, cx| {
                    lines.op_dropped(cx, &op);
                });
            }
            let is_more_due = state.feed_due(at, Lines::tick);
            let first = state.timeouts.first().map(|(moment, _)| *moment);
            // D3: wake up once a second to detect a suspension. Sleep at least 1 ms: a turnstile with a bug may stay
            // due.
            let next =
                first.map(|first| first.clamp(at.now + LEAST_SLEEP, at.now + SUSPENSION_TICK));
            state.armed = next;
            (is_more_due, next, next.and(state.session.clone()))
        });
        deferred.wakes_timer = false;
        self.deliver(&mut deferred);
        let log_due = self.lease_log.sum_up(Instant::now());
        let Some((is_more_due, next, session)) = due else {
            return Next::Event;
        };
        if let Some(session) = session {
            self.guarded(|| session.start());
        }
        let next = next.map(|moment| self.view_context.clock.instant(moment));
        match next.into_iter().chain(log_due).min() {
            _ if is_more_due => Next::Now,
            None => Next::Event,
            Some(instant) => Next::At(instant),
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // Its task ends.
        self.view_context.timer.wake();
        self.events.end();
        self.events.flush();
        self.lease_log.end();
        let repeat = mem::take(&mut self.settings.repeat);
        user_code::discard(repeat);
    }
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine")
            .field("prefix", &self.settings.prefix)
            .finish_non_exhaustive()
    }
}
