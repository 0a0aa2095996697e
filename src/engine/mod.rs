//! The tasks of a registry above the stores, and the timers of its keys.
//!
//! An event is a caller's poll, a reply, a push or a timeout. Its thread locks the registry's state, feeds the key's
//! turnstile, and applies the verdicts to the callers, in order. Then it unlocks the state, sends operations and wakes
//! callers.
//!
//! | file | contents |
//! |---|---|
//! | `core.rs` | [`Engine`]: its parts, and how events reach the turnstiles |
//! | `requests.rs` | what callers and leases ask of their registry |
//! | `step.rs` | one change under the lock, and what follows it |
//! | `state.rs` | the state under the lock: one entry for each key in use |
//! | `store_events.rs` | what the store reports |
//! | `timer.rs` | the one timer task of a registry |
//! | `caller.rs`, `caller/state.rs` | one caller, shared between its future and the engine, and what its lock protects |
//! | `caller/verdicts.rs` | what a verdict changes |
//! | `phase.rs` | how far a caller has come |
//! | `callbacks.rs` | the user's code that runs after a change |
//! | `lease_log.rs` | the warnings about leases |
//! | `event_bus.rs` | the events that [`LockRegistry::events`](crate::LockRegistry::events) yields |
//! | `shutdown.rs` | the end of a registry |
//! | `failure.rs` | a panic of our own closes the registry |
//! | `heartbeat.rs` | the thread that polls tasks while their runtime is busy |
//! | `cancellation.rs` | the token that a loss cancels |
//! | `settings.rs` | the settings of a registry |

mod callbacks;
mod caller;
#[cfg(feature = "tokio-util")]
mod cancellation;
mod core;
mod event_bus;
mod failure;
mod heartbeat;
mod lease_log;
mod phase;
mod requests;
pub(crate) mod settings;
mod shutdown;
mod state;
mod step;
mod store_events;
#[cfg(test)]
mod tests;
mod timer;

pub(crate) use self::caller::Caller;
#[cfg(feature = "tokio-util")]
pub(crate) use self::cancellation::Cancellation;
pub(crate) use self::core::{Engine, FORKED, ViewContext};
pub(crate) use self::phase::Phase;
pub(crate) use self::requests::Arrival;
