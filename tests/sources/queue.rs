//! Who is next, who is told, and who is refused.

use std::collections::HashSet;
use std::sync::{Arc, Mutex};

use futures::future::join_all;
use lockstream::store::MemoryStore;
use lockstream::{FutureLockExt, LockError, LockRegistry, Token};
use tokio::time::{Instant, sleep};

use crate::support::{RedisServer, wait_until};
use crate::{
    BOUND, assert_took, builder, in_memory, ms, nothing_left, poll_once, process, queued, released,
    secs, warm, within,
};

/// A waiter does not ask: the release tells it. That takes one call in all, the release itself.
#[tokio::test]
async fn release_notices() {
    let server = RedisServer::start();
    let (here, there) = (process(&server).await, process(&server).await);
    let lock = here.obtain("k").ttl(secs(60));
    for _ in 0..5 {
        let lease = lock.lease().await.unwrap();
        let waiter = tokio::spawn(there.obtain("k").ttl(secs(60)).lease());
        queued(&server, 1).await;
        server.reset_stats();
        sleep(ms(300)).await;
        assert_eq!(server.all_calls().values().sum::<u64>(), 0, "it asks");
        assert!(!waiter.is_finished());
        let begin = Instant::now();
        released(lease).await;
        let next = within(BOUND, "it is told", waiter).await;
        let next = next.unwrap().unwrap();
        // Without the notice it would look after 10 s.
        assert!(begin.elapsed() < secs(2), "{:?}", begin.elapsed());
        let calls = server.all_calls();
        assert_eq!(calls.get("evalsha"), Some(&1), "{calls:?}");
        released(next).await;
    }
    nothing_left(&server, &[&here, &there]).await;
}

/// However many wait for a key in a process, the server knows of one: one ticket, one subscription, one connection.
#[tokio::test]
async fn one_ticket_a_process() {
    const WAITERS: usize = 200;
    let server = RedisServer::start();
    let holder = process(&server).await;
    let held = holder.obtain("k").ttl(secs(60)).lease().await.unwrap();
    let mut processes = Vec::new();
    let mut waiters = Vec::new();
    for n in 1..=3 {
        let locks = process(&server).await;
        for _ in 0..WAITERS {
            let lock = locks.obtain("k").ttl(secs(60)).wait(secs(60));
            waiters.push(tokio::spawn(async move {
                let lease = lock.lease().await.unwrap();
                let token = lease.token();
                lease.release().await.unwrap();
                token
            }));
        }
        queued(&server, n).await;
        processes.push(locks);
    }
    sleep(ms(100)).await;
    assert_eq!(server.ask::<u64>(&["ZCARD", "{lock:k}:~queue2"]), 3);
    assert_eq!(holder.obtain("k").inspect().await.unwrap().waiting, 3);
    let clients = server.clients();
    assert_eq!(clients.len(), 4, "one connection a process");
    let subscriptions: u64 = clients.iter().map(|client| client.subscriptions()).sum();
    assert_eq!(subscriptions, 4);

    // And every one of them gets its turn.
    server.reset_stats();
    released(held).await;
    let tokens = within(12 * BOUND, "all had it", join_all(waiters)).await;
    let tokens: HashSet<Token> = tokens.into_iter().map(Result::unwrap).collect();
    assert_eq!(tokens.len(), 3 * WAITERS, "two leases with one token");
    let calls = server.calls("evalsha");
    assert!(calls < 2 * 3 * WAITERS as u64, "{calls} calls");
    let processes: Vec<_> = processes.iter().chain([&holder]).collect();
    nothing_left(&server, &processes).await;
}

