//! `StepVerifier`: what it accepts, what it refuses, and how it says so.

#![cfg(feature = "test-util")]

use std::{
    cell::{Cell, RefCell},
    convert::Infallible,
    future::{pending, poll_fn},
    panic::{AssertUnwindSafe, panic_any},
    pin::pin,
    rc::Rc,
    task::Poll,
    time::Duration,
};

use futures::{
    FutureExt, StreamExt,
    channel::{mpsc, oneshot},
    future, stream,
};
use lockstream::verify::{LastStep, StepVerifier, VerifyError};
use tokio::time::{Instant, interval_at, sleep, timeout};

const MILLI: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);
const HOUR: Duration = Duration::from_secs(3600);

/// How a script failed, in parts.
#[derive(Debug)]
struct Told {
    step: String,
    expected: String,
    came: String,
}

impl Told {
    #[track_caller]
    fn is(self, step: &str, expected: &str, came: &str) {
        assert_eq!(
            [&*self.step, &self.expected, &self.came],
            [step, expected, came]
        );
    }
}

/// Verifies a script that must fail, and checks that the place it names is that of the step it names.
async fn failure<T, E>(script: LastStep<'_, T, E>) -> Told {
    let text = script.verdict().await.unwrap_err().to_string();
    told(&text)
}

fn told(text: &str) -> Told {
    let (head, expected, came) = match *text.lines().collect::<Vec<_>>() {
        [head, expected, came] => (head, expected, came),
        _ => panic!("three lines make a failure, not: {text}"),
    };
    let (step, place) = head.split_once(", at ").unwrap();
    let (line, column) = place
        .strip_prefix("tests/verify.rs:")
        .and_then(|position| position.split_once(':'))
        .unwrap();
    let line_of_step = include_str!("verify.rs")
        .lines()
        .nth(line.parse::<usize>().unwrap() - 1)
        .unwrap();
    let (_, name) = step.split_once(", ").unwrap();
    let method = name.split('(').next().unwrap();
    assert!(
        line_of_step[column.parse::<usize>().unwrap() - 1..].starts_with(&format!("{method}(")),
        "{step} is not at {place}"
    );
    Told {
        step: step.to_owned(),
        expected: expected.strip_prefix("  expected: ").unwrap().to_owned(),
        came: came.strip_prefix("  came:     ").unwrap().to_owned(),
    }
}

/// A stream that counts how often an item was taken from it, and knows when it was dropped.
#[derive(Clone, Default)]
struct Probe {
    polled: Rc<Cell<u32>>,
    alive: Rc<()>,
}

impl Probe {
    fn numbers(&self) -> impl futures::Stream<Item = u32> + use<> {
        let Probe { polled, alive } = self.clone();
        stream::repeat_with(move || {
            let _held = &alive;
            polled.set(polled.get() + 1);
            polled.get()
        })
    }

    fn is_dropped(&self) -> bool {
        Rc::strong_count(&self.alive) == 1
    }
}

// What a script accepts.

#[tokio::test]
async fn items_in_order_and_the_end() {
    StepVerifier::create(stream::iter(1..=6))
        .expect_next(1)
        .expect_next_matches(|n| *n == 2)
        .expect_next_count(0)
        .expect_next_count(3)
        .expect_next(6)
        .expect_complete()
        .verify()
        .await;
}

#[tokio::test]
async fn a_future_is_one_item_and_the_end() {
    StepVerifier::create(async { "done".to_owned() })
        .expect_next("done")
        .expect_complete()
        .verify()
        .await;
}

#[tokio::test]
async fn an_error_is_not_the_end() {
    #[derive(Debug)]
    struct NotComparable(u8);

    let results = [Ok(1), Err(NotComparable(7)), Ok(2), Err(NotComparable(8))];
    StepVerifier::try_create(stream::iter(results))
        .expect_next(1)
        .expect_error_matches(|error| error.0 == 7)
        .expect_next(2)
        .expect_error_matches(|error| error.0 == 8)
        .expect_complete()
        .verify()
        .await;
}

#[tokio::test]
async fn a_failed_future_is_one_error_and_the_end() {
    StepVerifier::try_create(future::err::<(), _>("busy"))
        .expect_error_matches(|error| *error == "busy")
        .expect_complete()
        .verify()
        .await;
}

