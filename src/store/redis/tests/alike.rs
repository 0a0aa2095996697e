//! What a call does at once, and the same in full, op by op: no caller could tell which it was.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::time::Duration;

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::{select, subsequence};
use proptest::test_runner::{Config, TestRunner};
use redis::{Connection, ConnectionLike, Value};

use super::registry::{attempt, enter, enter_at, release, withdraw, yield_turn};
use super::support::{Program, RedisServer};
use crate::store::contract::{Op, Outcome, Owner};
use crate::store::redis::call::{Job, letter};
use crate::store::redis::keys::Names;
use crate::store::redis::reply::{self, Verdict};
use crate::store::redis::script;
use crate::store::traffic::Lane;

const KEYS: [&str; 4] = ["k", "l", "m", "n"];
/// One for each way.
const PREFIXES: [&str; 2] = ["pa", "pb"];
const NUMBER: u64 = 7;
const MILLION: u64 = 1_000_000;
/// And before every time, as a text.
const AS_LONG_AS_A_TIME: &str = "0123456789abcdef";
/// The same, but as numbers they are greater than any time, and than this.
const FAR: [&str; 2] = ["0000000008.99e15", "0x1ff00000000000"];
const LESS_FAR: u64 = 8_900_000_000_000_000;

/// How a key is found.
#[derive(Clone, Copy, Debug)]
struct Found {
    lock: Option<&'static [&'static str]>,
    queue: &'static [&'static str],
}

/// The fence as it is found: a text, or micros to the server's time.
#[derive(Clone, Copy, Debug)]
enum Fence {
    Missing,
    From(i64),
    Expiring,
    Text(&'static str),
    List,
}

#[derive(Clone, Debug)]
struct Scene {
    fence: Fence,
    found: Vec<Found>,
    /// The queues last for longer than they need.
    lasts: bool,
    /// Each about another key.
    ops: Vec<(usize, Op)>,
    is_stale: bool,
}

fn found() -> impl Strategy<Value = Found> {
    let locks: Vec<Option<&'static [&'static str]>> = vec![
        None,
        None,
        Some(&["SET", "a1:1", "PX", "30000"]),
        Some(&["SET", "a1:1", "PX", "30000"]),
        Some(&["SET", "c3:1", "PX", "20000"]),
        Some(&["SET", "plain"]),
        Some(&["RPUSH", "x"]),
    ];
    let queues: Vec<&'static [&'static str]> = vec![
        &[],
        &[],
        &[],
        &["ZADD", "1", "b2:3 10000"],
        &["ZADD", "1", "dead:3 10000"],
        &["ZADD", "1", "dead:3 10000", "2", "b2:4 10000"],
        &["ZADD", "1", "a1:1 30000"],
        &["ZADD", "1", "b2:3 0", "2", "b2:4 10000"],
        &["ZADD", "1", "b2:3 10000", "2", "b2:4 0"],
        &["ZADD", "1", "b2:3 10000", "2", "a1:2 30000"],
        &["ZADD", "1", "b2:3 10000", "4000000000000000", "c3:4 10000"],
        &["ZADD", "1", "b2:3 1e4"],
        &["ZADD", "1", "b2 3 10000"],
        &["ZADD", "1", "x:b2:3 10000"],
        &["SET", "x"],
    ];
    (select(locks), select(queues)).prop_map(|(lock, queue)| Found { lock, queue })
}

