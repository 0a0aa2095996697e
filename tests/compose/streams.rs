use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};

use futures::stream::FusedStream;
use futures::{FutureExt, Stream, StreamExt, TryStreamExt, stream};
use lockstream::verify::StepVerifier;
use lockstream::{LockError, LockRegistry, StreamLockExt, Token};
use tokio::time::sleep;

use crate::{ms, two};

/// Counts how often it is asked.
struct Counted<S>(S, Arc<AtomicUsize>);

impl<S: Stream + Unpin> Stream for Counted<S> {
    type Item = S::Item;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<S::Item>> {
        self.1.fetch_add(1, Ordering::SeqCst);
        self.0.poll_next_unpin(cx)
    }
}

/// One item asked for, one item polled: nothing is polled ahead, before the lock is held, or after the end.
#[tokio::test(start_paused = true)]
async fn back_pressure_stays_what_it_is() {
    let (_, here, there) = two();
    let held = there.obtain("k").lease().await.unwrap();
    let asked = Arc::new(AtomicUsize::new(0));
    let rows = Counted(stream::iter(0..3), asked.clone());
    let mut rows = rows.with_lock((&here, "k"));
    assert!(rows.next().now_or_never().is_none());
    assert_eq!(
        asked.load(Ordering::SeqCst),
        0,
        "asked before the lock is held"
    );
    held.release().await.unwrap();
    sleep(ms(5)).await;
    assert_eq!(asked.load(Ordering::SeqCst), 0, "asked though nobody asks");
    for count in 1..=3 {
        assert!(rows.next().await.unwrap().is_ok());
        sleep(ms(5)).await;
        assert_eq!(asked.load(Ordering::SeqCst), count);
        assert!(
            there.obtain("k").lease_once().await.unwrap().is_none(),
            "held between items"
        );
    }
    assert!(rows.next().await.is_none() && rows.is_terminated());
    assert!(rows.next().await.is_none(), "and ends again");
    assert_eq!(asked.load(Ordering::SeqCst), 4);
    assert!(there.obtain("k").acquire_once().await.unwrap());
}

#[tokio::test(start_paused = true)]
async fn a_stream_waits_runs_and_ends() {
    let (store, here, there) = two();
    let held = there.obtain("k").lease().await.unwrap();
    tokio::spawn(async move {
        sleep(ms(500)).await;
        held.release().await.unwrap();
    });
    let rows = stream::iter(0..4).then(async |row| {
        sleep(ms(100)).await;
        row
    });
    StepVerifier::try_create(rows.with_lock((&here, "k")))
        .expect_no_event(ms(500))
        .expect_no_event(ms(99))
        .expect_next(0)
        .then(async || assert!(there.obtain("k").lease_once().await.unwrap().is_none()))
        .expect_next_count(3)
        .expect_complete()
        .verify()
        .await;
    assert_eq!(store.keys(), 0);
}

#[tokio::test(start_paused = true)]
async fn dropped_half_way_it_releases() {
    let (store, here, there) = two();
    StepVerifier::try_create(stream::iter(0..).with_lock((&here, "k")))
        .expect_next(0)
        .expect_next(1)
        .then_cancel()
        .verify()
        .await;
    assert_eq!((store.keys(), here.in_use()), (0, 0));
    let three = stream::iter(0..)
        .with_lock((&here, "k"))
        .take(3)
        .try_collect::<Vec<i32>>();
    assert_eq!(three.await.unwrap(), [0, 1, 2]);
    assert!(there.obtain("k").acquire_once().await.unwrap());
}

#[tokio::test(start_paused = true)]
async fn a_lost_lease_is_the_last_item() {
    let locks = LockRegistry::in_memory();
    let lock = locks.obtain("k").ttl(ms(100));
    let asked = Arc::new(AtomicUsize::new(0));
    let rows = || Counted(stream::iter(0..), asked.clone());
    StepVerifier::try_create(rows().with_lock(&lock))
        .expect_next(0)
        .then(async || sleep(ms(200)).await)
        // One item of look-ahead, from when the lease was good.
        .expect_next(1)
        .expect_error_matches(LockError::is_lost)
        .expect_complete()
        .verify()
        .await;
    assert_eq!(asked.load(Ordering::SeqCst), 2, "asked without a lease");
    let busy = locks.obtain("k").lease().await.unwrap();
    StepVerifier::try_create(rows().with_lock(lock.clone().wait(ms(50))))
        .expect_no_event(ms(49))
        .expect_error_matches(LockError::is_not_acquired)
        .expect_complete()
        .verify()
        .await;
    StepVerifier::try_create(rows().with_lock(lock.wait(ms(50))).or_skip())
        .expect_no_event(ms(49))
        .expect_complete()
        .verify()
        .await;
    busy.release().await.unwrap();
}

