//! The scripts and their model in memory, which the simulator trusts, side by side through long runs
//! of ops: the same answers, the same locks and queues, the same pushes.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::{select, subsequence};
use proptest::test_runner::{Config, TestRunner};
use redis::{Connection, ConnectionLike};

use super::registry::{TTL, attempt, enter, release, renew, withdraw, yield_turn};
use super::support::{Program, RedisServer};
use crate::store::contract::{Holder, Mode, Op, Outcome, Owner, SubmittedOp};
use crate::store::memory::{Applied, Asking, Keyspace};
use crate::store::redis::call;
use crate::store::redis::keys::Names;
use crate::store::redis::reply::{self, RequestReply};
use crate::store::redis::request::{Request, RequestKind};
use crate::store::redis::script;

const KEYS: [&str; 3] = ["k", "l", "m"];
/// The last has nobody who hears it.
const INSTANCES: [&str; 3] = ["a1", "b2", "dead"];
const PREFIX: &str = "p";
/// What the owners of an instance ask for: it may have one of each for a key.
const LANES: [Mode; 7] = [
    Mode::Exclusive,
    Mode::Shared,
    Mode::Shared,
    permits(3, 1),
    permits(3, 2),
    permits(2, 1),
    permits(5, 4),
];
/// The clock of the model stands still, but for this.
const STEP: u64 = 10;

const fn permits(limit: u32, weight: u8) -> Mode {
    Mode::Permits { limit, weight }
}

/// Each lane's own, so different that the time of a test is nothing beside it: the time that a busy answer names tells
/// whose lease it waits for (M5).
fn ttl_of(lane: usize) -> Duration {
    TTL + 20 * TTL * lane as u32
}

/// What an instance may want of a key. Its owner is the one that it stands or listens with.
#[derive(Clone, Copy, Debug)]
enum Want {
    Attempt,
    Enter,
    Listen,
    Release,
    Keep,
    Withdraw,
    Yield,
    Renew,
    Adopt,
    Raise,
    /// Whatever was wanted is given up: another owner from here on (O1).
    Retire,
}

#[derive(Clone, Debug)]
enum Step {
    /// One call about some keys, each for one lane.
    Call(usize, Vec<(usize, usize, Want)>),
    /// The lock ran out.
    RunOut(usize),
    /// The fence is gone.
    NoFence,
    /// The fence holds a text.
    BadFence,
    /// The fence is ahead of the clock by so many micros.
    Ahead(u64),
}

fn step() -> impl Strategy<Value = Step> {
    use Want::*;
    let wants = select(vec![
        Attempt, Attempt, Enter, Enter, Enter, Listen, Listen, Listen, Release, Release, Release,
        Keep, Withdraw, Yield, Yield, Renew, Renew, Adopt, Raise, Raise, Retire,
    ]);
    let keys = subsequence((0..KEYS.len()).collect::<Vec<_>>(), 1..=KEYS.len()).prop_shuffle();
    // Half of the ops are exclusive ones.
    let lane = prop_oneof![1 => Just(0), 1 => 0..LANES.len()];
    let call = (0..INSTANCES.len(), keys, vec((lane, wants), KEYS.len()));
    let call = call.prop_map(|(who, keys, wants)| {
        let ops = keys.into_iter().zip(wants);
        let ops = ops.map(|(key, (lane, want))| (key, lane, want));
        Step::Call(who, ops.collect())
    });
    prop_oneof![
        20 => call,
        2 => (0..KEYS.len()).prop_map(Step::RunOut),
        1 => Just(Step::NoFence),
        1 => Just(Step::BadFence),
        1 => (0..3_000_000_u64).prop_map(Step::Ahead),
    ]
}

/// Both sides, and who they are asked by.
struct Both {
    script: String,
    connection: Connection,
    hearing: redis::PubSub<'static>,
    model: Keyspace,
    now: u64,
    number: u64,
    /// By instance, key and lane.
    owners: BTreeMap<(usize, usize, usize), u64>,
    /// Those that may stand or listen, and whether they listen: none ever does both.
    listens: BTreeMap<u64, bool>,
    last_owner: u64,
    /// Draws grow from here on.
    last_epoch: u64,
    /// The fence may not be lost as well (F1).
    is_ahead: bool,
    counts: BTreeMap<&'static str, u32>,
}

