//! How a lock goes from one registry to another.

use std::time::Duration;

use super::registry::{
    BOUND, HELD, NOT_HELD, Registry, Settings, TTL, attempt, enter, place, queue, refused, release,
    withdraw, won, yield_turn,
};
use super::support::{RedisServer, next_message, wait_until};
use crate::store::contract::{Op, Outcome, Owner, StoreEvent};

#[tokio::test]
async fn s2_a_release_hands_the_lock_to_the_first_ticket() {
    let server = RedisServer::start();
    let mut one = Registry::on(&server, "a1").await;
    let mut two = Registry::on(&server, "b2").await;
    let mut three = Registry::on(&server, "c3").await;
    let first = won(&one.outcome("a b", enter(1)).await);
    let ttl = Duration::from_secs(7);
    two.outcome(
        "a b",
        Op::Enter {
            owner: Owner::exclusive(4),
            ttl,
            score: None,
        },
    )
    .await;
    three.outcome("a b", enter(9)).await;

    let before: (u64, u64) = server.ask(&["TIME"]);
    assert_eq!(one.outcome("a b", release(1)).await, HELD);
    let (key, grant) = two.granted().await;
    assert_eq!(&*key, "a b", "a key may hold spaces");
    assert_eq!((grant.owner, grant.ttl), (Owner::exclusive(4), ttl));
    let after: (u64, u64) = server.ask(&["TIME"]);
    let [before, after] = [before, after].map(|(s, micros)| s * 1_000_000 + micros);
    assert!(
        (before..=after).contains(&grant.at),
        "the time of the command that granted it"
    );
    assert!(grant.epoch > first);
    assert_eq!(server.get("lock:a b"), Some(two.text(4)));
    assert!(
        (2_000..=7_000).contains(&server.pttl("lock:a b")),
        "the ticket's own ttl"
    );
    assert_eq!(queue(&server, "lock:a b").len(), 1, "one grant a release");
    three
        .has_not_heard(|event| matches!(event, StoreEvent::Granted { .. }))
        .await;
}

#[tokio::test]
async fn s2_a_ticket_without_subscriber_is_dropped_unpublished() {
    let server = RedisServer::start();
    let mut one = Registry::on(&server, "a1").await;
    let mut two = Registry::on(&server, "b2").await;
    won(&one.outcome("k", enter(1)).await);
    // Dead; one that a pattern makes look alive; and what no version of us wrote.
    for (score, ticket) in [
        ("1", "dead:1 30000"),
        ("2", "dead:2 30000"),
        ("3", "rubbish"),
    ] {
        server.cmd(&["ZADD", "{lock:k}:~queue2", score, ticket]);
    }
    let mut watcher = PatternWatcher::new(&server);
    two.outcome("k", enter(1)).await;
    assert_eq!(one.outcome("k", release(1)).await, HELD);
    assert_eq!(two.granted().await.1.owner, Owner::exclusive(1));
    assert_eq!(queue(&server, "lock:k"), []);
    let told = watcher.channels_until(&two.channel());
    assert_eq!(told, [two.channel()]);
}

/// Sees what is published, by a pattern: no channel has a subscriber through it.
struct PatternWatcher(redis::Connection);

impl PatternWatcher {
    fn new(server: &RedisServer) -> Self {
        let client = redis::Client::open(server.url()).unwrap();
        let mut connection = client.get_connection().unwrap();
        let subscribe = redis::cmd("PSUBSCRIBE").arg("*").get_packed_command();
        connection.send_packed_command(&subscribe).unwrap();
        connection.recv_response().unwrap();
        Self(connection)
    }

    /// The channels of the messages up to the first to `last`.
    fn channels_until(&mut self, last: &str) -> Vec<String> {
        let mut pubsub = self.0.as_pubsub();
        let mut channels = Vec::new();
        while channels.last().is_none_or(|channel| channel != last) {
            let message = next_message(&mut pubsub, BOUND);
            channels.push(message.get_channel_name().to_owned());
        }
        channels
    }
}

#[tokio::test]
async fn s2_a_lock_with_dead_tickets_alone_is_free() {
    let server = RedisServer::start();
    let mut one = Registry::on(&server, "a1").await;
    won(&one.outcome("k", attempt(1)).await);
    server.cmd(&["ZADD", "{lock:k}:~queue2", "1", "dead:1 30000"]);
    assert_eq!(one.outcome("k", release(1)).await, HELD);
    assert_eq!(server.keys("*"), ["lock:~fence"]);
}

#[tokio::test]
async fn s2_a_registry_that_has_gone_is_passed_over() {
    let server = RedisServer::start();
    let mut one = Registry::on(&server, "a1").await;
    let mut two = Registry::on(&server, "b2").await;
    won(&one.outcome("k", enter(1)).await);
    two.outcome("k", enter(1)).await;
    let channel = two.channel();
    drop(two);
    wait_until("the connection closes", BOUND, || {
        server.subscribers(&channel) == 0
    })
    .await;
    assert_eq!(one.outcome("k", release(1)).await, HELD);
    assert!(!server.exists("lock:k"));
}

#[tokio::test]
async fn s2_a_free_lock_goes_to_the_ticket_before_ours() {
    let server = RedisServer::start();
    let mut one = Registry::on(&server, "a1").await;
    let mut two = Registry::on(&server, "b2").await;
    server.set("lock:k", "foreign");
    two.outcome("k", enter(1)).await;
    server.del("lock:k");
    // It may not overtake, and brings the one before it to its right.
    let busy = one.outcome("k", attempt(1)).await;
    let Outcome::Busy {
        left: Some(TTL),
        score: None,
        entered: false,
        holder: Some(holder),
    } = busy
    else {
        panic!("{busy:?}")
    };
    assert_eq!(*holder.owner, two.text(1), "who has just been given it");
    assert_eq!(two.granted().await.1.owner, Owner::exclusive(1));
    assert_eq!(server.get("lock:k"), Some(two.text(1)));
}

