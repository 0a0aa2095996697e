//! How a lock goes from the owner that left it to the one that adopts it.

use std::time::Duration;

use super::registry::{
    HELD, NOT_HELD, Registry, TTL, attempt, enter, queue, refused, release, won,
};
use super::support::RedisServer;
use crate::base::Mode;
use crate::store::contract::{Op, Outcome, Owner, StoreEvent};

fn adopt(owner: u64, from: String, ttl: Duration) -> Op {
    Op::Adopt {
        owner: Owner::exclusive(owner),
        from: from.into(),
        ttl,
        within: ttl,
    }
}

#[tokio::test]
async fn s3_an_adoption_moves_the_lock_past_the_queue_and_may_be_asked_again() {
    let server = RedisServer::start();
    let mut one = Registry::on(&server, "a1").await;
    let mut two = Registry::on(&server, "b2").await;
    let mut three = Registry::on(&server, "c3").await;
    let left = won(&one.outcome("a b", attempt(1)).await);
    three.outcome("a b", enter(9)).await;
    let short = Duration::from_secs(5);
    let op = adopt(4, one.text(1), short);
    let first = won(&two.outcome("a b", op.clone()).await);
    assert!(first > left);
    assert_eq!(server.get("lock:a b"), Some(two.text(4)));
    assert!((1_000..=5_000).contains(&server.pttl("lock:a b")));
    assert_eq!(queue(&server, "lock:a b").len(), 1, "the queue stays");

    // The reply was lost: asked again it is proved again, and never made shorter.
    server.cmd(&["PEXPIRE", "lock:a b", "20000"]);
    assert!(won(&two.outcome("a b", op).await) > first);
    assert!(server.pttl("lock:a b") > 10_000);

    // What the first owner still sends harms nothing.
    assert_eq!(one.outcome("a b", release(1)).await, NOT_HELD);
    assert_eq!(server.get("lock:a b"), Some(two.text(4)));
    three
        .has_not_heard(|event| matches!(event, StoreEvent::Granted { .. }))
        .await;
    assert_eq!(two.outcome("a b", release(4)).await, HELD);
    assert_eq!(three.granted().await.1.owner, Owner::exclusive(9));
}

#[tokio::test]
async fn s3_a_missing_lease_is_not_adopted_and_nothing_is_written() {
    let server = RedisServer::start();
    let mut one = Registry::on(&server, "a1").await;
    let op = adopt(4, "gone:1".into(), TTL);
    assert_eq!(one.outcome("k", op.clone()).await, Outcome::NotOld);
    assert_eq!(server.keys("*"), [""; 0]);
    // An owner whose text begins alike is another one.
    server.set("lock:k", "gone:11");
    assert_eq!(one.outcome("k", op).await, Outcome::NotOld);
    assert_eq!(server.get("lock:k").as_deref(), Some("gone:11"));
    assert_eq!(server.keys("*"), ["lock:k"]);
}

/// S1: what can fail comes before the lock is set.
#[tokio::test]
async fn s1_an_adoption_that_errs_has_done_nothing() {
    let server = RedisServer::start();
    let mut one = Registry::on(&server, "a1").await;
    server.cmd(&["SET", "lock:k", "x:1", "PX", "9000"]);
    server.cmd(&["LPUSH", "lock:~fence", "x"]);
    let op = adopt(4, "x:1".into(), TTL);
    refused(one.ask("k", op.clone()).await);
    assert_eq!(server.get("lock:k").as_deref(), Some("x:1"));
    assert!(server.pttl("lock:k") <= 9000);
    // Nor does the lock last longer if it is ours already, and no epoch can be taken from the fence.
    server.cmd(&["SET", "lock:k", &one.text(4), "PX", "9000"]);
    refused(one.ask("k", op.clone()).await);
    assert!(server.pttl("lock:k") <= 9000);
    server.del("lock:~fence");
    server.del("lock:k");
    server.cmd(&["LPUSH", "lock:k", "x:1"]);
    refused(one.ask("k", op).await);
    assert_eq!(server.keys("*"), ["lock:k"]);
}

