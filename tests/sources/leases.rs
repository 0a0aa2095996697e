//! How long a lease lasts.

use futures::StreamExt;
use lockstream::store::MemoryStore;
use lockstream::{FutureLockExt, LockRegistry, Renewal, StreamLockExt};
use tokio::time::{Instant, interval, sleep};
use tokio_stream::wrappers::IntervalStream;

use crate::support::{RedisServer, on_a_steady_machine, wait_until};
use crate::{
    BOUND, assert_lost, assert_took, builder, in_memory, ms, nothing_left, process, queued,
    released, secs, warm, within,
};

/// Work of any length keeps its lock, a stream of days too; and the moment it is released nothing prolongs it.
#[tokio::test]
async fn watchdog() {
    on_a_steady_machine(async || {
        let server = RedisServer::start();
        let there = process(&server).await;
        let dogged = builder(&server.url()).await.renewal(Renewal::watchdog());
        let here = dogged.ttl(ms(900)).build().unwrap();
        warm(&here).await;
        let lease = here.obtain("k").lease().await.unwrap();
        let begin = Instant::now();
        let mut shortest = i64::MAX;
        while begin.elapsed() < ms(3 * 900) {
            sleep(ms(20)).await;
            shortest = shortest.min(server.pttl("lock:k"));
            assert!(!there.obtain("k").acquire_once().await.unwrap());
        }
        assert!(lease.is_valid());
        // At every third: it never comes near its end.
        assert!(shortest > 200, "{shortest} ms were left");
        released(lease).await;
        for _ in 0..20 {
            sleep(ms(20)).await;
            assert!(!server.exists("lock:k"), "prolonged after its release");
        }
        nothing_left(&server, &[&here, &there]).await;
    })
    .await;
}

/// [`watchdog`] in days.
#[tokio::test(start_paused = true)]
async fn watchdog_of_a_stream_that_runs_for_days() {
    const MINUTES: usize = 3 * 24 * 60;
    let store = MemoryStore::new();
    let registry = LockRegistry::builder(store.clone()).renewal(Renewal::watchdog());
    let (here, there) = (registry.build().unwrap(), in_memory(&store));
    let ticks = IntervalStream::new(interval(secs(60))).take(MINUTES);
    let mut ticks = std::pin::pin!(ticks.with_lock((&here, "k")));
    let (begin, other) = (Instant::now(), there.obtain("k"));
    let mut seen = 0;
    while let Some(tick) = ticks.next().await {
        tick.unwrap();
        seen += 1;
        assert!(
            !other.acquire_once().await.unwrap(),
            "free at minute {seen}"
        );
    }
    assert_eq!(seen, MINUTES);
    assert_took(begin, secs(60) * (MINUTES as u32 - 1), secs(1));
    assert!(other.acquire_once().await.unwrap());
}

/// 360 renewals of a lease of 30 s: an hour, and the ttl after it.
#[tokio::test(start_paused = true)]
async fn at_most_n_renewals() {
    let store = MemoryStore::new();
    let (here, there) = (in_memory(&store), in_memory(&store));
    let hour = Renewal::watchdog().max_renewals(360);
    let lock = here.obtain("k").ttl(secs(30)).renewal(hour);
    let begin = Instant::now();
    let lease = lock.lease().await.unwrap();
    sleep(secs(3_600)).await;
    assert!(lease.is_valid());
    // 1 % and 2 ms of the ttl are for clocks that do not run alike.
    let end = secs(3_600) + ms(29_698);
    let other = there.obtain("k").wait(secs(3_600));
    let (lost, next) = tokio::join!(lease.lost(), async {
        let next = other.lease().await.unwrap();
        // The one who lost it gives it up there and then.
        assert_took(begin, end, ms(20));
        next
    });
    assert!(lost.is_lost() && next.token() > lease.token());
    assert_lost(lease.release().await, "k");
    next.release().await.unwrap();

    // Work under it is stopped at that end, and its 360 begin again.
    let begin = Instant::now();
    let work = sleep(secs(7_200)).with_lock(&lock).await;
    assert_lost(work, "k");
    assert_took(begin, end, ms(20));
    // None is off.
    let none = lock.renewal(Renewal::watchdog().max_renewals(0));
    let begin = Instant::now();
    assert_lost(sleep(secs(60)).with_lock(&none).await, "k");
    assert_took(begin, ms(29_698), ms(20));
}

/// Who says how long a lease shall last gets just that, though the registry renews those of others.
#[tokio::test]
async fn no_renewal_with_an_explicit_ttl() {
    on_a_steady_machine(async || {
        let server = RedisServer::start();
        let dogged = builder(&server.url()).await.renewal(Renewal::watchdog());
        let here = dogged.ttl(ms(600)).build().unwrap();
        warm(&here).await;
        let renewed = here.obtain("renewed").lease().await.unwrap();
        let asked = here.obtain("asked").ttl(ms(600));
        let asked = asked.renewal(Renewal::watchdog()).lease().await.unwrap();
        let begin = Instant::now();
        let fixed = here.obtain("k").ttl(ms(600)).lease().await.unwrap();
        let deadline = fixed.deadline();
        let mut left = i64::MAX;
        while server.exists("lock:k") {
            let now = server.pttl("lock:k");
            assert!(now <= left, "prolonged from {left} to {now} ms");
            left = now;
            sleep(ms(10)).await;
            assert!(begin.elapsed() < BOUND, "it does not end");
        }
        assert_eq!(fixed.deadline(), deadline);
        assert!(fixed.lost().await.is_lost());
        assert_took(begin, ms(600) - ms(10), ms(500));
        sleep(ms(700)).await;
        assert!(renewed.is_valid() && asked.is_valid());
        assert!(server.exists("lock:renewed") && server.exists("lock:asked"));
        assert_lost(fixed.release().await, "k");
        released(renewed).await;
        released(asked).await;
        nothing_left(&server, &[&here]).await;
    })
    .await;
}

/// A server forgets its scripts (a restart, a fail-over, SCRIPT FLUSH): whatever a lock does next is done all the same,
/// once.
#[tokio::test]
async fn script_cache_healed() {
    on_a_steady_machine(async || {
        let server = RedisServer::start();
        let (here, there) = (process(&server).await, process(&server).await);
        let lock = here.obtain("k").ttl(ms(900)).renewal(Renewal::watchdog());
        for _ in 0..3 {
            server.script_flush();
            let lease = lock.lease().await.unwrap();
            let (token, deadline) = (lease.token(), lease.deadline());
            server.script_flush();
            let waiter = tokio::spawn(there.obtain("k").lease());
            queued(&server, 1).await;
            server.script_flush();
            // The watchdog's.
            wait_until("it is renewed", BOUND, || lease.deadline() > deadline).await;
            assert!(lease.is_valid());
            server.script_flush();
            released(lease).await;
            let next = within(BOUND, "it is handed over", waiter).await;
            let next = next.unwrap().unwrap();
            assert!(next.token() > token);
            server.script_flush();
            released(next).await;
        }
        // It is learnt again by the first that needs it, and the next pays nothing.
        server.script_flush();
        warm(&here).await;
        server.reset_stats();
        warm(&here).await;
        assert_eq!((server.calls("evalsha"), server.calls("eval")), (2, 0));
        assert_eq!(server.calls("script"), 0);
        nothing_left(&server, &[&here, &there]).await;
    })
    .await;
}
