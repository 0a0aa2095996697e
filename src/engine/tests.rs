//! What only the engine can get wrong: clocks, runtimes, and who is kept alive.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use futures::task::ArcWake;
use tokio::time::Instant;

use super::caller::Caller;
use super::failure::CallerHandle;
use crate::base::clock::SUSPENSION_TICK;
use crate::base::{Clock, LockError, LossCause, Mode, OnFinish, Renewal, Repeat, StoreError};
use crate::combinator::FutureLockExt;
use crate::handle::LockRegistry;
use crate::store::MemoryStore;
use crate::store::contract::{
    Answer, Grant, KeyScope, KeyStatus, Op, OpError, OpResult, Outcome, Owner, Session,
    SessionConfig, StoreEvent, StoreEvents, SubmittedOp,
};
use crate::turnstile::Waiter;
#[cfg(feature = "test-util")]
use {crate::observe::LockEvent, futures::StreamExt};

mod lost_ops;
mod models;
mod runtimes;
mod told;

/// A machine that can be told that it was suspended.
#[derive(Clone, Default)]
struct Machine(Arc<AtomicU64>);

impl Machine {
    fn suspend(&self, time: Duration) {
        let millis = u64::try_from(time.as_millis()).expect("a short test");
        self.0.fetch_add(millis, Ordering::Relaxed);
    }

    fn clock(&self) -> Clock {
        let millis = self.0.clone();
        Clock::new(move || Duration::from_millis(millis.load(Ordering::Relaxed)))
    }
}

/// Both kinds of leases: what D3 says holds for either.
const KINDS: [Renewal; 2] = [Renewal::off(), Renewal::watchdog()];

fn suspendable(renewal: Renewal) -> (LockRegistry, Machine) {
    let machine = Machine::default();
    let locks = LockRegistry::builder(MemoryStore::new())
        .renewal(renewal)
        .clock(machine.clock())
        .build()
        .unwrap();
    (locks, machine)
}

/// D3: a laptop is closed for a minute while a job holds a lease of 30 s. Its own timers know
/// nothing of that minute, but the server's ttl is over: without the rule the job would work on
/// beside its successor for up to 30 s.
#[tokio::test(start_paused = true)]
async fn d3_a_lease_is_lost_within_a_second_of_waking_from_a_suspension() {
    for renewal in KINDS {
        let (locks, machine) = suspendable(renewal);
        let lease = locks.obtain("job").lease().await.expect("it is free");
        // Asleep when the machine is: without the tick nothing would wake it.
        let lost = tokio::spawn(lease.lost());
        let work = std::future::pending::<()>().with_lock(locks.obtain("work"));
        let work = tokio::spawn(work);
        tokio::time::sleep(Duration::from_millis(300)).await;
        machine.suspend(Duration::from_secs(60));
        assert!(!lease.is_valid(), "who looks knows at once");
        let woken = Instant::now();
        assert!(lost.await.expect("it ends").is_lost());
        let told = work.await.expect("it ends");
        assert!(matches!(told, Err(LockError::Lost { .. })));
        assert!(woken.elapsed() <= Duration::from_secs(1), "{renewal:?}");
    }
}

/// D3: the work is not polled once more after the suspension, not even before the timer ticks.
#[tokio::test(start_paused = true)]
async fn d3_work_is_not_polled_after_a_suspension_past_its_deadline() {
    for renewal in KINDS {
        let (locks, machine) = suspendable(renewal);
        let polls = Arc::new(AtomicU64::new(0));
        let work = std::future::poll_fn({
            let polls = polls.clone();
            move |_| {
                polls.fetch_add(1, Ordering::Relaxed);
                std::task::Poll::<()>::Pending
            }
        });
        let mut work = std::pin::pin!(work.with_lock(locks.obtain("job")));
        assert!(futures::poll!(&mut work).is_pending());
        // Held for more than two ttls already, if it is renewed.
        if renewal == Renewal::watchdog() {
            tokio::time::sleep(Duration::from_secs(75)).await;
            assert!(futures::poll!(&mut work).is_pending());
        }
        let before = polls.load(Ordering::Relaxed);
        machine.suspend(Duration::from_secs(60));
        let outcome = futures::poll!(&mut work);
        assert!(matches!(
            outcome,
            std::task::Poll::Ready(Err(LockError::Lost { .. }))
        ));
        assert_eq!(polls.load(Ordering::Relaxed), before);
    }
}

/// A suspension shorter than the lease moves its deadline earlier by as much, and no more.
#[tokio::test(start_paused = true)]
async fn d3_a_short_suspension_moves_the_deadline_earlier() {
    let (locks, machine) = suspendable(Renewal::off());
    let lease = locks.obtain("job").lease().await.expect("it is free");
    let before = lease.deadline();
    machine.suspend(Duration::from_secs(10));
    assert!(lease.is_valid());
    assert_eq!(before - lease.deadline(), Duration::from_secs(10));
    let begin = Instant::now();
    lease.lost().await;
    assert_eq!(begin.elapsed().as_millis(), 30_000 - 302 - 10_000);
}

/// A suspension shorter than the ttl, but longer than its third: the watchdog is overdue when the machine wakes, and
/// renews at the next tick, not a third of the ttl later. Then all is as if nothing had been.
#[tokio::test(start_paused = true)]
async fn d3_after_a_short_suspension_an_overdue_watchdog_renews_at_once() {
    let (locks, machine) = suspendable(Renewal::watchdog());
    let lease = locks.obtain("job").lease().await.expect("it is free");
    tokio::time::sleep(Duration::from_millis(500)).await;
    machine.suspend(Duration::from_secs(28));
    let woken = Instant::now();
    assert!(lease.is_valid());
    assert_eq!(
        (lease.deadline() - woken).as_millis(),
        30_000 - 302 - 28_500
    );
    tokio::time::sleep(SUSPENSION_TICK).await;
    assert!(lease.deadline() - woken >= Duration::from_millis(30_000 - 302));
    tokio::time::sleep(Duration::from_secs(90)).await;
    assert!(lease.is_valid());
    lease.release().await.expect("it is ours");
    assert_eq!(locks.engine.in_use(), 0);
}