fn word(outcome: &Outcome) -> &'static str {
    match outcome {
        Outcome::Won { .. } => "won",
        Outcome::Busy { score: None, .. } => "busy",
        Outcome::Busy { .. } => "busy, and stands or listens",
        Outcome::NotOld => "not old",
        Outcome::Gone { held: true } => "gone",
        Outcome::Gone { held: false } => "gone before",
        Outcome::Renewed => "renewed",
        Outcome::Raised { .. } => "raised",
        Outcome::Lost => "lost",
    }
}

impl Both {
    fn ask<T: redis::FromRedisValue>(&mut self, words: &[&str]) -> T {
        let mut command = redis::cmd(words[0]);
        command
            .arg(&words[1..])
            .query(&mut self.connection)
            .unwrap()
    }

    fn begin_anew(&mut self) {
        self.ask::<()>(&["FLUSHALL"]);
        self.model = Keyspace::default();
        self.owners.clear();
        self.last_epoch = 0;
        self.is_ahead = false;
    }

    fn op(&mut self, who: usize, key: usize, lane: usize, want: Want) -> Option<Op> {
        let fresh = self.last_owner + 1;
        let owner = *self.owners.entry((who, key, lane)).or_insert(fresh);
        self.last_owner = self.last_owner.max(owner);
        if lane > 0 {
            return self.shared_op(who, key, lane, want, owner);
        }
        // One that stands asks by entering, and none that stands or listens adopts.
        let want = match (want, self.listens.get(&owner)) {
            (Want::Attempt, Some(false)) => Want::Enter,
            (Want::Adopt, Some(_)) => Want::Release,
            _ => want,
        };
        let listens = matches!(want, Want::Listen);
        if listens || matches!(want, Want::Enter | Want::Yield) {
            let of = if matches!(want, Want::Yield) {
                self.last_owner + 1
            } else {
                owner
            };
            if *self.listens.entry(of).or_insert(listens) != listens {
                self.owners.remove(&(who, key, lane));
                return Some(self.leave(owner));
            }
        }
        Some(match want {
            Want::Attempt => attempt(owner),
            Want::Enter => enter(owner),
            Want::Listen => Op::Listen {
                owner: Owner::exclusive(owner),
                ttl: TTL,
            },
            Want::Release => release(owner),
            Want::Keep => Op::Keep {
                owner: Owner::exclusive(owner),
                left: TTL,
            },
            Want::Withdraw => self.leave(owner),
            Want::Renew => renew(owner, TTL),
            Want::Yield => {
                self.last_owner += 1;
                self.owners.insert((who, key, lane), self.last_owner);
                yield_turn(owner, self.last_owner)
            }
            Want::Adopt => {
                let lock = format!("{PREFIX}:{}", KEYS[key]);
                let from: Option<String> = match &*self.ask::<String>(&["TYPE", &lock]) {
                    "zset" => None,
                    _ => self.ask(&["GET", &lock]),
                };
                Op::Adopt {
                    owner: Owner::exclusive(owner),
                    from: from.unwrap_or_else(|| "x:1".into()).into(),
                    ttl: TTL,
                }
            }
            Want::Raise => Op::Raise {
                owner: Owner::exclusive(owner),
                epoch: self.last_epoch + 17,
                age: false,
            },
            Want::Retire => {
                self.owners.remove(&(who, key, lane));
                return None;
            }
        })
    }

    fn shared_op(
        &mut self,
        who: usize,
        key: usize,
        lane: usize,
        want: Want,
        sequence: u64,
    ) -> Option<Op> {
        let mode = LANES[lane];
        let owner = Owner { sequence, mode };
        let (ttl, score) = (ttl_of(lane), None);
        Some(match want {
            // One that stands asks by entering.
            Want::Attempt if !self.listens.contains_key(&sequence) => Op::Attempt { owner, ttl },
            Want::Attempt | Want::Enter | Want::Listen | Want::Yield => {
                self.listens.insert(sequence, false);
                Op::Enter { owner, ttl, score }
            }
            Want::Release | Want::Adopt => Op::Release { owner },
            Want::Keep => Op::Keep { owner, left: ttl },
            Want::Withdraw => Op::Withdraw { owner, ttl },
            Want::Renew => Op::Renew {
                owner,
                ttl,
                within: ttl,
            },
            Want::Raise => Op::Serve { owner },
            Want::Retire => {
                self.owners.remove(&(who, key, lane));
                return None;
            }
        })
    }

