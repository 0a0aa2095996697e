//! Tasks that another runtime polls while their own is busy.
//!
//! A task of the user's that computes without an await can keep the timers and sockets of a whole runtime from being
//! looked after, however many threads that has. The tasks of a registry must go on: they renew leases. So each of them is
//! a future that two may poll, one at a time: its own runtime (the host), and the thread of [`heartbeat`](crate::engine)
//! (the guest). When the host polls it again, the guest leaves it alone.
//!
//! A timer or a socket belongs to the runtime where it was made. Those here notice at a poll that it is another one, and
//! move there. All that a task sleeps on or reads from must be one of these.

#[cfg(any(feature = "redis", feature = "postgres"))]
pub(crate) mod stream;
#[cfg(test)]
mod tests;
pub(crate) mod time;

use std::cell::{Cell, RefCell};
use std::pin::Pin;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock, Weak};
use std::task::{Context, Poll, Waker};
use std::time::Instant;

use futures::FutureExt;
use futures::future::BoxFuture;
use tokio::runtime::Handle;

use crate::base::mutex::Mutex;
use crate::base::sync::AtomicU64;

/// What this thread does at the moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// It polls a registry's task on the task's own runtime.
    Host,
    /// It polls a registry's task whose own runtime is busy.
    Guest,
    /// Anything else.
    Elsewhere,
    /// Anything else, on the thread that has guests.
    Lender,
}

thread_local! {
    static PLACE: Cell<Place> = const { Cell::new(Place::Elsewhere) };
    /// The runtime of the task that a guest polls.
    static HOST: RefCell<Option<Handle>> = const { RefCell::new(None) };
}

/// Where a timer or a socket was polled last, and so is registered.
#[derive(Debug)]
pub(crate) struct Spot(Option<Place>);

impl Spot {
    pub(crate) fn here() -> Self {
        Self(Some(PLACE.get()))
    }

    /// The first poll counts as a move.
    #[cfg(any(feature = "redis", feature = "postgres"))]
    pub(crate) fn unknown() -> Self {
        Self(None)
    }

    /// Whether the present poll is at another place than the last one.
    pub(crate) fn has_moved(&mut self) -> bool {
        let here = Some(PLACE.get());
        std::mem::replace(&mut self.0, here) != here
    }
}

/// Runs `poll` with this thread marked as being at `place`.
fn at<R>(place: Place, poll: impl FnOnce() -> R) -> R {
    struct Back(Place);
    impl Drop for Back {
        fn drop(&mut self) {
            PLACE.set(self.0);
        }
    }
    let _back = Back(PLACE.replace(place));
    poll()
}

/// The runtime on which a new task is to be started. A task that a guest polls starts others on its host's runtime, and
/// the thread that has guests starts none.
pub(crate) fn runtime() -> Option<Handle> {
    match PLACE.get() {
        Place::Elsewhere | Place::Host => Handle::try_current().ok(),
        Place::Guest => HOST.with_borrow(Clone::clone),
        Place::Lender => None,
    }
}

/// Marks this thread, while it runs `run`, as the one that has guests.
pub(crate) fn as_lender<R>(run: impl FnOnce() -> R) -> R {
    at(Place::Lender, run)
}

/// The tasks of one registry that run.
#[derive(Debug, Default)]
pub struct Tasks {
    known: Mutex<Vec<Weak<Task>>>,
}

/// A task, as its pollers share it.
pub(crate) struct Task {
    host: Handle,
    /// The host's, to look whether it polls.
    waker: OnceLock<Waker>,
    /// How often the host has polled it.
    polls: AtomicU64,
    /// Locked while somebody polls it. A panic of the task is reported where it is polled.
    work: Mutex<Work>,
}

struct Work {
    /// `None`: it has ended.
    future: Option<BoxFuture<'static, ()>>,
    /// Since when a guest has it.
    away: Option<Instant>,
    guest: Option<Waker>,
    /// No guest takes it before its host has polled it more often than this.
    given_up: Option<u64>,
}

impl Tasks {
    /// Runs a task on the runtime. If the runtime ends, the task is dropped.
    pub(crate) fn spawn(&self, runtime: &Handle, task: impl Future<Output = ()> + Send + 'static) {
        let task = self.add(runtime, task);
        let host = Host(task.clone());
        #[cfg(not(test))]
        runtime.spawn(host);
        #[cfg(test)]
        crate::base::model::spawn(runtime, host);
        if PLACE.get() == Place::Guest {
            // Its host is busy.
            task.lend(0);
        }
    }

