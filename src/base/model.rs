//! Runs a test as a model: `shuttle` chooses at each step which of its threads goes on.
//!
//! The code under test is the one that ships. In the build of tests, what it takes from `base::mutex` and `base::sync` is
//! of this file: in a model, each use is a point at which another thread may go on, and elsewhere it is std's. What else
//! it uses, such as an atomic of std, is no such point. What tokio and
//! `futures` have inside is one step: that code has models of its own. Atomics are sequentially consistent here, so a
//! model does not find an ordering that is too weak.
//!
//! Each model was seen to fail with the slip that its comment names. A failure prints the seed and the schedule.

use std::cell::Cell;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::sync::{LockResult, OnceLock, PoisonError, TryLockError, TryLockResult, atomic};

use futures::task;
use shuttle::current::try_get_current_task;
use shuttle::scheduler::{PctScheduler, RandomScheduler, Scheduler};
use shuttle::{Config, MaxSteps, Runner};
use tokio::runtime::{Builder, Handle};

/// How many interleavings of a model each of the two schedulers chooses.
const USUAL: usize = 1_000;

/// How many switches a bug needs at most, of those that the second scheduler is made to find.
const DEPTH: usize = 3;

/// Always the same, so that a failure comes again if the model itself is the same each time.
const SEED: u64 = 0x10c_4577;

/// Runs the model in many interleavings. It fails if it panics, if all of its threads wait, or if it has
/// no end.
pub(crate) fn check(model: impl Fn() + Send + Sync + Clone + 'static) {
    let told = std::env::var("LOCKSTREAM_SCHEDULES").ok();
    let most = told.map_or(USUAL, |told| told.parse().expect("a number"));
    run(RandomScheduler::new_from_seed(SEED, most), model.clone());
    run(PctScheduler::new_from_seed(SEED, DEPTH, most), model);
}

fn run(scheduler: impl Scheduler + 'static, model: impl Fn() + Send + Sync + 'static) {
    let mut config = Config::new();
    config.stack_size = 0x4_0000;
    config.silence_warnings = true;
    config.max_steps = MaxSteps::FailAfter(100_000);
    Runner::new(scheduler, config).run(model);
}

/// Runs the model on a runtime of tokio's that nobody drives: its timers never fire. What is spawned on it is a task of
/// the model.
pub(crate) fn check_with_tasks(model: impl Fn() + Send + Sync + Clone + 'static) {
    let runtime = Builder::new_current_thread().enable_time().build().unwrap();
    // Not dropped after a failure: it would wake tasks of the model, which is gone.
    let runtime = ManuallyDrop::new(runtime);
    let here = runtime.enter();
    HAS_TASKS.set(true);
    check(model);
    HAS_TASKS.set(false);
    drop(here);
    drop(ManuallyDrop::into_inner(runtime));
}

thread_local! {
    static HAS_TASKS: Cell<bool> = const { Cell::new(false) };
}

pub(crate) fn spawn(runtime: &Handle, task: impl Future<Output = ()> + Send + 'static) {
    if HAS_TASKS.get() {
        drop(shuttle::future::spawn(task));
    } else {
        runtime.spawn(task);
    }
}

fn is_in_model() -> bool {
    try_get_current_task().is_some()
}

/// In a model, another thread may go on here.
pub(crate) fn step() {
    if is_in_model() {
        // Unlike a yield, it does not tell the scheduler that this thread has nothing to do.
        shuttle::sync::atomic::AtomicBool::new(false).load(atomic::Ordering::SeqCst);
    }
}

/// Each call of a method of `T` is a step of a model.
#[derive(Debug, Default)]
pub(crate) struct Steps<T>(T);

impl<T> Deref for Steps<T> {
    type Target = T;

    fn deref(&self) -> &T {
        step();
        &self.0
    }
}

pub(crate) type AtomicBool = Steps<atomic::AtomicBool>;
pub(crate) type AtomicU64 = Steps<atomic::AtomicU64>;
pub(crate) type AtomicWaker = Steps<task::AtomicWaker>;
pub(crate) type Notify = Steps<tokio::sync::Notify>;

impl AtomicBool {
    pub(crate) const fn new(value: bool) -> Self {
        Self(atomic::AtomicBool::new(value))
    }
}

impl AtomicU64 {
    pub(crate) const fn new(value: u64) -> Self {
        Self(atomic::AtomicU64::new(value))
    }
}

/// std's. In a model, `turn` is locked before: its threads share one of the system's, which must not block.
#[derive(Debug, Default)]
pub(crate) struct Mutex<T> {
    value: std::sync::Mutex<T>,
    turn: OnceLock<shuttle::sync::Mutex<()>>,
}

#[derive(Debug)]
pub(crate) struct MutexGuard<'a, T> {
    // Dropped first.
    value: std::sync::MutexGuard<'a, T>,
    _turn: Option<shuttle::sync::MutexGuard<'a, ()>>,
}

impl<T> Mutex<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self {
            value: std::sync::Mutex::new(value),
            turn: OnceLock::new(),
        }
    }

    fn turn(&self) -> &shuttle::sync::Mutex<()> {
        self.turn.get_or_init(Default::default)
    }

    pub(crate) fn lock(&self) -> LockResult<MutexGuard<'_, T>> {
        let lock = || self.turn().lock().unwrap_or_else(PoisonError::into_inner);
        let turn = is_in_model().then(lock);
        match self.value.lock() {
            Ok(value) => Ok(MutexGuard { value, _turn: turn }),
            Err(poisoned) => Err(PoisonError::new(MutexGuard {
                value: poisoned.into_inner(),
                _turn: turn,
            })),
        }
    }

    pub(crate) fn try_lock(&self) -> TryLockResult<MutexGuard<'_, T>> {
        let mut turn = None;
        if is_in_model() {
            turn = Some(match self.turn().try_lock() {
                Ok(turn) => turn,
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                Err(TryLockError::WouldBlock) => return Err(TryLockError::WouldBlock),
            });
        }
        match self.value.try_lock() {
            Ok(value) => Ok(MutexGuard { value, _turn: turn }),
            Err(TryLockError::WouldBlock) => Err(TryLockError::WouldBlock),
            Err(TryLockError::Poisoned(poisoned)) => {
                Err(TryLockError::Poisoned(PoisonError::new(MutexGuard {
                    value: poisoned.into_inner(),
                    _turn: turn,
                })))
            }
        }
    }

    pub(crate) fn get_mut(&mut self) -> LockResult<&mut T> {
        self.value.get_mut()
    }
}

impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> std::ops::DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.value
    }
}
