//! Where leases live: in memory, on a Redis or Valkey server or cluster, in PostgreSQL, or on a majority of several servers.
//!
//! | store | for |
//! |---|---|
//! | [`MemoryStore`] | one process, and tests: several registries on one store behave as several processes |
//! | [`RedisStore`] | processes that share a server, its replicas behind sentinels, or a cluster |
//! | `PostgresStore` | processes that share a PostgreSQL database; its transactions can be fenced |
//! | [`QuorumStore`] | processes that share several servers, some of which may be down |

#![cfg_attr(
    not(all(feature = "redis", feature = "postgres", feature = "tls-rustls")),
    allow(
        dead_code,
        unused_imports,
        reason = "not every kind of server needs all of it"
    )
)]

#[cfg(any(feature = "redis", feature = "postgres"))]
mod attempts;
pub(crate) mod contract;
#[cfg(any(feature = "redis", feature = "postgres"))]
mod credentials;
#[cfg(any(feature = "redis", feature = "postgres"))]
mod driver;
#[cfg(all(test, any(feature = "redis", feature = "postgres")))]
#[path = "../../tests/support/hearing.rs"]
pub(crate) mod hearing;
pub(crate) mod memory;
#[cfg(all(test, any(feature = "redis", feature = "postgres")))]
#[path = "tests/model.rs"]
mod model;
mod notifier;
#[cfg(feature = "postgres")]
pub(crate) mod postgres;
mod quorum;
#[cfg(feature = "redis")]
pub(crate) mod redis;
#[cfg(any(feature = "redis", feature = "postgres", test))]
pub(crate) mod send_window;
mod submitted;
#[cfg(all(test, any(feature = "redis", feature = "postgres")))]
#[path = "../../tests/support/mod.rs"]
mod support;
#[cfg(all(feature = "tls-rustls", any(feature = "redis", feature = "postgres")))]
mod tls;
#[cfg(any(feature = "redis", feature = "postgres"))]
mod url;

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

#[cfg(any(feature = "redis", feature = "postgres"))]
pub use self::credentials::Credentials;
pub use self::memory::MemoryStore;
#[cfg(feature = "postgres")]
pub(crate) use self::postgres::fence_error;
#[cfg(feature = "postgres")]
pub use self::postgres::{PostgresStore, PostgresStoreBuilder};
pub use self::quorum::QuorumStore;
#[cfg(feature = "redis")]
pub use self::redis::{RedisStore, RedisStoreBuilder};

/// A place where leases are stored.
///
/// Sealed: its operations may still change. Implemented by [`MemoryStore`], [`RedisStore`], `PostgresStore`, [`QuorumStore`], and an
/// [`Arc`] of any of them (also of `dyn LockStore`).
pub trait LockStore: Debug + Send + Sync + 'static + sealed::Sealed {
    /// Opens one registry's session. Does no I/O before [`contract::Session::start`].
    #[doc(hidden)]
    fn open(&self, config: contract::SessionConfig) -> Arc<dyn contract::Session>;

    /// How much of a lease may pass before the store confirms it: each lease must last longer.
    #[doc(hidden)]
    fn overhead(&self) -> Duration {
        Duration::ZERO
    }

    /// Whether it has shared locks and permits (M10).
    #[doc(hidden)]
    fn shares(&self) -> bool {
        true
    }

    /// What its url says of the registry.
    #[doc(hidden)]
    fn registry_options(&self) -> contract::RegistryOptions {
        contract::RegistryOptions::default()
    }

    /// Its identity, if known. Two stores with the same identity cannot both be members of a quorum.
    #[doc(hidden)]
    fn place(&self) -> Option<String> {
        None
    }
}

impl<S: LockStore + ?Sized> LockStore for Arc<S> {
    fn open(&self, config: contract::SessionConfig) -> Arc<dyn contract::Session> {
        (**self).open(config)
    }

    fn overhead(&self) -> Duration {
        (**self).overhead()
    }

    fn shares(&self) -> bool {
        (**self).shares()
    }

    fn registry_options(&self) -> contract::RegistryOptions {
        (**self).registry_options()
    }

    fn place(&self) -> Option<String> {
        (**self).place()
    }
}

pub(crate) mod sealed {
    pub trait Sealed {}
    impl<S: Sealed + ?Sized> Sealed for std::sync::Arc<S> {}
}
