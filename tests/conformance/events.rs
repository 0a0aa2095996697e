//! What a registry tells of itself: events, and snapshots. That they are in order and complete is looked at after every
//! case of this suite; see `watch.rs`.

use futures::StreamExt;
use futures::future::join_all;
use futures::stream::FusedStream;
use lockstream::{FutureLockExt, LockEvent, Renewal, Token};
use tokio::time::{Instant, sleep};

use crate::scenarios;
use crate::watch::{
    assert_in_order_and_complete, assert_names, assert_time, may_be_late_renewal, name, time_of,
    told_so_far, told_until,
};
use crate::world::{World, eventually, free, idle, ms, poll_once, waiting};

/// The keys and tokens of events.
fn about(told: &[LockEvent]) -> Vec<(Option<&str>, Option<Token>)> {
    told.iter()
        .map(|event| (event.key(), event.token()))
        .collect()
}

fn waiter(event: &LockEvent) -> u64 {
    match event {
        LockEvent::Waiting { waiter, .. }
        | LockEvent::Acquired { waiter, .. }
        | LockEvent::GaveUp { waiter, .. }
        | LockEvent::QueueFull { waiter, .. } => *waiter,
        other => panic!("{other:?} tells of no waiter"),
    }
}

pub(crate) async fn a_lease_is_told_from_its_wait_to_its_end(w: &dyn World) {
    let registry = w.registry().await;
    let mut events = registry.events();
    let lease = registry.obtain("k").lease().await.unwrap();
    sleep(ms(300)).await;
    let token = lease.token();
    lease.release().await.unwrap();
    let told = told_so_far(&mut events).await;
    assert_names(&told, &["waiting", "acquired", "released"]);
    let k = Some("k");
    assert_eq!(
        about(&told),
        [(k, None), (k, Some(token)), (k, Some(token))]
    );
    assert_eq!(waiter(&told[0]), waiter(&told[1]));
    assert_time(&told[1], ms(0), w.late());
    assert_time(told.last().unwrap(), ms(300), w.late());

    // Who does not ask before hears nothing of it.
    let mut late = registry.events();
    assert_names(&told_so_far(&mut late).await, &[]);
    assert!(async {}.with_lock((&registry, "k")).await.is_ok());
    for events in [&mut events, &mut late] {
        let told = told_so_far(events).await;
        assert_names(&told, &["waiting", "acquired", "released"]);
        assert!(told[1].token() > Some(token));
    }
}

/// Its time over, dropped half-way, or refused at once: each wait is told with its time, and ends once.
pub(crate) async fn waits_that_end_with_nothing_are_told(w: &dyn World) {
    let [here, there] = w.registries().await;
    let held = there.obtain("k").lease().await.unwrap();
    let mut events = here.events();
    let lock = here.obtain("k");
    assert!(!lock.acquire_within(ms(200)).await.unwrap());
    assert!(!lock.acquire_once().await.unwrap());
    let mut dropped = lock.acquire();
    assert!(poll_once(&mut dropped).await.is_none());
    sleep(ms(100)).await;
    drop(dropped);
    drop(lock.acquire());
    let told = told_so_far(&mut events).await;
    let twice = ["waiting", "gave up"];
    assert_names(&told, &[twice, twice, twice].concat());
    for (event, expected) in [(&told[1], 200), (&told[3], 0), (&told[5], 100)] {
        assert_time(event, ms(expected), w.late());
    }

    // And one that ends well.
    let acquire = lock.acquire();
    let (acquired, ()) = tokio::join!(acquire, async {
        sleep(ms(150)).await;
        held.release().await.unwrap();
    });
    assert!(acquired.unwrap());
    let told = told_so_far(&mut events).await;
    assert_names(&told, &["waiting", "acquired"]);
    assert_time(&told[1], ms(150), w.late());
    assert!(lock.release().await.unwrap());
}