/// No more than so many wait for a key in a process: one more is told so at once, by an error of its own that names the
/// limit, and costs those who wait nothing.
#[tokio::test]
async fn bounded_queue() {
    const LIMIT: usize = 100;
    let server = RedisServer::start();
    let holder = process(&server).await;
    let bounded = builder(&server.url()).await.max_waiters(LIMIT);
    let bounded = bounded.wait(secs(60)).build().unwrap();
    warm(&bounded).await;
    let held = holder.obtain("k").ttl(secs(60)).lease().await.unwrap();
    let lock = bounded.obtain("k").ttl(secs(60));
    let served = Arc::new(Mutex::new(Vec::new()));
    let take = |n| {
        let served = served.clone();
        let work = async move { served.lock().unwrap().push(n) };
        Box::pin(work.with_lock(&lock))
    };
    let mut in_line: Vec<_> = (0..LIMIT).map(take).collect();
    for waiter in &mut in_line {
        assert!(poll_once(waiter).await.is_none());
    }
    queued(&server, 1).await;

    let full = |told: LockError| match told {
        LockError::QueueFull { key, limit, .. } => (&*key, limit) == ("k", LIMIT),
        _ => false,
    };
    server.reset_stats();
    let begin = Instant::now();
    assert!(full(lock.acquire().await.unwrap_err()));
    assert!(full(lock.lease().await.unwrap_err()));
    assert!(
        full(lock.lease().or_skip().await.unwrap_err()),
        "that is not busy"
    );
    let never = async { panic!("polled") };
    assert!(full(never.with_lock(&lock).await.unwrap_err()));
    assert!(
        begin.elapsed() < secs(2),
        "it waited: {:?}",
        begin.elapsed()
    );
    assert_eq!(server.calls("evalsha"), 0, "the server is spared");
    // Who does not wait takes no place. Another key, and another process, have lines of their own.
    assert!(!lock.acquire_once().await.unwrap());
    assert!(!lock.acquire_within(ms(0)).await.unwrap());
    let other = bounded.obtain("other");
    assert!(other.acquire().await.unwrap());
    assert!(other.release().await.unwrap());
    let mut elsewhere = holder.obtain("k").ttl(secs(60)).wait(secs(60)).lease();
    assert!(poll_once(&mut elsewhere).await.is_none());

    // A place that is given up is free at once, for one.
    drop(in_line.remove(10));
    let mut last = take(LIMIT);
    assert!(poll_once(&mut last).await.is_none());
    in_line.push(last);
    assert!(full(lock.acquire().await.unwrap_err()));

    // Nobody's place suffered from it.
    released(held).await;
    let all = join_all(in_line);
    let serving = async {
        let lease = elsewhere.await.unwrap();
        lease.release().await.unwrap();
    };
    let (told, ()) = within(6 * BOUND, "all are served", async {
        tokio::join!(all, serving)
    })
    .await;
    assert!(told.iter().all(Result::is_ok), "{told:?}");
    let in_order: Vec<_> = (0..=LIMIT).filter(|n| *n != 10).collect();
    assert_eq!(*served.lock().unwrap(), in_order);
    nothing_left(&server, &[&holder, &bounded]).await;
}

/// Questions that are under way count as well, also of those who would not wait: a server that is slow to answer is not
/// asked by any number of callers. Once the lock is known to be held, who asks is told so, however many wait.
#[tokio::test(start_paused = true)]
async fn a_bounded_queue_at_a_slow_server() {
    let store = MemoryStore::new();
    let locks = LockRegistry::builder(store.clone())
        .max_waiters(2)
        .build()
        .unwrap();
    let lock = locks.obtain("k").ttl(secs(60));
    store.set_latency(ms(100));
    let handles: Vec<_> = (0..4).map(|_| lock.clone()).collect();
    let told = join_all(handles.iter().map(|lock| lock.acquire_once())).await;
    assert!(matches!(told[0], Ok(true)), "{told:?}");
    assert!(matches!(told[1], Ok(false)), "{told:?}");
    for told in &told[2..] {
        assert!(
            matches!(told, Err(LockError::QueueFull { limit: 2, .. })),
            "{told:?}"
        );
    }
    // Held: two may wait, and any number may ask.
    let mut in_line = [lock.lease(), lock.lease()];
    for waiter in &mut in_line {
        assert!(poll_once(waiter).await.is_none());
    }
    let told = join_all(handles[1..].iter().map(|lock| lock.acquire_once())).await;
    assert!(told.into_iter().all(|told| !told.unwrap()));
    assert!(handles[0].release().await.unwrap());
    for waiter in in_line {
        waiter.await.unwrap().release().await.unwrap();
    }
}

