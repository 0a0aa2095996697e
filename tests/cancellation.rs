//! Whoever has a lease's cancellation token learns of its loss, and of nothing else.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::{Context, Wake, Waker};
use std::time::Duration;

use lockstream::store::MemoryStore;
use lockstream::{FutureLockExt, LockRegistry, OnFinish};
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

const TTL: Duration = Duration::from_secs(30);

fn one() -> (MemoryStore, LockRegistry) {
    let store = MemoryStore::new();
    let locks = LockRegistry::builder(store.clone()).build().unwrap();
    (store, locks)
}

async fn cancelled_within(token: &CancellationToken, within: Duration) -> bool {
    timeout(within, token.cancelled()).await.is_ok()
}

/// At the deadline of a fixed lease, and not before.
#[tokio::test(start_paused = true)]
async fn a_token_is_cancelled_at_the_deadline() {
    let locks = LockRegistry::in_memory();
    let lease = locks.obtain("k").ttl(TTL).lease().await.unwrap();
    let token = lease.view().cancellation_token();
    let deadline = lease.deadline();
    token.cancelled().await;
    let late = Instant::now().checked_duration_since(deadline);
    let late = late.expect("not before the deadline");
    assert!(late <= Duration::from_millis(2), "{late:?}");
    assert!(lease.lost().await.is_lost());
}

/// While nobody polls the lease: at the renewal that finds the key gone.
#[tokio::test(start_paused = true)]
async fn a_token_is_cancelled_when_the_key_is_gone() {
    let (store, locks) = one();
    let lease = locks.obtain("k").lease().await.unwrap();
    let token = lease.view().cancellation_token();
    // Renewals do not cancel it.
    assert!(!cancelled_within(&token, 10 * TTL).await);
    store.expire("k");
    assert!(cancelled_within(&token, TTL / 3 + Duration::from_millis(2)).await);
    assert!(!lease.is_valid());
}

#[tokio::test(start_paused = true)]
async fn three_spawned_tasks_stop_at_the_loss() {
    let (store, locks) = one();
    let stopped = Arc::new(AtomicU32::new(0));
    let count = stopped.clone();
    let lock = locks.obtain("k");
    let mut tasks = JoinSet::new();
    let work = lock.with_lease(async |lease| {
        for _ in 0..3 {
            let (token, count) = (lease.cancellation_token(), count.clone());
            tasks.spawn(async move {
                token.cancelled().await;
                count.fetch_add(1, Ordering::Relaxed);
            });
        }
        sleep(TTL).await;
        store.expire("k");
        std::future::pending::<()>().await;
    });
    assert!(work.await.unwrap_err().is_lost());
    timeout(Duration::from_millis(1), tasks.join_all())
        .await
        .expect("the loss of the lease was told to the tasks as well");
    assert_eq!(stopped.load(Ordering::Relaxed), 3);
}

/// However the lease ends, unless it is lost.
#[tokio::test(start_paused = true)]
async fn no_other_end_cancels_a_token() {
    let (_, locks) = one();
    let lock = locks.obtain("k");
    let lease = lock.lease().await.unwrap();
    let released = lease.view().cancellation_token();
    lease.release().await.unwrap();

    let lease = lock.lease().await.unwrap();
    let dropped = lease.view().cancellation_token();
    drop(lease);

    let left = lock.clone().on_finish(OnFinish::LetExpire);
    let left = left.with_lease(async |lease| lease.cancellation_token());
    let left = left.await.unwrap();

    let lease = locks.obtain("another").lease().await.unwrap();
    let detached = lease.view().cancellation_token();
    drop(lease.detach().unwrap());

    sleep(10 * TTL).await;
    locks.shutdown().await;
    for token in [released, dropped, left, detached] {
        assert!(!token.is_cancelled());
    }
}

/// A loss that only the release finds is told as well, also when the lease is dropped.
#[tokio::test(start_paused = true)]
async fn a_loss_that_the_release_finds_cancels_the_token() {
    let (store, locks) = one();
    for by_hand in [true, false] {
        let lease = locks.obtain("k").lease().await.unwrap();
        let token = lease.view().cancellation_token();
        store.expire("k");
        assert!(!token.is_cancelled());
        if by_hand {
            assert!(lease.release().await.unwrap_err().is_lost());
        } else {
            drop(lease);
        }
        assert!(cancelled_within(&token, Duration::from_millis(2)).await);
    }
}

/// A shutdown is told before the lease is released: the task has its time to end.
#[tokio::test(start_paused = true)]
async fn a_shutdown_cancels_the_token_and_waits_for_the_task() {
    let (store, locks) = one();
    let others = LockRegistry::builder(store).build().unwrap();
    let lease = locks.obtain("k").lease().await.unwrap();
    let token = lease.view().cancellation_token();
    let rival = tokio::spawn(async move { others.obtain("k").lease().await });
    let task = tokio::spawn(async move {
        token.cancelled().await;
        sleep(Duration::from_millis(50)).await;
        drop(lease);
        Instant::now()
    });
    sleep(Duration::from_millis(10)).await;
    let shutdown = tokio::spawn(async move { locks.shutdown().await });
    let ended = task.await.unwrap();
    let lease = rival.await.unwrap().unwrap();
    assert!(Instant::now() >= ended);
    shutdown.await.unwrap();
    drop(lease);
}

