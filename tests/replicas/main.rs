//! Locks that count only when replicas have them.
//!
//! | file | question it answers |
//! |---|---|
//! | `counting.rs` | when does an acquisition count, and what becomes of it if not? |
//! | `breaking.rs` | what if something breaks while the replicas are asked? |
//! | `settings.rs` | what can be asked for, and by whom? |
//! | `clusters.rs` | what of a cluster, whose slots move and whose primaries are killed? |
//! | `failover.rs` | is what counted there after a fail-over? |
//! | `flock.rs` | how does a test get a primary with replicas? |

mod breaking;
#[cfg(feature = "cluster")]
mod clusters;
mod counting;
#[cfg(feature = "sentinel")]
mod failover;
mod flock;
mod settings;
#[path = "../support/mod.rs"]
mod support;

use std::time::Duration;

pub(crate) use support::ms;

/// For what takes some reconnects and round trips.
pub(crate) const BOUND: Duration = Duration::from_secs(15);

/// Nothing here ends because a lease has run out by itself.
pub(crate) const LONG: Duration = Duration::from_secs(120);
