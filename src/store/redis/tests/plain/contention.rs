//! Ops are done alike, whoever shares their call.

use super::*;

/// Everything that an op can meet.
fn every_case() -> Vec<(&'static str, Op)> {
    vec![
        ("free", attempt(1)),
        ("free, entered", enter(2)),
        ("foreign", attempt(3)),
        ("foreign, entered", enter(4)),
        ("ours", enter(5)),
        ("list", attempt(6)),
        ("queue is text", attempt(7)),
        ("dead ticket", attempt(8)),
        ("live ticket", attempt(9)),
        ("held", release(10)),
        ("gone", release(11)),
        ("another's", release(12)),
        ("list, released", release(13)),
        ("held, dead ticket", release(14)),
        ("held, live ticket", release(15)),
        ("held, queue is text", release(16)),
        ("withdrawn", withdraw(17)),
        ("yielded", yield_turn(18, 28)),
        ("free too", attempt(19)),
        ("held too", release(20)),
    ]
}

/// A server on which each of them meets just that, and the registry with the live tickets.
async fn scene() -> (RedisServer, Registry) {
    let server = RedisServer::start();
    let other = Registry::on(&server, "b2").await;
    for (key, owner) in [
        ("foreign", "somebody"),
        ("foreign, entered", "somebody"),
        ("ours", "a1:5"),
        ("held", "a1:10"),
        ("another's", "a1:99"),
        ("held, dead ticket", "a1:14"),
        ("held, live ticket", "a1:15"),
        ("held, queue is text", "a1:16"),
        ("withdrawn", "a1:17"),
        ("yielded", "a1:18"),
        ("held too", "a1:20"),
    ] {
        server.set(&format!("lock:{key}"), owner);
    }
    for key in ["list", "list, released"] {
        server.cmd(&["RPUSH", &format!("lock:{key}"), "x"]);
    }
    for key in ["queue is text", "held, queue is text"] {
        server.set(&format!("{{lock:{key}}}:~queue2"), "text");
    }
    for (key, ticket) in [
        ("dead ticket", "dead:1 30000"),
        ("held, dead ticket", "dead:1 30000"),
        ("live ticket", "b2:1 30000"),
        ("held, live ticket", "b2:2 30000"),
    ] {
        server.cmd(&["ZADD", &format!("{{lock:{key}}}:~queue2"), "1", ticket]);
    }
    (server, other)
}

/// Whether each met what it was to meet.
fn check(server: &RedisServer, cases: &[(&str, Op)], told: &Told) {
    for (at, (key, _)) in cases.iter().enumerate() {
        let value = |owner: &str| {
            assert_eq!(server.get(&format!("lock:{key}")).as_deref(), Some(owner));
        };
        let is_free = || assert!(!server.exists(&format!("lock:{key}")), "{key}");
        let reply = &told.replies[at];
        match *key {
            "free" | "free, entered" | "free too" | "dead ticket" | "ours" => {
                told.won(at);
                assert!(
                    server
                        .get(&format!("lock:{key}"))
                        .unwrap()
                        .starts_with("a1:")
                );
            }
            "yielded" => {
                told.won(at);
                value("a1:28");
            }
            "foreign" | "foreign, entered" => {
                told.busy(at);
                value("somebody");
            }
            "live ticket" => {
                told.busy(at);
                value("b2:1");
            }
            "list" | "list, released" => {
                told.refused(at, "WRONGTYPE");
                let length: u64 = server.ask(&["LLEN", &format!("lock:{key}")]);
                assert_eq!(length, 1, "{key}");
            }
            "queue is text" => {
                told.refused(at, "WRONGTYPE");
                is_free();
            }
            "gone" => {
                assert_eq!(*reply, NOT_HELD, "{key}");
                is_free();
            }
            "another's" => {
                assert_eq!(*reply, NOT_HELD, "{key}");
                value("a1:99");
            }
            "held, live ticket" => {
                assert_eq!(*reply, HELD, "{key}");
                value("b2:2");
            }
            _ => {
                assert_eq!(*reply, HELD, "{key}");
                is_free();
            }
        }
    }
}

#[tokio::test]
async fn s1_ops_are_done_alike_beside_all_others_and_alone() {
    let cases = every_case();

    let (server, mut other) = scene().await;
    let before = micros(&server);
    let told = Caller::on(&server).call(&cases);
    check(&server, &cases, &told);
    let mut epochs: Vec<_> = told.epochs();
    epochs.extend([other.granted().await.1.epoch, other.granted().await.1.epoch]);
    epochs.sort_unstable();
    assert!(epochs[0] >= before, "f1");
    epochs.dedup();
    assert_eq!(epochs.len(), 6 + 2, "f1: each epoch is another");
    assert!(
        fence(&server) >= epochs[7],
        "f1: the fence stands past each"
    );
    let entered = queue(&server, "lock:foreign, entered");
    assert_eq!(entered[0].0, "a1:4 30000");

    let (server, _other) = scene().await;
    let mut caller = Caller::on(&server);
    let mut last = 0;
    for case in cases.chunks(1) {
        let told = caller.call(case);
        check(&server, case, &told);
        for epoch in told.epochs() {
            assert!(epoch > last, "f1");
            last = epoch;
        }
    }
}

/// In pairs with something that is in nobody's way.
#[tokio::test]
async fn s1_ops_are_done_alike_in_pairs() {
    let cases = every_case();
    let (server, _other) = scene().await;
    let mut caller = Caller::on(&server);
    for (at, case) in cases.chunks(1).enumerate() {
        let plain = format!("plain {at}");
        let told = caller.call(&[case[0].clone(), (&plain, attempt(100))]);
        check(&server, case, &told);
        told.won(1);
    }
}