    fn add(&self, runtime: &Handle, task: impl Future<Output = ()> + Send + 'static) -> Arc<Task> {
        let task = Arc::new(Task {
            host: runtime.clone(),
            waker: OnceLock::new(),
            polls: AtomicU64::new(0),
            work: Mutex::new(Work {
                future: Some(task.boxed()),
                away: None,
                guest: None,
                given_up: None,
            }),
        });
        let mut known = self.known.lock();
        if known.len() == known.capacity() {
            known.retain(|task| task.strong_count() > 0);
        }
        known.push(Arc::downgrade(&task));
        drop(known);
        task
    }

    /// Those that have not ended.
    fn known(&self) -> Vec<Arc<Task>> {
        self.known.lock().iter().filter_map(Weak::upgrade).collect()
    }

    /// Wakes the tasks that are with their hosts, and returns how often each was polled until now.
    pub(crate) fn wake(&self) -> Vec<(Arc<Task>, u64)> {
        let is_home =
            |task: &Arc<Task>| task.work.try_lock().is_none_or(|work| work.away.is_none());
        let tasks = self.known().into_iter().filter(is_home);
        tasks
            .map(|task| {
                let polls = task.polls.load(Ordering::Acquire);
                if let Some(waker) = task.waker.get() {
                    waker.wake_by_ref();
                }
                (task, polls)
            })
            .collect()
    }

    /// Since when a guest has any of them.
    pub(crate) fn away_since(&self) -> Option<Instant> {
        let known = self.known();
        known
            .iter()
            .filter_map(|task| task.work.try_lock()?.away)
            .min()
    }

    /// The guest gives up those that it has.
    pub(crate) fn leave(&self) {
        for task in self.known() {
            // What is locked is polled by its host.
            if let Some(mut work) = task.work.try_lock()
                && work.away.is_some()
            {
                work.given_up = Some(task.polls.load(Ordering::Acquire));
                task.come_back(&mut work);
            }
        }
    }
}

impl Task {
    /// If the host has not polled it since then, polls it on the present runtime from now on.
    pub(crate) fn lend(self: Arc<Self>, polls: u64) {
        if let Some(guest) = self.borrow(polls) {
            tokio::spawn(guest);
        }
    }

    fn borrow(self: Arc<Self>, polls: u64) -> Option<Guest> {
        let mut work = self.work.try_lock()?;
        let is_busy = self.polls.load(Ordering::Acquire) == polls;
        let is_free = work.away.is_none() && work.given_up != Some(polls) && work.future.is_some();
        if !is_busy || !is_free {
            return None;
        }
        work.away = Some(Instant::now());
        drop(work);
        Some(Guest(self))
    }

    fn come_back(&self, work: &mut Work) {
        if work.away.take().is_some()
            && let Some(guest) = work.guest.take()
        {
            guest.wake();
        }
    }

    fn poll(&self, work: &mut Work, cx: &mut Context<'_>) -> Poll<()> {
        let Some(future) = &mut work.future else {
            return Poll::Ready(());
        };
        let polled = future.poll_unpin(cx);
        if polled.is_ready() {
            work.future = None;
        }
        polled
    }
}

/// Polls a task on its own runtime.
struct Host(Arc<Task>);

impl Future for Host {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let task = &self.0;
        task.waker.get_or_init(|| cx.waker().clone());
        let mut work = task.work.lock();
        task.polls.fetch_add(1, Ordering::Release);
        task.come_back(&mut work);
        at(Place::Host, || task.poll(&mut work, cx))
    }
}

impl Drop for Host {
    /// The task has ended, or its runtime has.
    fn drop(&mut self) {
        let mut work = self.0.work.lock();
        let future = work.future.take();
        self.0.come_back(&mut work);
        drop(work);
        drop(future);
    }
}

/// Polls a task whose host is busy.
struct Guest(Arc<Task>);

impl Future for Guest {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let task = &self.0;
        let Some(mut work) = task.work.try_lock() else {
            // Its host polls it.
            return Poll::Ready(());
        };
        if work.away.is_none() {
            return Poll::Ready(());
        }
        work.guest = Some(cx.waker().clone());
        HOST.set(Some(task.host.clone()));
        let polled = at(Place::Guest, || task.poll(&mut work, cx));
        HOST.set(None);
        if polled.is_ready() {
            work.away = None;
        }
        polled
    }
}
