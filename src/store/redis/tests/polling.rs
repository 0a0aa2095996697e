//! Whether a session's thread sleeps while a reply is on its way.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

#[cfg(feature = "sentinel")]
use super::fake::Fake;
use super::registry::BOUND;
use super::support::RedisServer;
use crate::LockRegistry;
use crate::store::RedisStore;
#[cfg(feature = "sentinel")]
use crate::store::redis::endpoint::Endpoint;

const PAIRS: u64 = 100;

/// How often the thread of a runtime slept for so many pairs of calls, one after the other.
fn sleeps(server: &RedisServer, busy_poll: Duration) -> u64 {
    let slept = Arc::new(AtomicU64::new(0));
    let sleeps = slept.clone();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .on_thread_park(move || {
            sleeps.fetch_add(1, Ordering::Relaxed);
        })
        .build()
        .unwrap();
    runtime.block_on(async {
        let store = RedisStore::builder(server.url()).busy_poll(busy_poll);
        let locks = LockRegistry::builder(store.connect_lazy().unwrap()).build();
        let lock = locks.obtain("k");
        lock.lease().await.unwrap().release().await.unwrap();
        let before = slept.load(Ordering::Relaxed);
        for _ in 0..PAIRS {
            lock.lease().await.unwrap().release().await.unwrap();
        }
        slept.load(Ordering::Relaxed) - before
    })
}

#[test]
fn a_thread_that_looks_for_replies_does_not_sleep_before_each() {
    let server = RedisServer::start();
    assert!(sleeps(&server, Duration::ZERO) >= 2 * PAIRS);
    // A busy machine may keep the server from answering in time.
    let began = Instant::now();
    while sleeps(&server, Duration::from_millis(1)) > PAIRS {
        assert!(began.elapsed() < BOUND, "the thread sleeps all the same");
    }
}

/// A loop that never let them have their turn would keep this one from its end.
#[test]
fn other_tasks_have_their_turn_between_two_looks() {
    let server = RedisServer::start();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let store = RedisStore::builder(server.url()).busy_poll(Duration::from_millis(1));
        let locks = LockRegistry::builder(store.connect_lazy().unwrap()).build();
        let lock = locks.obtain("k");
        let turns = Arc::new(AtomicU64::new(0));
        let taken = turns.clone();
        let other = tokio::spawn(async move {
            loop {
                taken.fetch_add(1, Ordering::Relaxed);
                tokio::task::yield_now().await;
            }
        });
        for _ in 0..PAIRS {
            let before = turns.load(Ordering::Relaxed);
            lock.lease().await.unwrap().release().await.unwrap();
            assert!(turns.load(Ordering::Relaxed) > before);
        }
        other.abort();
    });
}

#[test]
fn no_thread_is_kept_awake_for_longer_than_a_millisecond() {
    let store = |within| RedisStore::builder("redis://127.0.0.1:1/").busy_poll(within);
    assert!(store(Duration::from_millis(1)).connect_lazy().is_ok());
    let error = store(Duration::from_micros(1_001))
        .connect_lazy()
        .unwrap_err();
    assert!(!error.is_retryable());
    assert_eq!(
        error.to_string(),
        "busy_poll cannot be 1.001ms: it is 1 ms at most"
    );
}

/// Where the sentinels say that the server is, it is waited for as the store was told to.
#[cfg(feature = "sentinel")]
#[tokio::test]
async fn the_sentinels_primary_is_waited_for_as_was_asked() {
    let fake = Fake::start(|request| {
        let address = b"*2\r\n$9\r\n127.0.0.1\r\n$4\r\n6379\r\n";
        request.is("SENTINEL").then(|| address.to_vec())
    });
    let url = fake.url();
    let authority = url.trim_start_matches("redis://").trim_end_matches('/');
    let url = format!("redis+sentinel://{authority}/mine");
    for within in [Duration::ZERO, Duration::from_millis(1)] {
        let sentinels = Endpoint::parse(&url).unwrap().with_busy_poll(within);
        let primary = sentinels.resolve(BOUND).await.unwrap();
        assert_eq!(primary.expect("they say where it is").busy_poll(), within);
    }
}
