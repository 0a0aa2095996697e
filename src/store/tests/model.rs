//! A server and its model in memory, which the simulator trusts, side by side through long runs of ops: the same answers,
//! the same locks and queues, the same events. What differs between kinds of servers is behind [`Server`].

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::Arc;
use std::time::{Duration, Instant};

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::{select, subsequence};
use proptest::test_runner::{Config, TestRunner};

use crate::base::Mode;
use crate::store::contract::{Holder, KeyStatus, Op, Outcome, Owner, StoreEvent, SubmittedOp};
use crate::store::driver::{Request, RequestKind};
use crate::store::memory::{Asking, Keyspace};

pub(super) const KEYS: [&str; 3] = ["k", "l", "m"];
pub(super) const INSTANCES: [&str; 3] = ["a1", "b2", "dead"];
/// The index of the instance that hears nothing.
const DEAD: usize = 2;
pub(super) const PREFIX: &str = "p";
/// Longer than a history takes.
pub(super) const TTL: Duration = Duration::from_secs(300);
/// More time than a test takes, and less than the difference between two lanes.
const SLACK: Duration = TTL.saturating_mul(10);
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
/// By how much epochs are raised. Only the second goes beyond the clock, so that the next epoch shows it.
const RAISES: [u64; 2] = [17, 1_000_000];

const fn permits(limit: u32, weight: u8) -> Mode {
    Mode::Permits { limit, weight }
}

/// Each lane's own, so different that the time of a test is nothing beside it: the time that a busy answer names tells
/// whose lease it waits for (M5).
fn ttl_of(lane: usize) -> Duration {
    TTL + 20 * TTL * lane as u32
}

/// The outcomes, and the events with the instances that they are for.
pub(super) type Answers = (Vec<Outcome>, Vec<(usize, StoreEvent)>);

/// The server's side. Keys and instances are indices of [`KEYS`] and [`INSTANCES`].
pub(super) trait Server {
    /// What happens to this kind of server alone.
    type Step: Clone + Debug + 'static;
    /// The fence of each key: the epochs of one fence grow (F1).
    const FENCES: [usize; KEYS.len()];
    /// Whether an instance that calls can be told, even if it hears nothing (S2).
    const CALLER_IS_LIVE: bool;

    fn own_steps() -> BoxedStrategy<Self::Step>;

    /// Deletes all data.
    fn clear(&mut self);

    /// Sends the requests of one instance, of which the renewals are the last.
    fn call(&mut self, who: usize, requests: &[Request]) -> Answers;

    /// Ends the leases of a key.
    fn run_out(&mut self, key: usize);

    /// `last_epochs`: by fence.
    fn take(&mut self, step: &Self::Step, last_epochs: &mut [u64; KEYS.len()]);

    /// The exclusive owner that is written in the lock, even if its lease has ended.
    fn written_owner(&mut self, key: usize) -> Option<String>;

    /// The lock, and its subscribers in their order. Asserts what must hold on this kind of server alone.
    fn look(&mut self, key: usize) -> (KeyStatus, Vec<String>);
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
    /// A shared owner serves the queue instead.
    Raise,
    Verify,
    /// Some holder of the key loses it, whoever that is.
    Evict,
    /// Whatever was wanted is given up: another owner from here on (O1).
    Retire,
}

#[derive(Clone, Debug)]
enum Step<S> {
    /// One call about some keys, each for one lane.
    Call(usize, Vec<(usize, usize, Want)>),
    /// The lock ran out.
    RunOut(usize),
    Own(S),
}

