//! W7: those that listen are told when a lock is freed, the first first, and have no turn.

use std::io::{BufRead, BufReader, Write};
use std::net::{Ipv4Addr, TcpStream};

use super::registry::{
    BOUND, HELD, NOT_HELD, Registry, Settings, TTL, attempt, enter, release, won,
};
use super::support::{Program, RedisServer, wait_until};
use crate::store::contract::{Op, Outcome, Owner, StoreEvent};

fn listen(owner: u64) -> Op {
    let (owner, ttl) = (Owner::exclusive(owner), TTL);
    Op::Listen { owner, ttl }
}

fn unlisten(owner: u64) -> Op {
    let owner = Owner::exclusive(owner);
    Op::Unlisten { owner }
}

fn listeners(server: &RedisServer) -> Vec<String> {
    server.ask(&["ZRANGE", "{lock:k}:~listen1", "0", "-1"])
}

async fn is_told(registry: &mut Registry) {
    let event = registry.next().await;
    assert!(
        matches!(&event, StoreEvent::Freed { key } if &**key == "k"),
        "{event:?}"
    );
}

async fn is_not_told(registry: &mut Registry) {
    registry
        .has_not_heard(|event| {
            matches!(event, StoreEvent::Freed { .. } | StoreEvent::Granted { .. })
        })
        .await;
}

/// What was kept for one that did not ask has run out.
async fn nothing_is_left(server: &RedisServer) {
    wait_until("the fence alone is left", BOUND, || {
        server.keys("*") == ["lock:~fence"]
    })
    .await;
}

/// Every command that the server does from now on, a line each.
fn monitor(server: &RedisServer) -> impl Iterator<Item = String> + use<> {
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, server.port())).unwrap();
    stream.set_read_timeout(Some(BOUND)).unwrap();
    stream.write_all(b"MONITOR\r\n").unwrap();
    let mut lines = BufReader::new(stream).lines().map(Result::unwrap);
    assert_eq!(lines.next().as_deref(), Some("+OK"));
    lines
}

fn busy(outcome: &Outcome) {
    assert!(
        matches!(outcome, Outcome::Busy { score: Some(_), .. }),
        "{outcome:?}"
    );
}

#[tokio::test]
async fn w7_the_first_that_listens_is_told_and_nobody_gets_the_lock() {
    for program in [Program::Usual, Program::Valkey] {
        let server = RedisServer::builder().program(program).start();
        let mut holder = Registry::on(&server, "aa").await;
        let mut one = Registry::on(&server, "b1").await;
        let mut two = Registry::on(&server, "c2").await;
        won(&holder.outcome("k", listen(1)).await);
        busy(&one.outcome("k", listen(1)).await);
        busy(&two.outcome("k", listen(1)).await);
        // Asking again keeps the place.
        busy(&one.outcome("k", listen(1)).await);
        assert_eq!(listeners(&server), ["b1:1", "c2:1"]);
        let mut done = monitor(&server);
        assert_eq!(holder.outcome("k", release(1)).await, HELD);
        is_told(&mut one).await;
        is_not_told(&mut two).await;
        // Kept for it, as long as it may take to ask: by the time that we look it may have run out.
        let kept = done.find(|line| line.contains("\"SET\" \"lock:k\""));
        let kept = kept.expect("it has no end");
        assert!(kept.ends_with("\"b1:1\" \"NX\" \"PX\" \"100\""), "{kept}");
        // The next is told by whoever has it next.
        won(&one.outcome("k", listen(1)).await);
        assert_eq!(listeners(&server), ["c2:1"]);
        assert_eq!(one.outcome("k", release(1)).await, HELD);
        is_told(&mut two).await;
        nothing_is_left(&server).await;
    }
}

/// Whoever wins in passing, or is given the lock in its turn, goes by those that listen.
#[tokio::test]
async fn w7_a_subscriber_does_not_block_others() {
    let server = RedisServer::start();
    let mut holder = Registry::on(&server, "aa").await;
    let mut subscriber = Registry::on(&server, "b1").await;
    let mut next = Registry::on(&server, "c2").await;
    won(&holder.outcome("k", attempt(1)).await);
    busy(&subscriber.outcome("k", listen(1)).await);
    next.outcome("k", enter(1)).await;
    assert_eq!(holder.outcome("k", release(1)).await, HELD);
    assert_eq!(next.granted().await.1.owner, Owner::exclusive(1));
    is_not_told(&mut subscriber).await;
    // It ran out, and nobody released it.
    server.del("lock:k");
    won(&holder.outcome("k", attempt(2)).await);
    assert_eq!(listeners(&server), ["b1:1"]);
    is_not_told(&mut subscriber).await;
    assert_eq!(holder.outcome("k", release(2)).await, HELD);
    is_told(&mut subscriber).await;
}

