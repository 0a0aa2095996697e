//! The end of a script, which runs it.

use std::{
    convert::Infallible,
    fmt::{self, Debug},
    time::Duration,
};

use super::{error::VerifyError, script::Script};

/// A whole script: [`verify`](Self::verify) it.
#[must_use = "a script does nothing until it is verified"]
pub struct LastStep<'a, T, E = Infallible> {
    pub(super) script: Script<'a, T, E>,
}

impl<'a, T, E> LastStep<'a, T, E> {
    /// Runs the script, and returns how long it took on tokio's clock, virtual or real.
    ///
    /// It must be done within 60 s on tokio's clock beyond the durations that its steps name.
    ///
    /// # Panics
    ///
    /// With the text of the [`VerifyError`] when a step is not met, and when the script cannot run
    /// where it is: it needs a tokio runtime with its time enabled, and virtual time needs a
    /// current-thread one whose clock runs. A panic of the source or of a closure goes through.
    ///
    /// # Cancel safety
    ///
    /// A drop drops the source and the remaining steps, and resumes the clock if the script had
    /// paused it.
    pub async fn verify(self) -> Duration {
        or_panic(self.verdict()).await
    }

    /// Like [`verify`](Self::verify), but the whole script must be done within `d` on tokio's
    /// clock.
    ///
    /// The durations that the steps name count, too. [`Duration::MAX`] is no limit.
    ///
    /// # Panics
    ///
    /// As [`verify`](Self::verify) does.
    ///
    /// # Cancel safety
    ///
    /// As that of [`verify`](Self::verify).
    pub async fn verify_within(self, d: Duration) -> Duration {
        or_panic(self.script.run(d)).await
    }

    /// Like [`verify`](Self::verify), but returns the failure.
    ///
    /// # Errors
    ///
    /// [`VerifyError::Step`] names the first step that was not met. The other variants say that the
    /// script cannot run where it is, and what to do.
    ///
    /// # Panics
    ///
    /// Only with a panic of the source or of a closure, or when the runtime's time is not enabled.
    ///
    /// # Cancel safety
    ///
    /// As that of [`verify`](Self::verify).
    ///
    /// # Examples
    ///
    /// ```
    /// use futures::stream;
    /// use lockstream::verify::StepVerifier;
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() {
    /// let script = StepVerifier::create(stream::iter([1, 3])).expect_next(1).expect_next(2).then_cancel();
    /// let error = script.verdict().await.unwrap_err();
    /// assert!(error.to_string().starts_with("step 2, expect_next(2), at "));
    /// # }
    /// ```
    pub async fn verdict(self) -> Result<Duration, VerifyError> {
        let limit = self.script.default_limit();
        self.script.run(limit).await
    }
}

async fn or_panic(verdict: impl Future<Output = Result<Duration, VerifyError>>) -> Duration {
    verdict.await.unwrap_or_else(|failure| panic!("{failure}"))
}

impl<T, E> Debug for LastStep<'_, T, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.script.debug("LastStep", f)
    }
}
