//! Work that moves between threads, runtimes inside of work, and ends on several threads at once.

use std::collections::HashSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::{Duration, Instant};

use futures::FutureExt;
use futures::future::BoxFuture;
use lockstream::store::MemoryStore;
use lockstream::{FutureLockExt, Lease, LockRegistry, OnLost, Renewal};
use tokio::task::{block_in_place, yield_now};
use tokio::time::timeout;

use crate::assert_waited_in_vain;
use crate::scene::{BOUND, BRIEF, KEY, is_busy, ms};

fn two() -> (LockRegistry, LockRegistry) {
    let store = MemoryStore::new();
    let registry = || {
        LockRegistry::builder(store.clone())
            .ttl(Duration::from_secs(60))
            .renewal(Renewal::off())
            .wait(BOUND)
            .build()
            .unwrap()
    };
    (registry(), registry())
}

async fn settles(here: &LockRegistry, there: &LockRegistry) {
    let next = timeout(BOUND, there.obtain(KEY).lease()).await;
    next.expect("it is free").unwrap().release().await.unwrap();
    crate::scene::eventually("nothing is in use", || {
        (here.in_use(), there.in_use()) == (0, 0)
    })
    .await;
}

/// Returns on another thread: while this one is blocked another takes over its tasks, to which ours does not belong just
/// then, and is given out again.
async fn move_on() {
    let here = thread::current().id();
    while thread::current().id() == here {
        block_in_place(|| thread::sleep(Duration::from_micros(100)));
        yield_now().await;
    }
}

/// On a runtime of several threads a task goes wherever one is free.
#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
async fn a_task_that_moves_to_another_thread_keeps_its_frames() {
    let (here, there) = two();
    let task = tokio::spawn({
        let (here, there) = (here.clone(), there.clone());
        async move {
            let nested = here.obtain(KEY).reentrant().wait(BRIEF);
            let lock = here.obtain(KEY);
            let work = lock.with_lease(async |lease| {
                for _ in 0..100 {
                    let inner = async {
                        move_on().await;
                        let guard = nested.lease().await.unwrap();
                        // Dropped on another thread than it was acquired on.
                        move_on().await;
                        assert_eq!(guard.token(), lease.token());
                    };
                    inner.with_lock(&nested).await.unwrap();
                }
                assert!(is_busy(&there).await);
            });
            work.await.unwrap();
        }
    });
    let task = timeout(BOUND, task)
        .await
        .expect("it goes from thread to thread");
    task.unwrap();
    settles(&here, &there).await;
}

/// By hand: every poll on a thread of its own, and what is nested is begun on one and ends on another.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn every_poll_on_another_thread() {
    let (here, there) = two();
    let nested = here.obtain(KEY).reentrant().wait(BRIEF);
    let lock = here.obtain(KEY);
    let work = async move {
        let mut guards = Vec::new();
        for _ in 0..5 {
            let nested = nested.clone();
            let inner = async {
                yield_now().await;
                let guard = nested.lease().await.unwrap();
                yield_now().await;
                guard
            };
            guards.push(inner.with_lock(&nested).await.unwrap());
        }
        let tokens: HashSet<_> = guards.iter().map(Lease::token).collect();
        tokens.len()
    };
    let mut outer: BoxFuture<'static, _> = work.with_lock(lock).boxed();
    let runtime = tokio::runtime::Handle::current();
    let begin = Instant::now();
    let told = loop {
        assert!(begin.elapsed() < BOUND, "it never ends");
        let runtime = runtime.clone();
        let thread = thread::spawn(move || {
            let _inside = runtime.enter();
            let poll = outer.as_mut().poll(&mut Context::from_waker(Waker::noop()));
            (poll, outer)
        });
        let poll: Poll<_>;
        (poll, outer) = thread.join().unwrap();
        if let Poll::Ready(told) = poll {
            break told;
        }
    };
    assert_eq!(told.unwrap(), 1);
    settles(&here, &there).await;
}

/// A runtime that is blocked on inside polls other tasks on this very thread, on top of the work: they are not inside
/// of it. What is blocked on is.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_tasks_of_a_nested_runtime_wait() {
    let (here, there) = two();
    let task = tokio::spawn({
        let here = here.clone();
        async move {
            let nested = here.obtain(KEY).reentrant().wait(BRIEF);
            let lock = here.obtain(KEY);
            let work = lock.with_lease(async |lease| {
                tokio::task::block_in_place(|| {
                    let runtime = tokio::runtime::Builder::new_current_thread()
                        .enable_all()
                        .build()
                        .unwrap();
                    runtime.block_on(async {
                        let (spawned, acquired) =
                            (tokio::spawn(nested.lease()), tokio::spawn(nested.acquire()));
                        assert_waited_in_vain!(spawned.await.unwrap());
                        assert!(!acquired.await.unwrap().unwrap());
                        let guard = nested.lease().await.unwrap();
                        assert_eq!(guard.token(), lease.token());
                    });
                });
                assert_eq!(nested.lease().await.unwrap().token(), lease.token());
            });
            work.await.unwrap();
        }
    });
    task.await.unwrap();
    settles(&here, &there).await;
}