/// Without a limit nobody is refused.
#[tokio::test(start_paused = true)]
async fn a_queue_without_bounds() {
    let store = MemoryStore::new();
    let (here, there) = (in_memory(&store), in_memory(&store));
    let held = here.obtain("k").ttl(secs(60)).lease().await.unwrap();
    let lock = there.obtain("k").wait(secs(5));
    let begin = Instant::now();
    let waits: Vec<_> = (0..10_000).map(|_| lock.clone()).collect();
    let told = join_all(waits.iter().map(|lock| lock.acquire())).await;
    assert!(told.into_iter().all(|told| !told.unwrap()));
    assert_took(begin, secs(5), ms(0));
    held.release().await.unwrap();
}

/// Turns come in order of arrival: those of processes by the server's queue, those within a process by its own line. The
/// last to come is the last to be served, not the first.
#[tokio::test]
async fn first_come_first_served() {
    const PROCESSES: usize = 8;
    let server = RedisServer::start();
    let holder = process(&server).await;
    let held = holder.obtain("k").ttl(secs(60)).lease().await.unwrap();
    let served = Arc::new(Mutex::new(Vec::new()));
    let mut processes = Vec::new();
    let mut waiters = Vec::new();
    for n in 0..PROCESSES {
        let locks = process(&server).await;
        let lock = locks.obtain("k").ttl(secs(60)).wait(secs(60));
        let served = served.clone();
        waiters.push(tokio::spawn(async move {
            let lease = lock.lease().await.unwrap();
            served.lock().unwrap().push((n, lease.token()));
            sleep(ms(5)).await;
            lease.release().await.unwrap();
        }));
        queued(&server, n as u64 + 1).await;
        processes.push(locks);
    }
    released(held).await;
    within(6 * BOUND, "all are served", join_all(waiters)).await;
    let turns = std::mem::take(&mut *served.lock().unwrap());
    let order: Vec<_> = turns.iter().map(|(n, _)| *n).collect();
    assert_eq!(order, (0..PROCESSES).collect::<Vec<_>>());
    assert!(
        turns.windows(2).all(|pair| pair[0].1 < pair[1].1),
        "{turns:?}"
    );

    // Within a process, some of whom gave up on the way.
    let (locks, held) = (&processes[0], holder.obtain("k").ttl(secs(60)));
    let held = held.lease().await.unwrap();
    let mut in_line: Vec<_> = (0..60)
        .map(|n| {
            let served = served.clone();
            let lock = locks.obtain("k").ttl(secs(60)).wait(secs(60));
            Some(Box::pin(async move {
                let turn = lock.with_lease(async |lease| {
                    served.lock().unwrap().push((n, lease.token()));
                });
                turn.await.unwrap();
            }))
        })
        .collect();
    for waiter in in_line.iter_mut().flatten() {
        assert!(poll_once(waiter).await.is_none());
    }
    wait_until("they wait in the queue", BOUND, || locks.in_use() == 1).await;
    queued(&server, 1).await;
    for n in [0, 17, 59] {
        in_line[n] = None;
    }
    released(held).await;
    let all = join_all(in_line.into_iter().flatten());
    within(6 * BOUND, "all are served", all).await;
    let order: Vec<_> = served.lock().unwrap().iter().map(|(n, _)| *n).collect();
    let stayed: Vec<_> = (0..60).filter(|n| ![0, 17, 59].contains(n)).collect();
    assert_eq!(order, stayed);
    let processes: Vec<&LockRegistry> = processes.iter().chain([&holder]).collect();
    nothing_left(&server, &processes).await;
}
