//! A connection at work: what shares a call, in which order, and what becomes of it on a cut.

use super::registry::{
    BOUND, HELD, NOT_HELD, Registry, Settings, TTL, attempt, enter, release, renew, unknown, won,
};
use super::support::{Proxy, RedisServer, Way, least_rights, wait_until};
use crate::store::contract::Outcome;

#[tokio::test]
async fn noscript_is_healed_for_each_script() {
    let server = RedisServer::start();
    let mut one = Registry::on(&server, "a1").await;
    server.script_flush();
    won(&one.outcome("k", attempt(1)).await);
    server.script_flush();
    assert_eq!(one.outcome("k", renew(1, 2 * TTL)).await, Outcome::Renewed);
    server.script_flush();
    assert!(
        one.session()
            .inspect("k".into())
            .await
            .unwrap()
            .owner()
            .is_some()
    );
    server.script_flush();
    // The probe's, on a new connection.
    server.client_kill_all();
    one.down().await;
    assert!(one.up().await);
    assert_eq!(server.calls("eval"), 0, "scripts are loaded");
    assert!(server.calls("script|load") >= 5, "once for each flush");
    assert_eq!(one.outcome("k", release(1)).await, HELD);
}

/// Without the right to load scripts each is sent with its text: while a connection is made, and when
/// the server has forgotten it later.
#[tokio::test]
async fn a_script_that_may_not_be_loaded_is_sent_in_full() {
    let server = RedisServer::start();
    let rights = least_rights();
    let fewer = rights.into_iter().filter(|right| *right != "+script|load");
    let words: Vec<_> = ["ACL", "SETUSER"].into_iter().chain(fewer).collect();
    server.cmd(&words);
    let url = server.url_with("lockstream", "password", 0);
    let mut one = Settings::url(url, "a1").up().await;
    assert!(server.calls("eval") >= 1, "the probe");
    won(&one.outcome("k", attempt(1)).await);
    let before = server.calls("eval");
    server.script_flush();
    assert_eq!(one.outcome("k", renew(1, 2 * TTL)).await, Outcome::Renewed);
    assert_eq!(one.outcome("k", release(1)).await, HELD);
    assert!(server.calls("eval") > before, "in full");
    assert_eq!(server.calls("script|load"), 0, "refused");
}

#[tokio::test]
async fn waiting_requests_share_calls_and_a_single_one_goes_at_once() {
    let server = RedisServer::start();
    let mut one = Registry::on(&server, "a1").await;
    won(&one.outcome("first", attempt(0)).await);
    server.reset_stats();
    for owner in 1..=640 {
        one.submit(&format!("k{owner}"), attempt(owner));
    }
    for owner in 1..=640 {
        let answer = one.reply(&format!("k{owner}"), &attempt(owner)).await;
        won(&answer.unwrap().outcome);
    }
    let calls = server.calls("evalsha");
    assert!((10..=20).contains(&calls), "{calls} calls for 640 ops");
}

/// A worker runs what its last task woke before what waits in its queue: the session's task before
/// the other callers.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn tasks_that_were_woken_together_share_the_next_call() {
    let server = RedisServer::start();
    let locks = crate::handle::LockRegistry::connect(server.url())
        .await
        .unwrap();
    let first = locks.obtain("first").lease().await.unwrap();
    first.release().await.unwrap();
    server.reset_stats();
    let tasks = (0..16).map(|task| {
        let lock = locks.obtain(format!("k{task}"));
        tokio::spawn(async move {
            for _ in 0..20 {
                let lease = lock.lease().await.unwrap();
                lease.release().await.unwrap();
            }
        })
    });
    for task in tasks.collect::<Vec<_>>() {
        task.await.unwrap();
    }
    let calls = server.calls("evalsha");
    assert!((1..=160).contains(&calls), "{calls} calls for 640 ops");
}

#[tokio::test]
async fn o2_ops_of_one_key_are_done_in_order() {
    let server = RedisServer::start();
    let mut one = Registry::on(&server, "a1").await;
    for owner in 1..=50 {
        one.submit("k", attempt(owner));
        one.submit("k", release(owner));
    }
    for owner in 1..=50 {
        won(&one.reply("k", &attempt(owner)).await.unwrap().outcome);
        assert_eq!(one.reply("k", &release(owner)).await.unwrap().outcome, HELD);
    }
}

#[tokio::test]
async fn o2_each_op_of_a_broken_connection_is_unknown() {
    let server = RedisServer::start();
    let proxy = Proxy::to(&server);
    let mut one = Settings::url(proxy.url(), "a1").up().await;
    won(&one.outcome("mine", attempt(9)).await);

    // Done, and the answer is lost.
    proxy.hold(Way::ToClient, true);
    one.submit("a", attempt(1));
    one.submit("b", enter(2));
    one.submit("mine", renew(9, 2 * TTL));
    wait_until("done", BOUND, || {
        server.exists("lock:a") && server.exists("lock:b")
    })
    .await;
    let look = one.session().inspect("a".into());
    proxy.cut();
    proxy.hold(Way::ToClient, false);
    for (key, op) in [
        ("a", attempt(1)),
        ("b", enter(2)),
        ("mine", renew(9, 2 * TTL)),
    ] {
        assert!(unknown(one.reply(key, &op).await).is_retryable());
    }
    let _ = look.await;
    one.down().await;

    // The same wish again gives the same thing.
    assert!(one.up().await);
    won(&one.outcome("a", attempt(1)).await);
    won(&one.outcome("b", enter(2)).await);
}

#[tokio::test]
async fn requests_waiting_at_a_break_go_out_on_the_next_connection() {
    let server = RedisServer::start();
    let proxy = Proxy::to(&server);
    let mut one = Settings::url(proxy.url(), "a1").up().await;
    proxy.hold(Way::ToServer, true);
    // As many calls as may be under way, and one op more for one of their keys.
    one.submit("k", attempt(1));
    one.submit("k", release(1));
    wait_until("the first is sent", BOUND, || proxy.connections() == 1).await;
    tokio::task::yield_now().await;
    proxy.cut();
    proxy.hold(Way::ToServer, false);
    let first = one.reply("k", &attempt(1)).await;
    assert!(first.is_err(), "{first:?}");
    let second = one
        .reply("k", &release(1))
        .await
        .expect("was not sent before");
    assert_eq!(second.outcome, NOT_HELD);
}
