use std::cell::Cell;
use std::future::{Future, Ready, ready};
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::{Context, Poll};

use futures::future::{self, Either, FusedFuture, join_all};
use futures::{FutureExt, StreamExt, stream};
use lockstream::{FutureLockExt, LockRegistry, StreamLockExt, Token};
use tokio::time::{Instant, sleep, timeout};

use crate::{Floor, ms, two};

/// One who looks in time keeps the turn, as often as it lets time go by before that.
#[tokio::test(start_paused = true)]
async fn a_waiter_that_polls_in_time_has_the_turn() {
    // A third of the ttl, after which the turn is another's (W4).
    const PATIENCE: u64 = 1_000;
    let (_, here, there) = two();
    let lock = |locks: &LockRegistry| locks.obtain("k").ttl(ms(3 * PATIENCE));
    let held = lock(&there).lease().await.unwrap();
    let mut slow = lock(&here).lease();
    assert!((&mut slow).now_or_never().is_none());
    held.release().await.unwrap();
    sleep(ms(PATIENCE - 10)).await;
    let lease = (&mut slow).now_or_never().expect("its turn").unwrap();
    // A lease once taken is held, polled or not.
    let mut rival = lock(&there).lease();
    assert!((&mut rival).now_or_never().is_none());
    sleep(ms(PATIENCE)).await;
    assert!(lease.is_valid());
    assert!((&mut rival).now_or_never().is_none());
    lease.release().await.unwrap();
    rival.await.unwrap().release().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn join_runs_one_after_the_other() {
    let locks = LockRegistry::in_memory();
    let floor = Floor::default();
    let lock = locks.obtain("k");
    let begin = Instant::now();
    let (one, two, three) = tokio::join!(
        FutureLockExt::with_lock(floor.cross(), &lock),
        FutureLockExt::with_lock(floor.cross(), (&locks, "k")),
        lock.with_lease(async |lease| {
            floor.cross().await;
            assert!(lease.is_valid());
        }),
    );
    one.and(two).and(three).unwrap();
    assert!(begin.elapsed() >= ms(9));
    let all = join_all((0..50).map(|_| FutureLockExt::with_lock(floor.cross(), &lock))).await;
    assert!(all.iter().all(Result::is_ok));
    assert_eq!(locks.in_use(), 0);
}

/// A bound around the whole ends waiting and work alike, and leaves nothing behind.
#[tokio::test(start_paused = true)]
async fn a_timeout_bounds_waiting_and_work() {
    let (store, here, there) = two();
    let held = there.obtain("k").lease().await.unwrap();
    let begin = Instant::now();
    let waited = timeout(ms(50), FutureLockExt::with_lock(ready(()), (&here, "k"))).await;
    assert!(waited.is_err() && begin.elapsed() == ms(50));
    held.release().await.unwrap();
    let worked = FutureLockExt::with_lock(sleep(ms(100)), (&here, "k"));
    assert!(timeout(ms(50), worked).await.is_err());
    assert!(there.obtain("k").acquire_once().await.unwrap());
    drop((here, there));
    assert_eq!(store.keys(), 0);
}

#[tokio::test(start_paused = true)]
async fn buffered_work_on_few_keys() {
    let (_, here, there) = two();
    let floors = [(); 4].map(|()| Floor::default());
    let work = stream::iter(0..80).map(|i| {
        let registry = if i % 3 == 0 { &there } else { &here };
        let floor = &floors[i % 4];
        FutureLockExt::with_lock(floor.cross(), (registry, format!("key {}", i % 4)))
    });
    let done: Vec<_> = work.buffer_unordered(16).collect().await;
    assert_eq!(done.iter().filter(|it| it.is_ok()).count(), 80);
    assert_eq!((here.in_use(), there.in_use()), (0, 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn spawned_and_boxed_on_several_threads() {
    let (_, here, there) = two();
    let floor = Floor::default();
    let tasks: Vec<_> = (0..60)
        .map(|i| {
            let floor = floor.clone();
            let work = async move { floor.cross().await };
            let lock = [&here, &there][i % 2].obtain("k");
            let locked = FutureLockExt::with_lock(work, lock);
            if i % 4 < 2 {
                tokio::spawn(locked)
            } else {
                tokio::spawn(locked.boxed())
            }
        })
        .collect();
    for task in tasks {
        task.await.unwrap().unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn work_may_borrow_locals() {
    let locks = LockRegistry::in_memory();
    let lock = locks.obtain("k");
    let mut log = vec![1];
    async { log.push(2) }.with_lock(&lock).await.unwrap();
    lock.with_lease(async |_| log.push(3)).await.unwrap();
    lock.with_lease(|_| async { log.push(4) }).await.unwrap();
    let mut rows = pin!(StreamLockExt::with_lock(
        stream::iter(log.iter_mut()),
        &lock
    ));
    while let Some(row) = rows.next().await {
        *row.unwrap() += 1;
    }
    assert_eq!(log, [2, 3, 4, 5]);
}

#[tokio::test(start_paused = true)]
async fn work_may_stay_on_its_thread() {
    let locks = LockRegistry::in_memory();
    let lock = locks.obtain("k");
    let count = Rc::new(Cell::new(0));
    let local = tokio::task::LocalSet::new();
    for _ in 0..10 {
        let (own, lock) = (count.clone(), lock.clone());
        local.spawn_local(FutureLockExt::with_lock(
            async move {
                let before = own.get();
                sleep(ms(1)).await;
                own.set(before + 1);
                own
            },
            lock,
        ));
    }
    local.await;
    assert_eq!(count.get(), 10);
}

type Work = fn(lockstream::LeaseView) -> Ready<Token>;

/// Every type has a name that fits a struct's field.
struct Fields {
    acquire: lockstream::future::Acquire,
    lease: lockstream::future::AcquireLease,
    once: lockstream::future::LeaseOnce,
    skip: lockstream::future::OrSkip<lockstream::future::WithLock<Ready<u8>>>,
    locked: lockstream::future::TryWithLock<Ready<Result<u8, lockstream::LockError>>>,
    rows: lockstream::stream::WithLock<stream::Iter<std::ops::Range<u8>>>,
    leased: lockstream::future::WithLease<Work>,
}

#[tokio::test(start_paused = true)]
async fn types_have_names() {
    let locks = LockRegistry::in_memory();
    let lock = locks.obtain("k");
    let fields = Fields {
        acquire: lock.acquire(),
        lease: lock.lease(),
        once: lock.lease_once(),
        skip: FutureLockExt::with_lock(ready(1), &lock).or_skip(),
        locked: FutureLockExt::try_with_lock(ready(Ok(2)), &lock),
        rows: StreamLockExt::with_lock(stream::iter(0..3), &lock),
        leased: lock.with_lease(|lease| ready(lease.token())),
    };
    assert!(fields.acquire.await.unwrap() && lock.release().await.unwrap());
    fields.lease.await.unwrap().release().await.unwrap();
    fields.once.await.unwrap().unwrap().release().await.unwrap();
    assert_eq!(fields.skip.await.unwrap(), Some(1));
    assert_eq!(fields.locked.await.unwrap(), 2);
    assert_eq!(fields.rows.count().await, 3);
    assert!(fields.leased.await.unwrap().get() > 0);
}

/// `futures::select!` wants fused futures, which `with_lock`'s and `acquire`'s are.
#[tokio::test(start_paused = true)]
async fn fused_futures_fit_the_other_select() {
    let locks = LockRegistry::in_memory();
    let lock = locks.obtain("k");
    let mut locked = FutureLockExt::with_lock(ready(7), &lock);
    let mut acquire = lock.acquire();
    let (mut value, mut acquired) = (None, false);
    loop {
        futures::select! {
            done = locked => value = Some(done.unwrap()),
            done = acquire => {
                acquired = done.unwrap();
                lock.release().await.unwrap();
            }
            complete => break,
        }
    }
    assert_eq!((value, acquired), (Some(7), true));
    let mut leads = pin!(lock.lead(async |_| 7));
    assert!(!leads.is_terminated());
    assert_eq!(leads.as_mut().await.unwrap(), 7);
    assert!(leads.is_terminated());
}

/// Work that has something until it is dropped.
struct Keeps<T>(
    Option<T>,
    #[expect(dead_code, reason = "it is dropped")] Rc<()>,
);

impl<T: Unpin> Future for Keeps<T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<T> {
        self.0.take().map_or(Poll::Pending, Poll::Ready)
    }
}

/// What it has is gone when its future is done, which may be kept for longer.
#[tokio::test(start_paused = true)]
async fn nothing_of_the_work_is_kept_when_it_is_done() {
    let (_, here, there) = two();
    let kept = Rc::new(());
    let lock = here.obtain("k").wait(ms(0));
    let mut done = Keeps(Some(7), kept.clone()).with_lock(&lock);
    assert_eq!((&mut done).await.unwrap(), 7);
    assert_eq!(Rc::strong_count(&kept), 1, "the work");

    let held = there.obtain("k").lease().await.unwrap();
    let mut busy = Keeps(Some(7), kept.clone()).with_lock(&lock);
    assert!((&mut busy).await.unwrap_err().is_not_acquired());
    assert_eq!(Rc::strong_count(&kept), 1, "work that never began");
    let mut given = Some(kept.clone());
    let mut busy = pin!(lock.with_lease(async move |_| drop(given.take())));
    assert!(busy.as_mut().await.unwrap_err().is_not_acquired());
    assert_eq!(
        Rc::strong_count(&kept),
        1,
        "a closure that was never called"
    );
    held.release().await.unwrap();

    let value = kept.clone();
    let late = async move {
        // Its lease runs out in the very poll in which it is done.
        let _ = tokio::time::advance(ms(700)).now_or_never();
        value
    };
    let mut lost = pin!(late.with_lock(here.obtain("k").ttl(ms(600))));
    assert!(lost.as_mut().await.unwrap_err().is_lost());
    assert_eq!(Rc::strong_count(&kept), 1, "its value");
}

/// Races of two acquisitions of one key: the loser, dropped or kept, does not hold it against the winner.
#[tokio::test(start_paused = true)]
async fn the_loser_of_a_race_takes_nothing_along() {
    let (_, here, there) = two();
    for _ in 0..20 {
        let raced = future::select(here.obtain("k").lease(), there.obtain("k").lease()).await;
        let (Either::Left((lease, loser)) | Either::Right((lease, loser))) = raced;
        drop(loser);
        lease.unwrap().release().await.unwrap();
    }
    eventually_idle(&[&here, &there]).await;
}

async fn eventually_idle(registries: &[&LockRegistry]) {
    for _ in 0..100 {
        if registries.iter().all(|it| it.in_use() == 0) {
            return;
        }
        sleep(ms(1)).await;
    }
    panic!("a key stays in use");
}
