//! `Lock` handles: who is a contender, who holds, and what a drop does.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use futures::FutureExt;
use lockstream::{FutureLockExt, Lock, LockError, Mode, OnFinish};
use tokio::time::Instant;
use tracing::Level;

use crate::assert_err;
use crate::hearing::Log;
use crate::world::{SOON, World, assert_took, eventually, free, is_held, ms, poll_once};

pub(crate) async fn a_clone_is_a_contender_of_its_own(w: &dyn World) {
    let registry = w.registry().await;
    let lock = registry.obtain("k");
    assert!(lock.acquire().await.unwrap());
    let clone = lock.clone();
    assert!(!clone.is_acquired());
    assert!(!clone.acquire_once().await.unwrap());
    assert!(!clone.release().await.unwrap());
    let set = lock.clone().wait(ms(10));
    assert!(!set.is_acquired());
    assert!(!set.acquire().await.unwrap());
    drop((clone, set));
    assert!(lock.is_acquired() && is_held(&lock).await);
    // The handle that a setter takes is gone, and what it held with it.
    let set = lock.wait(ms(10));
    assert!(!set.is_acquired());
    free(&set).await;
    assert!(!set.release().await.unwrap());
}

pub(crate) async fn a_shared_handle_is_one_contender(w: &dyn World) {
    let registry = w.registry().await;
    let lock = Arc::new(registry.obtain("k"));
    let shared = lock.clone();
    tokio::spawn(async move { assert!(shared.acquire().await.unwrap()) })
        .await
        .unwrap();
    assert!(lock.is_acquired());
    let by_reference = &*lock;
    assert!(by_reference.release().await.unwrap());
    assert!(!lock.is_acquired());
}

/// Held or not, a handle that acquires waits like anybody else, behind itself if need be.
pub(crate) async fn acquiring_a_held_handle_waits(w: &dyn World) {
    let registry = w.registry().await;
    let lock = registry.obtain("k");
    assert!(lock.acquire().await.unwrap());
    assert!(!lock.acquire_once().await.unwrap());
    assert!(lock.is_acquired(), "a vain attempt lost what it held");
    let begin = Instant::now();
    assert!(!lock.acquire_within(ms(100)).await.unwrap());
    assert_took(begin, ms(100), w.late());
    assert!(lock.is_acquired());
    let mut again = lock.acquire();
    assert!(poll_once(&mut again).await.is_none());
    assert!(lock.release().await.unwrap());
    assert!(again.await.unwrap());
    assert!(lock.is_acquired());
    assert!(lock.release().await.unwrap());
    assert!(!lock.release().await.unwrap());
}

/// Both said `true`, and the first lease was released in silence: a handle that several tasks shared let everybody in.
pub(crate) async fn a_handle_has_one_shared_lease(w: &dyn World) {
    let [here, there] = w.registries().await;
    let handles = [here.obtain("k").shared(), here.obtain("k").permits(4)];
    for lock in handles {
        let clone = lock.clone();
        assert!(lock.acquire().await.unwrap());
        let token = here.snapshot().keys[0].held[0].token;
        assert_err!(lock.acquire().await, HandleInUse, "k");
        assert_err!(lock.acquire_once().await, HandleInUse, "k");
        assert_err!(lock.acquire_within(ms(100)).await, HandleInUse, "k");
        assert_eq!(here.snapshot().keys[0].held[0].token, token);
        assert!(lock.is_acquired());
        // A clone is a caller of its own, and so is a guard.
        assert!(clone.acquire().await.unwrap());
        let guard = lock.lease().await.unwrap();
        assert_eq!(lock.inspect().await.unwrap().holders.len(), 3);
        guard.release().await.unwrap();
        assert!(clone.release().await.unwrap());
        assert!(lock.release().await.unwrap());
        assert!(!lock.release().await.unwrap());

        // One that is under way counts, from its first poll until it is dropped.
        let held = there.obtain("k").lease().await.unwrap();
        let unpolled = lock.acquire();
        let mut first = lock.acquire();
        assert!(poll_once(&mut first).await.is_none());
        assert_err!(lock.acquire().await, HandleInUse, "k");
        drop(first);
        let mut next = lock.acquire();
        assert!(poll_once(&mut next).await.is_none());
        held.release().await.unwrap();
        assert!(next.await.unwrap());
        assert!(lock.release().await.unwrap());
        assert!(unpolled.await.unwrap());
        assert!(lock.release().await.unwrap());
        free(&there.obtain("k")).await;
    }
}

