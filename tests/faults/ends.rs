//! Leases that change hands, while things break.

use lockstream::LockRegistry;
use tokio::time::{sleep, timeout};

use crate::support::{Proxy, RedisServer, Way, on_a_steady_machine, wait_until};
use crate::{BOUND, LONG, builder, ms, nothing_left};

async fn two(server: &RedisServer, proxy: &Proxy) -> (LockRegistry, LockRegistry) {
    let here = builder(&server.url()).await.build().unwrap();
    let there = builder(&proxy.url()).await.build().unwrap();
    // Its connection stands from here on.
    there.obtain("anything").inspect().await.unwrap();
    (here, there)
}

/// The server did it, and nobody heard: on the next connection the same owner asks again, and finds itself there.
#[tokio::test]
async fn the_reply_to_an_adoption_is_lost() {
    let server = RedisServer::start();
    let proxy = Proxy::to(&server);
    let (here, there) = two(&server, &proxy).await;
    let lease = here.obtain("k").ttl(LONG).lease().await.unwrap();
    let (token, detached) = (lease.token(), lease.detach().unwrap());
    proxy.blackhole(Way::ToClient, true);
    let adopting = tokio::spawn(there.adopt(detached.clone()));
    wait_until("the server has done it", BOUND, || {
        server.get("lock:k").as_deref() != Some(detached.owner())
    })
    .await;
    let owner = server.get("lock:k");
    assert!(owner.is_some() && !adopting.is_finished());
    proxy.blackhole(Way::ToClient, false);
    proxy.cut();
    let adopted = timeout(BOUND, adopting).await.expect("it ends");
    let adopted = adopted.unwrap().unwrap();
    assert_eq!(server.get("lock:k"), owner, "it is the same owner");
    assert!(adopted.token() > token && adopted.is_valid());
    adopted.release().await.unwrap();
    nothing_left(&server, &[&here, &there]).await;
}

/// The same, but whoever wanted it is gone by then: what came for nobody is released.
#[tokio::test]
async fn an_adoption_that_was_done_for_nobody_is_given_back() {
    let server = RedisServer::start();
    let proxy = Proxy::to(&server);
    let (here, there) = two(&server, &proxy).await;
    let detached = here
        .obtain("k")
        .ttl(LONG)
        .lease()
        .await
        .unwrap()
        .detach()
        .unwrap();
    proxy.blackhole(Way::ToClient, true);
    let adopting = tokio::spawn(there.adopt(detached.clone()));
    wait_until("the server has done it", BOUND, || {
        server.get("lock:k").as_deref() != Some(detached.owner())
    })
    .await;
    adopting.abort();
    assert!(adopting.await.unwrap_err().is_cancelled());
    proxy.blackhole(Way::ToClient, false);
    proxy.cut();
    wait_until("it is given back", BOUND, || !server.exists("lock:k")).await;
    nothing_left(&server, &[&here, &there]).await;
}

/// It never reached the server: it is sent again, and done once.
#[tokio::test]
async fn an_adoption_is_lost_on_its_way() {
    let server = RedisServer::start();
    let proxy = Proxy::to(&server);
    let (here, there) = two(&server, &proxy).await;
    let detached = here
        .obtain("k")
        .ttl(LONG)
        .lease()
        .await
        .unwrap()
        .detach()
        .unwrap();
    proxy.blackhole(Way::ToServer, true);
    let adopting = tokio::spawn(there.adopt(detached.clone()));
    sleep(ms(100)).await;
    assert_eq!(server.get("lock:k").as_deref(), Some(detached.owner()));
    proxy.blackhole(Way::ToServer, false);
    proxy.cut();
    let adopted = timeout(BOUND, adopting).await.expect("it ends");
    adopted.unwrap().unwrap().release().await.unwrap();
    nothing_left(&server, &[&here, &there]).await;
}

/// A server that comes back without its data has nothing to adopt, and says so.
#[tokio::test]
async fn a_server_that_lost_its_data_has_nothing_to_adopt() {
    let mut server = RedisServer::start();
    let (here, there) = (
        builder(&server.url()).await.build().unwrap(),
        builder(&server.url()).await.build().unwrap(),
    );
    let detached = here
        .obtain("k")
        .ttl(LONG)
        .lease()
        .await
        .unwrap()
        .detach()
        .unwrap();
    server.restart();
    let adopting = timeout(4 * BOUND, async {
        loop {
            match there.adopt(detached.clone()).await {
                Err(lockstream::LockError::Store { .. }) => sleep(ms(20)).await,
                told => break told,
            }
        }
    });
    let told = adopting.await.expect("the server is back");
    assert!(matches!(&told, Err(error) if error.is_lost()), "{told:?}");
    nothing_left(&server, &[&here, &there]).await;
}

/// A restart kept the data, or another's key is there: what was left is adopted, what is a stranger's is not.
#[tokio::test]
async fn a_foreign_lock_is_not_adopted() {
    let server = RedisServer::start();
    let (here, there) = (
        builder(&server.url()).await.build().unwrap(),
        builder(&server.url()).await.build().unwrap(),
    );
    let detached = here
        .obtain("k")
        .ttl(LONG)
        .lease()
        .await
        .unwrap()
        .detach()
        .unwrap();
    server.set("lock:k", "a stranger");
    let told = there.adopt(detached.clone()).await;
    assert!(matches!(&told, Err(error) if error.is_lost()), "{told:?}");
    assert_eq!(server.get("lock:k").as_deref(), Some("a stranger"));
    // Of a type that holds no owner at all.
    server.del("lock:k");
    server.cmd(&["LPUSH", "lock:k", detached.owner()]);
    let told = there.adopt(detached).await;
    assert!(
        matches!(&told, Err(lockstream::LockError::Store { .. })),
        "{told:?}"
    );
    assert_eq!(server.ask::<String>(&["TYPE", "lock:k"]), "list");
    server.del("lock:k");
    nothing_left(&server, &[&here, &there]).await;
}

/// The server prolonged the key, and nobody heard: the wish stands, and is confirmed on the next connection.
#[tokio::test]
async fn the_reply_to_an_extension_is_lost() {
    on_a_steady_machine(async || {
        let server = RedisServer::start();
        let proxy = Proxy::to(&server);
        let (here, there) = two(&server, &proxy).await;
        let lease = there.obtain("k").ttl(ms(8000)).lease().await.unwrap();
        // The server knows the script from here on.
        let before = lease.extend(ms(8000)).await.unwrap();
        proxy.blackhole(Way::ToClient, true);
        let extending = tokio::spawn(lease.extend(LONG));
        wait_until("the server has done it", BOUND, || {
            server.pttl("lock:k") > 8000
        })
        .await;
        assert_eq!(lease.deadline(), before, "what nobody heard proves nothing");
        proxy.blackhole(Way::ToClient, false);
        proxy.cut();
        let extended = timeout(BOUND, extending).await.expect("it ends");
        assert!(extended.unwrap().unwrap() > before + ms(20_000));
        lease.release().await.unwrap();
        nothing_left(&server, &[&here, &there]).await;
    })
    .await;
}
