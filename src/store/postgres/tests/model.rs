//! The functions and their model in memory, which the simulator trusts, side by side through long runs of ops: the same
//! answers, the same locks and queues, the same notices.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use postgres::{Client, NoTls};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::{select, subsequence};
use proptest::test_runner::{Config, TestRunner};

use super::support::PgServer;
use crate::store::contract::{KeyStatus, Mode, Op, Outcome, Owner, SubmittedOp};
use crate::store::memory::{Applied, Asking, Keyspace};
use crate::store::postgres::call::{self, Call, Names, Reply, Request, Verdict};
use crate::store::postgres::schema;

const KEYS: [&str; 3] = ["k", "l", "m"];
/// The last has nobody who hears it.
const INSTANCES: [&str; 3] = ["a1", "b2", "dead"];
const LINES: [i64; 3] = [101, 102, 103];
const PREFIX: &str = "p";
const TTL: Duration = Duration::from_secs(30);
/// What the owners of an instance ask for: it may have one of each for a key.
const LANES: [Mode; 5] = [
    Mode::Exclusive,
    Mode::Shared,
    Mode::Shared,
    Mode::Permits {
        limit: 3,
        weight: 1,
    },
    Mode::Permits {
        limit: 3,
        weight: 2,
    },
];
/// The clock of the model stands still, but for this.
const STEP: u64 = 10;

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
    /// Unused rows are deleted.
    Sweep,
}

fn step() -> impl Strategy<Value = Step> {
    use Want::*;
    let wants = select(vec![
        Attempt, Attempt, Enter, Enter, Enter, Listen, Listen, Listen, Release, Release, Release,
        Keep, Withdraw, Yield, Yield, Renew, Renew, Adopt, Raise, Raise, Retire,
    ]);
    let keys = subsequence((0..KEYS.len()).collect::<Vec<_>>(), 1..=KEYS.len());
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
        1 => Just(Step::Sweep),
    ]
}

/// Both sides, and who they are asked by.
struct Both {
    connection: Client,
    model: Keyspace,
    /// When this case began: nothing is older.
    began: Instant,
    now: u64,
    /// By instance, key and lane.
    owners: BTreeMap<(usize, usize, usize), u64>,
    /// Those that may stand or listen, and whether they listen: none ever does both.
    listens: BTreeMap<u64, bool>,
    last_owner: u64,
    /// By key.
    last_epochs: [u64; 3],
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
    fn run(&mut self, sql: &str) {
        self.connection.batch_execute(sql).unwrap();
    }

    fn begin_anew(&mut self) {
        self.run(
            "TRUNCATE lockstream.lock, lockstream.holder, lockstream.guard, lockstream.ticket; \
             UPDATE lockstream.state SET epoch = 0",
        );
        self.model = Keyspace::default();
        self.began = Instant::now();
        self.owners.clear();
        self.last_epochs = [0; 3];
    }

    fn op(&mut self, who: usize, key: usize, lane: usize, want: Want) -> Option<Op> {
        let fresh = self.last_owner + 1;
        let sequence = *self.owners.entry((who, key, lane)).or_insert(fresh);
        self.last_owner = self.last_owner.max(sequence);
        let mode = LANES[lane];
        let owner = Owner { sequence, mode };
        let (ttl, score) = (TTL, None);
        let listens = self.listens.get(&sequence).copied();
        // One that stands asks by entering, and none that stands or listens adopts. Shared ones neither listen nor adopt.
        let want = match (want, listens, mode) {
            (Want::Attempt, Some(false), _) => Want::Enter,
            (Want::Adopt, Some(_), _) => Want::Release,
            (Want::Listen | Want::Yield, _, Mode::Shared | Mode::Permits { .. }) => Want::Enter,
            (Want::Adopt | Want::Raise, _, Mode::Shared | Mode::Permits { .. }) => Want::Release,
            _ => want,
        };
        if matches!(want, Want::Listen | Want::Enter)
            && listens.is_some_and(|it| it != matches!(want, Want::Listen))
        {
            self.owners.remove(&(who, key, lane));
            return Some(self.leave(owner));
        }
        Some(match want {
            Want::Attempt => Op::Attempt { owner, ttl },
            Want::Enter => {
                self.listens.insert(sequence, false);
                Op::Enter { owner, ttl, score }
            }
            Want::Listen => {
                self.listens.insert(sequence, true);
                Op::Listen { owner, ttl }
            }
            Want::Release => Op::Release { owner },
            // For longer than the others take: nobody renews it.
            Want::Keep => Op::Keep {
                owner,
                left: 4 * ttl,
            },
            Want::Withdraw => self.leave(owner),
            Want::Renew => Op::Renew {
                owner,
                ttl,
                within: ttl,
            },
            Want::Yield => {
                self.last_owner += 1;
                let new = Owner::exclusive(self.last_owner);
                self.owners.insert((who, key, lane), self.last_owner);
                self.listens.insert(self.last_owner, false);
                Op::Yield {
                    old: owner,
                    new,
                    ttl,
                }
            }
            Want::Adopt => {
                let sql = "SELECT owner FROM lockstream.lock WHERE key = $1 AND owner <> ''";
                let found = self.connection.query_opt(sql, &[&lock(key)]).unwrap();
                let from = found.map_or_else(|| "x:1".to_owned(), |row| row.get(0));
                Op::Adopt {
                    owner,
                    from: from.into(),
                    ttl,
                }
            }
            Want::Raise => Op::Raise {
                owner,
                epoch: self.last_epochs[key] + 17,
                age: false,
            },
            Want::Retire => {
                self.owners.remove(&(who, key, lane));
                return None;
            }
        })
    }