/// As many hold it as the store says, whoever shares a handle.
pub(crate) async fn many_that_share_a_handle_meet_nobody(w: &dyn World) {
    let [here, there] = w.registries().await;
    let locks = [
        (here.obtain("k"), 1),
        (here.obtain("k").shared(), 8),
        (here.obtain("k").permits(2), 2),
    ];
    for (lock, most) in locks {
        let lock = Arc::new(lock);
        let writer = there.obtain("k");
        let inside = Arc::new(AtomicUsize::new(0));
        let tasks = (0..8).map(|n| {
            let inside = inside.clone();
            // Half of them share one handle.
            let lock = if n % 2 == 0 {
                lock.clone()
            } else {
                Arc::new((*lock).clone())
            };
            tokio::spawn(async move {
                let mut served = 0;
                for _ in 0..5 {
                    match lock.acquire().await {
                        Ok(true) => {
                            let before = inside.fetch_add(1, Ordering::SeqCst);
                            assert!(before < most, "{before} beside one of {most}");
                            tokio::time::sleep(ms(2)).await;
                            inside.fetch_sub(1, Ordering::SeqCst);
                            assert!(lock.release().await.unwrap());
                            served += 1;
                        }
                        Ok(false) => {}
                        Err(error) => {
                            assert!(matches!(error, LockError::HandleInUse { .. }), "{error}");
                            tokio::time::sleep(ms(1)).await;
                        }
                    }
                }
                served
            })
        });
        let tasks: Vec<_> = tasks.collect();
        let mut served = 0;
        for task in tasks {
            served += task.await.unwrap();
        }
        assert!(served > 20, "{served}");
        free(&writer).await;
    }
}

/// The release of the one that had lost its lease said `true`, and freed the key under the next.
pub(crate) async fn who_has_lost_does_not_release_the_next(w: &dyn World) {
    let registry = w.registry().await;
    let handles = [registry.obtain("k"), registry.obtain("k").shared()];
    for lock in handles {
        let lock = lock.ttl(ms(2500));
        assert!(lock.acquire().await.unwrap());
        // By then it would be had, if it were another handle's.
        let begin = Instant::now();
        if lock.inspect().await.unwrap().holders[0].mode == Mode::Exclusive {
            assert_err!(lock.acquire().await, HandleInUse, "k");
        }
        tokio::time::sleep_until(begin + ms(2500)).await;
        // One that was long in coming was renewed once (W3).
        eventually("its lease is over", async || {
            let keys = registry.snapshot().keys;
            keys.iter().all(|key| key.held.is_empty())
        })
        .await;
        assert_err!(lock.acquire().await, HandleInUse, "k");
        assert_err!(lock.acquire_once().await, HandleInUse, "k");
        let other = lock.clone();
        assert!(other.acquire().await.unwrap());
        assert_err!(lock.release().await, Lost, "k");
        assert!(other.is_acquired());
        assert!(is_held(&lock).await);
        // Told once. From then on it acquires again.
        assert!(!lock.release().await.unwrap());
        assert!(other.release().await.unwrap());
        assert!(lock.acquire().await.unwrap());
        assert!(lock.release().await.unwrap());
    }
    // An acquisition that waited meanwhile gives the key back, whatever `on_finish` says.
    let kept = OnFinish::KeepFor(ms(60_000));
    let lock = registry.obtain("k").ttl(ms(1300)).on_finish(kept);
    assert!(lock.acquire().await.unwrap());
    let mut second = lock.acquire();
    assert!(poll_once(&mut second).await.is_none());
    w.expire("k");
    assert_err!(second.await, HandleInUse, "k");
    assert_err!(lock.release().await, Lost, "k");
    free(&registry.obtain("k")).await;
}

/// What `lease` brings is the guard's, not the handle's.
pub(crate) async fn a_guard_is_not_the_handles(w: &dyn World) {
    let registry = w.registry().await;
    let lock = registry.obtain("k");
    let lease = lock.lease().await.unwrap();
    assert!(!lock.is_acquired());
    assert!(!lock.release().await.unwrap());
    drop(lock);
    assert!(lease.is_valid());
    let lock = registry.obtain("k");
    assert!(!lock.acquire_once().await.unwrap());
    drop(lease);
    free(&lock).await;
}

/// Both ways to release again: told once, and then that nothing was held.
pub(crate) async fn a_second_release_says_that_nothing_was_held(w: &dyn World) {
    let registry = w.registry().await;
    let lock = registry.obtain("k");
    assert!(!lock.release().await.unwrap());
    assert!(lock.acquire().await.unwrap());
    let both = tokio::join!(lock.release(), lock.release());
    assert_eq!((both.0.unwrap(), both.1.unwrap()), (true, false));
    assert!(!lock.release().await.unwrap());
    // Unpolled it has done nothing.
    assert!(lock.acquire().await.unwrap());
    drop(lock.release());
    assert!(lock.is_acquired());
    // Once polled it goes on when it is dropped.
    w.set_latency(ms(20));
    let mut release = lock.release();
    assert!(poll_once(&mut release).await.is_none());
    drop(release);
    assert!(!lock.is_acquired());
    w.set_latency(ms(0));
    free(&lock).await;
}

