//! Sessions against a real server, each of which a test starts for itself.
//!
//! A test that is about a rule of the protocol bears its number in its name.

mod attempts;
mod breaking;
mod connecting;
mod endless;
mod ends;
mod fake;
mod fence;
mod formats;
mod full_server;
mod handover;
mod links;
mod listening;
mod model;
mod modes;
#[cfg(feature = "cluster")]
mod one_node;
mod paused;
mod plain;
mod queue;
mod registry;
mod replicas;
mod rights;
mod rotating;
mod stale;
#[cfg(feature = "sentinel")]
mod store_events;
mod stores;
use crate::store::{hearing, support};
mod tasks;
#[cfg(all(feature = "sentinel", feature = "tls-rustls"))]
mod urls;
