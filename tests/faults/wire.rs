use std::time::Instant;

use lockstream::LockError;
use tokio::time::{sleep, timeout};

use crate::support::{PATIENCE, Proxy, RedisServer, Way, on_a_steady_machine, wait_until};
use crate::{BOUND, LONG, Scene, UNASKED, builder, ms, nothing_left, served};

#[tokio::test]
async fn cut() {
    let server = RedisServer::start();
    let proxy = Proxy::to(&server);
    let scene = Scene::set(&server, &proxy.url(), LONG).await;
    for _ in 0..3 {
        let accepted = proxy.accepted();
        proxy.cut();
        wait_until("both are back", UNASKED, || {
            proxy.accepted() >= accepted + 2 && proxy.connections() == 2
        })
        .await;
    }
    scene.ends_well(&server).await;
}

/// Cut, and refused for a while: the holder holds, the waiter waits, and both find each other afterwards.
#[tokio::test]
async fn cut_off_for_a_while() {
    let server = RedisServer::start();
    let proxy = Proxy::to(&server);
    let scene = Scene::set(&server, &proxy.url(), LONG).await;
    proxy.refuse();
    proxy.cut();
    sleep(ms(500)).await;
    assert!(scene.lease.is_valid() && !scene.waiter.is_finished());
    proxy.accept();
    wait_until("both are back", UNASKED, || proxy.connections() == 2).await;
    scene.ends_well(&server).await;
}

/// A release that nobody answers is made again on the next connection, and is told as what it was: ours to the end.
#[tokio::test]
async fn silent_while_it_is_released() {
    for way in [Way::ToServer, Way::ToClient, Way::Both] {
        let server = RedisServer::start();
        let proxy = Proxy::to(&server);
        let holding = builder(&proxy.url())
            .await
            .response_timeout(ms(300))
            .build()
            .unwrap();
        let waiting = builder(&server.url()).await.build().unwrap();
        let scene = Scene::set_with(&server, holding, waiting, LONG).await;
        proxy.blackhole(way, true);
        let token = scene.lease.token();
        let release = tokio::spawn(scene.lease.release());
        sleep(ms(600)).await;
        assert!(!release.is_finished(), "{way:?}");
        proxy.blackhole(way, false);
        proxy.cut();
        let released = timeout(4 * BOUND, release)
            .await
            .expect("a release ends")
            .unwrap();
        assert!(released.is_ok(), "{way:?}: {released:?}");
        let next = served(scene.waiter, BOUND).await;
        assert!(next.token() > token, "{way:?}");
        next.release().await.unwrap();
        nothing_left(&server, &[&scene.holding, &scene.waiting]).await;
    }
}

/// The grant is pushed into silence: the lock is the waiter's, who does not know. When it hears again it has the lock,
/// or nobody has.
#[tokio::test]
async fn silent_while_it_is_granted() {
    let server = RedisServer::start();
    let proxy = Proxy::to(&server);
    let holding = builder(&server.url()).await.build().unwrap();
    let waiting = builder(&proxy.url()).await.build().unwrap();
    let scene = Scene::set_with(&server, holding, waiting, LONG).await;
    proxy.blackhole(Way::ToClient, true);
    let token = scene.lease.token();
    scene.lease.release().await.unwrap();
    sleep(ms(300)).await;
    assert!(!scene.waiter.is_finished() && server.exists("lock:k"));
    proxy.blackhole(Way::ToClient, false);
    proxy.cut();
    let next = served(scene.waiter, BOUND).await;
    assert!(next.token() > token && next.is_valid());
    next.release().await.unwrap();
    nothing_left(&server, &[&scene.holding, &scene.waiting]).await;
}

/// A connection that dies without a word is found out by what is asked on it, and not used for ever.
#[tokio::test]
async fn silent_for_a_waiter() {
    on_a_steady_machine(async || {
        let server = RedisServer::start();
        let proxy = Proxy::to(&server);
        let holding = builder(&server.url()).await.build().unwrap();
        let waiting = builder(&proxy.url())
            .await
            .response_timeout(ms(300))
            .build()
            .unwrap();
        // It asks when the holder's ttl is over. Until then all is ready, also if the machine stands still.
        let scene = Scene::set_with(&server, holding, waiting, ms(4_000)).await;
        // All is kept back until it connects anew. What the old connection had on its way arrives late.
        let accepted = proxy.accepted();
        proxy.hold(Way::Both, true);
        let begin = Instant::now();
        wait_until("it connects anew", 2 * BOUND, || {
            proxy.accepted() > accepted
        })
        .await;
        proxy.hold(Way::Both, false);
        let next = served(scene.waiter, BOUND).await;
        // Before it would ask in any case (W2).
        assert!(begin.elapsed() < ms(8_000), "{:?}", begin.elapsed());
        next.release().await.unwrap();
        drop(scene.lease);
        nothing_left(&server, &[&scene.holding, &scene.waiting]).await;
    })
    .await;
}