fn scene() -> impl Strategy<Value = Scene> {
    let fence = prop_oneof![
        6 => Just(Fence::Missing),
        6 => Just(Fence::From(-1_000_000)),
        1 => (0..4000_i64).prop_map(Fence::From),
        1 => Just(Fence::From(1_000_000_000_007)),
        1 => Just(Fence::Expiring),
        2 => select(vec!["hello", "", AS_LONG_AS_A_TIME, "1e3", "0x11", " 12 "]).prop_map(Fence::Text),
        1 => select(FAR.to_vec()).prop_map(Fence::Text),
        1 => Just(Fence::List),
    ];
    let ops = select(vec![
        attempt(1),
        attempt(1),
        enter(1),
        enter(1),
        enter_at(1, 5),
        release(1),
        release(1),
        release(1),
        withdraw(1),
        yield_turn(1, 2),
        yield_turn(1, 2),
        Op::Adopt {
            owner: Owner(1),
            from: "c3:1".into(),
            ttl: Duration::from_secs(30),
        },
        Op::Raise {
            owner: Owner(1),
            draw: 1_700_000_000_000_000,
            age: true,
        },
    ]);
    let keys = subsequence((0..KEYS.len()).collect::<Vec<_>>(), 1..=KEYS.len()).prop_shuffle();
    let stale = prop::bool::weighted(0.1);
    let others = (vec(found(), KEYS.len()), vec(ops, KEYS.len()), stale);
    // Half of them as most calls find things: nothing stands in the way, or somebody who is there.
    let free = Found {
        lock: None,
        queue: &[],
    };
    let held = Found {
        lock: Some(&["SET", "a1:1", "PX", "30000"]),
        ..free
    };
    let waited_for = Found {
        queue: &["ZADD", "1", "b2:3 10000", "2", "b2:4 10000"],
        ..held
    };
    let waited_for_by_one = Found {
        queue: &["ZADD", "1", "b2:3 10000"],
        ..held
    };
    let foreign = Found {
        lock: Some(&["SET", "c3:1", "PX", "20000"]),
        ..free
    };
    let for_ever = Found {
        lock: Some(&["SET", "plain"]),
        ..waited_for
    };
    let quiet = [(free, attempt(1)), (free, enter(1)), (held, release(1))];
    let plain = select(vec![
        (free, attempt(1)),
        (free, enter(1)),
        (held, release(1)),
        (waited_for, release(1)),
        (waited_for_by_one, release(1)),
        (held, yield_turn(1, 2)),
        (held, yield_turn(1, 2)),
        (held, yield_turn(1, 2)),
        (waited_for, yield_turn(1, 2)),
        (waited_for, release(1)),
        (waited_for_by_one, yield_turn(1, 2)),
        (waited_for_by_one, yield_turn(1, 2)),
        (foreign, enter(1)),
        (foreign, enter(1)),
        (for_ever, enter(1)),
    ]);
    let quiet = vec(select(quiet.to_vec()), KEYS.len());
    let plain = prop_oneof![quiet, vec(plain, KEYS.len())].prop_map(|plain| {
        let (found, ops) = plain.into_iter().unzip();
        (found, ops, false)
    });
    let one = (0..KEYS.len()).prop_map(|key| vec![key]);
    let keys = prop_oneof![one, keys];
    let all = (fence, keys, prop_oneof![plain, others], any::<bool>());
    all.prop_map(|(fence, keys, (found, ops, is_stale), lasts)| {
        let ops: Vec<Op> = ops;
        Scene {
            fence,
            found,
            lasts,
            ops: keys
                .into_iter()
                .map(|key| (key, ops[key].clone()))
                .collect(),
            is_stale,
        }
    })
}

fn ask<T: redis::FromRedisValue>(connection: &mut Connection, words: &[&str]) -> T {
    let mut command = redis::cmd(words[0]);
    command.arg(&words[1..]).query(connection).unwrap()
}

fn micros(connection: &mut Connection) -> u64 {
    let (seconds, micros): (u64, u64) = ask(connection, &["TIME"]);
    seconds * MILLION + micros
}

/// `words[0] key words[1..]`.
fn put(connection: &mut Connection, key: &str, words: &[&str]) {
    let mut command = redis::cmd(words[0]);
    command.arg(key).arg(&words[1..]);
    command.exec(connection).unwrap();
}

impl Scene {
    fn set(&self, connection: &mut Connection, prefix: &str, now: u64) {
        let fence = format!("{prefix}:~fence");
        match self.fence {
            Fence::Missing => {}
            Fence::From(micros) => {
                let at = now.strict_add_signed(micros).to_string();
                put(connection, &fence, &["SET", &at]);
            }
            Fence::Expiring => {
                let at = (now - 5).to_string();
                put(connection, &fence, &["SET", &at, "PX", "500000"]);
            }
            Fence::Text(text) => put(connection, &fence, &["SET", text, "PX", "500000"]),
            Fence::List => put(connection, &fence, &["RPUSH", "x"]),
        }
        for (key, found) in KEYS.iter().zip(&self.found) {
            if let Some(words) = found.lock {
                put(connection, &format!("{prefix}:{key}"), words);
            }
            if !found.queue.is_empty() {
                let queue = format!("{{{prefix}:{key}}}:~queue1");
                put(connection, &queue, found.queue);
                if self.lasts {
                    put(connection, &queue, &["PEXPIRE", "300000"]);
                }
            }
        }
    }

