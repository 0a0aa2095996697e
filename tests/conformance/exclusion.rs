//! One holder at a time, and tokens that tell who was later.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use futures::StreamExt;
use futures::future::join_all;
use lockstream::{FutureLockExt, Lock, LockError, LockRegistry, OnFinish, Token};
use tokio::task::yield_now;
use tokio::time::{sleep, timeout};

use crate::world::{BOUND, World, idle, ms, ok};

/// What a race would break: between the look and the change anybody may come.
#[derive(Debug, Default)]
struct Counter(AtomicU64);

impl Counter {
    async fn add_one(&self) {
        let seen = self.0.load(Ordering::SeqCst);
        for _ in 0..3 {
            yield_now().await;
        }
        let before = self.0.swap(seen + 1, Ordering::SeqCst);
        assert_eq!(before, seen, "somebody else was there");
    }
}

pub(crate) async fn a_hundred_tasks_in_eight_processes_never_meet(w: &dyn World) {
    const TURNS: u64 = 10;
    let registries: [_; 8] = w.registries().await;
    let counter = Arc::new(Counter::default());
    let newest = Arc::new(AtomicU64::new(0));
    let tasks = (0..100).map(|n| {
        let lock = registries[n % 8].obtain("k").wait(6 * BOUND);
        let (counter, newest) = (counter.clone(), newest.clone());
        tokio::spawn(async move {
            for turn in 0..TURNS {
                if turn % 2 == 0 {
                    let lease = lock.lease().await.unwrap();
                    let before = newest.swap(lease.token().get(), Ordering::SeqCst);
                    assert!(before < lease.token().get(), "tokens do not grow");
                    counter.add_one().await;
                    lease.release().await.unwrap();
                } else {
                    let counter = counter.clone();
                    let work = async move { counter.add_one().await };
                    work.with_lock(&lock).await.unwrap();
                }
            }
        })
    });
    join_all(tasks).await.into_iter().for_each(ok);
    assert_eq!(counter.0.load(Ordering::SeqCst), 100 * TURNS);
    for registry in &registries {
        idle(registry).await;
    }
}

/// Everybody gives up, is dropped or takes over all the time, and still nobody meets another.
pub(crate) async fn comings_and_goings_break_nothing(w: &dyn World) {
    let registries: [_; 4] = w.registries().await;
    let counter = Arc::new(Counter::default());
    let tasks = (0..40_u64).map(|n| {
        let lock = registries[n as usize % 4].obtain("k").wait(6 * BOUND);
        let counter = counter.clone();
        tokio::spawn(async move {
            for turn in 0..20 {
                let work = counter.add_one().with_lock(&lock);
                match (n + turn) % 4 {
                    0 => work.await.unwrap(),
                    1 => drop(tokio::time::timeout(ms((n + turn) % 7), lock.lease()).await),
                    2 => drop(lock.acquire_within(ms((n + turn) % 5)).await.unwrap()),
                    _ => drop(lock.lease_once().await.unwrap()),
                }
                if lock.is_acquired() {
                    counter.add_one().await;
                    lock.release().await.unwrap();
                }
            }
        })
    });
    join_all(tasks).await.into_iter().for_each(ok);
    for registry in &registries {
        idle(registry).await;
    }
}

/// Where those are who hold a key: one lease at a time, which some may share.
#[derive(Clone, Debug, Default)]
struct Floor(Arc<Mutex<Vec<Token>>>);

struct Standing {
    floor: Floor,
    token: Token,
}

impl Floor {
    fn enter(&self, token: Token) -> Standing {
        let mut there = self.0.lock().unwrap();
        assert!(
            there.iter().all(|other| *other == token),
            "{token} beside {there:?}"
        );
        there.push(token);
        let floor = self.clone();
        Standing { floor, token }
    }
}

impl Drop for Standing {
    fn drop(&mut self) {
        let mut there = self.floor.0.lock().unwrap();
        let at = there.iter().position(|token| *token == self.token);
        there.remove(at.expect("it entered"));
    }
}