/// W4: a turn that is not taken is given on. Its waiter is waiting still, and is not told to begin once more.
pub(crate) async fn a_turn_lost_does_not_end_a_wait(w: &dyn World) {
    let [holder, sleeper] = w.registries().await;
    let mut events = sleeper.events();
    let lock = sleeper.obtain("k").ttl(ms(600));
    let begin = Instant::now();
    let mut last_began = begin;
    let mut unpolled = Vec::new();
    // The last is granted its turn before its wait is over.
    let brief = 3000;
    for wait in [5000, 5000, brief] {
        let held = holder.obtain("k").lease().await.unwrap();
        let mut acquire = lock.clone().acquire_within(ms(wait));
        assert!(poll_once(&mut acquire).await.is_none());
        last_began = Instant::now();
        waiting(&lock, 1).await;
        held.release().await.unwrap();
        // Seated, and after a third of its ttl not any more.
        free(&lock).await;
        unpolled.push(acquire);
    }
    assert_names(&told_so_far(&mut events).await, &["waiting"; 3]);
    let [again, dropped, over] = <[_; 3]>::try_from(unpolled).expect("three");
    drop(dropped);
    assert!(again.await.unwrap());
    let waited = begin.elapsed();
    tokio::time::sleep_until(last_began + ms(brief + 1)).await;
    assert!(!over.await.unwrap());
    let told = told_so_far(&mut events).await;
    let by_name = |wanted| told.iter().find(|event| name(event) == wanted).unwrap();
    let acquired = by_name("acquired");
    assert!(
        time_of(acquired) >= ms(600) && time_of(acquired) <= waited + ms(1),
        "{acquired:?}"
    );
    let ends: Vec<_> = told
        .iter()
        .filter(|event| name(event) == "gave up")
        .collect();
    assert_eq!(ends.len(), 2, "{told:?}");
    assert!(
        told.iter().all(|event| name(event) != "waiting"),
        "{told:?}"
    );
}

pub(crate) async fn passes_are_told(w: &dyn World) {
    let registry = w.builder().await.local_span(ms(8000)).build().unwrap();
    let first = registry.obtain("k").lease().await.unwrap();
    let mut events = registry.events();
    let lock = registry.obtain("k");
    let mut next = [lock.clone().lease(), lock.lease()];
    for next in &mut next {
        assert!(poll_once(next).await.is_none());
    }
    first.release().await.unwrap();
    for next in next {
        next.await.unwrap().release().await.unwrap();
    }
    let told = but_late_renewals(w, told_so_far(&mut events).await);
    let expected = "waiting waiting released passed acquired released passed acquired released";
    assert_names(&told, &expected.split(' ').collect::<Vec<_>>());
    // Not from the leases: where a token may fence, one that was seen is not passed on.
    let tokens: Vec<_> = told[2..]
        .iter()
        .filter_map(LockEvent::token)
        .map(u64::from)
        .collect();
    let first = tokens[0];
    assert_eq!(first % 64, 0);
    let later = [0, 1, 1, 1, 2, 2, 2].map(|passes| first + passes);
    assert_eq!(tokens, later);
}

pub(crate) async fn renewals_are_told_and_the_last_is(w: &dyn World) {
    let registry = w.registry().await;
    let twice = Renewal::watchdog().max_renewals(2);
    let lock = registry.obtain("k").ttl(ms(3000)).renewal(twice);
    let (mut events, lease) = loop {
        let events = registry.events();
        let lease = lock.lease().await.unwrap();
        // One of which less than half is left is renewed at once, and that is told, too (W3).
        if lease.deadline() - Instant::now() > ms(2000) {
            break (events, lease);
        }
        let _ = lease.release().await;
        idle(&registry).await;
    };
    let mut deadlines = vec![lease.deadline()];
    assert!(lease.lost().await.is_lost());
    let told = told_until(&mut events, "lost").await;
    let expected = [
        "waiting",
        "acquired",
        "renewed",
        "renewed",
        "last renewal",
        "lost",
    ];
    assert_names(&told, &expected);
    assert!(
        told[1..]
            .iter()
            .all(|event| event.token() == Some(lease.token()))
    );
    for event in &told {
        if let LockEvent::Renewed { deadline, .. } = event {
            deadlines.push(*deadline);
        }
    }
    // Each a third of the ttl later.
    for pair in deadlines.windows(2) {
        let later = pair[1] - pair[0];
        assert!(
            later >= ms(999) && later <= ms(1001) + w.late(),
            "{later:?}"
        );
    }
    let last = told.iter().find_map(|event| match event {
        LockEvent::LastRenewal { deadline, .. } => Some(*deadline),
        _ => None,
    });
    assert_eq!(last, deadlines.last().copied());
    assert_time(&told[5], ms(2000 + 2968) - time_of(&told[1]), w.late());
}

