//! A registry's session: takes requests to its task, and answers back.

use std::mem;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures::FutureExt;
use futures::channel::oneshot;
use futures::future::BoxFuture;
use futures::stream::BoxStream;
use tokio::runtime::Handle;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use super::call::{Look, Names, Request};
use super::fault::Fault;
use super::hello::Connected;
use super::scan;
use super::store::Settings;
use super::sweep::{self, Interrupted};
use super::task::PostgresTask;
use crate::StoreError;
use crate::store::backoff::Backoff;
use crate::store::contract::{
    KeyScope, KeyStatus, OpError, OpResult, Session, SessionConfig, StoreEvent, SubmittedOp,
    run_task,
};
use crate::store::notifier::OrderedNotifier;
use crate::store::send_window::SendWindow;
use crate::user_code::log;

pub(super) struct PostgresSession {
    pub(super) shared: Arc<Shared>,
}

/// What a session and its task share.
pub(super) struct Shared {
    pub(super) settings: Settings,
    pub(super) config: SessionConfig,
    pub(super) names: Arc<Names>,
    pub(super) wake: Notify,
    notifier: OrderedNotifier,
    state: Mutex<State>,
    has_warned: AtomicBool,
    has_warned_of_sweep: AtomicBool,
    /// A task must be started as soon as a caller has a runtime.
    lacks_task: AtomicBool,
    /// True when the session was dropped.
    closing: watch::Sender<bool>,
}

/// What a session knows. While it is locked, no code but ours is called.
#[derive(Default)]
struct State {
    has_task: bool,
    inbox: Vec<Request>,
    looks: Vec<(Arc<str>, Look)>,
    backoff: Backoff,
    identity: Option<Arc<str>>,
}

impl PostgresSession {
    pub(super) fn new(settings: Settings, config: SessionConfig) -> Self {
        let (prefix, instance) = (config.prefix.clone(), config.instance.clone());
        let shared = Shared {
            names: Arc::new(Names::new(
                prefix,
                instance,
                &settings.schema,
                config.response_timeout,
            )),
            settings,
            wake: Notify::new(),
            notifier: OrderedNotifier::new(config.listener.clone()),
            config,
            state: Mutex::default(),
            has_warned: AtomicBool::new(false),
            has_warned_of_sweep: AtomicBool::new(false),
            lacks_task: AtomicBool::new(true),
            closing: watch::Sender::new(false),
        };
        Self {
            shared: Arc::new(shared),
        }
    }
}

impl Session for PostgresSession {
    fn start(&self) {
        let lacks_task = &self.shared.lacks_task;
        if lacks_task.load(Ordering::Relaxed)
            && Handle::try_current().is_ok()
            && lacks_task.swap(false, Ordering::Relaxed)
        {
            // It ends at once if nobody needs it.
            self.shared.start_task();
        }
    }

    fn submit(&self, submitted: SubmittedOp) {
        self.shared.lock().inbox.push(Request::new(submitted));
        self.shared.start_task();
    }

    fn identity(&self) -> Option<Arc<str>> {
        self.shared.lock().identity.clone()
    }

    fn fence(&self) -> Option<Arc<str>> {
        Some(self.shared.settings.fence_sql().into())
    }

    fn inspect(&self, key: Arc<str>) -> BoxFuture<'static, Result<KeyStatus, StoreError>> {
        let shared = self.shared.clone();
        async move {
            let (look, answered) = oneshot::channel();
            shared.lock().looks.push((key, look));
            shared.start_task();
            let abandoned = |_| Err(shared.abandoned().into());
            answered.await.unwrap_or_else(abandoned)
        }
        .boxed()
    }

    fn scan(&self, start: Arc<str>) -> BoxStream<'static, Result<Vec<Arc<str>>, StoreError>> {
        let shared = &self.shared;
        let (settings, names) = (shared.settings.clone(), shared.names.clone());
        scan::scan(settings, names, &start, shared.config.response_timeout)
    }
}