    /// Takes back a ticket, or a kind to be told.
    fn leave(&self, owner: u64) -> Op {
        if self.listens.get(&owner) == Some(&true) {
            let owner = Owner::exclusive(owner);
            return Op::Unlisten { owner };
        }
        withdraw(owner)
    }

    /// What was published by now: instance, key, and the owner that it was granted to.
    fn heard(&mut self) -> Vec<(String, String, Option<u64>)> {
        self.ask::<()>(&["PUBLISH", "end", "end"]);
        let mut heard = Vec::new();
        loop {
            let message = self.hearing.get_message().unwrap();
            let text: String = message.get_payload().unwrap();
            if text == "end" {
                return heard;
            }
            let (_, instance) = message.get_channel_name().rsplit_once(':').unwrap();
            let words: Vec<&str> = text.split(' ').collect();
            match words[..] {
                ["freed", key] => heard.push((instance.into(), key.into(), None)),
                ["1", owner, _, epoch, _, key] => {
                    let owner = owner.strip_prefix(&format!("{instance}:")).unwrap();
                    let epoch: u64 = epoch.parse().unwrap();
                    assert!(epoch > 0);
                    self.granted(epoch);
                    heard.push((instance.into(), key.into(), Some(owner.parse().unwrap())));
                }
                ["2", owner, _, mode, epoch, _, key] => {
                    let modes = ["r", "1/3", "2/3", "1/2", "4/5"];
                    assert!(modes.contains(&mode), "{text}");
                    let owner = owner.strip_prefix(&format!("{instance}:")).unwrap();
                    self.granted(epoch.parse().unwrap());
                    heard.push((instance.into(), key.into(), Some(owner.parse().unwrap())));
                }
                _ => panic!("{text}"),
            }
        }
    }

    fn granted(&mut self, epoch: u64) {
        self.last_epoch = self.last_epoch.max(epoch);
    }

    fn take(&mut self, step: &Step) {
        self.now += STEP;
        let fence = format!("{PREFIX}:~fence");
        match step {
            Step::Call(who, wants) => self.call(*who, wants),
            Step::RunOut(key) => {
                let key = KEYS[*key];
                self.ask::<()>(&["DEL", &format!("{PREFIX}:{key}")]);
                self.model.expire(key);
            }
            Step::NoFence if !self.is_ahead => self.ask(&["DEL", &fence]),
            Step::BadFence if !self.is_ahead => {
                self.ask::<()>(&["SET", &fence, "no number"]);
                self.last_owner += 1;
                let replies = self.send(
                    0,
                    &[Request::new(RequestKind::Op(SubmittedOp::unattended(
                        "other",
                        attempt(self.last_owner),
                    )))],
                );
                assert!(
                    matches!(replies[0], RequestReply::Refused(_)),
                    "{replies:?}"
                );
                assert_eq!(self.ask::<String>(&["GET", &fence]), "no number");
                assert!(!self.ask::<bool>(&["EXISTS", "p:other"]));
                self.ask::<()>(&["DEL", &fence]);
            }
            Step::Ahead(micros) => {
                let ahead = self.last_epoch.max(self.server_time()) + micros;
                self.ask::<()>(&["SET", &fence, &ahead.to_string()]);
                self.last_epoch = ahead;
                self.is_ahead = true;
            }
            Step::NoFence | Step::BadFence => {}
        }
        self.compare();
    }

    fn server_time(&mut self) -> u64 {
        let (seconds, micros): (u64, u64) = self.ask(&["TIME"]);
        seconds * 1_000_000 + micros
    }

