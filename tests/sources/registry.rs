//! A registry that gives out locks, and what they are for.

use std::cell::Cell;
use std::future::pending;
use std::sync::atomic::{AtomicU64, Ordering};

use futures::future::join_all;
use futures::{StreamExt, TryStreamExt, stream};
use lockstream::store::{MemoryStore, RedisStore};
use lockstream::{FutureLockExt, LockError, LockRegistry, Renewal, StreamLockExt};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep};
use tokio_stream::wrappers::ReceiverStream;

use crate::support::{Proxy, RedisServer, on_a_steady_machine, wait_until};
use crate::{
    BOUND, assert_lost, assert_took, builder, in_memory, ms, nothing_left, poll_once, process,
    queued, released, secs, within,
};

/// A name is a lock, the same in every process and for every handle. To obtain one asks nobody: it can neither wait nor
/// fail.
#[tokio::test]
async fn obtain() {
    let server = RedisServer::start();
    let (here, there) = (process(&server).await, process(&server).await);
    server.reset_stats();
    let handles: Vec<_> = (0..10_000)
        .map(|n| here.obtain(format!("order:{}", n % 100)))
        .collect();
    let bad = here.obtain("line\nbreak");
    assert_eq!(server.all_calls().values().sum::<u64>(), 0);
    assert_eq!(here.in_use(), 0);
    assert_eq!(handles[142].key(), "order:42");

    // Two handles of one process and one of another: one lock.
    assert!(handles[42].acquire_once().await.unwrap());
    assert!(!handles[142].acquire_once().await.unwrap());
    assert!(!there.obtain("order:42").acquire_once().await.unwrap());
    assert!(server.exists("lock:order:42"));
    // Another name, and another registry's prefix: other locks.
    let other = there.obtain("order:43");
    assert!(other.acquire_once().await.unwrap());
    let apart = builder(&server.url())
        .await
        .prefix("apart")
        .build()
        .unwrap();
    let apart = apart.obtain("order:42");
    assert!(apart.acquire_once().await.unwrap());

    // What is wrong with a name is told when it is used.
    let told = bad.acquire_once().await.unwrap_err();
    assert!(matches!(told, LockError::InvalidKey { .. }), "{told:?}");
    for lock in [&handles[42], &other, &apart] {
        assert!(lock.release().await.unwrap());
    }
    assert!(handles[142].acquire_once().await.unwrap());

    // Nor does it need a server.
    let proxy = Proxy::to(&server);
    proxy.refuse();
    let absent = LockRegistry::builder(RedisStore::connect_lazy(proxy.url()).unwrap())
        .build()
        .unwrap();
    let lock = absent.obtain("order:44");
    assert!(lock.acquire_once().await.is_err());
    proxy.accept();
    assert!(lock.acquire().await.unwrap());
    assert!(lock.release().await.unwrap());
}

/// One question: true, or false at once, whatever the default wait; no place in the queue, and nothing left of it.
#[tokio::test]
async fn acquire_once() {
    let server = RedisServer::start();
    let (here, there) = (process(&server).await, process(&server).await);
    let lock = here.obtain("k").wait(secs(3_600));
    assert!(lock.acquire_once().await.unwrap());
    assert!(lock.is_acquired());
    server.reset_stats();
    let other = there.obtain("k").wait(secs(3_600));
    let told = within(BOUND, "the answer", other.acquire_once()).await;
    assert!(!told.unwrap() && !other.is_acquired());
    assert_eq!(server.calls("evalsha"), 1, "one question");
    assert_eq!(server.keys("*queue*"), [""; 0]);
    assert!(lock.release().await.unwrap());

    // Of many who ask at the same time exactly one has it.
    let handles: Vec<_> = (0..40)
        .map(|n| [&here, &there][n % 2].obtain("k"))
        .collect();
    let won = join_all(handles.iter().map(|lock| lock.acquire_once())).await;
    let won: Vec<_> = won.into_iter().map(Result::unwrap).collect();
    assert_eq!(won.iter().filter(|won| **won).count(), 1, "{won:?}");
    let winner = won.iter().position(|won| *won).unwrap();
    assert!(handles[winner].release().await.unwrap());
    nothing_left(&server, &[&here, &there]).await;
}

