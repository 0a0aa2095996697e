//! A server at its memory's limit.

use super::registry::{
    HELD, Registry, Settings, TTL, attempt, enter, refused, release, renew, withdraw, won,
};
use super::support::RedisServer;
use crate::store::contract::{Outcome, Owner};

#[tokio::test]
async fn s1_release_and_hand_over_work_on_a_full_server() {
    let server = RedisServer::start();
    let mut one = Registry::on(&server, "a1").await;
    let mut two = Registry::on(&server, "b2").await;
    for key in ["handed over", "freed", "yielded"] {
        won(&one.outcome(key, enter(1)).await);
    }
    two.outcome("handed over", enter(1)).await;
    server.cmd(&["CONFIG", "SET", "maxmemory", "1"]);
    // Scripts take memory, too.
    server.script_flush();

    assert_eq!(one.outcome("handed over", release(1)).await, HELD);
    assert_eq!(two.granted().await.1.owner, Owner::exclusive(1));
    assert_eq!(one.outcome("freed", release(1)).await, HELD);
    assert_eq!(
        two.outcome("handed over", renew(1, 2 * TTL)).await,
        Outcome::Renewed
    );
    assert_eq!(two.outcome("handed over", withdraw(1)).await, HELD);

    let (why, retryable) = refused(one.ask("taken", attempt(2)).await);
    assert!(why.contains("OOM") && retryable, "{why}");
    assert!(!server.exists("lock:taken"));
    let (why, _) = refused(two.ask("yielded", enter(3)).await);
    assert!(why.contains("OOM"), "{why}");
    won(&one.outcome("yielded", enter(1)).await);
}

/// The look for a proxy that spreads keys writes, which a full server refuses: nobody could connect to it any more.
#[tokio::test]
async fn s1_release_works_on_a_full_server_after_a_reconnect_with_resp2() {
    let server = RedisServer::start();
    let mut one = Settings::url(format!("{}?protocol=2", server.url()), "a1").open();
    one.session().start();
    assert!(!one.up().await);
    won(&one.outcome("k", attempt(1)).await);
    server.cmd(&["CONFIG", "SET", "maxmemory", "1"]);
    server.cmd(&["CLIENT", "KILL", "TYPE", "normal"]);
    one.down().await;
    assert!(!one.up().await);
    assert_eq!(one.outcome("k", release(1)).await, HELD);
}
