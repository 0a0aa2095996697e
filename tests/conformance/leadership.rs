//! Who leads, and what runs only while leading.

use std::cell::{Cell, RefCell};
use std::future::pending;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::StreamExt;
use lockstream::verify::StepVerifier;
use lockstream::{Leadership, LeaseView, Lock, LockError, LockRegistry, Renewal};
use tokio::time::{Instant, sleep, timeout};

use crate::assert_err;
use crate::world::{
    BOUND, PATIENCE, SOON, World, assert_took, eventually, free, idle, is_held, ms, poll_once,
    waiting,
};

/// The ttl of a lead: long enough that a busy machine is never late with a renewal.
const SEAT: Duration = ms(3000);

/// Longer than a lead lasts that is not renewed.
const LONGER: Duration = ms(3100);

/// A lead that ends 3 s after its holder was last heard of, or one second after it was taken away.
fn seat(registry: &LockRegistry) -> Lock {
    registry.obtain("k").ttl(SEAT)
}

fn leads(leadership: &Leadership) -> bool {
    matches!(leadership, Leadership::Leader(_))
}

fn follows(leadership: &Leadership) -> bool {
    matches!(leadership, Leadership::Follower)
}

/// The lease that an item brings.
#[track_caller]
fn lease(leadership: Option<Leadership>) -> LeaseView {
    match leadership {
        Some(Leadership::Leader(lease)) => lease,
        other => panic!("not Leader: {other:?}"),
    }
}

pub(crate) async fn a_free_lead_is_had_at_once(w: &dyn World) {
    let [here, there] = w.registries().await;
    // Not a flash of Follower, however long the answer takes.
    w.set_latency(ms(100));
    let begin = Instant::now();
    StepVerifier::create(seat(&here).leadership())
        .expect_next_matches(leads)
        .then(async || assert!(begin.elapsed() >= ms(99), "no answer can have come"))
        .then(async || w.set_latency(ms(0)))
        .then(async || assert!(!there.obtain("k").acquire_once().await.unwrap()))
        // Renewed, though its ttl was set.
        .expect_no_event(LONGER)
        .then_cancel()
        .verify()
        .await;
    // Resigned.
    let begin = Instant::now();
    assert!(there.obtain("k").acquire().await.unwrap());
    assert_took(begin, ms(0), w.late());
}

pub(crate) async fn a_follower_leads_when_the_leader_leaves(w: &dyn World) {
    let [here, there] = w.registries().await;
    let before = seat(&here).renewal(Renewal::watchdog()).lease().await;
    let before = before.unwrap();
    let token = before.token();
    let mut before = Some(before);
    let begin = Cell::new(Instant::now());
    StepVerifier::create(seat(&there).leadership())
        .expect_next_matches(follows)
        .then(async || assert_took(begin.get(), ms(0), w.late()))
        .expect_no_event(LONGER)
        .then(async || {
            begin.set(Instant::now());
            before.take().unwrap().release().await.unwrap();
        })
        .expect_next_matches(|told| lease(Some(told.clone())).token() > token)
        .then(async || assert_took(begin.get(), ms(0), w.late()))
        .then_cancel()
        .verify()
        .await;
}

/// The key is gone: known at the next renewal, and nobody else wants it.
pub(crate) async fn a_lost_lead_is_followed_and_had_again(w: &dyn World) {
    let registry = w.registry().await;
    let terms = RefCell::new(Vec::new());
    let begin = Cell::new(Instant::now());
    let leads = |told: &Leadership| {
        let lease = lease(Some(told.clone()));
        terms.borrow_mut().push(lease.clone());
        lease.is_valid()
    };
    StepVerifier::create(seat(&registry).leadership())
        .expect_next_matches(leads)
        .then(async || {
            begin.set(Instant::now());
            w.expire("k");
            let lost = terms.borrow()[0].lost();
            assert!(lost.await.is_lost());
            assert!(begin.get().elapsed() <= SEAT / 3 + w.late());
        })
        .expect_next_matches(follows)
        .expect_next_matches(leads)
        .expect_no_event(LONGER)
        .then(async || w.expire("k"))
        .expect_next_matches(follows)
        .expect_next_matches(leads)
        .then_cancel()
        .verify()
        .await;
    let terms = terms.into_inner();
    assert!(
        terms
            .iter()
            .map(LeaseView::token)
            .is_sorted_by(|a, b| a < b)
    );
    assert_eq!(terms.len(), 3);
}

