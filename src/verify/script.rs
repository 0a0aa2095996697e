//! A script as a whole: where its source comes from, and its run.

use std::{fmt, panic::Location, time::Duration};

use futures::stream::LocalBoxStream;
use tokio::runtime::Handle;

use super::{
    clock::VirtualTime,
    error::VerifyError,
    runner::Runner,
    step::{Step, Tell},
};

/// How long a script may take beyond the durations that its steps name, unless `verify_within` says
/// otherwise.
const DEFAULT_SPARE: Duration = Duration::from_secs(60);

/// A source that is still to come, and the steps to run on it.
pub(super) struct Script<'a, T, E> {
    pub(super) origin: Origin<'a, T, E>,
    pub(super) made_at: &'static Location<'static>,
    pub(super) steps: Vec<Step<'a, T, E>>,
    pub(super) tell: Tell<T, E>,
}

/// Where the source comes from.
pub(super) enum Origin<'a, T, E> {
    Made(LocalBoxStream<'a, Result<T, E>>),
    /// To be made under paused time, so that its timers are virtual.
    Virtual(Box<dyn FnOnce() -> LocalBoxStream<'a, Result<T, E>> + 'a>),
}

impl<T, E> Script<'_, T, E> {
    /// The limit of a script that has none of its own.
    pub(super) fn default_limit(&self) -> Duration {
        self.steps
            .iter()
            .map(|step| step.action.named_time())
            .fold(DEFAULT_SPARE, Duration::saturating_add)
    }

    pub(super) async fn run(self, limit: Duration) -> Result<Duration, VerifyError> {
        Handle::try_current().map_err(|_| VerifyError::NoRuntime {
            place: self.made_at,
        })?;
        match self.origin {
            Origin::Made(source) => Runner::new(source, self.tell).run(self.steps, limit).await,
            Origin::Virtual(make) => {
                // Outlives the source, which may look at the clock when it is dropped.
                let _virtual_time = VirtualTime::begin(self.made_at).await?;
                Runner::new(make(), self.tell).run(self.steps, limit).await
            }
        }
    }

    pub(super) fn debug(&self, name: &str, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let steps: Vec<_> = self.steps.iter().map(|step| &step.name).collect();
        f.debug_struct(name)
            .field("steps", &steps)
            .finish_non_exhaustive()
    }
}
