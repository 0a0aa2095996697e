//! Faults that were found, one test each.

use std::future::{pending, poll_fn};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Poll, Waker};
use std::time::Duration;

use futures::future::BoxFuture;
use futures::{FutureExt, Stream, StreamExt, stream};
use lockstream::store::MemoryStore;
use lockstream::{FutureLockExt, LockError, LockRegistry, StreamLockExt};
use tokio::time::{sleep, timeout};
#[cfg(feature = "redis")]
use {crate::support::RedisServer, lockstream::Repeat, lockstream::store::RedisStore};

/// What the store kept when this was dropped.
struct Witness(MemoryStore, Arc<AtomicUsize>);

impl Drop for Witness {
    fn drop(&mut self) {
        self.1.store(self.0.keys(), Ordering::SeqCst);
    }
}

async fn work(witness: Witness) {
    let _witness = witness;
    pending().await
}

fn rows(witness: Witness) -> impl Stream<Item = ()> {
    stream::pending().inspect(move |()| _ = &witness)
}

/// A dropped combinator gave the lock back first and dropped the work then: whatever the work's own destructors
/// did (a transaction rolled back, a file closed) they did unlocked, next to the following holder.
#[tokio::test(start_paused = true)]
async fn the_work_is_dropped_before_the_lock_is_given_back() {
    let store = MemoryStore::new();
    let locks = LockRegistry::builder(store.clone()).build().unwrap();
    let lock = locks.obtain("k");
    let seen = Arc::new(AtomicUsize::new(0));
    let witness = || Witness(store.clone(), seen.clone());
    let cases: [(&str, BoxFuture<'static, ()>); 4] = [
        (
            "with_lock",
            FutureLockExt::with_lock(work(witness()), &lock)
                .map(drop)
                .boxed(),
        ),
        ("with_lease", {
            let witness = witness();
            lock.with_lease(|_| work(witness)).map(drop).boxed()
        }),
        ("stream with_lock", {
            StreamLockExt::with_lock(rows(witness()), &lock)
                .for_each(async |_| ())
                .boxed()
        }),
        ("with_lease_stream", {
            let witness = witness();
            lock.with_lease_stream(|_| rows(witness))
                .for_each(async |_| ())
                .boxed()
        }),
    ];
    for (name, mut running) in cases {
        assert!(running.as_mut().now_or_never().is_none(), "{name}");
        assert_eq!(store.keys(), 1, "{name} does not hold");
        seen.store(usize::MAX, Ordering::SeqCst);
        drop(running);
        assert_eq!(
            seen.load(Ordering::SeqCst),
            1,
            "{name}: the work went unlocked"
        );
        assert_eq!(store.keys(), 0, "{name}");
    }
}

/// The store was away and came back while a lease was held, which no answer since had told: who waited behind that
/// lease for nothing was told that the store failed, not that the lock was busy.
#[tokio::test(start_paused = true)]
async fn an_outage_that_is_over_is_no_reason_not_to_get_the_lock() {
    let store = MemoryStore::new();
    let locks = LockRegistry::builder(store.clone()).build().unwrap();
    let lock = locks.obtain("k");
    let lease = lock.lease().await.unwrap();
    let mut waiting = lock.lease_within(Duration::from_secs(2));
    assert!((&mut waiting).now_or_never().is_none());
    store.set_offline(true);
    sleep(Duration::from_millis(10)).await;
    store.set_offline(false);
    let told = waiting.await;
    assert!(
        matches!(told, Err(LockError::NotAcquired { .. })),
        "{told:?}"
    );
    lease.release().await.unwrap();
}

/// A task that only wakers keep alive, as simple executors have them.
struct Task(std::sync::Mutex<Option<BoxFuture<'static, ()>>>);

impl std::task::Wake for Task {
    fn wake(self: Arc<Self>) {}
}

/// The waker of whoever acquired stayed with the lease, and was dropped with the registry's state locked. A waker
/// may be the last that keeps a task alive; that task may hold a lease of the same registry: deadlock.
#[tokio::test]
async fn a_waker_may_take_a_lease_along() {
    let locks = LockRegistry::in_memory();
    let (hand_out, mut handed) = tokio::sync::mpsc::unbounded_channel();
    let task = Arc::new(Task(None.into()));
    let own = locks.clone();
    let run = async move {
        let kept = own.obtain("kept").lease().await.unwrap();
        hand_out
            .send(own.obtain("handed").lease().await.unwrap())
            .unwrap();
        pending::<()>().await;
        drop(kept);
    };
    *task.0.lock().unwrap() = Some(run.boxed());
    let waker = Waker::from(task.clone());
    let mut run = task.0.lock().unwrap().take().unwrap();
    let polled = run
        .as_mut()
        .poll(&mut std::task::Context::from_waker(&waker));
    assert!(polled.is_pending());
    *task.0.lock().unwrap() = Some(run);
    drop((waker, task));
    let handed = handed.recv().await.unwrap();
    let dropped = std::thread::spawn(move || drop(handed));
    let bound = Duration::from_secs(5);
    timeout(
        bound,
        poll_fn(|cx| {
            cx.waker().wake_by_ref();
            if dropped.is_finished() {
                Poll::Ready(())
            } else {
                Poll::Pending
            }
        }),
    )
    .await
    .expect("dropping a lease does not hang");
    let free = timeout(bound, locks.obtain("kept").lease()).await;
    free.expect("the other lease went with its task")
        .unwrap()
        .release()
        .await
        .unwrap();
}

/// A release under way when the registry was shut down, with a store that did not answer: after three response
/// time-outs the registry hung up, forgot who waited, and the release stayed pending for ever.
#[tokio::test(start_paused = true)]
async fn a_release_is_told_when_the_session_ends() {
    let store = MemoryStore::new();
    let locks = LockRegistry::builder(store.clone()).build().unwrap();
    let lease = locks.obtain("a").lease().await.unwrap();
    let worked = tokio::spawn(FutureLockExt::with_lock(
        sleep(Duration::from_secs(1)),
        (&locks, "b"),
    ));
    sleep(Duration::from_millis(1)).await;
    store.set_latency(Duration::from_secs(20));
    let releasing = tokio::spawn(lease.release());
    sleep(Duration::from_millis(1)).await;
    locks.shutdown().await;
    let told = timeout(Duration::from_secs(1), releasing)
        .await
        .expect("it is told")
        .unwrap();
    assert!(matches!(told, Err(LockError::Closed { .. })), "{told:?}");
    let worked = timeout(Duration::from_secs(1), worked)
        .await
        .expect("it is told")
        .unwrap();
    assert!(
        matches!(worked, Err(LockError::Closed { .. })),
        "{worked:?}"
    );
    assert_eq!(locks.in_use(), 0);
}

/// A caller that asks once got the key, was not polled for a third of the ttl and lost the turn. When it was polled it
/// asked again, but within the response time-out of its first question, which was over: "no answer in time".
#[tokio::test(start_paused = true)]
async fn a_caller_that_asks_once_and_polls_late_asks_again_with_its_whole_time() {
    let store = MemoryStore::new();
    store.set_latency(Duration::from_millis(100));
    let locks = LockRegistry::builder(store)
        .ttl(Duration::from_secs(6))
        .build()
        .unwrap();
    let lock = locks.obtain("k");
    let mut asking = lock.acquire_once();
    assert!((&mut asking).now_or_never().is_none());
    sleep(Duration::from_secs(4)).await;
    assert!(asking.await.unwrap());
    assert!(lock.is_acquired());
}

/// A registry outlives the runtime on which an op was under way: the op's task went with the runtime, its answer
/// never came, and the key could never be locked again.
#[test]
fn an_op_outlives_the_runtime_that_it_ran_on() {
    let store = MemoryStore::new();
    let locks = LockRegistry::builder(store.clone()).build().unwrap();
    let runtime = || {
        tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap()
    };
    runtime().block_on(async {
        store.set_latency(Duration::from_secs(120));
        assert!(locks.obtain("k").lease().now_or_never().is_none());
    });
    store.set_latency(Duration::ZERO);
    runtime().block_on(async {
        let lease = timeout(Duration::from_secs(60), locks.obtain("k").lease()).await;
        lease
            .expect("the key is not stuck")
            .unwrap()
            .release()
            .await
            .unwrap();
    });
    assert_eq!((locks.in_use(), store.keys()), (0, 0));
}

/// While the store was away, each key that somebody asked for stayed in use after he had been told: a table that grew
/// with every request of an outage, and a registry that outlived its last handle, for good if the password was wrong.
#[tokio::test(start_paused = true)]
async fn an_outage_leaves_nothing_in_use() {
    let tasks = || {
        tokio::runtime::Handle::current()
            .metrics()
            .num_alive_tasks()
    };
    let before = tasks();
    let store = MemoryStore::new();
    let locks = LockRegistry::builder(store.clone()).build().unwrap();
    store.set_offline(true);
    for key in ["a", "b", "c"] {
        let told = locks.obtain(key).acquire_once().await;
        assert!(matches!(told, Err(LockError::Store { .. })), "{told:?}");
        let told = locks.obtain(key).lease_within(Duration::from_secs(1)).await;
        assert!(matches!(told, Err(LockError::Store { .. })), "{told:?}");
        drop(locks.obtain(key).lease().now_or_never());
    }
    assert_eq!(locks.in_use(), 0);
    drop(locks);
    sleep(Duration::from_millis(1)).await;
    assert_eq!(tasks(), before);
}

/// The same with a ticket in the store's queue, which is owed a withdrawal, and a turn that is to be yielded.
#[tokio::test(start_paused = true)]
async fn an_outage_amid_a_queue_leaves_nothing_in_use() {
    let store = MemoryStore::new();
    let registry = || {
        LockRegistry::builder(store.clone())
            .local_passes(0)
            .build()
            .unwrap()
    };
    let (here, there) = (registry(), registry());
    let held = here.obtain("k").lease().await.unwrap();
    let mut queued = there.obtain("k").lease();
    let mut local = here.obtain("k").lease();
    assert!((&mut queued).now_or_never().is_none());
    assert!((&mut local).now_or_never().is_none());
    store.set_offline(true);
    drop((held, queued));
    let again = there.obtain("k").lease().now_or_never();
    assert!(again.is_none());
    drop((again, local));
    // A lease lasts 30 s, a queue 60 s longer.
    sleep(Duration::from_secs(31)).await;
    assert_eq!(here.in_use(), 0, "what is owed runs out");
    sleep(Duration::from_secs(61)).await;
    assert_eq!(
        (here.in_use(), there.in_use()),
        (0, 0),
        "what is owed runs out"
    );
    store.set_offline(false);
    let lease = there
        .obtain("k")
        .lease_once()
        .await
        .unwrap()
        .expect("it is free");
    lease.release().await.unwrap();
    assert_eq!(store.keys(), 0);
}

/// Runs what might hang on a thread of its own.
pub(crate) fn does_not_hang(what: impl FnOnce() + Send + 'static) {
    let (done, is_done) = std::sync::mpsc::channel();
    let thread = std::thread::spawn(move || {
        what();
        done.send(()).unwrap();
    });
    let told = is_done.recv_timeout(Duration::from_secs(10));
    if told != Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
        thread.join().unwrap();
    }
    told.expect("it hangs");
}

/// A runtime whose time is its own.
pub(crate) fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .start_paused(true)
        .build()
        .unwrap()
}