#[tokio::test]
async fn sources_and_closures_borrow_locals() {
    let words = [String::from("one"), String::from("two")];
    let seen = RefCell::new(Vec::new());
    let wanted = String::from("two");
    StepVerifier::create(stream::iter(&words).map(String::as_str))
        .expect_next_matches(|word| {
            seen.borrow_mut().push(*word);
            true
        })
        .then(async || seen.borrow_mut().push("between"))
        .expect_next(wanted.as_str())
        .expect_complete()
        .verify()
        .await;
    assert_eq!(seen.into_inner(), ["one", "between"]);
}

#[tokio::test]
async fn sources_need_not_be_send() {
    let shared = Rc::new(3);
    let of_future = Rc::clone(&shared);
    StepVerifier::create(async move { of_future })
        .expect_next(shared)
        .expect_complete()
        .verify()
        .await;
}

/// `unfold` panics when it is polled after its end; a script must not, however many steps see it.
#[tokio::test(start_paused = true)]
async fn a_source_is_not_polled_after_its_end() {
    let once = stream::unfold(true, async |more| more.then_some(((), false)));
    StepVerifier::create(once)
        .expect_next(())
        .then_await(SECOND)
        .then(async || sleep(SECOND).await)
        .then_await(SECOND)
        .expect_complete()
        .verify()
        .await;
}

#[tokio::test(start_paused = true)]
async fn nothing_is_polled_but_by_a_step() {
    let probe = Probe::default();
    let script = StepVerifier::create(probe.numbers())
        .expect_next(1)
        .then_cancel();
    sleep(SECOND).await;
    assert_eq!(probe.polled.get(), 0);
    script.verify().await;
    assert_eq!(probe.polled.get(), 1);
}

#[tokio::test(start_paused = true)]
async fn the_look_ahead_is_of_one_event() {
    let probe = Probe::default();
    StepVerifier::create(probe.numbers())
        .then_await(HOUR)
        .then(async || assert_eq!(probe.polled.get(), 1))
        .then_await(HOUR)
        .then(async || assert_eq!(probe.polled.get(), 1))
        .expect_next(1)
        .then(async || assert_eq!(probe.polled.get(), 2))
        .expect_next_count(2)
        .then(async || assert_eq!(probe.polled.get(), 4))
        .then_cancel()
        .verify()
        .await;
    assert_eq!(probe.polled.get(), 4);
}

#[tokio::test(start_paused = true)]
async fn work_goes_on_while_time_passes() {
    let at = Rc::new(Cell::new(None));
    let mark = Rc::clone(&at);
    let start = Instant::now();
    let took = StepVerifier::create(async move {
        sleep(2 * SECOND).await;
        mark.set(Some(start.elapsed()));
    })
    .then_await(5 * SECOND)
    .then(async || assert_eq!(at.get(), Some(2 * SECOND)))
    .expect_next(())
    .expect_complete()
    .verify()
    .await;
    assert_eq!(took, 5 * SECOND);
}

#[tokio::test(start_paused = true)]
async fn work_goes_on_while_a_closure_runs() {
    let (ask, asked) = oneshot::channel();
    let (answer, answered) = oneshot::channel();
    StepVerifier::try_create(async move {
        ask.send("ready?").unwrap();
        answered.await
    })
    .then(async move || {
        assert_eq!(asked.await.unwrap(), "ready?");
        answer.send("go").unwrap();
    })
    .expect_next("go")
    .expect_complete()
    .verify()
    .await;
}

#[tokio::test]
async fn a_cancel_drops_the_source_just_then() {
    let probe = Probe::default();
    StepVerifier::create(probe.numbers())
        .expect_next_count(2)
        .then(async || assert!(!probe.is_dropped()))
        .then_cancel()
        .verify()
        .await;
    assert!(probe.is_dropped());
}

#[tokio::test]
async fn an_unfinished_script_drops_its_source() {
    let probe = Probe::default();
    let script = StepVerifier::create(probe.numbers())
        .then(async || pending().await)
        .then_cancel();
    assert!(script.verify().now_or_never().is_none());
    assert!(probe.is_dropped());
}

#[tokio::test]
async fn a_script_shows_its_steps() {
    let script = StepVerifier::create(stream::iter([1]))
        .expect_next(1)
        .expect_complete();
    assert_eq!(
        format!("{script:?}"),
        r#"LastStep { steps: ["expect_next(1)", "expect_complete"], .. }"#
    );
}

// What a script refuses.

#[tokio::test]
async fn a_wrong_item() {
    let script = StepVerifier::create(stream::iter([1, 3]))
        .expect_next(1)
        .expect_next(4)
        .expect_complete();
    let told = failure(script).await;
    told.is("step 2, expect_next(4)", "the item 4", "the item 3");
}

