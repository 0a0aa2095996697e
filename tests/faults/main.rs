//! What befalls servers, wires and rights while locks are held and waited for: waiters are served afterwards, holders
//! learn the truth, and nothing is left behind.
//!
//! | file | what breaks |
//! |---|---|
//! | `ends.rs` | wires and servers, while leases change hands |
//! | `server.rs` | the server: restarted, flushed, stopped, its connections killed |
//! | `wire.rs` | the connection: cut, silent, slow |
//! | `rights.rs` | rights, passwords, no server at all |
//! | `refusals.rs` | nothing: the server says no |
//! | `policies.rs` | nothing: the server cannot push |
//! | `pipelines.rs` | the server, under streams of locked items and a stream that leads |
#![cfg(all(feature = "redis", feature = "test-util"))]

mod ends;
#[path = "../support/hearing.rs"]
mod hearing;
#[path = "../support/lock_server.rs"]
mod lock_server;
mod pipelines;
mod policies;
mod refusals;
mod rights;
mod server;
#[path = "../support/mod.rs"]
mod support;
mod wire;

use std::time::Duration;

pub(crate) use lock_server::{BOUND, nothing_left, registry_builder as builder, wait_for_queue};
use lockstream::{Lease, LockError, LockRegistry};
use support::RedisServer;
pub(crate) use support::ms;
use tokio::task::JoinHandle;
use tokio::time::timeout;

/// The ttls and waits of who is in a test to its end: these are never over, however slow the machine is.
pub(crate) const LONG: Duration = Duration::from_secs(600);

/// For a reconnect, whose pause may be of 2 s. Whoever waits asks by itself after 8 s (W2).
pub(crate) const UNASKED: Duration = ms(7_500);

/// One who holds `k` and, in another process as it were, one who waits for it, behind a third who only looks.
pub(crate) struct Scene {
    pub(crate) holding: LockRegistry,
    pub(crate) waiting: LockRegistry,
    pub(crate) lease: Lease,
    pub(crate) waiter: JoinHandle<Result<Lease, LockError>>,
}

impl Scene {
    pub(crate) async fn set(server: &RedisServer, url: &str, ttl: Duration) -> Self {
        let (holding, waiting) = (
            builder(url).await.build().unwrap(),
            builder(url).await.build().unwrap(),
        );
        Self::set_with(server, holding, waiting, ttl).await
    }

    pub(crate) async fn set_with(
        server: &RedisServer,
        holding: LockRegistry,
        waiting: LockRegistry,
        ttl: Duration,
    ) -> Self {
        let lease = holding.obtain("k").ttl(ttl).lease().await.unwrap();
        let waiter = tokio::spawn(waiting.obtain("k").wait(LONG).lease());
        wait_for_queue(server, 1).await;
        Self {
            holding,
            waiting,
            lease,
            waiter,
        }
    }

    /// The holder still holds, releases, and the waiter is served at once.
    pub(crate) async fn ends_well(self, server: &RedisServer) {
        let Self {
            holding,
            waiting,
            lease,
            waiter,
        } = self;
        assert!(lease.is_valid());
        assert!(!waiter.is_finished(), "two hold");
        let token = lease.token();
        let released = timeout(BOUND, lease.release())
            .await
            .expect("a release ends");
        released.unwrap();
        let next = served(waiter, BOUND).await;
        assert!(next.token() > token);
        next.release().await.unwrap();
        nothing_left(server, &[&holding, &waiting]).await;
    }
}

pub(crate) async fn served(
    waiter: JoinHandle<Result<Lease, LockError>>,
    within: Duration,
) -> Lease {
    let lease = timeout(within, waiter).await.expect("the waiter is served");
    lease.unwrap().unwrap()
}
