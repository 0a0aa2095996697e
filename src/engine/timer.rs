//! The one timer task of a registry: it serves every deadline, wait and pause.

use std::any::Any;
use std::hash::{Hash, Hasher};
use std::panic::AssertUnwindSafe;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use futures::FutureExt;
use futures::future::{self, Either};
use tokio::runtime::{Handle, Id};
use tokio::sync::Notify;
use tokio::task::AbortHandle;
use tokio::time::Instant;

/// What the task serves.
pub(super) trait Due: Send + Sync {
    /// Does what is due; returns when to come back.
    fn run_due(&self) -> Option<Instant>;

    /// The task has panicked.
    fn failed(&self, panicked: &(dyn Any + Send));
}

/// Starts the task, starts it again when the runtime that it ran on has gone, and rings when an
/// earlier deadline came up.
#[derive(Debug, Default)]
pub(super) struct Timer {
    bell: Arc<Notify>,
    running: Arc<AtomicBool>,
    runtimes: Arc<Runtimes>,
}

impl Timer {
    /// Notes the caller's runtime, on which somebody waits: if the one that the task runs on goes
    /// first, it runs on here.
    pub(super) fn note_runtime(&self, current: Option<&Handle>) {
        if let Some(current) = current {
            self.runtimes.note(current);
        }
    }

    /// Sees to it that the task runs.
    pub(super) fn ensure(&self, due: impl FnOnce() -> Weak<dyn Due>) {
        // Looked at first: whoever writes takes the cache line from every other thread.
        if self.running.load(Ordering::Acquire) || self.running.swap(true, Ordering::AcqRel) {
            return;
        }
        self.note_runtime(Handle::try_current().ok().as_ref());
        let runtimes = self.runtimes.clone();
        let (due, bell, running) = (due(), self.bell.clone(), self.running.clone());
        Task {
            due,
            bell,
            running,
            runtimes,
            runs_on: None,
            ended: false,
        }
        .start();
    }

    /// The runtimes that have gone since this was last asked.
    pub(super) fn gone(&self) -> Vec<Id> {
        self.runtimes.change(Known::take_gone)
    }

    /// Told, it makes the task look at once.
    pub(super) fn bell(&self) -> Arc<Notify> {
        self.bell.clone()
    }

    pub(super) fn ring(&self) {
        self.bell.notify_one();
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        self.ring();
    }
}

/// The runtimes on which somebody has waited. Also for those who come without one: a drop on a
/// plain thread.
#[derive(Debug, Default)]
struct Runtimes {
    /// The number of the latest, 0 if there is none: nearly everybody comes from that one, and has
    /// nothing to lock for.
    latest: AtomicU64,
    known: Mutex<Known>,
}

/// The latest last.
#[derive(Debug, Default)]
struct Known {
    known: Vec<Runtime>,
    gone: Vec<Id>,
}

#[derive(Debug)]
struct Runtime {
    runtime: Handle,
    sign: Option<Sign>,
}

/// A task that does nothing, and goes when its runtime does.
#[derive(Debug)]
struct Sign {
    of_life: Weak<()>,
    task: AbortHandle,
}

impl Drop for Sign {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Runtime {
    /// Whether its tasks still run. One that is spawned on a runtime that has gone is dropped at once.
    fn lives(&mut self) -> bool {
        let sign = self.sign.get_or_insert_with(|| {
            let inside = Arc::new(());
            let of_life = Arc::downgrade(&inside);
            let task = self.runtime.spawn(async move {
                let _inside = inside;
                future::pending::<()>().await;
            });
            let task = task.abort_handle();
            Sign { of_life, task }
        });
        sign.of_life.strong_count() > 0
    }
}

/// More than that many runtimes at a time are not kept in mind.
const MOST_RUNTIMES: usize = 16;

impl Runtimes {
    fn note(&self, current: &Handle) {
        if self.latest.load(Ordering::Acquire) != number(current.id()) {
            self.change(|known| known.note(current));
        }
    }

    fn change<R>(&self, change: impl FnOnce(&mut Known) -> R) -> R {
        let mut known = self.lock();
        let result = change(&mut known);
        let latest = known.known.last();
        let latest = latest.map_or(0, |latest| number(latest.runtime.id()));
        self.latest.store(latest, Ordering::Release);
        result
    }