/// The last handle is gone, but its release is still on its way: it must reach the store, and
/// only then everything ends.
#[cfg(feature = "test-util")]
#[tokio::test(start_paused = true)]
async fn leases_left_by_the_last_handle_are_released_and_then_all_tasks_end() {
    let store = MemoryStore::new();
    store.set_latency(Duration::from_millis(100));
    let locks = LockRegistry::builder(store.clone()).build().unwrap();
    let lease = locks.obtain("k").lease().await.expect("it is free");
    drop(locks);
    drop(lease);
    assert_eq!(store.keys(), 1, "the release takes its time");
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(store.keys(), 0);
    let tasks = tokio::runtime::Handle::current()
        .metrics()
        .num_alive_tasks();
    assert_eq!(tasks, 0);
}

/// Somebody adopts, and then does not look for a third of the ttl: it is released, and told as lost. That end of its
/// wait was not told to those who read events: it waited for ever, and the gauge of those that wait never came down.
#[cfg(feature = "test-util")]
#[tokio::test(start_paused = true)]
async fn an_adoption_that_is_not_looked_at_has_given_up() {
    let store = MemoryStore::new();
    let locks = LockRegistry::builder(store.clone()).build().unwrap();
    let lease = locks.obtain("k").lease().await.expect("it is free");
    let detached = lease.detach().unwrap();
    store.set_latency(Duration::from_millis(100));
    let events = locks.every_event();
    let mut adopt = locks.adopt(detached);
    assert!(futures::poll!(&mut adopt).is_pending());
    // It waits, and is seen to, as everybody does who is told of.
    let waits = |locks: &LockRegistry| {
        let keys = locks.snapshot().keys;
        keys.iter().map(|key| key.waiting.len()).sum::<usize>()
    };
    assert_eq!(waits(&locks), 1);
    tokio::time::sleep(Duration::from_secs(11)).await;
    assert!(adopt.await.expect_err("its turn is lost").is_lost());
    assert_eq!((waits(&locks), locks.in_use()), (0, 0));
    locks.shutdown().await;
    let told: Vec<_> = events.iter().collect();
    assert!(
        matches!(
            told[..],
            [
                LockEvent::Waiting { waiter, .. },
                LockEvent::GaveUp { waiter: of, .. }
            ] if waiter == of
        ),
        "{told:?}"
    );
}

/// Released, kept, or left for another process: those who read events are told which.
#[cfg(feature = "test-util")]
#[tokio::test(start_paused = true)]
async fn it_is_told_how_a_holder_has_ended_its_lease() {
    let locks = LockRegistry::in_memory();
    let events = locks.every_event();
    for (key, on_finish) in [
        ("a", OnFinish::LetExpire),
        ("b", OnFinish::KeepFor(Duration::from_secs(60))),
        ("c", OnFinish::Release),
    ] {
        let lock = locks.obtain(key).on_finish(on_finish);
        let lease = lock.lease().await.expect("it is free");
        lease.finish().await.expect("it is ours");
    }
    let lease = locks.obtain("d").lease().await.expect("it is free");
    drop(lease.detach().unwrap());
    locks.shutdown().await;
    let ends = events.iter().filter_map(|event| match event {
        LockEvent::LeftToExpire { .. } => Some("left"),
        LockEvent::Released { .. } => Some("released"),
        LockEvent::Detached { .. } => Some("detached"),
        _ => None,
    });
    assert_eq!(
        ends.collect::<Vec<_>>(),
        ["left", "left", "released", "detached"]
    );
}

/// A store that answers at once costs the registry one change for the call and one for the answer. A third was made only to
/// take a lease that was granted in the same poll.
#[tokio::test(start_paused = true)]
async fn a_lease_that_is_granted_while_its_caller_arrives_is_taken_there() {
    // The clock is read once for each time that the registry is locked.
    let reads = Arc::new(AtomicUsize::new(0));
    let counted = reads.clone();
    let clock = Clock::new(move || {
        counted.fetch_add(1, Ordering::Relaxed);
        Duration::ZERO
    });
    let locks = LockRegistry::builder(MemoryStore::new())
        .clock(clock)
        .build()
        .unwrap();
    for _ in 0..3 {
        reads.store(0, Ordering::Relaxed);
        let lease = locks.obtain("k").lease().now_or_never();
        let lease = lease.expect("the store answers at once").unwrap();
        assert_eq!(reads.swap(0, Ordering::Relaxed), 2);
        let released = lease.release().now_or_never();
        released.expect("the store answers at once").unwrap();
        assert_eq!(reads.swap(0, Ordering::Relaxed), 2);
        assert_eq!(locks.engine.in_use(), 0);
    }
}

/// G5: with 100,000 keys the registry was locked until each of them had been told of a new connection, or was over.
#[tokio::test(start_paused = true)]
async fn g5_many_keys_are_fed_in_pieces() {
    const KEYS: usize = 2_500;
    // The clock is read once for each time that the registry is locked.
    let reads = Arc::new(AtomicUsize::new(0));
    let counted = reads.clone();
    let clock = Clock::new(move || {
        counted.fetch_add(1, Ordering::Relaxed);
        Duration::ZERO
    });
    let locks = LockRegistry::builder(MemoryStore::new())
        .renewal(Renewal::off())
        .clock(clock)
        .build()
        .unwrap();
    let leases = (0..KEYS).map(|key| locks.obtain(format!("k{key}")).lease());
    let leases = futures::future::join_all(leases).await;
    let fed = AtomicUsize::new(0);
    reads.store(0, Ordering::Relaxed);
    locks.engine.feed_all(
        |_| (),
        &[&|_, _| {
            fed.fetch_add(1, Ordering::Relaxed);
        }],
    );
    assert_eq!(fed.into_inner(), KEYS);
    let locked = reads.load(Ordering::Relaxed);
    assert!(locked > KEYS / 1000, "locked {locked} times");
    // All of them are over at one moment.
    assert_eq!(locks.engine.in_use(), KEYS);
    tokio::time::sleep(Duration::from_secs(30)).await;
    assert_eq!(locks.engine.in_use(), 0);
    assert!(leases.iter().flatten().all(|lease| !lease.is_valid()));
}

