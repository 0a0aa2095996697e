//! A lone op that meets others: somebody who holds the lock, or who waits for it.

use super::*;

/// Nor does a lone op more than it has to that meets others: somebody who holds the lock, or who waits for it.
#[tokio::test]
async fn a_hand_over_takes_few_commands() {
    let server = RedisServer::start();
    let mut other = Registry::on(&server, "b2").await;
    let mut caller = Caller::on(&server);
    let inside = |names: &[(&str, u64)]| {
        let mut all = server.all_calls();
        all.retain(|name, _| name != "eval");
        let counted: Vec<_> = all.iter().map(|(name, count)| (&**name, *count)).collect();
        assert_eq!(counted, names);
        server.reset_stats();
    };
    let (queue_of, ticket) = ("{lock:k}:~queue2", "b2:1 20000");
    server.set("lock:k", "b2:7");
    server.reset_stats();
    let told = caller.call(&[("k", enter(1))]);
    inside(&[
        ("exists", 1),
        ("get", 1),
        ("pexpire", 1),
        ("pttl", 2),
        ("time", 1),
        ("zadd", 1),
        ("zrange", 1),
    ]);
    let RequestReply::Done(Outcome::Busy {
        left: None,
        score: Some(score),
        ..
    }) = told.replies[0]
    else {
        panic!("{told:?}")
    };
    assert_eq!(queue(&server, "lock:k"), [("a1:1 30000".into(), score)]);
    assert!((55_000..=61_000).contains(&server.pttl(queue_of)), "k3");

    // Nobody else: whoever yields has it on.
    server.flushall();
    server.set("lock:k", "a1:1");
    server.reset_stats();
    let told = caller.call(&[("k", yield_turn(1, 2))]);
    inside(&[
        ("get", 1),
        ("set", 2),
        ("time", 1),
        ("zrange", 1),
        ("zrem", 2),
    ]);
    assert_eq!(fence(&server), told.won(0));
    assert_eq!(server.get("lock:k").as_deref(), Some("a1:2"));
    assert!((25_000..=30_000).contains(&server.pttl("lock:k")));

    // Somebody else: the queue lasts as long as the lock that is theirs, and a minute more.
    for expiry in ["60000", "90000"] {
        server.set("lock:k", "a1:2");
        server.cmd(&["ZADD", queue_of, "5", ticket]);
        server.cmd(&["PEXPIRE", queue_of, expiry]);
        let before = fence(&server);
        server.reset_stats();
        let told = caller.call(&[("k", yield_turn(2, 3))]);
        let mut commands = vec![
            ("get", 1),
            ("pexpire", 1),
            ("pttl", 1),
            ("publish", 1),
            ("pubsub|numsub", 1),
            ("set", 2),
            ("time", 1),
            ("zadd", 1),
            ("zrange", 2),
            ("zrem", 1),
        ];
        commands.retain(|(_, count)| *count > 0);
        inside(&commands);
        let (_, grant) = other.granted().await;
        assert_eq!(
            (grant.owner, grant.ttl),
            (Owner::exclusive(1), Duration::from_secs(20))
        );
        assert!(grant.epoch > before && fence(&server) == grant.epoch, "f1");
        let RequestReply::Done(Outcome::Busy {
            left,
            score: Some(score),
            ..
        }) = told.replies[0]
        else {
            panic!("{told:?}")
        };
        assert_eq!(left, Some(Duration::from_secs(20)));
        assert!(
            score <= grant.at,
            "d2: the newest pair is not after the grant's"
        );
        assert_eq!(queue(&server, "lock:k"), [("a1:3 30000".into(), score)]);
        assert_eq!(server.get("lock:k").as_deref(), Some("b2:1"));
        assert!(
            (15_000..=20_000).contains(&server.pttl("lock:k")),
            "its own ttl"
        );
        assert!((75_000..=90_000).contains(&server.pttl(queue_of)), "k3");
        server.cmd(&["ZREM", queue_of, "a1:3 30000"]);
    }

    server.set("lock:k", "a1:4");
    server.cmd(&["ZADD", queue_of, "5", ticket]);
    let before = fence(&server);
    server.reset_stats();
    let told = caller.call(&[("k", release(4))]);
    assert_eq!(told.replies, [HELD]);
    inside(&[
        ("exists", 1),
        ("get", 1),
        ("publish", 1),
        ("pubsub|numsub", 1),
        ("set", 2),
        ("time", 1),
        ("zrange", 1),
        ("zrem", 1),
    ]);
    let (_, grant) = other.granted().await;
    assert!(grant.epoch > before && fence(&server) == grant.epoch, "f1");
    assert_eq!(server.get("lock:k").as_deref(), Some("b2:1"));
    assert!(
        (15_000..=20_000).contains(&server.pttl("lock:k")),
        "its own ttl"
    );
    assert_eq!(server.keys("*"), ["lock:k", FENCE]);
}