    fn lock(&self) -> MutexGuard<'_, Known> {
        // Every change leaves the list whole, so a panic elsewhere is no reason to stop.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The number that a runtime's id is, which it gives to a hasher alone.
fn number(id: Id) -> u64 {
    struct Bytes(u64);

    impl Hasher for Bytes {
        fn write(&mut self, bytes: &[u8]) {
            for byte in bytes {
                self.0 = self.0.rotate_left(8) ^ u64::from(*byte);
            }
        }

        fn finish(&self) -> u64 {
            self.0
        }
    }

    let mut bytes = Bytes(0);
    id.hash(&mut bytes);
    bytes.finish()
}

impl Known {
    fn note(&mut self, current: &Handle) {
        let is_current = |known: &Runtime| known.runtime.id() == current.id();
        if self.known.last().is_some_and(is_current) {
            return;
        }
        let known = match self.known.iter().position(is_current) {
            Some(at) => self.known.remove(at),
            None => Runtime {
                runtime: current.clone(),
                sign: None,
            },
        };
        if self.known.len() == MOST_RUNTIMES {
            self.known.remove(0);
        }
        self.known.push(known);
    }

    fn bury(&mut self, gone: Id) {
        self.known.retain(|known| known.runtime.id() != gone);
        self.gone.push(gone);
    }

    /// The one and only runtime needs no sign of life: who asks is a task of it.
    fn take_gone(&mut self) -> Vec<Id> {
        if self.known.len() > 1 {
            let gone = &mut self.gone;
            self.known.retain_mut(|known| {
                let lives = known.lives();
                if !lives {
                    gone.push(known.runtime.id());
                }
                lives
            });
        }
        std::mem::take(&mut self.gone)
    }
}

/// The task's own. When its runtime ends under it, it moves to another on which somebody has
/// waited: those there may have nothing else that would wake them.
struct Task {
    due: Weak<dyn Due>,
    bell: Arc<Notify>,
    running: Arc<AtomicBool>,
    runtimes: Arc<Runtimes>,
    runs_on: Option<Handle>,
    ended: bool,
}

impl Task {
    /// Runs it on the latest runtime; on one that has gone it is dropped at once, and comes here
    /// again.
    fn start(mut self) {
        let noted = self.runtimes.clone();
        let runtimes = noted.lock();
        let runtime = runtimes.known.last().map(|known| known.runtime.clone());
        if runtime.is_none() {
            // Still under the lock: whoever notes a runtime after this look finds that no task runs. Else
            // it would leave its deadlines to this one, which ends.
            self.end();
        }
        drop(runtimes);
        if let Some(runtime) = runtime {
            self.runs_on = Some(runtime.clone());
            runtime.spawn(self.run());
        }
    }

    fn end(&mut self) {
        self.ended = true;
        self.running.store(false, Ordering::Release);
    }

    async fn run(mut self) {
        let served = AssertUnwindSafe(serve(&self.due, &self.bell));
        let served = served.catch_unwind().await;
        self.end();
        // The runtime is alive. The registry closes rather than go on without its timer.
        if let Err(panicked) = served
            && let Some(due) = self.due.upgrade()
        {
            due.failed(&*panicked);
        }
    }
}

/// Serves until the registry is gone.
async fn serve(due: &Weak<dyn Due>, bell: &Notify) {
    while let Some(served) = due.upgrade() {
        let next = served.run_due();
        drop(served);
        let rung = pin!(bell.notified());
        match next {
            None => rung.await,
            // The clock is compared before the sleep is polled: a runtime's budget can leave
            // an elapsed sleep pending.
            Some(at) => {
                let sleep = pin!(tokio::time::sleep_until(at));
                match future::select(rung, sleep).await {
                    Either::Left(_) | Either::Right(_) => {}
                }
            }
        }
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        if self.ended || self.due.strong_count() == 0 {
            return;
        }
        if let Some(gone) = self.runs_on.take() {
            self.runtimes.change(|known| known.bury(gone.id()));
        }
        Task {
            due: self.due.clone(),
            bell: self.bell.clone(),
            running: self.running.clone(),
            runtimes: self.runtimes.clone(),
            runs_on: None,
            ended: false,
        }
        .start();
    }
}
