//! What only a server shows: its keys and commands, foreign locks, and ends of its own.

use std::future::pending;

use futures::StreamExt;
use futures::future::join_all;
use lockstream::store::RedisStore;
use lockstream::{
    FutureLockExt, Leadership, Lock, LockError, LockRegistry, LossCause, OnFinish, Renewal,
};
use tokio::time::{Instant, sleep, timeout};

use crate::assert_err;
use crate::redis::{Make, On, Redis};
use crate::support::{RedisServer, chain};
use crate::watch::{assert_names, name, told_so_far, told_until};
use crate::world::{
    BACK, BOUND, PATIENCE, SOON, TTL, World, assert_took, connected, empty, eventually, free, idle,
    is_held, ms, poll_once, waiting,
};

/// `SET key value NX PX`, as any other program locks: whether it got the key.
fn set_nx(server: &RedisServer, value: &str, ttl: &str) -> bool {
    let reply: Option<String> = server.ask(&["SET", "lock:k", value, "NX", "PX", ttl]);
    reply.is_some()
}

pub(crate) async fn plain_locks_exclude_us_and_we_them(w: &On<impl Make>) {
    let lock = w.registry().await.obtain("k");
    assert!(set_nx(w.server(), "foreign", "60000"));
    assert!(!lock.acquire_once().await.unwrap());
    assert!(!lock.acquire_within(ms(50)).await.unwrap());
    let seen = lock.inspect().await.unwrap();
    assert_eq!(seen.owner(), Some("foreign"));
    assert!(w.server().del("lock:k"));

    assert!(lock.acquire_once().await.unwrap());
    assert!(!set_nx(w.server(), "foreign", "60000"));
    let pttl = w.server().pttl("lock:k");
    let left = u64::try_from(pttl).map(ms).expect("it has a ttl");
    assert!(left > TTL - SOON && left <= TTL, "{left:?}");
    assert!(lock.release().await.unwrap());
    let begin = Instant::now();
    assert!(set_nx(w.server(), "foreign", "500"));
    assert!(lock.acquire().await.unwrap());
    assert!(begin.elapsed() >= ms(480) && begin.elapsed() <= ms(500) + w.late());
}

/// Whatever it is: a text, no text at all, much of it, or nothing.
pub(crate) async fn what_a_foreign_lock_has_in_it_is_named(w: &On<impl Make>) {
    let registry = w.registry().await;
    let long = "x".repeat(10_000);
    let dots = "\u{fffd}".repeat(3);
    // In whole seconds: on a busy machine some may have gone.
    let tells_its_time = |error: &str| {
        let (_, left) = error.split_once(" for another ").expect("it has a ttl");
        let left = left.strip_suffix('s').map(str::parse::<u64>);
        matches!(left, Some(Ok(50..=60)))
    };
    for (value, told) in [
        ("cron".as_bytes(), ": held by cron for another "),
        (b"by hand & foot", ": held by by hand & foot for another "),
        (b"a:b\n\x1b", &*format!(": held by a:b{}", &dots[..6])),
        (b"\xff\xfe\x00", &*format!(": held by {dots}")),
        (long.as_bytes(), &*format!(": held by {} for", &long[..100])),
        (
            "z\u{fc}rich:7".as_bytes(),
            ": held by z\u{fc}rich for another",
        ),
        (b"", ""),
    ] {
        // As a script has it: any bytes.
        let value: String = value.iter().map(|byte| format!("\\{byte:03}")).collect();
        let set = format!("return redis.call('SET', KEYS[1], '{value}', 'PX', 60000)");
        w.server().cmd(&["EVAL", &set, "1", "lock:k"]);
        for wait in [ms(0), ms(30)] {
            let busy = registry.obtain("k").lease_within(wait).await;
            let error = assert_err!(busy, NotAcquired, "k").to_string();
            assert!(error.contains(told), "{error}");
            assert_eq!(error.contains("held by"), !told.is_empty(), "{error}");
            assert!(told.is_empty() || tells_its_time(&error), "{error}");
            // A reader is told by another part of the script.
            let busy = registry.obtain("k").shared().lease_within(wait).await;
            let error = assert_err!(busy, NotAcquired, "k").to_string();
            assert!(error.contains(told), "{error}");
        }
        w.server().del("lock:k");
    }
    w.server().set("lock:k", "by hand");
    let busy = registry.obtain("k").lease_within(ms(0)).await;
    let error = assert_err!(busy, NotAcquired, "k").to_string();
    assert!(
        error.ends_with(": held by by hand without a ttl"),
        "{error}"
    );
    w.server().del("lock:k");
}

