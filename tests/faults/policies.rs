//! The pauses between attempts, at work: on a server that cannot push, where a waiter has to ask again and again.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use futures::poll;
use lockstream::store::MemoryStore;
use lockstream::{FutureLockExt, Lease, Lock, LockError, LockRegistry, Repeat};
use tokio::time::{Instant, sleep, timeout};

use crate::support::{PATIENCE, RedisServer, on_a_steady_machine, wait_until};
use crate::{BOUND, builder, ms, nothing_left, served, wait_for_queue};

const fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

/// Timers may be late on a busy machine. Never early; but a timer ticks in whole milliseconds.
#[track_caller]
fn assert_took(begin: Instant, expected: Duration) {
    let took = begin.elapsed();
    let right = took + ms(1) >= expected && took <= expected + ms(1_500);
    assert!(right, "took {took:?} instead of {expected:?}");
}

/// A server whose user has no right to channels, a process that holds `k`, and one that wants it.
struct Mute {
    server: RedisServer,
    holding: LockRegistry,
    waiting: LockRegistry,
    held: Lease,
}

impl Mute {
    async fn new() -> Self {
        let user = "user x on >p ~* resetchannels +@all";
        let server = RedisServer::builder().config(user).start();
        let url = server.url_with("x", "p", 0);
        let (holding, waiting) = (
            builder(&url).await.build().unwrap(),
            builder(&url).await.build().unwrap(),
        );
        // Its line to the server stands, and the server knows the scripts.
        let warm = waiting.obtain("warm").lease().await.unwrap();
        warm.release().await.unwrap();
        let held = holding.obtain("k").ttl(secs(600)).lease().await.unwrap();
        server.reset_stats();
        Self {
            server,
            holding,
            waiting,
            held,
        }
    }

    fn lock(&self, repeat: &Repeat) -> Lock {
        self.waiting
            .obtain("k")
            .ttl(secs(60))
            .repeat(repeat.clone())
    }

    /// How often the lock was asked for since this was last asked.
    fn attempts(&self) -> u64 {
        let calls = self.server.calls("evalsha");
        self.server.reset_stats();
        calls
    }

    /// Waits this long without success. Returns the number of attempts.
    async fn in_vain(&self, repeat: &Repeat, wait: Duration) -> u64 {
        let lock = self.lock(repeat);
        let begin = Instant::now();
        assert!(!lock.acquire_within(wait).await.unwrap(), "{repeat:?}");
        assert_took(begin, wait);
        assert_eq!(self.server.keys("*queue*"), [""; 0], "it cannot be told");
        // The last question may still be under way, and would answer whoever comes next.
        wait_until("it is answered", BOUND, || self.waiting.in_use() == 0).await;
        self.attempts()
    }

    /// What is released after a while is acquired by who asks again.
    async fn in_time(self, repeat: &Repeat) {
        let lock = self.lock(repeat);
        let mut acquire = lock.acquire();
        assert!(poll!(&mut acquire).is_pending());
        let give_back = async {
            sleep(ms(150)).await;
            self.held.release().await.unwrap();
        };
        let both = async { tokio::join!(acquire, give_back) };
        let (acquired, ()) = timeout(BOUND, both).await.expect("it is had");
        assert!(acquired.unwrap(), "{repeat:?}");
        assert!(lock.release().await.unwrap());
        nothing_left(&self.server, &[&self.holding, &self.waiting]).await;
    }
}

#[track_caller]
fn assert_between(attempts: u64, least: u64, most: u64) {
    let right = (least..=most).contains(&attempts);
    assert!(right, "{attempts} attempts, not {least} to {most}");
}

/// Some attempts as fast as the server answers, and from then on with sleep in between.
#[tokio::test]
async fn spin_then_sleep() {
    on_a_steady_machine(async || {
        let mute = Mute::new().await;
        // The first, 20 more at once, and none while it sleeps.
        let long = Repeat::spin_then(20, secs(3_600));
        let lock = mute.lock(&long).wait(secs(3_600));
        let mut acquire = lock.acquire();
        let begin = Instant::now();
        while mute.server.calls("evalsha") < 21 {
            assert!(poll!(&mut acquire).is_pending());
            assert!(begin.elapsed() < PATIENCE, "it sleeps before it has spun");
            sleep(ms(1)).await;
        }
        assert!(timeout(secs(1), &mut acquire).await.is_err());
        assert_eq!(mute.attempts(), 21);
        drop(acquire);
        wait_until("it is answered", BOUND, || mute.waiting.in_use() == 0).await;
        mute.server.reset_stats();
        // A later wait spins again. Those 21 take two seconds of it on a machine that is slow.
        assert_eq!(mute.in_vain(&long, secs(5)).await, 21);
        // Then it asks after each sleep.
        let short = Repeat::spin_then(4, ms(100));
        assert_between(mute.in_vain(&short, ms(1_050)).await, 8, 15);
        // Freed while it sleeps, the lock is acquired when it wakes, and not before.
        let sleeper = Repeat::spin_then(4, ms(600));
        let lock = mute.lock(&sleeper);
        let begin = Instant::now();
        let mut acquire = lock.acquire();
        while mute.server.calls("evalsha") < 5 {
            assert!(poll!(&mut acquire).is_pending());
            sleep(ms(1)).await;
        }
        mute.held.release().await.unwrap();
        assert!(timeout(BOUND, acquire).await.expect("it wakes").unwrap());
        assert!(begin.elapsed() >= ms(600), "{:?}", begin.elapsed());
        assert!(lock.release().await.unwrap());
        nothing_left(&mute.server, &[&mute.holding, &mute.waiting]).await;
    })
    .await;
}

