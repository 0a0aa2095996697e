//! Streams under a lock.

use std::cell::Cell;
use std::sync::Arc;
use std::task::Poll;

use futures::stream::{self, FusedStream};
use futures::{Stream, StreamExt, TryStreamExt};
use lockstream::verify::StepVerifier;
use lockstream::{LockError, StreamLockExt};
use tokio::time::{Instant, sleep};

use crate::assert_err;
use crate::world::{World, assert_took, free, idle, is_held, ms, poll_once, waited, waiting};

pub(crate) async fn a_stream_is_held_to_its_end_not_to_its_first_item(w: &dyn World) {
    let [here, there] = w.registries().await;
    let (lock, other) = (here.obtain("k"), there.obtain("k"));
    let token = Cell::new(None);
    let rows =
        lock.with_lease_stream(|lease| stream::iter(1..=3).map(move |row| (row, lease.token())));
    let mut rows = Box::pin(rows);
    assert_eq!(here.in_use(), 0, "nothing is taken before the first poll");
    for expected in 1..=3 {
        let (row, of) = rows.next().await.unwrap().unwrap();
        assert_eq!(row, expected);
        assert_eq!(token.replace(Some(of)).unwrap_or(of), of, "one lease");
        assert!(is_held(&other).await);
        assert!(!other.acquire_once().await.unwrap());
    }
    assert!(rows.next().await.is_none());
    // Its end waits for the release.
    assert!(!is_held(&other).await);
    assert!(other.acquire_once().await.unwrap());
    assert!(rows.next().await.is_none(), "it was fused");
}

pub(crate) async fn a_stream_dropped_half_way_releases(w: &dyn World) {
    let [here, there] = w.registries().await;
    let (lock, other) = (here.obtain("k"), there.obtain("k"));
    for taken in 0..3 {
        let guard = Arc::new(());
        let inside = guard.clone();
        let mut rows = Box::pin(
            stream::iter(0..3)
                .chain(stream::pending())
                .inspect(move |_| assert_eq!(Arc::strong_count(&inside), 2))
                .with_lock(&lock),
        );
        for row in 0..taken {
            assert_eq!(rows.next().await.unwrap().unwrap(), row);
        }
        drop(rows);
        assert_eq!(
            Arc::strong_count(&guard),
            1,
            "the stream outlived its combinator"
        );
        let begin = Instant::now();
        assert!(other.acquire().await.unwrap());
        assert_took(begin, ms(0), w.late());
        assert!(other.release().await.unwrap());
        idle(&here).await;
    }
    // What stops to take ends the lease, too.
    let some: Vec<_> = stream::iter(0..9)
        .with_lock(&lock)
        .take(2)
        .try_collect()
        .await
        .unwrap();
    assert_eq!(some, [0, 1]);
    free(&other).await;
}

pub(crate) async fn a_stream_is_not_polled_while_others_hold_the_lock(w: &dyn World) {
    let [here, there] = w.registries().await;
    let held = here.obtain("k").lease().await.unwrap();
    let polled = Cell::new(false);
    let rows = || stream::iter(0..3).inspect(|_| polled.set(true));
    for registry in [&there, &here] {
        let lock = registry.obtain("k").wait(ms(100));
        let begin = Instant::now();
        let mut busy = Box::pin(rows().with_lock(&lock));
        let error = assert_err!(busy.next().await.unwrap(), NotAcquired, "k");
        assert_took(begin, ms(100), w.late());
        assert!(waited(&error) >= ms(100) && waited(&error) <= ms(100) + w.late());
        assert!(busy.is_terminated());
        assert!(
            busy.next().await.is_none(),
            "an error of the lock is the last item"
        );

        let begin = Instant::now();
        let skipped: Vec<_> = rows()
            .with_lock(&lock)
            .or_skip()
            .try_collect()
            .await
            .unwrap();
        assert_eq!(skipped, [0; 0]);
        assert_took(begin, ms(100), w.late());
    }
    assert!(!polled.get());
    held.release().await.unwrap();
}

pub(crate) async fn a_stream_starts_when_the_lock_is_free(w: &dyn World) {
    let [here, there] = w.registries().await;
    let held = here.obtain("k").lease().await.unwrap();
    let lock = there.obtain("k");
    StepVerifier::try_create(stream::iter([1, 2]).with_lock(&lock))
        .expect_no_event(ms(100))
        .then(async || {
            waiting(&lock, 1).await;
            held.release().await.unwrap();
        })
        .expect_next(1)
        .then(async || assert!(is_held(&lock).await))
        .expect_next(2)
        .expect_complete()
        .verify()
        .await;
    assert!(!is_held(&lock).await);
}

