//! The steps that users write.

use std::{
    convert::Infallible,
    fmt::{self, Debug},
    panic::Location,
    time::Duration,
};

use futures::future::FutureExt;

use super::{
    last_step::LastStep,
    script::{Origin, Script},
    source::Source,
    step::{Action, Event, Step},
};

/// A script of what a stream or a future must do, step by step.
///
/// Made by [`create`](Self::create), [`try_create`](Self::try_create) or
/// [`with_virtual_time`](Self::with_virtual_time); [`then_cancel`](Self::then_cancel) or
/// [`expect_complete`](Self::expect_complete) ends it, and the [`LastStep`] runs it. Nothing
/// happens before that. See the [module](super) for when the source is polled, and for time.
///
/// # Examples
///
/// A stream, with errors among its items:
///
/// ```
/// use futures::stream;
/// use lockstream::verify::StepVerifier;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() {
/// StepVerifier::try_create(stream::iter([Ok(1), Err("broken"), Ok(2)]))
///     .expect_next(1)
///     .expect_error_matches(|error| *error == "broken")
///     .expect_next(2)
///     .expect_complete()
///     .verify()
///     .await;
/// # }
/// ```
#[must_use = "a script does nothing until its last step is verified"]
pub struct StepVerifier<'a, T, E = Infallible> {
    script: Script<'a, T, E>,
}

impl<'a, T: Debug> StepVerifier<'a, T> {
    /// Starts a script on a source whose items are taken as they are.
    ///
    /// Of a source of `Result`s each `Result` is an item, and `expect_next(Ok(1))` compares it
    /// whole; where the error has no `PartialEq`, use [`try_create`](Self::try_create).
    ///
    /// # Examples
    ///
    /// A future is one item and the end:
    ///
    /// ```
    /// use lockstream::verify::StepVerifier;
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() {
    /// StepVerifier::create(async { 7 }).expect_next(7).expect_complete().verify().await;
    /// # }
    /// ```
    #[track_caller]
    pub fn create<M>(source: impl Source<'a, T, M> + 'a) -> Self {
        // Not `Ok` itself: it has `T` in its type, which would then have to outlive `'a`.
        Self::new(Origin::Made(source.into_events(|item| Ok(item))))
    }
}

impl<'a, T: Debug, E: Debug> StepVerifier<'a, T, E> {
    #[track_caller]
    fn new(origin: Origin<'a, T, E>) -> Self {
        let made_at = Location::caller();
        Self {
            script: Script {
                origin,
                made_at,
                steps: Vec::new(),
                tell: Event::to_string,
            },
        }
    }

