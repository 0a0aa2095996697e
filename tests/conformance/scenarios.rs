//! The scenarios of the library that this one is the counterpart of, step by step.

use std::cell::{Cell, RefCell};

use futures::stream::{FuturesUnordered, StreamExt};
use lockstream::verify::StepVerifier;
use lockstream::{LockError, LockRegistry};
use tokio::time::{Duration, Instant, sleep};

use crate::world::{World, assert_took, ms};

const WORK: Duration = ms(2000);

/// Five callers, each in a process of its own, ask once.
pub(crate) async fn of_five_that_ask_once_one_gets_it(w: &dyn World) {
    let registries: [_; 5] = w.registries().await;
    let locks = registries.each_ref().map(|registry| registry.obtain("k"));
    let answers: FuturesUnordered<_> = locks.iter().map(|lock| lock.acquire_once()).collect();
    let won = Cell::new(0);
    let count = |acquired: &bool| {
        won.set(won.get() + u32::from(*acquired));
        true
    };
    StepVerifier::try_create(answers)
        .expect_next_matches(count)
        .expect_next_matches(count)
        .expect_next_matches(count)
        .expect_next_matches(count)
        .expect_next_matches(count)
        .expect_complete()
        .verify()
        .await;
    assert_eq!(won.get(), 1);
    let holders: Vec<_> = locks.iter().filter(|lock| lock.is_acquired()).collect();
    assert_eq!(holders.len(), 1);
    assert!(holders[0].release().await.unwrap());
}

/// One caller: acquires, works, releases. Tells whether it got the lock, and when the work began.
async fn caller(
    registry: &LockRegistry,
    (work, wait): (Duration, Duration),
    working: &RefCell<Vec<(Instant, Instant)>>,
) -> Result<bool, LockError> {
    let lock = registry.obtain("k").ttl(ms(10_000));
    if !lock.acquire_within(wait).await? {
        return Ok(false);
    }
    let begin = Instant::now();
    sleep(work).await;
    assert!(lock.is_acquired());
    working.borrow_mut().push((begin, Instant::now()));
    lock.release().await
}

#[track_caller]
fn assert_one_after_the_other(working: &[(Instant, Instant)]) {
    for pair in working.windows(2) {
        assert!(pair[0].1 <= pair[1].0, "two worked at a time: {working:?}");
    }
}

/// Three callers work 2 s each, and wait as long as it takes.
pub(crate) async fn three_that_wait_take_turns(w: &dyn World) {
    let registries: [_; 3] = w.registries().await;
    let working = RefCell::default();
    let begin = Instant::now();
    let wait = Duration::from_secs(30);
    let callers: FuturesUnordered<_> = registries
        .iter()
        .map(|registry| caller(registry, (WORK, wait), &working))
        .collect();
    let took = StepVerifier::try_create(callers)
        .expect_no_event(WORK - ms(10))
        .expect_next(true)
        .expect_no_event((WORK - ms(10)).saturating_sub(w.late()))
        .expect_next(true)
        .expect_no_event((WORK - ms(10)).saturating_sub(w.late()))
        .expect_next(true)
        .expect_complete()
        .verify()
        .await;
    assert!(took <= 3 * (WORK + w.late()), "{took:?}");
    assert_took(begin, 3 * WORK, 3 * w.late());
    assert_eq!(working.borrow().len(), 3);
    assert_one_after_the_other(&working.borrow());
}

/// Three callers work 3 s each and wait 5.2 s: the third's turn would come after 6 s.
pub(crate) async fn of_three_that_wait_too_short_one_is_refused(w: &dyn World) {
    let (work, wait) = (ms(3000), ms(5200));
    let registries: [_; 3] = w.registries().await;
    let working = RefCell::default();
    let callers: FuturesUnordered<_> = registries
        .iter()
        .map(|registry| caller(registry, (work, wait), &working))
        .collect();
    let begin = Instant::now();
    let mut refused_at = None;
    let told = &mut refused_at;
    StepVerifier::try_create(callers.inspect(move |told_now| {
        if matches!(told_now, Ok(false)) {
            *told = Some(begin.elapsed());
        }
    }))
    .expect_no_event(work - ms(10))
    .expect_next(true)
    .expect_no_event((wait - work - ms(100)).saturating_sub(2 * w.late()))
    .expect_next(false)
    .expect_next(true)
    .expect_complete()
    .verify()
    .await;
    let refused_at = refused_at.unwrap();
    assert!(refused_at >= wait, "given up early, after {refused_at:?}");
    assert!(
        refused_at <= wait + w.late(),
        "given up late, after {refused_at:?}"
    );
    assert_eq!(working.borrow().len(), 2);
    assert_one_after_the_other(&working.borrow());
}