#[tokio::test(start_paused = true)]
async fn a_token_of_a_lost_lease_is_cancelled_from_the_start() {
    let (store, locks) = one();
    let lease = locks.obtain("k").lease().await.unwrap();
    store.expire("k");
    lease.lost().await;
    assert!(lease.view().cancellation_token().is_cancelled());
    // Also if no timer has told of the loss yet.
    let fixed = locks.obtain("fixed").ttl(TTL).lease().await.unwrap();
    let deadline = fixed.deadline();
    while Instant::now() < deadline {
        tokio::time::advance(Duration::from_secs(1)).await;
    }
    assert!(fixed.view().cancellation_token().is_cancelled());
}

/// Each holder of a token may cancel what it was given, and stops nobody else.
#[tokio::test(start_paused = true)]
async fn tokens_are_cancelled_one_by_one_by_their_holders_and_together_by_the_loss() {
    let (store, locks) = one();
    let lease = locks.obtain("k").lease().await.unwrap();
    let view = lease.view();
    let [mine, yours, theirs] = [(); 3].map(|()| view.cancellation_token());
    mine.cancel();
    assert!(!yours.is_cancelled() && lease.is_valid());
    assert!(!view.cancellation_token().is_cancelled());
    drop(theirs);
    store.expire("k");
    assert!(cancelled_within(&yours, TTL).await);
}

/// The first loss of a key is the loss of all. A lock inside, on one of the keys, is lost with any of them (H4).
#[tokio::test(start_paused = true)]
async fn of_several_keys_the_first_loss_cancels() {
    for lost in ["a", "b", "c"] {
        let (store, locks) = one();
        let lock = locks.obtain_all(["a", "b", "c"]);
        let inner = locks.obtain("a").reentrant();
        let (sender, tokens) = oneshot::channel();
        let work = lock.with_lease(async |lease| {
            let inner = inner.lease().await.unwrap();
            assert_eq!(Some(inner.token()), lease.token_of("a"), "it is inside");
            let tokens = [
                lease.cancellation_token(),
                inner.view().cancellation_token(),
            ];
            sender.send(tokens).unwrap();
            store.expire(lost);
            std::future::pending::<()>().await;
        });
        let begin = Instant::now();
        assert!(work.await.unwrap_err().is_lost());
        let [of_all, of_inner] = tokens.await.unwrap();
        assert!(cancelled_within(&of_all, Duration::from_millis(2)).await);
        assert!(begin.elapsed() <= TTL / 3 + Duration::from_millis(4));
        assert!(of_inner.is_cancelled(), "{lost}");
    }
}

/// Counts how often it is woken.
#[derive(Default)]
struct Count(AtomicU32);

impl Wake for Count {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// Nothing stays behind: no task runs for a token, and no waker is kept when the lease is gone.
#[tokio::test(start_paused = true)]
async fn a_token_keeps_nothing_alive() {
    let (_, locks) = one();
    let count = Arc::new(Count::default());
    let waker = Waker::from(count.clone());
    let tasks = tokio::runtime::Handle::current()
        .metrics()
        .num_alive_tasks();
    for _ in 0..100 {
        let lease = locks.obtain("k").lease().await.unwrap();
        let view = lease.view();
        for _ in 0..10 {
            let token = view.cancellation_token();
            let mut cancelled = Box::pin(token.cancelled_owned());
            let polled = cancelled.as_mut().poll(&mut Context::from_waker(&waker));
            assert!(polled.is_pending());
        }
        lease.release().await.unwrap();
    }
    let now = tokio::runtime::Handle::current()
        .metrics()
        .num_alive_tasks();
    assert!(now <= tasks + 2, "{now} tasks, {tasks} before");
    drop(waker);
    assert_eq!(Arc::strong_count(&count), 1);
    assert_eq!(count.0.load(Ordering::Relaxed), 0);
    assert_eq!(locks.in_use(), 0);
}

/// A task that has nothing to do with the lock's runtime hears of the loss, too.
#[test]
fn a_token_is_cancelled_after_its_runtime_has_ended() {
    let runtime = || {
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        builder.worker_threads(1).enable_all().build().unwrap()
    };
    let first = runtime();
    let locks = LockRegistry::in_memory();
    let lock = locks.obtain("k").ttl(Duration::from_millis(400));
    let lease = first.block_on(lock.lease()).unwrap();
    drop(first);
    let second = runtime();
    second.block_on(async {
        let token = lease.view().cancellation_token();
        assert!(cancelled_within(&token, Duration::from_secs(5)).await);
        assert!(!lease.is_valid());
    });
}

/// The token of work under `with_lock`, which is dropped at the loss: the task beside it is told all the same.
#[tokio::test]
async fn a_token_is_told_in_real_time() {
    let (store, locks) = one();
    // So long that the work has begun by then.
    let lock = locks.obtain("k").ttl(Duration::from_secs(1));
    let (sender, token) = oneshot::channel();
    let work = lock.with_lease(|lease| {
        sender.send(lease.cancellation_token()).unwrap();
        std::future::pending::<()>()
    });
    let work = tokio::spawn(work);
    let token = token.await.unwrap();
    assert!(cancelled_within(&token, Duration::from_secs(5)).await);
    assert!(work.await.unwrap().unwrap_err().is_lost());
    let next = async {}.with_lock((&LockRegistry::builder(store).build().unwrap(), "k"));
    next.await.unwrap();
}