/// What a dead connection still had on its way arrives late. It must not win for nobody, nor release what is another's.
#[tokio::test]
async fn commands_that_arrive_late() {
    let server = RedisServer::start();
    let proxy = Proxy::to(&server);
    let slow = builder(&proxy.url())
        .await
        .response_timeout(ms(300))
        .build()
        .unwrap();
    let other = builder(&server.url()).await.build().unwrap();
    slow.obtain("warm")
        .lease()
        .await
        .unwrap()
        .release()
        .await
        .unwrap();
    proxy.hold(Way::ToServer, true);
    let told = slow.obtain("k").lease_once().await;
    assert!(matches!(told, Err(LockError::Store { .. })), "{told:?}");
    // The connection is dead for the client by now; the command is still on its way.
    sleep(ms(400)).await;
    proxy.hold(Way::ToServer, false);
    let lease = other.obtain("k").lease_within(UNASKED).await.unwrap();
    sleep(ms(200)).await;
    assert!(server.exists("lock:k"), "a late command took the lock away");
    lease.release().await.unwrap();
    wait_until("nothing was won for nobody", BOUND, || {
        !server.exists("lock:k")
    })
    .await;
    nothing_left(&server, &[&slow, &other]).await;
}

#[tokio::test]
async fn slow() {
    let server = RedisServer::start();
    let proxy = Proxy::to(&server);
    let scene = Scene::set(&server, &proxy.url(), LONG).await;
    proxy.delay(Way::Both, ms(60));
    let begin = Instant::now();
    scene.ends_well(&server).await;
    assert!(
        begin.elapsed() >= ms(240),
        "a release and a hand-over, each there and back"
    );
}

/// The client's half of the connection ends, the server's does not, and the other way round.
#[tokio::test]
async fn half_closed() {
    for way in [Way::ToServer, Way::ToClient] {
        let server = RedisServer::start();
        let proxy = Proxy::to(&server);
        let scene = Scene::set(&server, &proxy.url(), LONG).await;
        let accepted = proxy.accepted();
        proxy.half_close(way);
        wait_until("both are back", BOUND, || proxy.accepted() >= accepted + 2).await;
        scene.ends_well(&server).await;
    }
}

/// After a fail-over the address leads to a server that knows of nothing.
#[tokio::test]
async fn led_to_another_server() {
    let (old, new) = (RedisServer::start(), RedisServer::start());
    let proxy = Proxy::to(&old);
    let scene = Scene::set(&old, &proxy.url(), LONG).await;
    let token = scene.lease.token();
    proxy.aim_at(&new);
    proxy.cut();
    timeout(BOUND, scene.lease.lost())
        .await
        .expect("the holder learns of it");
    let next = served(scene.waiter, BOUND).await;
    assert!(next.token() > token, "tokens grow through a fail-over");
    next.release().await.unwrap();
    drop(scene.lease);
    nothing_left(&new, &[&scene.holding, &scene.waiting]).await;
}

/// Everything at once, for a while: nobody is forgotten, no token comes twice, nothing is left.
#[tokio::test]
async fn cut_again_and_again() {
    let server = RedisServer::start();
    let proxy = Proxy::to(&server);
    // What is lost to all is lost to the end of the test.
    let registry = async || {
        let builder = builder(&proxy.url()).await;
        builder.ttl(LONG).wait(LONG).build().unwrap()
    };
    let (one, two) = (registry().await, registry().await);
    let tasks: Vec<_> = (0..8)
        .map(|task| {
            let registry = [&one, &two][task % 2];
            let locks = [
                registry.obtain("k"),
                registry.obtain(format!("k{}", task % 4)),
            ];
            tokio::spawn(async move {
                let mut tokens = Vec::new();
                for round in 0..60 {
                    let work = locks[round % 2].with_lease(async |lease| {
                        tokio::task::yield_now().await;
                        lease.token()
                    });
                    tokens.push(work.await.unwrap());
                }
                tokens
            })
        })
        .collect();
    for _ in 0..10 {
        sleep(ms(7)).await;
        proxy.cut();
    }
    let mut all = Vec::new();
    for task in tasks {
        all.extend(
            timeout(2 * PATIENCE, task)
                .await
                .expect("nobody is forgotten")
                .unwrap(),
        );
    }
    let count = all.len();
    all.sort_unstable();
    all.dedup();
    assert_eq!((count, all.len()), (480, 480), "no token twice");
    nothing_left(&server, &[&one, &two]).await;
}
