//! A future that was polled in one task and goes on in another is woken there, whatever it waits for.

use std::future::pending;
use std::task::{Context, Waker};

use futures::FutureExt;
use lockstream::{FutureLockExt, LockError};
use tokio::time::{sleep, timeout};

use crate::{ms, two};

/// Polled by somebody who forgets it.
fn forget<F: Future + Unpin>(future: &mut F) {
    assert!(
        future
            .poll_unpin(&mut Context::from_waker(Waker::noop()))
            .is_pending()
    );
}

/// Polled in a task that ends with that.
async fn poll_in_another_task<F: Future<Output: Send> + Send + Unpin + 'static>(
    mut future: F,
) -> F {
    let polled = tokio::spawn(async move {
        assert!((&mut future).now_or_never().is_none());
        (future,)
    });
    polled.await.unwrap().0
}

#[tokio::test(start_paused = true)]
async fn a_waiter_is_woken_where_it_was_polled_last() {
    let (_, here, there) = two();
    let held = there.obtain("k").lease().await.unwrap();
    let mut waiter = poll_in_another_task(here.obtain("k").lease()).await;
    forget(&mut waiter);
    let waiter = tokio::spawn(waiter);
    tokio::task::yield_now().await;
    held.release().await.unwrap();
    let lease = timeout(ms(10), waiter)
        .await
        .expect("it is woken")
        .unwrap()
        .unwrap();
    lease.release().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_release_is_woken_where_it_was_polled_last() {
    let (store, here, _) = two();
    let lease = here.obtain("k").lease().await.unwrap();
    store.set_latency(ms(5));
    let mut release = poll_in_another_task(lease.release()).await;
    forget(&mut release);
    timeout(ms(10), release)
        .await
        .expect("it is woken")
        .unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_loss_wakes_where_it_was_asked_for_last() {
    let (_, here, _) = two();
    let lease = here.obtain("k").ttl(ms(1_000)).lease().await.unwrap();
    let mut lost = poll_in_another_task(lease.lost()).await;
    forget(&mut lost);
    let told = timeout(ms(1_001), lost).await.expect("it is woken");
    assert!(told.is_lost());
    drop(lease);

    let lock = here.obtain("k").ttl(ms(1_000));
    let mut locked = pending::<()>().with_lock(&lock).boxed();
    forget(&mut locked);
    let locked = poll_in_another_task(locked).await;
    let told = timeout(ms(1_001), locked).await.expect("it is woken");
    assert!(matches!(told, Err(LockError::Lost { .. })), "{told:?}");
}

/// A lease may be released, and lost, far from where it was acquired, also when that task is gone.
#[tokio::test(start_paused = true)]
async fn a_lease_may_go_where_it_likes() {
    let (store, here, there) = two();
    let lock = here.obtain("k").ttl(ms(1_000));
    let lease = tokio::spawn(lock.lease()).await.unwrap().unwrap();
    let lost = tokio::spawn(lease.lost());
    let view = lease.view();
    std::thread::spawn(move || drop(lease)).join().unwrap();
    assert!(!view.is_valid());
    assert!(there.obtain("k").acquire_once().await.unwrap());
    sleep(ms(2_000)).await;
    assert!(
        !lost.is_finished(),
        "a lease that was given back is not lost"
    );
    lost.abort();
    drop((lock, here, there));
    sleep(ms(40_000)).await;
    assert_eq!(store.keys(), 0);
}
