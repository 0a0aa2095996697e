//! What processes share on a server, to the byte: other versions of this crate read it. And what this one does about
//! what it cannot read.
//!
//! A change that breaks a test of the first half is one of a format: it needs another number, and a word in the
//! changelog.

use std::time::{Duration, Instant};

use redis::{Connection, PubSub};

use super::registry::{
    BOUND, HELD, Registry, TTL, attempt, enter, place, queue, release, renew, won,
};
use super::support::{RedisServer, next_message, on_a_steady_machine, wait_until};
use crate::handle::{Lease, LockRegistry};
use crate::store::contract::{Op, Outcome, Owner, StoreEvent};

const FENCE: &str = "lock:~fence";
const QUEUE: &str = "{lock:k}:~queue2";

fn connection(server: &RedisServer) -> Connection {
    let client = redis::Client::open(server.url()).unwrap();
    client.get_connection().unwrap()
}

/// The next message, which was published by now.
fn heard(pubsub: &mut PubSub<'_>) -> String {
    next_message(pubsub, BOUND).get_payload().unwrap()
}

fn kind(server: &RedisServer, key: &str) -> String {
    server.ask(&["TYPE", key])
}

fn listen(owner: u64) -> Op {
    let (owner, ttl) = (Owner::exclusive(owner), TTL);
    Op::Listen { owner, ttl }
}

// ---- what is shared

#[tokio::test]
async fn the_value_of_a_lock_and_the_fence_are_as_other_versions_know_them() {
    let server = RedisServer::start();
    let mut one = Registry::on(&server, "a1").await;
    let epoch = won(&one.outcome("k", attempt(18_446_744_073_709_551_615)).await);
    let mut keys = server.keys("*");
    keys.sort();
    assert_eq!(keys, ["lock:k", FENCE]);
    assert_eq!(kind(&server, "lock:k"), "string");
    let value = server.get("lock:k").unwrap();
    assert_eq!(value, "a1:18446744073709551615");
    assert!((20_000..=30_000).contains(&server.pttl("lock:k")));
    assert_eq!(kind(&server, FENCE), "string");
    // The last epoch, in decimals: nothing before, and nothing behind.
    assert_eq!(server.get(FENCE).unwrap(), epoch.to_string());
    assert_eq!(server.pttl(FENCE), -1, "it stays for ever");
}

#[tokio::test]
async fn the_tickets_of_a_queue_are_as_other_versions_know_them() {
    let server = RedisServer::start();
    let mut one = Registry::on(&server, "a1").await;
    let mut two = Registry::on(&server, "b2").await;
    let mut three = Registry::on(&server, "c3").await;
    won(&one.outcome("k", attempt(1)).await);
    let (seconds, micros): (u64, u64) = server.ask(&["TIME"]);
    let place = place(&two.outcome("k", enter(2)).await);
    three.outcome("k", listen(3)).await;
    assert_eq!(kind(&server, QUEUE), "zset");
    let tickets = queue(&server, "lock:k");
    assert_eq!(tickets[0], ("b2:2 30000".to_owned(), place));
    assert_eq!(tickets.len(), 1);
    let listeners: Vec<String> = server.ask(&["ZRANGE", "{lock:k}:~listen1", "0", "-1"]);
    assert_eq!(listeners, ["c3:3"]);
    // The server's time in µs.
    let now = seconds * 1_000_000 + micros;
    assert!((now..now + 10_000_000).contains(&place), "{place}, {now}");
    assert!((85_000..=95_000).contains(&server.pttl(QUEUE)));
    let mut channels = server.channels();
    channels.sort();
    let names = ["lock:~grant:a1", "lock:~grant:b2", "lock:~grant:c3"];
    assert_eq!(channels, names);
}

/// `1 <owner> <ttl in ms> <epoch> <server time in µs> <key>`, and `freed <key>`.
#[tokio::test]
async fn grants_and_notices_are_as_other_versions_know_them() {
    let server = RedisServer::start();
    let mut one = Registry::on(&server, "a1").await;
    let mut two = Registry::on(&server, "b2").await;
    let mut three = Registry::on(&server, "c3").await;
    let mut connection = connection(&server);
    let mut pubsub = connection.as_pubsub();
    pubsub.subscribe("lock:~grant:b2").unwrap();
    pubsub.subscribe("lock:~grant:c3").unwrap();
    let key = "a key: 1";
    won(&one.outcome(key, attempt(1)).await);
    two.outcome(key, enter(2)).await;
    three.outcome(key, listen(3)).await;
    assert_eq!(one.outcome(key, release(1)).await, HELD);
    let (_, grant) = two.granted().await;
    let (epoch, at) = (grant.epoch, grant.at);
    assert_eq!(server.get(FENCE).unwrap(), epoch.to_string());
    assert!(epoch >= at && at > 1_700_000_000_000_000, "{epoch}, {at}");
    let literal = format!("1 b2:2 30000 {epoch} {at} a key: 1");
    assert_eq!(heard(&mut pubsub), literal);
    assert_eq!(server.get("lock:a key: 1").unwrap(), "b2:2");
    assert!((20_000..=30_000).contains(&server.pttl("lock:a key: 1")));
    // It is kept for 100 ms. A busy machine may look too late, and looks again.
    let (mut kept, begin) = (None, Instant::now());
    while begin.elapsed() < BOUND {
        assert_eq!(two.outcome(key, release(2)).await, HELD);
        assert_eq!(heard(&mut pubsub), "freed a key: 1");
        kept = server.get("lock:a key: 1");
        let left = server.pttl("lock:a key: 1");
        assert!(left <= 100 && left != -1, "{left}");
        if kept.is_some() {
            break;
        }
        won(&two.outcome(key, attempt(2)).await);
        three.outcome(key, listen(3)).await;
    }
    assert_eq!(kept.as_deref(), Some("c3:3"));
}