#[tokio::test]
async fn w7_those_that_are_gone_are_passed_by() {
    let server = RedisServer::start();
    let mut holder = Registry::on(&server, "aa").await;
    let mut gone = Registry::on(&server, "b1").await;
    let mut left = Registry::on(&server, "c2").await;
    let mut last = Registry::on(&server, "d3").await;
    won(&holder.outcome("k", attempt(1)).await);
    for registry in [&mut gone, &mut left, &mut last] {
        busy(&registry.outcome("k", listen(1)).await);
    }
    drop(gone);
    wait_until("its subscription is gone", BOUND, || {
        server.channels().len() == 3
    })
    .await;
    assert_eq!(left.outcome("k", unlisten(1)).await, NOT_HELD);
    assert_eq!(listeners(&server), ["b1:1", "d3:1"]);
    assert_eq!(holder.outcome("k", release(1)).await, HELD);
    is_told(&mut last).await;
    nothing_is_left(&server).await;
}

/// Its own release would tell it, and keep the lock from all others.
#[tokio::test]
async fn w7_a_winner_by_an_attempt_is_unsubscribed() {
    let server = RedisServer::start();
    let mut holder = Registry::on(&server, "aa").await;
    let mut one = Registry::on(&server, "b1").await;
    let mut two = Registry::on(&server, "c2").await;
    won(&holder.outcome("k", attempt(1)).await);
    busy(&one.outcome("k", listen(1)).await);
    busy(&two.outcome("k", listen(1)).await);
    server.del("lock:k");
    won(&one.outcome("k", attempt(1)).await);
    assert_eq!(listeners(&server), ["c2:1"]);
    assert_eq!(one.outcome("k", release(1)).await, HELD);
    is_told(&mut two).await;
    is_not_told(&mut one).await;
}

/// S1: nothing is kept for one that could not be told.
#[tokio::test]
async fn w7_a_lock_that_nobody_can_be_told_of_is_free() {
    for program in [Program::Usual, Program::Redis6] {
        // May say nothing but to itself.
        let user = "user x on >p ~* resetchannels &lock:~grant:aa +@all";
        let server = RedisServer::builder().program(program).config(user).start();
        let url = server.url_with("x", "p", 0);
        let mut holder = Settings::url(url, "aa").up().await;
        let mut one = Registry::on(&server, "b1").await;
        won(&holder.outcome("k", attempt(1)).await);
        busy(&one.outcome("k", listen(1)).await);
        assert_eq!(holder.outcome("k", release(1)).await, HELD);
        assert!(!server.exists("lock:k"), "{program:?}");
        is_not_told(&mut one).await;
    }
}

/// The holder crashed: whoever finds the lock free tells those that listen when it is done, and a withdrawal
/// tells them at once.
#[tokio::test]
async fn w7_an_expired_lock_is_announced_by_the_next_op_on_it() {
    let server = RedisServer::start();
    let mut holder = Registry::on(&server, "aa").await;
    let mut one = Registry::on(&server, "b1").await;
    let mut two = Registry::on(&server, "c2").await;
    won(&holder.outcome("k", attempt(1)).await);
    busy(&one.outcome("k", listen(1)).await);
    busy(&two.outcome("k", listen(1)).await);
    server.del("lock:k");
    assert_eq!(one.outcome("k", unlisten(1)).await, NOT_HELD);
    is_told(&mut two).await;
}

/// K3: it goes with its lock, even if nobody comes any more.
#[tokio::test]
async fn w7_a_listener_that_is_forgotten_runs_out() {
    let server = RedisServer::start();
    let mut holder = Registry::on(&server, "aa").await;
    let mut one = Registry::on(&server, "b1").await;
    won(&holder.outcome("k", attempt(1)).await);
    busy(&one.outcome("k", listen(1)).await);
    let left = server.pttl("{lock:k}:~listen1");
    assert!((85_000..=91_000).contains(&left), "{left}");
}
