//! What of a lease whose runtime, process or holder is gone.

use std::future::pending;
use std::time::{Duration, Instant};

use futures::future::join_all;
use lockstream::{Lease, Renewal};
use tokio::runtime::Runtime;
use tokio::time::{sleep, timeout};

use crate::lock_server::wait_for_queue;
use crate::support::{
    RedisServer, Role, Worker, on_a_steady_machine, on_a_steady_machine_blocking, wait_until,
    wait_until_blocking,
};
use crate::{BOUND, LATE, START, counted_lease, ms, nothing_left, registry, renewals};

/// Of the holder in a process of its own.
const TTL: Duration = ms(3000);

fn spawn_holder(server: &RedisServer, ttl: Duration) -> Worker {
    let (url, millis) = (server.url(), ttl.as_millis().to_string());
    Worker::spawn("worker", "holder", &[("URL", &url), ("TTL", &millis)])
}

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap()
}

/// The runtime is shut down while leases are held, by tasks of it and by others: no renewal comes any more, and every
/// key is free when its ttl is over.
#[test]
fn a_runtime_that_is_shut_down_renews_nothing_and_its_keys_are_free_within_a_ttl() {
    on_a_steady_machine_blocking(|| {
        let server = RedisServer::start();
        let ttl = ms(3000);
        for in_background in [false, true] {
            let runtime = runtime();
            let (locks, leases) = runtime.block_on(async {
                let locks = registry(&server.url(), ttl).await;
                let lock = |key: usize| locks.obtain(format!("k{key}"));
                // These go with the tasks that have them.
                for key in 0..10 {
                    let lease = lock(key).lease().await.unwrap();
                    tokio::spawn(async move {
                        lease.lost().await;
                    });
                }
                // And these do not.
                let leases: Vec<Lease> = join_all((10..30).map(|key| lock(key).lease()))
                    .await
                    .into_iter()
                    .map(Result::unwrap)
                    .collect();
                sleep(ttl + ttl / 2).await;
                (locks, leases)
            });
            assert_eq!(server.keys("lock:k*").len(), 30, "renewed so far");
            if in_background {
                runtime.shutdown_background();
            } else {
                drop(runtime);
            }
            let begin = Instant::now();
            server.reset_stats();
            // A renewal may have been on its way to a server that stood still.
            wait_until_blocking("all keys are free", ttl + 3 * LATE, || {
                server.keys("lock:k*").is_empty()
            });
            assert_eq!(renewals(&server), 0, "after {:?}", begin.elapsed());
            assert!(leases.iter().all(|lease| !lease.is_valid()));
            drop((leases, locks));
        }
    });
}

/// One that was leaked is renewed for as long as a runtime of its registry lives, like a forgotten `MutexGuard`, and not
/// after that.
#[test]
fn a_forgotten_lease_is_renewed_until_its_runtime_has_gone() {
    on_a_steady_machine_blocking(|| {
        let server = RedisServer::start();
        let ttl = ms(2000);
        let runtime = runtime();
        runtime.block_on(async {
            let locks = registry(&server.url(), ttl).await;
            std::mem::forget(locks.obtain("k").lease().await.unwrap());
            drop(locks);
            for _ in 0..10 {
                sleep(3 * ttl / 10).await;
                assert!(server.exists("lock:k"));
            }
        });
        drop(runtime);
        server.reset_stats();
        // A renewal may have been on its way to a server that stood still.
        wait_until_blocking("the key is free", ttl + 3 * LATE, || {
            !server.exists("lock:k")
        });
        assert_eq!(renewals(&server), 0);
    });
}

/// Bounded, it ends by itself: the last renewal, and a ttl.
#[tokio::test]
async fn a_forgotten_lease_is_renewed_so_many_times_at_most() {
    on_a_steady_machine(async || {
        let server = RedisServer::start();
        let ttl = ms(2000);
        let locks = registry(&server.url(), ttl).await;
        let lock = locks.obtain("k");
        let lock = lock.renewal(Renewal::watchdog().max_renewals(3));
        let (begin, lease) = counted_lease(&server, &lock, ttl).await;
        std::mem::forget(lease);
        wait_until("the key is free", 4 * ttl, || !server.exists("lock:k")).await;
        let took = begin.elapsed();
        assert!(
            took >= ttl + ttl - ms(20) && took <= 2 * ttl + LATE,
            "{took:?}"
        );
        assert_eq!(renewals(&server), 3);
        nothing_left(&server, &[&locks]).await;
    })
    .await;
}

