use std::time::Instant;

use lockstream::store::RedisStore;
use lockstream::{LockError, LockRegistry};
use tokio::time::{sleep, timeout};

use crate::hearing::Log;
use crate::support::{RedisServer, chain, on_a_steady_machine};
use crate::{BOUND, builder, ms, nothing_left, served};

fn lazy(url: &str) -> LockRegistry {
    let store = RedisStore::connect_lazy(url).unwrap();
    LockRegistry::builder(store)
        .response_timeout(2 * BOUND)
        .build()
        .unwrap()
}

fn is_lasting(told: &LockError) -> bool {
    matches!(told, LockError::Store { source, .. } if !source.is_retryable())
}

/// A wrong password will not become right: no one waits for that, and it is not tried again and again.
#[tokio::test]
async fn a_wrong_password() {
    let server = RedisServer::builder().config("requirepass right").start();
    let wrong = server.url_with("", "wrong", 0);
    let told = LockRegistry::connect(wrong.clone()).await.unwrap_err();
    assert!(!told.is_retryable(), "{told}");
    assert!(
        !format!("{told} {told:?}").contains("wrong@"),
        "the password is shown: {told:?}"
    );
    let locks = lazy(&wrong);
    let begin = Instant::now();
    let told = locks.obtain("k").lease().await.unwrap_err();
    assert!(is_lasting(&told), "{told:?}");
    let told = locks.obtain("k").acquire_once().await.unwrap_err();
    assert!(is_lasting(&told), "{told:?}");
    assert!(begin.elapsed() < BOUND, "{:?}", begin.elapsed());
    assert_eq!(locks.in_use(), 0);
    let right = builder(&server.url_with("", "right", 0))
        .await
        .build()
        .unwrap();
    right
        .obtain("k")
        .lease()
        .await
        .unwrap()
        .release()
        .await
        .unwrap();
}

/// Where somebody accepts and does not speak, the time to connect ends it.
#[tokio::test]
async fn a_server_that_does_not_answer() {
    on_a_steady_machine(async || {
        let server = RedisServer::start();
        server.stop();
        let store = RedisStore::builder(server.url()).connect_timeout(ms(1000));
        let locks = LockRegistry::builder(store.connect_lazy().unwrap())
            .response_timeout(ms(1000))
            .build()
            .unwrap();
        let begin = Instant::now();
        let told = locks.obtain("k").acquire_once().await.unwrap_err();
        assert!(matches!(told, LockError::Store { .. }), "{told:?}");
        // That is its time to connect by default.
        assert!(begin.elapsed() < BOUND, "{:?}", begin.elapsed());
        let waiter = tokio::spawn(locks.obtain("k").lease());
        server.cont();
        // An attempt that a busy machine is too slow for costs another pause, of 2 s at most.
        served(waiter, 2 * BOUND).await.release().await.unwrap();
    })
    .await;
}

/// Where no grant can come it works by asking again, and says so once.
async fn asks_again(server: &RedisServer, url: &str, why: &str) {
    let log = Log::default();
    let _logging = log.hear(tracing::Level::WARN);
    let (one, two) = (
        builder(url).await.build().unwrap(),
        builder(url).await.build().unwrap(),
    );
    let lease = one.obtain("k").lease().await.unwrap();
    assert!(!two.obtain("k").acquire_once().await.unwrap());
    let waiter = tokio::spawn(two.obtain("k").lease());
    let local = tokio::spawn(one.obtain("k").lease());
    sleep(ms(200)).await;
    assert!(!waiter.is_finished() && !local.is_finished());
    assert_eq!(
        server.keys("*~queue*").len(),
        0,
        "tickets that nobody could be told of"
    );
    lease.release().await.unwrap();
    let mut tokens = Vec::new();
    for waiter in [waiter, local] {
        let waiter = tokio::spawn(async move {
            let lease = waiter.await.unwrap().unwrap();
            let token = lease.token();
            lease.release().await.unwrap();
            token
        });
        tokens.push(waiter);
    }
    for token in tokens {
        assert!(
            timeout(BOUND, token)
                .await
                .expect("it is served")
                .unwrap()
                .get()
                > 0
        );
    }
    server.client_kill_all();
    two.obtain("k")
        .lease()
        .await
        .unwrap()
        .release()
        .await
        .unwrap();
    nothing_left(server, &[&one, &two]).await;
    let logged = log.text();
    // One a registry, and a reconnect says nothing new.
    assert_eq!(logged.matches("cannot push grants").count(), 2, "{logged}");
    assert_eq!(logged.matches(why).count(), 2, "{logged}");
}

