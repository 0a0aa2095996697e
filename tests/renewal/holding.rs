//! What is held is kept: for as long as it is held, whatever others do to its ttl, at little cost, and no longer than
//! was asked for.

use std::time::Duration;

use futures::future::join_all;
use lockstream::{LockError, OnFinish, Renewal};
use tokio::runtime::Handle;
use tokio::time::{Instant, sleep};

use crate::support::{RedisServer, on_a_steady_machine, wait_until};
use crate::{BOUND, assert_took, counted_lease, ms, nothing_left, registry, renewals, usable};

/// For how long its key is kept says nothing of how long a lease lasts: it has its own ttl, and outlasts a pause of the
/// server that is shorter.
#[tokio::test]
async fn a_job_whose_key_is_kept_outlasts_a_pause_of_the_server() {
    on_a_steady_machine(async || {
        let server = RedisServer::start();
        let locks = registry(&server.url(), ms(6000)).await;
        let job = locks.obtain("k").on_finish(OnFinish::KeepFor(ms(2000)));
        let lease = job.lease().await.unwrap();
        sleep(ms(2500)).await;
        server.stop();
        sleep(ms(1500)).await;
        assert!(lease.is_valid());
        server.cont();
        // It has lasted for longer than its key was to be kept.
        lease.finish().await.unwrap();
        nothing_left(&server, &[&locks]).await;
    })
    .await;
}

#[tokio::test]
async fn held_for_three_ttls_and_still_ours() {
    on_a_steady_machine(async || {
        let server = RedisServer::start();
        let ttl = ms(2400);
        let (locks, others) = (
            registry(&server.url(), ttl).await,
            registry(&server.url(), ttl).await,
        );
        let lease = locks.obtain("k").lease().await.unwrap();
        let owner = server.get("lock:k");
        let begin = Instant::now();
        while begin.elapsed() < 3 * ttl {
            assert!(!others.obtain("k").acquire_once().await.unwrap());
            // A third is the longest that it goes without a renewal.
            let left = server.pttl("lock:k");
            assert!(left > 800, "{left} ms left");
            assert!(lease.is_valid());
            sleep(ms(50)).await;
        }
        assert_eq!(server.get("lock:k"), owner);
        lease.release().await.unwrap();
        nothing_left(&server, &[&locks, &others]).await;
    })
    .await;
}

/// A stranger shortens the ttl, or takes it away: the next renewal mends it, before it runs out.
#[tokio::test]
async fn a_ttl_that_a_stranger_changed_is_mended() {
    on_a_steady_machine(async || {
        let server = RedisServer::start();
        let ttl = ms(6000);
        let locks = registry(&server.url(), ttl).await;
        let lease = locks.obtain("k").lease().await.unwrap();
        let spoil: [&[&str]; 3] = [
            &["PEXPIRE", "lock:k", "3900"],
            &["PERSIST", "lock:k"],
            &["PEXPIRE", "lock:k", "3800"],
        ];
        for command in spoil {
            assert_eq!(server.ask::<u64>(command), 1);
            wait_until("it is mended", ms(3700), || {
                (4000..=6000).contains(&server.pttl("lock:k"))
            })
            .await;
        }
        assert!(lease.is_valid());
        lease.release().await.unwrap();
        nothing_left(&server, &[&locks]).await;
    })
    .await;
}

/// A ttl that a stranger made longer is not the holder's to shorten, and does it no harm.
#[tokio::test]
async fn a_ttl_that_a_stranger_made_longer_is_left() {
    on_a_steady_machine(async || {
        let server = RedisServer::start();
        let locks = registry(&server.url(), ms(3000)).await;
        let lease = locks.obtain("k").lease().await.unwrap();
        assert_eq!(server.ask::<u64>(&["PEXPIRE", "lock:k", "600000"]), 1);
        let before = lease.deadline();
        wait_until("it is renewed", BOUND, || lease.deadline() > before).await;
        assert!(server.pttl("lock:k") > 500_000);
        assert!(lease.is_valid());
        lease.release().await.unwrap();
        nothing_left(&server, &[&locks]).await;
    })
    .await;
}

/// Exactly so many, counted on the server, with the last one's ttl behind them.
#[tokio::test]
async fn at_most_so_many_renewals_are_sent() {
    on_a_steady_machine(async || {
        let server = RedisServer::start();
        let ttl = ms(3000);
        let locks = registry(&server.url(), ttl).await;
        for most in [0, 1, 4] {
            let lock = locks.obtain("k");
            let lock = lock.renewal(Renewal::watchdog().max_renewals(most));
            let (begin, lease) = counted_lease(&server, &lock, ttl).await;
            assert!(lease.lost().await.is_lost());
            assert_took(begin, most * (ttl / 3) + usable(ttl));
            assert_eq!(renewals(&server), u64::from(most));
            drop(lease);
            nothing_left(&server, &[&locks]).await;
        }
    })
    .await;
}

