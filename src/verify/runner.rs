//! Runs the steps of a script on its source.

use std::{
    future::poll_fn,
    pin::pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use futures::stream::{LocalBoxStream, StreamExt};
use tokio::{
    task::coop::consume_budget,
    time::{Instant, sleep, timeout},
};

use super::{
    error::VerifyError,
    step::{Action, Event, Step, Tell},
};

/// An event that was polled and that no step has taken yet.
struct Ahead<T, E> {
    event: Event<T, E>,
    /// The step that kept it for a later one.
    kept_by: Option<String>,
}

/// A source, with the one event of look-ahead.
pub(super) struct Runner<'a, T, E> {
    source: Option<LocalBoxStream<'a, Result<T, E>>>,
    ahead: Option<Ahead<T, E>>,
    /// Items that an `expect_next_count` has taken so far.
    counted: Option<usize>,
    tell: Tell<T, E>,
}

/// What a step found instead of what it expected.
type Mismatch = String;

impl<'a, T, E> Runner<'a, T, E> {
    pub(super) fn new(source: LocalBoxStream<'a, Result<T, E>>, tell: Tell<T, E>) -> Self {
        Self {
            source: Some(source),
            ahead: None,
            counted: None,
            tell,
        }
    }

    /// Runs all steps within `limit`, and returns the time they took.
    pub(super) async fn run(
        mut self,
        steps: Vec<Step<'a, T, E>>,
        limit: Duration,
    ) -> Result<Duration, VerifyError> {
        let start = Instant::now();
        for (number, step) in (1..).zip(steps) {
            let Step {
                name,
                place,
                expected,
                action,
            } = step;
            let begun = Instant::now();
            let left = limit.saturating_sub(begun - start);
            let outcome = timeout(left, self.perform(action))
                .await
                .unwrap_or_else(|_| {
                    let idle = whole_millis(begun.elapsed());
                    Err(format!(
                        "nothing within {idle:?}, and the script's limit of {limit:?} was over"
                    ))
                });
            if let Err(came) = outcome {
                let came = self.with_count(came);
                return Err(VerifyError::Step {
                    number,
                    name,
                    place,
                    expected,
                    came,
                });
            }
            self.counted = None;
            if let Some(ahead) = &mut self.ahead {
                ahead
                    .kept_by
                    .get_or_insert_with(|| format!("step {number}, {name}"));
            }
        }
        Ok(start.elapsed())
    }

    async fn perform(&mut self, action: Action<'a, T, E>) -> Result<(), Mismatch> {
        match action {
            Action::Item(accepts) => {
                self.take_if(|event| matches!(event, Event::Item(item) if accepts(item)))
                    .await
            }
            Action::Error(accepts) => {
                self.take_if(|event| matches!(event, Event::Error(error) if accepts(error)))
                    .await
            }
            Action::Items(count) => {
                for taken in 0..count {
                    self.counted = Some(taken);
                    // A source that is always ready would keep the limit from ever being looked at.
                    consume_budget().await;
                    self.take_if(|event| matches!(event, Event::Item(_)))
                        .await?;
                }
                Ok(())
            }
            Action::Quiet(span) => self.stay_quiet(span).await,
            Action::Await(span) => {
                self.run_beside(sleep(span)).await;
                Ok(())
            }
            Action::Run(closure) => {
                self.run_beside(closure).await;
                Ok(())
            }
            Action::Cancel => {
                self.source = None;
                self.ahead = None;
                Ok(())
            }
            Action::Complete => self.take_if(|event| matches!(event, Event::End)).await,
        }
    }

    /// Takes the next event, which must be one that `accepts` says yes to.
    async fn take_if(
        &mut self,
        accepts: impl FnOnce(&Event<T, E>) -> bool,
    ) -> Result<(), Mismatch> {
        poll_fn(|cx| self.poll_ahead(cx)).await;
        let ahead = self
            .ahead
            .take()
            .expect("poll_ahead is ready only with an event ahead");
        if accepts(&ahead.event) {
            Ok(())
        } else {
            Err(self.describe(&ahead))
        }
    }

    /// Lets `span` pass, in which no event may come. One that comes at its very end is the next
    /// step's.
    async fn stay_quiet(&mut self, span: Duration) -> Result<(), Mismatch> {
        let begun = Instant::now();
        let mut passed = pin!(sleep(span));
        let mut polled = false;
        poll_fn(|cx| {
            // The clock comes first: what is due at the end of the span is ready by now, too. But
            // what is ready at the start must be seen, however short the span.
            if polled && begun.elapsed() >= span {
                return Poll::Ready(());
            }
            polled = true;
            if self.poll_ahead(cx).is_ready() {
                Poll::Ready(())
            } else {
                passed.as_mut().poll(cx)
            }
        })
        .await;
        match &self.ahead {
            Some(ahead) => Err(format!(
                "{}, after {:?}",
                self.describe(ahead),
                whole_millis(begun.elapsed())
            )),
            None => Ok(()),
        }
    }

    /// Runs `work` to its end and polls the source meanwhile; the source first, so that what is due
    /// when `work` ends has happened.
    async fn run_beside(&mut self, work: impl Future<Output = ()>) {
        let mut work = pin!(work);
        poll_fn(|cx| {
            let _ = self.poll_ahead(cx);
            work.as_mut().poll(cx)
        })
        .await;
    }

    /// Ready once an event is ahead. As long as one is, the source is not polled; so neither is it
    /// after its end, which no step takes but a last one.
    fn poll_ahead(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if self.ahead.is_none() {
            let source = self.source.as_mut().expect("a cancel is the last step");
            let event = ready!(source.poll_next_unpin(cx)).into();
            self.ahead = Some(Ahead {
                event,
                kept_by: None,
            });
        }
        Poll::Ready(())
    }

    fn describe(&self, ahead: &Ahead<T, E>) -> String {
        let told = (self.tell)(&ahead.event);
        match &ahead.kept_by {
            Some(step) => format!("{told} (it came during {step})"),
            None => told,
        }
    }

    fn with_count(&self, came: Mismatch) -> Mismatch {
        match self.counted {
            Some(1) => format!("1 item, then {came}"),
            Some(taken) => format!("{taken} items, then {came}"),
            None => came,
        }
    }
}

/// Timers tick in milliseconds; what is finer in a span is noise to its reader.
fn whole_millis(span: Duration) -> Duration {
    span - Duration::from_nanos((span.subsec_nanos() % 1_000_000).into())
}
