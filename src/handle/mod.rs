//! What users hold: a registry, its locks, and their leases.
//!
//! | file | contents |
//! |---|---|
//! | `registry.rs`, `builder.rs` | [`LockRegistry`], and how one is made |
//! | `registry/looking.rs`, `registry/ending.rs` | what a registry tells, and how it ends |
//! | `lock.rs`, `options.rs` | [`Lock`], and its settings |
//! | `lock/acquiring.rs` | how a lock is acquired and released |
//! | `into_lock.rs` | what can be taken for a lock |
//! | `acquire.rs` | how a lease is acquired, by whatever future |
//! | `group.rs` | several keys that are one lock |
//! | `reentrancy.rs` | who shares the lease of the work around it |
//! | `manual.rs` | `acquire` and `release` on a handle |
//! | `lease.rs`, `lease_view.rs` | [`Lease`], the guard, and [`LeaseView`], which only sees it |
//! | `cancellation.rs`, `extend.rs`, `fence.rs`, `verify_lease.rs` | what a lease and its view can do besides |
//! | `detached.rs`, `force.rs` | a lease without its guard, and the end of one by force |
//! | `inspect.rs`, `scan.rs` | what the store has |

pub(crate) mod acquire;
pub(crate) mod builder;
#[cfg(feature = "tokio-util")]
mod cancellation;
pub(crate) mod detached;
pub(crate) mod extend;
#[cfg(feature = "postgres")]
pub(crate) mod fence;
pub(crate) mod force;
pub(crate) mod group;
pub(crate) mod inspect;
pub(crate) mod into_lock;
pub(crate) mod lease;
pub(crate) mod lease_view;
pub(crate) mod lock;
pub(crate) mod manual;
pub(crate) mod options;
pub(crate) mod reentrancy;
pub(crate) mod registry;
pub(crate) mod scan;
pub(crate) mod verify_lease;

pub use self::builder::LockRegistryBuilder;
pub use self::detached::{DetachError, DetachedLease, ParseDetachedLeaseError};
#[cfg(feature = "postgres")]
pub use self::fence::FenceSql;
pub use self::inspect::{InspectedHolder, InspectedTicket, Inspection};
pub use self::into_lock::IntoLock;
pub use self::lease::Lease;
pub use self::lease_view::LeaseView;
pub use self::lock::Lock;
pub use self::registry::{AlreadyInstalled, LockRegistry};
pub use self::scan::ScannedLock;