/// What another version has left there is served, as it would be by that one.
#[tokio::test]
async fn a_ticket_that_another_version_wrote_is_served() {
    let server = RedisServer::start();
    let mut one = Registry::on(&server, "a1").await;
    let mut connection = connection(&server);
    let mut pubsub = connection.as_pubsub();
    pubsub.subscribe("lock:~grant:zz").unwrap();
    won(&one.outcome("k", attempt(1)).await);
    server.cmd(&["ZADD", QUEUE, "1700000000000000", "zz:77 5000"]);
    assert_eq!(one.outcome("k", release(1)).await, HELD);
    let message = heard(&mut pubsub);
    let words: Vec<_> = message.split(' ').collect();
    assert_eq!(words[..3], ["1", "zz:77", "5000"]);
    assert_eq!(words[3], server.get(FENCE).unwrap());
    assert_eq!(words[5..], ["k"]);
    assert_eq!(server.get("lock:k").unwrap(), "zz:77");
    assert!((1..=5_000).contains(&server.pttl("lock:k")));

    // And it is another version that gives the lock to ours.
    let place = place(&one.outcome("k", enter(2)).await);
    assert_eq!(queue(&server, "lock:k"), [("a1:2 30000".to_owned(), place)]);
    server.cmd(&["ZREM", QUEUE, "a1:2 30000"]);
    server.cmd(&["SET", "lock:k", "a1:2", "PX", "30000"]);
    let at = place + 1_000_000;
    let grant = format!("1 a1:2 30000 {} {at} k", at + 3);
    server.cmd(&["PUBLISH", "lock:~grant:a1", &grant]);
    let (key, grant) = one.granted().await;
    let told = (&*key, grant.owner, grant.ttl, grant.epoch, grant.at);
    assert_eq!(told, ("k", Owner::exclusive(2), TTL, at + 3, at));
    assert_eq!(one.outcome("k", renew(2, TTL)).await, Outcome::Renewed);
    assert_eq!(one.outcome("k", release(2)).await, HELD);
}

// ---- what is not understood

/// A registry that gets its answer, however long the server stands still.
async fn patient(server: &RedisServer) -> LockRegistry {
    let url = format!("{}?response_timeout=30s", server.url());
    LockRegistry::connect(url).await.unwrap()
}

/// Two registries, one of which holds and the other of which waits.
async fn waited_for(server: &RedisServer) -> (LockRegistry, Lease, tokio::task::JoinHandle<Lease>) {
    let (one, two) = (patient(server).await, patient(server).await);
    let held = one.obtain("k").lease().await.unwrap();
    let waiter = tokio::spawn(async move { two.obtain("k").lease().await.unwrap() });
    wait_until("it stands in the queue", BOUND, || server.exists(QUEUE)).await;
    (one, held, waiter)
}

/// A version whose tickets are in another format has a queue of its own beside ours: turns in ours are as always, and
/// nothing there is read, or written.
#[tokio::test]
async fn a_queue_of_another_format_is_left_alone() {
    const OTHER: &str = "{lock:k}:~queue1";
    let server = RedisServer::start();
    let theirs = ["zz:1 30000", "zz:1|30000|more", "{\"owner\":\"zz:1\"}"];
    for (place, ticket) in theirs.iter().enumerate() {
        server.cmd(&["ZADD", OTHER, &place.to_string(), ticket]);
    }
    let (one, held, waiter) = waited_for(&server).await;
    held.release().await.unwrap();
    let next = tokio::time::timeout(BOUND, waiter).await.unwrap().unwrap();
    next.release().await.unwrap();
    assert!(one.obtain("k").acquire_once().await.unwrap());
    let left: Vec<String> = server.ask(&["ZRANGE", OTHER, "0", "-1"]);
    assert_eq!(left, theirs);
    assert_eq!(server.pttl(OTHER), -1);
}