/// A server that stood still at a shutdown goes on when the registry has hung up, and a grant that was on its way is
/// still heard. It was to be released over a line that was no more: the key stayed in use, and kept the registry
/// for good.
#[tokio::test(start_paused = true)]
async fn a_grant_after_the_registry_has_hung_up_keeps_nothing() {
    let locks = LockRegistry::in_memory();
    locks.shutdown().await;
    let engine = locks.engine.clone();
    drop(locks);
    let grant = Grant {
        owner: Owner::exclusive(7),
        ttl: Duration::from_secs(30),
        epoch: 1,
        at: 1,
    };
    let key = "k".into();
    engine.on_event(StoreEvent::Granted { key, grant });
    assert_eq!(engine.in_use(), 0);
    assert_eq!(Arc::strong_count(&engine), 1);
}

/// A time-out is moved to earlier moments alone. It must neither be late where it was earlier meanwhile, nor be left
/// behind for a key that is not in use any more.
#[tokio::test(start_paused = true)]
async fn a_time_out_that_moved_is_served_at_its_own_time_and_leaves_nothing() {
    let locks = LockRegistry::builder(MemoryStore::new())
        .renewal(Renewal::off())
        .build()
        .unwrap();
    let engine = locks.engine.clone();
    let begin = Instant::now();
    let held = locks.obtain("k").lease().await.expect("it is free");
    assert_eq!(engine.state.lock().timeouts.len(), 1);
    // The end of the first wait is the earliest, then that of the second, then the lease's own.
    for wait in [20, 10, 25] {
        let waiter = locks.obtain("k").lease_within(Duration::from_secs(wait));
        let mut waiter = Box::pin(waiter);
        assert!(futures::poll!(&mut waiter).is_pending());
        assert_eq!(engine.state.lock().timeouts.len(), 1);
        if wait == 10 {
            let began = Instant::now();
            assert!(waiter.await.is_err());
            assert_eq!(began.elapsed(), Duration::from_secs(10));
        }
    }
    assert!(held.lost().await.is_lost());
    assert_eq!(begin.elapsed().as_millis(), 30_000 - 302);
    drop(held);
    assert_eq!(
        (engine.in_use(), engine.state.lock().timeouts.len()),
        (0, 0)
    );
    // One that lasts far less than what its caller was ready to wait.
    let short = locks.obtain("s").ttl(Duration::from_millis(500));
    let lease = short.lease_within(Duration::from_secs(60)).await;
    let lease = lease.expect("it is free");
    let begin = Instant::now();
    assert!(lease.lost().await.is_lost());
    assert_eq!(begin.elapsed().as_millis(), 500 - 7);
    assert_eq!(
        (engine.in_use(), engine.state.lock().timeouts.len()),
        (0, 0)
    );
    // The place of a lease was too early, and was moved. A wait that begins after that ends before the lease does.
    let held = locks.obtain("k").lease().await.expect("it is free");
    tokio::time::sleep(Duration::from_secs(2)).await;
    let begin = Instant::now();
    let waiter = locks.obtain("k").lease_within(Duration::from_secs(5));
    assert!(waiter.await.is_err());
    assert_eq!(begin.elapsed(), Duration::from_secs(5));
    drop(held);
    assert_eq!(
        (engine.in_use(), engine.state.lock().timeouts.len()),
        (0, 0)
    );
}

/// A key whose turnstile named a moment that was due, again each time, was fed for ever, with the registry locked.
#[tokio::test(start_paused = true)]
async fn a_timeout_that_is_named_again_for_a_due_moment_is_not_served_twice_in_one_round() {
    let (locks, machine) = suspendable(Renewal::off());
    let engine = locks.engine.clone();
    let _held = locks.obtain("k").lease().await.expect("it is free");
    let mut waiting = Box::pin(locks.obtain("k").lease_within(Duration::from_secs(10)));
    assert!(futures::poll!(&mut waiting).is_pending());
    machine.suspend(Duration::from_secs(20));
    let rounds = engine.at_once(|state, at| {
        let mut fed = 0;
        state.feed_due(at, |turnstile, cx| {
            fed += 1;
            assert_eq!(fed, 1, "fed twice in one round");
            // Its wait is over at once: the turnstile is due again after this.
            let caller = Caller::new("k".into(), Mode::Exclusive, &[]);
            let waiter = Waiter {
                caller: CallerHandle::new(Arc::new(caller)),
                ttl: Duration::from_secs(30),
                renewals: 0,
                adopts: None,
                on_finish: OnFinish::Release,
                is_conditional: false,
                asks_once: false,
                hears_of_others: false,
                until: cx.now,
                answer_by: cx.now,
            };
            turnstile.arrive(cx, Mode::Exclusive, waiter);
        });
        let (first, _) = state.timeouts.first().expect("somebody waits");
        assert!(*first <= at.now, "it is due again");
        fed
    });
    assert_eq!(rounds, Some(1));
    // The next round serves it.
    engine.run_due();
    assert_eq!(engine.snapshot().keys[0].waiting.len(), 0);
}

/// A store that answers when it is told to, to all at once.
#[derive(Clone, Debug, Default)]
pub(in crate::engine) struct Silent {
    asked: Arc<Mutex<Vec<SubmittedOp>>>,
    /// Which server it is at.
    server: Arc<Mutex<Option<Arc<str>>>>,
}

