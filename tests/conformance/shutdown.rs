//! The end of a registry.

use std::future::pending;
use std::sync::Arc;

use futures::{StreamExt, stream};
use lockstream::{FutureLockExt, StreamLockExt};
use tokio::time::Instant;

use crate::assert_err;
use crate::world::{SOON, World, connected, ms, poll_once, waiting};

pub(crate) async fn everybody_is_told_and_everything_given_back(w: &dyn World) {
    let [here, there] = w.registries().await;
    let guard = Arc::new(());
    let (in_work, in_stream) = (guard.clone(), guard.clone());

    let handle = here.obtain("handle");
    assert!(handle.acquire().await.unwrap());
    let lease = here.obtain("lease").lease().await.unwrap();
    let mut lost = lease.lost();
    assert!(poll_once(&mut lost).await.is_none());
    let mut work = Box::pin(
        async move {
            let _inside = in_work;
            pending::<()>().await;
        }
        .with_lock(here.obtain("work")),
    );
    while there
        .obtain("work")
        .inspect()
        .await
        .unwrap()
        .owner()
        .is_none()
    {
        assert!(poll_once(&mut work).await.is_none());
        tokio::time::sleep(ms(1)).await;
    }
    let rows = stream::iter([1]).chain(stream::pending().inspect(move |_| {
        let _inside = &in_stream;
    }));
    let mut rows = Box::pin(rows.with_lock(here.obtain("stream")));
    assert_eq!(rows.next().await.unwrap().unwrap(), 1);
    let _held = there.obtain("waiter").lease().await.unwrap();
    let waiter = here.obtain("waiter");
    let mut in_line = waiter.acquire();
    assert!(poll_once(&mut in_line).await.is_none());
    let mut work_in_line = Box::pin(async {}.with_lock(&waiter));
    assert!(poll_once(&mut work_in_line).await.is_none());
    waiting(&there.obtain("waiter"), 1).await;

    // It begins at the first poll.
    drop(here.shutdown());
    assert!(handle.is_acquired());
    let begin = Instant::now();
    here.shutdown().await;
    assert!(begin.elapsed() < SOON);

    assert_err!(in_line.await, Closed, "waiter");
    assert_err!(work_in_line.await, Closed, "waiter");
    assert_err!(work.await, Closed, "work");
    assert_err!(rows.next().await.unwrap(), Closed, "stream");
    assert!(rows.next().await.is_none());
    assert_eq!(
        Arc::strong_count(&guard),
        1,
        "the inner outlived its combinator"
    );
    assert_err!(Err::<(), _>(lost.await), Closed, "lease");
    assert!(!lease.is_valid() && !handle.is_acquired());
    assert_err!(lease.release().await, Closed, "lease");
    assert_err!(handle.release().await, Closed, "handle");
    for key in ["handle", "lease", "work", "stream"] {
        assert!(
            there.obtain(key).acquire_once().await.unwrap(),
            "{key} was kept"
        );
    }
    assert_eq!(there.obtain("waiter").inspect().await.unwrap().waiting, 0);
    assert_eq!(here.in_use(), 0);
}

pub(crate) async fn a_closed_registry_stays_closed(w: &dyn World) {
    let registry = w.registry().await;
    let lock = registry.obtain("k");
    let mut twice = (registry.shutdown(), registry.clone().shutdown());
    (&mut twice.0).await;
    (&mut twice.1).await;
    registry.shutdown().await;
    let commands = w.commands();
    assert_err!(lock.acquire_once().await, Closed, "k");
    assert_err!(lock.acquire().await, Closed, "k");
    assert_err!(lock.lease().or_skip().await, Closed, "k");
    assert_err!(lock.inspect().await, Closed, "k");
    assert_err!(registry.obtain("k").lease_once().await, Closed, "k");
    let work = async { panic!("never polled") };
    assert_err!(work.with_lock(&lock).await, Closed, "k");
    let mut rows = Box::pin(stream::iter([1]).with_lock(&lock));
    assert_err!(rows.next().await.unwrap(), Closed, "k");
    assert!(!lock.release().await.unwrap());
    assert_eq!(registry.in_use(), 0);
    assert_eq!(w.commands(), commands);
    // Others do not mind.
    assert!(w.registry().await.obtain("k").acquire_once().await.unwrap());
}

/// Once polled it goes on when it is dropped.
pub(crate) async fn a_shutdown_dropped_goes_on(w: &dyn World) {
    let [here, there] = w.registries().await;
    let lock = here.obtain("k");
    assert!(lock.acquire().await.unwrap());
    w.set_latency(ms(20));
    let mut shutdown = Box::pin(here.shutdown());
    assert!(poll_once(&mut shutdown).await.is_none());
    drop(shutdown);
    assert!(!lock.is_acquired());
    let other = there.obtain("k");
    let begin = Instant::now();
    assert!(other.acquire().await.unwrap());
    assert!(begin.elapsed() < SOON);
    w.set_latency(ms(0));
}

/// Three response time-outs at the latest; what is left then runs out by itself.
pub(crate) async fn a_shutdown_does_not_wait_for_an_absent_store(w: &dyn World) {
    let there = w.registry().await;
    let here = w.builder().await.response_timeout(ms(200)).build().unwrap();
    connected(&here).await;
    let lock = here.obtain("k").ttl(ms(2000));
    assert!(lock.acquire().await.unwrap());
    w.set_offline(true);
    let begin = Instant::now();
    here.shutdown().await;
    assert!(
        begin.elapsed() <= ms(600) + w.late(),
        "{:?}",
        begin.elapsed()
    );
    assert_eq!(here.in_use(), 0);
    w.set_offline(false);
    let other = there.obtain("k");
    assert!(other.acquire().await.unwrap());
    assert!(begin.elapsed() <= ms(2000) + w.late());
}

/// For longer than its ttl, since it is renewed.
pub(crate) async fn a_drain_lets_work_end_and_takes_nobody(w: &dyn World) {
    let [here, there] = w.registries().await;
    let lease = here.obtain("k").lease().await.unwrap();
    let _theirs = there.obtain("theirs").lease().await.unwrap();
    let waits = here.obtain("theirs");
    let mut in_line = Box::pin(waits.lease());
    assert!(poll_once(&mut in_line).await.is_none());
    waiting(&waits, 1).await;
    let mut behind = Box::pin(there.obtain("k").lease());
    assert!(poll_once(&mut behind).await.is_none());
    waiting(&there.obtain("k"), 1).await;

    let begin = Instant::now();
    let mut drain = here.drain(ms(60_000));
    assert!(poll_once(&mut drain).await.is_none());
    assert_err!(in_line.await, Closed, "theirs");
    assert_err!(here.clone().obtain("other").lease().await, Closed, "other");
    waiting(&there.obtain("theirs"), 0).await;
    let still_held = tokio::time::sleep(ms(2500));
    tokio::select! {
        () = &mut drain => panic!("it is held"),
        lost = lease.lost() => panic!("{lost}"),
        () = still_held => {}
    }
    assert!(lease.is_valid() && poll_once(&mut behind).await.is_none());
    lease.release().await.unwrap();
    drain.await;
    assert!(begin.elapsed() < ms(2500) + SOON);
    assert_eq!(here.in_use(), 0);
    behind.await.unwrap().release().await.unwrap();
}