/// None of these is a ticket: they leave the queue when the lock is handed over, and are told nothing. Whoever stands
/// behind them is served at once.
#[tokio::test]
async fn an_invalid_ticket_blocks_nobody() {
    on_a_steady_machine(async || {
        let server = RedisServer::start();
        let mut connection = connection(&server);
        let mut pubsub = connection.as_pubsub();
        pubsub.psubscribe("lock:~grant:zz*").unwrap();
        pubsub.subscribe("lock:~grant:zz").unwrap();
        let (_one, held, waiter) = waited_for(&server).await;
        let strange = [
            "zz",
            "zz:1",
            "zz:1 30000 more",
            "zz:1 30000 r r",
            "zz:1 30000 0/4",
            "zz:1 30000 1/4/4",
            "zz:1  30000",
            "zz:x 30000",
            "2 zz:1 30000",
            "zz:1 30s",
            "zz:1 0",
            "",
        ];
        for (place, ticket) in strange.iter().enumerate() {
            server.cmd(&["ZADD", QUEUE, &place.to_string(), ticket]);
        }
        let begin = Instant::now();
        held.release().await.unwrap();
        let next = tokio::time::timeout(BOUND, waiter).await.unwrap().unwrap();
        assert!(begin.elapsed() < Duration::from_secs(5), "by grant");
        assert!(!server.exists(QUEUE));
        server.cmd(&["PUBLISH", "lock:~grant:zz", "the last"]);
        assert_eq!(heard(&mut pubsub), "the last");
        next.release().await.unwrap();
    })
    .await;
}

/// A version that publishes in another format has given us the lock: we do not read it, and find the lock ours when we
/// look (W2), whole and with an epoch of its own.
#[tokio::test]
async fn a_grant_of_another_format_is_made_good_by_looking() {
    let server = RedisServer::start();
    let mut one = Registry::on(&server, "a1").await;
    server.cmd(&["SET", "lock:k", "zz:1", "PX", "60000"]);
    place(&one.outcome("k", enter(1)).await);
    server.cmd(&["ZREM", QUEUE, "a1:1 30000"]);
    server.cmd(&["SET", "lock:k", "a1:1", "PX", "10000"]);
    for message in [
        "2 a1:1 30000 1795257942885244 1795257942885243 k",
        "1 a1:1 30s 1795257942885244 1795257942885243 k",
        "1 a1:1 30000 0x12 1795257942885243 k",
        "1 a1:1 30000 1795257942885244 k",
        "{\"owner\":\"a1:1\",\"key\":\"k\"}",
        "",
    ] {
        server.cmd(&["PUBLISH", "lock:~grant:a1", message]);
    }
    one.has_not_heard(|event| !matches!(event, StoreEvent::Up { .. }))
        .await;
    won(&one.outcome("k", enter(1)).await);
    // It had ten seconds.
    assert!((10_001..=30_000).contains(&server.pttl("lock:k")));
    assert_eq!(one.outcome("k", release(1)).await, HELD);
    assert!(!server.exists("lock:k"));
}

/// An owner of a form that we do not know is a foreign lock: it excludes us, is neither renewed nor freed by us, and
/// who waits has the lock when it has run out (W2).
#[tokio::test]
async fn an_owner_of_another_form_is_a_foreign_lock() {
    on_a_steady_machine(async || {
        let server = RedisServer::start();
        let locks = patient(&server).await;
        for value in ["v2/zz/1", "zz", ":", "", "zz:1:2", "\u{1}\u{2}"] {
            server.set("lock:k", value);
            assert!(
                !locks.obtain("k").acquire_once().await.unwrap(),
                "{value:?}"
            );
            assert_eq!(server.get("lock:k").as_deref(), Some(value));
            assert_eq!(server.pttl("lock:k"), -1);
            let begin = Instant::now();
            server.cmd(&["SET", "lock:k", value, "PX", "250"]);
            let lease = locks.obtain("k").lease().await.unwrap();
            let took = begin.elapsed();
            // The server reckons in whole milliseconds.
            let least = Duration::from_millis(240);
            assert!(took > least && took < Duration::from_secs(5), "{took:?}");
            lease.release().await.unwrap();
            assert!(!server.exists("lock:k"));
        }
    })
    .await;
}

/// An epoch that is later than our clock says: ours come after it.
#[tokio::test]
async fn a_fence_of_a_later_time_is_gone_on_from() {
    let server = RedisServer::start();
    let locks = patient(&server).await;
    let later = 2_000_000_000_000_000_u64;
    server.set(FENCE, &later.to_string());
    let lease = locks.obtain("k").lease().await.unwrap();
    assert_eq!(lease.token().get(), (later + 1) * 64);
    lease.release().await.unwrap();
    assert_eq!(server.get(FENCE).unwrap(), (later + 1).to_string());
}
