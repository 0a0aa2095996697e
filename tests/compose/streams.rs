use futures::{StreamExt, TryStreamExt, stream};
use lockstream::{LockError, StreamLockExt, Token};
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