    fn send(&mut self, who: usize, jobs: &[Request]) -> Vec<RequestReply> {
        let names = Names::new(PREFIX.into(), INSTANCES[who].into());
        self.number += 1;
        let until = u64::MAX >> 12;
        let command = call::command(&script::SERVER, &names, self.number, until, jobs);
        let mut full = redis::cmd("EVAL");
        full.arg(&self.script);
        for word in command.args_iter().skip(2) {
            if let redis::Arg::Simple(bytes) = word {
                full.arg(bytes);
            }
        }
        let reply = self
            .connection
            .req_packed_command(&full.get_packed_command());
        let reply = reply::read_reply(self.number, jobs, reply.unwrap());
        reply.expect("the reply to this call").replies
    }

    fn call(&mut self, who: usize, wants: &[(usize, usize, Want)]) {
        let mut batch = Vec::new();
        let mut renewals = Vec::new();
        for (key, lane, want) in wants {
            let Some(op) = self.op(who, *key, *lane, *want) else {
                continue;
            };
            match op {
                Op::Renew { .. } => renewals.push((*key, op)),
                _ => batch.push((*key, op)),
            }
        }
        for ops in [batch, renewals] {
            if !ops.is_empty() {
                self.call_of(who, &ops);
            }
        }
    }

    fn call_of(&mut self, who: usize, ops: &[(usize, Op)]) {
        let jobs: Vec<_> = ops
            .iter()
            .map(|(key, op)| {
                Request::new(RequestKind::Op(SubmittedOp::unattended(
                    KEYS[*key],
                    op.clone(),
                )))
            })
            .collect();
        let before = self.last_epoch;
        let replies = self.send(who, &jobs);
        let told = self.heard();
        let live = |instance: &Arc<str>| &**instance != "dead";
        let mut expected = Vec::new();
        let mut epochs = Vec::new();
        for ((key, op), reply) in ops.iter().zip(replies) {
            let RequestReply::Done(outcome) = reply else {
                panic!("{op:?}: {reply:?}");
            };
            if let Outcome::Won { epoch } = outcome {
                epochs.push(epoch);
            }
            let (prefix, instance, name) =
                (PREFIX.into(), INSTANCES[who].into(), KEYS[*key].into());
            let asking = Asking {
                prefix: &prefix,
                instance: &instance,
                key: &name,
                now: self.now,
            };
            let Applied {
                answer, deliveries, ..
            } = self.model.apply(asking, op, &live);
            assert_eq!(
                word(&outcome),
                word(&answer.outcome),
                "{op:?} of {instance}"
            );
            *self.counts.entry(word(&outcome)).or_default() += 1;
            if let (Outcome::Busy { left, .. }, Outcome::Busy { left: expected, .. }) =
                (&outcome, &answer.outcome)
            {
                let (left, expected) = (left.unwrap(), expected.unwrap());
                let apart = left.abs_diff(expected);
                assert!(apart < 10 * TTL, "{op:?}: {left:?}, not {expected:?}");
            }
            for delivery in deliveries {
                let owner = delivery.grant.as_ref().map(|grant| grant.owner.sequence);
                let what = if owner.is_some() { "granted" } else { "freed" };
                *self.counts.entry(what).or_default() += 1;
                expected.push((delivery.instance.to_string(), KEYS[*key].to_owned(), owner));
            }
        }
        assert_eq!(told, expected, "pushed after {ops:?}");
        epochs.sort_unstable();
        assert!(
            epochs.first().is_none_or(|first| *first > before),
            "f1: {epochs:?} {before}"
        );
        assert!(
            epochs.is_sorted_by(|one, other| one < other),
            "f1: {epochs:?}"
        );
        let last = epochs.last().copied().unwrap_or(0);
        self.granted(last);
    }

