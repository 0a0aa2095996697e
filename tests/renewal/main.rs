//! Leases that are prolonged while they are held, on a real server: long work keeps its lock, what is over is known to
//! be over, and no renewal outlives its lease.
//!
//! | file | question it answers |
//! |---|---|
//! | `holding.rs` | is what is held kept, at what cost, and for how long at most? |
//! | `stories.rs` | how did the watchdogs of others fail? |
//! | `loss.rs` | who learns of a loss, and how soon? |
//! | `ends.rs` | what of a lease whose runtime, process or holder is gone? |
//! | `virtual_time.rs` | the same to the millisecond, on the memory store |
#![cfg(all(feature = "redis", feature = "test-util"))]

mod ends;
#[path = "../support/hearing.rs"]
mod hearing;
mod holding;
#[path = "../support/lock_server.rs"]
mod lock_server;
mod loss;
mod stories;
#[path = "../support/mod.rs"]
mod support;
mod virtual_time;

use std::time::Duration;

pub(crate) use lock_server::{BOUND, START, nothing_left};
use lockstream::{Lease, Lock, LockRegistry, LockRegistryBuilder};
use support::RedisServer;
pub(crate) use support::ms;
use tokio::time::Instant;

/// How late something may come that a timer causes, on a machine with other work to do.
pub(crate) const LATE: Duration = ms(1000);

/// The usable part of a lease: its ttl but for 1 % and 2 ms.
pub(crate) fn usable(ttl: Duration) -> Duration {
    ttl - ttl / 100 - ms(2)
}

/// Locks of this registry are renewed, as locks are by default.
pub(crate) async fn builder(url: &str, ttl: Duration) -> LockRegistryBuilder {
    lock_server::registry_builder(url).await.ttl(ttl)
}

pub(crate) async fn registry(url: &str, ttl: Duration) -> LockRegistry {
    builder(url, ttl).await.build().unwrap()
}

/// How often the server was asked to renew: each connection tries its rights once, in one script, and what else that
/// script calls no test here does.
pub(crate) fn renewals(server: &RedisServer) -> u64 {
    server.calls("pexpire") - server.calls("zcount")
}

/// One that takes long is renewed once more, to last as long as was asked for (W3).
pub(crate) fn came_at_once(lease: &Lease, ttl: Duration) -> bool {
    lease.deadline() - Instant::now() > ttl / 100 * 96
}

/// Counts from here, and takes a lease that comes at once; also gives when it was asked for.
pub(crate) async fn counted_lease(
    server: &RedisServer,
    lock: &Lock,
    ttl: Duration,
) -> (Instant, Lease) {
    let first = Instant::now();
    loop {
        assert!(first.elapsed() < 10 * BOUND, "none comes at once");
        server.reset_stats();
        let begin = Instant::now();
        let lease = lock.lease().await.unwrap();
        if came_at_once(&lease, ttl) {
            return (begin, lease);
        }
        // It may be over by now.
        let _ = lease.release().await;
    }
}

/// Sends nothing at all for so long: whoever still renewed something would.
pub(crate) async fn assert_silent(server: &RedisServer, time: Duration) {
    server.reset_stats();
    tokio::time::sleep(time).await;
    let calls = server.all_calls();
    assert!(calls.is_empty(), "somebody still renews: {calls:?}");
}

/// Fails unless what began at `begin` took `expected`, or somewhat longer.
#[track_caller]
pub(crate) fn assert_took(begin: Instant, expected: Duration) {
    let took = begin.elapsed();
    assert!(
        took + ms(1) >= expected && took <= expected + LATE,
        "took {took:?} instead of {expected:?}"
    );
}

/// Not a test, but what the other processes run.
#[tokio::test]
async fn worker() {
    if let Some(role) = support::Role::of_this_process() {
        ends::hold(role).await;
    }
}
