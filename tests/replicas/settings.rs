use std::time::Duration;

#[cfg(feature = "redis-1")]
use lockstream::store::RedisStoreBuilder;
use lockstream::store::{QuorumStore, RedisStore};
use lockstream::{LockError, LockRegistry};
use tokio::time::timeout;

use crate::flock::{Flock, told};
use crate::support::{RedisServer, least_rights};
use crate::{BOUND, LONG, ms};

#[test]
fn replicas_are_given_some_time() {
    for within in [Duration::ZERO, Duration::MAX] {
        let store = RedisStore::builder("redis://127.0.0.1:1/").min_replicas(1, within);
        let error = store.connect_lazy().unwrap_err();
        assert!(
            !error.is_retryable() && error.to_string().contains("min_replicas"),
            "{error}"
        );
    }
}

/// Before anything is sent: nobody is there.
#[tokio::test]
async fn a_lease_must_last_longer_than_its_replicas_have() {
    let store = |port, within| {
        let url = format!("redis://127.0.0.1:{port}/");
        let store = RedisStore::builder(url).min_replicas(1, within);
        store.connect_lazy().unwrap()
    };
    let quorum = QuorumStore::new([store(1, ms(100)), store(2, ms(1_000))]).unwrap();
    let [one, quorum] = [
        LockRegistry::builder(store(1, ms(1_000))).build().unwrap(),
        LockRegistry::builder(quorum).build().unwrap(),
    ];
    for locks in [one, quorum] {
        for (ttl, is_short) in [(999, true), (1_000, true), (1_001, false)] {
            let lock = locks.obtain("k").ttl(ms(ttl));
            let error = lock.acquire_once().await.unwrap_err();
            let invalid = matches!(&error, LockError::InvalidSetting { setting, .. } if *setting == "min_replicas");
            assert_eq!(invalid, is_short, "{ttl}: {error}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_replicas_are_not_asked() {
    let server = RedisServer::start();
    let store = RedisStore::builder(server.url()).min_replicas(0, LONG);
    let locks = LockRegistry::builder(store.connect().await.unwrap())
        .build()
        .unwrap();
    let lease = locks.obtain("k").lease().await.unwrap();
    assert_eq!(server.calls("wait"), 0);
    lease.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_without_replicas_and_one_that_is_a_replica() {
    let flock = Flock::start().await;
    let alone = RedisServer::start();
    let store = RedisStore::builder(alone.url()).min_replicas(1, ms(50));
    let locks = LockRegistry::builder(store.connect().await.unwrap())
        .response_timeout(BOUND)
        .build()
        .unwrap();
    let error = told(locks.obtain("k").acquire_once().await);
    assert!(error.to_string().contains(": 0 of 1 replicas"), "{error}");

    let replica = flock.replicas[0].url();
    let store = RedisStore::builder(replica).min_replicas(1, ms(50));
    let error = store.connect().await.unwrap_err();
    let reason = "cannot be used with replica instances";
    assert!(error.to_string().contains(reason), "{error}");
}

/// Its connections are opened as the client would, the one that asks as well.
#[cfg(feature = "redis-1")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_replicas_of_a_clients_server_are_asked() {
    let flock = Flock::start().await;
    let client = redis::Client::open(flock.primary.url()).unwrap();
    let builder = RedisStoreBuilder::from_client(client);
    let store = builder.min_replicas(2, ms(5_000)).connect().await.unwrap();
    let locks = LockRegistry::builder(store).build().unwrap();
    let lease = locks.obtain("k").lease().await.unwrap();
    let owner = flock.primary.get("lock:k");
    assert!(owner.is_some());
    assert_eq!(flock.owners("k"), [owner.clone(), owner]);
    lease.release().await.unwrap();
    let client = redis::Client::open(flock.replicas[0].url()).unwrap();
    let store = RedisStoreBuilder::from_client(client).min_replicas(1, ms(50));
    assert!(store.connect().await.is_err(), "it is a replica");
    flock.wait_until_empty().await;
}

/// The rights that the documentation lists, and `wait`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_right_to_wait_is_needed() {
    let flock = Flock::start().await;
    let set_user = |more: &[&str]| {
        let mut words = vec!["ACL", "SETUSER"];
        words.extend(least_rights());
        words.extend(more);
        flock.primary.cmd(&words);
    };
    let url = flock.primary.url_with("lockstream", "password", 0);
    let store = || RedisStore::builder(&*url).min_replicas(2, ms(5_000));
    set_user(&[]);
    let error = store().connect().await.unwrap_err();
    assert!(
        !error.is_retryable() && error.to_string().contains("'wait'"),
        "{error}"
    );

    let locks = LockRegistry::builder(store().connect_lazy().unwrap());
    let locks = locks.ttl(LONG).wait(LONG).build().unwrap();
    let told_at_once = timeout(BOUND, locks.obtain("k").lease()).await;
    let error = told(told_at_once.expect("waiting mends nothing"));
    assert!(
        !error.is_retryable() && error.to_string().contains("'wait'"),
        "{error}"
    );
    flock.wait_until_empty().await;

    set_user(&["+wait"]);
    store().connect().await.unwrap();
    let lease = timeout(BOUND, locks.obtain("k").lease()).await.unwrap();
    let lease = lease.unwrap();
    let owner = flock.primary.get("lock:k");
    assert_eq!(flock.owners("k"), [owner.clone(), owner]);
    lease.release().await.unwrap();
    flock.wait_until_empty().await;
}