/// A stranger took the key and died: a follower until its ttl is over.
pub(crate) async fn a_lead_taken_away_comes_back(w: &dyn World) {
    let registry = w.registry().await;
    let mut campaign = seat(&registry).leadership();
    let first = lease(campaign.next().await);
    w.expire("k");
    let begin = Instant::now();
    w.crashed_holder("k", ms(1800));
    assert!(follows(&campaign.next().await.unwrap()));
    assert!(begin.elapsed() <= SEAT / 3 + w.late());
    assert!(!first.is_valid());
    let again = lease(campaign.next().await);
    assert_took(begin, ms(1790), w.late());
    assert!(again.token() > first.token());
}

/// Three candidates and thirty terms, which end in each way: by a drop, by a word, by time.
pub(crate) async fn one_of_three_leads(w: &dyn World) {
    const TERMS: usize = 30;
    // Whoever leads sees that no earlier lease is valid, and that its own token is the greatest.
    let terms: Arc<Mutex<Vec<(usize, LeaseView)>>> = Arc::default();
    let candidates = w.registries::<3>().await.into_iter().enumerate();
    let candidates = candidates.map(|(number, registry)| {
        let terms = terms.clone();
        async move {
            let fixed = registry.obtain("k").ttl(ms(150)).renewal(Renewal::off());
            let mut campaign = fixed.leadership();
            let mut before = None;
            loop {
                let told = campaign.next().await.unwrap();
                assert!(
                    !(leads(&told) && before.as_ref().is_some_and(leads)),
                    "two terms without a Follower between"
                );
                let Leadership::Leader(lease) = &told else {
                    before = Some(told);
                    continue;
                };
                let term = {
                    let mut terms = terms.lock().unwrap();
                    for (_, other) in &*terms {
                        assert!(!other.is_valid(), "{other:?} and {lease:?}");
                        assert!(other.token() < lease.token());
                    }
                    terms.push((number, lease.clone()));
                    terms.len()
                };
                if term >= TERMS {
                    return;
                }
                match term % 3 {
                    0 => campaign = fixed.leadership(),
                    1 => {
                        sleep(ms(5)).await;
                        campaign.resign().await;
                        campaign = fixed.leadership();
                    }
                    _ => {
                        before = Some(told);
                        continue;
                    }
                }
                before = None;
            }
        }
    });
    futures::future::join_all(candidates).await;
    let terms = terms.lock().unwrap();
    for number in 0..3 {
        let led = terms.iter().filter(|(who, _)| *who == number).count();
        assert!(led >= TERMS / 6, "{number} led {led} times only");
    }
}

/// Dropped or resigned while it leads, while it follows, and while its first question is under way.
pub(crate) async fn a_campaign_that_ends_leaves_nothing(w: &dyn World) {
    let [here, there] = w.registries().await;
    for by_drop in [true, false] {
        let part = async |campaign: lockstream::stream::Campaign| {
            if by_drop {
                drop(campaign);
            } else {
                campaign.resign().await;
            }
        };
        let mut campaign = seat(&here).leadership();
        let mut next = seat(&there).leadership();
        lease(campaign.next().await);
        assert!(follows(&next.next().await.unwrap()));
        assert!(poll_once(&mut next.next()).await.is_none());
        waiting(&seat(&there), 1).await;
        let begin = Instant::now();
        part(campaign).await;
        lease(next.next().await);
        assert_took(begin, ms(0), w.late());

        let mut campaign = seat(&here).leadership();
        assert!(follows(&campaign.next().await.unwrap()));
        assert!(poll_once(&mut campaign.next()).await.is_none());
        waiting(&seat(&there), 1).await;
        part(campaign).await;
        waiting(&seat(&there), 0).await;

        w.set_latency(ms(50));
        let begin = Instant::now();
        next.resign().await;
        assert!(begin.elapsed() >= ms(49), "no word can have come");
        assert!(!is_held(&seat(&there)).await, "resigned, and not released");

        let mut campaign = seat(&here).leadership();
        assert!(poll_once(&mut campaign.next()).await.is_none());
        part(campaign).await;
        w.set_latency(ms(0));
        idle(&here).await;
        free(&seat(&there)).await;
    }
}