#[tokio::test]
async fn an_item_instead_of_an_error() {
    let script = StepVerifier::try_create(stream::iter([Ok::<_, &str>(1)]))
        .expect_error_matches(|_| true)
        .expect_complete();
    failure(script).await.is(
        "step 1, expect_error_matches",
        "an error that the predicate accepts",
        "the item 1",
    );
}

#[tokio::test]
async fn an_error_instead_of_an_item() {
    let script = StepVerifier::try_create(stream::iter([Ok(1), Err("broken")]))
        .expect_next(1)
        .expect_next(2)
        .then_cancel();
    failure(script).await.is(
        "step 2, expect_next(2)",
        "the item 2",
        r#"the error "broken""#,
    );
}

#[tokio::test]
async fn a_predicate_that_says_no() {
    let script = StepVerifier::try_create(stream::iter([Ok(1), Err("broken")]))
        .expect_next_matches(|n| *n > 1)
        .then_cancel();
    failure(script).await.is(
        "step 1, expect_next_matches",
        "an item that the predicate accepts",
        "the item 1",
    );

    let script = StepVerifier::try_create(stream::iter([Err::<(), _>("broken")]))
        .expect_error_matches(|error| error.is_empty())
        .then_cancel();
    failure(script).await.is(
        "step 1, expect_error_matches",
        "an error that the predicate accepts",
        r#"the error "broken""#,
    );
}

#[tokio::test]
async fn an_end_too_early() {
    let script = StepVerifier::create(stream::iter([1]))
        .expect_next(1)
        .expect_next(2)
        .expect_complete();
    failure(script)
        .await
        .is("step 2, expect_next(2)", "the item 2", "the stream ended");
}

#[tokio::test]
async fn no_end() {
    let script = StepVerifier::create(stream::iter([1, 2]))
        .expect_next(1)
        .expect_complete();
    failure(script).await.is(
        "step 2, expect_complete",
        "the end of the stream",
        "the item 2",
    );
}

#[tokio::test]
async fn a_wrong_count() {
    let script = StepVerifier::create(stream::iter([1, 2]))
        .expect_next_count(3)
        .expect_complete();
    failure(script).await.is(
        "step 1, expect_next_count(3)",
        "3 items",
        "2 items, then the stream ended",
    );

    let script = StepVerifier::try_create(stream::iter([Ok(1), Err("broken")]))
        .expect_next_count(2)
        .expect_complete();
    failure(script).await.is(
        "step 1, expect_next_count(2)",
        "2 items",
        r#"1 item, then the error "broken""#,
    );
}

#[tokio::test(start_paused = true)]
async fn an_event_where_none_was_allowed() {
    let late = || async {
        sleep(2 * SECOND).await;
        9
    };
    let script = StepVerifier::create(late())
        .expect_no_event(SECOND)
        .expect_no_event(SECOND + MILLI)
        .then_cancel();
    failure(script).await.is(
        "step 2, expect_no_event(1.001s)",
        "no event for 1.001s",
        "the item 9, after 1s",
    );

    let script = StepVerifier::try_create(stream::iter([Err::<(), _>("broken")]))
        .expect_no_event(SECOND)
        .then_cancel();
    failure(script).await.is(
        "step 1, expect_no_event(1s)",
        "no event for 1s",
        r#"the error "broken", after 0ns"#,
    );

    let script = StepVerifier::create(stream::empty::<()>())
        .expect_no_event(Duration::ZERO)
        .expect_complete();
    failure(script).await.is(
        "step 1, expect_no_event(0ns)",
        "no event for 0ns",
        "the stream ended, after 0ns",
    );
}

#[tokio::test(start_paused = true)]
async fn an_event_that_an_earlier_step_kept() {
    let script = StepVerifier::create(stream::iter([9]))
        .then_await(SECOND)
        .then(async || ())
        .expect_no_event(SECOND)
        .then_cancel();
    failure(script).await.is(
        "step 3, expect_no_event(1s)",
        "no event for 1s",
        "the item 9 (it came during step 1, then_await(1s)), after 0ns",
    );

    let script = StepVerifier::create(stream::iter([9]))
        .then(async || ())
        .expect_complete();
    failure(script).await.is(
        "step 2, expect_complete",
        "the end of the stream",
        "the item 9 (it came during step 1, then)",
    );
}