/// A foreign lock that is prolonged wakes us for nothing.
pub(crate) async fn a_waiter_that_finds_a_foreign_lock_prolonged_goes_on_waiting(w: &Redis) {
    let lock = w.registry().await.obtain("k");
    // It lasts until it is waited for.
    assert!(set_nx(w.server(), "foreign", "2500"));
    let mut acquire = lock.acquire();
    assert!(poll_once(&mut acquire).await.is_none());
    waiting(&lock, 1).await;
    let begin = Instant::now();
    w.server().cmd(&["PEXPIRE", "lock:k", "3000"]);
    assert!(acquire.await.unwrap());
    assert!(begin.elapsed() >= ms(2980) && begin.elapsed() <= ms(3000) + w.late());
}

/// Deleted by hand, it is told to nobody; one that has no ttl at all is looked at every 8 to 12 s (W2).
pub(crate) async fn a_foreign_lock_without_a_ttl_is_looked_at(w: &Redis) {
    let lock = w.registry().await.obtain("k").wait(2 * BOUND);
    w.server().set("lock:k", "foreign");
    let mut acquire = lock.acquire();
    assert!(poll_once(&mut acquire).await.is_none());
    waiting(&lock, 1).await;
    w.server().del("lock:k");
    let begin = Instant::now();
    assert!(acquire.await.unwrap());
    assert!(begin.elapsed() <= ms(12_050) + w.late());
}

/// The value is compared and the key deleted in one step, and whoever waits is served at once.
pub(crate) async fn force_takes_a_plain_lock_of_others(w: &On<impl Make>) {
    let locks = w.registry().await;
    let lock = locks.obtain("k").wait(2 * BOUND);
    assert!(set_nx(w.server(), "foreign lock: 1", "60000"));
    let mut acquire = lock.acquire();
    assert!(poll_once(&mut acquire).await.is_none());
    waiting(&lock, 1).await;
    let seen = lock.inspect().await.unwrap();
    assert_eq!(seen.holders[0].name(), None);
    assert!(!locks.force_release("k", "foreign").await.unwrap());
    assert_eq!(w.server().get("lock:k").as_deref(), Some("foreign lock: 1"));
    let taken = locks.force_release("k", &seen.holders[0].owner).await;
    assert!(taken.unwrap());
    assert!(timeout(SOON, acquire).await.unwrap().unwrap());
    assert!(lock.release().await.unwrap());
    // What is no lock at all is left alone.
    w.server().cmd(&["LPUSH", "lock:k", "x"]);
    assert_err!(locks.force_release("k", "x").await, Store, "k");
    w.server().cmd(&["DEL", "lock:k"]);
    w.server().cmd(&["ZADD", "lock:k", "1", "x"]);
    assert_err!(locks.force_release("k", "x").await, Store, "k");
    assert!(w.server().del("lock:k"));
}

