//! What the libraries do that this one takes after, one test a thing, named after it. Each is a user's promise, kept
//! through the public face alone: on a Redis server, and on the memory store where virtual time says more.
//!
//! | file | whose things |
//! |---|---|
//! | `registry.rs` | the Reactor registry's and Spring Integration's: obtain, acquire, run under a lock, release |
//! | `leases.rs` | the watchdog's: how long a lease lasts |
//! | `queue.rs` | the clustered lock manager's: who is next, and who is refused |
//! | `asked.rs` | what a lock does only if it is asked to |
//! | `crashes.rs` | what processes leave that are killed |
//! | `policies.rs` | the pauses between attempts, where the server cannot push |
#![cfg(all(feature = "redis", feature = "test-util"))]

mod asked;
mod crashes;
mod leases;
mod policies;
mod queue;
mod registry;
#[path = "../support/mod.rs"]
mod support;

use std::future::Future;
use std::task::Poll;
use std::time::Duration;

use lockstream::store::{MemoryStore, RedisStore};
use lockstream::{Lease, LockError, LockRegistry, LockRegistryBuilder};
use support::{RedisServer, Role, wait_until};
use tokio::time::{Instant, timeout};

/// Every row, and the test that is named after it.
const ROWS: &[&str] = &[
    "registry::obtain",
    "registry::acquire_once",
    "registry::acquire_with_the_default_wait",
    "registry::acquire_with_a_given_wait",
    "registry::run_one_future",
    "registry::run_a_stream",
    "registry::expired_before_release",
    "registry::eviction_of_idle_entries",
    "registry::owner_checked_atomic_release",
    "policies::spin_then_sleep",
    "queue::release_notices",
    "queue::one_ticket_a_process",
    "leases::watchdog",
    "leases::at_most_n_renewals",
    "leases::no_renewal_with_an_explicit_ttl",
    "leases::script_cache_healed",
    "queue::bounded_queue",
    "queue::first_come_first_served",
    "crashes::crashed_holder",
    "crashes::crashed_waiter",
    "asked::reentrancy",
    "asked::key_kept_until_expiry",
    #[cfg(feature = "macros")]
    "asked::annotation",
];

/// A row that lost its test must not pass in silence.
#[test]
fn every_row_has_its_test() {
    let this = std::env::current_exe().unwrap();
    let listed = std::process::Command::new(this).arg("--list").output();
    let listed = String::from_utf8(listed.unwrap().stdout).unwrap();
    for row in ROWS {
        let test = format!("{row}: test");
        assert!(listed.lines().any(|line| line == test), "no test {row}");
    }
}

/// Not a test, but what the other processes run.
#[tokio::test]
async fn worker() {
    if let Some(role) = Role::of_this_process() {
        crashes::run(role).await;
    }
}

/// For what takes some round trips, a reconnect, or the start of a process.
const BOUND: Duration = Duration::from_secs(5);

const fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

const fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

/// A process on the server. Answers may take long, since the machine may be busy.
async fn builder(url: &str) -> LockRegistryBuilder {
    let store = RedisStore::connect(url).await.unwrap();
    LockRegistry::builder(store).response_timeout(2 * BOUND)
}

/// A process whose line to the server stands, and whose scripts the server knows.
async fn process(server: &RedisServer) -> LockRegistry {
    let locks = builder(&server.url()).await.build().unwrap();
    warm(&locks).await;
    locks
}

async fn warm(locks: &LockRegistry) {
    let lease = locks.obtain("warm").lease().await.unwrap();
    lease.release().await.unwrap();
}

/// A process on a memory store that it shares with others.
fn in_memory(store: &MemoryStore) -> LockRegistry {
    LockRegistry::builder(store.clone()).build().unwrap()
}

async fn poll_once<F: Future + Unpin>(future: &mut F) -> Option<F::Output> {
    match futures::poll!(future) {
        Poll::Ready(output) => Some(output),
        Poll::Pending => None,
    }
}

async fn within<F: Future>(bound: Duration, what: &str, future: F) -> F::Output {
    let done = timeout(bound, future).await;
    done.unwrap_or_else(|_| panic!("not within {bound:?}: {what}"))
}

/// Fails unless what began at `begin` took `expected`, or up to `late` more. A timer ticks in whole milliseconds.
#[track_caller]
fn assert_took(begin: Instant, expected: Duration, late: Duration) {
    let took = begin.elapsed();
    let right = took + ms(1) >= expected && took <= expected + late + ms(1);
    assert!(right, "took {took:?} instead of {expected:?}");
}

#[track_caller]
fn assert_lost<T: std::fmt::Debug>(told: Result<T, LockError>, key: &str) {
    match told {
        Err(LockError::Lost { key: lost, .. }) => assert_eq!(&*lost, key),
        told => panic!("{told:?} instead of the loss of {key}"),
    }
}

/// Waits until so many processes stand in the server's queue of `k`.
async fn queued(server: &RedisServer, tickets: u64) {
    wait_until(format!("{tickets} in the queue"), BOUND, || {
        server.ask::<u64>(&["ZCARD", "{lock:k}:~queue2"]) == tickets
    })
    .await;
}

/// Everything is released: the server keeps the fence alone, and the processes nothing.
async fn nothing_left(server: &RedisServer, processes: &[&LockRegistry]) {
    wait_until("nothing is in use", BOUND, || {
        processes.iter().all(|locks| locks.in_use() == 0)
    })
    .await;
    assert_eq!(server.keys("*"), ["lock:~fence"]);
}

async fn released(lease: Lease) {
    within(BOUND, "the release", lease.release()).await.unwrap();
}
