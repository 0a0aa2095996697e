//! What wakes the link's task, and does not while it is at work.

use std::sync::atomic::{AtomicU8, Ordering};
use std::task::Waker;

use futures::task::{ArcWake, AtomicWaker};
use std::sync::Arc;

/// The task is not being polled: a ring wakes it.
const IDLE: u8 = 0;
/// It is, and looks at everything once: a ring makes it look once more.
const LOOKING: u8 = 1;
/// It will look at everything: another ring is of no use.
const RUNG: u8 = 2;

/// Stands for the task's waker. A waker of the runtime's that is rung by the very task, as each op
/// does that the task itself gives rise to, puts the task in the run queue again, and may wake
/// another thread to run it: that alone costs more than the op.
#[derive(Debug, Default)]
pub(super) struct Bell {
    state: AtomicU8,
    task: AtomicWaker,
}

impl Bell {
    /// The task is polled. Rings are of no use until [`Self::listen`].
    pub(super) fn begin(&self, task: &Waker) {
        self.task.register(task);
        self.state.store(RUNG, Ordering::Relaxed);
    }

    /// From here on the task looks at everything that may ring.
    pub(super) fn listen(&self) {
        // Sees what was written before the rings that this forgets.
        self.state.swap(LOOKING, Ordering::AcqRel);
    }

    /// The task has looked at everything. True: something has rung since.
    pub(super) fn has_rung(&self) -> bool {
        self.state
            .compare_exchange(LOOKING, IDLE, Ordering::AcqRel, Ordering::Acquire)
            .is_err()
    }

    /// The task stops before it has looked at everything, and is to be polled again.
    pub(super) fn call_back(&self) {
        self.state.store(RUNG, Ordering::Release);
        self.task.wake();
    }
}

impl ArcWake for Bell {
    fn wake_by_ref(bell: &Arc<Self>) {
        if bell.state.swap(RUNG, Ordering::AcqRel) == IDLE {
            bell.task.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use futures::task::waker;

    use super::*;

    #[derive(Default)]
    struct Count(AtomicUsize);

    impl ArcWake for Count {
        fn wake_by_ref(count: &Arc<Self>) {
            count.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn a_ring_wakes_an_idle_task_once_and_none_that_is_at_work() {
        let count = Arc::new(Count::default());
        let woken = || count.0.load(Ordering::Relaxed);
        let bell = Arc::new(Bell::default());
        let ring = waker(bell.clone());
        let task = waker(count.clone());

        bell.begin(&task);
        ring.wake_by_ref();
        bell.listen();
        assert!(!bell.has_rung(), "what rang before is being looked at");
        assert_eq!(woken(), 0);

        ring.wake_by_ref();
        ring.wake_by_ref();
        assert_eq!(woken(), 1);

        bell.begin(&task);
        bell.listen();
        ring.wake_by_ref();
        assert!(bell.has_rung(), "it has to look once more");
        bell.listen();
        assert!(!bell.has_rung());
        assert_eq!(woken(), 1, "the task was at work");

        bell.begin(&task);
        bell.call_back();
        assert_eq!(woken(), 2);
        ring.wake_by_ref();
        assert_eq!(woken(), 2, "it is on its way");
    }
}