/// The answer to a renewal is lost on its way: that changes nothing, and is told.
pub(crate) async fn a_renewal_without_an_answer_is_told(w: &dyn World) {
    let registry = w.registry().await;
    let lock = registry.obtain("k").ttl(ms(7500));
    let lease = lock.renewal(Renewal::watchdog()).lease().await.unwrap();
    let begin = Instant::now();
    let mut events = registry.events();
    w.set_latency(ms(3000));
    // It goes out after 2,500 ms, and its answer would come after 5,500 ms.
    tokio::time::sleep_until(begin + ms(4000)).await;
    w.set_offline(true);
    let told = told_until(&mut events, "renewal unknown").await;
    assert_eq!(told.last().unwrap().token(), Some(lease.token()));
    w.set_latency(ms(0));
    w.set_offline(false);
    let watch = registry.obtain("k");
    eventually("the store is back", async || watch.inspect().await.is_ok()).await;
    told_until(&mut events, "renewed").await;
    assert!(lease.is_valid());
    lease.release().await.unwrap();
    assert_names(&told_so_far(&mut events).await, &["released"]);
}

/// Where time is virtual, no grant is late.
fn but_late_renewals(w: &dyn World, mut told: Vec<LockEvent>) -> Vec<LockEvent> {
    told.retain(|event| w.is_paused() || !may_be_late_renewal(name(event)));
    told
}

/// By its deadline, which counts from the question to the store and not from its answer, by what the release found, and by
/// what could not be told in time.
pub(crate) async fn the_ways_to_lose_a_lease_are_told_apart(w: &dyn World) {
    let registry = w.registry().await;
    let mut events = registry.events();
    let lock = registry.obtain("k").ttl(ms(1500)).renewal(Renewal::off());
    let lost = std::future::pending::<()>().with_lock(&lock).await;
    assert!(lost.unwrap_err().is_lost());
    let told = but_late_renewals(w, told_so_far(&mut events).await);
    assert_names(&told, &["waiting", "acquired", "lost"]);
    let held = ms(1483).saturating_sub(time_of(&told[1]));
    assert_time(&told[2], held, w.late());

    free(&lock).await;
    // These end long before their deadline.
    let lock = lock.ttl(ms(3000));
    let lease = lock.lease().await.unwrap();
    sleep(ms(100)).await;
    w.expire("k");
    assert!(lease.release().await.unwrap_err().is_lost());
    let told = but_late_renewals(w, told_so_far(&mut events).await);
    assert_names(&told, &["waiting", "acquired", "lost"]);
    assert_time(&told[2], ms(100), w.late());

    let lease = lock.lease().await.unwrap();
    w.set_offline(true);
    sleep(ms(100)).await;
    lease.release().await.unwrap_err();
    let told = but_late_renewals(w, told_so_far(&mut events).await);
    assert_names(&told, &["waiting", "acquired", "store down", "unreleased"]);
    assert_time(&told[3], ms(100), w.late());
    w.set_offline(false);
}

