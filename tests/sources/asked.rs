//! What a lock does only if it is asked to.

use std::future::Future;
use std::pin::Pin;

use futures::future::{join, join_all, select};
use futures::{FutureExt, TryStreamExt, stream};
use lockstream::store::MemoryStore;
use lockstream::{
    FutureLockExt, Lock, LockError, LockRegistry, OnFinish, Renewal, StreamLockExt, Token,
};
use tokio::time::{Instant, sleep};

use crate::support::{RedisServer, on_a_steady_machine, wait_until};
use crate::{
    BOUND, assert_took, builder, in_memory, ms, nothing_left, process, queued, released, secs,
    warm, within,
};

/// Inside work that holds the key, the same work gets it again at once, however deep, on whatever thread, and in
/// whatever it is made of; nobody else does, and the outermost frees it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reentrancy() {
    let server = RedisServer::start();
    let (here, there) = (process(&server).await, process(&server).await);
    let outer = here.obtain("k").ttl(secs(60));
    let nested = outer.clone().reentrant();
    let other = there.obtain("k");
    server.reset_stats();

    /// Three deep, boxed.
    fn deep(
        lock: &Lock,
        left: u32,
    ) -> Pin<Box<dyn Future<Output = Result<Token, LockError>> + Send + '_>> {
        let work = lock.with_lease(move |lease| async move {
            sleep(ms(5)).await;
            match left {
                0 => Ok(lease.token()),
                left => deep(lock, left - 1).await,
            }
        });
        async move { work.await? }.boxed()
    }
    let work = outer.with_lease(async |lease| {
        let token = lease.token();
        let (one, two) = join(deep(&nested, 3), deep(&nested, 2)).await;
        assert_eq!((one.unwrap(), two.unwrap()), (token, token));
        // The nested one that loses a race is dropped, first or last, and frees nothing.
        let quick = deep(&nested, 0);
        let slow = Box::pin(sleep(secs(60)).with_lock(&nested));
        let raced = select(quick, slow).await;
        assert!(matches!(raced, futures::future::Either::Left((Ok(nested), _)) if nested == token));
        let rows = stream::iter(0..3).with_lock(&nested);
        assert_eq!(rows.try_collect::<Vec<_>>().await.unwrap(), [0, 1, 2]);
        // A handle and a guard.
        let handle = nested.clone();
        assert!(handle.acquire_once().await.unwrap() && handle.release().await.unwrap());
        let guard = nested.lease_once().await.unwrap().unwrap();
        assert_eq!(guard.token(), token);
        guard.release().await.unwrap();
        assert!(lease.is_valid());
    });
    within(2 * BOUND, "all are let in", work).await.unwrap();
    assert_eq!(server.calls("evalsha"), 2, "one acquisition, one release");

    // Not those who did not ask for it, nor a task of its own, nor another process.
    let work = async {
        let stranger = outer.clone().wait(ms(100));
        assert!(stranger.lease().await.unwrap_err().is_not_acquired());
        let task = nested.clone().wait(ms(100));
        let task = tokio::spawn(async move { task.acquire().await });
        assert!(!task.await.unwrap().unwrap());
        assert!(!other.acquire_once().await.unwrap());
    };
    work.with_lock(&outer).await.unwrap();
    // Outside it is a lock like any other.
    assert!(nested.acquire_once().await.unwrap());
    assert!(!other.acquire_once().await.unwrap());
    assert!(nested.release().await.unwrap());
    assert!(other.acquire_once().await.unwrap());
    assert!(other.release().await.unwrap());
    nothing_left(&server, &[&here, &there]).await;
}

/// The work is done, its value is there, and the key stays until its ttl is over: nobody gets it before, whoever was in
/// line has it then, and no watchdog prolongs it.
#[tokio::test]
async fn key_kept_until_expiry() {
    on_a_steady_machine(async || {
        let server = RedisServer::start();
        let dogged = builder(&server.url()).await.renewal(Renewal::watchdog());
        let (here, there) = (dogged.build().unwrap(), process(&server).await);
        warm(&here).await;
        let ttl = ms(1_200);
        for renewal in [Renewal::off(), Renewal::watchdog()] {
            let lock = here.obtain("k").ttl(ttl).renewal(renewal);
            let kept = lock.clone().on_finish(OnFinish::LetExpire);
            let done = async {
                sleep(ms(100)).await;
                7
            };
            assert_eq!(done.with_lock(&kept).await.unwrap(), 7);
            let begin = Instant::now();
            let mut left = server.pttl("lock:k");
            assert!(left > 500, "{left}");
            let end = ms(left as u64);
            // Neither for another process nor for this one.
            assert!(!there.obtain("k").acquire_once().await.unwrap());
            assert!(!lock.acquire_once().await.unwrap());
            let waiter = tokio::spawn(there.obtain("k").ttl(secs(60)).lease());
            queued(&server, 1).await;
            while !waiter.is_finished() {
                let now = server.pttl("lock:k");
                assert!(
                    now <= left || now > ttl.as_millis() as i64,
                    "prolonged: {left}, {now}"
                );
                left = now;
                sleep(ms(10)).await;
                assert!(begin.elapsed() < BOUND, "it does not run out");
            }
            assert_took(begin, end - ms(20), ms(1_000));
            released(within(BOUND, "it is had", waiter).await.unwrap().unwrap()).await;
        }
        // A release that is asked for frees it all the same.
        let kept = here
            .obtain("k")
            .ttl(secs(60))
            .on_finish(OnFinish::LetExpire);
        released(kept.lease().await.unwrap()).await;
        wait_until("it is free", BOUND, || !server.exists("lock:k")).await;
        nothing_left(&server, &[&here, &there]).await;
    })
    .await;
}