/// Two that share end at the same moment on two threads: one of them gives the lock back, and only one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_that_end_at_once() {
    let (here, there) = two();
    let lock = here.obtain(KEY);
    let nested = here.obtain(KEY).reentrant();
    let mut last = 0;
    for round in 0..400 {
        let carried = async { [nested.lease().await, nested.lease().await] };
        let [left, right] = carried.with_lock(&lock).await.unwrap();
        let (left, right) = (left.unwrap(), right.unwrap());
        assert!(
            left.token().get() > last,
            "the last round's lease is still shared"
        );
        last = left.token().get();
        let start = Arc::new(Barrier::new(2));
        let ends = [left, right].map(|lease| {
            let start = start.clone();
            let release = round % 3 > 0;
            let runtime = tokio::runtime::Handle::current();
            thread::spawn(move || {
                start.wait();
                if release {
                    runtime.block_on(lease.release())
                } else {
                    drop(lease);
                    Ok(())
                }
            })
        });
        for end in ends {
            tokio::task::block_in_place(|| end.join().unwrap().unwrap());
        }
        let next = timeout(BOUND, there.obtain(KEY).lease()).await;
        let next = next.unwrap_or_else(|_| panic!("round {round}: nobody gave it back"));
        next.unwrap().release().await.unwrap();
    }
    settles(&here, &there).await;
}

/// Many leave at the same moment on two threads: nobody's leaving is overlooked.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_that_end_at_once() {
    let (here, there) = two();
    let lock = here.obtain(KEY);
    let nested = here.obtain(KEY).reentrant();
    for round in 0..100 {
        let carried = async {
            let mut carried = [Vec::new(), Vec::new()];
            for guards in &mut carried {
                for _ in 0..200 {
                    guards.push(nested.lease().await.unwrap());
                }
            }
            carried
        };
        let carried = carried.with_lock(&lock).await.unwrap();
        // Threads that spin start closer together than those that sleep.
        let ready = Arc::new(AtomicUsize::new(0));
        let ends = carried.map(|guards| {
            let ready = ready.clone();
            thread::spawn(move || {
                ready.fetch_add(1, Ordering::SeqCst);
                while ready.load(Ordering::SeqCst) < 2 {
                    std::hint::spin_loop();
                }
                drop(guards);
            })
        });
        for end in ends {
            tokio::task::block_in_place(|| end.join().unwrap());
        }
        let next = timeout(BOUND, there.obtain(KEY).lease()).await;
        let next = next.unwrap_or_else(|_| panic!("round {round}: nobody gave it back"));
        next.unwrap().release().await.unwrap();
    }
    settles(&here, &there).await;
}

/// One takes the lease away on another thread while others come and go: they share it, or find it taken.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shared_lease_that_is_detached() {
    let (here, there) = two();
    let lock = here.obtain(KEY).on_lost(OnLost::RunOn);
    let nested = here.obtain(KEY).reentrant();
    for round in 0..200 {
        let work = async {
            let guard = nested.lease().await.unwrap();
            let start = Arc::new(Barrier::new(2));
            let thread = thread::spawn({
                let start = start.clone();
                move || {
                    start.wait();
                    guard.detach().unwrap()
                }
            });
            start.wait();
            let begin = Instant::now();
            while let Some(lease) = nested.lease_once().now_or_never() {
                if lease.unwrap().is_none() {
                    break;
                }
                assert!(begin.elapsed() < BOUND, "it is never taken away");
            }
            thread
        };
        let thread = work.with_lock(&lock).await.unwrap();
        let detached = tokio::task::block_in_place(|| thread.join().unwrap());
        let next = timeout(BOUND, there.adopt(detached)).await;
        let next = next.unwrap_or_else(|_| panic!("round {round}: nobody told"));
        next.unwrap().release().await.unwrap();
    }
    settles(&here, &there).await;
}

/// The outermost ends while a guard that was carried out is dropped elsewhere.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_outermost_and_a_guard_end_at_once() {
    let (here, there) = two();
    let lock = here.obtain(KEY);
    let nested = here.obtain(KEY).reentrant();
    for round in 0..400 {
        let work = async {
            let guard = nested.lease().await.unwrap();
            let start = Arc::new(Barrier::new(2));
            let thread = thread::spawn({
                let start = start.clone();
                move || {
                    start.wait();
                    drop(guard);
                }
            });
            start.wait();
            thread
        };
        let thread = work.with_lock(&lock).await.unwrap();
        tokio::task::block_in_place(|| thread.join().unwrap());
        let next = timeout(BOUND, there.obtain(KEY).lease()).await;
        let next = next.unwrap_or_else(|_| panic!("round {round}: nobody gave it back"));
        next.unwrap().release().await.unwrap();
    }
    settles(&here, &there).await;
}

/// A thread that blocks on the root of a runtime is in no task; neither is another such thread.
#[test]
fn two_threads_in_no_task() {
    let (here, there) = two();
    let runtime = || {
        tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap()
    };
    let nested = here.obtain(KEY).reentrant().wait(ms(100));
    runtime().block_on(async {
        let work = async {
            assert!(nested.lease().await.unwrap().is_valid());
            let own = nested.clone();
            let other = thread::spawn(move || runtime().block_on(own.lease()));
            assert_waited_in_vain!(other.join().unwrap());
        };
        work.with_lock(here.obtain(KEY)).await.unwrap();
        settles(&here, &there).await;
    });
}