impl Session for Silent {
    fn start(&self) {}

    fn submit(&self, submitted: SubmittedOp) {
        self.asked.lock().unwrap().push(submitted);
    }

    fn identity(&self) -> Option<Arc<str>> {
        self.server.lock().unwrap().clone()
    }

    fn check(&self) -> BoxFuture<'static, Result<crate::base::Check, StoreError>> {
        unreachable!("nobody asks")
    }

    fn ask(&self, _: Arc<str>, _: Op) -> BoxFuture<'static, OpResult> {
        unreachable!("nobody asks")
    }

    fn inspect(&self, _: Arc<str>) -> BoxFuture<'static, Result<KeyStatus, StoreError>> {
        unreachable!("nobody looks")
    }
}

impl crate::store::sealed::Sealed for Silent {}

impl crate::store::LockStore for Silent {
    fn open(&self, _: SessionConfig) -> Arc<dyn Session> {
        Arc::new(self.clone())
    }
}

impl Silent {
    /// What was asked.
    pub(in crate::engine) fn asked(&self) -> Vec<SubmittedOp> {
        std::mem::take(&mut *self.asked.lock().unwrap())
    }

    /// Answers whatever was asked.
    pub(in crate::engine) fn answers(&self) -> Vec<StoreEvent> {
        let answer = |submitted: SubmittedOp| {
            let outcome = match submitted.op {
                Op::Release { .. } | Op::Withdraw { .. } => Outcome::Gone { held: true },
                Op::Renew { .. } => Outcome::Renewed,
                _ if submitted.key.ends_with("busy") => Outcome::Busy {
                    left: None,
                    score: Some(1),
                    entered: false,
                    holder: None,
                },
                _ => Outcome::Won { epoch: 1 },
            };
            let result = Ok(Answer { at: 1, outcome });
            StoreEvent::Replied { submitted, result }
        };
        self.asked().into_iter().map(answer).collect()
    }

    /// The keys that something was asked for, in order, and whether that was a renewal or a ticket.
    fn renewed_and_entered(&self) -> Vec<(String, &'static str)> {
        let word = |op: &Op| match op {
            Op::Renew { .. } => "renew",
            Op::Enter { .. } => "enter",
            _ => "other",
        };
        let asked = self.asked.lock().unwrap();
        let mut words: Vec<_> = asked
            .iter()
            .map(|asked| (asked.key.to_string(), word(&asked.op)))
            .collect();
        words.sort_unstable();
        words
    }
}

/// The keys that begin with this letter.
fn keys(letter: char) -> KeyScope {
    KeyScope::Keys(Arc::new(move |key| key.starts_with(letter)))
}

/// A connection to a part of the store is lost, and another made: that renews and enters what lies there, and meanwhile
/// nothing is asked of it. The others' leases and tickets are left alone. (When they were not, each part that was lost
/// cost all other parts thousands of calls.)
#[tokio::test(start_paused = true)]
async fn o4_an_event_of_some_keys_is_about_no_others() {
    let store = Silent::default();
    let locks = LockRegistry::builder(store.clone()).build().unwrap();
    let engine = locks.engine.clone();
    let mut leases = Vec::new();
    let mut waiters = Vec::new();
    for key in ["a held", "b held", "a busy", "b busy"] {
        let mut lease = Box::pin(locks.obtain(key).lease());
        assert!(futures::poll!(&mut lease).is_pending());
        engine.on_events(store.answers());
        match futures::poll!(&mut lease) {
            Poll::Ready(lease) => leases.push(lease.unwrap()),
            Poll::Pending => waiters.push(lease),
        }
    }
    assert_eq!((leases.len(), waiters.len()), (2, 2));
    let error = StoreError::new("it broke");
    let scope = keys('a');
    engine.on_event(StoreEvent::Down { scope, error });
    // Each third of the ttl, and each 8 to 12 s (W2).
    tokio::time::sleep(Duration::from_secs(13)).await;
    let of = |letter: &str| {
        [
            (format!("{letter} busy"), "enter"),
            (format!("{letter} held"), "renew"),
        ]
    };
    assert_eq!(store.renewed_and_entered(), of("b"));
    engine.on_events(store.answers());
    engine.on_event(StoreEvent::Up {
        scope: keys('a'),
        queue: true,
        complete: true,
    });
    assert_eq!(store.renewed_and_entered(), of("a"));
    engine.on_events(store.answers());
    assert!(leases.iter().all(crate::handle::Lease::is_valid));
}

/// An outage is told once, however many parts of the store it comes to, and its end when all are back.
#[cfg(feature = "test-util")]
#[tokio::test(start_paused = true)]
async fn an_outage_lasts_until_the_whole_store_is_back() {
    let locks = LockRegistry::builder(Silent::default()).build().unwrap();
    let engine = locks.engine.clone();
    let mut events = locks.events();
    let mut told = |event: StoreEvent| {
        engine.on_event(event);
        let mut told = Vec::new();
        while let Some(Some(event)) = events.next().now_or_never() {
            told.push(event);
        }
        let is_up = |event: &LockEvent| match event {
            LockEvent::StoreUp { .. } => true,
            LockEvent::StoreDown { .. } => false,
            other => panic!("{other:?}"),
        };
        told.iter().map(is_up).collect::<Vec<_>>()
    };
    let down = |letter| StoreEvent::Down {
        scope: keys(letter),
        error: StoreError::new("it broke"),
    };
    let up = |letter, complete| StoreEvent::Up {
        scope: keys(letter),
        queue: true,
        complete,
    };
    assert_eq!(told(up('a', true)), [true]);
    for _ in 0..2 {
        assert_eq!(told(down('a')), [false]);
        assert!(told(down('b')).is_empty());
        assert!(told(up('a', false)).is_empty());
        assert!(told(down('a')).is_empty());
        assert!(told(up('a', false)).is_empty());
        assert_eq!(told(up('b', true)), [true]);
        assert!(told(up('a', true)).is_empty());
    }
}

