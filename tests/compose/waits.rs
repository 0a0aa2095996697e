//! For how long one waits, and how many at a time.

use std::sync::Mutex;
use std::time::Duration;

use futures::FutureExt;
use futures::future::join_all;
use lockstream::store::MemoryStore;
use lockstream::{FutureLockExt, LockError, LockRegistry, OnFinish};
use tokio::time::{Instant, sleep};

use crate::{ms, two};

const fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

/// As long as the registry says: 30 s, if it says nothing.
#[tokio::test(start_paused = true)]
async fn the_default_wait() {
    let (store, here, there) = two();
    let held = here.obtain("k").ttl(secs(3_600)).lease().await.unwrap();
    let hasty = LockRegistry::builder(store.clone()).wait(secs(5));
    let hasty = hasty.build().unwrap();
    for (locks, wait) in [(&there, 30), (&hasty, 5)] {
        let begin = Instant::now();
        assert!(!locks.obtain("k").acquire().await.unwrap());
        assert_eq!(begin.elapsed(), secs(wait));
    }
    let begin = Instant::now();
    let lock = there.obtain("k");
    let give_back = async {
        sleep(secs(29)).await;
        held.release().await.unwrap();
    };
    let (acquired, ()) = tokio::join!(lock.acquire(), give_back);
    assert!(acquired.unwrap());
    assert_eq!(begin.elapsed(), secs(29));
    assert!(lock.release().await.unwrap());
    assert_eq!((store.keys(), there.in_use()), (0, 0));
}

/// As long as the caller says, by the lock or by the call: nothing, a while, for ever.
#[tokio::test(start_paused = true)]
async fn a_given_wait() {
    let (_, here, there) = two();
    let held = here.obtain("k").ttl(secs(9_000)).lease().await.unwrap();
    let lock = there.obtain("k").wait(secs(3));
    for (wait, given) in [
        (secs(3), None),
        (ms(250), Some(ms(250))),
        (secs(600), Some(secs(600))),
        (ms(0), Some(ms(0))),
    ] {
        let begin = Instant::now();
        let acquire = given.map_or_else(|| lock.acquire(), |wait| lock.acquire_within(wait));
        assert!(!acquire.await.unwrap());
        assert_eq!(begin.elapsed(), wait);
        // A guard says the same by an error, and how long it waited.
        let told = lock.lease_within(wait).await.unwrap_err();
        let waits = matches!(told, LockError::NotAcquired { waited, .. } if waited == wait);
        assert!(waits, "{told:?}");
    }
    let begin = Instant::now();
    let give_back = async {
        sleep(secs(7_000)).await;
        held.release().await.unwrap();
    };
    let (acquired, ()) = tokio::join!(lock.acquire_within(Duration::MAX), give_back);
    assert!(acquired.unwrap());
    assert_eq!(begin.elapsed(), secs(7_000));
}

/// Questions that are under way count as well, also of those who would not wait: a server that is slow to answer is not
/// asked by any number of callers. Once the lock is known to be held, who asks is told so, however many wait.
#[tokio::test(start_paused = true)]
async fn a_bounded_queue_at_a_slow_server() {
    let store = MemoryStore::new();
    let locks = LockRegistry::builder(store.clone()).max_waiters(2);
    let lock = locks.build().unwrap().obtain("k").ttl(secs(60));
    store.set_latency(ms(100));
    let handles = [(); 4].map(|()| lock.clone());
    let told = join_all(handles.iter().map(|lock| lock.acquire_once())).await;
    let is_full =
        |told: &Result<bool, LockError>| matches!(told, Err(LockError::QueueFull { limit: 2, .. }));
    assert!(
        matches!(told[..2], [Ok(true), Ok(false)]) && told[2..].iter().all(is_full),
        "{told:?}"
    );
    // Held: two may wait, and any number may ask.
    let mut in_line = [lock.lease(), lock.lease()];
    for waiter in &mut in_line {
        assert!(waiter.now_or_never().is_none());
    }
    let told = join_all(handles[1..].iter().map(|lock| lock.acquire_once())).await;
    assert!(told.into_iter().all(|told| !told.unwrap()));
    assert!(handles[0].release().await.unwrap());
    for waiter in in_line {
        waiter.await.unwrap().release().await.unwrap();
    }
}

/// Without a limit nobody is refused.
#[tokio::test(start_paused = true)]
async fn a_queue_without_bounds() {
    let (_, here, there) = two();
    let held = here.obtain("k").ttl(secs(60)).lease().await.unwrap();
    let lock = there.obtain("k").wait(secs(5));
    let begin = Instant::now();
    let waits: Vec<_> = (0..10_000).map(|_| lock.clone()).collect();
    let told = join_all(waits.iter().map(|lock| lock.acquire())).await;
    assert!(told.into_iter().all(|told| !told.unwrap()));
    assert_eq!(begin.elapsed(), secs(5));
    held.release().await.unwrap();
}

/// At most once a minute, on however many machines: what keys are kept for.
#[tokio::test(start_paused = true)]
async fn a_key_that_is_kept_makes_a_job_run_at_most_once_a_minute() {
    let store = MemoryStore::new();
    let begin = Instant::now();
    let runs = Mutex::new(Vec::new());
    let machine = async |n: u64| {
        let locks = LockRegistry::builder(store.clone()).build().unwrap();
        sleep(ms(137 * n)).await;
        let minute = locks.obtain("report").ttl(secs(60)).wait(ms(0));
        let minute = minute.on_finish(OnFinish::LetExpire);
        while begin.elapsed() < secs(3_600) {
            let job = async { runs.lock().unwrap().push(begin.elapsed()) };
            job.with_lock(&minute).or_skip().await.unwrap();
            sleep(secs(1)).await;
        }
    };
    join_all((0..5).map(machine)).await;
    let runs = runs.into_inner().unwrap();
    assert!(runs.len() >= 59, "{} runs", runs.len());
    for pair in runs.windows(2) {
        let gap = pair[1] - pair[0];
        assert!(gap + ms(1) >= secs(60) && gap <= secs(61), "{gap:?}");
    }
}
