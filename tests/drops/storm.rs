//! Drops from several threads at once, at moments that nobody chose.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use futures::{StreamExt, stream};
use lockstream::store::MemoryStore;
use lockstream::{LeaseView, LockRegistry, StreamLockExt};
use tokio::time::{sleep, timeout};

use crate::victims::Floor;

const BOUND: Duration = Duration::from_secs(20);
const TASKS: usize = 24;
const ROUNDS: u64 = 150;

/// What only one may be at, and the last token that was.
#[derive(Clone, Default)]
struct Shared {
    floor: Floor,
    last: Arc<AtomicU64>,
}

impl Shared {
    async fn work(&self, lease: LeaseView, pause: Duration) {
        let _standing = self.floor.enter();
        let before = self.last.swap(lease.token().get(), Ordering::SeqCst);
        assert!(
            before < lease.token().get(),
            "{} after {before}",
            lease.token()
        );
        sleep(pause).await;
    }
}

/// Chance enough for moments (splitmix64).
fn chance(seed: &mut u64) -> u64 {
    *seed = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mixed = (*seed ^ (*seed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed ^ (mixed >> 31)
}

async fn storm(locks: LockRegistry, shared: Shared, mut seed: u64) {
    for _ in 0..ROUNDS {
        let lock = locks.obtain("k");
        let mut micros = |most| Duration::from_micros(chance(&mut seed) % most);
        let (patience, pause) = (micros(6_000), micros(400));
        // Whatever comes of it: most are dropped somewhere.
        let _ = match chance(&mut seed) % 6 {
            0 => timeout(patience, lock.with_lease(|lease| shared.work(lease, pause)))
                .await
                .is_ok(),
            1 => {
                let rows = lock.with_lease_stream(|lease| {
                    stream::once(shared.work(lease, pause)).chain(stream::pending())
                });
                timeout(patience, rows.for_each(async |_| ())).await.is_ok()
            }
            2 => match timeout(patience, lock.lease()).await {
                Ok(lease) => {
                    let lease = lease.unwrap();
                    shared.work(lease.view(), pause).await;
                    // A drop, on a thread with no runtime.
                    std::thread::spawn(move || drop(lease)).join().is_ok()
                }
                Err(_) => false,
            },
            3 => {
                let rows = StreamLockExt::with_lock(stream::iter(0..3), &lock);
                timeout(patience, rows.count()).await.is_ok()
            }
            4 => {
                let acquired = timeout(patience, lock.acquire()).await.is_ok();
                acquired && timeout(pause, lock.release()).await.is_ok()
            }
            _ => timeout(patience, lock.lease_once()).await.is_ok(),
        };
    }
    // Who stays is served, and works. On a slow machine nobody else may have.
    let lock = locks.obtain("k").wait(BOUND);
    let staying = lock.with_lease(|lease| shared.work(lease, Duration::ZERO));
    staying.await.unwrap();
}

async fn storms(registries: &[LockRegistry]) {
    let shared = Shared::default();
    let storms: Vec<_> = (0..TASKS)
        .map(|task| {
            let locks = registries[task % registries.len()].clone();
            tokio::spawn(storm(locks, shared.clone(), task as u64))
        })
        .collect();
    for storm in storms {
        let ended = timeout(3 * BOUND, storm).await;
        ended.expect("nobody hangs").unwrap();
    }
    let worked = shared.last.load(Ordering::SeqCst);
    let lease = timeout(BOUND, registries[0].obtain("k").lease()).await;
    let lease = lease.expect("the key comes free").unwrap();
    assert!(lease.token().get() > worked);
    lease.release().await.unwrap();
    let begin = Instant::now();
    while registries.iter().any(|locks| locks.in_use() > 0) {
        assert!(begin.elapsed() < BOUND, "a key stays in use");
        sleep(Duration::from_millis(1)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_storm_on_a_memory_store() {
    for latency in [0, 1] {
        let store = MemoryStore::new();
        store.set_latency(Duration::from_millis(latency));
        let registries = [(); 3].map(|()| LockRegistry::builder(store.clone()).build().unwrap());
        storms(&registries).await;
        assert_eq!(store.keys(), 0);
    }
}

#[cfg(feature = "redis")]
crate::on_each_server! {
    #[tokio::test(flavor = "multi_thread", worker_threads = 4)] {
        a_storm_on_a_server,
    }
}

#[cfg(feature = "redis")]
async fn a_storm_on_a_server<S: crate::lock_server::LockServer>() {
    let server = S::start();
    let mut registries = Vec::new();
    for _ in 0..3 {
        let builder = crate::lock_server::registry_builder(&server.url()).await;
        registries.push(builder.build().unwrap());
    }
    storms(&registries).await;
    assert_eq!(server.leftovers(), [""; 0]);
}