/// A stream's errors are items like any other.
pub(crate) async fn a_streams_own_errors_do_not_end_it(w: &dyn World) {
    #[derive(Debug)]
    enum RowError {
        Lock(LockError),
        Bad(u8),
    }
    impl From<LockError> for RowError {
        fn from(error: LockError) -> Self {
            Self::Lock(error)
        }
    }
    let registry = w.registry().await;
    let lock = registry.obtain("k");
    let rows = || stream::iter([Ok(1), Err(RowError::Bad(2)), Ok(3)]);
    StepVerifier::try_create(rows().try_with_lock(&lock))
        .expect_next(1)
        .expect_error_matches(|error| matches!(error, RowError::Bad(2)))
        .then(async || assert!(is_held(&lock).await))
        .expect_next(3)
        .expect_complete()
        .verify()
        .await;
    assert!(!is_held(&lock).await);
    let with_token = lock.try_with_lease_stream(|_| rows());
    let with_token: Vec<_> = with_token.collect().await;
    assert!(matches!(
        with_token[..],
        [Ok(1), Err(RowError::Bad(2)), Ok(3)]
    ));

    let _held = lock.lease().await.unwrap();
    let busy = rows().try_with_lock(lock.clone().wait(ms(0)));
    StepVerifier::try_create(busy)
        .expect_error_matches(
            |error| matches!(error, RowError::Lock(busy) if busy.is_not_acquired()),
        )
        .expect_complete()
        .verify()
        .await;
    let skipped = rows().try_with_lock(lock.clone().wait(ms(0))).or_skip();
    StepVerifier::try_create(skipped)
        .expect_complete()
        .verify()
        .await;
}

/// One item asked for is one poll: none ahead, none before the lock is held, and none after the end.
pub(crate) async fn back_pressure_is_the_streams_own(w: &dyn World) {
    let [here, there] = w.registries().await;
    let held = there.obtain("k").lease().await.unwrap();
    let (polls, mut numbers) = (Cell::new(0), 1..=3);
    let rows = stream::poll_fn(|_| {
        polls.set(polls.get() + 1);
        Poll::Ready(numbers.next())
    });
    let mut rows = Box::pin(rows.with_lock((&here, "k")));
    assert!(poll_once(&mut rows.next()).await.is_none());
    assert_eq!(polls.get(), 0, "polled before the lock is held");
    let watch = there.obtain("k");
    waiting(&watch, 1).await;
    held.release().await.unwrap();
    sleep(ms(5)).await;
    assert_eq!(polls.get(), 0, "polled though nobody asks");
    for row in 1..=3 {
        assert_eq!(rows.next().await.unwrap().unwrap(), row);
        sleep(ms(5)).await;
        assert_eq!(polls.get(), row);
        assert!(is_held(&watch).await, "held between items");
    }
    assert!(rows.next().await.is_none() && rows.is_terminated());
    assert!(rows.next().await.is_none(), "and ends again");
    assert_eq!(polls.get(), 4);
}

pub(crate) async fn a_stream_that_is_slow_is_waited_for_under_the_lease(w: &dyn World) {
    let registry = w.registry().await;
    let lock = registry.obtain("k");
    let rows = stream::iter(0..3).then(async |row| {
        sleep(ms(50)).await;
        row
    });
    let mut rows = Box::pin(rows.with_lock(&lock));
    assert!(
        poll_once(&mut rows.next()).await.is_none(),
        "a row takes its time"
    );
    let begin = Instant::now();
    let rows: Vec<_> = rows.try_collect().await.unwrap();
    assert_eq!(rows, [0, 1, 2]);
    assert_took(begin, ms(150), w.late());
    assert!(!is_held(&lock).await);
}

pub(crate) async fn done_streams_say_so(w: &dyn World) {
    let registry = w.registry().await;
    let lock = registry.obtain("k");
    let rows = stream::iter([1]).with_lock(&lock);
    assert_eq!(rows.size_hint(), (0, Some(2)), "or an error, or both");
    let mut rows = Box::pin(rows.or_skip());
    assert!(!rows.is_terminated());
    assert_eq!(rows.size_hint().0, 0, "it may end with an error, or empty");
    assert_eq!(rows.try_next().await.unwrap(), Some(1));
    assert!(!rows.is_terminated());
    assert_eq!(rows.try_next().await.unwrap(), None);
    assert!(rows.is_terminated());
    assert_eq!(rows.size_hint(), (0, Some(0)));
    assert_eq!(rows.try_next().await.unwrap(), None);
    let mut empty = Box::pin(stream::empty::<u8>().with_lock(&lock));
    assert!(empty.next().await.is_none());
    assert!(empty.is_terminated());
    assert!(!is_held(&lock).await);
}