pub(crate) async fn a_guards_release_goes_on_when_dropped(w: &dyn World) {
    let registry = w.registry().await;
    let lock = registry.obtain("k");
    let begin = Instant::now();
    drop(lock.lease().await.unwrap().release());
    free(&lock).await;
    w.set_latency(ms(20));
    let mut release = lock.lease().await.unwrap().release();
    assert!(poll_once(&mut release).await.is_none());
    drop(release);
    w.set_latency(ms(0));
    free(&lock).await;
    assert!(begin.elapsed() < SOON);
}

pub(crate) async fn a_held_handle_dropped_releases_and_warns(w: &dyn World) {
    let [here, there] = w.registries().await;
    let log = Log::default();
    let lock = here.obtain("the key");
    assert!(lock.acquire().await.unwrap());
    during(&log, || drop(lock));
    assert!(log.text().contains("WARN"), "{}", log.text());
    assert!(log.text().contains("the key"), "{}", log.text());
    let begin = Instant::now();
    let other = there.obtain("the key");
    assert!(other.acquire().await.unwrap());
    assert_took(begin, ms(0), w.late());

    // What is not held is dropped in silence.
    assert!(other.release().await.unwrap());
    let silent = Log::default();
    during(&silent, || drop(other));
    let lease = there.obtain("the key").lease().await.unwrap();
    during(&silent, || drop(lease));
    let held = there.obtain("the key").ttl(ms(500));
    assert!(held.acquire().await.unwrap());
    // The library's own timer tells the loss: a drop before that tells it here.
    eventually("the loss is told", async || {
        let keys = there.snapshot().keys;
        keys.iter().all(|key| key.held.is_empty())
    })
    .await;
    during(&silent, || drop(held));
    assert_eq!(silent.text(), "");
}

/// `if registry.obtain(k).acquire_once().await? { … }`: nothing is held when the block begins, and that is told.
pub(crate) async fn a_temporary_handle_releases_at_once_and_warns(w: &dyn World) {
    let registry = w.registry().await;
    let acquire = registry.obtain("k").acquire();
    let mut acquire = Box::pin(acquire);
    let log = Log::default();
    let begin = Instant::now();
    let acquired = loop {
        // Polled by hand, since a log is of one thread.
        let waker = futures::task::noop_waker();
        let polled = during(&log, || {
            acquire
                .as_mut()
                .poll(&mut std::task::Context::from_waker(&waker))
        });
        match polled {
            std::task::Poll::Ready(acquired) => break acquired,
            std::task::Poll::Pending => tokio::time::sleep(ms(1)).await,
        }
    };
    assert!(acquired.unwrap());
    assert!(log.text().contains("WARN"), "{}", log.text());
    free(&registry.obtain("k")).await;
    assert!(begin.elapsed() < SOON);
}

/// `lock.acquire().await?;` went on unlocked after a wait in vain, and so did the release, without a word.
pub(crate) async fn a_release_after_a_refusal_is_told(w: &dyn World) {
    let [here, there] = w.registries().await;
    let held = there.obtain("k").lease().await.unwrap();
    let log = Log::default();
    let lock = here.obtain("k");
    let told = || {
        let mut lines = log.take();
        lines.retain(|line| line.contains("was not acquired"));
        lines
    };
    let release = async || {
        let mut release = lock.release();
        during(&log, || {
            let released = std::pin::pin!(&mut release).now_or_never();
            assert!(!released.expect("nothing is sent").unwrap());
        });
    };
    // Whoever never asked, or was told otherwise, is told nothing.
    release().await;
    assert_eq!(told(), [""; 0]);
    let line = line!() + 1;
    assert!(!lock.acquire_within(ms(20)).await.unwrap());
    release().await;
    let lines = told();
    let [warning] = &lines[..] else {
        panic!("{lines:?}");
    };
    let place = format!("acquire={}:{line}:", file!());
    for part in ["WARN", "key=\"k\"", &place] {
        assert!(warning.contains(part), "no {part} in {warning}");
    }
    release().await;
    assert_eq!(told(), [""; 0], "once");
    // One who asks the handle has looked.
    assert!(!lock.acquire_once().await.unwrap());
    assert!(!lock.is_acquired());
    release().await;
    assert!(!lock.acquire_once().await.unwrap());
    assert!(lock.view().is_none());
    release().await;
    assert_eq!(told(), [""; 0]);
    held.release().await.unwrap();
    assert!(lock.acquire().await.unwrap());
    assert!(!lock.acquire_once().await.unwrap(), "behind itself");
    assert!(lock.release().await.unwrap());
    release().await;
    assert_eq!(told(), [""; 0]);
}

/// The work's own lock is the combinator's: a handle that made it neither holds nor ends it.
pub(crate) async fn a_combinator_outlives_the_handle_that_made_it(w: &dyn World) {
    let registry = w.registry().await;
    let work = {
        let lock: Lock = registry.obtain("k");
        async { is_held(&registry.obtain("k")).await }.with_lock(&lock)
    };
    assert!(work.await.unwrap());
}

/// What this thread logs while a closure runs is kept.
fn during<T>(log: &Log, f: impl FnOnce() -> T) -> T {
    let _logging = log.hear(Level::WARN);
    f()
}