/// A connection that is made again looks whether the lease still stands, and does not count as a renewal, nor add to it.
#[tokio::test]
async fn at_most_so_many_renewals_however_often_the_wire_breaks() {
    on_a_steady_machine(async || {
        let server = RedisServer::start();
        let ttl = ms(900);
        let locks = registry(&server.url(), ttl).await;
        let lock = locks.obtain("k");
        let lock = lock.renewal(Renewal::watchdog().max_renewals(1));
        // One that is long in coming is renewed once more (W3).
        let (begin, lease) = counted_lease(&server, &lock, ttl).await;
        let mut lost = lease.lost();
        // For want of a connection the one renewal may be sent as late as the lease lasts.
        let most = 2 * ttl;
        loop {
            tokio::select! {
                _ = &mut lost => break,
                () = sleep(ms(110)) => server.client_kill_all(),
            };
            assert!(begin.elapsed() < most + BOUND, "it is renewed for ever");
        }
        assert!(begin.elapsed() <= most + ms(600), "{:?}", begin.elapsed());
        drop(lease);
        nothing_left(&server, &[&locks]).await;
    })
    .await;
}

/// One timer and few calls serve all leases of a registry: no task a lease, no call a lease.
#[tokio::test]
async fn five_hundred_leases_are_renewed_in_few_calls_and_by_no_task_of_their_own() {
    on_a_steady_machine(async || {
        const LEASES: usize = 500;
        let server = RedisServer::start();
        let ttl = ms(3000);
        let locks = registry(&server.url(), ttl).await;
        let alive = || Handle::current().metrics().num_alive_tasks();
        let one = locks.obtain("one").lease().await.unwrap();
        let with_one = alive();
        let leases = join_all((0..LEASES).map(|key| locks.obtain(format!("k{key}")).lease())).await;
        let leases: Vec<_> = leases.into_iter().map(Result::unwrap).collect();
        server.reset_stats();
        wait_until("all are renewed", ttl, || renewals(&server) > LEASES as u64).await;
        let calls = server.calls("evalsha") + server.calls("eval");
        assert!(calls <= LEASES as u64 / 10, "{calls} calls");
        assert_eq!(alive(), with_one, "a task a lease");
        assert_eq!(server.clients().len(), 1);
        // And again: what was once batched stays together.
        server.reset_stats();
        wait_until("all are renewed", ttl, || renewals(&server) > LEASES as u64).await;
        let calls = server.calls("evalsha");
        assert!(calls <= LEASES as u64 / 10, "{calls} calls");
        assert!(leases.iter().all(|lease| lease.is_valid()));
        join_all(leases.into_iter().map(|lease| lease.release())).await;
        one.release().await.unwrap();
        nothing_left(&server, &[&locks]).await;
    })
    .await;
}

/// What a call takes, in whole milliseconds.
async fn round_trip(server: &RedisServer) -> Duration {
    const PAIRS: u32 = 50;
    let locks = registry(&server.url(), ms(30_000)).await;
    let lock = locks.obtain("k");
    let mut begin = Instant::now();
    for pair in 0..=PAIRS {
        let lease = lock.lease().await.unwrap();
        lease.release().await.unwrap();
        if pair == 0 {
            // The first connects.
            begin = Instant::now();
        }
    }
    let took = begin.elapsed() / (2 * PAIRS);
    ms(u64::try_from(took.as_millis()).unwrap())
}

/// Acquired and released at once, ten thousand times, with the shortest ttl there is and so renewed every 3.3 ms; with a
/// longer one where answers would come too late for that. No key is left, and nothing is renewed any more.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_cycles_leave_nothing_renewed() {
    on_a_steady_machine(async || {
        const TASKS: usize = 20;
        const ROUNDS: usize = 500;
        let server = RedisServer::start();
        let round_trip = round_trip(&server).await;
        let ttl = ms(10).max(8 * round_trip);
        let locks = registry(&server.url(), ttl).await;
        let tasks = (0..TASKS).map(|task| {
            let lock = locks.obtain(format!("k{}", task % 16));
            tokio::spawn(async move {
                let mut round = 0;
                for _ in 0..10 * ROUNDS {
                    let lease = match lock.lease().await {
                        // On a busy machine an answer may take longer than the ttl, three times in a row.
                        Err(LockError::TooSlow { round_trip, .. }) => {
                            assert!(round_trip >= ttl * 7 / 10, "{round_trip:?} of {ttl:?}");
                            continue;
                        }
                        lease => lease.unwrap(),
                    };
                    if round % 10 == 0 {
                        sleep(ttl * 33 / 100 + Duration::from_micros(20 * round as u64)).await;
                    }
                    if round % 3 == 0 {
                        drop(lease);
                    } else {
                        // So short a ttl is easily over on a busy machine; that is no matter here.
                        let _ = lease.release().await;
                    }
                    round += 1;
                    if round == ROUNDS {
                        return;
                    }
                }
                panic!("nearly all answers are too slow: {round} of {ROUNDS} leases");
            })
        });
        for task in join_all(tasks).await {
            task.unwrap();
        }
        let renewed = renewals(&server);
        assert!(renewed >= 200, "only {renewed} renewals");
        nothing_left(&server, &[&locks]).await;
        crate::assert_silent(&server, ttl.max(ms(300))).await;
        assert_eq!(server.keys("*"), ["lock:~fence"]);
    })
    .await;
}