/// Whoever asks for a key of a part that is away is told why it is, and not only that no answer came. Of a part whose
/// connection was closed while nobody used it nothing is known (G2).
#[tokio::test(start_paused = true)]
async fn whoever_asks_a_part_of_the_store_that_is_away_is_told_why() {
    let store = Silent::default();
    let locks = LockRegistry::builder(store.clone()).build().unwrap();
    let engine = locks.engine.clone();
    let mut lease = Box::pin(locks.obtain("a held").lease());
    assert!(futures::poll!(&mut lease).is_pending());
    engine.on_events(store.answers());
    let lease = lease.await.expect("it is free");
    let down = |letter, error: &'static str| {
        let (scope, error) = (keys(letter), StoreError::new(error));
        engine.on_event(StoreEvent::Down { scope, error });
    };
    let told = async |key: &str| {
        let wait = Duration::from_millis(100);
        match locks.obtain(key).lease_within(wait).await {
            Err(LockError::Store { source, .. }) => source.to_string(),
            other => panic!("{key}: {other:?}"),
        }
    };
    down('b', "it was not used");
    assert_eq!(told("b one").await, "no answer in time");
    down('a', "it broke");
    assert_eq!(told("a one").await, "it broke");
    assert_eq!(told("c one").await, "no answer in time");
    let away = engine.away().expect("a part of it is");
    assert_eq!(away.to_string(), "it broke", "the last reason");
    assert!(lease.is_valid());
}

/// The next connection does not have a lease that was held. It leads to another server than the last one, or the key was
/// taken away where it was.
#[tokio::test(start_paused = true)]
async fn a_loss_tells_whether_another_server_answers() {
    for (next, expected) in [
        (Some("one"), LossCause::Taken),
        (Some("two"), LossCause::ServerChanged),
        (None, LossCause::Taken),
    ] {
        let store = Silent::default();
        let locks = LockRegistry::builder(store.clone()).build().unwrap();
        let engine = locks.engine.clone();
        let is_at = |server: Option<&str>| *store.server.lock().unwrap() = server.map(Arc::from);
        is_at(Some("one"));
        engine.on_event(StoreEvent::up(true));
        let mut lease = Box::pin(locks.obtain("k").lease());
        assert!(futures::poll!(&mut lease).is_pending());
        engine.on_events(store.answers());
        let lease = lease.await.expect("it is free");
        engine.on_event(StoreEvent::down(StoreError::new("it broke")));
        is_at(next);
        engine.on_event(StoreEvent::up(true));
        let submitted = store.asked().pop().expect("it is renewed at once");
        assert!(matches!(submitted.op, Op::Renew { .. }), "{submitted:?}");
        let outcome = Outcome::Lost;
        let result = Ok(Answer { at: 1, outcome });
        engine.on_event(StoreEvent::Replied { submitted, result });
        match lease.lost().now_or_never() {
            Some(LockError::Lost { cause, .. }) => assert_eq!(cause, expected, "{next:?}"),
            other => panic!("{next:?}: {other:?}"),
        }
    }
}

/// What the store says of a ticket without being asked: a grant that does not count is given back, or nobody would have
/// the lock until it has run out; and tickets that were left unserved are served (M4).
#[tokio::test(start_paused = true)]
async fn what_the_store_says_of_tickets_is_acted_on() {
    let store = Silent::default();
    let locks = LockRegistry::builder(store.clone()).build().unwrap();
    let engine = locks.engine.clone();
    let mut waiting = Box::pin(locks.obtain("busy").lease());
    assert!(futures::poll!(&mut waiting).is_pending());
    let owner = store.asked.lock().unwrap()[0].op.owner();
    engine.on_events(store.answers());
    let grant = Grant {
        owner,
        ttl: Duration::from_secs(30),
        epoch: 1,
        at: 2,
    };
    let (key, error) = ("busy".into(), StoreError::new("too few have it"));
    engine.on_event(StoreEvent::Unconfirmed { key, grant, error });
    let asked = store.asked();
    assert_eq!(asked.len(), 1, "{asked:?}");
    assert!(matches!(asked[0].op, Op::Withdraw { owner: of, .. } if of == owner));
    assert!(futures::poll!(&mut waiting).is_pending());

    let key = "other".into();
    engine.on_event(StoreEvent::Unserved { key, owner });
    let asked = store.asked();
    assert_eq!(asked.len(), 1, "{asked:?}");
    assert_eq!(
        (&*asked[0].key, &asked[0].op),
        ("other", &Op::Serve { owner })
    );
}

/// A registry with many leases renews each of them for the first time a little earlier, and not all at a third of the ttl.
#[tokio::test(start_paused = true)]
async fn g5_a_registry_renews_many_leases_at_many_moments() {
    const KEYS: usize = 200;
    let store = Silent::default();
    let locks = LockRegistry::builder(store.clone()).build().unwrap();
    let leases = (0..KEYS).map(|key| locks.obtain(format!("k{key}")).lease());
    let mut leases = Box::pin(futures::future::join_all(leases));
    assert!(futures::poll!(&mut leases).is_pending());
    locks.engine.on_events(store.answers());
    let leases = leases.await;
    assert!(leases.iter().all(Result::is_ok));
    let mut renewed = Vec::new();
    for second in 1..=9 {
        tokio::time::sleep(Duration::from_secs(1)).await;
        let asked = store.renewed_and_entered().len();
        assert!(asked <= KEYS, "each once: {asked} in {second} s");
        renewed.push(asked);
    }
    // From a twelfth of the ttl on.
    assert_eq!(renewed[1], 0, "{renewed:?}");
    assert!(renewed[5] > 0 && renewed[5] < KEYS, "{renewed:?}");
    assert!(renewed[8] > KEYS / 2, "{renewed:?}");
}

