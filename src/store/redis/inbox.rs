//! Where wishes wait until the link's task takes them: the only thing that a session's callers and
//! its task share.

use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

use futures::task::AtomicWaker;

use super::call::Job;

/// What the task is at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Pace {
    /// There is no task: none was started yet, or its runtime has gone.
    Absent,
    /// It connects, or serves.
    Running,
    /// It waits before it connects again.
    Pausing,
}

/// The session's side puts in, the task's side takes out.
#[derive(Default)]
pub(super) struct Inbox {
    jobs: Mutex<VecDeque<Job>>,
    /// Whether `jobs` may hold something, so that the task need not lock to see that it does not.
    filled: AtomicBool,
    /// Written under the lock of `jobs`, but for `Running` and `Pausing` by the task itself.
    pace: AtomicU8,
    /// Somebody arrived: no pause is to be kept.
    hurry: AtomicBool,
    /// The session was dropped.
    closed: AtomicBool,
    task: AtomicWaker,
}

impl Inbox {
    pub(super) fn pace(&self) -> Pace {
        match self.pace.load(Ordering::Acquire) {
            0 => Pace::Absent,
            1 => Pace::Running,
            _ => Pace::Pausing,
        }
    }

    /// Puts a job in, and wakes the task if there is one.
    pub(super) fn put(&self, job: Job) {
        self.jobs().push_back(job);
        // Whoever put the first one in has woken it, and it has taken nothing since.
        if !self.filled.swap(true, Ordering::AcqRel) {
            self.task.wake();
        }
    }

    /// Cuts the task's pause short.
    pub(super) fn hurry(&self) {
        self.hurry.store(true, Ordering::Release);
        self.task.wake();
    }

    /// Ends the task.
    pub(super) fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.task.wake();
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Lets one of many callers start the task. True: it is this one.
    pub(super) fn claim(&self) -> bool {
        let _jobs = self.jobs();
        let was = self.pace.load(Ordering::Acquire);
        if was == Pace::Absent as u8 {
            self.pace.store(Pace::Running as u8, Ordering::Release);
        }
        was == Pace::Absent as u8
    }

    /// The task says what it is at.
    pub(super) fn set_pace(&self, pace: Pace) {
        self.pace.store(pace as u8, Ordering::Release);
    }

    /// Ends the claim, and hands over what is left. Under one lock: a job that is not among these
    /// was put in later, and whoever put it in sees that there is no task.
    pub(super) fn resign(&self) -> VecDeque<Job> {
        let mut jobs = self.jobs();
        self.pace.store(Pace::Absent as u8, Ordering::Release);
        std::mem::take(&mut *jobs)
    }

    /// Takes everything out, and leaves `room`, which is empty, for what comes.
    pub(super) fn take(&self, room: &mut VecDeque<Job>) {
        // The look before the swap keeps the many turns that bring nothing from writing.
        if self.filled.load(Ordering::Relaxed) && self.filled.swap(false, Ordering::AcqRel) {
            std::mem::swap(&mut *self.jobs(), room);
        }
    }

    /// Ready when there is something to take out, or the session was dropped.
    pub(super) fn poll_filled(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.task.register(cx.waker());
        if self.filled.load(Ordering::Acquire) || self.is_closed() {
            Poll::Ready(())
        } else {
            Poll::Pending
        }
    }

    /// Ready when there is a reason not to wait any longer.
    pub(super) fn poll_hurried(&self, cx: &mut Context<'_>) -> Poll<()> {
        let filled = self.poll_filled(cx);
        if self.hurry.swap(false, Ordering::AcqRel) {
            Poll::Ready(())
        } else {
            filled
        }
    }

    /// Ready when the session was dropped.
    pub(super) fn poll_closed(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.task.register(cx.waker());
        if self.is_closed() {
            Poll::Ready(())
        } else {
            Poll::Pending
        }
    }

    fn jobs(&self) -> MutexGuard<'_, VecDeque<Job>> {
        // Nothing panics while it holds this lock, and a queue is whole between any two pushes.
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Inbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inbox")
            .field("pace", &self.pace())
            .field("closed", &self.is_closed())
            .finish_non_exhaustive()
    }
}
