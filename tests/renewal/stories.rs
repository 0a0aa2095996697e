//! What befell the watchdogs of Redisson, told by the numbers of its tickets. Theirs either outlived the lock, so that
//! nobody else ever got it, or slept while the lock was held, so that two had it.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use futures::FutureExt;
use futures::future::join_all;
use lockstream::{FutureLockExt, LockError, Renewal};
use tokio::time::{Instant, sleep, timeout};

use crate::support::{PATIENCE, Proxy, RedisServer, Way, on_a_steady_machine, wait_until};
use crate::{
    BOUND, LATE, assert_silent, assert_took, builder, came_at_once, counted_lease, ms,
    nothing_left, registry, renewals, usable,
};

/// #7272: the watchdog was started by a callback on the acquisition and stopped by one on the release, and nothing put
/// the two in order. An acquisition that was interrupted while its answer was on its way was released first and
/// watched afterwards: the key's ttl jumped back up for ever, and nobody held it.
///
/// Here the futures are dropped at every point of a slow way there and back.
#[tokio::test]
async fn redisson_7272_a_cancelled_acquisition_starts_no_watchdog() {
    on_a_steady_machine(async || {
        let server = RedisServer::start();
        let proxy = Proxy::to(&server);
        let ttl = ms(150);
        let locks = registry(&proxy.url(), ttl).await;
        let lock = locks.obtain("k");
        let longer = lock.clone().ttl(BOUND).lease().await.unwrap();
        longer.release().await.unwrap();
        proxy.delay(Way::Both, ms(3));
        let (mut early, mut held) = (0, 0);
        for round in 0..60 {
            // The answer comes after some 6 ms; on a busy machine much later, so some wait for it.
            let within = match round % 12 {
                10.. => BOUND,
                millis => ms(millis),
            };
            match timeout(within, lock.lease()).await {
                Err(_) => early += 1,
                // On a busy machine an answer may take longer than the ttl, three times in a row.
                Ok(Err(LockError::TooSlow { .. })) => {}
                Ok(lease) => {
                    held += 1;
                    if round % 2 == 0 {
                        drop(lease.unwrap());
                    } else {
                        // A machine that is busy elsewhere may lose it; that is no matter here.
                        let _ = lease.unwrap().release().await;
                    }
                }
            }
        }
        assert!(early >= 10 && held >= 5, "{early} cancelled, {held} held");
        proxy.delay(Way::Both, ms(0));
        nothing_left(&server, &[&locks]).await;
        assert_silent(&server, 3 * ttl).await;
        assert_eq!(server.keys("*"), ["lock:~fence"]);
    })
    .await;
}

/// #7277, the mending of #7272: it notes the watchdog before the acquisition is sent, and has to take the note back if
/// the lock was another's. Here nobody is watched who was refused, and who acquires next while the release before is
/// still on its way is watched for itself: the fixed lease of the second ends with its ttl, though a renewal for the
/// first was on its way when the two changed places.
#[tokio::test]
async fn redisson_7277_a_watchdog_serves_nobody_but_its_own_lease() {
    on_a_steady_machine(async || {
        let server = RedisServer::start();
        let proxy = Proxy::to(&server);
        let (ttl, short) = (ms(4000), ms(2000));
        let locks = registry(&proxy.url(), ttl).await;
        let others = registry(&server.url(), ttl).await;

        let held = others.obtain("k").lease().await.unwrap();
        assert!(!locks.obtain("k").acquire_once().await.unwrap());
        // Refused, or on a busy machine not answered in time.
        let wait = locks.obtain("k").acquire_within(ms(30));
        assert!(!matches!(wait.await, Ok(true)));
        held.release().await.unwrap();
        nothing_left(&server, &[&locks, &others]).await;
        assert_silent(&server, ttl / 2).await;

        let begin = Instant::now();
        let second = loop {
            assert!(begin.elapsed() < 20 * BOUND, "none comes at once");
            let first = locks.obtain("k").lease().await.unwrap();
            let before = first.deadline();
            wait_until("it is renewed", BOUND, || first.deadline() > before).await;
            // What the watchdog sends next is on its way.
            proxy.hold(Way::ToServer, true);
            server.reset_stats();
            sleep(ttl / 3 + ms(100)).await;
            assert_eq!(renewals(&server), 0);
            drop(first);
            let mut second = locks.obtain("k").ttl(short).lease();
            assert!((&mut second).now_or_never().is_none());
            proxy.hold(Way::ToServer, false);
            let second = timeout(BOUND, second).await.expect("in time").unwrap();
            if came_at_once(&second, short) {
                break second;
            }
            // It may be over by now.
            let _ = second.release().await;
        };
        let deadline = second.deadline();
        assert_eq!(renewals(&server), 1, "that of the first");
        assert!(
            ms(server.pttl("lock:k").max(0) as u64) <= short,
            "the first's ttl is not the second's"
        );
        assert!(second.lost().await.is_lost());
        assert_eq!(second.deadline(), deadline);
        assert!(Instant::now() <= deadline + LATE);
        assert_eq!(renewals(&server), 1);
        drop(second);
        nothing_left(&server, &[&locks, &others]).await;
        assert_silent(&server, ttl).await;
    })
    .await;
}

