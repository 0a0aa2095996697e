//! What of a lease whose runtime, process or holder is gone.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use futures::future::join_all;
use futures::poll;
use lockstream::{Lease, LockError, Renewal};
use rustix::process::{Signal, getpid, kill_process};
use tokio::runtime::Runtime;
use tokio::time::{sleep, timeout};

use crate::support::{
    RedisServer, Role, Worker, on_a_steady_machine, on_a_steady_machine_blocking, wait_until,
    wait_until_blocking,
};
use crate::{BOUND, LATE, ms, nothing_left, registry, renewals};

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
        let ttl = ms(900);
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
            wait_until_blocking("all keys are free", ttl + LATE, || {
                server.keys("lock:k*").is_empty()
            });
            assert_eq!(renewals(&server), 0, "after {:?}", begin.elapsed());
            assert!(leases.iter().all(|lease| !lease.is_valid()));
            drop((leases, locks));
        }
    });
}

/// The registry lives on, on another runtime: what was acquired on the one that has gone is renewed there (D7), also if it
/// was leaked.
#[test]
fn a_lease_whose_runtime_has_gone_is_renewed_by_another() {
    on_a_steady_machine_blocking(|| {
        let server = RedisServer::start();
        let ttl = ms(900);
        for first_works in [true, false] {
            let (first, second) = (runtime(), runtime());
            let locks = second.block_on(registry(&server.url(), ttl));
            // Whoever comes first has the registry's timer on its runtime.
            let early = (!first_works).then(|| second.block_on(locks.obtain("early").lease()));
            let lease = first.block_on(locks.obtain("k").lease()).unwrap();
            std::mem::forget(first.block_on(locks.obtain("leaked").lease()).unwrap());
            let here = second.block_on(locks.obtain("here").lease()).unwrap();
            drop(first);
            second.block_on(async {
                sleep(3 * ttl).await;
                assert!(lease.is_valid() && here.is_valid());
                assert!(!locks.obtain("leaked").acquire_once().await.unwrap());
                lease.release().await.unwrap();
                here.release().await.unwrap();
                if let Some(early) = early {
                    early.unwrap().release().await.unwrap();
                }
                locks.shutdown().await;
                nothing_left(&server, &[&locks]).await;
            });
        }
    });
}

/// One that was leaked is renewed for as long as a runtime of its registry lives, like a forgotten `MutexGuard`, and not
/// after that.
#[test]
fn a_forgotten_lease_is_renewed_until_its_runtime_has_gone() {
    on_a_steady_machine_blocking(|| {
        let server = RedisServer::start();
        let ttl = ms(600);
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
        wait_until_blocking("the key is free", ttl + LATE, || !server.exists("lock:k"));
        assert_eq!(renewals(&server), 0);
    });
}

/// Bounded, it ends by itself: the last renewal, and a ttl.
#[tokio::test]
async fn a_forgotten_lease_is_renewed_so_many_times_at_most() {
    on_a_steady_machine(async || {
        let server = RedisServer::start();
        let ttl = ms(600);
        let locks = registry(&server.url(), ttl).await;
        let lock = locks.obtain("k");
        let lock = lock.renewal(Renewal::watchdog().max_renewals(3));
        server.reset_stats();
        let begin = Instant::now();
        std::mem::forget(lock.lease().await.unwrap());
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

/// A process that was stopped for longer than its ttl is no holder any more, however often its lease was renewed
/// before: when it is woken, its work is not polled once more.
#[tokio::test]
async fn a_stopped_process_learns_of_its_loss_before_its_work_goes_on() {
    on_a_steady_machine(async || {
        let server = RedisServer::start();
        let ttl = ms(900);
        let here = registry(&server.url(), ttl).await;
        let url = server.url();
        let mut holder = Worker::spawn("worker", "stopper", &[("URL", &url)]);
        let token: u64 = holder.expect_line("holds ", BOUND).await.parse().unwrap();
        // Renewed for two ttls.
        assert!(!here.obtain("k").acquire_within(2 * ttl).await.unwrap());
        holder.tell("stop");
        holder.until_stopped();
        let lease = timeout(ttl + LATE, here.obtain("k").lease()).await;
        let lease = lease.expect("within its ttl").unwrap();
        assert!(lease.token().get() > token);
        // What it finds when it wakes: renewals that were due, timers that are late, answers of long ago.
        sleep(ttl).await;
        holder.sigcont();
        let told = holder.expect_line("ended ", BOUND).await;
        assert_eq!(told, format!("Lost {token}, polled late: false"));
        sleep(ttl / 2).await;
        assert!(lease.is_valid(), "the late one took nothing from the next");
        lease.release().await.unwrap();
        holder.tell("end");
        assert!(holder.exit(BOUND).success());
        nothing_left(&server, &[&here]).await;
    })
    .await;
}

/// One that was stopped for less than that goes on, and its lease is renewed at once.
#[tokio::test]
async fn a_process_stopped_for_less_than_its_ttl_keeps_its_lock() {
    on_a_steady_machine(async || {
        let server = RedisServer::start();
        let here = registry(&server.url(), ms(900)).await;
        let url = server.url();
        let holder = Worker::spawn("worker", "stopper", &[("URL", &url)]);
        holder.expect_line("holds ", BOUND).await;
        for _ in 0..3 {
            // Just renewed, and it has heard of that: what is not confirmed does not count.
            wait_until("it is renewed", BOUND, || server.pttl("lock:k") > 850).await;
            sleep(ms(50)).await;
            holder.sigstop();
            sleep(ms(450)).await;
            assert!(server.pttl("lock:k") > 0);
            holder.sigcont();
            wait_until("it is renewed at once", ms(250), || {
                server.pttl("lock:k") > 700
            })
            .await;
        }
        assert!(!here.obtain("k").acquire_within(ms(1800)).await.unwrap());
        assert!(holder.said().is_empty());
    })
    .await;
}

/// Works under the lock. Told to stop, it stops its own process in the midst of a step, and tells whether its work was
/// polled again after that.
///
/// A signal from outside might come between the look at the deadline and the poll that follows it: such a step is late,
/// and no lock can tell.
pub(crate) async fn work_and_stop(mut role: Role) {
    assert_eq!(role.name(), "stopper");
    let locks = registry(&role.env("URL"), ms(900)).await;
    let late = Arc::new(AtomicBool::new(false));
    let (seen, orders) = (late.clone(), &mut role);
    let work = locks.obtain("k").with_lease(async move |lease| {
        orders.say(format!("holds {}", lease.token()));
        assert_eq!(orders.hear().await, "stop");
        // The work's own timer is due as well when the process goes on.
        let mut next_step = pin!(sleep(ms(5)));
        assert!(poll!(&mut next_step).is_pending());
        kill_process(getpid(), Signal::STOP).unwrap();
        // The signal reaches this thread meanwhile.
        std::thread::sleep(ms(50));
        next_step.await;
        seen.store(true, Ordering::SeqCst);
        std::future::pending::<()>().await;
    });
    let told: Result<(), _> = work.await;
    let told = match told {
        Err(LockError::Lost { token, .. }) => format!("Lost {token}"),
        told => format!("{told:?}"),
    };
    let late = late.load(Ordering::SeqCst);
    role.say(format!("ended {told}, polled late: {late}"));
    role.hear().await;
}