#[tokio::test(start_paused = true)]
async fn nothing_within_the_default_limit() {
    let start = Instant::now();
    let script = StepVerifier::create(stream::pending::<()>())
        .then_await(HOUR)
        .expect_no_event(HOUR)
        .expect_next(())
        .then_cancel();
    failure(script).await.is(
        "step 3, expect_next(())",
        "the item ()",
        "nothing within 60s, and the script's limit of 7260s was over",
    );
    assert_eq!(start.elapsed(), 2 * HOUR + 60 * SECOND);

    let script = StepVerifier::create(stream::pending::<()>())
        .then(async || pending().await)
        .then_cancel();
    failure(script).await.is(
        "step 1, then",
        "the closure to end",
        "nothing within 60s, and the script's limit of 60s was over",
    );

    let script = StepVerifier::create(stream::iter([1]).chain(stream::pending()))
        .expect_next_count(2)
        .then_cancel();
    failure(script).await.is(
        "step 1, expect_next_count(2)",
        "2 items",
        "1 item, then nothing within 60s, and the script's limit of 60s was over",
    );
}

async fn panic_text(verify: impl Future<Output = Duration>) -> String {
    let panic = AssertUnwindSafe(verify).catch_unwind().await.unwrap_err();
    panic.downcast_ref::<String>().unwrap().clone()
}

#[tokio::test]
async fn verify_panics_with_the_failure() {
    let script = StepVerifier::create(async { 1 })
        .expect_next(2)
        .expect_complete();
    let text = panic_text(script.verify()).await;
    told(&text).is("step 1, expect_next(2)", "the item 2", "the item 1");
}

#[tokio::test(start_paused = true)]
async fn verify_within_bounds_the_whole() {
    let seconds = || interval_stream(SECOND).take(3);
    let script = StepVerifier::create(seconds())
        .expect_next_count(3)
        .expect_complete();
    assert_eq!(script.verify_within(3 * SECOND).await, 3 * SECOND);

    let script = StepVerifier::create(seconds())
        .expect_next(0)
        .then_await(5 * SECOND)
        .expect_next_count(2)
        .expect_complete();
    let text = panic_text(script.verify_within(3 * SECOND)).await;
    told(&text).is(
        "step 2, then_await(5s)",
        "5s to pass",
        "nothing within 2s, and the script's limit of 3s was over",
    );

    let endless = StepVerifier::create(sleep(48 * HOUR))
        .expect_next(())
        .expect_complete();
    endless.verify_within(Duration::MAX).await;
}

/// On the real clock a source that is always ready must not keep the limit from being seen.
#[tokio::test]
async fn the_limit_ends_a_count_without_end() {
    let script = StepVerifier::create(stream::repeat(()))
        .expect_next_count(usize::MAX)
        .then_cancel();
    let text = panic_text(script.verify_within(20 * MILLI)).await;
    assert!(text.contains(" items, then nothing within "), "{text}");
}

#[tokio::test]
async fn a_panic_in_a_closure_goes_through() {
    let script = StepVerifier::create(async { 1 })
        .then(async || panic_any("out of the closure".to_owned()))
        .then_cancel();
    assert_eq!(panic_text(script.verify()).await, "out of the closure");
}

// Time.

/// Numbers from 0, the first after `period`.
fn interval_stream(period: Duration) -> impl futures::Stream<Item = u32> {
    let ticks = interval_at(Instant::now() + period, period);
    stream::unfold((ticks, 0), async |(mut ticks, n)| {
        ticks.tick().await;
        Some((n, (ticks, n + 1)))
    })
}

#[tokio::test]
async fn hours_of_virtual_time_in_no_time() {
    let real = std::time::Instant::now();
    let took = StepVerifier::with_virtual_time(|| interval_stream(HOUR).map(Ok::<_, Infallible>))
        .expect_no_event(HOUR)
        .expect_next(0)
        .expect_no_event(HOUR)
        .expect_next(1)
        .then_await(100 * HOUR)
        .expect_next(2)
        .then_cancel()
        .verify()
        .await;
    assert_eq!(took, 102 * HOUR);
    assert!(real.elapsed() < 60 * SECOND, "{:?}", real.elapsed());
}

/// A clock that is paused between two of the timer's ticks makes every sleep a tick too long, and of
/// two in a row the second ended later than they should together. Which part of a tick the clock is
/// in is chance, so many tries.
#[tokio::test]
async fn virtual_time_is_exact() {
    for _ in 0..50 {
        std::thread::sleep(Duration::from_micros(170));
        let took = StepVerifier::with_virtual_time(|| async {
            sleep(MILLI).await;
            sleep(SECOND).await;
            Ok::<_, Infallible>(())
        })
        .expect_next(())
        .expect_complete()
        .verify()
        .await;
        assert_eq!(took, SECOND + MILLI);
    }
}