/// A store may close the connection to a part of it that nobody needs: not while a caller waits or holds there, or
/// anything is to be released.
#[tokio::test(start_paused = true)]
async fn a_part_of_the_store_is_used_while_anybody_waits_or_holds_there() {
    let store = Silent::default();
    let locks = LockRegistry::builder(store.clone()).build().unwrap();
    let engine = locks.engine.clone();
    let uses = || ['a', 'b'].map(|letter| engine.uses(&keys(letter)));
    assert_eq!(uses(), [false, false]);
    let mut lease = Box::pin(locks.obtain("a held").lease());
    assert!(futures::poll!(&mut lease).is_pending());
    assert_eq!(uses(), [true, false], "it waits");
    engine.on_events(store.answers());
    let lease = lease.await.expect("it was free");
    assert_eq!(uses(), [true, false], "it holds");
    drop(lease);
    assert_eq!(uses(), [true, false], "its release is not answered");
    engine.on_events(store.answers());
    assert_eq!(uses(), [false, false]);

    // G3: somebody gives up, and the ticket is withdrawn.
    let mut waiter = Box::pin(locks.obtain("b busy").lease());
    assert!(futures::poll!(&mut waiter).is_pending());
    engine.on_events(store.answers());
    drop(waiter);
    assert!(locks.snapshot().keys.is_empty(), "nobody waits");
    assert_eq!(uses(), [false, true], "its withdrawal is not answered");
    engine.on_events(store.answers());
    assert_eq!(uses(), [false, false]);
}

/// The answers of one call are fed at once, and what else came with them in its place: the connection broke in the midst
/// of them, and stood again.
#[tokio::test(start_paused = true)]
async fn the_answers_of_a_call_are_all_told_and_in_order() {
    let store = Silent::default();
    let locks = LockRegistry::builder(store.clone()).build().unwrap();
    let engine = locks.engine.clone();
    let keys: Vec<_> = (0..20).map(|n| format!("k{n}")).collect();
    let leases = keys.iter().map(|key| locks.obtain(key).lease());
    let leases = tokio::spawn(futures::future::join_all(leases));
    tokio::task::yield_now().await;
    let answers = store.answers();
    assert_eq!(answers.len(), keys.len());
    engine.on_events(answers);
    let leases = leases.await.expect("they are all had");
    let leases: Vec<_> = leases.into_iter().map(|lease| lease.unwrap()).collect();
    assert!(leases.iter().all(crate::handle::Lease::is_valid));
    // In alphabetical order.
    let shown = locks.snapshot().keys;
    assert!(shown.iter().map(|it| &it.key).is_sorted(), "{shown:?}");
    assert_eq!(shown.len(), keys.len());

    let releases = leases.into_iter().map(crate::handle::Lease::release);
    let mut releases = Box::pin(futures::future::join_all(releases));
    assert!(futures::poll!(&mut releases).is_pending());
    let mut events = store.answers();
    let broke = StoreError::new("it broke");
    for event in &mut events[10..] {
        if let StoreEvent::Replied { result, .. } = event {
            *result = Err(OpError::Unknown(broke.clone()));
        }
    }
    events.push(StoreEvent::down(broke));
    events.push(StoreEvent::up(true));
    engine.on_events(events);
    let again = store.answers();
    assert_eq!(
        again.len(),
        10,
        "what got no answer is sent on the new connection"
    );
    engine.on_events(again);
    let released = releases.await;
    assert!(released.iter().all(Result::is_ok), "{released:?}");
    assert_eq!(
        (engine.in_use(), engine.state.lock().timeouts.len()),
        (0, 0)
    );
    assert_eq!(
        Arc::strong_count(&engine),
        2,
        "it does not keep itself alive"
    );
}

/// How often something was woken.
#[derive(Default)]
struct Count(AtomicU64);

