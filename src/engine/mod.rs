//! When something happens: the one place with tasks and timers.
//!
//! Nobody acts for a key but those who bring an event: a caller's poll, a reply, a push, the
//! timer. Each locks the registry's state, feeds the key's turnstile, settles what was decided,
//! unlocks, and then sends ops and wakes callers. Verdicts are settled under the lock, so that
//! they come about in the order in which the turnstile gave them.

mod callbacks;
mod core;
mod event_bus;
mod failure;
mod phase;
mod state;
mod store_events;
#[cfg(test)]
mod tests;
mod timer;
mod waiter_state;
mod watchers;

pub(crate) use self::core::{Arrival, Engine, ViewContext};
pub(crate) use self::failure::run_task;
pub(crate) use self::phase::Phase;
pub(crate) use self::waiter_state::WaiterState;