#[tokio::test]
async fn fixed() {
    on_a_steady_machine(async || {
        let mute = Mute::new().await;
        let repeat = Repeat::fixed(ms(100));
        assert_between(mute.in_vain(&repeat, ms(1_000)).await, 5, 11);
        mute.in_time(&repeat).await;
    })
    .await;
}

#[tokio::test]
async fn exponential() {
    on_a_steady_machine(async || {
        let mute = Mute::new().await;
        let repeat = Repeat::exponential(ms(20), ms(160));
        // At most 1 + those after 10, 30, 70, 150 ms, and one each 80 ms after that.
        assert_between(mute.in_vain(&repeat, ms(800)).await, 5, 13);
        mute.in_time(&repeat).await;
    })
    .await;
}

#[tokio::test]
async fn decorrelated() {
    on_a_steady_machine(async || {
        let mute = Mute::new().await;
        let repeat = Repeat::decorrelated(ms(20), ms(160));
        assert_between(mute.in_vain(&repeat, ms(800)).await, 4, 41);
        // By chance all pauses might be short; many waits of a single pause are not.
        let once = Repeat::decorrelated(ms(10), ms(500)).until(|n| n == 1);
        let mut took = Vec::new();
        for _ in 0..20 {
            let begin = Instant::now();
            assert!(!mute.lock(&once).acquire().await.unwrap());
            took.push(begin.elapsed());
        }
        assert!(took.iter().all(|took| *took >= ms(9)), "{took:?}");
        assert_eq!(mute.attempts(), 40);
        mute.in_time(&repeat).await;
    })
    .await;
}

/// Policies with nothing, and with no end, in them: the wait ends all of them, and the server is asked no more after it.
#[tokio::test]
async fn odd_pauses() {
    on_a_steady_machine(async || {
        let mute = Mute::new().await;
        for repeat in [
            Repeat::fixed(Duration::ZERO),
            Repeat::exponential(Duration::ZERO, Duration::ZERO),
            Repeat::decorrelated(Duration::ZERO, Duration::ZERO),
            Repeat::spin_then(u32::MAX, Duration::MAX),
        ] {
            // As fast as the server answers.
            assert!(mute.in_vain(&repeat, secs(2)).await > 10, "{repeat:?}");
        }
        for repeat in [
            Repeat::fixed(Duration::MAX),
            Repeat::exponential(Duration::MAX, Duration::MAX),
            Repeat::decorrelated(Duration::MAX, Duration::MAX),
            Repeat::spin_then(0, Duration::MAX),
        ] {
            assert_eq!(mute.in_vain(&repeat, ms(200)).await, 1, "{repeat:?}");
        }
        // From nothing, but not for ever: 1, 2, 4 ms and so on.
        for repeat in [
            Repeat::exponential(Duration::ZERO, secs(3_600)),
            Repeat::decorrelated(ms(50), Duration::from_millis(60)),
        ] {
            assert_between(mute.in_vain(&repeat, ms(400)).await, 2, 11);
        }
        sleep(ms(100)).await;
        assert_eq!(mute.attempts(), 0, "asked after the wait");
    })
    .await;
}

/// `until` ends a wait long before its time: `false` of a flag, `NotAcquired` of a guard and of work, which was not
/// polled, and `None` where that is skipped.
#[tokio::test]
async fn until_ends_a_wait() {
    let mute = Mute::new().await;
    let four = Repeat::fixed(ms(10)).until(|repeats| repeats == 3);
    let lock = mute.lock(&four).wait(secs(3_600));
    let begin = Instant::now();
    assert!(!lock.acquire().await.unwrap());
    assert_eq!(mute.attempts(), 4, "the first, and three repeats");
    // Each wait counts again.
    let told = lock.lease().await.unwrap_err();
    let LockError::NotAcquired { waited, .. } = told else {
        panic!("{told:?}");
    };
    assert!(waited >= ms(30) && waited < secs(60), "{waited:?}");
    assert!(lock.lease().or_skip().await.unwrap().is_none());
    let begun = Cell::new(false);
    let told = async { begun.set(true) }.with_lock(&lock).await;
    assert!(told.unwrap_err().is_not_acquired());
    let skipped = async { begun.set(true) }.with_lock(&lock).or_skip().await;
    assert!(skipped.unwrap().is_none() && !begun.get());
    assert_eq!(mute.attempts(), 4 * 4);
    assert!(begin.elapsed() < secs(60));

    // At once, if it says so before the first repeat: as acquire_once.
    let never = mute.lock(&Repeat::default().until(|_| true));
    assert!(!never.acquire().await.unwrap());
    assert_eq!(mute.attempts(), 1);
    // It may look at anything, and change its mind while it waits.
    let patience = Arc::new(AtomicU32::new(u32::MAX));
    let seen = patience.clone();
    let moody = Repeat::fixed(ms(5)).until(move |n| n >= seen.load(Ordering::SeqCst));
    let waiter = tokio::spawn(mute.lock(&moody).wait(secs(3_600)).lease());
    while mute.server.calls("evalsha") < 10 {
        assert!(!waiter.is_finished());
        sleep(ms(1)).await;
    }
    patience.store(0, Ordering::SeqCst);
    let told = timeout(BOUND, waiter).await.expect("it gives up").unwrap();
    assert!(told.unwrap_err().is_not_acquired());
    // What is free is acquired, however little patience there is.
    mute.held.release().await.unwrap();
    assert!(never.acquire().await.unwrap());
    assert!(never.release().await.unwrap());
    nothing_left(&mute.server, &[&mute.holding, &mute.waiting]).await;
}

