//! Who gets in, with which rights, and what is never shown of it.
//!
//! | file | question it answers |
//! |---|---|
//! | `authority.rs` | who makes a certificate? |
//! | `by_hand.rs` | does what the page on operations tells a person to type do what it says? |
//! | `log.rs` | what was logged? |
//! | `rights.rs` | which rights are needed, and what is said of one that is missing? |
//! | `rotation.rs` | does anybody notice when passwords change? |
//! | `secrets.rs` | what is never shown? |
//! | `tls.rs` | which certificates are believed, and what is said of those that are not? |
//! | `words.rs` | what if a url or a key is any text at all? |
#![cfg(all(feature = "redis", feature = "test-util"))]

#[cfg(feature = "tls-rustls")]
mod authority;
mod by_hand;
#[path = "../support/hearing.rs"]
mod hearing;
mod rights;
mod rotation;
mod secrets;
#[path = "../support/mod.rs"]
mod support;
#[cfg(feature = "tls-rustls")]
mod tls;
mod words;

use std::time::Duration;

use lockstream::store::{RedisStore, RedisStoreBuilder};
use lockstream::{LockError, StoreError};

use crate::support::PATIENCE;

/// For what takes a reconnect and some round trips; far below the usual ttl and wait.
pub(crate) const BOUND: Duration = Duration::from_secs(5);

/// The wait of callers, ten times as long as a refusal may take: so a refusal that is waited with is told from a slow machine.
pub(crate) const WAIT: Duration = Duration::from_secs(600);

/// A store on that server. Many servers start here at a time, so that the usual 5 s for connecting may be too short.
pub(crate) fn patient(url: impl Into<String>) -> RedisStoreBuilder {
    RedisStore::builder(url).connect_timeout(PATIENCE)
}

/// The store's word in an error.
#[track_caller]
pub(crate) fn told<T>(result: Result<T, LockError>) -> StoreError {
    match result {
        Err(LockError::Store { source, .. }) => source,
        Err(other) => panic!("not the store's: {other:?}"),
        Ok(_) => panic!("it should not have worked"),
    }
}