pub(crate) async fn a_full_queue_is_told(w: &dyn World) {
    let holder = w.registry().await;
    let registry = w.builder().await.max_waiters(1).build().unwrap();
    let _held = holder.obtain("k").lease().await.unwrap();
    let mut events = registry.events();
    let lock = registry.obtain("k");
    let mut first = lock.lease();
    assert!(poll_once(&mut first).await.is_none());
    crate::assert_err!(lock.acquire().await, QueueFull, "k");
    drop(first);
    let told = told_so_far(&mut events).await;
    let told: Vec<_> = told
        .into_iter()
        .filter(|event| name(event) != "store up")
        .collect();
    assert_names(&told, &["waiting", "waiting", "queue full", "gave up"]);
    assert!(matches!(told[2], LockEvent::QueueFull { limit: 1, .. }));
    assert_eq!(waiter(&told[2]), waiter(&told[1]));
    assert_eq!(waiter(&told[3]), waiter(&told[0]));
}

pub(crate) async fn a_handle_dropped_while_it_holds_is_told(w: &dyn World) {
    let registry = w.registry().await;
    let mut events = registry.events();
    let lock = registry.obtain("k");
    assert!(lock.acquire().await.unwrap());
    drop(lock);
    let told = told_until(&mut events, "released").await;
    let expected = ["waiting", "acquired", "dropped while held", "released"];
    assert_names(&told, &expected);
    assert_eq!(told[2].token(), told[1].token());
    // Not for one that holds nothing, nor for a guard.
    let lock = registry.obtain("k");
    drop(lock.lease().await.unwrap());
    drop(lock);
    let told = told_until(&mut events, "released").await;
    assert_names(&told, &["waiting", "acquired", "released"]);
}

/// Once an outage, however often it is tried again, and however many ask meanwhile.
pub(crate) async fn an_outage_is_told_once(w: &dyn World) {
    let registry = w.registry().await;
    let mut events = registry.events();
    let lock = registry.obtain("k");
    for _ in 0..2 {
        w.set_offline(true);
        for _ in 0..3 {
            crate::assert_err!(lock.acquire_within(ms(150)).await, Store, "k");
        }
        w.set_offline(false);
        eventually("the store is back", async || lock.inspect().await.is_ok()).await;
        let told = told_until(&mut events, "store up").await;
        let mut names: Vec<_> = told.iter().map(name).collect();
        names.retain(|name| name.starts_with("store"));
        assert_eq!(names, ["store down", "store up"]);
        let down = told.iter().find_map(|event| match event {
            LockEvent::StoreDown { error, .. } => Some(error.to_string()),
            _ => None,
        });
        assert_ne!(down.unwrap(), "");
    }
}

/// Waiters and leases end, then the stream does: what comes after that is told to nobody.
pub(crate) async fn a_shutdown_is_told_and_ends_it(w: &dyn World) {
    let [here, there] = w.registries().await;
    let _held = there.obtain("other").lease().await.unwrap();
    let mut events = here.events();
    let lease = here.obtain("k").lease().await.unwrap();
    let mut in_line = here.obtain("other").acquire();
    assert!(poll_once(&mut in_line).await.is_none());
    sleep(ms(200)).await;
    here.shutdown().await;
    let told = but_late_renewals(w, told_so_far(&mut events).await);
    assert!(events.is_terminated());
    assert_eq!(told.len(), 5, "{told:?}");
    assert_names(&told[..3], &["waiting", "acquired", "waiting"]);
    let of = |wanted| told.iter().find(|event| name(event) == wanted);
    let (closed, gave_up) = (of("closed").unwrap(), of("gave up").unwrap());
    assert_eq!(closed.token(), Some(lease.token()));
    assert_eq!(waiter(gave_up), waiter(&told[2]));
    for event in [closed, gave_up] {
        assert_time(event, ms(200), w.late());
    }
    crate::assert_err!(in_line.await, Closed, "other");
    crate::assert_err!(here.obtain("k").acquire().await, Closed, "k");
    assert!(events.next().await.is_none());
    assert!(here.events().next().await.is_none());
}

