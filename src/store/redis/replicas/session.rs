//! A registry's line to a server, or a cluster, whose replicas must have what it acquires, as the registry sees it.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use futures::future::BoxFuture;
use futures::task::AtomicWaker;
use tokio::runtime::Handle;
use tokio::time::Instant;

use super::ledger::{Hint, Ledger, Round};
use super::rule::Replicas;
use super::task::Task;
use crate::StoreError;
use crate::store::contract::{Listener, News, Op, Opening, Session, Sight};
use crate::store::redis::session::{Place, RedisSession};
use crate::store::relay::Relay;

pub(in crate::store::redis) struct ReplicasSession {
    inner: RedisSession,
    core: Arc<Core>,
}

/// What the session and its task share; it hears what the inner session tells.
pub(super) struct Core {
    me: Weak<Core>,
    pub(super) place: Place,
    pub(super) rule: Replicas,
    pub(super) opening: Opening,
    ledger: Mutex<Ledger>,
    relay: Relay,
    /// Whether there is a task.
    pub(super) runs: AtomicBool,
    /// The session was dropped.
    pub(super) closed: AtomicBool,
    /// The task's; woken when there is something new for it to see.
    pub(super) bell: AtomicWaker,
}

impl ReplicasSession {
    pub(in crate::store::redis) fn new(place: Place, rule: Replicas, opening: Opening) -> Self {
        let core = Arc::new_cyclic(|me: &Weak<Core>| Core {
            me: me.clone(),
            place: place.clone(),
            rule,
            opening: opening.clone(),
            ledger: Mutex::new(Ledger::new(rule)),
            relay: Relay::new(opening.listener.clone()),
            runs: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            bell: AtomicWaker::new(),
        });
        let listener: Weak<dyn Listener> = core.me.clone();
        let inner = RedisSession::new(
            place,
            Opening {
                listener,
                ..opening
            },
        );
        Self { inner, core }
    }
}

impl Core {
    fn lock(&self) -> MutexGuard<'_, Ledger> {
        // Every change leaves the ledger whole, so a panic elsewhere is no reason to stop.
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the ledger, and does what follows once it is unlocked.
    pub(super) fn act(&self, event: impl FnOnce(&mut Ledger)) {
        {
            let mut ledger = self.lock();
            event(&mut ledger);
            self.relay.put(ledger.told.drain(..));
        }
        self.ensure();
        self.relay.tell();
    }

    pub(super) fn begin(
        &self,
        now: Instant,
        place: impl FnMut(&str, &Hint) -> Option<(Arc<str>, u16)>,
    ) -> Vec<(Arc<str>, Round)> {
        self.lock().begin(now, place)
    }

    pub(super) fn due(&self) -> Option<Instant> {
        self.lock().due()
    }

    /// How much has been held back until now.
    pub(super) fn arrivals(&self) -> u64 {
        self.lock().arrivals
    }

    pub(super) fn is_waiting(&self) -> bool {
        self.lock().is_waiting()
    }

    /// Whether the answer to a round is still waited for.
    pub(super) fn is_wanted(&self, number: u64) -> bool {
        self.lock().is_wanted(number)
    }

    /// Starts the task if somebody waits for it, and it can be.
    fn ensure(&self) {
        if self.runs.load(Ordering::Acquire) || !self.is_waiting() {
            return;
        }
        let (Ok(runtime), Some(core)) = (Handle::try_current(), self.me.upgrade()) else {
            return;
        };
        if !self.closed.load(Ordering::Acquire) && !self.runs.swap(true, Ordering::AcqRel) {
            // Made here and not by itself: if the runtime never runs it, its drop says so.
            runtime.spawn(Task::new(core).run());
        }
    }
}

impl Listener for Core {
    fn news(&self, news: News) {
        self.all_news(vec![news]);
    }

    fn all_news(&self, news: Vec<News>) {
        self.act(|ledger| {
            news.into_iter().for_each(|news| ledger.hear(news));
        });
        self.bell.wake();
    }
}

impl Session for ReplicasSession {
    fn start(&self) {
        self.inner.start();
        self.core.ensure();
    }

    fn revive(&self) {
        self.inner.revive();
        self.core.ensure();
    }

    fn submit(&self, key: Arc<str>, op: Op) {
        self.inner.submit(key, op);
    }

    fn inspect(&self, key: Arc<str>) -> BoxFuture<'static, Result<Sight, StoreError>> {
        self.inner.inspect(key)
    }
}

impl Drop for ReplicasSession {
    fn drop(&mut self) {
        self.core.closed.store(true, Ordering::Release);
        self.core.bell.wake();
    }
}

impl fmt::Debug for ReplicasSession {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReplicasSession")
            .field("inner", &self.inner)
            .field("rule", &self.core.rule)
            .finish_non_exhaustive()
    }
}
