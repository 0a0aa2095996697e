//! Shared leases: what is on the server, and what a call does for others.

use std::time::Duration;

use super::registry::{
    HELD, Registry, TTL, attempt, enter, refused, release, renew, withdraw, won,
};
use super::support::{RedisServer, on_a_steady_machine};
use crate::base::Mode;
use crate::store::contract::{Op, Outcome, Owner, StoreEvent};

fn reader(sequence: u64) -> Owner {
    let mode = Mode::Shared;
    Owner { sequence, mode }
}

fn permit(sequence: u64, weight: u8, limit: u32) -> Owner {
    let mode = Mode::Permits { limit, weight };
    Owner { sequence, mode }
}

fn enters(owner: Owner) -> Op {
    let (ttl, score) = (TTL, None);
    Op::Enter { owner, ttl, score }
}

fn attempts(owner: Owner, ttl: Duration) -> Op {
    Op::Attempt { owner, ttl }
}

fn withdraw_of(owner: Owner) -> Op {
    Op::Withdraw { owner, ttl: TTL }
}

fn renews(owner: Owner, ttl: Duration) -> Op {
    let within = TTL;
    Op::Renew { owner, ttl, within }
}

/// How many grants a registry gets before the server has answered it once more, and whether it is to serve the rest.
async fn served(registry: &mut Registry) -> (usize, bool) {
    registry.session().inspect("nothing".into()).await.unwrap();
    let (mut grants, mut unserved) = (0, false);
    while let Some(event) = registry.heard_by_now() {
        match event {
            StoreEvent::Granted { .. } => grants += 1,
            StoreEvent::Unserved { .. } => unserved = true,
            _ => {}
        }
    }
    (grants, unserved)
}

/// A lock that is shared is a sorted set: who holds it, and until when. It ends with its last lease.
#[tokio::test]
async fn m1_a_shared_lock_is_a_set_of_its_holders() {
    let server = RedisServer::start();
    let mut one = Registry::on(&server, "a1").await;
    won(&one.outcome("k", attempts(reader(1), TTL)).await);
    won(&one.outcome("k", attempts(reader(2), TTL / 3)).await);
    let members: Vec<String> = server.ask(&["ZRANGE", "lock:k", "0", "-1"]);
    assert_eq!(members, ["a1:2", "a1:1"]);
    assert!(server.pttl("lock:k") > 20_000);
    // A plain lock of any program is excluded, and exclusive ones are.
    let set: Option<String> = server.ask(&["SET", "lock:k", "foreign", "NX", "PX", "1000"]);
    assert_eq!(set, None);
    let busy = one.outcome("k", attempt(9)).await;
    assert!(matches!(busy, Outcome::Busy { .. }), "{busy:?}");
    let busy = one.outcome("k", attempts(permit(9, 1, 3), TTL)).await;
    assert!(matches!(busy, Outcome::Busy { .. }), "{busy:?}");
    let release = |owner| Op::Release { owner };
    assert_eq!(one.outcome("k", release(reader(1))).await, HELD);
    let left = server.pttl("lock:k");
    assert!(left > 5_000 && left <= 10_000, "{left}");
    assert_eq!(one.outcome("k", release(reader(2))).await, HELD);
    assert!(!server.exists("lock:k"));

    won(&one.outcome("k", attempts(permit(3, 2, 3), TTL)).await);
    let members: Vec<String> = server.ask(&["ZRANGE", "lock:k", "0", "-1"]);
    assert_eq!(members, ["a1:3 1/3", "a1:3 2/3"]);
    assert_eq!(
        one.outcome("k", renews(permit(3, 2, 3), 2 * TTL)).await,
        Outcome::Renewed
    );
    assert!(server.pttl("lock:k") > 50_000);
    assert_eq!(
        one.outcome("k", renews(permit(3, 2, 3), TTL)).await,
        Outcome::Renewed
    );
    assert!(server.pttl("lock:k") > 50_000, "d1: never shorter");
    assert_eq!(
        one.outcome("k", renews(reader(3), TTL)).await,
        Outcome::Lost
    );
}

