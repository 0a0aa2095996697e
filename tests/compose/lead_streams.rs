use std::cell::Cell;
use std::future::pending;
use std::task::Poll;

use futures::{StreamExt, stream};
use lockstream::verify::StepVerifier;
use lockstream::{LockError, OnLost, Repeat};
use tokio::time::sleep;

use crate::{is_free, ms, two};

/// A term is told by its number.
#[tokio::test(start_paused = true)]
async fn a_stream_runs_only_while_its_process_leads() {
    let (store, here, there) = two();
    let held = there.obtain("k").lease().await.unwrap();
    let terms = Cell::new(0);
    let lock = here.obtain("k").ttl(ms(600));
    let source = |lease: lockstream::LeaseView| {
        terms.set(terms.get() + 1);
        assert!(lease.is_valid());
        let term = terms.get();
        let ticks = stream::unfold(0, |tick| async move {
            sleep(ms(100)).await;
            Some((tick, tick + 1))
        });
        ticks.map(move |tick| (term, tick))
    };
    StepVerifier::try_create(lock.lead_stream(source))
        .expect_no_event(ms(1000))
        .then(async || assert_eq!(terms.get(), 0))
        .then(async || held.release().await.unwrap())
        .expect_next((1, 0))
        .expect_next((1, 1))
        // Back-pressure: nothing is made that nobody asks for.
        .then(async || sleep(ms(550)).await)
        .expect_next((1, 2))
        .then(async || assert!(!is_free(&there, "k").await))
        // Taken away, and had again.
        .then(async || store.expire("k"))
        .then(async || sleep(ms(300)).await)
        .expect_next_matches(|(term, _)| *term <= 2)
        .expect_next_matches(|(term, _)| *term == 2)
        .then_cancel()
        .verify()
        .await;
    assert!(is_free(&there, "k").await, "dropped, it resigns");
}

/// Who leads no more ends its term, whatever its lock does at other losses.
#[tokio::test(start_paused = true)]
async fn a_loss_ends_a_term_that_is_to_go_on() {
    let (store, here, _) = two();
    let lock = here.obtain("k").ttl(ms(600)).on_lost(OnLost::RunOn);
    let terms = Cell::new(0);
    let source = |_| {
        terms.set(terms.get() + 1);
        stream::iter([terms.get()]).chain(stream::pending())
    };
    StepVerifier::try_create(lock.lead_stream(source))
        .expect_next(1)
        .then(async || store.expire("k"))
        .expect_next(2)
        .then_cancel()
        .verify()
        .await;
}

#[tokio::test(start_paused = true)]
async fn a_source_that_ends_ends_the_stream_or_is_made_again() {
    let (_, here, there) = two();
    let terms = Cell::new(0);
    let source = |_| {
        terms.set(terms.get() + 1);
        stream::iter([terms.get()])
    };
    StepVerifier::try_create(here.obtain("k").lead_stream(source))
        .expect_next(1)
        .expect_complete()
        .verify()
        .await;
    let again = here.obtain("k").lead_stream(source);
    StepVerifier::try_create(again.restart(Repeat::fixed(ms(100)).until(|repeats| repeats >= 2)))
        .expect_next(2)
        // The lead is free meanwhile.
        .then(async || {
            let lease = there.obtain("k").lease().await.unwrap();
            sleep(ms(300)).await;
            lease.release().await.unwrap();
        })
        .expect_next(3)
        .expect_no_event(ms(99))
        .expect_next(4)
        .then_cancel()
        .verify()
        .await;

    // A source without items uses the policy up.
    let empty = here.obtain("k").lead_stream(|_| stream::empty::<()>());
    StepVerifier::try_create(empty.restart(Repeat::fixed(ms(100)).until(|repeats| repeats >= 3)))
        .expect_no_event(ms(299))
        .expect_complete()
        .verify()
        .await;
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_ends_it_with_an_error() {
    let (_, here, _) = two();
    let leading = here
        .obtain("k")
        .lead_stream(|_| stream::once(pending::<()>()));
    StepVerifier::try_create(leading)
        .then_await(ms(100))
        .then(async || here.shutdown().await)
        .expect_error_matches(|error| matches!(error, LockError::Closed { .. }))
        .expect_complete()
        .verify()
        .await;
}

/// The release finds that the lease was lost. The source has ended by itself, and is not made again for that.
#[tokio::test(start_paused = true)]
async fn a_source_that_has_ended_counts_though_the_lease_was_lost() {
    let (store, here, _) = two();
    let terms = Cell::new(0);
    let source = |_| {
        terms.set(terms.get() + 1);
        let lost = stream::poll_fn(|_| {
            store.expire("k");
            Poll::Ready(None)
        });
        stream::iter([terms.get()]).chain(lost)
    };
    StepVerifier::try_create(here.obtain("k").lead_stream(source))
        .expect_next(1)
        .expect_complete()
        .verify()
        .await;
    let again = here.obtain("k").lead_stream(source);
    let again = again.restart(Repeat::fixed(ms(100)).until(|repeats| repeats >= 2));
    StepVerifier::try_create(again)
        .expect_next(2)
        .expect_no_event(ms(99))
        .expect_next(3)
        .then_cancel()
        .verify()
        .await;
}
