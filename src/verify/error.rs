//! Why a script failed.

use std::panic::Location;

/// Why a script failed: what [`verdict`](super::LastStep::verdict) returns, and what the
/// panic of [`verify`](super::LastStep::verify) says.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum VerifyError {
    /// A step was not met.
    #[error("step {number}, {name}, at {place}\n  expected: {expected}\n  came:     {came}")]
    #[non_exhaustive]
    Step {
        /// The number of the step in its script, from 1.
        number: usize,
        /// The step with its argument, as in `expect_next(4)`.
        name: String,
        /// Where the step stands in the source.
        place: &'static Location<'static>,
        /// What the step expected, as in `the item 4`.
        expected: String,
        /// What came, as in `the item 3`, `the stream ended` or `nothing within 60s`.
        came: String,
    },

    /// `with_virtual_time` found tokio's clock paused already.
    #[error(
        "with_virtual_time, at {place}: tokio's clock is paused already (a test with `start_paused`, \
         `tokio::time::pause`, or another script); use StepVerifier::create or StepVerifier::try_create: \
         their steps follow a paused clock, too"
    )]
    #[non_exhaustive]
    ClockPaused {
        /// Where `with_virtual_time` stands in the source.
        place: &'static Location<'static>,
    },

    /// `with_virtual_time` ran on a runtime with several threads, whose clock cannot be paused.
    #[error(
        "with_virtual_time, at {place}: the clock of a runtime with several threads cannot be paused; \
         use #[tokio::test] with flavor = \"current_thread\" (its default), or StepVerifier::try_create and real time"
    )]
    #[non_exhaustive]
    SeveralThreads {
        /// Where `with_virtual_time` stands in the source.
        place: &'static Location<'static>,
    },

    /// The script was verified outside of a tokio runtime.
    #[error(
        "the StepVerifier made at {place} needs a tokio runtime: verify it within #[tokio::test]"
    )]
    #[non_exhaustive]
    NoRuntime {
        /// Where the script was made.
        place: &'static Location<'static>,
    },
}
