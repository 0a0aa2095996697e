//! What runs under a lock logs its key and its fencing token, and nothing else does.

use futures::{StreamExt, TryStreamExt, stream};
use lockstream::{FutureLockExt, LockRegistry, StreamLockExt, Token};
use tracing::Level;

use crate::hearing::{Log, beside_others};
use crate::{ms, two};

/// A line that was logged under these locks, the outermost first.
fn under(locks: &[(&str, Token)], said: &str) -> String {
    let spans = locks
        .iter()
        .map(|(key, token)| format!("lock{{key={key:?} token={token}}}"));
    let spans: Vec<_> = spans.collect();
    if spans.is_empty() {
        format!("INFO {said}")
    } else {
        format!("INFO {}: {said}", spans.join(":"))
    }
}

#[tokio::test(start_paused = true)]
async fn a_future_logs_its_token_at_every_poll() {
    let locks = LockRegistry::in_memory();
    let log = Log::default();
    let _logs = log.hear(Level::INFO);
    tracing::info!("before");
    let lock = locks.obtain("till");
    let token = lock
        .with_lease(async |lease| {
            tracing::info!("begins");
            tokio::time::sleep(ms(10)).await;
            tracing::info!("goes on");
            lease.token()
        })
        .await
        .unwrap();
    tracing::info!("after");
    let inside = [("till", token)];
    let expected = [
        under(&[], "before"),
        under(&inside, "begins"),
        under(&inside, "goes on"),
        under(&[], "after"),
    ];
    assert_eq!(log.take(), expected);
}

#[tokio::test(start_paused = true)]
async fn a_stream_logs_its_token_and_its_reader_does_not() {
    let locks = LockRegistry::in_memory();
    let log = Log::default();
    let _logs = log.hear(Level::INFO);
    let lock = locks.obtain("import");
    let rows = lock.with_lease_stream(|lease| {
        stream::iter([1, 2]).then(move |row| {
            let token = lease.token();
            async move {
                tracing::info!("makes {row}");
                tokio::time::sleep(ms(10)).await;
                token
            }
        })
    });
    let mut rows = Box::pin(rows);
    let mut token = None;
    while let Some(of) = rows.try_next().await.unwrap() {
        token = Some(of);
        tracing::info!("reads");
    }
    let inside = [("import", token.unwrap())];
    let expected = [
        under(&inside, "makes 1"),
        under(&[], "reads"),
        under(&inside, "makes 2"),
        under(&[], "reads"),
    ];
    assert_eq!(log.take(), expected);

    // The same by the other way to write it.
    let rows = stream::iter([1]).inspect(|_| tracing::info!("makes"));
    let rows: Vec<i32> = rows.with_lock(&lock).try_collect().await.unwrap();
    assert_eq!(rows, [1]);
    let [line] = &log.take()[..] else {
        panic!("one row");
    };
    assert!(
        line.starts_with("INFO lock{key=\"import\" token="),
        "{line}"
    );
}

/// One waits while another works: each log carries the lock that it was written under, whichever was polled last.
#[tokio::test(start_paused = true)]
async fn a_log_carries_the_locks_that_it_was_written_under() {
    let (_store, here, there) = two();
    let log = Log::default();
    let _logs = log.hear(Level::INFO);
    let (inner, outer) = (here.obtain("inner"), here.obtain("outer"));
    let nested = outer.with_lease(async |outer| {
        let work = inner.with_lease(async |inner| {
            tracing::info!("in both");
            inner.token()
        });
        let inner = work.await.unwrap();
        tracing::info!("in one");
        (outer.token(), inner)
    });
    // Nothing runs under a lock while it is waited for, and nothing under a neighbour's.
    let neighbour = there.obtain("outer");
    let neighbour = neighbour.with_lease(async |lease| {
        tracing::info!("in the other");
        lease.token()
    });
    let aside = async {
        tokio::task::yield_now().await;
        tracing::info!("aside");
    };
    let (nested, neighbour, ()) = tokio::join!(nested, neighbour, aside);
    let ((outer, inner), neighbour) = (nested.unwrap(), neighbour.unwrap());
    let mut lines = log.take();
    let mut expected = [
        under(&[("outer", outer), ("inner", inner)], "in both"),
        under(&[("outer", outer)], "in one"),
        under(&[("outer", neighbour)], "in the other"),
        under(&[], "aside"),
    ];
    lines.sort();
    expected.sort();
    assert_eq!(lines, expected);
}

/// Cut off, it is dropped outside of the span that it was polled in; and what follows is not in it.
#[tokio::test(start_paused = true)]
async fn a_span_does_not_outlive_its_work() {
    let locks = LockRegistry::in_memory();
    let log = Log::default();
    let _logs = log.hear(Level::INFO);
    let lock = locks.obtain("k").ttl(ms(100));
    let lost = std::future::pending::<()>().with_lock(&lock).await;
    assert!(lost.unwrap_err().is_lost());
    tracing::info!("lost");
    let work = async {
        tracing::info!("works");
        std::future::pending::<()>().await;
    };
    let cut = tokio::time::timeout(ms(10), work.with_lock(&lock)).await;
    assert!(cut.is_err());
    tracing::info!("cut");
    let guard = lock.lease().await.unwrap();
    tracing::info!("a guard is no scope");
    drop(guard);
    let mut lines = log.take();
    lines.retain(|line| line.starts_with("INFO"));
    assert_eq!(lines.len(), 4, "{lines:?}");
    assert_eq!(lines[0], under(&[], "lost"));
    assert!(
        lines[1].starts_with("INFO lock{key=\"k\" token="),
        "{lines:?}"
    );
    assert_eq!(lines[2], under(&[], "cut"));
    assert_eq!(lines[3], under(&[], "a guard is no scope"));
}

/// A shared lock says so.
#[tokio::test(start_paused = true)]
async fn a_span_of_a_shared_lock_carries_its_mode() {
    let locks = LockRegistry::in_memory();
    let log = Log::default();
    let _logs = log.hear(Level::INFO);
    let work = async { tracing::info!("resizes") };
    work.with_lock(locks.obtain("gpu").permits_of(4, 2))
        .await
        .unwrap();
    let lines = log.take();
    assert!(
        lines[0].starts_with("INFO lock{key=\"gpu\" token="),
        "{lines:?}"
    );
    assert!(lines[0].contains("mode=permit 2/4}: resizes"), "{lines:?}");
}

/// A log of the user's, with a fault in it.
struct Faulty;

impl tracing::Subscriber for Faulty {
    fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
        true
    }
    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }
    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn event(&self, _: &tracing::Event<'_>) {}
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
    fn try_close(&self, _: tracing::span::Id) -> bool {
        panic!("a user's fault");
    }
}

/// It is told that the work has ended, and panics: the value of the work is there all the same.
#[tokio::test(start_paused = true)]
async fn a_log_that_panics_at_the_end_of_a_span_harms_no_work() {
    let locks = LockRegistry::in_memory();
    beside_others();
    let _logs = tracing::subscriber::set_default(Faulty);
    let done = async { 7 }.with_lock(locks.obtain("k")).await;
    assert_eq!(done.unwrap(), 7);
    let rows = stream::iter([1, 2]).with_lock(locks.obtain("k"));
    assert_eq!(rows.try_collect::<Vec<_>>().await.unwrap(), [1, 2]);
    assert_eq!(locks.in_use(), 0);
}