/// [`key_kept_until_expiry`] is for this: at most once a minute, on however many machines.
#[tokio::test(start_paused = true)]
async fn key_kept_until_expiry_makes_a_job_run_at_most_once_a_minute() {
    let store = MemoryStore::new();
    let begin = Instant::now();
    let runs = std::sync::Mutex::new(Vec::new());
    let machines: Vec<_> = (0..5).map(|_| in_memory(&store)).collect();
    let machine = async |n: u64, locks: &LockRegistry| {
        sleep(ms(137 * n)).await;
        let minute = locks.obtain("report").ttl(secs(60)).wait(ms(0));
        let minute = minute.on_finish(OnFinish::LetExpire);
        while begin.elapsed() < secs(3_600) {
            let job = async { runs.lock().unwrap().push(begin.elapsed()) };
            job.with_lock(&minute).or_skip().await.unwrap();
            sleep(secs(1)).await;
        }
    };
    join_all((0..).zip(&machines).map(|(n, locks)| machine(n, locks))).await;
    let runs = runs.into_inner().unwrap();
    assert!(runs.len() >= 59, "{} runs", runs.len());
    for pair in runs.windows(2) {
        let gap = pair[1] - pair[0];
        assert!(gap + ms(1) >= secs(60) && gap <= secs(61), "{gap:?}");
    }
}

#[cfg(feature = "macros")]
mod shop {
    use super::*;
    use lockstream::with_lock;

    #[derive(Debug)]
    pub(super) enum ShopError {
        Lock(LockError),
        SoldOut,
    }

    impl From<LockError> for ShopError {
        fn from(error: LockError) -> Self {
            Self::Lock(error)
        }
    }

    pub(super) struct Order {
        pub(super) id: u64,
        pub(super) stock: u32,
    }

    #[with_lock(key = "order:{order.id}", ttl = "60s", wait = "200ms", registry = locks)]
    pub(super) async fn charge(
        locks: &LockRegistry,
        server: &RedisServer,
        order: &Order,
    ) -> Result<Option<String>, ShopError> {
        if order.stock == 0 {
            return Err(ShopError::SoldOut);
        }
        sleep(ms(1)).await;
        Ok(server.get(&format!("lock:order:{}", order.id)))
    }
}

/// A function that is a critical section: its key from its arguments, its lock held as long as it runs and free when it
/// returns, however it returns; what goes wrong with the lock is an error of its own type.
#[cfg(feature = "macros")]
#[tokio::test]
async fn annotation() {
    use shop::{Order, ShopError, charge};
    let server = RedisServer::start();
    let (here, there) = (process(&server).await, process(&server).await);
    let order = Order { id: 42, stock: 1 };
    let holder = charge(&here, &server, &order).await.unwrap();
    assert!(holder.is_some(), "it ran unlocked");
    assert!(!server.exists("lock:order:42"));
    let sold_out = Order { id: 42, stock: 0 };
    let told = charge(&here, &server, &sold_out).await;
    assert!(matches!(told, Err(ShopError::SoldOut)), "{told:?}");
    assert!(!server.exists("lock:order:42"));

    let lock = there.obtain("order:42").ttl(secs(60));
    let held = lock.lease().await.unwrap();
    let begin = Instant::now();
    let told = charge(&here, &server, &sold_out).await;
    assert!(
        matches!(&told, Err(ShopError::Lock(busy)) if busy.is_not_acquired()),
        "{told:?}"
    );
    assert!(begin.elapsed() >= ms(199), "{:?}", begin.elapsed());
    // Another order is another lock.
    let other = Order { id: 43, stock: 1 };
    assert!(charge(&here, &server, &other).await.unwrap().is_some());
    released(held).await;
    // Dropped half-way it is free.
    let mut half = Box::pin(charge(&here, &server, &order));
    while !server.exists("lock:order:42") {
        assert!(crate::poll_once(&mut half).await.is_none());
        sleep(ms(1)).await;
    }
    drop(half);
    released(within(BOUND, "it is free", lock.lease()).await.unwrap()).await;
    nothing_left(&server, &[&here, &there]).await;
}
