use futures::stream::FusedStream;
use futures::{FutureExt, StreamExt, TryStreamExt, stream};
use lockstream::{FutureLockExt, LockError, StreamLockExt, Token};
use tokio::time::sleep;

use crate::{ms, two};

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

/// Over only when it has no item left, and not before.
async fn is_over_at_its_end(stream: impl FusedStream) {
    let mut stream = std::pin::pin!(stream);
    loop {
        let was_over = stream.is_terminated();
        match stream.next().await {
            Some(_) => assert!(!was_over),
            None => break,
        }
    }
    assert!(stream.is_terminated());
    assert_eq!(stream.size_hint().1, Some(0));
}

/// `futures::select!` asks this of each of them.
#[tokio::test(start_paused = true)]
async fn streams_say_when_they_are_over() {
    let (_, here, _) = two();
    let lock = || here.obtain("k");
    let rows = || stream::iter(0..3);
    is_over_at_its_end(rows().with_lock(lock())).await;
    is_over_at_its_end(rows().with_lock(lock()).or_skip()).await;
    is_over_at_its_end(rows().map(Ok::<_, LockError>).try_with_lock(lock())).await;
    let work = || rows().map(|row| sleep(ms(row)).with_lock(lock()));
    is_over_at_its_end(work().buffer_keyed(1)).await;
    is_over_at_its_end(work().buffer_keyed(2).waiting(8).in_order()).await;
    is_over_at_its_end(lock().lead_stream(|_| rows())).await;
    let mut campaign = Box::pin(lock().leadership());
    assert!(campaign.next().await.is_some());
    here.shutdown().await;
    is_over_at_its_end(campaign).await;
    let closed = lock().lead_stream(|_| rows());
    assert!(!closed.is_terminated());
    is_over_at_its_end(closed).await;
    assert!(lock().leadership().boxed().next().now_or_never().is_some());
}