    /// Starts a script on a source of `Result`s: `Ok` is an item, `Err` an error.
    ///
    /// Errors are events, not the end: a source may go on after one, and so may the script.
    ///
    /// # Examples
    ///
    /// ```
    /// use futures::future;
    /// use lockstream::verify::StepVerifier;
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() {
    /// StepVerifier::try_create(future::err::<u8, _>("busy"))
    ///     .expect_error_matches(|error| error.starts_with("bus"))
    ///     .expect_complete()
    ///     .verify()
    ///     .await;
    /// # }
    /// ```
    #[track_caller]
    pub fn try_create<M>(source: impl Source<'a, Result<T, E>, M> + 'a) -> Self {
        Self::new(Origin::Made(source.into_events(|event| event)))
    }

    /// Starts a script on virtual time: hours pass in no time.
    ///
    /// The script pauses tokio's clock, calls `make` for the source, so that its timers are made
    /// under paused time, and resumes the clock when it is done, has failed or is dropped. The
    /// clock then goes on from the time it has reached. Durations of whole milliseconds are exact.
    /// How time moves stands in the [module](super).
    ///
    /// Tokio pauses the clock of a current-thread runtime only, and only when it runs: in a test
    /// with `start_paused` use [`try_create`](Self::try_create). Otherwise the script fails with
    /// [`SeveralThreads`](super::VerifyError::SeveralThreads) or
    /// [`ClockPaused`](super::VerifyError::ClockPaused).
    ///
    /// # Examples
    ///
    /// ```
    /// use std::{convert::Infallible, time::Duration};
    ///
    /// use lockstream::verify::StepVerifier;
    /// use tokio::time::sleep;
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() {
    /// const DAY: Duration = Duration::from_secs(86_400);
    ///
    /// let took = StepVerifier::with_virtual_time(|| async {
    ///     sleep(DAY).await;
    ///     Ok::<_, Infallible>("good morning")
    /// })
    /// .expect_no_event(DAY)
    /// .expect_next("good morning")
    /// .expect_complete()
    /// .verify()
    /// .await;
    /// assert_eq!(took, DAY);
    /// # }
    /// ```
    #[track_caller]
    pub fn with_virtual_time<M, S: Source<'a, Result<T, E>, M> + 'a>(
        make: impl FnOnce() -> S + 'a,
    ) -> Self {
        Self::new(Origin::Virtual(Box::new(|| {
            make().into_events(|event| event)
        })))
    }

    /// The next event must be an item that equals `value`.
    #[track_caller]
    pub fn expect_next<V: Debug + 'a>(self, value: V) -> Self
    where
        T: PartialEq<V>,
    {
        let name = format!("expect_next({value:?})");
        let expected = format!("the item {value:?}");
        self.step(
            name,
            expected,
            Action::Item(Box::new(move |item| *item == value)),
        )
    }

    /// The next event must be an item that `f` accepts. A panic in `f` goes through.
    #[track_caller]
    pub fn expect_next_matches(self, f: impl FnOnce(&T) -> bool + 'a) -> Self {
        self.step(
            "expect_next_matches",
            "an item that the predicate accepts",
            Action::Item(Box::new(f)),
        )
    }

    /// The next `n` events must be items, whatever they are. With 0 the source is not polled.
    #[track_caller]
    pub fn expect_next_count(self, n: usize) -> Self {
        let expected = if n == 1 {
            "1 item".to_owned()
        } else {
            format!("{n} items")
        };
        self.step(
            format!("expect_next_count({n})"),
            expected,
            Action::Items(n),
        )
    }

    /// The next event must be an error that `f` accepts; more steps may follow. A panic in `f` goes
    /// through.
    ///
    /// Of a source given to [`create`](Self::create) every event is an item, so this always fails
    /// there.
    #[track_caller]
    pub fn expect_error_matches(self, f: impl FnOnce(&E) -> bool + 'a) -> Self {
        self.step(
            "expect_error_matches",
            "an error that the predicate accepts",
            Action::Error(Box::new(f)),
        )
    }

    /// For the whole of `d` no item, no error and no end may come, the source being polled all the
    /// while.
    ///
    /// An event at the very end of `d` is the next step's, as is any later one: of an item due in
    /// an hour, `expect_no_event(HOUR).expect_next(item)` holds. An event that an earlier
    /// [`then_await`](Self::then_await) or [`then`](Self::then) has kept fails at once. With
    /// [`Duration::ZERO`] the source is polled once and must not be ready.
    #[track_caller]
    pub fn expect_no_event(self, d: Duration) -> Self {
        self.step(
            format!("expect_no_event({d:?})"),
            format!("no event for {d:?}"),
            Action::Quiet(d),
        )
    }

    /// Lets `d` pass, and goes on polling the source with one event of look-ahead.
    ///
    /// The first event that comes meanwhile is kept for the next step, and the source is not polled
    /// again until that has taken it.
    #[track_caller]
    pub fn then_await(self, d: Duration) -> Self {
        self.step(
            format!("then_await({d:?})"),
            format!("{d:?} to pass"),
            Action::Await(d),
        )
    }

    /// Runs `f` to its end, and goes on polling the source with one event of look-ahead, as
    /// [`then_await`](Self::then_await) does.
    ///
    /// The source is polled before `f` begins. A panic in `f`, as of an assertion, goes through.
    ///
    /// # Examples
    ///
    /// ```
    /// use futures::channel::mpsc;
    /// use lockstream::verify::StepVerifier;
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() {
    /// let (sender, receiver) = mpsc::unbounded();
    /// StepVerifier::create(receiver)
    ///     .then(async || sender.unbounded_send(1).expect("the script holds the receiver"))
    ///     .expect_next(1)
    ///     .then_cancel()
    ///     .verify()
    ///     .await;
    /// assert!(sender.is_closed());
    /// # }
    /// ```
    #[track_caller]
    pub fn then(self, f: impl AsyncFnOnce() + 'a) -> Self {
        self.step(
            "then",
            "the closure to end",
            Action::Run(async move { f().await }.boxed_local()),
        )
    }

    /// Drops the source, and an event that was kept with it. The script ends here.
    #[track_caller]
    pub fn then_cancel(self) -> LastStep<'a, T, E> {
        self.last("then_cancel", "the source to be dropped", Action::Cancel)
    }

    /// The next event must be the end of the stream, or of the future that has yielded its one
    /// item. The script ends here, and drops the source.
    #[track_caller]
    pub fn expect_complete(self) -> LastStep<'a, T, E> {
        self.last("expect_complete", "the end of the stream", Action::Complete)
    }

    #[track_caller]
    fn last(self, name: &str, expected: &str, action: Action<'a, T, E>) -> LastStep<'a, T, E> {
        LastStep {
            script: self.step(name, expected, action).script,
        }
    }

    #[track_caller]
    fn step(
        mut self,
        name: impl Into<String>,
        expected: impl Into<String>,
        action: Action<'a, T, E>,
    ) -> Self {
        let (name, expected, place) = (name.into(), expected.into(), Location::caller());
        self.script.steps.push(Step {
            name,
            place,
            expected,
            action,
        });
        self
    }
}

impl<T, E> Debug for StepVerifier<'_, T, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.script.debug("StepVerifier", f)
    }
}
