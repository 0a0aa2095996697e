//! Distributed locks as future and stream combinators: chain `.with_lock(key)`, and the lock is held
//! exactly as long as the work runs.
//!
//! ```
//! use futures::TryStreamExt;
//! use lockstream::prelude::*;
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let locks = LockRegistry::in_memory(); // or LockRegistry::connect("redis://127.0.0.1/").await?
//!
//! // a future
//! let charge = async { "charged" };
//! let receipt = charge.with_lock(locks.obtain("order:42")).await?;
//!
//! // a stream, under one lease from its first poll to its end
//! let rows = futures::stream::iter([1, 2, 3]).with_lock(locks.obtain("import"));
//! let rows: Vec<i32> = rows.try_collect().await?;
//!
//! // work that wants the fencing token
//! let lock = locks.obtain("row:7");
//! let token = lock.with_lease(async |lease| lease.token()).await?;
//! # assert_eq!((receipt, rows.len(), token.get() > 0), ("charged", 3, true));
//! # Ok(()) }
//! ```
//!
//! Cut off at any await, the lock is released. If the lease is lost while the work runs, the work is
//! dropped at once and the caller gets [`LockError::Lost`].
//!
//! | to lock | use |
//! |---|---|
//! | a future | [`FutureLockExt::with_lock`], [`try_with_lock`](FutureLockExt::try_with_lock) |
//! | a stream | [`StreamLockExt::with_lock`], [`try_with_lock`](StreamLockExt::try_with_lock) |
//! | each item of a stream | [`StreamLockExt::buffer_keyed`] |
//! | work that wants the fencing token | [`Lock::with_lease`] and its sisters |
//! | what is not one future | a guard: [`Lock::lease`], [`Lock::lease_within`], [`Lock::lease_once`] |
//! | by hand | [`Lock::acquire`], [`Lock::acquire_within`], [`Lock::acquire_once`]: read their docs first |
//! | a whole function | `#[with_lock(key = "order:{id}")]`, behind the feature `macros` |
//! | what one of many processes is to do | [`Lock::lead`], [`Lock::lead_stream`]; as a stream of who leads, [`Lock::leadership`] |
//!
//! | to | use |
//! |---|---|
//! | hold it for longer, or not for ever | [`Renewal`], [`Lease::extend`] |
//! | lock a key inside work that holds it | [`Lock::reentrant`] |
//! | do a thing at most once a minute | [`Lock::on_finish`] |
//! | let work run on without its lease | [`Lock::on_lost`] |
//! | hand a lease to another process | [`Lease::detach`], [`LockRegistry::adopt`] |
//! | see what happens, what is held and waited for | [`LockRegistry::events`], [`LockRegistry::snapshot`], [`Lock::inspect`], [`LockRegistry::scan`] |
//! | end well | [`LockRegistry::drain`], [`LockRegistry::shutdown`] |
//!
//! | word | meaning |
//! |---|---|
//! | registry | where locks come from: [`LockRegistry`], on a [store] |
//! | lock | a handle to a key: [`Lock`]. It does nothing until it is acquired |
//! | lease | the time-limited right to a key: a guard, [`Lease`], or what only sees it, [`LeaseView`] |
//! | ttl | how long a lease lasts unless it is renewed, and for how long a crashed holder keeps others out |
//! | renewal | the watchdog prolonging a lease at every third of its ttl while it is held: [`Renewal`]. A lock whose ttl was set is not renewed unless asked |
//! | wait | how long a caller is ready to wait for a lock |
//! | fencing token | a number that is strictly greater for every later lease of a key: [`Token`] |
//!
//! # What is promised
//!
//! A lease is proved until its deadline: no other owner can hold the key before then, as long as the
//! server keeps what it acknowledged (no lossy fail-over, no restart without data, no eviction of
//! keys with a ttl), nobody deletes the key by hand, the server's clock is not stepped, and clocks
//! run within 0.1 % of each other. Beyond those only the fencing token protects: send
//! [`Lease::token`] along with what you write, and refuse older ones where it is stored.
//!
//! # Features
//!
//! | feature | default | brings |
//! |---|---|---|
//! | `redis` | yes | [`store::RedisStore`], [`LockRegistry::connect`]. Without `redis` and `postgres` the crate has [`store::MemoryStore`], and quorums of it |
//! | `postgres` | | `store::PostgresStore`; `LeaseView::fence`: transactions that commit only while a lease holds. Ties your version of `tokio-postgres` to ours |
//! | `tls-rustls` | | `rediss://`, PostgreSQL over TLS, and certificates by the builders of their stores: with rustls and its ring provider |
//! | `cluster` | | `RedisStore::cluster`, `redis+cluster://`: locks on all primaries of a cluster |
//! | `sentinel` | | `redis+sentinel://`: the primary is wherever the sentinels say |
//! | `redis-1` | | `RedisStore::from_client`, `RedisStoreBuilder::from_client`, `credentials_provider`. Ties your version of `redis` to ours; not needed to use `redis` beside it |
//! | `backoff` | | `Repeat::backoff`: a policy of the `backoff` crate, which is unmaintained (RUSTSEC-2025-0012) |
//! | `macros` | | `#[with_lock]`: the lock around a whole function |
//! | `serde` | | `Serialize` and `Deserialize` for [`DetachedLease`] and [`Token`] |
//! | `metrics` | | gauges, counters and histograms for the `metrics` facade: see [`LockRegistry::events`] |
//! | `tokio-util` | | `LeaseView::cancellation_token`: spawned tasks stop when the lease is lost. Ties your version of `tokio-util` to ours |
//! | `tower` | | `tower::LockLayer`: a service (axum, tonic, …) handles one request a key at a time |
//! | `http` | | for `tower::LockLayer`: the lease in a request's extensions, a lock to the end of a response's body. Brings `tower` |
//! | `test-util` | | [`verify::StepVerifier`], and the switches of [`store::MemoryStore`] that break things: `expire`, `set_offline`, `set_latency` |
//!
//! [`docs`] has the guides: what each fault does, operations, fairness, coming from other libraries, the protocol and how
//! the crate is built. The README says when not to use a lock at all.
#![cfg_attr(docsrs, feature(doc_cfg))]