/// What it holds is dropped by whoever wakes it, as where an executor is gone whose task this was.
struct DropsWhenWoken<T>(std::sync::Mutex<Option<T>>);

impl<T: Send> std::task::Wake for DropsWhenWoken<T> {
    fn wake(self: Arc<Self>) {
        let held = self.0.lock().unwrap().take();
        drop(held);
    }
}

/// Who watched a lease was woken with the registry locked, and under the lock of the list of those who watch. A waker
/// may run its task, or drop it; that task may hold leases of the same registry, and watch the same lease: deadlock.
#[test]
fn a_waker_that_is_told_of_a_loss_may_use_the_registry() {
    does_not_hang(|| {
        runtime().block_on(async {
            let locks = LockRegistry::in_memory();
            let other = locks.obtain("other").lease().await.unwrap();
            let lock = locks.obtain("k").ttl(Duration::from_secs(1));
            let lease = lock.lease().await.unwrap();
            let beside = lease.lost();
            let waking = Arc::new(DropsWhenWoken(Some((other, beside)).into()));
            let waker = Waker::from(waking.clone());
            let mut cx = std::task::Context::from_waker(&waker);
            let mut lost = lease.lost();
            assert!(lost.poll_unpin(&mut cx).is_pending());
            if let Some((_, beside)) = waking.0.lock().unwrap().as_mut() {
                let mut nobody = std::task::Context::from_waker(Waker::noop());
                assert!(beside.poll_unpin(&mut nobody).is_pending());
            }
            sleep(Duration::from_secs(2)).await;
            assert!(waking.0.lock().unwrap().is_none(), "it was woken");
            assert!(lost.await.is_lost());
            let free = locks.obtain("other").lease_once().await.unwrap();
            drop(free.expect("the other lease went with the task"));
        });
    });
}