    /// The locks and the queues are the same.
    fn compare(&mut self) {
        for key in KEYS {
            let lock = format!("{PREFIX}:{key}");
            let queue = format!("{{{lock}}}:~queue2");
            let (prefix, instance, name) = (PREFIX.into(), "".into(), key.into());
            let asking = Asking {
                prefix: &prefix,
                instance: &instance,
                key: &name,
                now: self.now,
            };
            let kind: String = self.ask(&["TYPE", &lock]);
            let mut held: Vec<String> = match &*kind {
                "none" => Vec::new(),
                "string" => vec![self.ask(&["GET", &lock])],
                _ => self.ask(&["ZRANGE", &lock, "0", "-1"]),
            };
            held.sort();
            let expected = self.model.inspect(&prefix, &name, self.now).holders;
            assert_eq!(held, members(&expected), "{key}");
            let listen = format!("{{{lock}}}:~listen1");
            let tickets: Vec<String> = self.ask(&["ZRANGE", &queue, "0", "-1"]);
            let listeners: Vec<String> = self.ask(&["ZRANGE", &listen, "0", "-1"]);
            let texts = |all: Vec<(Arc<str>, Owner)>| -> Vec<String> {
                let all = all.iter();
                all.map(|(instance, owner)| format!("{instance}:{}", owner.sequence))
                    .collect()
            };
            let owners = |all: &[String]| -> Vec<String> {
                let owner = |member: &String| member.split(' ').next().unwrap().to_owned();
                all.iter().map(owner).collect()
            };
            assert_eq!(
                owners(&tickets),
                texts(self.model.tickets(asking)),
                "queue of {key}"
            );
            let expected = texts(self.model.listeners(asking));
            assert_eq!(listeners, expected, "listeners of {key}");
            for (name, members) in [(&queue, &tickets), (&listen, &listeners)] {
                let ttl: i64 = self.ask(&["PTTL", name]);
                assert!(members.is_empty() || ttl > 50_000, "k3: {ttl}");
            }
            let ttl: i64 = self.ask(&["PTTL", &lock]);
            assert!(held.is_empty() || ttl > 29_000, "{ttl}");
        }
    }
}

/// How a server has these holders.
fn members(holders: &[Holder]) -> Vec<String> {
    let members = holders.iter().flat_map(|holder| match holder.mode {
        Mode::Permits { limit, weight } => {
            let all = (1..=weight).map(|i| format!("{} {i}/{limit}", holder.name));
            all.collect()
        }
        _ => vec![holder.name.clone()],
    });
    let mut members: Vec<_> = members.collect();
    members.sort();
    members
}

#[test]
fn the_scripts_agree_with_the_model() {
    let original = script::TEXT;
    // What is kept for a listener must not run out while it is looked at.
    let script = original.replace("'NX', 'PX', 100)", "'NX', 'PX', 30000)");
    assert_ne!(original, script);
    for program in [
        Program::Usual,
        Program::Valkey,
        Program::Redis8,
        Program::Redis6,
    ] {
        let server = RedisServer::builder().program(program).start();
        let client = redis::Client::open(server.url()).unwrap();
        let hearing = Box::leak(Box::new(client.get_connection().unwrap()));
        hearing
            .set_read_timeout(Some(Duration::from_secs(10)))
            .unwrap();
        let mut hearing = hearing.as_pubsub();
        for channel in ["p:~grant:a1", "p:~grant:b2", "end"] {
            hearing.subscribe(channel).unwrap();
        }
        let both = std::cell::RefCell::new(Both {
            script: script.clone(),
            connection: client.get_connection().unwrap(),
            hearing,
            model: Keyspace::default(),
            now: 1_000_000_000,
            number: 0,
            owners: BTreeMap::new(),
            listens: BTreeMap::new(),
            last_owner: 0,
            last_epoch: 0,
            is_ahead: false,
            counts: BTreeMap::new(),
        });
        let cases = std::env::var("LOCKSTREAM_CASES").ok();
        let cases = cases.map_or(60, |cases| cases.parse().expect("a number"));
        let config = Config {
            cases,
            failure_persistence: None,
            ..Config::default()
        };
        // Some outcomes are rare: there are more cases until each was seen a few times.
        let rare = || {
            let counts = &both.borrow().counts;
            let outcomes = [
                "won", "busy", "not old", "gone", "granted", "freed", "raised", "renewed",
            ];
            let rare = outcomes.into_iter().find(|it| counts.get(it) <= Some(&3));
            rare.map(|it| format!("{it}: {counts:?}"))
        };
        let mut rounds = 0;
        while let Some(rare) = rare() {
            assert!(rounds < 10, "{rare}");
            rounds += 1;
            let ran = TestRunner::new(config.clone()).run(&vec(step(), 1..60), |steps| {
                let both = &mut *both.borrow_mut();
                both.begin_anew();
                for step in &steps {
                    both.take(step);
                }
                Ok(())
            });
            if let Err(broken) = ran {
                panic!("{program:?}: {broken}");
            }
        }
    }
}
