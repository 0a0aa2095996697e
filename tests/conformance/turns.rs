//! Who is next.

use std::cell::RefCell;

use futures::future::join_all;
use lockstream::future::AcquireLease;
use lockstream::{FutureLockExt, LockError, LockRegistry};
use tokio::time::{Instant, sleep_until};

use crate::assert_err;
use crate::world::{World, assert_took, free, ms, poll_once, waiting};

/// One waiter a registry: the store's queue alone decides.
pub(crate) async fn processes_take_turns_in_order_of_arrival(w: &dyn World) {
    let holder = w.registry().await;
    let held = holder.obtain("k").lease().await.unwrap();
    let watch = holder.obtain("k");
    let mut locks = Vec::new();
    for _ in 0..8 {
        let registry = w.builder().await.local_passes(0).build().unwrap();
        locks.push(registry.obtain("k"));
    }
    let mut in_line = Vec::new();
    for lock in &locks {
        let mut acquire = lock.acquire();
        assert!(poll_once(&mut acquire).await.is_none());
        in_line.push(acquire);
        waiting(&watch, in_line.len() as u64).await;
    }
    held.release().await.unwrap();
    let order = RefCell::new(Vec::new());
    join_all(
        in_line
            .into_iter()
            .enumerate()
            .map(async |(place, acquire)| {
                assert!(acquire.await.unwrap());
                order.borrow_mut().push(place);
                assert!(locks[place].release().await.unwrap());
            }),
    )
    .await;
    assert_eq!(order.take(), (0..8).collect::<Vec<_>>());
}

/// Whoever holds before them, and though some give up on the way.
pub(crate) async fn waiters_of_one_process_take_turns_in_order_of_arrival(w: &dyn World) {
    let elsewhere = w.registry().await;
    for passes in [0, 16] {
        let here = w.builder().await.local_passes(passes).build().unwrap();
        for holder in [&here, &elsewhere] {
            let held = holder.obtain("k").lease().await.unwrap();
            let locks: Vec<_> = (0..20).map(|_| here.obtain("k")).collect();
            let mut in_line = Vec::new();
            for lock in &locks {
                let mut acquire = lock.acquire();
                assert!(poll_once(&mut acquire).await.is_none());
                in_line.push(acquire);
            }
            if std::ptr::eq(holder, &elsewhere) {
                waiting(&locks[0], 1).await;
            }
            let mut in_line: Vec<_> = in_line.into_iter().enumerate().collect();
            in_line.retain(|(place, _)| ![0, 7, 19].contains(place));
            let stayed: Vec<_> = in_line.iter().map(|(place, _)| *place).collect();
            held.release().await.unwrap();
            let order = RefCell::new(Vec::new());
            join_all(in_line.into_iter().map(async |(place, acquire)| {
                assert!(acquire.await.unwrap());
                order.borrow_mut().push(place);
                assert!(locks[place].release().await.unwrap());
            }))
            .await;
            assert_eq!(order.take(), stayed, "{passes} passes");
        }
    }
}

/// However many wait in one process, another gets its turn.
pub(crate) async fn many_waiters_in_one_process_do_not_shut_others_out(w: &dyn World) {
    let [crowd, other] = w.registries().await;
    let held = crowd.obtain("k").lease().await.unwrap();
    let order = RefCell::new(Vec::new());
    let turn = async |registry: &LockRegistry, name: &'static str| {
        let lock = registry.obtain("k");
        assert!(lock.acquire().await.unwrap());
        order.borrow_mut().push(name);
        assert!(lock.release().await.unwrap());
    };
    let watch = crowd.obtain("k");
    tokio::join!(
        join_all((0..50).map(|_| turn(&crowd, "crowd"))),
        turn(&other, "other"),
        async {
            // The crowd's own place is behind the tenure that it has.
            waiting(&watch, 1).await;
            held.release().await.unwrap();
        }
    );
    let order = order.take();
    assert_eq!(order.len(), 51);
    let place = order.iter().position(|name| *name == "other").unwrap();
    assert!(
        place <= 17,
        "the other's turn came after {place} of the crowd"
    );
}

/// W4: a `select!` arm that nobody polls must not hold a lock for ever.
pub(crate) async fn a_turn_that_is_not_taken_goes_to_the_next_process(w: &dyn World) {
    let [holder, sleeper, next] = w.registries().await;
    let held = holder.obtain("k").lease().await.unwrap();
    let (asleep, awake) = (sleeper.obtain("k").ttl(ms(1500)), next.obtain("k"));
    let mut unpolled = asleep.acquire();
    assert!(poll_once(&mut unpolled).await.is_none());
    waiting(&awake, 1).await;
    let mut polled = awake.acquire();
    assert!(poll_once(&mut polled).await.is_none());
    waiting(&awake, 2).await;

    // The turn may begin long before we hear of the release.
    let begin = Instant::now();
    held.release().await.unwrap();
    assert!(polled.await.unwrap());
    // A third of the ttl, give or take what the deadline leaves out of it.
    assert_took(begin, ms(490), w.late());
    // Polled again it is no dead lease, but a new place in the queue.
    assert!(poll_once(&mut unpolled).await.is_none());
    waiting(&awake, 1).await;
    assert!(awake.release().await.unwrap());
    assert!(unpolled.await.unwrap());
    assert!(asleep.release().await.unwrap());
}

