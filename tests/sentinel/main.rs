//! Locks under the eyes of sentinels: who is found, what a fail-over does to a holder and to a waiter, and what is said
//! when nobody is found.
//!
//! | file | question it answers |
//! |---|---|
//! | `failover.rs` | what happens when the primary changes? |
//! | `finding.rs` | whom do sentinels send us to, and what if they are wrong? |
//! | `oracle.rs` | how does a test have a sentinel say anything? |
//! | `safe.rs` | certificates and rights: what do sentinels want, and what is said without it? |

#[cfg(feature = "tls-rustls")]
#[allow(
    dead_code,
    reason = "what is wrong with certificates is tried in `access`"
)]
#[path = "../access/authority.rs"]
mod authority;
mod failover;
mod finding;
mod oracle;
mod safe;
#[path = "../support/mod.rs"]
mod support;

use std::time::Duration;

use lockstream::LockRegistry;
use lockstream::store::RedisStore;
pub(crate) use support::ms;

/// For what takes some reconnects and round trips; a fail-over itself comes on top.
pub(crate) const BOUND: Duration = Duration::from_secs(15);

/// Nothing here ends because a lease has run out by itself.
pub(crate) const LONG: Duration = Duration::from_secs(120);

/// A server may stand still for so long, and somewhat longer.
pub(crate) const ANSWER_WITHIN: Duration = ms(4_000);

pub(crate) async fn registry(url: &str) -> LockRegistry {
    let store = RedisStore::builder(url).connect_timeout(support::PATIENCE);
    let store = store.connect().await.unwrap();
    LockRegistry::builder(store)
        .response_timeout(ANSWER_WITHIN)
        .ttl(LONG)
        .wait(LONG)
        .build()
        .unwrap()
}