/// Whoever crashed needs nobody to find it: its time is over, and there is room.
#[tokio::test]
async fn m1_a_crashed_holder_makes_room_by_itself() {
    on_a_steady_machine(async || {
        let server = RedisServer::start();
        let mut one = Registry::on(&server, "a1").await;
        let brief = Duration::from_secs(1);
        won(&one.outcome("k", attempts(permit(1, 1, 2), brief)).await);
        won(&one.outcome("k", attempts(permit(2, 1, 2), TTL)).await);
        // M5: when there may be room for the one in front.
        let busy = one.outcome("k", enters(permit(3, 1, 2))).await;
        let Outcome::Busy {
            left: Some(left), ..
        } = busy
        else {
            panic!("{busy:?}")
        };
        assert!(left <= brief, "{left:?}");
        let busy = one.outcome("k", enters(permit(4, 2, 2))).await;
        assert!(matches!(busy, Outcome::Busy { .. }));
        tokio::time::sleep(brief).await;
        won(&one.outcome("k", enters(permit(3, 1, 2))).await);
        let members: Vec<String> = server.ask(&["ZRANGE", "lock:k", "0", "-1"]);
        assert_eq!(members.len(), 2);
    })
    .await;
}

/// A permit counts what is taken under any limit; and those in front are served each by its own.
#[tokio::test]
async fn m1_permits_of_two_limits_are_one_set() {
    let server = RedisServer::start();
    let mut one = Registry::on(&server, "a1").await;
    let (brief, longer) = (TTL / 3, TTL / 2);
    won(&one.outcome("k", attempts(permit(1, 2, 2), brief)).await);
    won(&one.outcome("k", attempts(permit(2, 1, 4), longer)).await);
    won(&one.outcome("k", attempts(permit(3, 1, 4), TTL)).await);
    let members: Vec<String> = server.ask(&["ZRANGE", "lock:k", "0", "-1"]);
    assert_eq!(members, ["a1:1 1/2", "a1:1 2/2", "a1:2 1/4", "a1:3 1/4"]);
    // M5: when there is room for the one in front, whoever asks.
    let fits_in = |outcome| match outcome {
        Outcome::Busy { left, .. } => left.unwrap(),
        other => panic!("{other:?}"),
    };
    let left = fits_in(one.outcome("k", attempts(permit(4, 1, 4), TTL)).await);
    assert!(left <= brief, "{left:?}");
    let left = fits_in(one.outcome("k", enters(permit(5, 1, 2))).await);
    assert!(left > brief && left <= longer, "{left:?}");
    // M2: it would fit sooner, but for the one in front.
    let left = fits_in(one.outcome("k", enters(permit(6, 1, 4))).await);
    assert!(left > brief && left <= longer, "{left:?}");
    let release = |owner| Op::Release { owner };
    assert_eq!(one.outcome("k", release(permit(1, 2, 2))).await, HELD);
    assert_eq!(server.ask::<u64>(&["ZCARD", "lock:k"]), 2);
    assert_eq!(one.outcome("k", release(permit(3, 1, 4))).await, HELD);
    let members: Vec<String> = server.ask(&["ZRANGE", "lock:k", "0", "-1"]);
    assert_eq!(members, ["a1:2 1/4", "a1:5 1/2", "a1:6 1/4"]);
}

/// Nobody else would wake the reader behind a writer that gives up.
#[tokio::test]
async fn m3_a_withdrawal_serves_those_behind_it() {
    let server = RedisServer::start();
    let mut one = Registry::on(&server, "a1").await;
    let mut two = Registry::on(&server, "b2").await;
    won(&one.outcome("k", enters(reader(1))).await);
    one.outcome("k", enter(2)).await;
    two.outcome("k", enters(reader(1))).await;
    two.outcome("k", enters(reader(2))).await;
    one.outcome("k", withdraw(2)).await;
    for sequence in [1, 2] {
        assert_eq!(two.granted().await.1.owner, reader(sequence));
    }
    let members: Vec<String> = server.ask(&["ZRANGE", "lock:k", "0", "-1"]);
    assert_eq!(members.len(), 3);
}

