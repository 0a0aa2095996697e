//! Who is next for one key, in one registry: a plain state machine.
//!
//! No clock, no runtime, no I/O: events and the time come in by method calls, effects go out by
//! [`EventCx::effects`], and [`Turnstile::next_timeout`] says when to call
//! [`Turnstile::tick`] at the latest. It keeps:
//!
//! - **I1** at most one tenure, and at most one lease in it. Each reader and each permit has a turnstile of its own;
//! - **I2** one op in flight (O2), renewals excepted; pending operations go before new requests;
//! - **I3** an owner is never revived (O1): a grant for a retired owner is released or ignored;
//! - **I4** a lease's deadline is never later than what is proved on our own clock (D1, D2);
//! - **I5** every waiter gets exactly one verdict for each arrival, and every finished lease one;
//! - **I6** nobody waits while the machine is idle: a wait queue that is not empty has an op in
//!   flight, a tenure, or a timeout;
//! - **I7** nothing is sent for an owner whose key was left in the store, and nothing gives it back.
//!
//! docs/protocol.md defines the rules: O owners, S scripts, D deadlines, W waiting, K keys, F fence, G load, H
//! handles, M modes, I invariants.
//!
//! | file | contents |
//! |---|---|
//! | `lines.rs` | [`Lines`]: the turnstiles of one key |
//! | `machine.rs` | [`Turnstile`]: its state, and the events that callers bring |
//! | `machine/transitions.rs` | its states, and all the transitions between them |
//! | `machine/timers.rs` | its timers: waits, leases and tenures that end, renewals that are due |
//! | `machine/store_events.rs` | the events that the store brings: answers, grants, outages |
//! | `machine/schedule.rs` | what to do next: grant, pass, yield, release, ask |
//! | `machine/acquisition.rs` | one owner that asks the store for the key |
//! | `machine/asking.rs` | asks the store for the key: questions, answers, grants |
//! | `machine/policy.rs` | how often the store is asked where no grants come |
//! | `machine/pending.rs` | operations that must still reach the store, and their answers |
//! | `machine/shutdown.rs` | the end of a registry |
//! | `tenure.rs` | the span in which this registry holds the key, and its lease |
//! | `tenure/renewal.rs` | when that lease is renewed, and for how long |
//! | `wait_queue.rs` | the local waiters |
//! | `verdict.rs` | the verdicts that callers get |
//! | `event_cx.rs` | the context of an event, and its effects |
//! | `ids.rs` | ids and random numbers |
//! | `time.rs` | points in time |

mod event_cx;
mod ids;
mod lines;
mod machine;
#[cfg(test)]
mod sim;
mod tenure;
#[cfg(test)]
mod tests;
mod time;
mod verdict;
mod wait_queue;

pub(crate) use self::event_cx::{Effect, EventCx};
pub(crate) use self::ids::Ids;
pub(crate) use self::lines::Lines;
pub(crate) use self::machine::{Rules, Turnstile};
pub(crate) use self::verdict::{
    EndMode, Holding, LeaseEnd, LeaseVerdict, NotGranted, Verdict, WaiterVerdict,
};
pub(crate) use self::wait_queue::{Waiter, WaiterId};
