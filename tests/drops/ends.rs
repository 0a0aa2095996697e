//! Leases that change hands or are made to last longer, dropped at every await.

use std::time::Duration;

use lockstream::LockError;
use tokio::time::{Instant, sleep};

use crate::cut::{Cut, Then};
use crate::memory::{KEY, SOON, World, eventually};

const THENS: [Then; 4] = [
    Then::AtOnce,
    Then::After(Duration::from_millis(1)),
    Then::After(Duration::from_millis(3)),
    Then::WhenWoken,
];

/// The lease that was to be adopted lies there as it was, or is released at once; and nothing stays in use.
#[tokio::test(start_paused = true)]
async fn an_adoption_dropped_anywhere_leaves_it_or_gives_it_back() {
    let (mut left, mut taken) = (0, 0);
    for with_waiter in [false, true] {
        for then in THENS {
            for polls in 0.. {
                assert!(polls < 20, "it never ends");
                let cut = Cut { polls, then };
                let what = format!("{cut:?}, somebody waits: {with_waiter}");
                let world = World::new();
                let lease = world.there.obtain(KEY).lease().await.unwrap();
                let (token, detached) = (lease.token(), lease.detach().unwrap());
                let waiting = with_waiter.then(|| {
                    let lock = world.here.obtain(KEY);
                    tokio::spawn(async move {
                        let lease = lock.lease().await.unwrap();
                        let token = lease.token();
                        lease.release().await.unwrap();
                        token
                    })
                });
                sleep(SOON).await;
                let adopted = cut.drive(world.here.adopt(detached.clone())).await;
                let done = adopted.is_some();
                drop(adopted);
                sleep(SOON).await;
                match world.behind.adopt(detached).await {
                    Ok(again) => {
                        assert!(!done && again.token() > token, "{what}");
                        left += 1;
                        again.release().await.unwrap();
                    }
                    Err(error) => {
                        assert!(error.is_lost() && polls > 0, "{what}: {error}");
                        taken += 1;
                    }
                }
                let mut last = token;
                if let Some(waiting) = waiting {
                    last = tokio::time::timeout(SOON, waiting)
                        .await
                        .unwrap_or_else(|_| panic!("{what}: the waiter is not served"))
                        .unwrap();
                }
                world.assert_clean(last, &what).await;
                if done {
                    break;
                }
            }
        }
    }
    assert!(left >= 8 && taken >= 8, "left {left}, taken {taken}");
}

/// Unpolled it asked for nothing; polled once, the wish stands. The lease is its holder's as before.
#[tokio::test(start_paused = true)]
async fn an_extension_dropped_after_its_first_poll_goes_on() {
    let more = Duration::from_secs(60);
    for then in THENS {
        for polls in 0.. {
            assert!(polls < 20, "it never ends");
            let cut = Cut { polls, then };
            let what = format!("{cut:?}");
            let world = World::new();
            let lease = world.here.obtain(KEY).lease().await.unwrap();
            let before = lease.deadline();
            let asked = Instant::now();
            let extended = cut.drive(lease.extend(more)).await;
            let done = extended.is_some();
            sleep(SOON).await;
            if polls == 0 {
                assert_eq!(lease.deadline(), before, "{what}");
            } else {
                assert!(lease.deadline() >= asked + more / 100 * 98, "{what}");
            }
            assert!(lease.is_valid(), "{what}");
            let token = lease.token();
            lease.release().await.unwrap();
            world.assert_clean(token, &what).await;
            if done {
                break;
            }
        }
    }
}

/// The future is 'static: it may be there after its lease, and then says so at once.
#[tokio::test(start_paused = true)]
async fn an_extension_that_outlives_its_lease_ends_with_it() {
    let world = World::new();
    let lease = world.here.obtain(KEY).lease().await.unwrap();
    let token = lease.token();
    let extending = tokio::spawn(lease.extend(Duration::from_secs(60)));
    tokio::task::yield_now().await;
    let begin = Instant::now();
    lease.release().await.unwrap();
    let told = extending.await.unwrap();
    assert!(
        matches!(told, Ok(_) | Err(LockError::Lost { .. })),
        "{told:?}"
    );
    assert!(begin.elapsed() < SOON);
    world.assert_clean(token, "released meanwhile").await;
}

/// A detached lease is text: dropped, it frees nothing and keeps nothing in use.
#[tokio::test(start_paused = true)]
async fn a_detached_lease_that_is_dropped_runs_out() {
    let world = World::new();
    let lease = world.here.obtain(KEY).lease().await.unwrap();
    let token = lease.token();
    drop(lease.detach().unwrap());
    eventually("the registry is idle", || world.here.in_use() == 0).await;
    assert_eq!(world.store.keys(), 1);
    sleep(Duration::from_secs(9)).await;
    world.assert_clean(token, "run out").await;
}
