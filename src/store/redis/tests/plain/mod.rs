//! What a call does at once for all its ops, and how it gets out of that: each call here is made by
//! hand, so that it is known what shares it.

mod contention;
mod handover;

use std::time::Duration;

use redis::ConnectionLike;

use super::registry::{Registry, TTL, attempt, enter, queue, release, withdraw, yield_turn};
use super::support::RedisServer;
use crate::store::contract::{Op, Outcome, Owner, StoreEvent, SubmittedOp};
use crate::store::driver::{Request, RequestKind};
use crate::store::redis::keys::Names;
use crate::store::redis::reply::RequestReply;
use crate::store::redis::{call, reply, script};

const FENCE: &str = "lock:~fence";
const NUMBER: u64 = 7;
const ANY_TIME: u64 = 4_000_000_000_000_000;

const HELD: RequestReply = RequestReply::Done(Outcome::Gone { held: true });
const NOT_HELD: RequestReply = RequestReply::Done(Outcome::Gone { held: false });

/// Makes calls as the registry `a1`.
struct Caller {
    connection: redis::Connection,
    names: Names,
}

/// What the reply says of each op.
#[derive(Debug)]
struct Told {
    replies: Vec<RequestReply>,
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
            .map(|(key, op)| {
                Request::new(RequestKind::Op(SubmittedOp::unattended(*key, op.clone())))
            })
            .collect();
        let (mut command, script) = (Vec::new(), script::SERVER.whole());
        call::write(&mut command, script, &self.names, NUMBER, of_use, &jobs);
        let reply = self.connection.req_packed_command(&command).unwrap();
        let reply = reply::read_reply(NUMBER, &jobs, reply).expect("the reply to this call");
        let replies = reply.replies;
        Told { replies }
    }
}

impl Told {
    #[track_caller]
    fn won(&self, at: usize) -> u64 {
        match &self.replies[at] {
            RequestReply::Done(Outcome::Won { epoch }) => *epoch,
            other => panic!("{at} has not won: {other:?}"),
        }
    }

    fn epochs(&self) -> Vec<u64> {
        let epoch = |reply: &RequestReply| match reply {
            RequestReply::Done(Outcome::Won { epoch }) => Some(*epoch),
            _ => None,
        };
        self.replies.iter().filter_map(epoch).collect()
    }

    #[track_caller]
    fn refused(&self, at: usize, why: &str) {
        match &self.replies[at] {
            RequestReply::Refused(refusal) => {
                assert!(refusal.to_string().contains(why), "{at}: {refusal}");
            }
            other => panic!("{at} was not refused: {other:?}"),
        }
    }

    #[track_caller]
    fn busy(&self, at: usize) {
        let reply = &self.replies[at];
        assert!(
            matches!(reply, RequestReply::Done(Outcome::Busy { .. })),
            "{at}: {reply:?}"
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
fn operations_without_contention() {
    let server = RedisServer::start();
    let mut caller = Caller::on(&server);
    for count in 1..=3 {
        let before = micros(&server);
        let told = caller.call(&attempts()[..count]);
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
        assert!(told.replies.iter().all(|reply| *reply == HELD));
        assert_eq!(server.keys("*"), [FENCE]);
    }
}

#[test]
fn releases_and_wins_share_a_call() {
    let server = RedisServer::start();
    let mut caller = Caller::on(&server);
    let first = caller.call(&attempts()[..2]).won(1);
    let told = caller.call(&[("x", release(1)), ("z", enter(3)), ("y", release(2))]);
    assert_eq!(
        [&told.replies[0], &told.replies[2]],
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
    inside(&[("exists", 1), ("set", 4), ("time", 1)]);
    caller.call(&releases());
    inside(&[("del", 1), ("exists", 1), ("mget", 1)]);
}

#[test]
fn f1_epochs_grow_past_a_fence_from_the_future() {
    let server = RedisServer::start();
    let mut caller = Caller::on(&server);
    let ahead = micros(&server) + 3_600_000_000;
    for count in [1, 3] {
        server.set(FENCE, &ahead.to_string());
        for round in 0..2 {
            let told = caller.call(&attempts()[..count]);
            let before = ahead + (round * count) as u64;
            for at in 0..count {
                assert_eq!(told.won(at), before + 1 + at as u64, "f1, f3");
            }
            assert_eq!(fence(&server), before + count as u64);
            caller.call(&releases()[..count]);
        }
    }
}

#[test]
fn s1_a_key_that_is_no_fence_stays_as_it_is_and_blocks_no_release() {
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
                assert_eq!(told.replies[count], HELD);
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
fn o5_stale_attempts_are_skipped_and_releases_are_done() {
    let server = RedisServer::start();
    let mut caller = Caller::on(&server);
    server.set("lock:held", "a1:9");
    let told = caller.call_until(
        1_000,
        &[("x", attempt(1)), ("held", release(9)), ("y", enter(2))],
    );
    assert_eq!(
        told.replies,
        [RequestReply::Stale, HELD, RequestReply::Stale]
    );
    assert_eq!(server.keys("*"), [""; 0]);
    let told = caller.call_until(1_000, &[("x", attempt(1))]);
    assert_eq!(told.replies, [RequestReply::Stale]);
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
    assert_eq!(told.replies, [HELD, HELD, HELD], "they need none");
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
    assert_eq!([&told.replies[0], &told.replies[2]], [&HELD, &HELD]);
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
            assert!(told.replies.iter().all(|reply| *reply == HELD));
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
    assert_eq!(told.replies[1..], [HELD, HELD]);
    let told = caller.call(&[("z", release(3))]);
    assert_eq!(told.replies, [HELD]);
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