impl ArcWake for Count {
    fn wake_by_ref(count: &Arc<Self>) {
        count.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// The first of a tenure that others follow is polled once more before it has its lease: what tokio does then, waking
/// another thread, it would do in the middle of the third turn else, whose task was late for all others of that tenure.
#[tokio::test(start_paused = true)]
async fn only_the_first_holder_of_a_tenure_is_polled_twice() {
    let store = Silent::default();
    let locks = LockRegistry::builder(store.clone()).build().unwrap();
    let engine = locks.engine.clone();
    let lease = || Box::pin(locks.obtain("k").lease());
    let (mut first, mut second, mut third) = (lease(), lease(), lease());
    let count = Arc::new(Count::default());
    let waker = futures::task::waker(count.clone());
    let mut cx = Context::from_waker(&waker);
    for waiter in [&mut first, &mut second, &mut third] {
        assert!(waiter.poll_unpin(&mut cx).is_pending());
    }
    engine.on_events(store.answers());
    assert_eq!(count.0.load(Ordering::Relaxed), 1, "it is told of its turn");
    assert!(
        first.poll_unpin(&mut cx).is_pending(),
        "not at first key_status"
    );
    assert_eq!(count.0.load(Ordering::Relaxed), 2, "it is polled again");
    assert!(
        second.poll_unpin(&mut cx).is_pending(),
        "nobody passes it by"
    );
    let Poll::Ready(held) = first.poll_unpin(&mut cx) else {
        panic!("it has looked twice");
    };
    drop(held.expect("it is its turn"));

    let Poll::Ready(held) = second.poll_unpin(&mut cx) else {
        panic!("it was passed to");
    };
    drop(third);
    drop(held.expect("it is its turn"));
    engine.on_events(store.answers());

    // One that is alone waits for nothing.
    let mut alone = lease();
    assert!(alone.poll_unpin(&mut cx).is_pending());
    engine.on_events(store.answers());
    assert!(alone.poll_unpin(&mut cx).is_ready());
}

/// The first holder of several that does not poll twice in time has no turn, as one that does not look at all (W4).
#[tokio::test(start_paused = true)]
async fn w4_one_look_of_two_does_not_hold_the_key() {
    let locks = LockRegistry::builder(MemoryStore::new()).build().unwrap();
    let held = locks.obtain("k").lease().await.expect("it is free");
    let mut first = Box::pin(locks.obtain("k").lease());
    let mut behind = Box::pin(locks.obtain("k").lease());
    assert!(futures::poll!(&mut first).is_pending());
    assert!(futures::poll!(&mut behind).is_pending());
    // A pass would not lead: this tenure ends by its age.
    tokio::time::sleep(Duration::from_millis(50)).await;
    held.release().await.expect("it was held to the end");
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(
        futures::poll!(&mut first).is_pending(),
        "not at first key_status"
    );
    let begin = Instant::now();
    let lease = behind.await;
    assert_eq!(begin.elapsed().as_millis(), 9_950);
    drop(lease.expect("it is its turn"));
    assert!(first.await.is_ok(), "it came again");
}

/// Policies are asked one after another, with nothing locked: meanwhile the next whose policy was to be asked may leave.
#[tokio::test(start_paused = true)]
async fn the_next_waiters_policy_is_asked_if_the_first_leaves() {
    let store = Silent::default();
    let locks = LockRegistry::builder(store.clone()).build().unwrap();
    locks.engine.on_event(StoreEvent::Up {
        scope: KeyScope::All,
        queue: false,
        complete: true,
    });
    let second = Arc::new(Mutex::new(None));
    let (leaves, asked) = (second.clone(), Arc::new(AtomicUsize::new(0)));
    let count = asked.clone();
    let pause = Duration::from_secs(1);
    let makes_it_leave = Repeat::from_fn(move || {
        let leaves = leaves.clone();
        move || {
            drop(leaves.lock().unwrap().take());
            Some(pause)
        }
    });
    let counts = Repeat::from_fn(move || {
        let count = count.clone();
        move || {
            count.fetch_add(1, Ordering::Relaxed);
            Some(pause)
        }
    });
    let mut first = Box::pin(locks.obtain("1 busy").repeat(makes_it_leave).lease());
    let mut leaving = Box::pin(locks.obtain("2 busy").lease());
    let mut third = Box::pin(locks.obtain("2 busy").repeat(counts).lease());
    for waiter in [&mut first, &mut leaving, &mut third] {
        assert!(futures::poll!(waiter).is_pending());
    }
    *second.lock().unwrap() = Some(leaving);
    locks.engine.on_events(store.answers());
    assert!(second.lock().unwrap().is_none(), "it has left");
    assert_eq!(asked.load(Ordering::Relaxed), 1);
    // And its pause counts.
    assert!(store.asked().is_empty());
    tokio::time::sleep(2 * pause).await;
    let keys = store.asked().into_iter().map(|asked| asked.key.to_string());
    assert_eq!(keys.collect::<Vec<_>>(), ["1 busy", "2 busy"]);
}

/// Runs what might hang on a thread of its own, on a runtime whose time is its own.
fn does_not_hang<F: Future<Output = ()>>(what: impl FnOnce() -> F + Send + 'static) {
    let (done, is_done) = std::sync::mpsc::channel();
    let thread = std::thread::spawn(move || {
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = runtime.enable_all().start_paused(true).build().unwrap();
        runtime.block_on(what());
        done.send(()).unwrap();
    });
    let told = is_done.recv_timeout(Duration::from_secs(60));
    if told != Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
        thread.join().unwrap();
    }
    told.expect("it hangs");
}

/// Does this whenever it is woken, and when it is dropped: wakers are the user's code.
struct Does<F: Fn()> {
    what: F,
    woken: Arc<AtomicUsize>,
}

impl<F: Fn() + Send + Sync + 'static> ArcWake for Does<F> {
    fn wake_by_ref(does: &Arc<Self>) {
        does.woken.fetch_add(1, Ordering::Relaxed);
        (does.what)();
    }
}

impl<F: Fn()> Drop for Does<F> {
    fn drop(&mut self) {
        (self.what)();
    }
}

fn does(woken: &Arc<AtomicUsize>, what: impl Fn() + Send + Sync + 'static) -> Waker {
    let woken = woken.clone();
    futures::task::waker(Arc::new(Does { what, woken }))
}

/// A waker that looks at the registry.
fn looks(woken: &Arc<AtomicUsize>, locks: &LockRegistry) -> Waker {
    let engine = Arc::downgrade(&locks.engine);
    does(woken, move || {
        drop(engine.upgrade().map(|engine| engine.snapshot()));
    })
}

/// At its turn, when another takes its place, and when the registry fails.
#[test]
fn the_waker_of_a_wait_may_look_at_the_registry() {
    does_not_hang(async || {
        let store = Silent::default();
        let locks = LockRegistry::builder(store.clone()).build().unwrap();
        let woken = Arc::new(AtomicUsize::new(0));
        let mut first = Box::pin(locks.obtain("k").lease());
        let mut behind = Box::pin(locks.obtain("k").lease());
        for waiter in [&mut first, &mut behind] {
            for _ in 0..2 {
                let waker = looks(&woken, &locks);
                let polled = waiter.poll_unpin(&mut Context::from_waker(&waker));
                assert!(polled.is_pending());
            }
        }
        locks.engine.on_events(store.answers());
        assert_eq!(woken.swap(0, Ordering::Relaxed), 1, "it is told");
        let waker = looks(&woken, &locks);
        let polled = first.poll_unpin(&mut Context::from_waker(&waker));
        assert!(polled.is_pending(), "not at first");
        assert_eq!(woken.swap(0, Ordering::Relaxed), 1, "it is polled again");
        locks.engine.fail(&"on purpose");
        assert!(woken.load(Ordering::Relaxed) > 0, "the other is told");
        assert!(behind.await.is_err_and(|error| error.is_closed()));
    });
}