#[tokio::test]
async fn an_expect_step_lets_virtual_time_run() {
    let took = StepVerifier::with_virtual_time(|| async {
        sleep(30 * SECOND).await;
        Err::<(), _>("late")
    })
    .expect_error_matches(|error| *error == "late")
    .expect_complete()
    .verify()
    .await;
    assert_eq!(took, 30 * SECOND);
}

async fn assert_clock_runs() {
    let before = Instant::now();
    std::thread::sleep(MILLI);
    assert_ne!(before, Instant::now(), "the clock is paused");
}

#[tokio::test]
async fn the_clock_runs_again_after_a_script() {
    let made = Cell::new(false);
    let hour = || {
        StepVerifier::with_virtual_time(|| {
            made.set(true);
            sleep(HOUR).map(Ok::<_, Infallible>)
        })
    };

    let met = hour().expect_next(()).then_cancel();
    assert!(!made.get(), "the source is made by the run");
    met.verify_within(HOUR).await;
    assert_clock_runs().await;

    let failed = hour().expect_complete();
    assert!(failed.verdict().await.is_err());
    assert_clock_runs().await;

    let panicked = hour()
        .then(async || panic_any("out".to_owned()))
        .then_cancel();
    panic_text(panicked.verify()).await;
    assert_clock_runs().await;

    let resumed = hour().then(async || tokio::time::resume()).then_cancel();
    resumed.verify().await;
    assert_clock_runs().await;
}

#[test]
fn a_script_dropped_outside_of_its_runtime_resumes_the_clock() {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build()
        .unwrap();
    let mut verify = Box::pin(
        StepVerifier::with_virtual_time(future::pending::<Result<(), Infallible>>)
            .then(async || poll_fn(|_| Poll::Pending).await)
            .then_cancel()
            .verify(),
    );
    runtime.block_on(async {
        assert!(timeout(SECOND, &mut verify).await.is_err());
    });
    drop(verify);
    runtime.block_on(assert_clock_runs());
}

#[tokio::test(start_paused = true)]
async fn a_paused_clock_cannot_be_paused() {
    let script = StepVerifier::with_virtual_time(|| future::ok::<_, Infallible>(1))
        .expect_next(1)
        .expect_complete();
    let error = script.verdict().await.unwrap_err();
    assert!(matches!(error, VerifyError::ClockPaused { .. }));
    let text = error.to_string();
    for part in [
        "at tests/verify.rs:",
        "paused already",
        "use StepVerifier::create",
    ] {
        assert!(text.contains(part), "{text}");
    }
    // The clock is as it was.
    let before = Instant::now();
    std::thread::sleep(MILLI);
    assert_eq!(before, Instant::now());
}

#[tokio::test]
async fn two_scripts_cannot_share_virtual_time() {
    let script = || {
        StepVerifier::with_virtual_time(|| sleep(HOUR).map(Ok::<_, Infallible>))
            .then_await(HOUR)
            .then_cancel()
            .verdict()
    };
    let mut first = pin!(script());
    let (first, second) = future::join(first.as_mut(), script()).await;
    assert_eq!(first, Ok(HOUR));
    assert!(matches!(second, Err(VerifyError::ClockPaused { .. })));
}

#[tokio::test(flavor = "multi_thread")]
async fn several_threads_have_no_virtual_time() {
    let script = StepVerifier::with_virtual_time(|| future::ok::<_, Infallible>(1))
        .expect_next(1)
        .expect_complete();
    let error = script.verdict().await.unwrap_err();
    assert!(matches!(error, VerifyError::SeveralThreads { .. }));
    let text = error.to_string();
    for part in ["at tests/verify.rs:", "#[tokio::test]", "current_thread"] {
        assert!(text.contains(part), "{text}");
    }

    // Real time will do.
    StepVerifier::try_create(future::ok::<_, Infallible>(1))
        .then_await(MILLI)
        .expect_next(1)
        .expect_complete()
        .verify()
        .await;
}

#[test]
fn a_script_needs_a_runtime() {
    let script = StepVerifier::create(mpsc::unbounded::<()>().1).expect_complete();
    let error = futures::executor::block_on(script.verdict()).unwrap_err();
    assert!(matches!(error, VerifyError::NoRuntime { .. }));
    assert!(error.to_string().contains("at tests/verify.rs:"), "{error}");
}