pub(crate) async fn a_turn_that_is_not_taken_goes_to_the_next_in_the_process(w: &dyn World) {
    let [here, there] = w.registries().await;
    for holder in [&here, &there] {
        let held = holder.obtain("k").lease().await.unwrap();
        let (asleep, awake) = (here.obtain("k").ttl(ms(1500)), here.obtain("k"));
        let mut unpolled = asleep.acquire();
        assert!(poll_once(&mut unpolled).await.is_none());
        let mut polled = awake.acquire();
        assert!(poll_once(&mut polled).await.is_none());
        if std::ptr::eq(holder, &there) {
            waiting(&awake, 1).await;
        }
        held.release().await.unwrap();
        let begin = Instant::now();
        assert!(polled.await.unwrap());
        assert!(begin.elapsed() <= ms(700) + w.late());
        assert!(poll_once(&mut unpolled).await.is_none());
        assert!(awake.release().await.unwrap());
        assert!(unpolled.await.unwrap());
        assert!(asleep.release().await.unwrap());
        free(&awake).await;
    }
}

pub(crate) async fn a_turn_that_nobody_takes_frees_the_lock(w: &dyn World) {
    let [holder, sleeper] = w.registries().await;
    let held = holder.obtain("k").lease().await.unwrap();
    let lock = sleeper.obtain("k").ttl(ms(1500));
    let work = async { 1 }.with_lock(&lock);
    let mut unpolled = Box::pin(work);
    assert!(poll_once(&mut unpolled).await.is_none());
    waiting(&lock, 1).await;
    held.release().await.unwrap();
    let begin = Instant::now();
    free(&lock).await;
    assert!(
        begin.elapsed() <= ms(500) + w.late(),
        "long before the ttl's end"
    );
    assert!(
        holder.obtain("k").acquire_once().await.unwrap(),
        "it was not free"
    );
    // The handle above is gone, so that this gets it.
    assert_eq!(unpolled.await.unwrap(), 1);
}

/// A turn that was lost is none, also for a caller whose wait is over by then.
pub(crate) async fn a_turn_lost_after_the_wait_is_busy(w: &dyn World) {
    let [holder, sleeper] = w.registries().await;
    let held = holder.obtain("k").lease().await.unwrap();
    let lock = sleeper.obtain("k").ttl(ms(600));
    // It is granted its turn before its wait is over.
    let mut unpolled = lock.acquire_within(ms(3000));
    let begin = Instant::now();
    assert!(poll_once(&mut unpolled).await.is_none());
    waiting(&lock, 1).await;
    held.release().await.unwrap();
    free(&lock).await;
    let _next = holder.obtain("k").lease().await.unwrap();
    sleep_until(begin + ms(3100)).await;
    assert!(!unpolled.await.unwrap());
}

pub(crate) async fn too_many_waiters_are_turned_away(w: &dyn World) {
    let holder = w.registry().await;
    let registry = w.builder().await.max_waiters(2).build().unwrap();
    let held = holder.obtain("k").ttl(ms(9000)).lease().await.unwrap();
    let lock = registry.obtain("k");
    let (mut one, mut two) = (lock.lease(), lock.clone().lease());
    assert!(poll_once(&mut one).await.is_none());
    assert!(poll_once(&mut two).await.is_none());
    waiting(&holder.obtain("k"), 1).await;

    let (begin, commands) = (Instant::now(), w.commands());
    let full = |error: LockError| matches!(error, LockError::QueueFull { limit: 2, .. });
    assert!(full(assert_err!(lock.acquire().await, QueueFull, "k")));
    assert!(full(assert_err!(lock.lease().await, QueueFull, "k")));
    assert!(full(assert_err!(
        lock.lease().or_skip().await,
        QueueFull,
        "k"
    )));
    let work = async { panic!("never polled") };
    assert!(full(assert_err!(
        work.with_lock(&lock).await,
        QueueFull,
        "k"
    )));
    assert_took(begin, ms(0), w.late());
    assert_eq!(w.commands(), commands, "the store is spared");
    // Who does not wait is no waiter. Another key, and another process, have lines of their own.
    assert!(!lock.acquire_once().await.unwrap());
    assert!(!lock.acquire_within(ms(0)).await.unwrap());
    let other = registry.obtain("other");
    assert!(other.acquire_once().await.unwrap());
    let mut elsewhere = holder.obtain("k").lease();
    assert!(poll_once(&mut elsewhere).await.is_none());

    // A place that is given up is free at once, for one.
    drop(two);
    let mut three = lock.clone().lease();
    assert!(poll_once(&mut three).await.is_none());
    assert!(full(assert_err!(lock.acquire().await, QueueFull, "k")));
    held.release().await.unwrap();
    let turn = async |waiter: AcquireLease| waiter.await.unwrap().release().await.unwrap();
    tokio::join!(turn(one), turn(three), turn(elsewhere));
}
