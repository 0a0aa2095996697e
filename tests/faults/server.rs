use std::time::Instant;

use lockstream::LockError;
use tokio::time::{sleep, timeout};

use crate::support::{PATIENCE, Proxy, RedisServer, wait_until};
use crate::{BOUND, LONG, Scene, UNASKED, builder, ms, nothing_left, served};

#[tokio::test]
async fn connections_killed() {
    let server = RedisServer::start();
    let scene = Scene::set(&server, &server.url(), LONG).await;
    for _ in 0..3 {
        let before: Vec<_> = server.clients().iter().map(|it| it.id()).collect();
        assert_eq!(server.client_kill_all(), 2);
        wait_until("both are back", UNASKED, || {
            let now = server.clients();
            now.len() == 2 && now.iter().all(|it| !before.contains(&it.id()))
        })
        .await;
    }
    scene.ends_well(&server).await;
}

/// Killed at the very moment of the hand-over: whatever got lost on the way is made good.
#[tokio::test]
async fn connections_killed_while_the_lock_changes_hands() {
    let server = RedisServer::start();
    let url = server.url();
    let (one, two) = (
        builder(&url).await.build().unwrap(),
        builder(&url).await.build().unwrap(),
    );
    let mut last = 0;
    for round in 0..12 {
        let lease = one.obtain("k").lease().await.unwrap();
        assert!(lease.token().get() > last, "tokens grow");
        last = lease.token().get();
        let waiter = tokio::spawn(two.obtain("k").lease());
        if round % 3 > 0 {
            crate::wait_for_queue(&server, 1).await;
        }
        let release = tokio::spawn(lease.release());
        if round % 2 == 0 {
            tokio::task::yield_now().await;
        }
        server.client_kill_all();
        let killed = Instant::now();
        let released = timeout(UNASKED, release)
            .await
            .expect("a release ends")
            .unwrap();
        released.unwrap();
        // Its connection is as far: the two pauses run side by side.
        let next = served(waiter, UNASKED.saturating_sub(killed.elapsed())).await;
        assert!(next.token().get() > last, "tokens grow");
        last = next.token().get();
        next.release().await.unwrap();
    }
    nothing_left(&server, &[&one, &two]).await;
}

/// The connections of four are killed at the moment of the hand-over, and the holder's, too. Those in front whose
/// connection is not back yet are passed over. They keep their places: nobody is passed over twice by the same.
#[tokio::test]
async fn connections_killed_under_four_waiters() {
    let server = RedisServer::start();
    let url = server.url();
    let holding = builder(&url).await.build().unwrap();
    let mut waiting = Vec::new();
    for _ in 0..4 {
        waiting.push(builder(&url).await.build().unwrap());
    }
    let (mut round, mut is_passed_over) = (0, false);
    // Until the kill has come in time once: else nothing is shown.
    while round < 8 || !is_passed_over {
        assert!(round < 100, "nobody was passed over");
        round += 1;
        let lease = holding.obtain("k").lease().await.unwrap();
        let (serve, mut served) = tokio::sync::mpsc::unbounded_channel();
        for (n, registry) in (0..).zip(&waiting) {
            let (lock, serve) = (registry.obtain("k").wait(LONG), serve.clone());
            tokio::spawn(async move {
                let lease = lock.lease().await.unwrap();
                assert!(serve.send((n, lease)).is_ok());
            });
            crate::wait_for_queue(&server, n + 1).await;
        }
        let release = tokio::spawn(lease.release());
        if round % 2 == 0 {
            tokio::task::yield_now().await;
        }
        server.client_kill_all();
        let killed = Instant::now();
        timeout(UNASKED, release).await.unwrap().unwrap().unwrap();
        let mut order = Vec::new();
        for left in (0..4).rev() {
            // Only the first may still have to connect, beside the holder.
            let within = match left {
                3 => UNASKED.saturating_sub(killed.elapsed()),
                _ => BOUND,
            };
            let (n, lease) = timeout(within, served.recv()).await.unwrap().unwrap();
            order.push(n);
            // The others are back in their places.
            while holding.obtain("k").inspect().await.unwrap().waiting != left {
                sleep(ms(2)).await;
            }
            lease.release().await.unwrap();
        }
        assert!(order[1..].is_sorted(), "{order:?}");
        is_passed_over |= order[0] != 0;
    }
    let mut all = vec![&holding];
    all.extend(&waiting);
    nothing_left(&server, &all).await;
}

#[tokio::test]
async fn restarted_with_its_data() {
    let mut server = RedisServer::builder().keep_data().start();
    let scene = Scene::set(&server, &server.url(), LONG).await;
    server.restart();
    wait_until("both are back", BOUND, || server.clients().len() == 2).await;
    crate::wait_for_queue(&server, 1).await;
    scene.ends_well(&server).await;
}