/// Also of a lock whose holders are over, and a queue of the dead.
pub(crate) async fn an_inspection_writes_nothing(w: &On<impl Make>) {
    let [here, there] = w.registries().await;
    let changes = || {
        let info: String = w.server().ask(&["INFO", "persistence"]);
        let line = info.lines().find(|it| it.starts_with("rdb_changes"));
        line.unwrap().to_owned()
    };
    let lock = here.obtain("k").shared().on_finish(OnFinish::LetExpire);
    lock.clone()
        .ttl(ms(1500))
        .lease()
        .await
        .unwrap()
        .finish()
        .await
        .unwrap();
    let held = lock.ttl(ms(60_000)).lease().await.unwrap();
    w.dead_waiter("k");
    eventually("one is over", async || {
        there.obtain("k").inspect().await.unwrap().holders.len() == 1
    })
    .await;
    let before = changes();
    let seen = there.obtain("k").inspect().await.unwrap();
    assert_eq!((seen.taken, seen.waiting), (1, 0));
    assert_eq!(changes(), before);
    let written: Vec<String> = w.server().ask(&["ZRANGE", "lock:k", "0", "-1"]);
    assert_eq!(written.len(), 2, "{written:?}");
    held.release().await.unwrap();
}

/// By whichever end of a lease: a release, a drop, a loss, or a shutdown.
pub(crate) async fn a_value_of_somebody_else_is_never_deleted(w: &Redis) {
    let registry = w.registry().await;
    let lock = registry.obtain("k").ttl(ms(500));
    let overwrite = || w.server().set("lock:k", "somebody else");
    let is_theirs = || w.server().get("lock:k").as_deref() == Some("somebody else");

    assert!(lock.acquire().await.unwrap());
    overwrite();
    assert_err!(lock.release().await, Lost, "k");
    assert!(is_theirs());

    w.server().del("lock:k");
    let lease = lock.lease().await.unwrap();
    overwrite();
    drop(lease);
    idle(&registry).await;
    assert!(is_theirs());

    w.server().del("lock:k");
    let work = async {
        overwrite();
        pending::<()>().await;
    };
    assert_err!(work.with_lock(&lock).await, Lost, "k");
    idle(&registry).await;
    assert!(is_theirs());

    // In vain waited for, and left.
    assert!(!lock.acquire_within(ms(50)).await.unwrap());
    idle(&registry).await;
    assert!(is_theirs());

    w.server().del("lock:k");
    // Found by a renewal, which gives it no ttl either.
    let renewed = registry.obtain("k").ttl(ms(6000));
    let lease = renewed.renewal(Renewal::watchdog()).lease().await.unwrap();
    let deadline = lease.deadline();
    overwrite();
    assert!(lease.lost().await.is_lost() && !lease.is_valid());
    assert!(Instant::now() < deadline, "found by no renewal");
    assert_err!(lease.release().await, Lost, "k");
    assert!(is_theirs() && w.server().pttl("lock:k") == -1);
    w.server().del("lock:k");
    let _lease = lock.lease().await.unwrap();
    overwrite();
    registry.shutdown().await;
    assert!(is_theirs());
    w.server().del("lock:k");
}

pub(crate) async fn nothing_is_left_but_the_fence(w: &On<impl Make>) {
    let registries: [_; 4] = w.registries().await;
    join_all((0..200).map(async |n| {
        let lock = registries[n % 4].obtain(format!("key {}", n % 10));
        async { sleep(ms(1)).await }.with_lock(&lock).await.unwrap();
        if n % 3 == 0 {
            let _ = lock.acquire_within(ms(1)).await.unwrap();
        }
    }))
    .await;
    for registry in &registries {
        idle(registry).await;
    }
    assert_eq!(w.server().keys("*"), ["lock:~fence"]);
    let fence: u64 = w.server().ask(&["STRLEN", "lock:~fence"]);
    assert!(fence < 30, "the fence grows with the names: {fence} bytes");
    // One channel a registry, however many keys were waited for; none of the server's other ways to subscribe.
    let channels = w.server().channels();
    assert_eq!(channels.len(), 4, "{channels:?}");
    let subscriptions = w
        .server()
        .clients()
        .iter()
        .map(|client| client.subscriptions())
        .sum::<u64>();
    assert_eq!(subscriptions, 4);
    assert_eq!(w.proxy().connections(), 4, "one connection a registry");
    drop(registries);
    eventually("the connections are closed", async || {
        w.proxy().connections() == 0
    })
    .await;
    eventually("the channels are gone", async || {
        w.server().channels().is_empty()
    })
    .await;
}

