//! The one timer task of a registry: it serves every deadline, wait and pause.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures::FutureExt;
use futures::future;
use tokio::runtime::{Handle, Id};
use tokio::task::{AbortHandle, yield_now};
use tokio::time::sleep;

use super::core::{Engine, Next};
use crate::base::mutex::Mutex;
use crate::base::sync::{AtomicBool, Notify};
use crate::roaming::time::timeout_at;
use crate::roaming::{Tasks, runtime};

/// How many runtimes are remembered.
const MOST_RUNTIMES: usize = 16;

/// Starts the task, and starts it again when its runtime has gone. `wake` wakes it for an earlier
/// deadline.
#[derive(Debug, Default)]
pub(super) struct Timer {
    tasks: Arc<Tasks>,
    wake_up: Arc<Notify>,
    running: AtomicBool,
    /// Those on which somebody has waited; the latest is last. The task can be started there even by a caller without a
    /// runtime, such as a drop on a plain thread.
    runtimes: Mutex<Vec<Runtime>>,
}

impl Timer {
    pub(super) fn new(tasks: Arc<Tasks>) -> Arc<Self> {
        Arc::new(Self {
            tasks,
            ..Self::default()
        })
    }

    /// Notes the present runtime: somebody waits on it. If the task's own runtime ends first, the task moves there (D7).
    pub(super) fn note_runtime(&self) {
        if let Some(current) = runtime() {
            self.note(current);
        }
    }

    fn note(&self, current: Handle) {
        let mut runtimes = self.runtimes.lock();
        let is_current = |known: &Runtime| known.handle.id() == current.id();
        if runtimes.last().is_some_and(is_current) {
            return;
        }
        let known = match runtimes.iter().position(is_current) {
            Some(at) => runtimes.remove(at),
            None => Runtime {
                handle: current,
                probe: None,
            },
        };
        if runtimes.len() == MOST_RUNTIMES {
            runtimes.remove(0);
        }
        runtimes.push(known);
    }

    /// Starts the task if it does not run.
    pub(super) fn ensure_running(self: &Arc<Self>, engine: &Weak<Engine>) {
        // Read first: a write would take the cache line from every other thread.
        let running = &self.running;
        let is_over = || engine.strong_count() == 0;
        if running.load(Ordering::Acquire) || is_over() || running.swap(true, Ordering::AcqRel) {
            return;
        }
        self.note_runtime();
        Task::start(engine.clone(), self.clone());
    }

    /// Forgets the runtimes that have ended: a handle keeps parts of them. A single runtime is not probed: the task that
    /// asks runs on it.
    pub(super) fn forget_ended(&self) {
        let mut runtimes = self.runtimes.lock();
        if runtimes.len() > 1 {
            runtimes.retain_mut(Runtime::is_alive);
        }
    }

    fn forget(&self, gone: Id) {
        let mut runtimes = self.runtimes.lock();
        runtimes.retain(|known| known.handle.id() != gone);
    }

    /// Notified, it wakes the task.
    pub(super) fn wake_up(&self) -> Arc<Notify> {
        self.wake_up.clone()
    }

    pub(super) fn wake(&self) {
        self.wake_up.notify_one();
    }
}

#[derive(Debug)]
struct Runtime {
    handle: Handle,
    /// A task that does nothing, and ends when its runtime does.
    probe: Option<AbortHandle>,
}

impl Runtime {
    /// Whether its tasks still run. One that is spawned on a runtime that has gone is dropped at once.
    fn is_alive(&mut self) -> bool {
        let spawn = || self.handle.spawn(future::pending::<()>()).abort_handle();
        let probe = self.probe.get_or_insert_with(spawn);
        !probe.is_finished()
    }
}

impl Drop for Runtime {
    fn drop(&mut self) {
        if let Some(probe) = &self.probe {
            probe.abort();
        }
    }
}

