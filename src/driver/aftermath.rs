use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::task::Waker;

use super::few::Few;
use crate::wake::wake_soon;

/// So many that are woken together are woken at the runtime's next look for work.
///
/// Woken one by one, each but the first has the runtime wake another worker, which on few processors
/// takes the waker's own, runs that one task and sleeps again: 160 to 180 switches of threads for
/// 1,000 pairs at 64 tasks where 11 to 19 are enough, and 8 µs for a task that takes 2.6.
const CROWD: usize = 4;

/// What is done about verdicts once no lock is held: wakers and the log run other people's code.
#[derive(Default)]
pub(super) struct Aftermath {
    pub(super) wakers: Few<Waker>,
    /// Keys and tokens of lost leases, and whether their time was over.
    pub(super) lost: Few<(Arc<str>, u64, bool)>,
}

impl Aftermath {
    pub(super) fn come(&mut self) {
        self.lost.drain(|(key, token, is_over)| {
            let key = &*key;
            if is_over {
                tracing::warn!(key, token, "lease lost: its ttl was over before its work");
            } else {
                tracing::warn!(
                    key,
                    token,
                    "lease lost: the store has it no more, its key was deleted or overwritten"
                );
            }
        });
        if self.wakers.len() >= CROWD {
            let mut crowd = Vec::with_capacity(self.wakers.len());
            self.wakers.drain(|waker| crowd.push(waker));
            wake_soon(crowd);
            return;
        }
        self.wakers.drain(|waker| {
            // One that panics has told so by the panic hook; the others are to be woken all the same.
            let _ = catch_unwind(AssertUnwindSafe(|| waker.wake()));
        });
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use futures::task::{ArcWake, waker};

    use super::*;

    #[derive(Default)]
    struct Count(AtomicUsize);

    impl ArcWake for Count {
        fn wake_by_ref(count: &Arc<Self>) {
            count.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn come(crowd: usize) -> Vec<Arc<Count>> {
        let counts: Vec<_> = (0..crowd).map(|_| Arc::<Count>::default()).collect();
        let mut aftermath = Aftermath::default();
        aftermath.wakers.extend(counts.iter().cloned().map(waker));
        aftermath.come();
        counts
    }

    fn woken(counts: &[Arc<Count>]) -> usize {
        let once = |count: &&Arc<Count>| count.0.load(Ordering::Relaxed) == 1;
        counts.iter().filter(once).count()
    }

    #[test]
    fn a_crowd_is_woken_at_once_where_there_is_no_runtime() {
        assert_eq!(woken(&come(3 * CROWD)), 3 * CROWD);
    }

    #[tokio::test]
    async fn a_crowd_is_woken_together_and_a_few_at_once() {
        assert_eq!(woken(&come(CROWD - 1)), CROWD - 1);
        let crowd = come(3 * CROWD);
        assert_eq!(woken(&crowd), 0);
        tokio::task::yield_now().await;
        assert_eq!(woken(&crowd), 3 * CROWD, "each of them, once");
    }
}