/// The key gets another owner and another end, in one call, also on a server that is full.
#[tokio::test]
async fn m8_a_key_is_kept_for_nobody() {
    let server = RedisServer::start();
    let mut one = Registry::on(&server, "a1").await;
    let keep = |mode, sequence, seconds| Op::Keep {
        owner: Owner { sequence, mode },
        left: Duration::from_secs(seconds),
    };
    let limit = 3;
    let permit = Mode::Permits { limit, weight: 2 };
    let modes = [(Mode::Exclusive, 1), (Mode::Shared, 2), (permit, 3)];
    for (mode, sequence) in modes {
        let (owner, ttl) = (Owner { sequence, mode }, TTL);
        let key = format!("{mode}");
        won(&one.outcome(&key, Op::Attempt { owner, ttl }).await);
    }
    server.cmd(&["CONFIG", "SET", "maxmemory", "1"]);
    server.script_flush();
    for (mode, sequence) in modes {
        let (key, within) = (format!("{mode}"), TTL);
        let (lock, owner) = (format!("lock:{mode}"), Owner { sequence, mode });
        assert_eq!(one.outcome(&key, keep(mode, sequence, 20)).await, HELD);
        let left = server.pttl(&lock);
        assert!(left > 15_000 && left <= 20_001, "{key}: {left}");
        for seconds in [20, 60] {
            let again = keep(mode, sequence, seconds);
            assert_eq!(one.outcome(&key, again).await, NOT_HELD, "{key}");
        }
        let (ttl, renew) = (2 * TTL, Outcome::Lost);
        let renewal = Op::Renew { owner, ttl, within };
        assert_eq!(one.outcome(&key, renewal).await, renew, "{key}");
        assert_eq!(one.outcome(&key, Op::Release { owner }).await, NOT_HELD);
        let (left, before) = (server.pttl(&lock), left);
        assert!(left <= before && left > before - 8000, "{key}: {left}");
    }
    assert_eq!(server.get("lock:exclusive").as_deref(), Some("a1+kept:1"));
    let members: Vec<String> = server.ask(&["ZRANGE", &format!("lock:{permit}"), "0", "-1"]);
    assert_eq!(members, ["a1+kept:3 1/3", "a1+kept:3 2/3"]);
    // There is room for one more permit, and for readers.
    server.cmd(&["CONFIG", "SET", "maxmemory", "0"]);
    for (mode, joins) in [(Mode::Shared, true), (permit, false)] {
        let (owner, ttl) = (Owner { sequence: 9, mode }, TTL);
        let key = format!("{mode}");
        let asked = one.outcome(&key, Op::Attempt { owner, ttl }).await;
        assert_eq!(matches!(asked, Outcome::Won { .. }), joins, "{mode}");
    }
    // Whoever knows under which name it is kept may take it.
    let taken = adopt(5, "a1+kept:1".to_owned(), TTL);
    won(&one.outcome("exclusive", taken).await);
}

/// Whoever waits has heard of another end. Its ticket stays, and is told to ask.
#[tokio::test]
async fn m8_the_first_in_the_queue_is_told() {
    let server = RedisServer::start();
    let mut one = Registry::on(&server, "a1").await;
    let mut two = Registry::on(&server, "b2").await;
    let mut three = Registry::on(&server, "c3").await;
    won(&one.outcome("k", attempt(1)).await);
    two.outcome("k", enter(1)).await;
    three.outcome("k", enter(1)).await;
    let (owner, left) = (Owner::exclusive(1), Duration::from_secs(5));
    assert_eq!(one.outcome("k", Op::Keep { owner, left }).await, HELD);
    while !matches!(two.next().await, StoreEvent::Freed { .. }) {}
    three
        .has_not_heard(|event| matches!(event, StoreEvent::Freed { .. }))
        .await;
    assert_eq!(queue(&server, "lock:k").len(), 2);
}
