use std::future::pending;

use futures::{StreamExt, poll};
use lockstream::{FutureLockExt, LockEvent};
use tokio::time::{Instant, sleep};

use crate::{GRACE, is_closed, is_free, ms, two};

/// Renewed for two ttls, with a lock inside of it; all others are told at once.
#[tokio::test(start_paused = true)]
async fn work_ends_by_itself_and_nobody_comes_in() {
    let (_, here, there) = two();
    let lock = here.obtain("k");
    let nested = lock.clone().reentrant();
    let work = async move {
        sleep(ms(60_000)).await;
        async { 7 }.with_lock(nested).await.unwrap()
    };
    let work = tokio::spawn(work.with_lock(&lock));
    let handle = here.obtain("handle");
    assert!(handle.acquire().await.unwrap());
    let detached = there
        .obtain("left")
        .lease()
        .await
        .unwrap()
        .detach()
        .unwrap();
    let waiter = tokio::spawn(lock.lease());
    sleep(ms(1)).await;
    let mut events = here.events();

    let begin = Instant::now();
    let mut drain = here.drain(ms(90_000));
    sleep(ms(10)).await;
    assert!(!waiter.is_finished(), "unpolled it has done nothing");
    assert!(poll!(&mut drain).is_pending());
    assert!(is_closed(waiter.await.unwrap()));
    assert!(is_closed(lock.acquire_once().await));
    assert!(is_closed(here.clone().obtain("another").lease().await));
    assert!(is_closed(here.adopt(detached).await));
    assert!(here.obtain("k").inspect().await.unwrap().owner().is_some());
    let early = async {
        sleep(ms(30_000)).await;
        assert!(!is_free(&there, "k").await && handle.is_acquired());
        assert!(handle.release().await.unwrap(), "an end as any other");
    };
    let ((), ()) = tokio::join!(drain, early);
    assert_eq!(work.await.unwrap().unwrap(), 7);
    let took = begin.elapsed();
    assert!(took >= ms(59_000) && took < ms(60_001), "{took:?}");
    assert!(is_free(&there, "k").await);
    let mut ends = 0;
    while let Some(event) = events.next().await {
        assert!(
            !matches!(event, LockEvent::Lost { .. } | LockEvent::Closed { .. }),
            "{event}"
        );
        ends += usize::from(matches!(event, LockEvent::Released { .. }));
    }
    assert_eq!(ends, 2);
}

#[tokio::test(start_paused = true)]
async fn work_that_does_not_end_is_shut_down() {
    for within in [0, 5_000] {
        let (_, here, there) = two();
        let mut work = Box::pin(pending::<()>().with_lock((&here, "k")));
        assert!(poll!(&mut work).is_pending());
        let begin = Instant::now();
        let drain = here.drain(ms(within));
        let work = async {
            let told = work.await;
            assert_eq!(begin.elapsed(), ms(within));
            told
        };
        let ((), told) = tokio::join!(drain, work);
        assert!(is_closed(told));
        assert!(begin.elapsed() <= ms(within + GRACE));
        assert!(is_free(&there, "k").await);
    }
}

#[tokio::test(start_paused = true)]
async fn where_nothing_is_held_it_is_done_at_once() {
    let (_, here, _) = two();
    here.obtain("k")
        .lease()
        .await
        .unwrap()
        .release()
        .await
        .unwrap();
    let begin = Instant::now();
    here.drain(std::time::Duration::MAX).await;
    here.drain(ms(1_000)).await;
    here.shutdown().await;
    assert_eq!(begin.elapsed(), ms(0));
    assert!(is_closed(here.obtain("k").lease().await));
}

/// A turn that nobody has looked at is not one that has begun.
#[tokio::test(start_paused = true)]
async fn a_turn_that_was_not_taken_is_given_back() {
    let (_, here, there) = two();
    let held = there.obtain("k").lease().await.unwrap();
    let mut waiter = here.obtain("k").lease();
    assert!(poll!(&mut waiter).is_pending());
    held.release().await.unwrap();
    sleep(ms(1)).await;
    assert!(!is_free(&there, "k").await);
    let begin = Instant::now();
    here.drain(ms(60_000)).await;
    assert_eq!(begin.elapsed(), ms(0));
    assert!(is_closed(waiter.await) && is_free(&there, "k").await);
}

/// What is held goes on for ever then, and newcomers are refused for ever.
#[tokio::test(start_paused = true)]
async fn a_dropped_drain_stays_in_force_until_the_next() {
    let (_, here, there) = two();
    let lease = here.obtain("k").lease().await.unwrap();
    drop(here.drain(ms(10)));
    assert!(here.obtain("unpolled").lease().await.is_ok());
    let mut drain = here.drain(ms(10));
    assert!(poll!(&mut drain).is_pending());
    drop(drain);
    sleep(ms(90_000)).await;
    assert!(lease.is_valid() && !is_free(&there, "k").await);
    assert!(is_closed(here.obtain("other").lease().await));
    let begin = Instant::now();
    here.drain(ms(5_000)).await;
    assert_eq!(begin.elapsed(), ms(5_000));
    assert!(!lease.is_valid() && is_free(&there, "k").await);
}

#[tokio::test(start_paused = true)]
async fn the_first_drain_to_end_ends_all() {
    for by_shutdown in [false, true] {
        let (_, here, there) = two();
        let lease = here.obtain("k").lease().await.unwrap();
        let begin = Instant::now();
        let first = here.drain(ms(60_000));
        let second = async {
            sleep(ms(1_000)).await;
            match by_shutdown {
                true => here.shutdown().await,
                false => here.drain(ms(2_000)).await,
            }
        };
        tokio::join!(first, second);
        let expected = if by_shutdown { 1_000 } else { 3_000 };
        assert_eq!(begin.elapsed(), ms(expected));
        assert!(is_free(&there, "k").await && is_closed(lease.release().await));
    }
}