/// Of those who wait in one process the first asks for all. When its policy ends, the next one's begins.
#[tokio::test]
async fn the_first_in_the_queue_asks() {
    let mute = Mute::new().await;
    let three = Repeat::fixed(ms(20)).until(|repeats| repeats == 2);
    let (one, two) = (mute.lock(&three), mute.lock(&three));
    let patient = mute.lock(&Repeat::fixed(ms(10)));
    let begin = Instant::now();
    let mut in_line = [one.acquire(), two.acquire(), patient.acquire()];
    for waiter in &mut in_line {
        assert!(poll!(waiter).is_pending());
    }
    let [one, two, patient] = in_line;
    let first = async { (one.await.unwrap(), begin.elapsed()) };
    let second = async { (two.await.unwrap(), begin.elapsed()) };
    let ((one, first), (two, second)) = tokio::join!(first, second);
    assert!(!one && !two);
    let in_turn = first >= ms(40) && second >= ms(80);
    assert!(in_turn, "{first:?} {second:?}");
    assert_between(mute.attempts(), 5, 8);
    mute.held.release().await.unwrap();
    assert!(timeout(BOUND, patient).await.expect("the third").unwrap());
}

/// A policy of the user's own, and one of the `backoff` crate's: their ends are ends of the wait.
#[tokio::test]
async fn policies_that_end_by_themselves() {
    let mute = Mute::new().await;
    let own = Repeat::from_fn(|| {
        let mut pauses = [ms(5), ms(20), Duration::ZERO].into_iter();
        move || pauses.next()
    });
    let begin = Instant::now();
    assert!(!mute.lock(&own).acquire().await.unwrap());
    assert!(begin.elapsed() >= ms(24), "{:?}", begin.elapsed());
    assert_eq!(mute.attempts(), 4);
    assert!(!mute.lock(&own.until(|n| n == 2)).acquire().await.unwrap());
    assert_eq!(mute.attempts(), 3);
    #[cfg(feature = "backoff")]
    {
        let stop = Repeat::backoff(backoff_that_stops);
        assert!(!mute.lock(&stop).acquire().await.unwrap());
        assert_eq!(mute.attempts(), 1);
    }
    mute.in_time(&Repeat::default()).await;
}

#[cfg(feature = "backoff")]
fn backoff_that_stops() -> backoff::backoff::Stop {
    backoff::backoff::Stop {}
}

/// Where a waiter is told of its turn no policy is asked: neither its pauses nor its end.
#[tokio::test]
async fn no_policy_where_there_are_notices() {
    on_a_steady_machine(async || {
        let asked = Arc::new(AtomicU32::new(0));
        let seen = asked.clone();
        let ends = Repeat::fixed(Duration::ZERO).until(move |_| {
            seen.fetch_add(1, Ordering::SeqCst);
            true
        });
        let server = RedisServer::start();
        let (here, there) = (
            builder(&server.url()).await.build().unwrap(),
            builder(&server.url()).await.build().unwrap(),
        );
        let held = here.obtain("k").ttl(secs(60)).lease().await.unwrap();
        let waiter = tokio::spawn(there.obtain("k").repeat(ends.clone()).lease());
        wait_for_queue(&server, 1).await;
        server.reset_stats();
        sleep(ms(300)).await;
        assert!(!waiter.is_finished() && server.calls("evalsha") == 0);
        held.release().await.unwrap();
        served(waiter, BOUND).await.release().await.unwrap();

        let store = MemoryStore::new();
        let in_memory = || LockRegistry::builder(store.clone()).build().unwrap();
        let _held = in_memory().obtain("k").ttl(secs(60)).lease().await.unwrap();
        let begin = Instant::now();
        let lock = in_memory().obtain("k").repeat(ends);
        assert!(!lock.acquire_within(ms(200)).await.unwrap());
        assert_took(begin, ms(200));
        assert_eq!(asked.load(Ordering::SeqCst), 0);
    })
    .await;
}