/// As long as the registry says: 30 s, if it says nothing. In vain is false and no error, in time is true.
#[tokio::test(start_paused = true)]
async fn acquire_with_the_default_wait() {
    let store = MemoryStore::new();
    let (here, there) = (in_memory(&store), in_memory(&store));
    let held = here.obtain("k").ttl(secs(3_600)).lease().await.unwrap();
    let lock = there.obtain("k");
    let begin = Instant::now();
    assert!(!lock.acquire().await.unwrap());
    assert_took(begin, secs(30), ms(0));

    let hasty = LockRegistry::builder(store.clone())
        .wait(secs(5))
        .build()
        .unwrap();
    let hasty = hasty.obtain("k");
    let begin = Instant::now();
    assert!(!hasty.acquire().await.unwrap());
    assert_took(begin, secs(5), ms(0));

    let begin = Instant::now();
    let give_back = async {
        sleep(secs(29)).await;
        held.release().await.unwrap();
    };
    let (acquired, ()) = tokio::join!(lock.acquire(), give_back);
    assert!(acquired.unwrap());
    assert_took(begin, secs(29), ms(0));
    assert!(lock.release().await.unwrap());
    assert_eq!((store.keys(), there.in_use()), (0, 0));
}

/// As long as the caller says, by the lock or by the call: nothing, a while, for ever.
#[tokio::test(start_paused = true)]
async fn acquire_with_a_given_wait() {
    let store = MemoryStore::new();
    let (here, there) = (in_memory(&store), in_memory(&store));
    let held = here.obtain("k").ttl(secs(80_000)).lease().await.unwrap();
    let lock = there.obtain("k").wait(secs(3));
    for (wait, given) in [
        (secs(3), None),
        (ms(250), Some(ms(250))),
        (secs(600), Some(secs(600))),
        (ms(0), Some(ms(0))),
    ] {
        let begin = Instant::now();
        let acquire = given.map_or_else(|| lock.acquire(), |wait| lock.acquire_within(wait));
        assert!(!acquire.await.unwrap());
        assert_took(begin, wait, ms(0));
        // A guard says the same by an error, and how long it waited.
        let told = lock.lease_within(wait).await.unwrap_err();
        let LockError::NotAcquired { waited, .. } = told else {
            panic!("{told:?}");
        };
        assert!(waited >= wait && waited <= wait + ms(1), "{waited:?}");
    }

    let begin = Instant::now();
    let give_back = async {
        sleep(secs(70_000)).await;
        held.release().await.unwrap();
    };
    let for_ever = lock.acquire_within(std::time::Duration::MAX);
    let (acquired, ()) = tokio::join!(for_ever, give_back);
    assert!(acquired.unwrap());
    assert_took(begin, secs(70_000), ms(0));
    assert!(lock.release().await.unwrap());
}

/// The work runs while nobody else's does, its value comes back, and the lock is free however it ends.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn run_one_future() {
    const PROCESSES: usize = 4;
    const ROUNDS: u64 = 25;
    static STOCK: AtomicU64 = AtomicU64::new(0);
    let server = RedisServer::start();
    let mut tasks = Vec::new();
    let mut processes = Vec::new();
    for _ in 0..PROCESSES {
        let locks = process(&server).await;
        for _ in 0..4 {
            let lock = locks.obtain("k").wait(secs(60)).ttl(secs(60));
            tasks.push(tokio::spawn(async move {
                for _ in 0..ROUNDS {
                    // Reads, does something else for a while, and writes: two at once would lose one.
                    let count = async {
                        let seen = STOCK.load(Ordering::SeqCst);
                        tokio::task::yield_now().await;
                        STOCK.store(seen + 1, Ordering::SeqCst);
                        seen + 1
                    };
                    assert!(count.with_lock(&lock).await.unwrap() > 0);
                }
            }));
        }
        processes.push(locks);
    }
    for task in tasks {
        within(12 * BOUND, "all have counted", task).await.unwrap();
    }
    assert_eq!(STOCK.load(Ordering::SeqCst), 16 * ROUNDS);

    // Its own error is delivered as it is, and the lock is free then.
    let (here, there) = (&processes[0], &processes[1]);
    let fails = async { Err::<(), _>("sold out") };
    assert_eq!(fails.with_lock((here, "k")).await.unwrap(), Err("sold out"));
    let lock = there.obtain("k");
    assert!(lock.acquire_once().await.unwrap());
    // Held elsewhere it does not begin.
    let begun = Cell::new(false);
    let told = async { begun.set(true) }
        .with_lock(here.obtain("k").wait(ms(200)))
        .await;
    assert!(told.unwrap_err().is_not_acquired() && !begun.get());
    assert!(lock.release().await.unwrap());
    // Dropped half-way it is free as well.
    let mut half = Box::pin(pending::<()>().with_lock((here, "k")));
    while !server.exists("lock:k") {
        assert!(poll_once(&mut half).await.is_none());
        sleep(ms(1)).await;
    }
    drop(half);
    let lease = within(BOUND, "it is released", lock.lease()).await;
    released(lease.unwrap()).await;
    nothing_left(&server, &processes.iter().collect::<Vec<_>>()).await;
}

