//! W4: a turn is for those who look.

use std::future::{pending, ready};

use futures::FutureExt;
use lockstream::{FutureLockExt, LockRegistry};
use tokio::time::{Instant, sleep};

use crate::{ms, two};

/// A third of the ttl, after which the turn of one who does not look is another's.
const PATIENCE: u64 = 1_000;

fn lock(registry: &LockRegistry) -> lockstream::Lock {
    registry.obtain("k").ttl(ms(3 * PATIENCE))
}

/// Granted in a `select!` arm that nobody polls: the next registry gets it after a third of the ttl, and the one who
/// slept queues again when it is polled.
#[tokio::test(start_paused = true)]
async fn a_turn_that_nobody_looks_at_goes_to_the_next_registry() {
    let (_, here, there) = two();
    let held = lock(&there).lease().await.unwrap();
    let mut asleep = lock(&here).lease();
    assert!((&mut asleep).now_or_never().is_none());
    held.release().await.unwrap();
    let begin = Instant::now();
    let lease = lock(&there).lease().await.unwrap();
    assert_eq!(begin.elapsed(), ms(PATIENCE));

    assert!((&mut asleep).now_or_never().is_none(), "its place was lost");
    let token = lease.token();
    lease.release().await.unwrap();
    let lease = asleep.await.unwrap();
    assert!(lease.token() > token);
    lease.release().await.unwrap();
    assert_eq!((here.in_use(), there.in_use()), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn a_turn_that_nobody_looks_at_goes_to_the_next_task() {
    let (_, here, _) = two();
    let held = lock(&here).lease().await.unwrap();
    let mut asleep = FutureLockExt::with_lock(ready(1), lock(&here));
    assert!((&mut asleep).now_or_never().is_none());
    let begin = Instant::now();
    let awake = tokio::spawn(async move {
        let lease = lock(&here).lease().await.unwrap();
        let at = begin.elapsed();
        lease.release().await.unwrap();
        at
    });
    held.release().await.unwrap();
    assert_eq!(awake.await.unwrap(), ms(PATIENCE));
    assert_eq!(asleep.await.unwrap(), 1);
}

/// Nobody else waits: the key is free for whoever comes, and nothing is in use for the one who sleeps.
#[tokio::test(start_paused = true)]
async fn a_turn_that_nobody_looks_at_frees_the_key() {
    let (store, here, there) = two();
    let mut asleep = lock(&here).acquire();
    // A free key is granted in the poll itself on this store, so it needs a way to go.
    store.set_latency(ms(1));
    assert!((&mut asleep).now_or_never().is_none());
    sleep(ms(PATIENCE + 10)).await;
    assert_eq!((store.keys(), here.in_use()), (0, 0));
    assert!(lock(&there).lease_once().await.unwrap().is_some());
    assert!(asleep.await.unwrap());
}

/// One who looks in time keeps the turn, as often as it lets time go by before that.
#[tokio::test(start_paused = true)]
async fn a_waiter_that_polls_in_time_has_the_turn() {
    let (_, here, there) = two();
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

/// The wait goes on while one sleeps: when it is over, looking is too late.
#[tokio::test(start_paused = true)]
async fn a_waiter_that_sleeps_past_its_wait_gets_nothing() {
    let (_, here, there) = two();
    let held = lock(&there).lease().await.unwrap();
    let waiting = lock(&here).wait(ms(500));
    let mut asleep = pending::<()>().with_lock(&waiting).boxed();
    assert!(asleep.as_mut().now_or_never().is_none());
    held.release().await.unwrap();
    let _held = lock(&there).lease().await.unwrap();
    let told = asleep.now_or_never().expect("its wait is over");
    assert!(
        told.as_ref().is_err_and(|it| it.is_not_acquired()),
        "{told:?}"
    );
}