    /// Takes back a ticket, or a wish to be told.
    fn leave(&self, owner: Owner) -> Op {
        match self.listens.get(&owner.sequence) {
            Some(true) => Op::Unlisten { owner },
            _ => Op::Withdraw { owner, ttl: TTL },
        }
    }

    fn take(&mut self, step: &Step) {
        self.now += STEP;
        match step {
            Step::Call(who, wants) => {
                let ops = wants.iter().filter_map(|(key, lane, want)| {
                    let op = self.op(*who, *key, *lane, *want)?;
                    Some((*key, op))
                });
                let ops: Vec<_> = ops.collect();
                if !ops.is_empty() {
                    self.call(*who, &ops);
                }
            }
            Step::RunOut(key) => {
                let name = lock(*key);
                self.run(&format!(
                    "UPDATE lockstream.lock SET expires_at = 0 WHERE key = '{name}'; \
                     UPDATE lockstream.holder SET expires_at = 0 WHERE key = '{name}'"
                ));
                self.model.expire(KEYS[*key]);
            }
            // It deletes all tickets of the dead, and not one by one.
            Step::Sweep => self.run(
                "SELECT lockstream.sweep_1(3600000000) \
                 WHERE NOT EXISTS (SELECT 1 FROM lockstream.ticket WHERE line = 103)",
            ),
        }
        self.compare();
    }

    fn send(&mut self, who: usize, requests: &[Request]) -> Vec<Reply> {
        let names = names(who);
        let call = Call::new(&names, true, LINES[who], u64::MAX, requests);
        let rows = self
            .connection
            .query(&*names.ops, &call.arguments())
            .unwrap();
        assert_eq!(rows.len(), requests.len());
        let replies = rows.iter().zip(requests);
        replies
            .map(|(row, request)| call::read(row, request).unwrap())
            .collect()
    }

    fn call(&mut self, who: usize, ops: &[(usize, Op)]) {
        let request =
            |(key, op): &(usize, Op)| Request::new(SubmittedOp::unattended(KEYS[*key], op.clone()));
        let requests: Vec<_> = ops.iter().map(request).collect();
        let replies = self.send(who, &requests);
        // Whoever calls is there.
        let live = |instance: &Arc<str>| &**instance != "dead" || who == 2;
        for ((key, op), reply) in ops.iter().zip(replies) {
            let Verdict::Done(outcome) = reply.verdict else {
                panic!("{op:?}: {reply:?}");
            };
            let name = KEYS[*key].into();
            let (prefix, instance) = (PREFIX.into(), INSTANCES[who].into());
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
            if let Outcome::Busy {
                left: Some(left), ..
            } = outcome
            {
                let left = left + self.began.elapsed();
                assert!(left >= TTL, "{op:?}: {left:?}");
            }
            if let Outcome::Raised { .. } = outcome {
                self.last_epochs[*key] += 17;
            }
            let mut epochs = Vec::new();
            let told: Vec<_> = reply
                .notices
                .chunks(2)
                .map(|notice| self.told(notice, &mut epochs))
                .collect();
            if let Outcome::Won { epoch } = outcome {
                epochs.push(epoch);
            }
            epochs.sort_unstable();
            for epoch in epochs {
                assert!(epoch > self.last_epochs[*key], "f1: {epoch}");
                self.last_epochs[*key] = epoch;
            }
            let expected = deliveries.iter().map(|delivery| {
                let owner = delivery.grant.as_ref().map(|grant| grant.owner);
                (delivery.instance.to_string(), KEYS[*key].to_owned(), owner)
            });
            assert_eq!(told, expected.collect::<Vec<_>>(), "told after {op:?}");
        }
    }

    /// Whom a notice tells what.
    fn told(
        &mut self,
        notice: &[String],
        epochs: &mut Vec<u64>,
    ) -> (String, String, Option<Owner>) {
        let line: i64 = notice[0].parse().unwrap();
        let who = LINES.iter().position(|it| *it == line).unwrap();
        let words: Vec<&str> = notice[1].split(' ').collect();
        let own = |name: &str| name.strip_prefix("p:").unwrap().to_owned();
        let (what, told) = match words[..] {
            ["f", key] => ("freed", (INSTANCES[who].into(), own(key), None)),
            ["1", owner, mode, ttl, epoch, _, key] => {
                assert_eq!(ttl, "30000000");
                epochs.push(epoch.parse().unwrap());
                let sequence = owner.strip_prefix(&format!("{}:", INSTANCES[who])).unwrap();
                let owner = Owner {
                    sequence: sequence.parse().unwrap(),
                    mode: call::read_mode(mode).unwrap(),
                };
                ("granted", (INSTANCES[who].into(), own(key), Some(owner)))
            }
            _ => panic!("{notice:?}"),
        };
        *self.counts.entry(what).or_default() += 1;
        told
    }