/// When another holder of the same lease detaches it.
#[test]
fn the_waker_of_who_shares_a_lease_may_look_at_it() {
    does_not_hang(async || {
        let locks = LockRegistry::in_memory();
        let lock = locks.obtain("k");
        let nested = lock.clone().reentrant();
        let woken = Arc::new(AtomicUsize::new(0));
        let work = lock.with_lease(async |lease| {
            let mut lost = lease.lost();
            let waker = does(&woken, move || _ = lease.is_valid());
            let polled = lost.poll_unpin(&mut Context::from_waker(&waker));
            assert!(polled.is_pending());
            let inner = nested.lease().await.expect("it is shared");
            drop(inner.detach().expect("it is held"));
            assert!(woken.load(Ordering::Relaxed) > 0, "it is told");
        });
        assert!(work.await.expect_err("it is detached").is_lost());
    });
}

/// The store does not answer any more, and the registry hangs up. Whoever reads its events or awaits its end is woken by
/// that, and may look at it then.
#[cfg(feature = "test-util")]
#[test]
fn whoever_awaits_the_end_is_woken_when_the_registry_hangs_up() {
    use futures::stream::FusedStream;

    does_not_hang(async || {
        let store = Silent::default();
        let locks = LockRegistry::builder(store.clone()).build().unwrap();
        let engine = locks.engine.clone();
        let mut events = locks.events();
        let mut lease = Box::pin(locks.obtain("k").lease());
        assert!(futures::poll!(&mut lease).is_pending());
        engine.on_events(store.answers());
        drop(lease.await.expect("it is free"));
        let _unanswered = store.asked();
        let [reads, drains] = [(); 2].map(|()| Arc::new(AtomicUsize::new(0)));
        let (reader, drainer) = (looks(&reads, &locks), looks(&drains, &locks));
        let (mut reader, mut drainer) =
            (Context::from_waker(&reader), Context::from_waker(&drainer));
        let mut drain = Box::pin(locks.drain(Duration::from_secs(3600)));
        assert!(drain.poll_unpin(&mut drainer).is_pending());
        engine.close();
        while let Poll::Ready(event) = events.poll_next_unpin(&mut reader) {
            assert!(event.is_some(), "the release is not answered");
        }
        for woken in [&reads, &drains] {
            woken.store(0, Ordering::Relaxed);
        }
        engine.disconnect();
        for woken in [&reads, &drains] {
            assert!(woken.load(Ordering::Relaxed) > 0);
        }
        // What there is to tell of the release comes first.
        while let Poll::Ready(event) = events.poll_next_unpin(&mut reader) {
            if event.is_none() {
                break;
            }
        }
        assert!(events.is_terminated(), "it ends");
        assert!(drain.poll_unpin(&mut drainer).is_ready());
    });
}

/// Gives up a wait when it is dropped, and panics.
struct GivesUp(Arc<Mutex<Option<BoxFuture<'static, ()>>>>);

impl Drop for GivesUp {
    fn drop(&mut self) {
        let waiting = self.0.lock().unwrap().take();
        drop(waiting);
        panic!("a user's fault");
    }
}

/// A policy is asked with nothing locked, and its wait may end meanwhile. It is then dropped at once, with nothing locked
/// either: its destructor may use the registry, and harms nobody if it panics.
#[test]
fn a_policy_whose_wait_ends_while_it_is_asked_is_dropped_at_once() {
    does_not_hang(async || {
        let store = Silent::default();
        let locks = LockRegistry::builder(store.clone()).build().unwrap();
        let engine = locks.engine.clone();
        engine.on_event(StoreEvent::up(false));
        let mut held = Box::pin(locks.obtain("held").lease());
        assert!(futures::poll!(&mut held).is_pending());
        engine.on_events(store.answers());
        let held = held.await.expect("it is free");

        let waits = Arc::new(Mutex::new(None));
        let (drains, given_up) = (Arc::downgrade(&engine), waits.clone());
        let policy = Repeat::from_fn(move || {
            let (drains, gives_up) = (drains.clone(), GivesUp(given_up.clone()));
            move || {
                let _gives_up = &gives_up;
                drains.upgrade().expect("it is in use").drain();
                Some(Duration::from_secs(1))
            }
        });
        let waiting = locks.obtain("busy").repeat(policy).lease();
        let mut waiting = waiting.map(drop).boxed();
        assert!(futures::poll!(&mut waiting).is_pending());
        *waits.lock().unwrap() = Some(waiting);
        engine.on_events(store.answers());
        assert!(waits.lock().unwrap().is_none(), "it is dropped");
        assert!(held.is_valid(), "and harms nobody");
    });
}

/// The waker and the policy of a wait are the user's. Whoever gives it up does not hear of a panic of their destructors.
#[tokio::test(start_paused = true)]
async fn destructors_that_panic_harm_nobody_who_gives_up() {
    struct Faulty;
    impl Drop for Faulty {
        fn drop(&mut self) {
            panic!("a user's fault");
        }
    }
    impl ArcWake for Faulty {
        fn wake_by_ref(_: &Arc<Self>) {}
    }
    let store = Silent::default();
    let locks = LockRegistry::builder(store.clone()).build().unwrap();
    locks.engine.on_event(StoreEvent::up(false));
    let policy = Repeat::from_fn(|| {
        let faulty = Faulty;
        move || {
            let _faulty = &faulty;
            Some(Duration::from_secs(1))
        }
    });
    let mut waiting = Box::pin(locks.obtain("busy").repeat(policy).lease());
    let waker = futures::task::waker(Arc::new(Faulty));
    let polled = waiting.poll_unpin(&mut Context::from_waker(&waker));
    assert!(polled.is_pending());
    drop(waker);
    // The policy is asked, and kept for the next time.
    locks.engine.on_events(store.answers());
    drop(waiting);
    let mut lease = Box::pin(locks.obtain("k").lease());
    assert!(futures::poll!(&mut lease).is_pending());
    locks.engine.on_events(store.answers());
    assert!(lease.await.expect("it is free").is_valid());
}