/// A shutdown that was begun goes on when nobody awaits it, and so the stream ends, too.
pub(crate) async fn a_shutdown_that_nobody_awaits_ends_it(w: &dyn World) {
    let registry = w.registry().await;
    let mut events = registry.events();
    let lease = registry.obtain("k").lease().await.unwrap();
    // For longer than it takes to look.
    w.set_latency(ms(1000));
    assert!(poll_once(&mut registry.shutdown()).await.is_none());
    assert_names(
        &told_so_far(&mut events).await,
        &["waiting", "acquired", "closed"],
    );
    // What it still owes is not yet settled.
    assert!(!events.is_terminated());
    let end = tokio::time::timeout(ms(5000), events.next()).await;
    assert!(end.expect("it does not end").is_none());
    assert_eq!(registry.in_use(), 0);
    assert!(!lease.is_valid());
    w.set_latency(ms(0));
}

/// A reader keeps no registry at work: when the last handle has gone it hears the end of what is under way, and then
/// that it was all.
pub(crate) async fn events_end_with_their_registry(w: &dyn World) {
    let registry = w.registry().await;
    let mut events = registry.events();
    let lease = registry.obtain("k").lease().await.unwrap();
    let reads = tokio::spawn(async move {
        let told: Vec<_> = events.by_ref().collect().await;
        (told, events)
    });
    drop(registry);
    tokio::task::yield_now().await;
    drop(lease);
    let (told, mut events) = tokio::time::timeout(ms(5000), reads)
        .await
        .unwrap()
        .unwrap();
    assert_names(&told, &["waiting", "acquired", "released"]);
    assert!(events.is_terminated() && events.next().await.is_none());
}

/// Each reader goes its own way: one that does not come is told how many events it has missed, and gets the last 1,024.
pub(crate) async fn a_slow_reader_is_told_how_many_it_missed(w: &dyn World) {
    const PAIRS: usize = 400;
    let registry = w.registry().await;
    let (mut slow, mut fast) = (registry.events(), registry.events());
    let gone = registry.events();
    let mut read = 0;
    for _ in 0..PAIRS {
        async {}.with_lock((&registry, "k")).await.unwrap();
        read += told_so_far(&mut fast).await.len();
    }
    assert_eq!(read, 3 * PAIRS);
    drop(gone);
    let first = slow.next().await.unwrap();
    assert!(
        matches!(first, LockEvent::Missed { count, .. } if count == 3 * PAIRS as u64 - 1024),
        "{first:?}"
    );
    assert_eq!((first.key(), first.token()), (None, None));
    let told = told_so_far(&mut slow).await;
    assert_eq!(told.len(), 1024);
    // 176 events are 58 leases and 2 more.
    assert_names(&told[..4], &["released", "waiting", "acquired", "released"]);
    // It has caught up.
    async {}.with_lock((&registry, "k")).await.unwrap();
    let told = told_so_far(&mut slow).await;
    assert_names(&told, &["waiting", "acquired", "released"]);
}

/// Thirty tasks on all threads of the runtime, and a reader that is woken for what comes: it misses nothing, and nothing
/// is out of order.
pub(crate) async fn a_reader_is_woken_for_everything_in_order(w: &dyn World) {
    let registry = w.registry().await;
    let began = Instant::now();
    let reads = tokio::spawn(registry.events().collect::<Vec<_>>());
    let tasks = (0..30).map(|n: usize| {
        let lock = registry.obtain(["a", "b", "c"][n % 3]);
        tokio::spawn(async move {
            for _ in 0..5 {
                async {}.with_lock(&lock).await.unwrap();
                tokio::task::yield_now().await;
            }
        })
    });
    for task in join_all(tasks).await {
        task.unwrap();
    }
    drop(registry);
    let told = tokio::time::timeout(ms(5000), reads)
        .await
        .unwrap()
        .unwrap();
    assert_in_order_and_complete(&told, began.elapsed());
    let acquired = told.iter().filter(|event| name(event) == "acquired");
    assert_eq!(acquired.count(), 150);
}