pub(crate) async fn who_waits_sends_nothing(w: &On<impl Make>) {
    let [holder, crowd] = w.registries().await;
    // Exclusive callers of a registry share a ticket, and others have one each.
    let modes: [fn(Lock) -> Lock; 3] = [|lock| lock, Lock::shared, |lock| lock.permits(2)];
    for (mode, tickets) in modes.into_iter().zip([1, 1000, 1000]) {
        let wanted = mode(crowd.obtain("k"));
        let held = holder.obtain("k").ttl(ms(60_000)).lease().await.unwrap();
        let mut in_line: Vec<_> = (0..1000).map(|_| wanted.lease()).collect();
        for waiter in &mut in_line {
            assert!(poll_once(waiter).await.is_none());
        }
        waiting(&holder.obtain("k"), tickets).await;
        let before = w.commands();
        sleep(ms(500)).await;
        assert_eq!(w.commands(), before);
        drop(in_line);
        waiting(&holder.obtain("k"), 0).await;
        held.release().await.unwrap();
    }
}

/// One to acquire and one to release, free or waited for.
pub(crate) async fn a_lock_costs_two_calls(w: &On<impl Make>) {
    let [one, two] = w.registries().await;
    // The scripts are known to the server from here on.
    async {}.with_lock((&one, "k")).await.unwrap();
    let calls = || w.server().calls("evalsha") + w.server().calls("eval");
    let modes: [fn(Lock) -> Lock; 2] = [|lock| lock, |lock| lock.permits(1)];
    for mode in modes {
        // Nothing is renewed meanwhile, on a busy machine either.
        let lock = mode(one.obtain("k").ttl(ms(60_000)));
        let before = calls();
        for _ in 0..10 {
            async {}.with_lock(&lock).await.unwrap();
        }
        assert_eq!(calls() - before, 20);

        let held = lock.lease().await.unwrap();
        let lock = mode(two.obtain("k").ttl(ms(60_000)));
        let before = calls();
        assert!(!lock.acquire_once().await.unwrap());
        assert_eq!(calls() - before, 1, "one question");
        assert_eq!(w.server().keys("*queue*"), [""; 0]);
        let mut acquire = lock.acquire();
        assert!(poll_once(&mut acquire).await.is_none());
        eventually("it stands in the queue", async || {
            w.server().keys("*queue*").len() == 1
        })
        .await;
        let before = calls();
        held.release().await.unwrap();
        assert!(acquire.await.unwrap());
        assert_eq!(calls() - before, 1, "the release is the hand-over");
        assert!(lock.release().await.unwrap());
    }
}

pub(crate) async fn tokens_grow_without_their_fence(w: &On<impl Make>) {
    let registry = w.registry().await;
    let lock = registry.obtain("k");
    let mut newest = 0;
    for round in 0..20 {
        let lease = lock.lease().await.unwrap();
        assert!(lease.token().get() > newest);
        newest = lease.token().get();
        lease.release().await.unwrap();
        if round % 2 == 0 {
            assert!(w.server().del("lock:~fence"));
        } else {
            w.server().flushall();
        }
    }
}

