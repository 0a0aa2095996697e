//! Draws.

use super::registry::{Registry, attempt, enter, refused, release, won};
use super::support::RedisServer;
use crate::store::contract::{Op, Outcome, Owner};

const FENCE: &str = "lock:~fence";

fn micros(server: &RedisServer) -> u64 {
    let (seconds, micros): (u64, u64) = server.ask(&["TIME"]);
    seconds * 1_000_000 + micros
}

#[tokio::test]
async fn f1_epochs_are_the_servers_time_and_grow() {
    let server = RedisServer::start();
    let mut one = Registry::on(&server, "a1").await;
    let before = micros(&server);
    let first = won(&one.outcome("k", attempt(1)).await);
    assert!((before..=micros(&server)).contains(&first));
    assert_eq!(server.get(FENCE), Some(first.to_string()));
    let other = won(&one.outcome("other", attempt(2)).await);
    assert!(other > first, "one fence for all keys");
}

#[tokio::test]
async fn f1_epochs_grow_after_the_fence_is_deleted() {
    let server = RedisServer::start();
    let mut one = Registry::on(&server, "a1").await;
    let first = won(&one.outcome("k", attempt(1)).await);
    one.outcome("k", release(1)).await;
    server.del(FENCE);
    assert!(won(&one.outcome("k", attempt(2)).await) > first);
}

#[tokio::test]
async fn f1_epochs_grow_past_a_fence_from_the_future() {
    // As left by a server whose clock was ahead of this one's.
    let server = RedisServer::start();
    let mut one = Registry::on(&server, "a1").await;
    let ahead = micros(&server) + 3_600_000_000;
    server.set(FENCE, &ahead.to_string());
    assert_eq!(won(&one.outcome("k", attempt(1)).await), ahead + 1);
    one.outcome("k", release(1)).await;
    assert_eq!(won(&one.outcome("k", attempt(2)).await), ahead + 2);
}

#[tokio::test]
async fn f1_every_epoch_of_a_batch_is_another() {
    let server = RedisServer::start();
    let mut one = Registry::on(&server, "a1").await;
    for owner in 0..100 {
        one.submit(&format!("k{owner}"), attempt(owner));
    }
    let mut epochs = Vec::new();
    for owner in 0..100 {
        let answer = one
            .reply(&format!("k{owner}"), &attempt(owner))
            .await
            .unwrap();
        epochs.push(won(&answer.outcome));
    }
    let last = *epochs.iter().max().unwrap();
    epochs.sort_unstable();
    epochs.dedup();
    assert_eq!(epochs.len(), 100);
    let fence: u64 = server.ask(&["GET", FENCE]);
    assert!(fence >= last, "the fence stands past every epoch");
    assert!(won(&one.outcome("k", attempt(100)).await) > last);
}

#[tokio::test]
async fn f3_numbers_of_sixteen_digits_keep_their_last() {
    let server = RedisServer::start();
    let mut one = Registry::on(&server, "a1").await;
    // One that a double holds, and that 14 digits do not.
    server.set(FENCE, "4503599627370491");
    assert_eq!(
        won(&one.outcome("k", attempt(1)).await),
        4_503_599_627_370_492
    );
    assert_eq!(server.get(FENCE).as_deref(), Some("4503599627370492"));

    // The same in a grant.
    let mut two = Registry::on(&server, "b2").await;
    two.outcome("k", enter(1)).await;
    one.outcome("k", release(1)).await;
    assert_eq!(two.granted().await.1.epoch, 4_503_599_627_370_493);
}

#[tokio::test]
async fn s1_a_wrong_type_in_the_fence_leaves_nothing_done() {
    let server = RedisServer::start();
    let mut one = Registry::on(&server, "a1").await;
    for make in [["RPUSH", FENCE, "x"], ["SET", FENCE, "x"]] {
        server.del(FENCE);
        server.cmd(&make);
        for (owner, op) in [(1, attempt(1)), (2, enter(2))] {
            let (why, retryable) = refused(one.ask("k", op).await);
            assert!(why.contains("WRONGTYPE") && !retryable, "{owner}: {why}");
            assert_eq!(server.keys("*"), [FENCE], "{owner}");
        }
    }
}