/// A log that does this at every line.
struct Log<F>(F);

impl<F: Fn() + Send + Sync + 'static> tracing::Subscriber for Log<F> {
    fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
        true
    }
    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }
    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn event(&self, _: &tracing::Event<'_>) {
        self.0();
    }
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

/// A loss was logged with the registry locked. A subscriber is the user's: it may take its time, and look at whatever
/// it likes.
#[test]
fn a_log_that_is_told_of_a_loss_may_use_the_registry() {
    does_not_hang(|| {
        let locks = LockRegistry::in_memory();
        let registry = locks.clone();
        let curious = Log(move || _ = registry.in_use());
        tracing::subscriber::with_default(curious, || {
            runtime().block_on(async {
                let lock = locks.obtain("k").ttl(Duration::from_secs(1));
                let lease = lock.lease().await.unwrap();
                assert!(lease.lost().await.is_lost());
            });
        });
    });
}

/// A waker of the user's own, with a fault in it.
struct Faulty;

impl std::task::Wake for Faulty {
    fn wake(self: Arc<Self>) {
        panic!("a user's fault");
    }
}

/// A waker panicked when it was told of a loss. The release that was to follow was never sent, and the key could not be
/// locked by this registry again, for good; and the timer took the runtime for gone, so that nobody's wait ended.
#[tokio::test(start_paused = true)]
async fn a_waker_that_panics_harms_no_other() {
    let locks = LockRegistry::in_memory();
    let held = locks.obtain("held").lease().await.unwrap();
    let lease = locks
        .obtain("k")
        .ttl(Duration::from_secs(1))
        .lease()
        .await
        .unwrap();
    let waker = Waker::from(Arc::new(Faulty));
    let mut lost = lease.lost();
    let told = lost.poll_unpin(&mut std::task::Context::from_waker(&waker));
    assert!(told.is_pending());
    let waiting = tokio::spawn(locks.obtain("held").lease_within(Duration::from_secs(3)));
    let told = timeout(Duration::from_secs(5), waiting).await;
    let told = told.expect("its wait ends").unwrap();
    assert!(
        matches!(told, Err(LockError::NotAcquired { .. })),
        "{told:?}"
    );
    let next = timeout(Duration::from_secs(5), locks.obtain("k").lease()).await;
    let next = next.expect("the key is not stuck").unwrap();
    next.release().await.unwrap();
    held.release().await.unwrap();
}