    /// The locks and the queues are the same.
    fn compare(&mut self) {
        for (index, key) in KEYS.iter().enumerate() {
            let (prefix, instance, name) = (PREFIX.into(), "".into(), (*key).into());
            let asking = Asking {
                prefix: &prefix,
                instance: &instance,
                key: &name,
                now: self.now,
            };
            let rows = self
                .connection
                .query(&*names(0).inspect, &[&lock(index)])
                .unwrap();
            let found = call::read_status(&rows).unwrap();
            let expected = self.model.inspect(&prefix, &name, self.now);
            assert_eq!(holders(&found), holders(&expected), "{key}");
            assert_eq!(
                (&found.queue, found.tickets),
                (&expected.queue, expected.tickets),
                "queue of {key}"
            );
            let sql =
                "SELECT owner FROM lockstream.ticket WHERE key = $1 AND ttl IS NULL ORDER BY score";
            let listeners = self.connection.query(sql, &[&lock(index)]).unwrap();
            let listeners: Vec<String> = listeners.iter().map(|row| row.get(0)).collect();
            let expected = self.model.listeners(asking).into_iter();
            let expected: Vec<_> = expected
                .map(|(instance, owner)| format!("{instance}:{}", owner.sequence))
                .collect();
            assert_eq!(listeners, expected, "listeners of {key}");
            // A free lock has no ticket, and each shared lease its guard.
            let broken = self.connection.query(
                "SELECT 1 FROM lockstream.lock l WHERE key = $1 AND owner IS NULL \
                 AND (waited OR EXISTS (SELECT 1 FROM lockstream.ticket t WHERE t.key = l.key)) \
                 UNION ALL SELECT 2 FROM lockstream.lock l WHERE key = $1 AND NOT waited \
                 AND EXISTS (SELECT 1 FROM lockstream.ticket t WHERE t.key = l.key) \
                 UNION ALL SELECT 3 FROM lockstream.holder h FULL JOIN lockstream.guard g USING (key, owner) \
                 WHERE key = $1 AND owner <> '' AND (h.weight IS NULL OR g.key IS NULL) \
                 UNION ALL SELECT 4 FROM lockstream.lock l WHERE key = $1 AND owner = '' AND NOT waited \
                 AND NOT EXISTS (SELECT 1 FROM lockstream.holder h WHERE h.key = l.key)",
                &[&lock(index)],
            );
            assert_eq!(broken.unwrap().len(), 0, "{key}");
        }
    }
}

fn lock(key: usize) -> String {
    format!("{PREFIX}:{}", KEYS[key])
}

fn names(who: usize) -> Names {
    Names::new(PREFIX.into(), INSTANCES[who].into(), schema::USUAL)
}

fn holders(status: &KeyStatus) -> Vec<(String, Mode)> {
    let mut holders: Vec<_> = status
        .holders
        .iter()
        .map(|it| (it.name.clone(), it.mode))
        .collect();
    holders.sort();
    holders
}

#[test]
fn the_functions_agree_with_the_model() {
    // What is kept for a listener must not run out while it is looked at, and tickets of the dead leave one by one, as
    // in the model.
    let patches = [
        ("at + 100000;", "at + 30000000;"),
        ("AND t.line = first.line;", "AND t.score = first.score;"),
    ];
    let sql = patches
        .iter()
        .fold(schema::SQL.to_owned(), |sql, (ours, theirs)| {
            assert!(sql.contains(ours), "{ours}");
            sql.replace(ours, theirs)
        });
    let server = PgServer::start();
    let connect = || Client::connect(&server.url(), NoTls).unwrap();
    let mut others = connect();
    others
        .batch_execute("SELECT pg_advisory_lock(101), pg_advisory_lock(102)")
        .unwrap();
    let mut connection = connect();
    connection.batch_execute(&sql).unwrap();
    let both = std::cell::RefCell::new(Both {
        connection,
        model: Keyspace::default(),
        began: Instant::now(),
        now: 1_000_000_000,
        owners: BTreeMap::new(),
        listens: BTreeMap::new(),
        last_owner: 0,
        last_epochs: [0; 3],
        counts: BTreeMap::new(),
    });
    let cases = std::env::var("LOCKSTREAM_CASES").ok();
    let config = Config {
        cases: cases.map_or(60, |cases| cases.parse().expect("a number")),
        failure_persistence: None,
        ..Config::default()
    };
    // Some outcomes are rare: there are more cases until each was seen a few times.
    let rare = || {
        let counts = &both.borrow().counts;
        let outcomes = [
            "won", "busy", "not old", "gone", "granted", "freed", "raised", "renewed", "lost",
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
            panic!("{broken}");
        }
    }
}