/// The timer's task. When its runtime ends, the task moves to another runtime with waiters. Nothing else may wake
/// those waiters.
struct Task {
    engine: Weak<Engine>,
    timer: Arc<Timer>,
    runs_on: Id,
    ended: bool,
}

impl Task {
    /// Spawns the task on the runtime noted last. If that runtime has ended, the spawn drops the task. `Drop` then
    /// calls this again.
    fn start(engine: Weak<Engine>, timer: Arc<Timer>) {
        let runtime = loop {
            let runtimes = timer.runtimes.lock();
            let Some(latest) = runtimes.last() else {
                // Still under the lock: whoever notes a runtime after this look sees that no task runs, and
                // starts one.
                timer.running.store(false, Ordering::Release);
                return;
            };
            let runtime = latest.handle.clone();
            // The hook of a panic is the user's code.
            drop(runtimes);
            if has_timers(&runtime) {
                break runtime;
            }
            // It serves as little as one that has ended.
            timer.forget(runtime.id());
        };
        let task = Self {
            engine,
            timer,
            runs_on: runtime.id(),
            ended: false,
        };
        let tasks = task.timer.tasks.clone();
        tasks.spawn(&runtime, task.run());
    }

    async fn run(mut self) {
        let served = AssertUnwindSafe(serve(&self.engine, &self.timer.wake_up));
        let served = served.catch_unwind().await;
        self.ended = true;
        self.timer.running.store(false, Ordering::Release);
        // The runtime is alive, so this is a bug of ours. The registry closes.
        if let Err(panicked) = served
            && let Some(engine) = self.engine.upgrade()
        {
            engine.fail(&*panicked);
        }
    }
}

/// Tokio tells it by a panic alone.
fn has_timers(runtime: &Handle) -> bool {
    // A thread that ends has no more locals, and cannot enter it (H6).
    let Ok(_entered) = catch_unwind(AssertUnwindSafe(|| runtime.enter())) else {
        return true;
    };
    catch_unwind(|| drop(sleep(Duration::ZERO))).is_ok()
}

/// Serves until the registry is gone.
async fn serve(engine: &Weak<Engine>, wake_up: &Notify) {
    while let Some(served) = engine.upgrade() {
        let next = served.run_due();
        drop(served);
        match next {
            Next::Now => yield_now().await,
            Next::At(at) => drop(timeout_at(at, wake_up.notified()).await),
            Next::Event => wake_up.notified().await,
        }
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        if !self.ended && self.engine.strong_count() > 0 {
            self.timer.forget(self.runs_on);
            Self::start(self.engine.clone(), self.timer.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use shuttle::thread;
    use tokio::runtime::Builder;

    use super::*;
    use crate::base::Clock;
    use crate::base::model::check;
    use crate::engine::settings::Settings;
    use crate::store::MemoryStore;

    /// Two callers come, each on a runtime of its own. One of the runtimes ends: the task runs on the other, once.
    ///
    /// Finds: `start` unlocks the runtimes before it notes that no task runs (a caller notes its runtime in between, believes
    /// that the task runs, and nobody starts it), or `ensure_running` looks and notes in two steps (two tasks).
    #[test]
    fn model_a_task_whose_runtime_ends_moves_to_that_of_a_caller() {
        check(|| {
            let engine = Engine::new(&MemoryStore::new(), Settings::default(), Clock::system());
            let timer = Timer::new(Arc::default());
            let [ends, stays] =
                [(); 2].map(|()| Builder::new_current_thread().enable_time().build().unwrap());
            let come = |runtime: Handle| {
                let (timer, engine) = (timer.clone(), Arc::downgrade(&engine));
                move || {
                    timer.note(runtime);
                    timer.ensure_running(&engine);
                }
            };
            let (first, second) = (come(ends.handle().clone()), come(stays.handle().clone()));
            let first = thread::spawn(move || {
                first();
                drop(ends);
            });
            second();
            first.join().unwrap();
            assert_eq!(timer.tasks.wake().len(), 1, "it runs on the one that stays");
        });
    }
}