    /// Makes the call. Tells whether it was answered in a word, and what it answered of each op and
    /// left, both without what has to be another each time.
    fn play(
        &self,
        connection: &mut Connection,
        at: usize,
        script: &str,
        now: u64,
    ) -> (bool, String) {
        let prefix = PREFIXES[at];
        let names = Names::new(prefix.into(), "a1".into());
        let jobs: Vec<_> = self
            .ops
            .iter()
            .map(|(key, op)| Job::new(KEYS[*key], op.clone()))
            .collect();
        let of_use = if self.is_stale {
            now - 10
        } else {
            now + 1000 * MILLION
        };
        let command = Lane::Batch.command(&names, NUMBER, of_use, &jobs);
        let mut full = redis::cmd("EVAL");
        full.arg(script);
        for word in command.args_iter().skip(2) {
            if let redis::Arg::Simple(bytes) = word {
                full.arg(bytes);
            }
        }
        let reply = connection
            .req_packed_command(&full.get_packed_command())
            .unwrap();
        let in_a_word = matches!(reply, Value::BulkString(_));
        let reply = reply::read_reply(NUMBER, &jobs, reply).expect("the reply to this call");

        let fence = format!("{prefix}:~fence");
        let kind: String = ask(connection, &["TYPE", &fence]);
        let holds: Option<u64> = (kind == "string")
            .then(|| ask::<String>(connection, &["GET", &fence]).parse().ok())
            .flatten();
        let before = match self.fence {
            Fence::From(micros) => now.strict_add_signed(micros),
            Fence::Expiring => now - 5,
            Fence::Text(text) if FAR.contains(&text) => LESS_FAR,
            _ => 0,
        };
        let mut told = Vec::new();
        let mut places = Vec::new();
        let mut last = before.max(now - 1);
        for verdict in &reply.verdicts {
            told.push(match verdict {
                Verdict::Done(Outcome::Won { draw }) => {
                    // Those of a call need not come in the order of its ops.
                    assert!(*draw > before && *draw >= now, "f1: {draw} after {before}");
                    last = last.max(*draw);
                    "won".to_owned()
                }
                Verdict::Done(Outcome::Busy { left, score }) => {
                    places.extend(*score);
                    format!("busy {:?} {}", left.map(rounded), score.is_some())
                }
                Verdict::Done(Outcome::Raised { age }) => format!("raised {}", age.is_some()),
                other => format!("{other:?}").replace(prefix, "P"),
            });
        }
        let draws: std::collections::BTreeSet<_> = reply
            .verdicts
            .iter()
            .filter_map(|verdict| match verdict {
                Verdict::Done(Outcome::Won { draw }) => Some(*draw),
                _ => None,
            })
            .collect();
        let wins = told.iter().filter(|told| *told == "won").count();
        assert_eq!(draws.len(), wins, "f1: each draw is another: {draws:?}");
        if wins > 0 {
            assert!(holds >= Some(last), "f1: the fence stands past each");
        }
        let mut left = format!("{told:?}");
        // What is no fence stays as it is. One that is may go on for an op that then wins nothing.
        match self.fence {
            Fence::List => left += &kind,
            Fence::Text("hello" | "" | AS_LONG_AS_A_TIME) => left += &seen(connection, &fence),
            _ => {}
        }
        let mut stand = Vec::new();
        for key in KEYS {
            let lock = format!("{prefix}:{key}");
            let queue = format!("{{{lock}}}:~queue1");
            left += &format!("\n{key}: {}", seen(connection, &lock));
            let queued = seen(connection, &queue);
            let (what, lasts) = queued.rsplit_once(' ').unwrap();
            // One that was taken away and made anew has another expiry than one that was not.
            let lasts = if self.lasts && lasts != "0" {
                "long"
            } else {
                lasts
            };
            left += &format!(", queue {what} {lasts}");
            let kind: String = ask(connection, &["TYPE", &queue]);
            if kind == "zset" {
                let all: Vec<(String, f64)> =
                    ask(connection, &["ZRANGE", &queue, "0", "-1", "WITHSCORES"]);
                let ours = all.iter().filter(|(member, _)| member.starts_with("a1:"));
                stand.extend(ours.map(|(_, score)| *score as u64));
            }
        }
        for place in places {
            assert!(stand.contains(&place), "k2: {place} in {stand:?}");
        }
        (in_a_word, left)
    }
}

fn rounded(left: Duration) -> u64 {
    (left.as_millis() as u64).div_ceil(5000)
}