fn step<S: Server>() -> impl Strategy<Value = Step<S::Step>> {
    use Want::*;
    let wants = select(vec![
        Attempt, Attempt, Enter, Enter, Enter, Listen, Listen, Listen, Release, Release, Release,
        Keep, Withdraw, Yield, Yield, Renew, Renew, Adopt, Raise, Raise, Verify, Evict, Retire,
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
        2 => S::own_steps().prop_map(Step::Own),
    ]
}

/// Both sides, and who they are asked by.
struct History<'a, S> {
    server: &'a mut S,
    begin: Instant,
    model: Keyspace,
    now: u64,
    /// By instance, key and lane.
    owners: BTreeMap<(usize, usize, usize), u64>,
    /// Those that may stand or listen, and whether they listen: none ever does both.
    listens: BTreeMap<u64, bool>,
    /// Where tickets stand, on the server and in the model: the clocks differ.
    places: BTreeMap<u64, [Option<u64>; 2]>,
    last_owner: u64,
    /// By fence.
    last_epochs: [u64; KEYS.len()],
    counts: &'a mut BTreeMap<&'static str, u32>,
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

impl<S: Server> History<'_, S> {
    fn op(&mut self, who: usize, key: usize, lane: usize, want: Want) -> Option<Op> {
        let fresh = self.last_owner + 1;
        let sequence = *self.owners.entry((who, key, lane)).or_insert(fresh);
        self.last_owner = self.last_owner.max(sequence);
        let mode = LANES[lane];
        let owner = Owner { sequence, mode };
        let (ttl, within, score) = (ttl_of(lane), ttl_of(lane), None);
        // For longer than the others take: nobody renews it.
        let left = 4 * ttl;
        let listens = self.listens.get(&sequence).copied();
        let is_shared = mode != Mode::Exclusive;
        // One that stands asks by entering, and none that stands or listens adopts. Shared ones do not listen.
        let want = match want {
            Want::Attempt if listens == Some(false) => Want::Enter,
            Want::Listen | Want::Yield if is_shared => Want::Enter,
            Want::Adopt if listens.is_some() => Want::Release,
            _ => want,
        };
        if matches!(want, Want::Listen | Want::Enter)
            && listens.is_some_and(|it| it != matches!(want, Want::Listen))
        {
            self.owners.remove(&(who, key, lane));
            return Some(self.leave(owner, ttl));
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
            Want::Keep => Op::Keep { owner, left },
            Want::Withdraw => self.leave(owner, ttl),
            Want::Renew => Op::Renew { owner, ttl, within },
            Want::Yield => {
                self.last_owner += 1;
                let new = Owner::exclusive(self.last_owner);
                self.owners.insert((who, key, lane), self.last_owner);
                self.listens.insert(self.last_owner, false);
                let old = owner;
                Op::Yield { old, new, ttl }
            }
            Want::Adopt => {
                let from = match is_shared {
                    false => self.server.written_owner(key),
                    // Perhaps of another limit or weight, and then it is refused.
                    true => self.status(key).owner(),
                };
                let from = from.unwrap_or_else(|| "x:1".into()).into();
                Op::Adopt {
                    owner,
                    from,
                    ttl,
                    within: ttl,
                }
            }
            Want::Verify => Op::Verify { owner },
            Want::Evict => {
                let status = self.status(key);
                let at = self.last_owner as usize % status.holders.len().max(1);
                let whose = status.holders.get(at).map(|holder| &*holder.name);
                let whose = whose.unwrap_or("x:1").into();
                Op::Evict { whose }
            }
            Want::Raise if is_shared => Op::Serve { owner },
            Want::Raise => Op::Raise {
                owner,
                epoch: self.last_epochs[S::FENCES[key]] + RAISES[sequence as usize % 2],
                age: false,
            },
            Want::Retire => {
                self.owners.remove(&(who, key, lane));
                return None;
            }
        })
    }

    /// What the model has.
    fn status(&mut self, key: usize) -> KeyStatus {
        let is_live = |it: &Arc<str>| **it != *INSTANCES[DEAD];
        let (prefix, name) = (PREFIX.into(), KEYS[key].into());
        self.model.inspect(&prefix, &name, self.now, &is_live)
    }

    /// Takes back a ticket, or a wish to be told.
    fn leave(&self, owner: Owner, ttl: Duration) -> Op {
        match self.listens.get(&owner.sequence) {
            Some(true) => Op::Unlisten { owner },
            _ => Op::Withdraw { owner, ttl },
        }
    }

    fn take(&mut self, step: &Step<S::Step>) {
        self.now += STEP;
        match step {
            Step::Call(who, wants) => {
                let ops = wants.iter().filter_map(|(key, lane, want)| {
                    let op = self.op(*who, *key, *lane, *want)?;
                    Some((*key, op))
                });
                let mut ops: Vec<_> = ops.collect();
                ops.sort_by_key(|(_, op)| renews(op));
                if !ops.is_empty() {
                    self.call(*who, &ops);
                }
            }
            Step::RunOut(key) => {
                self.server.run_out(*key);
                self.model.expire(KEYS[*key]);
            }
            Step::Own(step) => self.server.take(step, &mut self.last_epochs),
        }
        self.compare();
    }

    /// The op as one side is asked it: a ticket that is entered again has its place (K2).
    fn placed(&self, op: &Op, side: usize) -> Op {
        match *op {
            Op::Enter { owner, ttl, .. } => {
                let places = self.places.get(&owner.sequence);
                let score = places.and_then(|places| places[side]);
                Op::Enter { owner, ttl, score }
            }
            _ => op.clone(),
        }
    }

    fn call(&mut self, who: usize, ops: &[(usize, Op)]) {
        let request = |(key, op): &(usize, Op)| {
            let submitted = SubmittedOp::unattended(KEYS[*key], self.placed(op, 0));
            Request::new(RequestKind::Op(submitted))
        };
        let requests: Vec<_> = ops.iter().map(request).collect();
        let (outcomes, events) = self.server.call(who, &requests);
        let is_live = |it: &Arc<str>| **it != *INSTANCES[DEAD] || S::CALLER_IS_LIVE && who == DEAD;
        let fence_of = |key: &str| S::FENCES[KEYS.iter().position(|it| *it == key).unwrap()];
        let (mut told, mut expected) = (Vec::new(), Vec::new());
        // Each with its fence.
        let (mut epochs, mut raised) = (Vec::new(), Vec::new());
        for ((key, op), outcome) in ops.iter().zip(outcomes) {
            let (prefix, instance) = (PREFIX.into(), INSTANCES[who].into());
            let asking = Asking {
                prefix: &prefix,
                instance: &instance,
                key: &KEYS[*key].into(),
                now: self.now,
            };
            let op = &self.placed(op, 1);
            let applied = self.model.apply(asking, op, &is_live);
            let (ours, models) = (word(&outcome), word(&applied.answer.outcome));
            assert_eq!(ours, models, "{op:?} of {instance}");
            *self.counts.entry(ours).or_default() += 1;
            let fence = S::FENCES[*key];
            match (op, &outcome) {
                (Op::Raise { epoch, .. }, Outcome::Raised { .. }) => raised.push((fence, *epoch)),
                (_, Outcome::Won { epoch }) => epochs.push((fence, *epoch)),
                _ => {}
            }
            let holder = |outcome: &Outcome| match outcome {
                Outcome::Busy { holder, .. } => holder.clone(),
                _ => None,
            };
            if let Some(named) = holder(&outcome) {
                // G8: of those that end first the same, but that a server may have given them the lock one after the other.
                let models = holder(&applied.answer.outcome).expect("somebody has it");
                let status = self.model.inspect(&prefix, asking.key, self.now, &|_| true);
                let left = |owner: &str| {
                    let has_it = |it: &&Holder| *it.name == *owner && it.mode == named.mode;
                    status.holders.iter().find(has_it).expect("it has it").left
                };
                assert_near(left(&named.owner), left(&models.owner), op);
                assert_eq!(named.others, models.others, "{op:?}");
                *self.counts.entry("named").or_default() += 1;
            } else {
                assert_eq!(holder(&applied.answer.outcome), None, "{op:?}");
            }
            if let Some((left, place)) = busy(&outcome)
                && let Some((expected, models)) = busy(&applied.answer.outcome)
            {
                assert_near(left, expected, op);
                if let Op::Enter { owner, .. } = op {
                    self.places.insert(owner.sequence, [place, models]);
                }
            }
            expected.extend(applied.deliveries.into_iter().map(|it| {
                let grant = it.grant.map(|grant| (grant.owner, grant.ttl));
                (it.instance, KEYS[*key].into(), grant)
            }));
        }
        for (who, event) in events {
            let (key, grant) = match event {
                StoreEvent::Granted { key, grant } => (key, Some(grant)),
                StoreEvent::Freed { key } => (key, None),
                other => panic!("{other:?} after {ops:?}"),
            };
            let what = if grant.is_some() { "granted" } else { "freed" };
            *self.counts.entry(what).or_default() += 1;
            epochs.extend(grant.iter().map(|grant| (fence_of(&key), grant.epoch)));
            let grant = grant.map(|grant| (grant.owner, grant.ttl));
            told.push((Arc::from(INSTANCES[who]), key, grant));
        }
        assert_eq!(told, expected, "told after {ops:?}");
        epochs.sort_unstable();
        for (fence, epoch) in epochs {
            assert!(epoch > self.last_epochs[fence], "f1: {epoch} after {ops:?}");
            self.last_epochs[fence] = epoch;
        }
        for (fence, epoch) in raised {
            self.last_epochs[fence] = epoch.max(self.last_epochs[fence]);
        }
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
            let (found, listeners) = self.server.look(index);
            let expected = self.status(index);
            let ((ours, left), (models, expected_left)) = (holders(&found), holders(&expected));
            assert_eq!(ours, models, "{key}");
            assert_eq!(found.taken, expected.taken, "{key}");
            for (left, expected) in left.into_iter().zip(expected_left) {
                assert_near(left, expected, key);
                // It began with that at least, in this history. Times are told in milliseconds.
                let at_first = left.unwrap() + self.begin.elapsed() + Duration::from_millis(1);
                assert!(at_first >= TTL, "{key}: {left:?}");
            }
            let queue = |it: KeyStatus| (it.queue, it.tickets);
            assert_eq!(queue(found), queue(expected), "queue of {key}");
            let expected = self.model.listeners(asking).into_iter();
            let expected = expected.map(|(instance, it)| format!("{instance}:{}", it.sequence));
            assert_eq!(
                listeners,
                expected.collect::<Vec<_>>(),
                "listeners of {key}"
            );
        }
    }
}