/// A holder whose watchdog would have kept the lock for ever is killed: the watchdog dies with it, and the lock is the
/// next one's when the ttl is over, not before and hardly later.
#[tokio::test]
async fn the_watchdog_of_a_killed_process_dies_with_it() {
    on_a_steady_machine(async || {
        let server = RedisServer::start();
        let here = registry(&server.url(), TTL).await;
        let mut holder = spawn_holder(&server, TTL);
        let token: u64 = holder.expect_line("holds ", START).await.parse().unwrap();
        // Twice its ttl it lives, and so long the lock is its own.
        assert!(!here.obtain("k").acquire_within(2 * TTL).await.unwrap());
        assert!(server.exists("lock:k"));
        let waiter = tokio::spawn(here.obtain("k").lease());
        wait_for_queue(&server, 1).await;
        holder.sigkill();
        let killed = Instant::now();
        let left = server.pttl("lock:k");
        assert!(left > 0 && ms(left as u64) <= TTL, "{left}");
        // The server may stand still meanwhile. A waiter that did not know the ttl would ask after 8 s or later (W2).
        let lease = timeout(TTL + 3 * LATE, waiter).await;
        let lease = lease.expect("it has run out").unwrap().unwrap();
        let took = killed.elapsed();
        assert!(took + ms(50) >= ms(left as u64), "{took:?} of {left} ms");
        assert!(lease.token().get() > token);
        // It does not come back.
        sleep(TTL).await;
        assert!(lease.is_valid() && server.exists("lock:k"));
        lease.release().await.unwrap();
        nothing_left(&server, &[&here]).await;
    })
    .await;
}

/// One that was stopped for less than that goes on, and its lease is renewed at once.
#[tokio::test]
async fn a_process_stopped_for_less_than_its_ttl_keeps_its_lock() {
    on_a_steady_machine(async || {
        let server = RedisServer::start();
        // So long that what comes at once may take two seconds, and still comes before the next renewal is due.
        let (ttl, at_once) = (ms(8000), ms(2000));
        let here = registry(&server.url(), ttl).await;
        let holder = spawn_holder(&server, ttl);
        holder.expect_line("holds ", START).await;
        let waiter = tokio::spawn(here.obtain("k").lease_within(20 * BOUND));
        let left = || ms(server.pttl("lock:k").max(0) as u64);
        for _ in 0..3 {
            // Just renewed, and it has heard of that: what is not confirmed does not count.
            wait_until("it is renewed", BOUND, || left() > ttl - ms(500)).await;
            sleep(ms(50)).await;
            holder.sigstop();
            // Its next renewal was due after a third of its ttl. The one after that is due after two.
            sleep(ttl / 3 + ms(300)).await;
            assert!(left() > ms(0));
            holder.sigcont();
            wait_until("it is renewed at once", at_once, || left() > ttl - at_once).await;
        }
        let mut least = ttl;
        wait_until("it is renewed when that is due", BOUND, || {
            let before = least;
            least = left();
            least > before
        })
        .await;
        assert!(!waiter.is_finished() && holder.said().is_empty());
        waiter.abort();
    })
    .await;
}

/// Works under the lock, and says nothing more unless it loses it.
pub(crate) async fn hold(role: Role) {
    assert_eq!(role.name(), "holder");
    let ttl = role.env("TTL").parse().unwrap();
    let locks = registry(&role.env("URL"), ms(ttl)).await;
    let work = locks.obtain("k").with_lease(async |lease| {
        role.say(format!("holds {}", lease.token()));
        pending::<()>().await;
    });
    let told = work.await;
    role.say(format!("ended {told:?}"));
}