#[tokio::test]
async fn s2_an_enter_that_finds_another_ticket_queues_behind_it() {
    let server = RedisServer::start();
    let mut one = Registry::on(&server, "a1").await;
    let mut two = Registry::on(&server, "b2").await;
    server.set("lock:k", "foreign");
    two.outcome("k", enter(1)).await;
    server.del("lock:k");
    place(&one.outcome("k", enter(1)).await);
    two.granted().await;
    assert_eq!(queue(&server, "lock:k").len(), 1);
    assert_eq!(queue(&server, "lock:k")[0].0, one.ticket(1));
    assert!(server.pttl("{lock:k}:~queue2") > 80_000, "k3");
}

#[tokio::test]
async fn our_own_ticket_in_front_wins_and_leaves_the_queue() {
    let server = RedisServer::start();
    let mut one = Registry::on(&server, "a1").await;
    server.set("lock:k", "foreign");
    one.outcome("k", enter(1)).await;
    server.del("lock:k");
    won(&one.outcome("k", enter(1)).await);
    assert_eq!(queue(&server, "lock:k"), []);
    one.has_not_heard(|event| matches!(event, StoreEvent::Granted { .. }))
        .await;
}

#[tokio::test]
async fn a_lock_that_ran_out_with_tickets_standing_serves_them_at_a_late_release() {
    let server = RedisServer::start();
    let mut one = Registry::on(&server, "a1").await;
    let mut two = Registry::on(&server, "b2").await;
    won(&one.outcome("k", enter(1)).await);
    two.outcome("k", enter(1)).await;
    server.del("lock:k");
    assert_eq!(one.outcome("k", release(1)).await, NOT_HELD);
    assert_eq!(two.granted().await.1.owner, Owner::exclusive(1));
}

#[tokio::test]
async fn yield_gives_the_turn_and_queues_at_the_end() {
    let server = RedisServer::start();
    let mut one = Registry::on(&server, "a1").await;
    let mut two = Registry::on(&server, "b2").await;
    let mut three = Registry::on(&server, "c3").await;
    won(&one.outcome("k", enter(1)).await);
    two.outcome("k", enter(1)).await;
    three.outcome("k", enter(1)).await;
    match one.outcome("k", yield_turn(1, 2)).await {
        Outcome::Busy {
            left: Some(left),
            score: Some(_),
            ..
        } => assert_eq!(left, TTL),
        other => panic!("{other:?}"),
    }
    two.granted().await;
    let order: Vec<_> = queue(&server, "lock:k")
        .into_iter()
        .map(|(ticket, _)| ticket)
        .collect();
    assert_eq!(order, [three.ticket(1), one.ticket(2)]);
    assert_eq!(
        one.outcome("k", yield_turn(1, 2)).await,
        Outcome::NotOld,
        "sent again"
    );
    assert_eq!(queue(&server, "lock:k").len(), 2, "and nothing was written");
}

#[tokio::test]
async fn yield_with_nobody_else_there_keeps_the_lock_under_the_new_owner() {
    let server = RedisServer::start();
    let mut one = Registry::on(&server, "a1").await;
    let first = won(&one.outcome("k", enter(1)).await);
    server.cmd(&["ZADD", "{lock:k}:~queue2", "1", "dead:1 30000"]);
    server.cmd(&["PEXPIRE", "lock:k", "5000"]);
    assert!(won(&one.outcome("k", yield_turn(1, 2)).await) > first);
    assert_eq!(server.get("lock:k"), Some(one.text(2)));
    assert!(server.pttl("lock:k") > 20_000, "a fresh ttl");
    one.has_not_heard(|event| matches!(event, StoreEvent::Granted { .. }))
        .await;
}

/// A right that is taken away: the grant cannot be told, so it must not have been made.
#[tokio::test]
async fn s1_a_missing_right_to_publish_leaves_no_lock_whose_owner_does_not_know() {
    let server = RedisServer::builder()
        .config("user mute on nopass ~* resetchannels &lock:~grant:a1 +@all")
        .start();
    let mut mute = Settings::url(server.url_with("mute", "x", 0), "a1")
        .up()
        .await;
    let mut two = Registry::on(&server, "b2").await;
    won(&mute.outcome("k", enter(1)).await);
    let score = place(&two.outcome("k", enter(1)).await);

    let (why, retryable) = refused(mute.ask("k", yield_turn(1, 2)).await);
    assert!(why.contains("NOPERM") && !retryable, "{why}");
    assert!(
        !server.exists("lock:k"),
        "free, rather than somebody's who does not know"
    );
    assert_eq!(
        queue(&server, "lock:k"),
        [(two.ticket(1), score)],
        "in its old place"
    );
    assert!(server.pttl("{lock:k}:~queue2") > 50_000, "k3");

    let (why, _) = refused(mute.ask("k", attempt(3)).await);
    assert!(why.contains("NOPERM"), "{why}");
    assert_eq!(queue(&server, "lock:k"), [(two.ticket(1), score)]);

    won(&two.outcome("k", enter(1)).await);
    two.outcome("k", release(1)).await;
    two.outcome("k", enter(2)).await;
    mute.outcome("k", enter(5)).await;
    assert_eq!(two.outcome("k", release(2)).await, HELD);
    mute.granted().await;
    two.outcome("k", enter(3)).await;
    assert_eq!(
        mute.outcome("k", release(5)).await,
        HELD,
        "a release needs no such right"
    );
    assert!(!server.exists("lock:k"));
    assert_eq!(mute.outcome("k", withdraw(9)).await, NOT_HELD);
}