/// #1626: in rare cases, under the load of a production, the watchdog of a lock that was long released was never
/// cancelled and renewed it until its process was restarted, while threads piled up behind it. Here releases, drops and
/// renewals meet thousands of times, and what comes after gets every lock at once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn redisson_1626_no_watchdog_is_left_behind_under_load() {
    on_a_steady_machine(async || {
        const KEYS: usize = 24;
        const ROUNDS: u64 = 40;
        const MEETINGS: u64 = 100;
        const MOST_TIMES: usize = 10;
        let server = RedisServer::start();
        let ttl = ms(90);
        let locks = registry(&server.url(), ttl).await;
        // On a slow machine fewer of them meet at a time.
        for _ in 0..MOST_TIMES {
            let tasks = (0..KEYS).map(|key| {
                let lock = locks.obtain(format!("k{key}"));
                tokio::spawn(async move {
                    for round in 0..ROUNDS {
                        let lease = match lock.lease().await {
                            // On a busy machine an answer may take longer than 90 ms, three times in a row.
                            Err(LockError::TooSlow { .. }) => continue,
                            lease => lease.unwrap(),
                        };
                        // Renewed every 30 ms: it is released just when that is due.
                        sleep(
                            ms(26) + std::time::Duration::from_micros(200 * (round + key as u64)),
                        )
                        .await;
                        if round % 2 == 0 {
                            drop(lease);
                        } else {
                            // A machine that is busy elsewhere may lose one; that is no matter here.
                            let _ = lease.release().await;
                        }
                    }
                })
            });
            for task in join_all(tasks).await {
                task.unwrap();
            }
            if renewals(&server) >= MEETINGS {
                break;
            }
        }
        let renewed = renewals(&server);
        assert!(
            renewed >= MEETINGS,
            "renewals and releases hardly met: {renewed}"
        );
        let others = registry(&server.url(), ms(30_000)).await;
        let begin = Instant::now();
        let next = join_all((0..KEYS).map(|key| others.obtain(format!("k{key}")).lease())).await;
        // Each is had at the end of a ttl, and not only when it is asked for again after 8 s or more (W2).
        assert!(begin.elapsed() <= BOUND, "{:?}", begin.elapsed());
        for lease in next {
            lease.unwrap().release().await.unwrap();
        }
        nothing_left(&server, &[&locks, &others]).await;
        assert_silent(&server, 3 * ttl).await;
    })
    .await;
}

/// A loss that races a renewal: it was sent in time, and is done by the server when its holder has already been told
/// that the lease is over. It does prolong the key, for a whole ttl; the release that follows it (D5) undoes that.
#[tokio::test]
async fn a_renewal_that_crosses_the_loss_of_its_lease_prolongs_nothing() {
    on_a_steady_machine(async || {
        let server = RedisServer::start();
        let proxy = Proxy::to(&server);
        let ttl = ms(3000);
        let locks = registry(&proxy.url(), ttl).await;
        let lease = locks.obtain("k").lease().await.unwrap();
        let before = lease.deadline();
        wait_until("it is renewed", BOUND, || lease.deadline() > before).await;
        proxy.hold(Way::ToServer, true);
        let sent = renewals(&server);
        // The holder is told 32 ms before the key is gone: for the renewal to find it, it stays for longer.
        let longer = ttl + ms(2000);
        server.cmd(&["PEXPIRE", "lock:k", &longer.as_millis().to_string()]);
        assert!(lease.lost().await.is_lost());
        let late = Instant::now().checked_duration_since(lease.deadline());
        assert!(late.expect("not before its deadline") <= LATE, "{late:?}");
        proxy.hold(Way::ToServer, false);
        // And not at the end of the ttl that it was given.
        wait_until("the key is gone", ttl / 2, || !server.exists("lock:k")).await;
        assert_eq!(renewals(&server), sent + 1, "that which crossed");
        nothing_left(&server, &[&locks]).await;
        drop(lease);
        assert_silent(&server, ms(500)).await;
    })
    .await;
}

/// #3194 (and #2515 before it): the network was away until the watchdog had failed and the lock had run out. It came
/// back, the same lock was acquired again, and the watchdog took it for one that it was watching already: it was not
/// renewed, and lost after a ttl.
#[tokio::test]
async fn redisson_3194_after_a_reconnect_the_next_lease_is_renewed() {
    on_a_steady_machine(async || {
        let server = RedisServer::start();
        let proxy = Proxy::to(&server);
        let ttl = ms(3000);
        let locks = registry(&proxy.url(), ttl).await;
        let others = registry(&server.url(), ttl).await;
        let lock = locks.obtain("k");
        for _ in 0..2 {
            let begin = Instant::now();
            let lease = lock.lease().await.unwrap();
            proxy.refuse();
            proxy.cut();
            assert!(lease.lost().await.is_lost());
            assert_took(begin, usable(ttl));
            wait_until("its key is gone", BOUND, || !server.exists("lock:k")).await;
            proxy.accept();

            let lease = timeout(4 * BOUND, lock.lease())
                .await
                .expect("in time")
                .unwrap();
            let others = others.obtain("k").acquire_within(ttl + ttl / 2);
            assert!(!others.await.unwrap());
            assert!(lease.is_valid());
            lease.release().await.unwrap();
        }
        nothing_left(&server, &[&locks, &others]).await;
    })
    .await;
}