/// The lead is over whenever its candidate hears of it. It took it again at once, at the speed of the network, and nobody led.
/// Now others may lead, and it tries again after a pause.
pub(crate) async fn a_store_that_is_too_slow_for_the_ttl_is_tried_again(w: &dyn World) {
    let [slow, other] = w.registries().await;
    let mut campaign = seat(&slow).ttl(ms(600)).leadership();
    w.set_latency(ms(800));
    assert!(follows(&campaign.next().await.unwrap()));
    w.set_latency(ms(0));
    free(&seat(&other)).await;
    let lease_of_other = seat(&other).lease_once().await.unwrap();
    let lease_of_other = lease_of_other.expect("the campaign pauses");
    lease_of_other.release().await.unwrap();
    lease(campaign.next().await);
    campaign.resign().await;
}

/// To resign while the store is away takes one response time-out, and goes on in the background.
pub(crate) async fn who_resigns_does_not_wait_for_an_absent_store(w: &dyn World) {
    let registry = w.builder().await.response_timeout(ms(300)).build().unwrap();
    // For longer than is waited for it to be free.
    let mut campaign = registry.obtain("k").ttl(ms(60_000)).leadership();
    // The first answer may be late, too.
    let mut told = campaign.next().await;
    while told.as_ref().is_some_and(follows) {
        told = campaign.next().await;
    }
    lease(told);
    w.set_offline(true);
    let begin = Instant::now();
    campaign.resign().await;
    assert!(begin.elapsed() <= ms(300) + w.late());
    w.set_offline(false);
    free(&registry.obtain("k")).await;
}

pub(crate) async fn a_campaign_ends_with_its_registry(w: &dyn World) {
    let [here, there] = w.registries().await;
    let closed = |told: &Leadership| matches!(told, Leadership::Ended(LockError::Closed { .. }));
    let _held = there.obtain("held").lease().await.unwrap();
    StepVerifier::create(here.obtain("k").leadership())
        .expect_next_matches(leads)
        .then(async || {
            StepVerifier::create(here.obtain("held").leadership())
                .expect_next_matches(follows)
                .then(async || here.shutdown().await)
                .expect_next_matches(closed)
                .expect_complete()
                .verify()
                .await;
        })
        .expect_next_matches(closed)
        .expect_complete()
        .verify()
        .await;
    StepVerifier::create(here.obtain("k").leadership())
        .expect_next_matches(closed)
        .expect_complete()
        .verify()
        .await;
    let work = here.obtain("k").lead(async |_| panic!("never begun"));
    assert_err!(work.await, Closed, "k");
}

/// What is wrong for ever is told, and nothing else.
pub(crate) async fn what_waiting_cannot_mend_ends_a_campaign(w: &dyn World) {
    use futures::stream::FusedStream;
    let registry = w.registry().await;
    let commands = w.commands();
    let cases = [
        (registry.obtain(""), "InvalidKey"),
        (registry.obtain("k").ttl(ms(9)), "InvalidTtl"),
    ];
    for (lock, why) in cases {
        let mut campaign = lock.leadership();
        assert!(!campaign.is_terminated());
        let told = campaign.next().await.unwrap();
        let Leadership::Ended(error) = told else {
            panic!("{told:?} instead of {why}");
        };
        assert!(format!("{error:?}").starts_with(why), "{error:?}");
        assert!(campaign.is_terminated());
        assert!(campaign.next().await.is_none() && campaign.next().await.is_none());
        let error = lock.lead(async |_| panic!("never begun")).await;
        let error = error.map(|()| "a value").unwrap_err();
        assert!(format!("{error:?}").starts_with(why), "{error:?}");
    }
    assert_eq!(w.commands(), commands);
}

/// A leader leads to the end of its lease without its store, then follows, and leads when the store is back.
pub(crate) async fn an_outage_is_waited_out(w: &dyn World) {
    let registry = w.registry().await;
    let mut campaign = seat(&registry).leadership();
    let first = lease(campaign.next().await);
    w.set_offline(true);
    let begin = Instant::now();
    assert!(timeout(ms(300), campaign.next()).await.is_err());
    assert!(first.is_valid(), "lost without need");
    assert!(follows(&campaign.next().await.unwrap()));
    assert!(begin.elapsed() <= SEAT + w.late());
    assert!(timeout(ms(1000), campaign.next()).await.is_err());
    // One that begins during an outage follows, too.
    let mut other = registry.obtain("other").leadership();
    assert!(follows(&other.next().await.unwrap()));
    assert!(timeout(ms(1000), other.next()).await.is_err());
    w.set_offline(false);
    // After a pause of the campaign and one of the connection.
    let soon = if w.is_paused() { BOUND } else { PATIENCE };
    let again = timeout(soon, campaign.next()).await.unwrap();
    assert!(lease(again).token() > first.token());
    lease(timeout(soon, other.next()).await.unwrap());
}

