//! What a call does at once for all its ops, and how it gets out of that: each call here is made by
//! hand, so that it is known what shares it.

use std::time::Duration;

use redis::{ConnectionLike, Value};

use super::registry::{Registry, TTL, attempt, enter, queue, release, withdraw, yield_turn};
use super::support::RedisServer;
use crate::store::contract::{News, Op, Outcome, Owner};
use crate::store::redis::call::Job;
use crate::store::redis::keys::Names;
use crate::store::redis::reply::{self, Verdict};
use crate::store::redis::script;
use crate::store::traffic::Lane;

const FENCE: &str = "lock:~fence";
const NUMBER: u64 = 7;
const ANY_TIME: u64 = 4_000_000_000_000_000;

const HELD: Verdict = Verdict::Done(Outcome::Gone { held: true });
const NOT_HELD: Verdict = Verdict::Done(Outcome::Gone { held: false });

/// Makes calls as the registry `a1`.
struct Caller {
    connection: redis::Connection,
    names: Names,
}

/// Whether the reply was the short one, and what it says of each op.
#[derive(Debug)]
struct Told {
    in_a_word: bool,
    verdicts: Vec<Verdict>,
}

impl Caller {
    fn on(server: &RedisServer) -> Self {
        Self::at(server.url())
    }

    fn at(url: String) -> Self {
        let client = redis::Client::open(url).unwrap();
        Self {
            connection: client.get_connection().unwrap(),
            names: Names::new("lock".into(), "a1".into()),
        }
    }

    fn call(&mut self, ops: &[(&str, Op)]) -> Told {
        self.call_until(ANY_TIME, ops)
    }

    fn call_until(&mut self, of_use: u64, ops: &[(&str, Op)]) -> Told {
        let jobs: Vec<_> = ops
            .iter()
            .map(|(key, op)| Job::new(*key, op.clone()))
            .collect();
        let command = Lane::Batch.command(&self.names, NUMBER, of_use, &jobs);
        let command = script::BATCH.in_full(&command).get_packed_command();
        let reply = self.connection.req_packed_command(&command).unwrap();
        let in_a_word = matches!(reply, Value::BulkString(_));
        let reply = reply::read_reply(NUMBER, &jobs, reply).expect("the reply to this call");
        let verdicts = reply.verdicts;
        Told {
            in_a_word,
            verdicts,
        }
    }
}

impl Told {
    #[track_caller]
    fn won(&self, at: usize) -> u64 {
        match &self.verdicts[at] {
            Verdict::Done(Outcome::Won { draw }) => *draw,
            other => panic!("{at} has not won: {other:?}"),
        }
    }

    fn draws(&self) -> Vec<u64> {
        let draw = |verdict: &Verdict| match verdict {
            Verdict::Done(Outcome::Won { draw }) => Some(*draw),
            _ => None,
        };
        self.verdicts.iter().filter_map(draw).collect()
    }

    #[track_caller]
    fn refused(&self, at: usize, why: &str) {
        match &self.verdicts[at] {
            Verdict::Refused(refusal) => {
                assert!(refusal.to_string().contains(why), "{at}: {refusal}");
            }
            other => panic!("{at} was not refused: {other:?}"),
        }
    }

    #[track_caller]
    fn busy(&self, at: usize) {
        let verdict = &self.verdicts[at];
        assert!(
            matches!(verdict, Verdict::Done(Outcome::Busy { .. })),
            "{at}: {verdict:?}"
        );
    }
}

fn micros(server: &RedisServer) -> u64 {
    let (seconds, micros): (u64, u64) = server.ask(&["TIME"]);
    seconds * 1_000_000 + micros
}

fn fence(server: &RedisServer) -> u64 {
    server.ask(&["GET", FENCE])
}

const KEYS: [&str; 3] = ["x", "y", "z"];