pub(crate) async fn a_snapshot_shows_what_is_held_and_waited_for(w: &dyn World) {
    let [here, there] = w.registries().await;
    assert!(here.snapshot().keys.is_empty());
    let began = Instant::now();
    let lease = here.obtain("b").lease().await.unwrap();
    let _theirs = there.obtain("a").lease().await.unwrap();
    sleep(ms(100)).await;
    let lock = here.obtain("a");
    let mut waits = [lock.clone().lease(), here.obtain("b").lease(), lock.lease()];
    for wait in &mut waits {
        assert!(poll_once(wait).await.is_none());
        sleep(ms(50)).await;
    }
    let snapshot = here.snapshot();
    let [a, b] = &snapshot.keys[..] else {
        panic!("{snapshot:?}");
    };
    assert_eq!((&*a.key, &*b.key), ("a", "b"));
    assert!(a.held.is_empty(), "it is another's");
    let held = &b.held[0];
    assert_eq!(held.token, lease.token());
    assert_eq!(held.deadline, lease.deadline());
    let since = |since: Instant, after: u64| {
        let late = since.duration_since(began);
        assert!(
            late + ms(2) >= ms(after) && late <= ms(after) + w.late(),
            "{late:?}"
        );
    };
    since(held.since, 0);
    assert_eq!((a.waiting.len(), b.waiting.len()), (2, 1));
    since(a.waiting[0].since, 100);
    since(b.waiting[0].since, 150);
    since(a.waiting[1].since, 200);
    assert!(held.waiter < a.waiting[0].waiter && a.waiting[0].waiter < a.waiting[1].waiter);

    drop(waits);
    lease.release().await.unwrap();
    idle(&here).await;
    assert!(here.snapshot().keys.is_empty());
}

/// What all processes told, but for the store.
async fn told_by_all(w: &dyn World) -> Vec<Vec<LockEvent>> {
    let mut all = w.watch().all().await;
    for told in &mut all {
        told.retain(|event| name(event) != "store up");
    }
    all
}

pub(crate) async fn of_five_that_ask_once(w: &dyn World) {
    scenarios::of_five_that_ask_once_one_gets_it(w).await;
    let mut all = told_by_all(w).await;
    all.sort_by_key(Vec::len);
    let (winner, losers) = all.split_last().unwrap();
    assert_names(winner, &["waiting", "acquired", "released"]);
    assert_eq!(losers.len(), 4);
    for loser in losers {
        assert_names(loser, &["waiting", "gave up"]);
        assert_time(&loser[1], ms(0), w.late());
    }
}

pub(crate) async fn three_that_wait(w: &dyn World) {
    scenarios::three_that_wait_take_turns(w).await;
    let mut all = told_by_all(w).await;
    for told in &all {
        assert_names(told, &["waiting", "acquired", "released"]);
        assert_time(told.last().unwrap(), ms(2000), w.late());
    }
    all.sort_by_key(|told| time_of(&told[1]));
    for (turn, told) in (0..).zip(&all) {
        assert_time(&told[1], turn * ms(2000), (turn + 1) * w.late());
    }
    assert!(
        all.windows(2)
            .all(|pair| pair[0][1].token() < pair[1][1].token())
    );
}

pub(crate) async fn three_of_which_one_waits_too_short(w: &dyn World) {
    scenarios::of_three_that_wait_too_short_one_is_refused(w).await;
    let mut all = told_by_all(w).await;
    all.sort_by_key(|told| time_of(&told[1]));
    let [first, second, refused] = &all[..] else {
        panic!("{all:?}");
    };
    for (told, waited) in [(first, 0), (second, 3000)] {
        assert_names(told, &["waiting", "acquired", "released"]);
        assert_time(&told[1], ms(waited), 2 * w.late());
    }
    assert_names(refused, &["waiting", "gave up"]);
    assert_time(&refused[1], ms(5200), w.late());
}