/// One lease from the first poll to the end, and not for the first item alone.
#[tokio::test]
async fn run_a_stream() {
    let server = RedisServer::start();
    let (here, there) = (process(&server).await, process(&server).await);
    let other = there.obtain("k");
    let (tell, told) = mpsc::channel(1);
    let rows = ReceiverStream::new(told).with_lock((&here, "k"));
    let mut rows = std::pin::pin!(rows);
    // Nothing is held before the first poll.
    assert!(other.acquire_once().await.unwrap());
    assert!(other.release().await.unwrap());
    let mut owners = Vec::new();
    for row in 0..5 {
        tell.send(row).await.unwrap();
        let seen = within(BOUND, "a row", rows.try_next()).await.unwrap();
        assert_eq!(seen, Some(row));
        assert!(!other.acquire_once().await.unwrap(), "free after {row}");
        owners.push(server.get("lock:k").unwrap());
    }
    owners.dedup();
    assert_eq!(owners.len(), 1, "not one lease: {owners:?}");
    drop(tell);
    assert_eq!(rows.try_next().await.unwrap(), None);
    // With the end it is free, before the stream is dropped.
    assert!(other.acquire_once().await.unwrap());

    // Held elsewhere: one item that says so, the last, and the stream was not polled.
    let never = stream::poll_fn(|_| -> std::task::Poll<Option<u32>> { panic!("polled") });
    let told: Vec<_> = never
        .with_lock(here.obtain("k").wait(ms(200)))
        .collect()
        .await;
    assert!(
        matches!(&told[..], [Err(told)] if told.is_not_acquired()),
        "{told:?}"
    );
    assert!(other.release().await.unwrap());

    // Dropped half-way: free.
    let mut endless = Box::pin(stream::repeat(7).with_lock((&here, "k")));
    assert_eq!(endless.try_next().await.unwrap(), Some(7));
    assert!(!other.acquire_once().await.unwrap());
    drop(endless);
    assert!(
        within(BOUND, "it is released", other.acquire())
            .await
            .unwrap()
    );
    assert!(other.release().await.unwrap());
    nothing_left(&server, &[&here, &there]).await;
}

/// A release that comes too late has an error of its own, which no other ending has; it names the lease, and takes
/// nothing from the next.
#[tokio::test(start_paused = true)]
async fn expired_before_release() {
    let store = MemoryStore::new();
    let (here, there) = (in_memory(&store), in_memory(&store));
    let lock = here.obtain("k").ttl(secs(10)).renewal(Renewal::off());
    let lease = lock.lease().await.unwrap();
    let late = lock.clone();
    sleep(secs(11)).await;
    let next = there.obtain("k").ttl(secs(60)).lease_within(ms(0)).await;
    let next = next.unwrap();
    let told = lease.view().lost().await;
    let LockError::Lost { key, token, .. } = &told else {
        panic!("{told:?}");
    };
    assert_eq!((&**key, *token), ("k", lease.token()));
    assert!(!told.is_not_acquired() && !told.to_string().is_empty());
    assert_lost(lease.release().await, "k");
    assert!(next.is_valid() && next.token() > *token);

    // The same of a handle, told once: then there is nothing to release.
    next.release().await.unwrap();
    assert!(late.acquire().await.unwrap());
    sleep(secs(11)).await;
    assert!(!late.is_acquired());
    assert_lost(late.release().await, "k");
    assert!(!late.release().await.unwrap());
    // And of work: it is stopped.
    assert_lost(sleep(secs(11)).with_lock(&late).await, "k");
    assert_eq!((store.keys(), here.in_use(), there.in_use()), (0, 0, 0));
}