/// The same with a network that is back before the lease is over: it is the same lease then, and is renewed at once.
#[tokio::test]
async fn redisson_3194_a_lease_that_lives_through_a_reconnect_is_renewed_on() {
    on_a_steady_machine(async || {
        let server = RedisServer::start();
        let proxy = Proxy::to(&server);
        // It may take 2.4 s until it is connected again, and the server may stand still for two more.
        let ttl = ms(6000);
        let locks = registry(&proxy.url(), ttl).await;
        let others = registry(&server.url(), ttl).await;
        let lease = locks.obtain("k").lease().await.unwrap();
        for _ in 0..3 {
            proxy.refuse();
            proxy.cut();
            let before = lease.deadline();
            sleep(ms(400)).await;
            proxy.accept();
            // The next try to connect may be two seconds away.
            wait_until("it is renewed", BOUND, || lease.deadline() > before).await;
            sleep(ms(100)).await;
        }
        let renewed = async {
            for _ in 0..2 {
                let before = lease.deadline();
                wait_until("it is renewed on", BOUND, || lease.deadline() > before).await;
            }
        };
        let in_vain = others.obtain("k").acquire_within(ttl + ttl / 3);
        let (acquired, ()) = tokio::join!(in_vain, renewed);
        assert!(!acquired.unwrap());
        assert!(lease.is_valid());
        lease.release().await.unwrap();
        nothing_left(&server, &[&locks, &others]).await;
    })
    .await;
}

/// #5698: three processes try for one lock every minute, and the one that gets it works for five. Now and then its
/// watchdog, behind a connection that had died, did not come for more than a ttl, and a second one worked beside it.
#[tokio::test]
async fn redisson_5698_long_work_stays_alone_though_connections_die() {
    on_a_steady_machine(async || {
        const PROCESSES: usize = 3;
        let server = RedisServer::start();
        // A third of it, two pauses of 2 s at most with a failed handshake between them (G1), and a second for a machine
        // that is slow.
        let ttl = ms(8000);
        let (long, short) = (2 * ttl, ms(1500));
        let working = Arc::new(AtomicUsize::new(0));
        let mut processes = Vec::new();
        for process in 0..PROCESSES {
            let locks = builder(&server.url(), ttl)
                .await
                .wait(ms(100))
                .build()
                .unwrap();
            let working = working.clone();
            if process > 0 {
                wait_until("the first works", BOUND, || server.exists("lock:channel")).await;
            }
            processes.push(tokio::spawn(async move {
                loop {
                    let job = async {
                        assert_eq!(working.fetch_add(1, Ordering::SeqCst), 0, "two at work");
                        // The first has long work, the others only want their turn.
                        sleep(if process == 0 { long } else { short }).await;
                        working.fetch_sub(1, Ordering::SeqCst);
                    };
                    match job.with_lock((&locks, "channel")).await {
                        Ok(()) => break,
                        Err(LockError::NotAcquired { .. } | LockError::Store { .. }) => {
                            sleep(ms(2000)).await;
                        }
                        Err(error) => panic!("{error}"),
                    }
                }
            }));
        }
        let mischief = async {
            loop {
                // A handshake on a slow machine is not hit each time.
                sleep(ms(1500)).await;
                server.client_kill_all();
            }
        };
        let all = join_all(processes);
        tokio::select! {
            all = timeout(2 * PATIENCE, all) => {
                for process in all.expect("all get their turn") {
                    process.unwrap();
                }
            }
            () = mischief => unreachable!(),
        }
        wait_until("nothing is left", BOUND, || {
            server.keys("*") == ["lock:~fence"]
        })
        .await;
    })
    .await;
}

/// One that is renewed by a policy of its own goes the same way: nobody is watched by default who asked not to be.
#[tokio::test]
async fn a_lock_with_a_ttl_of_its_own_has_no_watchdog() {
    on_a_steady_machine(async || {
        let ttl = ms(3000);
        let server = RedisServer::start();
        let locks = registry(&server.url(), ms(30_000)).await;
        let off = builder(&server.url(), ttl)
            .await
            .renewal(Renewal::off())
            .build()
            .unwrap();
        for (locks, own) in [(&locks, Some(ttl)), (&off, None)] {
            let lock = locks.obtain("k");
            let lock = own.map_or(lock.clone(), |ttl| lock.ttl(ttl));
            let (begin, lease) = counted_lease(&server, &lock, ttl).await;
            let deadline = lease.deadline();
            server.reset_stats();
            assert!(lease.lost().await.is_lost());
            assert_took(begin, usable(ttl));
            assert_eq!(lease.deadline(), deadline);
            // What follows a loss releases.
            assert_eq!((renewals(&server), server.calls("pexpire")), (0, 0));
            drop(lease);
            nothing_left(&server, &[locks]).await;
        }
    })
    .await;
}