#[tokio::test]
async fn m4_a_release_serves_64_and_two_registries_serve_the_rest() {
    let server = RedisServer::start();
    let mut one = Registry::on(&server, "a1").await;
    let mut two = Registry::on(&server, "b2").await;
    for releaser_dies in [false, true] {
        won(&one.outcome("k", enter(1)).await);
        for sequence in 1..=150 {
            two.outcome("k", enters(reader(sequence))).await;
        }
        one.outcome("k", release(1)).await;
        assert_eq!(served(&mut one).await, (0, true));
        assert_eq!(served(&mut two).await, (64, true));
        // Either of them is enough.
        let owner = Owner::exclusive(1);
        let server_of_the_rest = if releaser_dies { &mut two } else { &mut one };
        let serve = Op::Serve { owner };
        let served_now = server_of_the_rest.outcome("k", serve.clone()).await;
        assert_eq!(served_now, Outcome::Gone { held: false });
        let (grants, _) = served(&mut two).await;
        assert_eq!(grants, 64);
        one.outcome("k", serve.clone()).await;
        assert_eq!(served(&mut two).await, (22, false));
        assert_eq!(served(&mut one).await.0, 0);
        one.outcome("k", serve).await;
        assert_eq!(served(&mut two).await, (0, false));
        assert_eq!(server.ask::<u64>(&["ZCARD", "lock:k"]), 150);
        // F1: they have 150 epochs, and the next is greater.
        let members: Vec<String> = server.ask(&["ZRANGE", "lock:k", "0", "-1"]);
        assert_eq!(members.len(), 150);
        server.cmd(&["DEL", "lock:k"]);
    }
}

/// However many locks one call frees, it does not hold up the server for long. Each of them is served a little.
#[tokio::test]
async fn m4_one_call_serves_64_and_one_of_each_other_lock() {
    let server = RedisServer::start();
    let mut one = Registry::on(&server, "a1").await;
    let mut two = Registry::on(&server, "b2").await;
    let keys = ["k", "l", "m"];
    for key in keys {
        won(&one.outcome(key, enter(1)).await);
        for sequence in 1..=70 {
            two.outcome(key, enters(reader(sequence))).await;
        }
    }
    for key in keys {
        one.submit(key, release(1));
    }
    for key in keys {
        one.reply(key, &release(1)).await.unwrap();
    }
    assert_eq!(served(&mut two).await, (66, true));
    for (rest, more) in [(6 + 64 + 64, true), (5 + 5, false)] {
        for key in keys {
            let owner = Owner::exclusive(1);
            one.outcome(key, Op::Serve { owner }).await;
        }
        assert_eq!(served(&mut two).await, (rest, more));
    }
}

#[tokio::test]
async fn m7_shared_leases_are_renewed_and_handed_over_on_a_full_server() {
    let server = RedisServer::start();
    let mut one = Registry::on(&server, "a1").await;
    let mut two = Registry::on(&server, "b2").await;
    won(&one.outcome("k", enters(reader(1))).await);
    won(&one.outcome("k", enters(reader(2))).await);
    won(&one.outcome("p", enters(permit(3, 3, 3))).await);
    won(&one.outcome("x", enter(4)).await);
    two.outcome("k", enter(1)).await;
    two.outcome("p", enters(permit(2, 2, 3))).await;
    two.outcome("x", enters(reader(3))).await;
    server.cmd(&["CONFIG", "SET", "maxmemory", "1"]);
    server.script_flush();
    assert_eq!(
        one.outcome("k", renews(reader(1), 2 * TTL)).await,
        Outcome::Renewed
    );
    assert_eq!(
        one.outcome("p", renews(permit(3, 3, 3), 2 * TTL)).await,
        Outcome::Renewed
    );
    for owner in [reader(1), reader(2)] {
        assert_eq!(one.outcome("k", Op::Release { owner }).await, HELD);
    }
    assert_eq!(two.granted().await.1.owner, Owner::exclusive(1));
    let owner = permit(3, 3, 3);
    assert_eq!(one.outcome("p", Op::Release { owner }).await, HELD);
    assert_eq!(two.granted().await.1.owner, permit(2, 2, 3));
    assert_eq!(one.outcome("x", release(4)).await, HELD);
    assert_eq!(two.granted().await.1.owner, reader(3));
    server.cmd(&["CONFIG", "SET", "maxmemory", "0"]);
    // What is new is refused, also where others share the lock.
    won(&one.outcome("s", attempts(reader(5), TTL)).await);
    server.cmd(&["CONFIG", "SET", "maxmemory", "1"]);
    for key in ["new", "s"] {
        let (why, retryable) = refused(two.ask(key, attempts(reader(9), TTL)).await);
        assert!(why.contains("OOM") && retryable, "{why}");
    }
    server.cmd(&["CONFIG", "SET", "maxmemory", "0"]);
    assert_eq!(two.outcome("k", renew(1, TTL)).await, Outcome::Renewed);
}