/// The timer's task logged a loss, and the panic of the log passed for the end of the runtime. The renewal of every
/// other lease stopped until somebody arrived, and whoever watched the lost lease was not told.
#[test]
fn a_log_that_panics_at_a_loss_stops_no_renewal() {
    let lines = Arc::new(AtomicUsize::new(0));
    let count = lines.clone();
    let faulty = Log(move || {
        count.fetch_add(1, Ordering::Relaxed);
        panic!("a user's fault");
    });
    tracing::subscriber::with_default(faulty, || {
        runtime().block_on(async {
            let store = MemoryStore::new();
            let locks = LockRegistry::builder(store.clone())
                .ttl(Duration::from_secs(3))
                .build()
                .unwrap();
            let renewed = locks.obtain("renewed").lease().await.unwrap();
            let lock = locks.obtain("k").ttl(Duration::from_secs(1));
            let lease = lock.lease().await.unwrap();
            let watching = tokio::spawn(lease.lost());
            sleep(Duration::from_secs(12)).await;
            assert!(lines.load(Ordering::Relaxed) > 0, "it logs nothing");
            assert!(watching.is_finished());
            assert!(renewed.is_valid());
            renewed.release().await.unwrap();
        });
    });
}

/// Uses the registry whenever it is asked, and when it is dropped.
#[cfg(feature = "redis")]
struct Curiosity(LockRegistry, Arc<AtomicUsize>);

