//! What is dropped while it releases, or only looks.

use std::time::Duration;

use lockstream::{Lease, LockError};
use tokio::time::{Instant, timeout};

use crate::cut::{Cut, Then};
use crate::memory::{KEY, LATENCY, SOON, World, eventually};

const THENS: [Then; 3] = [
    Then::AtOnce,
    Then::After(Duration::from_millis(1)),
    Then::WhenWoken,
];

/// Runs a scene at every cut until it says that what it cut was done before.
async fn at_every_cut(name: &str, mut scene: impl AsyncFnMut(Cut, &str) -> bool) {
    for then in THENS {
        for polls in 0.. {
            assert!(polls < 100, "{name} never ends");
            let cut = Cut { polls, then };
            if scene(cut, &format!("{name}, {cut:?}")).await {
                break;
            }
        }
    }
}

/// The lease of one who waits in another registry, and when it came.
async fn next(world: &World, what: &str) -> (Lease, Duration) {
    let begin = Instant::now();
    let lease = timeout(Duration::from_secs(30), world.there.obtain(KEY).lease()).await;
    let lease = lease.unwrap_or_else(|_| panic!("{what}: the next is never served"));
    (lease.unwrap(), begin.elapsed())
}

async fn done_with(world: World, lease: Lease, what: &str) {
    let token = lease.token();
    lease.release().await.unwrap();
    world.assert_clean(token, what).await;
}

#[tokio::test(start_paused = true)]
async fn a_release_of_a_lock_has_done_nothing_unpolled_and_goes_on_when_polled() {
    at_every_cut("Lock::release", async |cut, what| {
        let world = World::new();
        let lock = world.here.obtain(KEY);
        assert!(lock.acquire().await.unwrap());
        let released = cut.drive(lock.release()).await;
        assert_eq!(lock.is_acquired(), cut.polls == 0, "{what}");
        if let Some(released) = &released {
            assert!(matches!(released, Ok(true)), "{what}: {released:?}");
        }
        drop(lock);
        let (lease, waited) = next(&world, what).await;
        assert!(waited <= SOON, "{what}: {waited:?}");
        done_with(world, lease, what).await;
        released.is_some()
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn a_release_of_a_lease_goes_on_whenever_it_is_dropped() {
    at_every_cut("Lease::release", async |cut, what| {
        let world = World::new();
        let lease = world.here.obtain(KEY).lease().await.unwrap();
        let first = lease.token();
        let view = lease.view();
        let released = cut.drive(lease.release()).await;
        assert!(!view.is_valid(), "{what}");
        let (lease, waited) = next(&world, what).await;
        assert!(lease.token() > first, "{what}");
        assert!(waited <= SOON, "{what}: {waited:?}");
        done_with(world, lease, what).await;
        released.is_some()
    })
    .await;
}

/// `lost` and `inspect` only look: the lease is as good as before.
#[tokio::test(start_paused = true)]
async fn dropping_lost_or_inspect_changes_nothing() {
    for name in ["lost", "inspect"] {
        at_every_cut(name, async |cut, what| {
            let world = World::new();
            let lock = world.here.obtain(KEY);
            let lease = lock.lease().await.unwrap();
            let done = match name {
                "lost" => {
                    // Past its second poll it waits for ever: nothing happens to the lease.
                    let cut = Cut {
                        polls: cut.polls.min(1),
                        ..cut
                    };
                    let lost = cut.drive(timeout(LATENCY, lease.lost())).await;
                    assert!(lost.is_none_or(|lost| lost.is_err()), "{what}");
                    cut.polls == 1
                }
                _ => cut.drive(lock.inspect()).await.is_some(),
            };
            assert!(
                lease.is_valid() || lease.deadline() <= Instant::now(),
                "{what}"
            );
            drop((lease, lock));
            let (lease, waited) = next(&world, what).await;
            assert!(waited <= SOON, "{what}: {waited:?}");
            done_with(world, lease, what).await;
            done
        })
        .await;
    }
}

/// Once polled a shutdown goes on, whoever holds and any waiter; unpolled it has done nothing.
#[tokio::test(start_paused = true)]
async fn a_shutdown_goes_on_when_it_is_dropped() {
    at_every_cut("shutdown", async |cut, what| {
        let world = World::new();
        let lease = world.here.obtain(KEY).lease().await.unwrap();
        let first = lease.token();
        let waiter = tokio::spawn(world.here.obtain(KEY).lease());
        let elsewhere = world.there.obtain("elsewhere").lease().await.unwrap();
        let queued = tokio::spawn(world.here.obtain("elsewhere").lease());
        tokio::time::sleep(2 * LATENCY).await;

        let done = cut.drive(world.here.shutdown()).await.is_some();
        if cut.polls == 0 {
            assert!(lease.is_valid(), "{what}");
            waiter.abort();
            queued.abort();
        } else {
            assert!(
                matches!(lease.lost().await, LockError::Closed { .. }),
                "{what}"
            );
            let told = [waiter.await.unwrap(), queued.await.unwrap()];
            for told in told {
                assert!(
                    matches!(told, Err(LockError::Closed { .. })),
                    "{what}: {told:?}"
                );
            }
            let late = world.here.obtain("late").lease().await;
            assert!(
                matches!(late, Err(LockError::Closed { .. })),
                "{what}: {late:?}"
            );
        }
        drop(lease);
        let (next, waited) = next(&world, what).await;
        assert!(waited <= SOON, "{what}: {waited:?}");
        assert!(next.token() > first, "{what}");
        eventually(&format!("{what}: still in use"), || {
            world.here.in_use() == 0
        })
        .await;
        elsewhere.release().await.unwrap();
        done_with(world, next, what).await;
        done
    })
    .await;
}
