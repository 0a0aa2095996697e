//! Drops at every await: whatever is dropped, whenever, leaves no lock, no waiter, no entry and no task behind.
//!
//! | file | question it answers |
//! |---|---|
//! | `cut.rs` | where is a future dropped? |
//! | `victims.rs` | which futures are dropped? |
//! | `memory.rs` | what is left on a memory store, at every poll and between polls? |
//! | `ends.rs` | and of leases that change hands or are extended? |
//! | `leaving.rs` | the same for what is dropped while it releases |
//! | `readers.rs` | what may the waker of a reader of events do? |
//! | `stories.rs` | faults that were found, one test each |
//! | `storm.rs` | and when several threads drop at moments that nobody chose? |
//! | `server.rs` | what is left on a server? |
#![cfg(feature = "test-util")]

mod cut;
mod ends;
mod leaving;
#[cfg(feature = "redis")]
#[path = "../support/lock_server.rs"]
mod lock_server;
mod memory;
mod readers;
#[cfg(feature = "redis")]
mod server;
mod stories;
mod storm;
#[cfg(feature = "redis")]
#[path = "../support/mod.rs"]
mod support;
mod victims;
