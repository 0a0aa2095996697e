//! Tickets: their places, and how long they stand.

use super::registry::{
    HELD, NOT_HELD, Registry, TTL, attempt, enter, enter_at, place, queue, refused, release,
    withdraw, won, yield_turn,
};
use super::support::RedisServer;
use crate::store::contract::{Op, Outcome, Owner};
use crate::store::redis::script;

const QUEUE: &str = "{lock:k}:~queue2";

#[tokio::test]
async fn k1_a_ticket_entered_twice_is_in_the_queue_once() {
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

    // The ticket is taken and the queue with it; the yielder's own makes it again.
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
        owner: Owner::exclusive(1),
        ttl: 100 * TTL,
    };
    won(&one.outcome("k", long).await);
    two.outcome("k", enter(1)).await;
    assert!(server.pttl(QUEUE) > 3_050_000);

    server.cmd(&["PEXPIRE", "lock:k", "10000"]);
    two.outcome("k", enter(1)).await;
    assert!(server.pttl(QUEUE) > 3_050_000, "never shorter");

    // A foreign lock with no ttl: waiters enter again every 8 to 12 s, so a minute is enough.
    server.set("lock:f", "foreign");
    two.outcome("f", enter(2)).await;
    let expiry = server.pttl("{lock:f}:~queue2");
    assert!((55_000..=65_000).contains(&expiry), "{expiry}");
}

/// G3: a withdrawal names the whole ticket, and the script looks for no other.
#[tokio::test]
async fn g3_withdraw_takes_one_ticket_out() {
    let server = RedisServer::start();
    server.set("lock:k", "foreign");
    let mut one = Registry::on(&server, "a1").await;
    one.outcome("k", enter(1)).await;
    one.outcome("k", enter(11)).await;
    server.reset_stats();
    assert_eq!(one.outcome("k", withdraw(1)).await, NOT_HELD);
    let calls = server.all_calls();
    assert_eq!((calls.get("zrem"), calls.get("zscan")), (Some(&1), None));
    let left = queue(&server, "lock:k");
    assert_eq!(left.len(), 1, "{left:?}");
    assert_eq!(left[0].0, one.ticket(11), "owner 11 is not owner 1");
    assert_eq!(one.outcome("k", withdraw(1)).await, NOT_HELD, "idempotent");
}

/// Puts so many tickets in front of all others whose registry is gone.
fn add_dead(server: &RedisServer, count: usize) {
    for number in 0..count {
        let score = (1 + number).to_string();
        server.cmd(&["ZADD", QUEUE, &score, &format!("dead:{number} 30000")]);
    }
}

/// G3: one call clears a hundred, and says that there are more; the op goes again until it is done.
#[tokio::test]
async fn g3_many_dead_tickets_are_cleared_by_several_calls() {
    let server = RedisServer::start();
    let mut one = Registry::on(&server, "a1").await;
    let mut two = Registry::on(&server, "b2").await;
    // Each op, what it leaves, and after how many calls of the script.
    for (op, calls) in [
        (release(1), 3),
        (yield_turn(1, 2), 3),
        (withdraw(1), 3),
        (attempt(3), 3),
        (enter(3), 3),
    ] {
        server.flushall();
        let is_new = matches!(op, Op::Attempt { .. } | Op::Enter { .. });
        if !is_new {
            won(&one.outcome("k", attempt(1)).await);
        }
        add_dead(&server, 250);
        server.set("lock:busy", "foreign");
        two.outcome("busy", enter(7)).await;
        let ticket = two.ticket(1);
        server.cmd(&["ZADD", QUEUE, "1000", &ticket]);
        server.reset_stats();
        one.outcome("k", op.clone()).await;
        assert_eq!(server.calls("evalsha"), calls, "{op:?}");
        assert_eq!(two.granted().await.1.owner, Owner::exclusive(1), "{op:?}");
        assert_eq!(server.get("lock:k"), Some(two.text(1)), "{op:?}");
        two.outcome("busy", withdraw(7)).await;
    }
}

/// Until the last of these calls the lock is as it was.
#[test]
fn g3_while_there_are_more_the_lock_is_as_it_was() {
    let server = RedisServer::start();
    let ask = |letters: &str, owner: &str| -> String {
        let listen = "{lock:k}:~listen1";
        let until = "4000000000000000";
        server.ask(&[
            "EVAL",
            script::TEXT,
            "4",
            "lock:k",
            QUEUE,
            listen,
            "lock:~fence",
            "7",
            letters,
            until,
            owner,
            "30000",
            "a1:2",
        ])
    };
    for (letter, is_held) in [
        ("R", true),
        ("W", true),
        ("Y", true),
        ("A", false),
        ("E", false),
    ] {
        server.flushall();
        if is_held {
            server.set("lock:k", "a1:1");
        }
        add_dead(&server, 201);
        for left in [101, 1] {
            let reply = ask(letter, "a1:1");
            assert!(reply.ends_with(" more"), "{letter}: {reply}");
            assert_eq!(server.exists("lock:k"), is_held, "{letter}");
            assert_eq!(queue(&server, "lock:k").len(), left, "{letter}");
        }
        let reply = ask(letter, "a1:1");
        assert!(!reply.ends_with(" more"), "{letter}: {reply}");
        assert_eq!(queue(&server, "lock:k"), [], "{letter}");
        let has_it = server.get("lock:k");
        let expected = match letter {
            "R" | "W" => None,
            "Y" => Some("a1:2"),
            _ => Some("a1:1"),
        };
        assert_eq!(has_it.as_deref(), expected, "{letter}");
    }
}

/// A release that was answered after it had deleted the lock, and that then went again, was told that
/// nobody had held it: the lease was reported as lost.
#[tokio::test]
async fn g3_a_release_among_dead_listeners_held_its_lock() {
    let server = RedisServer::start();
    let mut one = Registry::on(&server, "a1").await;
    for op in [release(1), withdraw(1)] {
        won(&one.outcome("k", attempt(1)).await);
        for number in 0..201 {
            let (score, member) = ((1 + number).to_string(), format!("dead:{number}"));
            server.cmd(&["ZADD", "{lock:k}:~listen1", &score, &member]);
        }
        server.reset_stats();
        assert_eq!(one.outcome("k", op).await, HELD);
        assert_eq!(server.calls("evalsha"), 3);
        assert_eq!(server.keys("*"), ["lock:~fence"]);
    }
}

#[tokio::test]
async fn withdraw_of_an_owner_that_was_granted_gives_the_lock_on() {
    let server = RedisServer::start();
    let mut one = Registry::on(&server, "a1").await;
    let mut two = Registry::on(&server, "b2").await;
    won(&one.outcome("k", enter(1)).await);
    two.outcome("k", enter(1)).await;
    assert_eq!(one.outcome("k", withdraw(1)).await, HELD);
    assert_eq!(two.granted().await.1.owner, Owner::exclusive(1));
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
    assert!(server.exists("lock:{order}:7:~queue2"));
}