#[tokio::test]
async fn no_right_to_channels() {
    let user = "user x on >p ~* resetchannels +@all";
    let server = RedisServer::builder().config(user).start();
    let url = server.url_with("x", "p", 0);
    asks_again(&server, &url, "it takes &lock:~grant:*").await;
}

/// Of old, or behind a proxy that is: no RESP3, and so no pushes beside the answers.
#[tokio::test]
async fn no_third_version_of_the_protocol() {
    let server = RedisServer::builder()
        .config("rename-command HELLO \"\"")
        .config("requirepass p")
        .start();
    let url = server.url_with("", "p", 0);
    asks_again(&server, &url, "speaks RESP2 only").await;
}

/// Without the right to scripts nothing works, and nothing will: that is said at once, and not tried for ever.
#[tokio::test]
async fn no_right_to_scripts() {
    let user = "user x on >p ~* &* +@all -@scripting";
    let server = RedisServer::builder().config(user).start();
    let url = server.url_with("x", "p", 0);
    let locks = lazy(&url);
    let begin = Instant::now();
    let told = locks.obtain("k").lease().await.unwrap_err();
    assert!(is_lasting(&told), "{told:?}");
    assert!(chain(&told).to_lowercase().contains("noperm"), "{told:?}");
    let told = locks.obtain("k").acquire_once().await.unwrap_err();
    assert!(is_lasting(&told), "{told:?}");
    assert!(begin.elapsed() < BOUND, "{:?}", begin.elapsed());
    assert_eq!(locks.in_use(), 0);
    sleep(ms(300)).await;
    server.reset_stats();
    sleep(ms(1_000)).await;
    let calls: u64 = server.all_calls().values().sum();
    assert!(calls < 20, "{:?}", server.all_calls());
}

/// Keys that are not ours: what a lock cannot be is said, and other locks go on.
#[tokio::test]
async fn keys_of_a_wrong_type() {
    let server = RedisServer::start();
    let locks = builder(&server.url()).await.build().unwrap();
    server.cmd(&["LPUSH", "lock:list", "x"]);
    let told = locks.obtain("list").wait(ms(500)).lease().await;
    assert!(told.is_err(), "{told:?}");
    locks
        .obtain("k")
        .lease()
        .await
        .unwrap()
        .release()
        .await
        .unwrap();
    // A foreign lock with no ttl excludes us, and we it.
    server.set("lock:foreign", "somebody");
    assert!(!locks.obtain("foreign").acquire_once().await.unwrap());
    let told = locks
        .obtain("foreign")
        .wait(ms(200))
        .lease()
        .await
        .unwrap_err();
    assert!(told.is_not_acquired(), "{told:?}");
    assert_eq!(server.get("lock:foreign").as_deref(), Some("somebody"));
    server.del("lock:list");
    server.del("lock:foreign");
    nothing_left(&server, &[&locks]).await;
}

/// A user's own policy that panics is that user's fault, and takes no other down.
#[tokio::test]
async fn a_policy_that_panics() {
    let user = "user x on >p ~* resetchannels +@all";
    let server = RedisServer::builder().config(user).start();
    let url = server.url_with("x", "p", 0);
    let (one, two) = (
        builder(&url).await.build().unwrap(),
        builder(&url).await.build().unwrap(),
    );
    let held = one.obtain("k").lease().await.unwrap();
    let broken = lockstream::Repeat::from_fn(|| || panic!("a user's fault"));
    let lock = two.obtain("k").repeat(broken);
    let victim = tokio::spawn(timeout(ms(500), lock.lease()));
    let _ = victim.await;
    let other = timeout(BOUND, two.obtain("other").lease()).await;
    other
        .expect("other keys go on")
        .unwrap()
        .release()
        .await
        .unwrap();
    held.release().await.unwrap();
    let next = timeout(BOUND, two.obtain("k").lease()).await;
    next.expect("the key goes on")
        .unwrap()
        .release()
        .await
        .unwrap();
    nothing_left(&server, &[&one, &two]).await;
}
