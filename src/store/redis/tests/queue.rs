//! Tickets: their places, and how long they stand.

use super::registry::{
    HELD, NOT_HELD, Registry, TTL, attempt, enter, enter_at, place, queue, refused, release,
    withdraw, won, yield_turn,
};
use super::support::RedisServer;
use crate::store::contract::{Op, Outcome, Owner};

const QUEUE: &str = "{lock:k}:~queue1";

#[tokio::test]
async fn k1_a_ticket_entered_twice_stands_once_in_the_same_place() {
    let server = RedisServer::start();
    server.set("lock:k", "foreign");
    let mut one = Registry::on(&server, "a1").await;
    let mut two = Registry::on(&server, "b2").await;
    let first = place(&one.outcome("k", enter(1)).await);
    let second = place(&two.outcome("k", enter(1)).await);
    assert!(second > first);
    assert_eq!(place(&one.outcome("k", enter(1)).await), first);
    assert_eq!(
        place(&one.outcome("k", enter_at(1, first + 5)).await),
        first
    );
    assert_eq!(
        queue(&server, "lock:k"),
        [(one.ticket(1), first), (two.ticket(1), second)]
    );
    assert_eq!(one.session().inspect("k".into()).await.unwrap().tickets, 2);
}

#[tokio::test]
async fn k2_a_clock_set_back_lets_nobody_overtake() {
    let server = RedisServer::start();
    server.set("lock:k", "foreign");
    let mut one = Registry::on(&server, "a1").await;
    // A ticket from before the clock was set back by a century.
    let ahead = 4_000_000_000_000_000_u64;
    server.cmd(&["ZADD", QUEUE, &ahead.to_string(), "zz:1 30000"]);
    assert_eq!(place(&one.outcome("k", enter(1)).await), ahead + 1);
}

#[tokio::test]
async fn k2_a_ticket_entered_again_keeps_its_place() {
    let server = RedisServer::start();
    server.set("lock:k", "foreign");
    let mut one = Registry::on(&server, "a1").await;
    let mut two = Registry::on(&server, "b2").await;
    let first = place(&one.outcome("k", enter(1)).await);
    two.outcome("k", enter(1)).await;
    server.cmd(&["ZREM", QUEUE, &one.ticket(1)]);
    assert_eq!(place(&one.outcome("k", enter_at(1, first)).await), first);
    assert_eq!(queue(&server, "lock:k")[0].0, one.ticket(1));
}

#[tokio::test]
async fn k2_a_place_in_the_future_is_not_kept() {
    let server = RedisServer::start();
    server.set("lock:k", "foreign");
    let mut one = Registry::on(&server, "a1").await;
    let ahead = 4_000_000_000_000_000;
    assert!(place(&one.outcome("k", enter_at(1, ahead)).await) < ahead);
}

/// The lock became free while the connection was down. Our place was in front of the one that
/// stands now, so it is our turn.
#[tokio::test]
async fn k2_a_place_in_front_wins_a_free_lock() {
    let server = RedisServer::start();
    server.set("lock:k", "foreign");
    let mut one = Registry::on(&server, "a1").await;
    let mut two = Registry::on(&server, "b2").await;
    let first = place(&one.outcome("k", enter(1)).await);
    two.outcome("k", enter(1)).await;
    server.cmd(&["ZREM", QUEUE, &one.ticket(1)]);
    server.del("lock:k");
    won(&one.outcome("k", enter_at(1, first)).await);
    assert_eq!(server.get("lock:k"), Some(one.text(1)));
    assert_eq!(queue(&server, "lock:k").len(), 1, "the other ticket stands");
}

/// Without it the second ZADD would make a queue that lasts for ever: taking the last ticket had
/// deleted the first one, and its expiry with it.
#[tokio::test]
async fn k3_every_zadd_sets_the_queues_expiry() {
    let server = RedisServer::start();
    let mut one = Registry::on(&server, "a1").await;
    let mut two = Registry::on(&server, "b2").await;
    let expiry = || server.pttl(QUEUE);

    won(&one.outcome("k", attempt(1)).await);
    two.outcome("k", enter(1)).await;
    assert!((85_000..=95_000).contains(&expiry()), "{}", expiry());

    // The ticket is taken and the queue with it; the yielder's own makes it anew.
    one.outcome("k", yield_turn(1, 2)).await;
    assert_eq!(queue(&server, "lock:k").len(), 1);
    assert!((85_000..=95_000).contains(&expiry()), "{}", expiry());
}