/// Whether it goes with the renewals.
pub(super) fn renews(op: &Op) -> bool {
    matches!(op, Op::Renew { .. } | Op::Verify { .. })
}

/// For how long another owner has the lock, and our place in the queue.
fn busy(outcome: &Outcome) -> Option<(Option<Duration>, Option<u64>)> {
    match *outcome {
        Outcome::Busy { left, score, .. } => Some((left, score)),
        _ => None,
    }
}

fn assert_near(left: Option<Duration>, expected: Option<Duration>, what: &dyn Debug) {
    let apart = left.unwrap().abs_diff(expected.unwrap());
    assert!(apart < SLACK, "{what:?}: {left:?}, not {expected:?}");
}

/// The holders in one order, and how long each lasts.
fn holders(status: &KeyStatus) -> (Vec<(&str, Mode)>, Vec<Option<Duration>>) {
    let holders = status.holders.iter();
    let mut holders: Vec<_> = holders.map(|it| ((&*it.name, it.mode), it.left)).collect();
    holders.sort();
    holders.into_iter().unzip()
}

/// Runs random histories on a server, which `name` stands for, and on the model.
pub(super) fn agree<S: Server>(name: &str, server: S) {
    let both = RefCell::new((server, BTreeMap::new()));
    let cases = std::env::var("LOCKSTREAM_CASES").ok();
    let config = Config {
        cases: cases.map_or(60, |cases| cases.parse().expect("a number")),
        failure_persistence: None,
        ..Config::default()
    };
    // Some outcomes are rare: there are more cases until each was seen a few times.
    let rare = || {
        let counts = &both.borrow().1;
        let outcomes = [
            "won", "busy", "not old", "gone", "granted", "freed", "raised", "renewed", "lost",
            "named",
        ];
        let rare = outcomes.into_iter().find(|it| counts.get(it) <= Some(&3));
        rare.map(|it| format!("{name}: {it}: {counts:?}"))
    };
    let run = |steps: &[Step<S::Step>]| {
        let (server, counts) = &mut *both.borrow_mut();
        server.clear();
        let mut history = History {
            server,
            begin: Instant::now(),
            model: Keyspace::default(),
            now: 1_000_000_000,
            owners: BTreeMap::new(),
            listens: BTreeMap::new(),
            places: BTreeMap::new(),
            last_owner: 0,
            last_epochs: [0; KEYS.len()],
            counts,
        };
        steps.iter().for_each(|step| history.take(step));
    };
    known().iter().for_each(|steps| run(steps));
    let mut rounds = 0;
    while let Some(rare) = rare() {
        assert!(rounds < 10, "{rare}");
        rounds += 1;
        let ran = TestRunner::new(config.clone()).run(&vec(step::<S>(), 1..60), |steps| {
            run(&steps);
            Ok(())
        });
        ran.unwrap_or_else(|broken| panic!("{name}: {broken}"));
    }
}

/// Histories that are rare, and in which the two once differed.
fn known<S>() -> Vec<Vec<Step<S>>> {
    let permit = |who, want| Step::Call(who, vec![(2, 3, want)]);
    vec![
        // Whoever adopts a permit has one already.
        vec![
            permit(0, Want::Attempt),
            permit(1, Want::Attempt),
            permit(1, Want::Adopt),
        ],
    ]
}