pub(crate) async fn scripts_that_the_server_forgot_are_sent_again(w: &On<impl Make>) {
    let [here, there] = w.registries().await;
    let renewed = here.obtain("k").ttl(ms(3000)).renewal(Renewal::watchdog());
    for _ in 0..3 {
        w.server().script_flush();
        let held = renewed.lease().await.unwrap();
        let deadline = held.deadline();
        w.server().script_flush();
        eventually("it is renewed", async || held.deadline() > deadline).await;
        assert!(held.is_valid());
        w.server().script_flush();
        let lock = there.obtain("k");
        let mut acquire = lock.acquire();
        assert!(poll_once(&mut acquire).await.is_none());
        waiting(&lock, 1).await;
        w.server().script_flush();
        held.release().await.unwrap();
        assert!(acquire.await.unwrap());
        w.server().script_flush();
        assert!(lock.release().await.unwrap());
    }
    // It is learnt again by the first that needs it, and the next pays nothing.
    w.server().script_flush();
    async {}.with_lock((&here, "k")).await.unwrap();
    w.server().reset_stats();
    async {}.with_lock((&here, "k")).await.unwrap();
    let calls = ["evalsha", "eval", "script"].map(|name| w.server().calls(name));
    assert_eq!(calls, [2, 0, 0]);
}

/// A connection that breaks again and again while many use it costs nobody a lease, a turn or an error.
pub(crate) async fn connections_that_are_killed_lose_nothing(w: &On<impl Make>) {
    let registries: [_; 4] = w.registries().await;
    let tasks = (0..40).map(|n| {
        let lock = registries[n % 4].obtain("k").ttl(ms(8000)).wait(3 * BOUND);
        async move {
            for _ in 0..5 {
                let lease = lock.lease().await.unwrap();
                sleep(ms(1)).await;
                assert!(lease.is_valid());
                lease.release().await.unwrap();
            }
        }
    });
    let mischief = async {
        for _ in 0..6 {
            sleep(ms(60)).await;
            w.server().client_kill_all();
            sleep(ms(60)).await;
            w.proxy().cut();
        }
    };
    tokio::join!(join_all(tasks), mischief);
    empty(w).await;
}

pub(crate) async fn a_server_that_is_stopped_is_told_of_in_time(w: &On<impl Make>) {
    let registry = w.builder().await.response_timeout(ms(300)).build().unwrap();
    connected(&registry).await;
    let lock = registry.obtain("k");
    // A question that is not answered in so short a time is asked again.
    assert!(lock.acquire().await.unwrap());
    assert!(lock.release().await.unwrap());
    w.server().stop();
    let begin = Instant::now();
    assert_err!(lock.acquire_once().await, Store, "k");
    assert_took(begin, ms(300), w.late());
    // It hangs: that is not "busy", however short the wait.
    assert_err!(lock.acquire_within(ms(20)).await, Store, "k");
    let begin = Instant::now();
    assert_err!(lock.acquire_within(ms(400)).await, Store, "k");
    assert_took(begin, ms(400), w.late());
    w.server().cont();
    // After a pause of the connection; and not because a lease is over that nobody has asked for any more.
    assert!(lock.acquire_within(BACK).await.unwrap());
    assert!(lock.release().await.unwrap());
    idle(&registry).await;
    free(&lock).await;
}

/// The server comes back without its data. Whoever held a key learns of it long before the ttl is over.
pub(crate) async fn a_server_that_lost_its_data_tells_the_holders(w: &mut On<impl Make>) {
    let [here, there] = w.registries().await;
    let lock = here.obtain("k").ttl(ms(120_000));
    let mut work = Box::pin(pending::<()>().with_lock(&lock));
    // However long the server takes to start again.
    let other = there.obtain("k").wait(ms(120_000));
    while !is_held(&other).await {
        assert!(poll_once(&mut work).await.is_none());
        sleep(ms(1)).await;
    }
    let mut in_line = other.acquire();
    assert!(poll_once(&mut in_line).await.is_none());
    waiting(&there.obtain("k"), 1).await;
    // However they are renewed, if at all.
    let renewed = async |key, renewal| {
        let lock = here.obtain(key).ttl(ms(120_000)).renewal(renewal);
        lock.lease().await.unwrap()
    };
    let renewed = [
        renewed("renewed", Renewal::watchdog()).await,
        renewed("bounded", Renewal::watchdog().max_renewals(3)).await,
    ];
    w.server_mut().restart();
    let begin = Instant::now();
    let losses = join_all(renewed.iter().map(|lease| lease.lost()));
    let (lost, acquired, losses) = tokio::join!(work, in_line, losses);
    assert!(losses.iter().all(LockError::is_lost), "{losses:?}");
    assert!(renewed.iter().all(|lease| !lease.is_valid()));
    let LockError::Lost { cause, .. } = assert_err!(lost, Lost, "k") else {
        unreachable!("it is a loss")
    };
    assert_eq!(cause, LossCause::ServerChanged);
    assert!(acquired.unwrap());
    // Who waits would ask by itself a second later (W2).
    assert!(begin.elapsed() < ms(7000), "{:?}", begin.elapsed());
    assert!(other.release().await.unwrap());
}