fn attempts() -> [(&'static str, Op); 3] {
    [("x", attempt(1)), ("y", enter(2)), ("z", attempt(3))]
}

fn releases() -> [(&'static str, Op); 3] {
    [("x", release(1)), ("y", release(2)), ("z", release(3))]
}

/// A server with one user more, who lacks some right.
fn with_user(rights: &str) -> (RedisServer, Caller) {
    let server = RedisServer::builder()
        .config(format!("user bare on nopass ~* &* +@all {rights}"))
        .start();
    let bare = Caller::at(server.url_with("bare", "x", 0));
    (server, bare)
}

#[test]
fn what_goes_plainly_is_answered_in_a_word() {
    let server = RedisServer::start();
    let mut caller = Caller::on(&server);
    for count in 1..=3 {
        let before = micros(&server);
        let told = caller.call(&attempts()[..count]);
        assert!(told.in_a_word, "{told:?}");
        let first = told.won(0);
        assert!((before..=micros(&server)).contains(&first), "f1");
        for (at, key) in KEYS[..count].iter().enumerate() {
            assert_eq!(told.won(at), first + at as u64);
            let lock = format!("lock:{key}");
            assert_eq!(server.get(&lock), Some(format!("a1:{}", at + 1)));
            let ttl = i64::try_from(TTL.as_millis()).unwrap();
            assert!((ttl - 5_000..=ttl).contains(&server.pttl(&lock)));
        }
        assert_eq!(fence(&server), first + count as u64 - 1);

        let told = caller.call(&releases()[..count]);
        assert!(told.in_a_word, "{told:?}");
        assert!(told.verdicts.iter().all(|verdict| *verdict == HELD));
        assert_eq!(server.keys("*"), [FENCE]);
    }
}

#[test]
fn releases_and_wins_share_a_call_and_its_word() {
    let server = RedisServer::start();
    let mut caller = Caller::on(&server);
    let first = caller.call(&attempts()[..2]).won(1);
    let told = caller.call(&[("x", release(1)), ("z", enter(3)), ("y", release(2))]);
    assert!(told.in_a_word);
    assert_eq!(
        [&told.verdicts[0], &told.verdicts[2]],
        [&HELD, &HELD],
        "{told:?}"
    );
    assert!(told.won(1) > first);
    assert_eq!(server.keys("*"), ["lock:z", FENCE]);
}

/// How often a script calls the server is what it costs.
#[test]
fn the_plain_case_takes_few_commands() {
    let server = RedisServer::start();
    let mut caller = Caller::on(&server);
    let inside = |names: &[(&str, u64)]| {
        let all = server.all_calls();
        let counted: Vec<_> = all
            .iter()
            .filter(|(name, _)| *name != "eval")
            .map(|(name, count)| (name.as_str(), *count))
            .collect();
        assert_eq!(counted, names);
        server.reset_stats();
    };
    server.reset_stats();
    caller.call(&attempts()[..1]);
    inside(&[("exists", 1), ("set", 2), ("time", 1)]);
    caller.call(&releases()[..1]);
    inside(&[("del", 1), ("exists", 1), ("get", 1)]);
    caller.call(&attempts());
    inside(&[("exists", 1), ("mget", 1), ("set", 4), ("time", 1)]);
    caller.call(&releases());
    inside(&[("del", 1), ("exists", 1), ("mget", 1)]);
}

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
    let (queue_of, ticket) = ("{lock:k}:~queue1", "b2:1 20000");
    server.set("lock:k", "b2:7");
    server.reset_stats();
    let told = caller.call(&[("k", enter(1))]);
    assert!(told.in_a_word, "{told:?}");
    inside(&[
        ("exists", 1),
        ("get", 1),
        ("pexpire", 1),
        ("pttl", 1),
        ("time", 1),
        ("zadd", 1),
    ]);
    let Verdict::Done(Outcome::Busy {
        left: None,
        score: Some(score),
    }) = told.verdicts[0]
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
    assert!(told.in_a_word, "{told:?}");
    inside(&[("get", 1), ("set", 2), ("time", 1), ("zrange", 1)]);
    assert_eq!(fence(&server), told.won(0));
    assert_eq!(server.get("lock:k").as_deref(), Some("a1:2"));
    assert!((25_000..=30_000).contains(&server.pttl("lock:k")));

    // Somebody else: the queue lasts as long as the lock that is theirs, and a minute more.
    for (expiry, sets) in [("60000", 1), ("90000", 0)] {
        server.set("lock:k", "a1:2");
        server.cmd(&["ZADD", queue_of, "5", ticket]);
        server.cmd(&["PEXPIRE", queue_of, expiry]);
        let before = fence(&server);
        server.reset_stats();
        let told = caller.call(&[("k", yield_turn(2, 3))]);
        assert!(told.in_a_word, "{told:?}");
        let mut commands = vec![
            ("get", 1),
            ("pexpire", sets),
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
            (Owner(1), Duration::from_secs(20))
        );
        assert!(grant.draw > before && fence(&server) == grant.draw, "f1");
        let Verdict::Done(Outcome::Busy {
            left,
            score: Some(score),
        }) = told.verdicts[0]
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
        let least = if sets == 1 { 79_000 } else { 85_000 };
        assert!((least..=90_000).contains(&server.pttl(queue_of)), "k3");
        server.cmd(&["ZREM", queue_of, "a1:3 30000"]);
    }

    server.set("lock:k", "a1:4");
    server.cmd(&["ZADD", queue_of, "5", ticket]);
    let before = fence(&server);
    server.reset_stats();
    let told = caller.call(&[("k", release(4))]);
    assert!(told.in_a_word, "{told:?}");
    assert_eq!(told.verdicts, [HELD]);
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
    assert!(grant.draw > before && fence(&server) == grant.draw, "f1");
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
    let (queue_of, ticket) = ("{lock:k}:~queue1", "b2:1 20000");
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
        assert_eq!(bare.call(&[("k", release(1))]).verdicts, [HELD], "{rights}");
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
        assert_eq!(caller.call(&[("k", release(1))]).verdicts, [HELD]);
        assert_eq!(other.granted().await.1.owner, Owner(1), "{rights}");
        other
            .has_not_heard(|news| matches!(news, News::Granted { .. }))
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
        assert_eq!(bare.call(&[("k", release(1))]).verdicts, [HELD], "{rights}");
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
        let queue_of = format!("{{lock:{key}}}:~queue1");
        server.cmd(&["ZADD", &queue_of, "5", "b2:1 20000"]);
    }
    server.set("lock:alone", "a1:1");
    server.set("lock:foreign", "somebody");
    server.cmd(&["CONFIG", "SET", "maxmemory", "1"]);
    assert_eq!(caller.call(&[("released", release(1))]).verdicts, [HELD]);
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
            server.cmd(&["ZADD", "{lock:k}:~queue1", &place.to_string(), ticket]);
        }
        let told = caller.call(&[("k", op)]);
        assert!(!told.in_a_word, "{told:?}");
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
    let place = |told: &Told| match told.verdicts[0] {
        Verdict::Done(Outcome::Busy { score, .. }) => score.unwrap(),
        _ => panic!("{told:?}"),
    };
    let first = place(&caller.call(&[("k", enter(1))]));
    assert_eq!(place(&caller.call(&[("k", enter(1))])), first);
    assert_eq!(queue(&server, "lock:k"), [("a1:1 30000".into(), first)]);
}

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
        server.set(&format!("{{lock:{key}}}:~queue1"), "text");
    }
    for (key, ticket) in [
        ("dead ticket", "dead:1 30000"),
        ("held, dead ticket", "dead:1 30000"),
        ("live ticket", "b2:1 30000"),
        ("held, live ticket", "b2:2 30000"),
    ] {
        server.cmd(&["ZADD", &format!("{{lock:{key}}}:~queue1"), "1", ticket]);
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
        let verdict = &told.verdicts[at];
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
                assert_eq!(*verdict, NOT_HELD, "{key}");
                is_free();
            }
            "another's" => {
                assert_eq!(*verdict, NOT_HELD, "{key}");
                value("a1:99");
            }
            "held, live ticket" => {
                assert_eq!(*verdict, HELD, "{key}");
                value("b2:2");
            }
            _ => {
                assert_eq!(*verdict, HELD, "{key}");
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
    assert!(!told.in_a_word);
    check(&server, &cases, &told);
    let mut draws: Vec<_> = told.draws();
    draws.extend([other.granted().await.1.draw, other.granted().await.1.draw]);
    draws.sort_unstable();
    assert!(draws[0] >= before, "f1");
    draws.dedup();
    assert_eq!(draws.len(), 6 + 2, "f1: each draw is another");
    assert!(fence(&server) >= draws[7], "f1: the fence stands past each");
    let entered = queue(&server, "lock:foreign, entered");
    assert_eq!(entered[0].0, "a1:4 30000");

    let (server, _other) = scene().await;
    let mut caller = Caller::on(&server);
    let mut last = 0;
    for case in cases.chunks(1) {
        let told = caller.call(case);
        check(&server, case, &told);
        for draw in told.draws() {
            assert!(draw > last, "f1");
            last = draw;
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

#[test]
fn f1_draws_grow_past_a_fence_from_the_future() {
    let server = RedisServer::start();
    let mut caller = Caller::on(&server);
    let ahead = micros(&server) + 3_600_000_000;
    for count in [1, 3] {
        server.set(FENCE, &ahead.to_string());
        for round in 0..2 {
            let told = caller.call(&attempts()[..count]);
            assert!(!told.in_a_word, "its draws are not the server's time");
            let before = ahead + (round * count) as u64;
            for at in 0..count {
                assert_eq!(told.won(at), before + 1 + at as u64, "f1, f3");
            }
            assert_eq!(fence(&server), before + count as u64);
            assert!(caller.call(&releases()[..count]).in_a_word);
        }
    }
}

#[test]
fn s1_what_is_no_fence_stays_as_it_is_and_hinders_no_release() {
    let server = RedisServer::start();
    let mut caller = Caller::on(&server);
    for make in [["RPUSH", FENCE, "x"], ["SET", FENCE, "x"]] {
        for count in [1, 3] {
            server.flushall();
            server.set("lock:held", "a1:9");
            server.cmd(&make);
            server.cmd(&["PEXPIRE", FENCE, "50000"]);
            let mut ops = attempts()[..count].to_vec();
            if count > 1 {
                ops.push(("held", release(9)));
            }
            let told = caller.call(&ops);
            for at in 0..count {
                told.refused(at, "WRONGTYPE");
            }
            if count > 1 {
                assert_eq!(told.verdicts[count], HELD);
                assert_eq!(server.keys("*"), [FENCE]);
            } else {
                assert_eq!(server.keys("*"), ["lock:held", FENCE]);
            }
            assert!(server.pttl(FENCE) > 40_000, "{make:?}");
            if make[0] == "SET" {
                assert_eq!(server.get(FENCE).as_deref(), Some("x"));
            }
        }
    }
}

#[test]
fn o5_what_is_stale_is_left_and_what_never_is_gets_done() {
    let server = RedisServer::start();
    let mut caller = Caller::on(&server);
    server.set("lock:held", "a1:9");
    let told = caller.call_until(
        1_000,
        &[("x", attempt(1)), ("held", release(9)), ("y", enter(2))],
    );
    assert_eq!(told.verdicts, [Verdict::Stale, HELD, Verdict::Stale]);
    assert_eq!(server.keys("*"), [""; 0]);
    let told = caller.call_until(1_000, &[("x", attempt(1))]);
    assert_eq!(told.verdicts, [Verdict::Stale]);
    assert_eq!(server.keys("*"), [""; 0]);
}

#[test]
fn s1_no_right_to_the_fence_leaves_nothing_done() {
    let (server, mut bare) = with_user("-set (+set ~lock:x ~lock:y ~lock:z)");
    for count in [1, 3] {
        let told = bare.call(&attempts()[..count]);
        for at in 0..count {
            told.refused(at, "NOPERM");
        }
        assert_eq!(server.keys("*"), [""; 0]);
    }
    for (key, owner) in [("lock:x", "a1:1"), ("lock:y", "a1:2"), ("lock:z", "a1:3")] {
        server.set(key, owner);
    }
    let told = bare.call(&releases());
    assert_eq!(told.verdicts, [HELD, HELD, HELD], "they need none");
}

/// Rights to a command and a key are asked for within a script; those to a key alone before it.
#[test]
fn s1_no_right_to_one_lock_harms_no_other() {
    let (server, mut bare) = with_user("-set (+set ~lock:~fence ~lock:x ~lock:z)");
    let told = bare.call(&attempts());
    assert!(told.won(0) < told.won(2));
    told.refused(1, "NOPERM");
    assert_eq!(server.keys("lock:?"), ["lock:x", "lock:z"]);
    bare.call(&[("y", enter(2))]).refused(0, "NOPERM");

    let (server, mut bare) = with_user("-del (+del ~lock:x ~lock:z)");
    for at in 0..3 {
        bare.call(&attempts()[at..=at]).won(0);
    }
    let told = bare.call(&releases());
    assert_eq!([&told.verdicts[0], &told.verdicts[2]], [&HELD, &HELD]);
    told.refused(1, "NOPERM");
    assert_eq!(server.keys("lock:?"), ["lock:y"]);
    bare.call(&[("y", release(2))]).refused(0, "NOPERM");
}

/// What speeds the plain case up is not needed for anything.
#[test]
fn without_the_right_to_a_command_of_the_plain_case_all_goes_in_full() {
    for rights in [
        "-mget",
        "-exists",
        "-mget -exists",
        "-mget (+mget ~lock:x)",
        "-exists (+exists ~lock:x ~{lock:x}*)",
    ] {
        let (server, mut bare) = with_user(rights);
        for count in [1, 3] {
            let told = bare.call(&attempts()[..count]);
            for at in 0..count {
                told.won(at);
            }
            let told = bare.call(&releases()[..count]);
            assert!(told.verdicts.iter().all(|verdict| *verdict == HELD));
            assert_eq!(server.keys("*"), [FENCE], "{rights}");
        }
    }
}

#[test]
fn s1_without_the_right_to_write_nothing_is_done() {
    for count in [1, 3] {
        let (server, mut bare) = with_user("-set");
        let told = bare.call(&attempts()[..count]);
        for at in 0..count {
            told.refused(at, "NOPERM");
        }
        assert_eq!(server.keys("*"), [""; 0]);

        let (server, mut bare) = with_user("-del");
        let first = bare.call(&attempts()[..count]).won(0);
        let mut ops = releases()[..count].to_vec();
        ops.push(("other", attempt(9)));
        let told = bare.call(&ops);
        for (at, key) in KEYS[..count].iter().enumerate() {
            told.refused(at, "NOPERM");
            assert!(server.exists(&format!("lock:{key}")));
        }
        assert!(told.won(count) > first);
        bare.call(&releases()[..1]).refused(0, "NOPERM");
    }
}

#[test]
fn s1_on_a_full_server_releases_come_first() {
    let server = RedisServer::start();
    let mut caller = Caller::on(&server);
    caller.call(&attempts());
    let before = fence(&server);
    server.cmd(&["CONFIG", "SET", "maxmemory", "1"]);

    let told = caller.call(&[("a", attempt(7)), ("b", enter(8))]);
    told.refused(0, "OOM");
    told.refused(1, "OOM");
    caller.call(&[("a", attempt(7))]).refused(0, "OOM");
    assert_eq!(fence(&server), before);
    assert_eq!(server.keys("lock:[ab]"), [""; 0]);

    let told = caller.call(&[("a", attempt(7)), ("x", release(1)), ("y", release(2))]);
    assert_eq!(told.verdicts[1..], [HELD, HELD]);
    let told = caller.call(&[("z", release(3))]);
    assert_eq!(told.verdicts, [HELD]);
    assert_eq!(server.keys("lock:[xyz]"), [""; 0]);
}

#[test]
fn a_replica_refuses_op_by_op() {
    let server = RedisServer::start();
    let mut caller = Caller::on(&server);
    caller.call(&attempts());
    // Of nothing: it keeps its data, and takes no writes.
    server.cmd(&["REPLICAOF", "127.0.0.1", "1"]);
    for count in [1, 3] {
        let told = caller.call(&releases()[..count]);
        for at in 0..count {
            told.refused(at, "READONLY");
        }
        caller.call(&[("other", attempt(9))]).refused(0, "READONLY");
        let told = caller.call(&[("other", attempt(9)), ("one more", enter(8))]);
        told.refused(0, "READONLY");
        told.refused(1, "READONLY");
    }
}