/// What fails at once is not asked again at once.
pub(crate) async fn a_full_queue_is_waited_out(w: &dyn World) {
    let registry = w.builder().await.max_waiters(1).build().unwrap();
    let held = seat(&registry).renewal(Renewal::watchdog()).lease().await;
    let held = held.unwrap();
    let in_line = registry.obtain("k");
    let mut in_line = in_line.acquire();
    assert!(poll_once(&mut in_line).await.is_none());
    let polls = Cell::new(0);
    let mut campaign = seat(&registry).leadership();
    assert!(follows(&campaign.next().await.unwrap()));
    let counted = futures::stream::poll_fn(|cx| {
        polls.set(polls.get() + 1);
        campaign.poll_next_unpin(cx)
    });
    let mut counted = Box::pin(counted);
    let told = timeout(ms(2000), counted.next()).await;
    assert!(told.is_err(), "{told:?}");
    assert!((2..30).contains(&polls.get()), "{} polls", polls.get());
    drop(in_line);
    let begin = Instant::now();
    sleep(ms(1)).await;
    held.release().await.unwrap();
    lease(counted.next().await);
    assert!(begin.elapsed() <= ms(5000) + w.late());
}

/// A leader that does not look leads on; a follower that does not look is passed over.
pub(crate) async fn a_campaign_that_is_not_polled(w: &dyn World) {
    let [here, there] = w.registries().await;
    let mut campaign = seat(&here).leadership();
    let term = lease(campaign.next().await);
    let mut asleep = seat(&there).leadership();
    assert!(follows(&asleep.next().await.unwrap()));
    assert!(poll_once(&mut asleep.next()).await.is_none());
    sleep(LONGER).await;
    assert!(term.is_valid());
    assert!(poll_once(&mut campaign.next()).await.is_none());
    assert!(!there.obtain("k").acquire_once().await.unwrap());

    // Its view is told of the loss, and the campaign knows when it is asked.
    w.expire("k");
    assert!(term.lost().await.is_lost());
    sleep(ms(500)).await;
    assert!(follows(&campaign.next().await.unwrap()));
    let again = timeout(SOON, campaign.next()).await.unwrap();
    assert!(lease(again).token() > term.token());

    let next = seat(&here);
    assert!(poll_once(&mut asleep.next()).await.is_none());
    waiting(&next, 1).await;
    drop(campaign);
    // A busy machine may look when it is over.
    eventually("it is its turn, or was", async || {
        let seen = next.inspect().await.unwrap();
        seen.waiting == 0 && (seen.owner().is_some() || !w.is_paused())
    })
    .await;
    // For a third of its ttl.
    let begin = Instant::now();
    assert!(next.acquire().await.unwrap());
    assert!(begin.elapsed() <= SEAT / 3 + w.late());
    assert!(next.release().await.unwrap());
    lease(asleep.next().await);
}

pub(crate) async fn work_runs_only_while_leading(w: &dyn World) {
    let [here, there] = w.registries().await;
    let lock = seat(&here);
    let guard = Arc::new(());
    let terms = RefCell::new(Vec::<LeaseView>::new());
    let held = there.obtain("k").lease().await.unwrap();
    let mut work = Box::pin(lock.lead(|lease| {
        let inside = guard.clone();
        let alive = Arc::strong_count(&guard);
        assert_eq!(alive, 2, "the work of an earlier term is alive");
        terms.borrow_mut().push(lease);
        let term = terms.borrow().len();
        async move {
            let _inside = inside;
            if term < 3 {
                pending::<()>().await;
            }
            "value"
        }
    }));
    assert!(timeout(ms(300), &mut work).await.is_err());
    assert!(terms.borrow().is_empty(), "begun while another led");
    held.release().await.unwrap();
    for term in 1..3 {
        // Longer than its ttl, for it is renewed.
        assert!(timeout(LONGER, &mut work).await.is_err());
        assert_eq!(terms.borrow().len(), term);
        assert_eq!(Arc::strong_count(&guard), 2, "it does not run");
        w.expire("k");
        // Another leads, and the work is gone.
        let other = there.obtain("k");
        assert!(other.acquire_once().await.unwrap());
        assert!(timeout(SEAT / 3 + w.late(), &mut work).await.is_err());
        assert_eq!(Arc::strong_count(&guard), 1, "it ran on");
        assert!(other.release().await.unwrap());
    }
    assert_eq!((&mut work).await.unwrap(), "value");
    assert!(!is_held(&lock).await, "the value came before the release");
    let terms = terms.borrow();
    assert_eq!(terms.len(), 3);
    assert!(
        terms
            .iter()
            .map(LeaseView::token)
            .is_sorted_by(|a, b| a < b)
    );
}

