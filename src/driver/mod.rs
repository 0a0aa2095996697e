//! When something happens: the one place with tasks and timers.
//!
//! Nobody acts for a key but those who bring an event: a caller's poll, a reply, a push, the
//! timer. Each locks the registry's state, feeds the key's turnstile, settles what was decided,
//! unlocks, and then sends ops and wakes callers. Verdicts are settled under the lock, so that
//! they come about in the order in which the turnstile gave them.

mod aftermath;
mod contender;
mod core;
mod few;
mod journal;
mod news;
mod progress;
mod state;
#[cfg(test)]
mod tests;
mod timer;
mod watchers;

pub(crate) use self::contender::Contender;
pub(crate) use self::core::{Arrival, Driver, Outlook};
pub(crate) use self::journal::Journal;
pub(crate) use self::progress::{End, Progress};