/// The lock is gone with the data. The holder is told at the reconnect, long before its deadline, and not by the next
/// holder's mess; the waiter enters the queue again and is served.
#[tokio::test]
async fn restarted_without_its_data() {
    let mut server = RedisServer::start();
    let scene = Scene::set(&server, &server.url(), LONG).await;
    let token = scene.lease.token();
    server.restart();
    let lost = timeout(BOUND, scene.lease.lost())
        .await
        .expect("the holder learns of it");
    assert!(matches!(lost, LockError::Lost { .. }), "{lost:?}");
    assert!(!scene.lease.is_valid());
    let released = scene.lease.release().await;
    assert!(
        matches!(released, Err(LockError::Lost { .. })),
        "{released:?}"
    );
    let next = served(scene.waiter, BOUND).await;
    assert!(
        next.token() > token,
        "tokens grow through the loss of the fence"
    );
    next.release().await.unwrap();
    nothing_left(&server, &[&scene.holding, &scene.waiting]).await;
}

#[tokio::test]
async fn away_for_a_while_and_back_without_data() {
    let mut server = RedisServer::start();
    let scene = Scene::set(&server, &server.url(), LONG).await;
    server.kill();
    let begin = Instant::now();
    let told = scene.holding.obtain("other").acquire_once().await;
    assert!(matches!(told, Err(LockError::Store { .. })), "{told:?}");
    assert!(scene.lease.is_valid(), "nobody else can have it yet");
    assert!(begin.elapsed() < BOUND, "{:?}", begin.elapsed());
    server.restart();
    timeout(BOUND, scene.lease.lost())
        .await
        .expect("the holder learns of it");
    served(scene.waiter, BOUND).await.release().await.unwrap();
    drop(scene.lease);
    nothing_left(&server, &[&scene.holding, &scene.waiting]).await;
}

#[tokio::test]
async fn shut_down_in_order_and_started_again() {
    let mut server = RedisServer::builder().keep_data().start();
    let scene = Scene::set(&server, &server.url(), LONG).await;
    server.shutdown_nosave();
    server.restart();
    wait_until("both are back", BOUND, || server.clients().len() == 2).await;
    scene.ends_well(&server).await;
}

/// All data gone, and no connection broken: nothing tells, until the holder releases, or the waiter's time to ask
/// comes (W2).
#[tokio::test]
async fn data_flushed() {
    let server = RedisServer::start();
    let ttl = ms(3_500);
    let scene = Scene::set(&server, &server.url(), ttl).await;
    let token = scene.lease.token();
    server.flushall();
    let released = scene.lease.release().await;
    assert!(
        matches!(released, Err(LockError::Lost { .. })),
        "{released:?}"
    );
    // Well before the 8 to 12 s after which it asks in any case.
    let next = served(scene.waiter, ttl + ms(4_000)).await;
    assert!(
        next.token() > token,
        "tokens grow through the loss of the fence"
    );
    next.release().await.unwrap();
    nothing_left(&server, &[&scene.holding, &scene.waiting]).await;
}

/// Stopped for less than the response time-out: late answers, and nothing else.
#[tokio::test]
async fn stopped_for_a_moment() {
    let server = RedisServer::start();
    let scene = Scene::set(&server, &server.url(), LONG).await;
    let ids = |server: &RedisServer| {
        server
            .clients()
            .iter()
            .map(|it| it.id())
            .collect::<Vec<_>>()
    };
    let before = ids(&server);
    server.stop();
    let other = tokio::spawn(scene.holding.obtain("other").lease());
    sleep(ms(300)).await;
    assert!(!other.is_finished());
    server.cont();
    served(other, BOUND).await.release().await.unwrap();
    assert_eq!(ids(&server), before, "the same connections");
    scene.ends_well(&server).await;
}

/// Stopped for longer: a caller that asks once is told after the response time-out, the others are served afterwards, and what
/// was sent before is not done behind anybody's back.
#[tokio::test]
async fn stopped_for_longer_than_the_response_time_out() {
    let server = RedisServer::start();
    let quick = async || {
        builder(&server.url())
            .await
            .response_timeout(ms(400))
            .build()
            .unwrap()
    };
    let scene = Scene::set_with(&server, quick().await, quick().await, LONG).await;
    server.stop();
    let begin = Instant::now();
    let patient = tokio::spawn(scene.holding.obtain("patient").lease());
    let told = scene.holding.obtain("other").lease_once().await;
    assert!(matches!(told, Err(LockError::Store { .. })), "{told:?}");
    let took = begin.elapsed();
    assert!(took >= ms(350) && took < BOUND, "{took:?}");
    sleep(ms(800)).await;
    assert!(!patient.is_finished() && scene.lease.is_valid());
    server.cont();
    served(patient, UNASKED).await.release().await.unwrap();
    // The attempt that nobody waited for was given up or released.
    let free = scene
        .waiting
        .obtain("other")
        .lease_within(UNASKED)
        .await
        .unwrap();
    free.release().await.unwrap();
    scene.ends_well(&server).await;
}