/// Chance enough (splitmix64).
fn chance(seed: &mut u64, most: u64) -> u64 {
    *seed = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mixed = (*seed ^ (*seed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (mixed ^ (mixed >> 31)) % most
}

/// One turn of somebody who does whatever can be done with a lock. `brief`: so long what it leaves behind stays.
async fn any_turn(
    w: &dyn World,
    lock: Lock,
    there: &LockRegistry,
    floor: &Floor,
    seed: &mut u64,
) -> Result<(), LockError> {
    let brief = lock.clone().ttl(w.brief());
    let nested = lock.clone().reentrant();
    let pause = ms(chance(seed, 4));
    let kind = chance(seed, 11);
    match kind {
        // Shared, by several at once; or dropped half-way.
        0 | 1 => {
            let work = lock.try_with_lease(async |lease| {
                let _standing = floor.enter(lease.token());
                let inner = nested.try_with_lease(async |lease| {
                    let _standing = floor.enter(lease.token());
                    sleep(pause).await;
                    Ok::<_, LockError>(())
                });
                let beside = async {
                    let guard = nested.lease().await?;
                    let _standing = floor.enter(guard.token());
                    yield_now().await;
                    guard.release().await
                };
                tokio::try_join!(inner, beside)
            });
            if kind == 0 {
                work.await?;
            } else if let Ok(told) = timeout(pause, work).await {
                told?;
            }
        }
        // Extended, or asked for and not waited for; and then passed on.
        2 | 3 => {
            let lease = lock.lease().await?;
            let standing = floor.enter(lease.token());
            let mut longer = lease.extend(ms(3000));
            if kind == 2 {
                assert!(longer.await? <= lease.deadline());
            } else {
                let _ = futures::poll!(&mut longer);
            }
            drop(standing);
            lease.release().await?;
        }
        // Handed over; or lost on the way, or not looked at.
        4..=6 => {
            let lease = brief.lease().await?;
            drop(floor.enter(lease.token()));
            let token = lease.token();
            let mut adopt = there.adopt(lease.detach()?);
            if kind == 4 {
                let lease = adopt.await?;
                assert!(lease.token() > token);
                let _standing = floor.enter(lease.token());
                yield_now().await;
            } else {
                if futures::poll!(&mut adopt).is_pending() {
                    sleep(if w.is_paused() {
                        pause * 250
                    } else {
                        pause * 20
                    })
                    .await;
                    if kind == 5 {
                        drop(adopt.await?);
                    }
                }
            }
        }
        // It stays for a while.
        7 => {
            let minute = brief.on_finish(OnFinish::LetExpire);
            minute
                .with_lease(async |lease| drop(floor.enter(lease.token())))
                .await?;
        }
        // Taken away under the work around.
        8 => {
            let nested = brief.clone().reentrant();
            let told = brief.try_with_lease(async |lease| {
                drop(floor.enter(lease.token()));
                drop(nested.lease().await?.detach()?);
                sleep(BOUND).await;
                Ok::<_, LockError>(())
            });
            assert!(!matches!(told.await, Ok(())));
        }
        9 => {
            let mut campaign = lock.leadership();
            if timeout(pause * 5, campaign.by_ref().take(2).collect::<Vec<_>>())
                .await
                .is_err()
            {
                campaign.resign().await;
            }
        }
        // A handle that is dropped while it holds.
        _ => drop(lock.acquire_once().await?),
    }
    Ok(())
}

/// Shared, extended, detached, adopted, kept, led, passed and dropped, in three processes of which one lets few wait and
/// one is shut down under way: nobody meets another, and what was told is in order and complete (`watch.rs`).
pub(crate) async fn everything_at_once_breaks_nothing(w: &dyn World) {
    w.leases_last(w.brief());
    w.set_latency(ms(1));
    let small = w.builder().await.max_waiters(3).build().unwrap();
    let [one, ends] = w.registries().await;
    let registries = [one, small, ends];
    let floors = [Floor::default(), Floor::default()];
    let (registries, floors) = (&registries, &floors);
    let callers = (0..18_usize).map(async |n| {
        let mut seed = n as u64;
        for turn in 0..16 {
            let key = (n / 3 + turn) % 2;
            let lock = registries[n % 3].obtain(["a", "b"][key]).wait(ms(700));
            let there = &registries[chance(&mut seed, 3) as usize];
            let told = any_turn(w, lock, there, &floors[key], &mut seed).await;
            // The leases are brief, and a machine may be busy: one is over before its release or adoption is answered, or
            // before the replicas that are asked for have it.
            if !w.is_paused()
                && let Err(LockError::Store { source, .. }) = &told
                && ["no answer in time", "lock not confirmed by replicas: "]
                    .iter()
                    .any(|text| source.to_string().starts_with(text))
            {
                continue;
            }
            assert!(
                matches!(
                    told,
                    Ok(())
                        | Err(LockError::Lost { .. }
                            | LockError::Closed { .. }
                            | LockError::QueueFull { .. }
                            | LockError::NotAcquired { .. }
                            | LockError::TooSlow { .. })
                ),
                "{told:?}"
            );
            // Under way, whatever it sees.
            drop(there.snapshot());
        }
    });
    let ends = async {
        sleep(ms(400)).await;
        registries[2].shutdown().await;
    };
    tokio::join!(join_all(callers), ends);
    for registry in registries {
        idle(registry).await;
        assert!(registry.snapshot().keys.is_empty());
    }
}

pub(crate) async fn tokens_grow_over_thousands_of_leases(w: &dyn World) {
    let registries: [_; 2] = w.registries().await;
    let mut newest = 0;
    for turn in 0..w.many() {
        let lease = registries[turn % 2].obtain("k").lease_once().await;
        let lease = lease.unwrap().expect("nobody else wants it");
        assert!(lease.token().get() > newest, "token {turn} does not grow");
        newest = lease.token().get();
        lease.release().await.unwrap();
    }
    assert!(
        i64::try_from(newest).is_ok(),
        "databases have no room for it"
    );
}

/// Within a tenure, where no draw is made, and over many of them.
pub(crate) async fn tokens_grow_through_passes(w: &dyn World) {
    let registry = w.registry().await;
    let newest = AtomicU64::new(0);
    let first = registry.obtain("k").lease().await.unwrap();
    newest.store(first.token().get(), Ordering::SeqCst);
    tokio::join!(
        join_all((0..200).map(async |_| {
            let lease = registry.obtain("k").lease().await.unwrap();
            let before = newest.swap(lease.token().get(), Ordering::SeqCst);
            assert!(before < lease.token().get());
            lease.release().await.unwrap();
        })),
        // When all wait in the queue.
        async { first.release().await.unwrap() },
    );
}
