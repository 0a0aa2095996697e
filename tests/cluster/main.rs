//! Real clusters, whose slots move and whose primaries are killed.
//!
//! | file | question it answers |
//! |---|---|
//! | `places.rs` | where does what lie, and a subscriber? |
//! | `moving.rs` | what if a slot goes to another primary? |
//! | `primaries.rs` | what if a primary, or a connection to it, goes? |
//! | `access.rs` | who is let in, and how is it said who is not? |
//! | `servers.rs` | what of other servers than Redis 7? |
//! | `load.rs` | how do tests keep locks busy? |
#![cfg(all(feature = "cluster", feature = "test-util"))]

mod access;
#[cfg(feature = "tls-rustls")]
#[path = "../access/authority.rs"]
#[allow(dead_code, reason = "not all of it is needed here")]
mod authority;
mod load;
mod moving;
mod places;
mod primaries;
mod servers;
#[path = "../support/mod.rs"]
mod support;

use std::time::{Duration, Instant};

use lockstream::store::RedisStore;
use lockstream::{LockRegistry, LockRegistryBuilder};
pub(crate) use support::ms;
use support::{Cluster, PATIENCE, wait_until};
use tokio::time::sleep;

/// For what takes a reconnect or the promotion of a replica; no more than the usual ttl.
pub(crate) const BOUND: Duration = Duration::from_secs(20);

/// What comes sooner has come by a grant: any waiter asks by itself every 8 to 12 s.
pub(crate) const BY_GRANT: Duration = Duration::from_secs(7);

/// Its leases and waits outlast a promotion, also one that takes long.
pub(crate) fn builder(cluster: &Cluster) -> LockRegistryBuilder {
    let store = RedisStore::connect_lazy(cluster.url()).unwrap();
    let builder = LockRegistry::builder(store).response_timeout(ms(3000));
    builder.ttl(6 * BOUND).wait(6 * BOUND)
}

/// The fences are kept, and nothing else.
pub(crate) async fn nothing_left(cluster: &Cluster, registries: &[&LockRegistry]) {
    wait_until("nothing is in use", BOUND, || {
        registries.iter().all(|registry| registry.in_use() == 0)
    })
    .await;
    wait_until("no lock and no queue is left", BOUND, || {
        cluster.leftovers().is_empty()
    })
    .await;
    wait_until("no subscription is left", BOUND, || {
        cluster.channels().is_empty()
    })
    .await;
}

/// Waits until somebody is in the queue.
pub(crate) async fn queued(registry: &LockRegistry, key: &str) {
    let begin = Instant::now();
    // A node that has just gone is an error.
    while !matches!(registry.obtain(key).inspect().await, Ok(seen) if seen.waiting > 0) {
        assert!(begin.elapsed() < PATIENCE, "nobody waits for {key}");
        sleep(ms(5)).await;
    }
}
