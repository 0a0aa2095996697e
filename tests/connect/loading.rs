//! Servers that are not ready when they are wanted.

use std::thread;
use std::time::Instant;

use crate::support::{PATIENCE, RedisServer, on_a_steady_machine};
use crate::{BOUND, lazy, ms, told};

/// A restart with much data: the server listens, and answers LOADING.
#[tokio::test]
async fn a_server_that_loads_its_data_is_waited_for() {
    on_a_steady_machine(async || {
        let mut server = RedisServer::builder()
            .config("key-load-delay 100")
            .config("loading-process-events-interval-bytes 1024")
            .start();
        server.cmd(&["DEBUG", "POPULATE", "30000"]);
        server.cmd(&["SAVE"]);
        let url = server.url();
        server.kill();
        let restarting = thread::spawn(move || {
            server.restart();
            server
        });
        let locks = lazy(&url);
        // Whoever does not wait is told what is the matter, as soon as the server says so.
        let begin = Instant::now();
        let refusal = loop {
            let error = told(locks.obtain("now").lease_once().await).to_string();
            if error.contains("LOADING") {
                break error;
            }
            assert!(begin.elapsed() < PATIENCE, "{error}");
        };
        assert!(refusal.contains("127.0.0.1"), "{refusal}");
        // And whoever waits gets the lock. On a busy machine each of the pauses of 100 µs takes a millisecond or more.
        let lock = locks.obtain("later").wait(6 * PATIENCE);
        let lease = lock.lease().await.unwrap();
        assert!(lease.is_valid());
        lease.release().await.unwrap();
        let server = restarting.join().unwrap();
        assert_eq!(server.ask::<u64>(&["DBSIZE"]) / 10_000, 3, "with its data");
    })
    .await;
}

#[tokio::test]
async fn a_server_that_is_not_there_yet_is_waited_for() {
    on_a_steady_machine(async || {
        let mut server = RedisServer::start();
        let url = server.url();
        server.kill();
        let locks = lazy(&url);
        let waiting = tokio::spawn(locks.obtain("k").wait(2 * BOUND).lease());
        let error = told(locks.obtain("k").wait(ms(0)).lease().await);
        assert!(error.is_retryable(), "{error}");
        server.restart();
        waiting.await.unwrap().unwrap().release().await.unwrap();
    })
    .await;
}