/// A waiting stream is woken by the loss also when its own source never wakes it.
#[tokio::test(start_paused = true)]
async fn a_silent_stream_learns_of_its_loss() {
    let locks = LockRegistry::in_memory();
    let lock = locks.obtain("k").ttl(ms(1_000));
    let rows = lock.with_lease_stream(|lease| {
        let token = lease.token();
        stream::iter([token]).chain(stream::pending())
    });
    StepVerifier::try_create(rows)
        .expect_next_matches(|token| token.get() > 0)
        .expect_no_event(ms(987))
        .expect_error_matches(LockError::is_lost)
        .expect_complete()
        .verify()
        .await;
}

#[tokio::test(start_paused = true)]
async fn streams_know_their_size_and_their_end() {
    let locks = LockRegistry::in_memory();
    let rows = stream::iter(0..3).with_lock(locks.obtain("k"));
    assert_eq!(rows.size_hint(), (0, Some(4)));
    let mut rows = rows.or_skip();
    assert!(!rows.is_terminated());
    assert_eq!(rows.by_ref().count().await, 3);
    assert_eq!(
        (rows.size_hint(), rows.is_terminated()),
        ((0, Some(0)), true)
    );
}

/// Streams of several registries on one key take turns whole: no item of one comes between items of another.
#[tokio::test(start_paused = true)]
async fn streams_do_not_mix() {
    let (_, here, there) = two();
    let feed = |name: usize| {
        let slow = stream::iter(0..4).then(move |row| async move {
            sleep(ms(1)).await;
            (name, row)
        });
        slow.with_lock([&here, &there][name % 2].obtain("k"))
            .boxed()
    };
    let all = stream::select_all((0..8).map(feed));
    let all: Vec<_> = all.try_collect().await.unwrap();
    assert_eq!(all.len(), 32);
    for rows in all.chunks(4) {
        assert!(rows.iter().all(|(name, _)| *name == rows[0].0), "{all:?}");
    }
}

/// What `tokio-stream` and `async-stream` make are streams like any other, also when both crates' extension traits are
/// in scope, as `try_next` and `try_collect` are not in doubt then.
#[tokio::test(start_paused = true)]
async fn streams_of_other_makes_lock_just_as_well() {
    use tokio_stream::wrappers::{IntervalStream, ReceiverStream};

    let (_, here, there) = two();
    let (sender, receiver) = tokio::sync::mpsc::channel(1);
    let sent = ReceiverStream::new(receiver).with_lock((&here, "k"));
    let feed = async move {
        for row in 0..3 {
            sender.send(row).await.unwrap();
        }
    };
    let (rows, ()) = tokio::join!(sent.try_collect::<Vec<_>>(), feed);
    assert_eq!(rows.unwrap(), [0, 1, 2]);

    let ticks =
        tokio_stream::StreamExt::take(IntervalStream::new(tokio::time::interval(ms(10))), 3);
    let ticks = ticks.with_lock((&here, "k"));
    let mut ticks = std::pin::pin!(ticks);
    assert!(ticks.try_next().await.unwrap().is_some());
    let busy = there.obtain("k");
    assert!(
        !busy.acquire_once().await.unwrap(),
        "held between ticks too"
    );
    assert_eq!(ticks.try_collect::<Vec<_>>().await.unwrap().len(), 2);

    let made = async_stream::try_stream! {
        let lock = busy;
        let token = lock.with_lease(async |lease| lease.token()).await?;
        yield token;
        yield lock.with_lease(async |lease| lease.token()).await?;
    };
    let made: Result<Vec<Token>, LockError> =
        made.try_with_lock((&here, "other")).try_collect().await;
    assert!(made.unwrap().is_sorted_by(|one, next| one < next));
}
