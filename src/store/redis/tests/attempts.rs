//! Taking, renewing and looking at locks that nobody waits for.

use std::sync::Arc;

use super::registry::{
    HELD, NOT_HELD, Registry, TTL, attempt, enter, refused, release, renew, won,
};
use super::support::RedisServer;
use crate::base::Mode;
use crate::store::contract::{Occupant, Outcome};

#[tokio::test]
async fn a_lock_is_taken_released_and_taken_again() {
    let server = RedisServer::start();
    let mut one = Registry::on(&server, "a1").await;
    let mut two = Registry::on(&server, "b2").await;

    let first = won(&one.outcome("k", attempt(1)).await);
    assert_eq!(server.get("lock:k"), Some(one.text(1)));
    match two.outcome("k", attempt(1)).await {
        Outcome::Busy {
            left: Some(left),
            score: None,
            ..
        } => {
            assert!(left <= TTL && left > TTL / 2, "{left:?}");
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(one.outcome("k", release(1)).await, HELD);
    assert_eq!(one.outcome("k", release(1)).await, NOT_HELD);
    let second = won(&two.outcome("k", attempt(2)).await);
    assert!(second > first);
}

#[tokio::test]
async fn a_foreign_lock_is_respected_with_and_without_ttl() {
    let server = RedisServer::start();
    let mut one = Registry::on(&server, "a1").await;
    server.set("lock:k", "somebody else");
    let busy = Outcome::Busy {
        left: None,
        score: None,
        entered: false,
        holder: Some(Arc::new(Occupant {
            owner: "somebody else".into(),
            mode: Mode::Exclusive,
            others: 0,
        })),
    };
    assert_eq!(one.outcome("k", attempt(1)).await, busy);
    assert_eq!(one.outcome("k", release(1)).await, NOT_HELD);
    assert_eq!(server.get("lock:k").as_deref(), Some("somebody else"));

    let key_status = one.session().inspect("k".into()).await.unwrap();
    assert_eq!(key_status.owner().as_deref(), Some("somebody else"));
    assert_eq!((key_status.left(), key_status.tickets), (None, 0));
}

#[tokio::test]
async fn s3_a_win_asked_for_again_is_proved_again_and_never_shorter() {
    let server = RedisServer::start();
    let mut one = Registry::on(&server, "a1").await;
    let first = won(&one.outcome("k", enter(1)).await);

    server.cmd(&["PEXPIRE", "lock:k", "1000"]);
    let second = won(&one.outcome("k", enter(1)).await);
    assert!(second > first, "a epoch of its own");
    assert!(server.pttl("lock:k") > 20_000, "the ttl is set anew");

    server.cmd(&["PEXPIRE", "lock:k", "100000"]);
    won(&one.outcome("k", attempt(1)).await);
    assert!(
        server.pttl("lock:k") > 90_000,
        "the ttl is not made shorter"
    );
}

#[tokio::test]
async fn d1_a_renewal_lengthens_or_says_lost() {
    let server = RedisServer::start();
    let mut one = Registry::on(&server, "a1").await;
    won(&one.outcome("k", attempt(1)).await);

    assert_eq!(one.outcome("k", renew(1, 2 * TTL)).await, Outcome::Renewed);
    assert!(server.pttl("lock:k") > 50_000);
    assert_eq!(one.outcome("k", renew(1, TTL)).await, Outcome::Renewed);
    assert!(
        server.pttl("lock:k") > 50_000,
        "a shorter one changes nothing"
    );

    assert_eq!(one.outcome("k", renew(2, TTL)).await, Outcome::Lost);
    server.del("lock:k");
    assert_eq!(one.outcome("k", renew(1, TTL)).await, Outcome::Lost);
    assert!(!server.exists("lock:k"), "nothing is revived");
}

#[tokio::test]
async fn s1_a_wrong_type_in_one_lock_harms_no_other() {
    let server = RedisServer::start();
    server.cmd(&["RPUSH", "lock:list", "x"]);
    let mut one = Registry::on(&server, "a1").await;
    // Busy the link, so that the ops after these four share a call.
    for filler in 0..4 {
        one.submit(&format!("filler {filler}"), attempt(filler));
    }
    for (owner, key) in [(10, "before"), (11, "list"), (12, "after")] {
        one.submit(key, attempt(owner));
    }
    won(&one.reply("before", &attempt(10)).await.unwrap().outcome);
    let (why, retryable) = refused(one.reply("list", &attempt(11)).await);
    assert!(why.contains("WRONGTYPE") && !retryable, "{why}");
    won(&one.reply("after", &attempt(12)).await.unwrap().outcome);

    let (why, _) = refused(one.ask("list", renew(11, TTL)).await);
    assert!(why.contains("WRONGTYPE"), "{why}");
    assert!(one.session().inspect("list".into()).await.is_err());
}