/// What is no lock of ours is left alone.
#[tokio::test]
async fn a_key_of_another_type_is_refused() {
    let server = RedisServer::start();
    let mut one = Registry::on(&server, "a1").await;
    server.cmd(&["LPUSH", "lock:k", "something"]);
    for owner in [Owner::exclusive(1), reader(2), permit(3, 1, 2)] {
        for op in [attempts(owner, TTL), enters(owner)] {
            let (why, _) = refused(one.ask("k", op).await);
            assert!(why.contains("WRONGTYPE"), "{why}");
        }
    }
    assert_eq!(server.ask::<u64>(&["LLEN", "lock:k"]), 1);
    // Somebody's own sorted set is not taken for a lock.
    server.cmd(&["ZADD", "lock:z", "1", "mine", "2", "mine, too"]);
    for owner in [Owner::exclusive(1), reader(2)] {
        let (why, _) = refused(one.ask("z", attempts(owner, TTL)).await);
        assert!(why.contains("WRONGTYPE"), "{why}");
    }
    assert!(one.session().inspect("z".into()).await.is_err());
    assert_eq!(server.ask::<u64>(&["ZCARD", "lock:z"]), 2);
    assert!(!server.exists("{lock:k}:~queue2"));
}

/// A queue of another type is told to whom it concerns, and to nobody else whose op is in the same call.
#[tokio::test]
async fn a_queue_of_another_type_fails_no_other_op_of_the_call() {
    let server = RedisServer::start();
    let mut one = Registry::on(&server, "a1").await;
    won(&one.outcome("k", attempts(reader(1), TTL)).await);
    server.cmd(&["SET", "{lock:k}:~queue2", "something"]);
    one.submit("a", attempt(2));
    one.submit("k", withdraw_of(reader(1)));
    one.submit("b", attempt(3));
    won(&one.reply("a", &attempt(2)).await.unwrap().outcome);
    won(&one.reply("b", &attempt(3)).await.unwrap().outcome);
    let (why, _) = refused(one.reply("k", &withdraw_of(reader(1))).await);
    assert!(why.contains("WRONGTYPE"), "{why}");
    assert!(!server.exists("lock:k"), "it was released");
}

/// What an inspection cannot read it leaves out. Nobody else on the connection notices.
#[tokio::test]
async fn an_inspection_leaves_out_what_it_cannot_read() {
    let server = RedisServer::start();
    let mut one = Registry::on(&server, "a1").await;
    won(&one.outcome("k", attempts(reader(1), TTL)).await);
    one.outcome("k", enter(2)).await;
    server.cmd(&[
        "ZADD",
        "lock:k",
        "inf",
        "b2:3",
        "9e15",
        "b2:4 of a later version",
    ]);
    server.cmd(&[
        "ZADD",
        "{lock:k}:~queue2",
        "1",
        "b2:5",
        "2",
        "b2:6 1000 of a later version",
    ]);
    let status = one.session().inspect("k".into()).await.unwrap();
    let holders: Vec<_> = status.holders.iter().map(|holder| &*holder.name).collect();
    assert_eq!(holders, ["a1:1"], "{status:?}");
    let queue: Vec<_> = status.queue.iter().map(|ticket| &*ticket.0).collect();
    assert_eq!(queue, ["a1:2"], "{status:?}");
    assert!(one.heard_by_now().is_none());
}

/// A confirmation asks for many locks at once. One of another type counts as lost, and the others are confirmed.
#[tokio::test]
async fn a_confirmation_survives_a_key_of_another_type() {
    let server = RedisServer::start();
    let mut one = Registry::on(&server, "a1").await;
    won(&one.outcome("k", attempt(1)).await);
    won(&one.outcome("s", attempts(reader(2), TTL)).await);
    won(&one.outcome("p", attempts(permit(3, 2, 4), TTL)).await);
    server.cmd(&["LPUSH", "lock:list", "something"]);
    let script = include_str!("../confirm.lua");
    let locks = ["lock:k", "lock:list", "lock:s", "lock:p", "lock:none"];
    let owners = ["a1:1", "a1:9", "a1:2", "a1:3 1/4", "a1:9"];
    let call: Vec<&str> = ["EVAL", script, "5"]
        .into_iter()
        .chain(locks)
        .chain(owners)
        .collect();
    assert_eq!(server.ask::<Vec<u8>>(&call), [1, 0, 1, 1, 0]);
}
