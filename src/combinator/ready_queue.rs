use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Wake, Waker};

use crate::base::mutex::Mutex;
use crate::base::sync::{AtomicBool, AtomicWaker};

/// Which of many futures have woken since they were last polled, in that order. So a poll of all of them costs no more
/// than those that can go on.
#[derive(Debug, Default)]
pub(super) struct ReadyQueue {
    ready: Mutex<VecDeque<u64>>,
    /// Of the task that polls them.
    task: AtomicWaker,
}

/// Wakes one of the futures.
#[derive(Debug)]
pub(super) struct ReadyWaker {
    id: u64,
    /// Whether it is in the queue.
    is_ready: AtomicBool,
    queue: Arc<ReadyQueue>,
}

impl ReadyQueue {
    /// To be called at the beginning of a poll: what wakes after that wakes the task.
    pub(super) fn register(&self, task: &Waker) {
        self.task.register(task);
    }

    pub(super) fn pop(&self) -> Option<u64> {
        self.ready.lock().pop_front()
    }

    pub(super) fn len(&self) -> usize {
        self.ready.lock().len()
    }
}

impl ReadyWaker {
    pub(super) fn new(id: u64, queue: &Arc<ReadyQueue>) -> Arc<Self> {
        Arc::new(Self {
            id,
            is_ready: AtomicBool::new(false),
            queue: queue.clone(),
        })
    }

    /// To be called before each poll of the future: what wakes it after that puts it in the queue.
    pub(super) fn begin_poll(&self) {
        self.is_ready.swap(false, Ordering::AcqRel);
    }
}

impl Wake for ReadyWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if !self.is_ready.swap(true, Ordering::AcqRel) {
            self.queue.ready.lock().push_back(self.id);
            self.queue.task.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::task::Poll;

    use shuttle::future::block_on;
    use shuttle::thread;

    use super::*;
    use crate::base::model::check;
    use crate::base::sync::AtomicU64;

    /// Two futures wake while a task takes them, one of them twice. Each is seen after its last wake.
    ///
    /// Finds: the task registers after it has looked, `begin_poll` after the poll, or a wake that marks the future after it
    /// has put it in the queue.
    #[test]
    fn model_each_future_that_wakes_is_polled() {
        check(|| {
            let queue = Arc::new(ReadyQueue::default());
            let wakers = [ReadyWaker::new(0, &queue), ReadyWaker::new(1, &queue)];
            let counts = Arc::new([AtomicU64::new(0), AtomicU64::new(0)]);
            let threads = [2, 1].into_iter().enumerate().map(|(id, times)| {
                let (waker, counts) = (wakers[id].clone(), counts.clone());
                thread::spawn(move || {
                    for _ in 0..times {
                        counts[id].fetch_add(1, Ordering::SeqCst);
                        waker.wake_by_ref();
                    }
                })
            });
            let threads: Vec<_> = threads.collect();
            let mut seen = [0, 0];
            block_on(poll_fn(|cx| {
                queue.register(cx.waker());
                while let Some(id) = queue.pop() {
                    let id = id as usize;
                    wakers[id].begin_poll();
                    seen[id] = counts[id].load(Ordering::SeqCst);
                }
                match seen == [2, 1] {
                    true => Poll::Ready(()),
                    false => Poll::Pending,
                }
            }));
            threads
                .into_iter()
                .for_each(|thread| thread.join().unwrap());
        });
    }
}
