//! Sessions against a real server, each of which a test starts for itself.
//!
//! A test that is about a rule of the protocol bears its number in its name.

mod alike;
mod attempts;
mod breaking;
#[cfg(feature = "cluster")]
mod cluster_lies;
mod connecting;
mod endless;
mod ends;
mod fake;
mod fence;
mod formats;
mod full_server;
mod handover;
#[path = "../../../../tests/support/hearing.rs"]
mod hearing;
mod liar;
#[cfg(feature = "cluster")]
mod liars;
mod lies;
mod links;
mod listening;
mod model;
#[cfg(feature = "cluster")]
mod newcomers;
#[cfg(feature = "sentinel")]
mod news;
mod plain;
mod polling;
#[cfg(feature = "cluster")]
mod proofs;
mod queue;
mod registry;
mod rights;
#[cfg(feature = "cluster")]
mod ring;
mod stale;
mod stores;
#[cfg(feature = "cluster")]
mod strays;
#[path = "../../../../tests/support/mod.rs"]
mod support;
mod tasks;
#[cfg(all(feature = "sentinel", feature = "tls-rustls"))]
mod urls;