#[cfg(feature = "macros")]
#[doc(hidden)]
#[path = "macros.rs"]
pub mod __macros;
mod base;
mod combinator;
pub mod docs;
mod engine;
pub mod future;
mod handle;
mod observe;
mod roaming;
pub mod store;
pub mod stream;
#[cfg(feature = "tower")]
#[cfg_attr(docsrs, doc(cfg(feature = "tower")))]
pub mod tower;
mod turnstile;
#[cfg(feature = "test-util")]
pub mod verify;

pub use self::base::{
    BuildError, Check, CheckedServer, Holder, LockError, LossCause, Mode, OnFinish, OnLost,
    Renewal, Repeat, StoreError, Token,
};
pub use self::combinator::{Campaign, FutureLockExt, Leadership, StreamLockExt};
#[cfg(feature = "postgres")]
#[cfg_attr(docsrs, doc(cfg(feature = "postgres")))]
pub use self::handle::FenceSql;
pub use self::handle::{
    AlreadyInstalled, DetachError, DetachedLease, InspectedHolder, InspectedTicket, Inspection,
    IntoLock, Lease, LeaseView, Lock, LockRegistry, LockRegistryBuilder, ParseDetachedLeaseError,
    ScannedLock,
};
pub use self::observe::{KeySnapshot, LeaseSnapshot, LockEvent, Snapshot, WaiterSnapshot};
#[cfg(feature = "macros")]
#[doc(inline)]
pub use lockstream_macros::with_lock;

/// What most programs use, in one line: `use lockstream::prelude::*;`.
pub mod prelude {
    pub use crate::{
        FutureLockExt, IntoLock, Lease, LeaseView, Lock, LockError, LockRegistry, OnFinish,
        Renewal, StreamLockExt,
    };
}

/// The code blocks of the README compile, and run.
#[cfg(all(doctest, feature = "macros", feature = "redis", feature = "test-util"))]
#[doc = include_str!("../README.md")]
pub struct Readme;