/// There are no entries of idle locks that would have to be evicted: nothing is kept for a name that is not in use, here
/// or on the server, though handles to it are.
#[tokio::test]
async fn eviction_of_idle_entries() {
    const NAMES: usize = 3_000;
    let server = RedisServer::start();
    let (here, there) = (process(&server).await, process(&server).await);
    let handles: Vec<_> = (0..NAMES)
        .map(|n| [&here, &there][n % 2].obtain(format!("name {n}")))
        .collect();
    let used = join_all(handles.iter().map(async |lock| {
        assert!(lock.acquire().await.unwrap());
        assert!(lock.release().await.unwrap());
        // This waits until its time is over, too.
        let lease = lock.lease().await.unwrap();
        assert!(!lock.acquire_within(ms(1)).await.unwrap());
        lease.release().await.unwrap();
    }));
    within(12 * BOUND, "all are used", used).await;
    nothing_left(&server, &[&here, &there]).await;
    let fence = server.ask::<u64>(&["STRLEN", "lock:~fence"]);
    assert!(fence < 30, "the fence grows with the names: {fence} bytes");
    // No handle is spoilt by that, as an evicted one is elsewhere.
    assert!(handles[0].acquire_once().await.unwrap());
    assert!(handles[0].release().await.unwrap());
}

/// Whose lock it is, is looked at where it is deleted: in one call that the server does as one, so that nobody's lock
/// is freed by one who had it before.
#[tokio::test]
async fn owner_checked_atomic_release() {
    on_a_steady_machine(async || {
        let server = RedisServer::start();
        let (here, there) = (process(&server).await, process(&server).await);
        let short = here.obtain("k").ttl(ms(300)).renewal(Renewal::off());
        let next = there.obtain("k").ttl(secs(60));

        // Released: one call, and no look beforehand.
        let lease = short.lease().await.unwrap();
        server.reset_stats();
        released(lease).await;
        let calls = server.all_calls();
        assert_eq!(calls.get("evalsha"), Some(&1), "{calls:?}");
        assert_eq!(calls.get("eval"), None);

        // Run out, and another's by now: refused.
        let late = short.lease().await.unwrap();
        let taken = within(BOUND, "the next has it", next.lease())
            .await
            .unwrap();
        let owner = server.get("lock:k").unwrap();
        assert_lost(late.release().await, "k");
        assert_eq!(server.get("lock:k"), Some(owner.clone()));
        // By a drop as well, and by a handle that never had it.
        assert!(!short.release().await.unwrap());
        drop(short.lease_within(ms(0)));
        assert_eq!(server.get("lock:k"), Some(owner));
        released(taken).await;

        // Overwritten by a stranger while it was valid: the stranger's.
        let lease = next.lease().await.unwrap();
        server.set("lock:k", "stranger");
        assert_lost(lease.release().await, "k");
        assert_eq!(server.get("lock:k").as_deref(), Some("stranger"));
        server.del("lock:k");

        // Around the very end of the lease, when look and deletion would fall apart if they were two.
        for round in 0..10 {
            let lease = short.lease().await.unwrap();
            let waiter = tokio::spawn(next.clone().lease());
            queued(&server, 1).await;
            sleep(ms(285 + 3 * round)).await;
            // In time, too late, or overtaken by the deadline on its way: never the next one's lock.
            match lease.release().await {
                Ok(()) | Err(LockError::Lost { .. } | LockError::Store { .. }) => {}
                told => panic!("{told:?}"),
            }
            let lease = within(BOUND, "the next has it", waiter).await;
            let lease = lease.unwrap().unwrap();
            assert!(lease.is_valid() && server.exists("lock:k"));
            released(lease).await;
        }
        wait_until("nothing is held", BOUND, || !server.exists("lock:k")).await;
        nothing_left(&server, &[&here, &there]).await;
    })
    .await;
}
