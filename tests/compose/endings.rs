use std::future::{pending, ready};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use futures::{FutureExt, Stream, StreamExt, stream};
use lockstream::{FutureLockExt, LeaseView, LockError, LockRegistry, OnLost, StreamLockExt};
use tokio::time::{Instant, sleep, timeout};

use crate::{ms, two};

async fn broken() {
    tokio::task::yield_now().await;
    panic!("broken");
}

fn broken_rows() -> impl Stream<Item = u8> {
    stream::iter(0..3).inspect(|row| assert_ne!(*row, 2, "broken"))
}

/// A panic unwinds through the lock, which is released: caught on the spot, in a task, before the work began.
#[tokio::test(start_paused = true)]
async fn a_panic_releases() {
    let (store, here, _) = two();
    let lock = here.obtain("k");
    let caught = AssertUnwindSafe(broken().with_lock(&lock))
        .catch_unwind()
        .await;
    assert!(caught.is_err() && store.keys() == 0);
    let task = tokio::spawn(broken().with_lock(&lock));
    assert!(task.await.unwrap_err().is_panic() && store.keys() == 0);
    let begin = |_: LeaseView| -> futures::future::Ready<()> { panic!("broken") };
    let caught = AssertUnwindSafe(lock.with_lease(begin))
        .catch_unwind()
        .await;
    assert!(caught.is_err() && store.keys() == 0);
    let caught = AssertUnwindSafe(lock.lead(|_| broken()))
        .catch_unwind()
        .await;
    assert!(caught.is_err() && store.keys() == 0);
    let rows = StreamLockExt::with_lock(broken_rows(), &lock);
    let caught = AssertUnwindSafe(rows.count()).catch_unwind().await;
    assert!(caught.is_err() && store.keys() == 0);
    assert_eq!(here.in_use(), 0);
}

/// A future that panicked may be kept: it holds, and lets go when it is dropped.
#[tokio::test(start_paused = true)]
async fn a_future_that_panicked_lets_go_when_dropped() {
    let (store, here, _) = two();
    let mut locked = broken().with_lock((&here, "k")).boxed();
    let caught = AssertUnwindSafe(locked.as_mut()).catch_unwind().await;
    assert!(caught.is_err());
    drop(locked);
    assert_eq!((store.keys(), here.in_use()), (0, 0));
}

/// The value is only delivered when the key is free for the next.
#[tokio::test(start_paused = true)]
async fn completion_waits_for_the_release() {
    let (store, here, there) = two();
    store.set_latency(ms(10));
    let begin = Instant::now();
    assert_eq!(ready(1).with_lock((&here, "k")).await.unwrap(), 1);
    assert_eq!(begin.elapsed(), ms(20));
    assert_eq!(store.keys(), 0);
    let rows = StreamLockExt::with_lock(stream::iter([1]), (&there, "k"));
    assert_eq!(rows.count().await, 1);
    assert_eq!((begin.elapsed(), store.keys()), (ms(40), 0));
}

/// A store that is away at the end costs one response time-out, not the value.
#[tokio::test(start_paused = true)]
async fn a_store_that_is_away_at_the_end_does_not_cost_the_value() {
    let (store, here, there) = two();
    let begin = Instant::now();
    let own = store.clone();
    let work = async move {
        own.set_offline(true);
        7
    };
    assert_eq!(work.with_lock((&here, "k")).await.unwrap(), 7);
    assert_eq!(begin.elapsed(), ms(1_000));
    store.set_offline(false);
    let next = timeout(ms(10), there.obtain("k").lease()).await;
    next.expect("the release went on behind")
        .unwrap()
        .release()
        .await
        .unwrap();
}

/// The work is dropped the moment the lease is lost, and not polled once more.
#[tokio::test(start_paused = true)]
async fn work_that_outlives_its_lease_is_dropped() {
    let (_, here, there) = two();
    let lock = here.obtain("k").ttl(ms(1_000));
    let polls = Arc::new(AtomicUsize::new(0));
    let own = polls.clone();
    let work = async move {
        loop {
            own.fetch_add(1, Ordering::SeqCst);
            sleep(ms(100)).await;
        }
    };
    let begin = Instant::now();
    let told = lock.with_lease(|_| work.map(|()| 7)).await;
    assert!(matches!(told, Err(LockError::Lost { .. })), "{told:?}");
    assert_eq!(begin.elapsed(), ms(1_000 - 10 - 2));
    let polled = polls.load(Ordering::SeqCst);
    assert!(there.obtain("k").acquire_within(ms(100)).await.unwrap());
    sleep(ms(500)).await;
    assert_eq!(polls.load(Ordering::SeqCst), polled);
}

#[tokio::test(start_paused = true)]
async fn work_may_be_told_to_run_on() {
    let locks = LockRegistry::in_memory();
    let lock = locks.obtain("k").ttl(ms(100)).on_lost(OnLost::RunOn);
    let told = lock
        .with_lease(async |lease| {
            sleep(ms(300)).await;
            (lease.is_valid(), lease.lost().now_or_never().is_some())
        })
        .await;
    assert_eq!(told.unwrap(), (false, true));
    let slow = stream::iter(0..3).then(async |row| {
        sleep(ms(80)).await;
        row
    });
    let rows: Vec<_> = StreamLockExt::with_lock(slow, &lock).collect().await;
    assert!(
        rows.len() == 3 && rows.iter().all(Result::is_ok),
        "{rows:?}"
    );
    assert_eq!(locks.in_use(), 0);
}

/// The error wins over a value that came in the very poll in which the lease ran out.
#[tokio::test]
async fn a_value_that_comes_too_late_is_not_delivered() {
    let locks = LockRegistry::in_memory();
    let lock = locks.obtain("k").ttl(ms(40));
    let late = async {
        std::thread::sleep(ms(60));
        7
    };
    let told = late.with_lock(&lock).await;
    assert!(matches!(told, Err(LockError::Lost { .. })), "{told:?}");
    let late = stream::iter([7]).inspect(|_| std::thread::sleep(ms(60)));
    let told: Vec<_> = StreamLockExt::with_lock(late, &lock).collect().await;
    assert!(
        matches!(told[..], [Ok(7), Err(LockError::Lost { .. })]),
        "{told:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_ends_the_work() {
    let (store, here, _) = two();
    let locked = tokio::spawn(pending::<()>().with_lock((&here, "k")));
    let waiting = tokio::spawn(pending::<()>().with_lock((&here, "k")));
    let rows =
        StreamLockExt::with_lock(stream::iter([1]).chain(stream::pending()), (&here, "rows"));
    let mut rows = Box::pin(rows);
    assert!(rows.next().await.unwrap().is_ok());
    here.shutdown().await;
    for told in [locked.await.unwrap(), waiting.await.unwrap()] {
        assert!(matches!(told, Err(LockError::Closed { .. })), "{told:?}");
    }
    let told = rows.next().await;
    assert!(
        matches!(told, Some(Err(LockError::Closed { .. }))),
        "{told:?}"
    );
    assert!(rows.next().await.is_none());
    assert_eq!((store.keys(), here.in_use()), (0, 0));
}
