use std::collections::{BTreeSet, VecDeque};
use std::fmt;
use std::mem;
use std::panic::Location;
use std::sync::{Arc, Weak};
use std::time::Duration;

use foldhash::HashMap;
use rand::TryRng;
use rand::rngs::SysRng;
use tokio::time::Instant;

use super::caller::Caller;
use super::event_bus::EventBus;
use super::lease_log::LeaseLog;
use super::state::{Deferred, EngineState, EventCx, Lines, PIECE, Turnstile};
use super::timer::Timer;
use crate::base::clock::{Moment, SUSPENSION_TICK};
use crate::base::mutex::Mutex;
use crate::base::sync::Notify;
use crate::base::user_code::log;
use crate::base::{Clock, StoreError, user_code};
use crate::engine::heartbeat::Heartbeat;
use crate::engine::settings::Settings;
use crate::observe::{Events, KeySnapshot, LockEvent, Snapshot};
use crate::roaming::Tasks;
use crate::store::LockStore;
use crate::store::contract::{DroppedOps, KeyScope, Session, SessionConfig};
use crate::turnstile::{Ids, WaiterId};

const LEAST_SLEEP: Duration = Duration::from_millis(1);

/// A registry's core: callers and leases call it, and it drives their turnstiles.
pub(crate) struct Engine {
    pub(crate) view_context: Arc<ViewContext>,
    /// The registry's id, which begins its owners: its name, if it has one, and random bits.
    pub(super) instance: Arc<str>,
    /// The process that has built it.
    process: u32,
    pub(crate) settings: Settings,
    /// Every ttl must be longer than this.
    pub(crate) overhead: Duration,
    /// Whether the store has shared locks and permits.
    pub(crate) shares: bool,
    /// A change that panics is caught before it unlocks, and closes the registry: see [`locked`](Self::locked).
    pub(super) state: Mutex<EngineState>,
    /// Events are sent under the state's lock.
    pub(super) events: EventBus,
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

/// When the timer's task has something to do next.
pub(super) enum Next {
    /// As soon as others had the registry.
    Now,
    At(Instant),
    /// When it is woken.
    Event,
}

/// What is wrong with a registry that came by a fork.
pub(crate) const FORKED: &str =
    "was built before this process was forked: build one in each process";

/// Of the system's generator: that of a thread is copied when its process forks.
fn random_id() -> String {
    let mut bytes = [0; 16];
    SysRng
        .try_fill_bytes(&mut bytes)
        .expect("the system has random numbers");
    format!("{:032x}", u128::from_ne_bytes(bytes))
}

/// An event for all turnstiles.
type TurnstileCall<'a> = &'a dyn Fn(&mut Turnstile, &mut EventCx<'_>);

impl Engine {
    pub(crate) fn new(store: &impl LockStore, settings: Settings, clock: Clock) -> Arc<Self> {
        let random = random_id();
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
                process: std::process::id(),
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
                    closed: false,
                    session: Some(session),
                    keep_alive: None,
                }),
                lost,
                idle: Notify::default(),
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

    /// Whether anybody waits for a key, or has one.
    pub(crate) fn is_in_use(&self) -> bool {
        !self.state.lock().entries.is_empty()
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

    /// Takes no new callers, and refuses those that wait.
    pub(crate) fn drain(&self) {
        self.feed_all(|state| state.closed = true, &[&Turnstile::drain]);
    }

    /// Feeds the turnstiles of a key. Returns `None` if there are none.
    pub(super) fn feed<R>(
        &self,
        key: &Arc<str>,
        event: impl FnOnce(&mut Lines, &mut EventCx<'_>) -> R,
    ) -> Option<R> {
        self.at_once(|state, at| state.feed(at, key, false, event))?
    }

    /// Feeds the turnstile of a caller. Returns `None` if it has not arrived, or its key is not in use any more.
    pub(super) fn feed_caller<R>(
        &self,
        caller: &Caller,
        event: impl FnOnce(&mut Turnstile, &mut EventCx<'_>, WaiterId) -> R,
    ) -> Option<R> {
        let id = caller.id()?;
        self.feed(caller.key(), |lines, cx| {
            lines.feed(cx, id, |turnstile, cx| event(turnstile, cx, id))
        })
    }

    /// Whether this process has built it. One that was forked from it has a copy, whose owners are those of the original.
    pub(crate) fn is_of_this_process(&self) -> bool {
        self.process == std::process::id()
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