/// A value that came when the lead was over is none, be that known by the clock or by the release.
pub(crate) async fn work_done_when_the_lead_is_over_begins_anew(w: &dyn World) {
    let registry = w.registry().await;
    let fixed = registry.obtain("k").ttl(SEAT).renewal(Renewal::off());
    let mut terms = 0;
    let value = fixed.lead(|lease| {
        terms += 1;
        let term = terms;
        async move {
            match term {
                1 => {
                    // The clock moves within this poll, so no timer comes in between; and the store counts the
                    // lease as ours for some ms more. One that was long in coming was renewed once (W3).
                    if w.is_paused() {
                        let until = SEAT - ms(10);
                        let _ = poll_once(&mut Box::pin(tokio::time::advance(until))).await;
                    } else {
                        let begin = Instant::now();
                        while lease.is_valid() {
                            assert!(begin.elapsed() < BOUND, "it does not end");
                            std::thread::sleep(ms(1));
                        }
                    }
                }
                2 => {
                    assert!(lease.is_valid());
                    w.expire("k");
                }
                _ => {}
            }
            term
        }
    });
    assert_eq!(value.await.unwrap(), 3);
    assert_eq!(terms, 3);
}

/// Dropped in the queue and under way it leaves nothing, and its work is gone before the key is free.
pub(crate) async fn work_dropped_under_the_lead_resigns(w: &dyn World) {
    struct Told<'a>(LeaseView, &'a Cell<bool>);
    impl Drop for Told<'_> {
        fn drop(&mut self) {
            self.1.set(self.0.is_valid());
        }
    }
    let [here, there] = w.registries().await;
    let held = there.obtain("k").lease().await.unwrap();
    let lock = seat(&here);
    let mut work = Box::pin(lock.lead(async |_| pending::<()>().await));
    assert!(timeout(ms(300), &mut work).await.is_err());
    waiting(&there.obtain("k"), 1).await;
    drop(work);
    waiting(&there.obtain("k"), 0).await;
    held.release().await.unwrap();

    let (inside, valid) = (Cell::new(false), Cell::new(false));
    let work = lock.lead(|lease| {
        let (inside, valid) = (&inside, &valid);
        async move {
            let _told = Told(lease, valid);
            inside.set(true);
            pending::<()>().await;
        }
    });
    poll_until(work, || inside.get()).await;
    assert!(valid.get(), "the lead was given up before the work");
    let begin = Instant::now();
    assert!(there.obtain("k").acquire().await.unwrap());
    assert_took(begin, ms(0), w.late());
}

/// Polls a future that does not end until a condition holds.
async fn poll_until(future: impl Future, condition: impl Fn() -> bool) {
    let holds = async {
        while !condition() {
            tokio::time::sleep(ms(1)).await;
        }
    };
    tokio::select! {
        _ = future => panic!("it ended"),
        () = holds => {}
    }
}

/// At a shutdown the work is dropped, and the reason yielded.
pub(crate) async fn a_shutdown_ends_what_leads(w: &dyn World) {
    let registry = w.registry().await;
    let guard = Arc::new(());
    let lock = registry.obtain("k");
    let mut work = Box::pin(lock.lead(|_| {
        let inside = guard.clone();
        async move {
            let _inside = inside;
            pending::<()>().await;
        }
    }));
    poll_until(&mut work, || Arc::strong_count(&guard) == 2).await;
    registry.shutdown().await;
    assert_err!((&mut work).await, Closed, "k");
    assert_eq!(Arc::strong_count(&guard), 1);
}