/// A double counts no further than 2^53: the epochs of all that follow would be the same.
#[tokio::test]
async fn f1_a_fence_at_the_end_of_its_range_is_refused() {
    let server = RedisServer::start();
    let mut one = Registry::on(&server, "a1").await;
    for far in [
        "9007199254740992",
        "144115188075855871",
        "1e400",
        "inf",
        "nan",
    ] {
        server.set(FENCE, far);
        // Alone, and in a call with others.
        for keys in [&["k"][..], &["k", "l"]] {
            for key in keys {
                one.submit(key, attempt(1));
            }
            for key in keys {
                let (why, retryable) = refused(one.reply(key, &attempt(1)).await);
                assert!(why.contains("WRONGTYPE") && !retryable, "{far}: {why}");
            }
            assert_eq!(server.keys("*"), [FENCE]);
            assert_eq!(server.get(FENCE).as_deref(), Some(far));
        }
    }
    server.del(FENCE);
    won(&one.outcome("k", attempt(1)).await);
    let (why, _) = refused(one.ask("k", raise(1, 1 << 53, false)).await);
    assert!(why.contains("no fence"), "{why}");
    assert!(won(&one.outcome("l", attempt(1)).await) < 1 << 53);
}

#[tokio::test]
async fn s1_a_release_needs_no_fence() {
    let server = RedisServer::start();
    let mut one = Registry::on(&server, "a1").await;
    let mut two = Registry::on(&server, "b2").await;
    won(&one.outcome("k", attempt(1)).await);
    two.outcome("k", enter(1)).await;
    server.del(FENCE);
    server.cmd(&["RPUSH", FENCE, "x"]);
    // It cannot be handed over, so it is free: the waiter finds it (W2).
    assert_eq!(one.outcome("k", release(1)).await, super::registry::HELD);
    assert!(!server.exists("lock:k"));
    assert_eq!(
        super::registry::queue(&server, "lock:k").len(),
        1,
        "the ticket stands"
    );
    let expiry = server.pttl("{lock:k}:~queue2");
    assert!(expiry > 55_000, "k3: {expiry}");
}

fn raise(owner: u64, epoch: u64, age: bool) -> Op {
    let owner = Owner::exclusive(owner);
    Op::Raise { owner, epoch, age }
}

/// For a quorum: whoever has the lock next gets a greater epoch, and nobody but its owner raises.
#[tokio::test]
async fn f1_a_fence_is_raised_for_the_owner_alone_and_never_lowered() {
    let server = RedisServer::start();
    let mut one = Registry::on(&server, "a1").await;
    let first = won(&one.outcome("k", attempt(1)).await);
    let ahead = first + 3_600_000_000;
    assert_eq!(
        one.outcome("k", raise(2, ahead, false)).await,
        Outcome::Lost
    );
    assert_eq!(server.get(FENCE), Some(first.to_string()));
    let raised = Outcome::Raised { age: None };
    assert_eq!(one.outcome("k", raise(1, ahead, false)).await, raised);
    assert_eq!(server.get(FENCE), Some(ahead.to_string()));
    assert_eq!(one.outcome("k", raise(1, first, false)).await, raised);
    assert_eq!(server.get(FENCE), Some(ahead.to_string()));
    one.outcome("k", release(1)).await;
    assert_eq!(won(&one.outcome("k", attempt(3)).await), ahead + 1);
}

/// In one call with others, whichever comes first.
#[tokio::test]
async fn f1_a_raise_and_epochs_of_one_batch_do_not_meet() {
    let server = RedisServer::start();
    let mut one = Registry::on(&server, "a1").await;
    let mut last = won(&one.outcome("k", attempt(1)).await);
    for round in 0..20 {
        let least = last + 1_000_000;
        let owner = 10 + 3 * round;
        one.submit("before", attempt(owner));
        one.submit("k", raise(1, least, false));
        one.submit("after", attempt(owner + 1));
        one.reply("before", &attempt(owner)).await.unwrap();
        one.reply("k", &raise(1, least, false)).await.unwrap();
        let after = one.reply("after", &attempt(owner + 1)).await.unwrap();
        // Plain ops of a call go first, whatever stands between them.
        let after = won(&after.outcome);
        let next = won(&one.outcome("next", attempt(owner + 2)).await);
        assert!(next > after && next > least);
        last = next;
        for (key, owner) in [("before", owner), ("after", owner + 1), ("next", owner + 2)] {
            one.outcome(key, release(owner)).await;
        }
    }
}

#[tokio::test]
async fn a_raise_tells_how_long_the_server_has_been_up_if_it_may() {
    let server = RedisServer::start();
    let mut one = Registry::on(&server, "a1").await;
    won(&one.outcome("k", attempt(1)).await);
    let Outcome::Raised { age: Some(age) } = one.outcome("k", raise(1, 1, true)).await else {
        panic!("the server tells")
    };
    assert!(age < std::time::Duration::from_secs(60));
    server.cmd(&["ACL", "SETUSER", "default", "-info"]);
    let silent = Outcome::Raised { age: None };
    assert_eq!(one.outcome("k", raise(1, 1, true)).await, silent);
}