fn seen(connection: &mut Connection, key: &str) -> String {
    let kind: String = ask(connection, &["TYPE", key]);
    let ttl: i64 = ask(connection, &["PTTL", key]);
    let ttl = (ttl + 4999).div_euclid(5000);
    let holds: Vec<String> = match &*kind {
        "string" => vec![ask(connection, &["GET", key])],
        "zset" => ask(connection, &["ZRANGE", key, "0", "-1"]),
        _ => Vec::new(),
    };
    format!("{kind} {holds:?} {ttl}")
}

/// What was published to who is there, each way, without what has to be another each time.
fn heard(connection: &mut Connection, live: &mut redis::PubSub<'_>) -> [Vec<String>; 2] {
    let last = format!("{}:~grant:b2", PREFIXES[1]);
    ask::<()>(connection, &["PUBLISH", &last, "end"]);
    let mut heard = [Vec::new(), Vec::new()];
    loop {
        let message = live.get_message().unwrap();
        let text: String = message.get_payload().unwrap();
        if text == "end" {
            return heard;
        }
        let way = usize::from(message.get_channel_name() == last);
        heard[way].push(match text.split(' ').collect::<Vec<_>>()[..] {
            [format, owner, ttl, draw, at, key] => {
                let [draw, at]: [u64; 2] = [draw, at].map(|number| number.parse().unwrap());
                assert!(draw >= at, "f1: {text}");
                format!("{format} {owner} {ttl} {key}")
            }
            _ => text,
        });
    }
}

/// Without `EXISTS` no op of several is found to go plainly, and each is done in full; nor is a lone one without what
/// is there for it.
#[test]
fn what_is_done_at_once_is_what_is_done_in_full() {
    let at_once = script::BATCH_TEXT;
    let lone = "if count == 1 then\n  local lock";
    assert_eq!(at_once.matches(lone).count(), 1);
    let in_full = at_once.replace("'EXISTS'", "'NOTHING'");
    let in_full = in_full.replace(lone, "if false then\n  local lock");
    for program in [
        Program::Usual,
        Program::Valkey,
        Program::Redis8,
        Program::Redis6,
    ] {
        let server = RedisServer::builder().program(program).start();
        let client = redis::Client::open(server.url()).unwrap();
        let mut hearing = client.get_connection().unwrap();
        hearing
            .set_read_timeout(Some(Duration::from_secs(10)))
            .unwrap();
        let mut live = hearing.as_pubsub();
        for prefix in PREFIXES {
            live.subscribe(format!("{prefix}:~grant:b2")).unwrap();
        }
        let connection = RefCell::new(client.get_connection().unwrap());
        let live = RefCell::new(live);
        let plain = RefCell::new(BTreeMap::<_, u32>::new());
        let config = Config {
            cases: 800,
            failure_persistence: None,
            ..Config::default()
        };
        TestRunner::new(config)
            .run(&scene(), |scene| {
                let connection = &mut *connection.borrow_mut();
                ask::<()>(connection, &["FLUSHALL"]);
                let now = micros(connection);
                for prefix in PREFIXES {
                    scene.set(connection, prefix, now);
                }
                let (was_plain, once) = scene.play(connection, 0, at_once, now);
                let (is_plain, full) = scene.play(connection, 1, &in_full, now);
                prop_assert!(!is_plain);
                prop_assert_eq!(once, full, "{:?}", program);
                let live = &mut *live.borrow_mut();
                let [once, full] = heard(connection, live);
                prop_assert_eq!(&once, &full, "{:?}", program);
                if was_plain {
                    let what = match &scene.ops[..] {
                        [(key, op)] => {
                            let found = scene.found[*key];
                            let letter = letter(op).map(char::from);
                            (letter, found.lock.is_some(), !once.is_empty())
                        }
                        _ => (None, false, false),
                    };
                    *plain.borrow_mut().entry(what).or_default() += 1;
                }
                Ok(())
            })
            .unwrap();
        // Of one op: whose, whether the lock was held, and whether somebody was granted it. And of several.
        let plain = plain.into_inner();
        for what in [
            (Some('A'), false, false),
            (Some('E'), false, false),
            (Some('E'), true, false),
            (Some('R'), true, false),
            (Some('R'), true, true),
            (Some('Y'), true, false),
            (Some('Y'), true, true),
            (None, false, false),
        ] {
            let times = plain.get(&what);
            assert!(times > Some(&1), "{program:?}: {what:?} in {plain:?}");
        }
    }
}