/// A server that stops in the middle of many hand-overs keeps every promise when it goes on.
#[tokio::test]
async fn stopped_amid_hand_overs() {
    let server = RedisServer::start();
    let url = server.url();
    let quick = async || {
        // What is lost to all is lost to the end of the test.
        builder(&url)
            .await
            .ttl(LONG)
            .wait(LONG)
            .response_timeout(ms(300))
            .build()
            .unwrap()
    };
    let (one, two) = (quick().await, quick().await);
    let tasks: Vec<_> = (0..8)
        .map(|task| {
            let lock = [&one, &two][task % 2].obtain("k");
            tokio::spawn(async move {
                let mut tokens = Vec::new();
                for _ in 0..40 {
                    tokens.push(lock.with_lease(async |lease| lease.token()).await.unwrap());
                }
                tokens
            })
        })
        .collect();
    for _ in 0..2 {
        sleep(ms(5)).await;
        server.stop();
        sleep(ms(500)).await;
        server.cont();
    }
    let mut all = Vec::new();
    for task in tasks {
        let tokens = timeout(2 * PATIENCE, task)
            .await
            .expect("nobody is forgotten")
            .unwrap();
        assert!(tokens.is_sorted());
        all.extend(tokens);
    }
    let count = all.len();
    all.sort_unstable();
    all.dedup();
    assert_eq!((count, all.len()), (320, 320), "no token twice");
    nothing_left(&server, &[&one, &two]).await;
}

/// Demoted to a replica it refuses every write: the release is tried again, the waiter waits, and a caller that asks once is told.
#[tokio::test]
async fn demoted_and_promoted_again() {
    let server = RedisServer::start();
    let scene = Scene::set(&server, &server.url(), LONG).await;
    let nobody = Proxy::to(&server);
    nobody.refuse();
    server.cmd(&["REPLICAOF", "127.0.0.1", &nobody.port().to_string()]);
    let told = scene.waiting.obtain("other").acquire_once().await;
    assert!(matches!(told, Err(LockError::Store { .. })), "{told:?}");
    let token = scene.lease.token();
    let release = tokio::spawn(scene.lease.release());
    let patient = tokio::spawn(scene.waiting.obtain("patient").lease());
    sleep(ms(500)).await;
    assert!(!release.is_finished() && !scene.waiter.is_finished() && !patient.is_finished());
    server.cmd(&["REPLICAOF", "NO", "ONE"]);
    let released = timeout(UNASKED, release)
        .await
        .expect("a release ends")
        .unwrap();
    released.unwrap();
    let next = served(scene.waiter, BOUND).await;
    assert!(next.token() > token);
    next.release().await.unwrap();
    served(patient, UNASKED).await.release().await.unwrap();
    nothing_left(&server, &[&scene.holding, &scene.waiting]).await;
}

/// Somebody deletes the lock's key by hand. The next holder is another's from then on, and the first learns at its
/// release that it was not alone, and does not take the lock from the other.
#[tokio::test]
async fn the_key_deleted_by_hand() {
    let server = RedisServer::start();
    let scene = Scene::set(&server, &server.url(), LONG).await;
    let token = scene.lease.token();
    server.del("lock:k");
    let third = builder(&server.url()).await.build().unwrap();
    // Looks, finds it free, and serves the one who waits in the queue.
    assert!(!third.obtain("k").acquire_once().await.unwrap());
    let next = served(scene.waiter, BOUND).await;
    assert!(next.token() > token);
    let released = scene.lease.release().await;
    assert!(
        matches!(released, Err(LockError::Lost { .. })),
        "{released:?}"
    );
    assert!(server.exists("lock:k") && next.is_valid());
    next.release().await.unwrap();
    nothing_left(&server, &[&scene.holding, &scene.waiting, &third]).await;
}

/// Full to the brim: nothing can be acquired, and what is held can be released and handed over.
#[tokio::test]
async fn full() {
    let server = RedisServer::builder()
        .config("maxmemory-policy noeviction")
        .start();
    let scene = Scene::set(&server, &server.url(), LONG).await;
    server.cmd(&["CONFIG", "SET", "maxmemory", "1"]);
    let told = scene.holding.obtain("other").acquire_once().await;
    assert!(matches!(told, Err(LockError::Store { .. })), "{told:?}");
    let told = scene.holding.obtain("other").lease_within(ms(300)).await;
    assert!(matches!(told, Err(LockError::Store { .. })), "{told:?}");
    scene.ends_well(&server).await;
}

/// The holder was killed, and the server's clock set back by an hour: the server keeps the lock for as much longer. Nobody
/// has it until then, or until it is deleted; whoever looks sees that it outlasts its ttl.
#[tokio::test]
async fn the_clock_set_back_behind_a_killed_holder() {
    const TTL_AND_AN_HOUR: &str = "3630000";
    let server = RedisServer::start();
    let locks = builder(&server.url()).await.build().unwrap();
    server.cmd(&["SET", "lock:k", "killed:1", "PX", TTL_AND_AN_HOUR]);
    let lock = locks.obtain("k");
    assert!(!lock.acquire_within(ms(300)).await.unwrap());
    let seen = lock.inspect().await.unwrap();
    assert!(seen.remaining() > Some(ms(3_000_000)), "{seen:?}");
    assert!(server.del("lock:k"));
    let lease = lock.lease().await.unwrap();
    lease.release().await.unwrap();
    nothing_left(&server, &[&locks]).await;
}