/// A lone op that meets others, and a server that lets its user do all but one thing: each ends as if it had been
/// done in full, where nothing was left half done or a lock is free whose owner would not know.
#[tokio::test]
async fn s1_a_right_too_few_leaves_no_hand_over_half_done() {
    let (queue_of, ticket) = ("{lock:k}:~queue2", "b2:1 20000");
    let stand = |server: &RedisServer| {
        server.set("lock:k", "a1:1");
        server.cmd(&["ZADD", queue_of, "5", ticket, "6", "b2:2 20000"]);
        server.cmd(&["PEXPIRE", queue_of, "70000"]);
    };
    let stood = [(ticket.to_owned(), 5), ("b2:2 20000".to_owned(), 6)];
    for rights in [
        "-publish",
        "resetchannels",
        "-zrem",
        "-pubsub",
        "-zrange",
        "-set",
        "-set (+set ~lock:~fence)",
    ] {
        let (server, mut bare) = with_user(rights);
        let mut other = Registry::on(&server, "b2").await;
        let mut caller = Caller::on(&server);
        stand(&server);
        assert_eq!(bare.call(&[("k", release(1))]).replies, [HELD], "{rights}");
        assert!(!server.exists("lock:k"), "{rights}");
        assert_eq!(queue(&server, "lock:k"), stood, "{rights}");
        assert!((55_000..=70_000).contains(&server.pttl(queue_of)), "k3");

        stand(&server);
        let told = bare.call(&[("k", yield_turn(1, 2))]);
        told.refused(
            0,
            if rights == "resetchannels" {
                "NOPERM"
            } else {
                ""
            },
        );
        let publishes = rights == "-publish" || rights == "resetchannels";
        assert_eq!(server.exists("lock:k"), !publishes, "{rights}");
        if !publishes {
            assert_eq!(server.get("lock:k").as_deref(), Some("a1:1"), "{rights}");
        }
        let mut stands = queue(&server, "lock:k");
        if rights == "-zrem" {
            // It came first, and cannot be taken back: its own registry knows nothing of it (O1).
            stands.retain(|(ticket, _)| ticket != "a1:2 30000");
        }
        assert_eq!(stands, stood, "{rights}");
        assert!((55_000..=91_000).contains(&server.pttl(queue_of)), "k3");

        // Nobody has heard of anything before this.
        stand(&server);
        assert_eq!(caller.call(&[("k", release(1))]).replies, [HELD]);
        assert_eq!(
            other.granted().await.1.owner,
            Owner::exclusive(1),
            "{rights}"
        );
        other
            .has_not_heard(|event| matches!(event, StoreEvent::Granted { .. }))
            .await;
    }
    for rights in ["-pexpire", "-pttl", "-zadd"] {
        let (server, mut bare) = with_user(rights);
        let _other = Registry::on(&server, "b2").await;
        stand(&server);
        server.cmd(&["PEXPIRE", queue_of, "40000"]);
        bare.call(&[("k", yield_turn(1, 2))]).refused(0, "");
        assert_eq!(server.get("lock:k").as_deref(), Some("a1:1"), "{rights}");
        if rights != "-zadd" {
            assert_eq!(queue(&server, "lock:k"), stood, "{rights}");
        }
        assert_eq!(bare.call(&[("k", release(1))]).replies, [HELD], "{rights}");
    }
}

/// The first write of a hand-over is refused there; then what frees memory is the first.
#[tokio::test]
async fn s1_on_a_full_server_lone_ops_hand_over() {
    let server = RedisServer::start();
    let mut other = Registry::on(&server, "b2").await;
    let mut caller = Caller::on(&server);
    server.set("lock:released", "a1:1");
    server.set("lock:yielded", "a1:1");
    for key in ["released", "yielded"] {
        let queue_of = format!("{{lock:{key}}}:~queue2");
        server.cmd(&["ZADD", &queue_of, "5", "b2:1 20000"]);
    }
    server.set("lock:alone", "a1:1");
    server.set("lock:foreign", "somebody");
    server.cmd(&["CONFIG", "SET", "maxmemory", "1"]);
    assert_eq!(caller.call(&[("released", release(1))]).replies, [HELD]);
    assert_eq!(&*other.granted().await.0, "released");
    let told = caller.call(&[("yielded", yield_turn(1, 2))]);
    told.busy(0);
    assert_eq!(&*other.granted().await.0, "yielded");
    assert_eq!(queue(&server, "lock:yielded")[0].0, "a1:2 30000");
    // What takes memory alone is refused, and nothing of it done.
    let told = caller.call(&[("alone", yield_turn(1, 2))]);
    told.refused(0, "OOM");
    assert_eq!(server.get("lock:alone").as_deref(), Some("a1:1"));
    caller.call(&[("foreign", enter(1))]).refused(0, "OOM");
    assert_eq!(queue(&server, "lock:foreign"), []);
}

/// As if the server's clock had been set back behind a ticket: whoever comes later stands behind it.
#[tokio::test]
async fn k2_a_lone_op_overtakes_no_ticket_from_the_future() {
    let server = RedisServer::start();
    let _other = Registry::on(&server, "b2").await;
    let mut caller = Caller::on(&server);
    let ahead = 4_000_000_000_000_000_u64;
    for op in [enter(1), yield_turn(1, 2)] {
        server.flushall();
        let is_enter = matches!(op, Op::Enter { .. });
        server.set("lock:k", if is_enter { "b2:7" } else { "a1:1" });
        for (place, ticket) in [(5, "b2:1 30000"), (ahead, "b2:2 30000")] {
            server.cmd(&["ZADD", "{lock:k}:~queue2", &place.to_string(), ticket]);
        }
        let told = caller.call(&[("k", op)]);
        told.busy(0);
        let (last, score) = queue(&server, "lock:k").pop().unwrap();
        assert!(last.starts_with("a1:"), "{last}");
        assert_eq!(score, ahead + 1);
    }
}

/// K1: it stands where it stood, and its place is told.
#[test]
fn k1_a_lone_ticket_entered_again_keeps_its_place() {
    let server = RedisServer::start();
    let mut caller = Caller::on(&server);
    server.set("lock:k", "somebody");
    let place = |told: &Told| match told.replies[0] {
        RequestReply::Done(Outcome::Busy { score, .. }) => score.unwrap(),
        _ => panic!("{told:?}"),
    };
    let first = place(&caller.call(&[("k", enter(1))]));
    assert_eq!(place(&caller.call(&[("k", enter(1))])), first);
    assert_eq!(queue(&server, "lock:k"), [("a1:1 30000".into(), first)]);
}