#[tokio::test]
async fn k3_the_queue_lasts_longer_than_the_lock_and_is_never_cut_short() {
    let server = RedisServer::start();
    let mut one = Registry::on(&server, "a1").await;
    let mut two = Registry::on(&server, "b2").await;
    let long = Op::Attempt {
        owner: Owner(1),
        ttl: 100 * TTL,
    };
    won(&one.outcome("k", long).await);
    two.outcome("k", enter(1)).await;
    assert!(server.pttl(QUEUE) > 3_050_000);

    server.cmd(&["PEXPIRE", "lock:k", "1000"]);
    two.outcome("k", enter(1)).await;
    assert!(server.pttl(QUEUE) > 3_050_000, "never shorter");

    // A foreign lock with no ttl: waiters enter again every 10 s, so a minute is enough.
    server.set("lock:f", "foreign");
    two.outcome("f", enter(2)).await;
    let expiry = server.pttl("{lock:f}:~queue1");
    assert!((55_000..=65_000).contains(&expiry), "{expiry}");
}

#[tokio::test]
async fn withdraw_takes_the_ticket_out_whatever_its_ttl() {
    let server = RedisServer::start();
    server.set("lock:k", "foreign");
    let mut one = Registry::on(&server, "a1").await;
    one.outcome("k", enter(1)).await;
    one.outcome("k", enter(11)).await;
    let other = Op::Enter {
        owner: Owner(1),
        ttl: 2 * TTL,
        score: None,
    };
    one.outcome("k", other).await;
    assert_eq!(one.outcome("k", withdraw(1)).await, NOT_HELD);
    let left = queue(&server, "lock:k");
    assert_eq!(left.len(), 1, "{left:?}");
    assert_eq!(left[0].0, one.ticket(11), "owner 11 is not owner 1");
    assert_eq!(one.outcome("k", withdraw(1)).await, NOT_HELD, "idempotent");
}

#[tokio::test]
async fn withdraw_of_an_owner_that_was_granted_gives_the_lock_on() {
    let server = RedisServer::start();
    let mut one = Registry::on(&server, "a1").await;
    let mut two = Registry::on(&server, "b2").await;
    won(&one.outcome("k", enter(1)).await);
    two.outcome("k", enter(1)).await;
    assert_eq!(one.outcome("k", withdraw(1)).await, HELD);
    assert_eq!(two.granted().await.1.owner, Owner(1));
    assert_eq!(two.outcome("k", withdraw(1)).await, HELD);
    assert!(!server.exists("lock:k"));
}

#[tokio::test]
async fn s1_a_wrong_type_in_the_queue_leaves_nothing_done() {
    let server = RedisServer::start();
    server.cmd(&["RPUSH", QUEUE, "x"]);
    let mut one = Registry::on(&server, "a1").await;
    for op in [attempt(1), enter(1)] {
        let (why, retryable) = refused(one.ask("k", op).await);
        assert!(why.contains("WRONGTYPE") && !retryable, "{why}");
        assert_eq!(server.keys("*"), [QUEUE]);
    }
}

#[tokio::test]
async fn s1_a_wrong_type_in_the_queue_keeps_no_lock_locked() {
    let server = RedisServer::start();
    let mut one = Registry::on(&server, "a1").await;
    won(&one.outcome("k", attempt(1)).await);
    server.cmd(&["RPUSH", QUEUE, "x"]);
    let (why, _) = refused(one.ask("k", yield_turn(1, 2)).await);
    assert!(why.contains("WRONGTYPE"), "{why}");
    assert_eq!(
        server.get("lock:k"),
        Some(one.text(1)),
        "the old owner has it still"
    );
    assert_eq!(one.outcome("k", release(1)).await, HELD);
    assert!(!server.exists("lock:k"));
}

#[tokio::test]
async fn a_lock_with_a_hash_tag_keeps_its_queue_in_its_slot() {
    let server = RedisServer::builder().start();
    server.set("lock:{order}:7", "foreign");
    let mut one = Registry::on(&server, "a1").await;
    assert!(matches!(
        one.outcome("{order}:7", enter(1)).await,
        Outcome::Busy { score: Some(_), .. }
    ));
    assert!(server.exists("lock:{order}:7:~queue1"));
}
