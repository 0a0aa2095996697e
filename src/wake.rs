//! Waking many tasks at once.

use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use futures::task::{ArcWake, waker};

/// Tasks that are woken together.
struct Crowd(Mutex<Sleepers>);

#[derive(Default)]
struct Sleepers {
    wakers: Vec<Waker>,
    /// What wakes the crowd. It is kept until it has: who drops a future is owed no wake-up by it.
    yielding: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
}

impl Crowd {
    fn sleepers(&self) -> MutexGuard<'_, Sleepers> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wake_all(&self) {
        let sleepers = std::mem::take(&mut *self.sleepers());
        for waker in sleepers.wakers {
            // One that panics has told so by the panic hook; the others are to be woken all the same.
            let _ = catch_unwind(AssertUnwindSafe(|| waker.wake()));
        }
    }
}

impl ArcWake for Crowd {
    fn wake_by_ref(crowd: &Arc<Self>) {
        crowd.wake_all();
    }
}

/// Has the runtime wake them when it wakes those that yield: once this worker has nothing else to do, or has
/// polled some 60 others, and before it sleeps. Outside of a runtime, at once.
pub(crate) fn wake_soon(wakers: Vec<Waker>) {
    let crowd = Arc::new(Crowd(Mutex::new(Sleepers {
        wakers,
        yielding: None,
    })));
    let mut yielding = Box::pin(tokio::task::yield_now());
    let waker = waker(crowd.clone());
    match yielding.as_mut().poll(&mut Context::from_waker(&waker)) {
        Poll::Ready(()) => crowd.wake_all(),
        Poll::Pending => {
            let mut sleepers = crowd.sleepers();
            if !sleepers.wakers.is_empty() {
                sleepers.yielding = Some(yielding);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use futures::future::join_all;
    use tokio::sync::Barrier;

    use super::*;

    #[derive(Default)]
    struct Count(AtomicUsize);

    impl ArcWake for Count {
        fn wake_by_ref(count: &Arc<Self>) {
            count.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    struct Panics;

    impl ArcWake for Panics {
        fn wake_by_ref(_: &Arc<Self>) {
            panic!("a waker of somebody's own");
        }
    }

    fn counted(many: usize) -> (Vec<Arc<Count>>, Vec<Waker>) {
        let counts: Vec<_> = (0..many).map(|_| Arc::<Count>::default()).collect();
        let wakers = counts.iter().cloned().map(waker).collect();
        (counts, wakers)
    }

    fn woken(counts: &[Arc<Count>]) -> Vec<usize> {
        let times = |count: &Arc<Count>| count.0.load(Ordering::Relaxed);
        counts.iter().map(times).collect()
    }

    #[test]
    fn at_once_where_there_is_no_runtime() {
        let (counts, wakers) = counted(3);
        wake_soon(wakers);
        assert_eq!(woken(&counts), [1; 3]);
        assert!(counts.iter().all(|count| Arc::strong_count(count) == 1));
    }

    #[tokio::test]
    async fn once_others_have_had_their_turn() {
        let (counts, wakers) = counted(3);
        wake_soon(wakers);
        assert_eq!(woken(&counts), [0; 3]);
        tokio::task::yield_now().await;
        assert_eq!(woken(&counts), [1; 3]);
        assert!(counts.iter().all(|count| Arc::strong_count(count) == 1));
    }

    #[tokio::test]
    async fn one_that_panics_keeps_nobody_from_being_woken() {
        let (counts, mut wakers) = counted(2);
        wakers.insert(1, waker(Arc::new(Panics)));
        wake_soon(wakers);
        tokio::task::yield_now().await;
        assert_eq!(woken(&counts), [1; 2]);
    }

    /// A runtime that ends before it comes to it keeps nothing.
    #[test]
    fn nothing_is_kept_by_a_runtime_that_ends() {
        let (counts, wakers) = counted(3);
        let runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = { runtime }.build().unwrap();
        runtime.block_on(async { wake_soon(wakers) });
        drop(runtime);
        assert!(counts.iter().all(|count| Arc::strong_count(count) == 1));
    }

    /// From tasks, from within a blocking part of one, and from threads of their own, round after round.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn nobody_is_forgotten() {
        const CROWD: usize = 16;
        for round in 0..300 {
            let all_wait = Arc::new(Barrier::new(CROWD + 1));
            let sleepers: Arc<Mutex<Vec<Waker>>> = Arc::default();
            let tasks = (0..CROWD).map(|_| {
                let (all_wait, sleepers) = (all_wait.clone(), sleepers.clone());
                tokio::spawn(async move {
                    let mut is_asleep = false;
                    let sleeps = std::future::poll_fn(|cx| {
                        if std::mem::replace(&mut is_asleep, true) {
                            return Poll::Ready(());
                        }
                        sleepers.lock().unwrap().push(cx.waker().clone());
                        Poll::Pending
                    });
                    tokio::join!(sleeps, all_wait.wait());
                })
            });
            let tasks: Vec<_> = tasks.collect();
            all_wait.wait().await;
            let wakers = std::mem::take(&mut *sleepers.lock().unwrap());
            assert_eq!(wakers.len(), CROWD);
            match round % 3 {
                0 => wake_soon(wakers),
                1 => tokio::task::block_in_place(|| wake_soon(wakers)),
                _ => std::thread::spawn(|| wake_soon(wakers)).join().unwrap(),
            }
            tokio::time::timeout(Duration::from_secs(10), join_all(tasks))
                .await
                .expect("all are woken");
        }
    }
}