#[cfg(feature = "redis")]
impl Drop for Curiosity {
    fn drop(&mut self) {
        assert!(self.0.snapshot().keys.len() <= 1);
        self.1.fetch_add(1, Ordering::Relaxed);
    }
}

/// Policies were asked, and dropped, with the registry locked.
#[cfg(feature = "redis")]
#[test]
fn a_policy_may_use_the_registry() {
    does_not_hang(|| {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        runtime.block_on(async {
            // To a user without channels nothing can be pushed, so that the policy is asked.
            let user = "user x on >p ~* resetchannels +@all";
            let server = RedisServer::builder().config(user).start();
            let store = RedisStore::connect(server.url_with("x", "p", 0)).await;
            let locks = LockRegistry::builder(store.unwrap()).build().unwrap();
            let dropped = Arc::new(AtomicUsize::new(0));
            server.set("lock:k", "somebody else");
            let (registry, count) = (locks.clone(), dropped.clone());
            let pauses = Arc::new(AtomicUsize::new(3));
            let many = pauses.clone();
            let repeat = Repeat::from_fn(move || {
                let mut left = many.load(Ordering::Relaxed);
                let curiosity = Curiosity(registry.clone(), count.clone());
                move || {
                    assert_eq!(curiosity.0.snapshot().keys[0].waiting.len(), 1);
                    left = left.checked_sub(1)?;
                    Some(Duration::from_millis(10))
                }
            });
            let lock = locks.obtain("k").repeat(repeat);
            assert!(!lock.acquire().await.unwrap(), "the policy has ended");
            // After the caller is told.
            while dropped.load(Ordering::Relaxed) == 0 {
                sleep(Duration::from_millis(1)).await;
            }
            // One that is still asked for pauses when its caller leaves, and one that is served.
            pauses.store(usize::MAX, Ordering::Relaxed);
            let left = timeout(Duration::from_millis(5), lock.acquire()).await;
            assert!(left.is_err());
            let waiting = tokio::spawn(lock.lease());
            sleep(Duration::from_millis(5)).await;
            server.del("lock:k");
            drop(waiting.await.unwrap().unwrap());
            while locks.in_use() > 0 {
                sleep(Duration::from_millis(1)).await;
            }
        });
    });
}

/// The waker of a shutdown panicked when the last lease was released, before whoever released it was told.
#[tokio::test(start_paused = true)]
async fn a_shutdown_whose_waker_panics_harms_no_other() {
    let store = MemoryStore::new();
    let locks = LockRegistry::builder(store.clone()).build().unwrap();
    let lease = locks.obtain("k").lease().await.unwrap();
    store.set_latency(Duration::from_millis(50));
    let mut release = Box::pin(lease.release());
    assert!(futures::poll!(&mut release).is_pending());
    let waker = Waker::from(Arc::new(Faulty));
    let mut shutdown = Box::pin(locks.shutdown());
    let mut cx = std::task::Context::from_waker(&waker);
    assert!(shutdown.poll_unpin(&mut cx).is_pending());
    let told = timeout(Duration::from_secs(5), release).await;
    assert!(told.is_ok(), "the release is not told");
}