impl Drop for PostgresSession {
    fn drop(&mut self) {
        self.shared.closing.send_replace(true);
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes the task, or starts one where there is a runtime.
    fn start_task(self: &Arc<Self>) {
        let Ok(runtime) = Handle::try_current() else {
            self.lacks_task.store(true, Ordering::Relaxed);
            self.wake.notify_one();
            return;
        };
        if mem::replace(&mut self.lock().has_task, true) {
            self.wake.notify_one();
            return;
        }
        let task = PostgresTask::new(self.clone());
        runtime.spawn(run_task(self.config.listener.clone(), task.run()));
    }

    /// Tells the registry, in this order.
    pub(super) fn tell(&self, events: impl IntoIterator<Item = StoreEvent>) {
        self.notifier.put(events);
        self.notifier.tell();
    }

    /// Resolves when the session is dropped.
    pub(super) async fn closed(&self) {
        let mut closing = self.closing.subscribe();
        // An error would mean that the sender is dropped.
        let _ = closing.wait_for(|is_closed| *is_closed).await;
    }

    pub(super) fn abandoned(&self) -> Fault {
        Fault::abandoned(&self.settings.endpoint.address)
    }

    /// Hands new requests to the task.
    pub(super) fn take(&self) -> (Vec<Request>, Vec<(Arc<str>, Look)>) {
        let mut state = self.lock();
        (mem::take(&mut state.inbox), mem::take(&mut state.looks))
    }

    /// Whether the registry holds or waits for anything.
    pub(super) fn is_needed(&self) -> bool {
        let listener = self.config.listener.upgrade();
        listener.is_some_and(|listener| listener.uses(&KeyScope::All))
    }

    /// When the task connects next. `None`: never, and it ends.
    pub(super) fn next_attempt(&self) -> Option<Option<Instant>> {
        let is_needed = self.is_needed();
        let mut state = self.lock();
        if is_needed || !state.inbox.is_empty() || !state.looks.is_empty() {
            return Some(state.backoff.not_before());
        }
        state.has_task = false;
        None
    }

    pub(super) fn connected(&self, connected: &Connected) {
        let address = &*self.settings.endpoint.address;
        log!(debug, address, no_push = ?connected.no_push, "connected");
        if let Some(reason) = &connected.no_push
            && !self.has_warned.swap(true, Ordering::Relaxed)
        {
            log!(
                warn,
                address,
                reason,
                "this server cannot push grants, so waiters poll: is a pooler between? Give the store the server's own \
                 url, and the pooler's by `pooled`"
            );
        }
        // Whoever waited for longer than an answer may take is asked whether it still wants it.
        let (now, within) = (Instant::now(), self.config.response_timeout);
        let is_old = |request: &mut Request| request.asks() && request.since + within <= now;
        let old: Vec<_> = {
            let mut state = self.lock();
            state.identity.clone_from(&connected.identity);
            state.inbox.extract_if(.., is_old).collect()
        };
        let error = StoreError::from(Fault::silent(address, within));
        let old = old.into_iter().map(|request| unsent(request, &error));
        self.tell(old.chain([StoreEvent::up(connected.no_push.is_none())]));
    }

    /// Deletes what nobody uses. If that fails, the next sweep tries it again.
    pub(super) async fn sweep(&self) {
        let within = self.config.response_timeout;
        let address = &*self.settings.endpoint.address;
        match sweep::sweep(&self.settings, &self.names, within).await {
            Ok(()) => {}
            Err(Interrupted::Refused(error))
                if !self.has_warned_of_sweep.swap(true, Ordering::Relaxed) =>
            {
                log!(warn, address, %error, "unused rows cannot be deleted, and the tables grow");
            }
            Err(Interrupted::Refused(error) | Interrupted::Broken(error)) => {
                log!(debug, address, %error, "unused rows were not deleted");
            }
        }
    }

    /// The connections were lost, or could not be made. `sent` may be done or not.
    pub(super) fn lost(
        &self,
        fault: Fault,
        sent: Vec<Request>,
        mut unsent_ones: Vec<Request>,
        stood_since: Option<Instant>,
    ) {
        let error = StoreError::from(fault);
        let looks = {
            let mut state = self.lock();
            state.backoff.failed(Instant::now(), stood_since);
            let mut inbox = mem::take(&mut state.inbox);
            unsent_ones.append(&mut inbox);
            if stood_since.is_some() {
                // What was not sent waits for the next attempt, once.
                state.inbox = mem::take(&mut unsent_ones);
            }
            mem::take(&mut state.looks)
        };
        let sent = sent.into_iter().map(|request| unknown(request, &error));
        let unsent_ones = unsent_ones
            .into_iter()
            .map(|request| unsent(request, &error));
        let events: Vec<_> = sent
            .chain(unsent_ones)
            .chain([StoreEvent::down(error.clone())])
            .collect();
        self.tell(events);
        for (_, look) in looks {
            // The caller may have gone.
            let _ = look.send(Err(error.clone()));
        }
    }

    /// The task has ended. `has_begun`: it was polled. Otherwise its runtime is shutting down and has dropped it; an
    /// answer could start the next task on that runtime, without end.
    pub(super) fn ended(&self, has_begun: bool, sent: Vec<Request>, unsent_ones: Vec<Request>) {
        self.lacks_task.store(true, Ordering::Relaxed);
        let (inbox, looks) = {
            let mut state = self.lock();
            state.has_task = false;
            if !has_begun {
                return;
            }
            (mem::take(&mut state.inbox), mem::take(&mut state.looks))
        };
        drop(looks);
        let error = StoreError::from(self.abandoned());
        let sent = sent.into_iter().map(|request| unknown(request, &error));
        let rest = unsent_ones.into_iter().chain(inbox);
        let events: Vec<_> = sent
            .chain(rest.map(|request| unsent(request, &error)))
            .collect();
        self.tell(events.into_iter().chain([StoreEvent::down(error.clone())]));
    }
}

/// Requests that were not answered, and those that were not sent.
pub(super) fn abort(windows: &mut [SendWindow<Request>]) -> (Vec<Request>, Vec<Request>) {
    let (mut sent, mut unsent) = (Vec::new(), Vec::new());
    for window in windows {
        let (of_window, rest) = window.abort();
        sent.extend(of_window);
        unsent.extend(rest);
    }
    (sent, unsent)
}

pub(super) fn replied(request: Request, result: OpResult) -> StoreEvent {
    let submitted = request.submitted;
    StoreEvent::Replied { submitted, result }
}

fn unknown(request: Request, error: &StoreError) -> StoreEvent {
    replied(request, Err(OpError::Unknown(error.clone())))
}

fn unsent(request: Request, error: &StoreError) -> StoreEvent {
    replied(request, Err(OpError::Unsent(error.clone())))
}
