//! Checks a stream or a future step by step: a [`StepVerifier`] is a script of what must happen, in
//! order.
//!
//! ```
//! use futures::stream;
//! use lockstream::verify::StepVerifier;
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() {
//! StepVerifier::create(stream::iter([1, 2, 3]))
//!     .expect_next(1)
//!     .expect_next_matches(|n| n % 2 == 0)
//!     .expect_next_count(1)
//!     .expect_complete()
//!     .verify()
//!     .await;
//! # }
//! ```
//!
//! # Sources
//!
//! Every [`Stream`](futures::Stream) and every [`Future`] is a [`Source`], borrowed locals and
//! `!Send` ones included. A future is a source of one item, its output, and then the end.
//! [`create`](StepVerifier::create) takes each item as it is;
//! [`try_create`](StepVerifier::try_create) takes `Result`s and tells items from errors. An error
//! is an event and not the end: more steps may follow it.
//!
//! # When the source is polled
//!
//! Only a step polls the source, and no step polls it further than it must. The `expect_next*`,
//! `expect_error_matches` and `expect_complete` steps take one event each (`expect_next_count(n)`
//! takes n). The steps that let time pass, [`then_await`](StepVerifier::then_await) and
//! [`then`](StepVerifier::then), poll it with **one event of look-ahead**: work goes on, and the
//! first event that comes meanwhile is kept for the next step; until that step has taken it the
//! source is not polled again. So a lock that is waited for is really waited for, and backpressure
//! stays what it is.
//!
//! # Time
//!
//! All durations are on tokio's clock, paused or not. Its timers tick in whole milliseconds and
//! round up, so on the real clock a shorter wait than a millisecond is one.
//!
//! A script without a limit of its own must be done within **60 s** beyond the durations that its
//! steps name (those of `then_await` and `expect_no_event`); else it fails and names the step that
//! it hung in. [`verify_within`](LastStep::verify_within) sets another limit. No limit can end a
//! source that never yields to the runtime, nor one that wakes itself for ever on a paused clock:
//! there time stands still as long as anything runs.
//!
//! On virtual time (of [`with_virtual_time`](StepVerifier::with_virtual_time), or of a test whose
//! clock was paused before) no real time passes: whenever all tasks of the runtime are idle, tokio
//! moves its clock to the next timer. The steps that name a duration move it by exactly that. The
//! steps that expect an event let it run until the event comes, at most to the limit; put
//! `expect_no_event` before them to pin when it comes. Sockets, threads and processes know nothing
//! of virtual time: while they are waited for the runtime is idle, and the clock leaps.
//!
//! # Failures
//!
//! A failure names the step, its place in the source, what the step expected, and what came:
//!
//! ```text
//! step 2, expect_next(4), at tests/import.rs:31:10
//!   expected: the item 4
//!   came:     the item 3
//! ```

// | file | contents |
// |---|---|
// | `step_verifier.rs` | the builder of a script |
// | `last_step.rs` | a script that is complete |
// | `script.rs`, `step.rs` | the script and its steps |
// | `source.rs` | what can be verified |
// | `runner.rs` | runs a script against its source |
// | `clock.rs` | virtual time |
// | `error.rs` | which step failed, and why |

mod clock;
mod error;
mod last_step;
mod runner;
mod script;
mod source;
mod step;
mod step_verifier;

pub use error::VerifyError;
pub use last_step::LastStep;
pub use source::Source;
pub use step_verifier::StepVerifier;