/// What the server refuses for good fails a wait at once, and a campaign not at all: rights are granted, and wrong
/// keys deleted.
pub(crate) async fn a_lead_that_the_server_refuses_is_had_when_it_relents(w: &Redis) {
    let lock = w.registry().await.obtain("k");
    let queue = "{lock:k}:~queue2";
    w.server().cmd(&["RPUSH", queue, "x"]);
    let error = assert_err!(lock.acquire().await, Store, "k");
    assert!(chain(&error).contains("WRONGTYPE"), "{error:?}");
    let mut campaign = lock.leadership();
    let told = campaign.next().await;
    assert!(matches!(told, Some(Leadership::Follower)), "{told:?}");
    let before = w.commands();
    assert!(timeout(ms(1500), campaign.next()).await.is_err());
    let sent = w.commands() - before;
    assert!((2..60).contains(&sent), "{sent} commands in 1.5 s");
    assert!(w.server().del(queue));
    let told = timeout(PATIENCE, campaign.next()).await.unwrap();
    assert!(matches!(told, Some(Leadership::Leader(_))), "{told:?}");
}

pub(crate) async fn connecting_tells_what_is_wrong(w: &Redis) {
    let fails = async |url: String| {
        let by_registry = LockRegistry::connect(url.clone())
            .await
            .map(drop)
            .unwrap_err();
        let by_store = RedisStore::connect(url).await.map(drop).unwrap_err();
        assert_eq!(by_registry.to_string(), by_store.to_string());
        by_registry.to_string()
    };
    fails("not a url".to_owned()).await;
    let denied = fails(w.server().url_with("nobody", "secret", 0)).await;
    assert!(!denied.contains("secret"), "{denied}");
    w.set_offline(true);
    let begin = Instant::now();
    fails(w.proxy().url()).await;
    let refused = LockRegistry::connect(w.proxy().url()).await.unwrap_err();
    assert!(refused.is_retryable(), "{refused}");
    assert!(begin.elapsed() < SOON);
    w.set_offline(false);
    let registry = LockRegistry::connect(w.proxy().url()).await.unwrap();
    assert_eq!(async { 1 }.with_lock((&registry, "k")).await.unwrap(), 1);
    let over_unix = LockRegistry::connect(w.server().unix_url()).await.unwrap();
    assert_eq!(async { 2 }.with_lock((&over_unix, "k")).await.unwrap(), 2);
}

/// A restart is an outage like any other: its beginning is told, and its end.
pub(crate) async fn a_restart_is_told_once(w: &mut Redis) {
    let registry = w.registry().await;
    let mut events = registry.events();
    w.server_mut().restart();
    told_until(&mut events, "store down").await;
    // It is connected to again when somebody needs it.
    let lock = registry.obtain("k");
    assert!(lock.acquire_within(BACK).await.unwrap());
    assert!(lock.release().await.unwrap());
    let mut told = told_so_far(&mut events).await;
    let up = told.iter().position(|event| name(event) == "store up");
    told.remove(up.expect("its end is told"));
    assert_names(&told, &["waiting", "acquired", "released"]);
}
