//! Any events in any order, from a store that answers whatever fits the op: the invariants hold.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use proptest::prelude::*;

use super::harness::{EPOCH, broken, ms, rules};
use crate::base::clock::{FOREVER, Moment};
use crate::base::{Mode, OnFinish, StoreError};
use crate::store::contract::{Answer, Grant, Op, OpError, Outcome, Owner};
use crate::turnstile::machine::Turnstile;
use crate::turnstile::{
    Effect, EndMode, EventCx, Ids, LeaseEnd, LeaseVerdict, NotGranted, Rules, Verdict, Waiter,
    WaiterId, WaiterVerdict,
};

#[derive(Clone, Debug)]
enum Step {
    Arrive {
        ttl: u64,
        renewed: bool,
        once: bool,
        on_finish: OnFinish,
        wait: Option<u64>,
    },
    /// Adopts a lease, of this registry or another.
    Adopt {
        ttl: u64,
        wait: u64,
    },
    Leave(usize),
    Take(usize),
    Finish {
        whose: usize,
        keeps: bool,
    },
    Detach(usize),
    Extend(usize, u64),
    Seal(usize),
    Reply {
        which: usize,
        how: u8,
        left: u64,
        ago: u64,
    },
    Grant {
        whose: usize,
        ttl: u64,
        ago: i64,
        unconfirmed: bool,
    },
    Freed,
    /// Time goes by, with the timer or without.
    Wait {
        time: u64,
        ticks: bool,
    },
    Down,
    Up {
        queue: bool,
    },
    /// Whoever holds has so long to end its work.
    Close {
        grace: Option<u64>,
    },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let ttl = prop_oneof![Just(10_u64), Just(100), Just(300), Just(1000), Just(30_000)];
    let time = prop_oneof![0_u64..3, 0_u64..60, 0_u64..500, 0_u64..40_000];
    let wait = proptest::option::of(0_u64..2000);
    let which = 0_usize..8;
    let on_finish = prop_oneof![
        3 => Just(OnFinish::Release),
        1 => Just(OnFinish::LetExpire),
        1 => (0_u64..2000).prop_map(|time| OnFinish::KeepFor(ms(time))),
    ];
    let step = prop_oneof![
        6 => (ttl.clone(), any::<bool>(), proptest::bool::weighted(0.2), on_finish, wait)
            .prop_map(|(ttl, renewed, once, on_finish, wait)| {
                Step::Arrive { ttl, renewed, once, on_finish, wait }
            }),
        2 => (ttl.clone(), 0_u64..2000).prop_map(|(ttl, wait)| Step::Adopt { ttl, wait }),
        2 => which.clone().prop_map(Step::Leave),
        5 => which.clone().prop_map(Step::Take),
        5 => (which.clone(), any::<bool>())
            .prop_map(|(whose, keeps)| Step::Finish { whose, keeps }),
        1 => which.clone().prop_map(Step::Detach),
        2 => (which.clone(), ttl.clone()).prop_map(|(whose, ttl)| Step::Extend(whose, ttl)),
        1 => which.clone().prop_map(Step::Seal),
        12 => (0_usize..2, any::<u8>(), time.clone(), 0_u64..200)
            .prop_map(|(which, how, left, ago)| Step::Reply { which, how, left, ago }),
        4 => (which, ttl, -2000_i64..2000, proptest::bool::weighted(0.3))
            .prop_map(|(whose, ttl, ago, unconfirmed)| {
                Step::Grant { whose, ttl, ago, unconfirmed }
            }),
        2 => Just(Step::Freed),
        6 => (time, any::<bool>()).prop_map(|(time, ticks)| Step::Wait { time, ticks }),
        1 => Just(Step::Down),
        2 => proptest::bool::weighted(0.8).prop_map(|queue| Step::Up { queue }),
        1 => (proptest::bool::weighted(0.05), proptest::option::of(0_u64..2000))
            .prop_map(|(close, grace)| if close { Step::Close { grace } } else { Step::Up { queue: true } }),
    ];
    proptest::collection::vec(step, 1..120)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Waiting,
    Granted,
    Holding,
    /// And is to end its work.
    Closing,
    Finishing,
    Done,
}

struct Bench {
    turnstile: Turnstile<usize>,
    effects: VecDeque<Effect<usize>>,
    ids: Ids,
    now: Moment,
    epochs: u64,
    last_token: u64,
    /// The epochs of tenures that are not to be passed on.
    sealed: BTreeSet<u64>,
    flying: Vec<(Moment, Op)>,
    leases: usize,
    owners: Vec<Owner>,
    callers: Vec<(WaiterId, Stage)>,
    /// What each caller asks for.
    ttls: Vec<Duration>,
    /// The shortest ttl of a grant: a real store rounds that of the ticket up.
    least_granted: Duration,
    /// How many wins in a row were over on arrival.
    late_wins: BTreeMap<Owner, u32>,
    /// Which callers adopt: their turn is before the queue's.
    adopters: BTreeSet<usize>,
    /// Whose key was left in the store.
    kept: BTreeSet<Owner>,
    /// By owner: the latest end that anything has proved.
    proved: BTreeMap<Owner, Moment>,
    /// Who was told that its renewal is late, and of no renewal since.
    late: BTreeSet<usize>,
    /// When the work of leases must have ended, after a close.
    grace: Option<Moment>,
    /// Who finishes though its grace is over, because the timer has not told it yet.
    overdue: Option<usize>,
    /// Whom the event of now is about: it may be told something while it leaves.
    leaving: Option<usize>,
    /// Whose policies have not answered yet.
    asked: Vec<WaiterId>,
    down: bool,
}

fn end_of(start: Moment, ttl: Duration) -> Moment {
    (start + ttl).saturating_sub(ttl / 100 + ms(2))
}

impl Bench {
    fn new(passes: u32) -> Self {
        let rules = Rules {
            local_passes: passes,
            max_waiters: 12,
            ..rules()
        };
        Self {
            turnstile: Turnstile::new(Mode::Exclusive, true),
            effects: VecDeque::new(),
            ids: Ids::new(rules, 7),
            // The renewals of many are spread (G5).
            leases: if passes.is_multiple_of(2) { 1 } else { 1000 },
            now: ms(5000),
            epochs: 0,
            last_token: 0,
            sealed: BTreeSet::new(),
            flying: Vec::new(),
            owners: Vec::new(),
            callers: Vec::new(),
            ttls: Vec::new(),
            least_granted: Duration::MAX,
            late_wins: BTreeMap::new(),
            adopters: BTreeSet::new(),
            kept: BTreeSet::new(),
            proved: BTreeMap::new(),
            late: BTreeSet::new(),
            grace: None,
            overdue: None,
            leaving: None,
            asked: Vec::new(),
            down: false,
        }
    }

    fn feed<R>(
        &mut self,
        event: impl FnOnce(&mut Turnstile<usize>, &mut EventCx<'_, usize>) -> R,
    ) -> R {
        let result = self.put_in(event);
        self.drain();
        result
    }

    fn put_in<R>(
        &mut self,
        event: impl FnOnce(&mut Turnstile<usize>, &mut EventCx<'_, usize>) -> R,
    ) -> R {
        let mut cx = EventCx::new(self.now, &mut self.ids, &mut self.effects);
        cx.leases = self.leases;
        event(&mut self.turnstile, &mut cx)
    }

    fn drain(&mut self) {
        let mut effects = 0;
        while let Some(effect) = self.effects.pop_front() {
            effects += 1;
            match effect {
                Effect::Send(op) => self.sent(op),
                Effect::Wake(caller, verdict) => self.told(caller, &verdict),
                Effect::AskPolicy(_, id) => self.asked.push(id),
            }
        }
        assert!(
            effects <= 3 * self.callers.len() + 8,
            "{effects} effects of one event"
        );
        let held = |stage: Stage| matches!(stage, Stage::Granted | Stage::Holding | Stage::Closing);
        let seats = self
            .callers
            .iter()
            .filter(|(_, stage)| held(*stage))
            .count();
        assert!(seats <= 1, "I1: {seats} leases");
        let waits = self
            .callers
            .iter()
            .any(|(_, stage)| *stage == Stage::Waiting);
        let stirs = !self.flying.is_empty()
            || !self.asked.is_empty()
            || self.turnstile.next_timeout().is_some();
        assert!(
            !waits || stirs || self.down,
            "I6: somebody waits, and nothing will happen"
        );
    }

    fn sent(&mut self, op: Op) {
        if let Op::Attempt { owner, .. }
        | Op::Listen { owner, .. }
        | Op::Enter { owner, .. }
        | Op::Adopt { owner, .. }
        | Op::Yield { new: owner, .. } = op
            && !self.owners.contains(&owner)
        {
            self.owners.push(owner);
        }
        if let Op::Renew { owner, .. } | Op::Yield { old: owner, .. } | Op::Withdraw { owner, .. } =
            op
        {
            assert!(!self.kept.contains(&owner), "{op:?} for one that is kept");
        }
        if let Op::Renew { owner, within, .. } = op {
            let lasts = self
                .proved
                .get(&owner)
                .map(|end| end.saturating_sub(self.now));
            assert!(!within.is_zero(), "a renewal of a lease that is over");
            assert!(
                lasts.is_some_and(|lasts| within <= lasts),
                "{within:?} of {lasts:?}"
            );
        }
        let waits = |(_, stage): &(WaiterId, Stage)| *stage == Stage::Waiting;
        if let Op::Enter { owner, .. } | Op::Listen { owner, .. } | Op::Attempt { owner, .. } = op {
            assert!(self.callers.iter().any(waits), "{op:?} for nobody");
            let late = self.late_wins.get(&owner).copied().unwrap_or(0);
            assert!(late < 3, "D4: {op:?} after {late} wins that were over");
        }
        self.flying.push((self.now, op));
        let others = self
            .flying
            .iter()
            .filter(|(_, op)| !matches!(op, Op::Renew { .. }));
        assert!(others.count() <= 1, "I2: {:?}", self.flying);
    }

    fn told(&mut self, caller: usize, verdict: &Verdict) {
        let stage = self.callers[caller].1;
        if self.leaving == Some(caller) {
            return;
        }
        let next = match (verdict, stage) {
            (
                Verdict::Waiter(WaiterVerdict::Granted {
                    token,
                    deadline,
                    needs_another_poll,
                }),
                Stage::Waiting,
            ) => {
                assert!(
                    !needs_another_poll || !token.is_passed(),
                    "{token} is a pass"
                );
                assert!(token.get() > self.last_token, "F2: {token}");
                assert!(
                    !self.sealed.contains(&(token.get() / 64)),
                    "{token} is a pass of a fenced tenure"
                );
                self.last_token = token.get();
                self.check_deadline(*deadline);
                let first = self
                    .callers
                    .iter()
                    .position(|(_, stage)| *stage == Stage::Waiting);
                let adopts = self.adopters.contains(&caller);
                assert!(
                    adopts || first == Some(caller),
                    "it is the turn of {first:?}, not of {caller}"
                );
                Stage::Granted
            }
            (
                Verdict::Lease(LeaseVerdict::Prolonged { deadline, .. }),
                Stage::Granted | Stage::Holding | Stage::Closing,
            ) => {
                self.check_deadline(*deadline);
                stage
            }
            (Verdict::Lease(LeaseVerdict::Unrenewed(_)), Stage::Holding | Stage::Closing) => stage,
            (Verdict::Lease(LeaseVerdict::RenewalLate), Stage::Holding | Stage::Closing) => {
                assert!(
                    self.late.insert(caller),
                    "{caller} is told twice that its renewal is late"
                );
                stage
            }
            (Verdict::Lease(LeaseVerdict::Closing), Stage::Holding) => Stage::Closing,
            (Verdict::Waiter(WaiterVerdict::TurnLost), Stage::Granted)
            | (
                Verdict::Waiter(WaiterVerdict::Refused(NotGranted::Closed)),
                Stage::Waiting | Stage::Granted,
            )
            | (
                Verdict::Waiter(WaiterVerdict::Refused(
                    NotGranted::Failed(_) | NotGranted::Busy(_) | NotGranted::QueueFull,
                )),
                Stage::Waiting,
            )
            | (
                Verdict::Lease(LeaseVerdict::Ended(LeaseEnd::Lost(_))),
                Stage::Holding | Stage::Closing | Stage::Finishing,
            )
            | (
                Verdict::Lease(LeaseVerdict::Ended(LeaseEnd::Closed)),
                Stage::Holding | Stage::Closing,
            )
            | (
                Verdict::Lease(LeaseVerdict::Ended(LeaseEnd::Released | LeaseEnd::Failed(_))),
                Stage::Finishing,
            ) => Stage::Done,
            (Verdict::Lease(LeaseVerdict::Ended(LeaseEnd::Closed)), Stage::Finishing)
                if self.overdue == Some(caller) =>
            {
                Stage::Done
            }
            (
                Verdict::Waiter(WaiterVerdict::Refused(NotGranted::TooSlow { round_trip })),
                Stage::Waiting,
            ) => {
                let ttl = self.ttls[caller].min(self.least_granted);
                let end = end_of(Moment::ZERO, ttl);
                assert!(end <= *round_trip, "D4: {round_trip:?} is in time");
                Stage::Done
            }
            (
                Verdict::Waiter(WaiterVerdict::Refused(NotGranted::NothingToAdopt)),
                Stage::Waiting,
            ) if self.adopters.contains(&caller) => Stage::Done,
            _ => panic!("I5: {caller} is {stage:?}, and is told {verdict:?}"),
        };
        self.callers[caller].1 = next;
    }

    /// I4.
    fn check_deadline(&self, deadline: Moment) {
        let proved = self.proved.values().max().copied().unwrap_or_default();
        assert!(
            deadline <= proved,
            "I4: {deadline:?} is proved to {proved:?} at most"
        );
        assert!(deadline > self.now, "D4: {deadline:?} at {:?}", self.now);
    }

    fn prove(&mut self, owner: Owner, end: Moment) {
        let proved = self.proved.entry(owner).or_default();
        *proved = end.max(*proved);
    }

    fn server_time(&self, ago: i64) -> u64 {
        (EPOCH as i64 + self.now.as_millis() as i64 - ago) as u64 * 1000
    }

    fn outcome(&mut self, sent: Moment, op: &Op, how: u8, left: u64) -> Result<Outcome, OpError> {
        let error = match how % 16 {
            0 => Some(OpError::Refused(broken())),
            1 if how > 200 => Some(OpError::Refused(StoreError::lasting("no"))),
            _ => None,
        };
        if let Some(error) = error {
            return Err(error);
        }
        let left = (!how.is_multiple_of(5)).then(|| ms(left));
        let score = Some(u64::from(how));
        Ok(match *op {
            Op::Attempt { owner, ttl }
            | Op::Listen { owner, ttl }
            | Op::Enter { owner, ttl, .. }
            | Op::Adopt { owner, ttl, .. }
            | Op::Yield {
                new: owner, ttl, ..
            } => match how % 3 {
                0 if how.is_multiple_of(5) => return Err(OpError::Unconfirmed(broken())),
                0 => {
                    self.epochs += 1;
                    self.prove(owner, end_of(sent, ttl));
                    if end_of(sent, ttl) <= self.now {
                        *self.late_wins.entry(owner).or_default() += 1;
                    }
                    Outcome::Won { epoch: self.epochs }
                }
                1 if matches!(op, Op::Yield { .. }) => Outcome::NotOld,
                _ if matches!(op, Op::Adopt { .. }) => Outcome::NotOld,
                _ => Outcome::Busy {
                    left,
                    score,
                    entered: false,
                    holder: None,
                },
            },
            Op::Withdraw { .. }
            | Op::Unlisten { .. }
            | Op::Release { .. }
            | Op::Keep { .. }
            | Op::Serve { .. } => Outcome::Gone {
                held: !how.is_multiple_of(3),
            },
            Op::Raise { .. } => unreachable!("a quorum raises, a turnstile does not"),
            Op::Verify { .. } | Op::Evict { .. } => unreachable!("callers ask that"),
            Op::Renew { .. } if how % 16 == 3 => return Err(OpError::TooLate(broken())),
            Op::Renew { owner, ttl, .. } => {
                if how.is_multiple_of(4) {
                    Outcome::Lost
                } else {
                    self.prove(owner, end_of(sent, ttl));
                    Outcome::Renewed
                }
            }
        })
    }

    fn reply(&mut self, which: usize, how: u8, left: u64, ago: u64) {
        if self.flying.is_empty() {
            return;
        }
        let (sent, op) = self.flying.remove(which % self.flying.len());
        if how % 16 == 15 {
            self.feed(|turnstile, cx| turnstile.op_dropped(cx, &op));
            return;
        }
        let outcome = self.outcome(sent, &op, how, left);
        let at = self.server_time(ago as i64);
        let result = outcome.map(|outcome| Answer { at, outcome });
        let renewed = matches!(op, Op::Renew { .. }) && result.is_ok();
        self.feed(|turnstile, cx| turnstile.replied(cx, &op, result));
        if renewed {
            self.late.clear();
        }
    }

    fn break_off(&mut self) {
        self.down = true;
        for (_, op) in std::mem::take(&mut self.flying) {
            let error = OpError::Unknown(broken());
            self.feed(|turnstile, cx| turnstile.replied(cx, &op, Err(error)));
        }
        self.feed(|turnstile, cx| turnstile.down(cx, &broken()));
        // What was sent in between has no connection either.
        while let Some((_, op)) = self.flying.pop() {
            let error = OpError::Unsent(broken());
            self.feed(|turnstile, cx| turnstile.replied(cx, &op, Err(error)));
        }
    }

    fn up(&mut self, queue: bool) {
        self.feed(|turnstile, cx| turnstile.up_renew(cx, false));
        self.down = false;
        self.feed(|turnstile, cx| turnstile.up(cx, queue));
    }

    fn wait(&mut self, time: Duration, ticks: bool) {
        let then = self.now + time;
        let mut rounds = 0;
        while ticks
            && let Some(next) = self.turnstile.next_timeout()
            && next <= then
        {
            rounds += 1;
            assert!(rounds < 500, "it ticks on and on");
            self.now = self.now.max(next);
            self.feed(|turnstile, cx| turnstile.tick(cx));
            let next = self.turnstile.next_timeout();
            assert!(
                next.is_none_or(|next| next > self.now),
                "a tick changes nothing"
            );
            // Ops without a connection come back at once.
            while self.down && !self.flying.is_empty() {
                let (_, op) = self.flying.remove(0);
                let error = OpError::Unsent(broken());
                self.feed(|turnstile, cx| turnstile.replied(cx, &op, Err(error)));
            }
        }
        self.now = then;
    }

    fn nth(&self, n: usize, stages: &[Stage]) -> Option<(usize, WaiterId)> {
        let mut fit = Vec::new();
        for (caller, (id, stage)) in self.callers.iter().enumerate() {
            if stages.contains(stage) {
                fit.push((caller, *id));
            }
        }
        (!fit.is_empty()).then(|| fit[n % fit.len()])
    }

    fn leave(&mut self, caller: usize, id: WaiterId) {
        self.leaving = Some(caller);
        self.callers[caller].1 = Stage::Done;
        self.feed(|turnstile, cx| turnstile.leave(cx, id));
        self.leaving = None;
    }

    fn finish(&mut self, caller: usize, id: WaiterId, end_mode: EndMode) {
        let is_over = self.grace.is_some_and(|until| until <= self.now);
        let is_closing = self.callers[caller].1 == Stage::Closing;
        self.overdue = (is_over && is_closing).then_some(caller);
        self.callers[caller].1 = Stage::Finishing;
        let kept = self.put_in(|turnstile, cx| turnstile.finish(cx, id, end_mode));
        self.kept.extend(kept);
        self.drain();
        self.overdue = None;
        assert!(
            kept.is_none() || self.callers[caller].1 == Stage::Done,
            "what is kept is told at once"
        );
    }

    fn extend(&mut self, caller: usize, id: WaiterId, ttl: u64) {
        let until = self.feed(|turnstile, cx| turnstile.extend(cx, id, ms(ttl)));
        let held = self.callers[caller].1 == Stage::Holding;
        assert_eq!(until.is_some(), held, "{caller} is extended to {until:?}");
    }

    fn take(&mut self, caller: usize, id: WaiterId) {
        let taken = self.put_in(|turnstile, cx| turnstile.take(cx, id));
        if taken {
            self.callers[caller].1 = Stage::Holding;
        }
        self.drain();
        assert!(
            taken || self.callers[caller].1 == Stage::Done,
            "a turn is lost untold"
        );
    }

    /// One step may come between a question to a policy and its answer. Every third policy has ended.
    fn step(&mut self, step: &Step) {
        let asked = std::mem::take(&mut self.asked);
        self.event(step);
        for id in asked {
            let pause = (id.0 % 3 > 0).then_some(ms(20));
            self.feed(|turnstile, cx| turnstile.on_pause(cx, id, pause));
        }
    }

    fn event(&mut self, step: &Step) {
        match *step {
            Step::Arrive {
                ttl,
                renewed,
                once,
                on_finish,
                wait,
            } => {
                let caller = self.callers.len();
                let waiter = Waiter {
                    caller,
                    ttl: ms(ttl),
                    renewals: if renewed { 3 } else { 0 },
                    adopts: None,
                    on_finish,
                    is_conditional: ttl == 100,
                    asks_once: once,
                    hears_of_others: false,
                    until: wait.map_or(FOREVER, |wait| self.now + ms(wait)),
                    answer_by: self.now + ms(100),
                };
                self.ttls.push(waiter.ttl);
                let id = self.put_in(|turnstile, cx| turnstile.arrive(cx, waiter, 0));
                self.callers.push((id, Stage::Waiting));
                self.drain();
            }
            Step::Adopt { ttl, wait } => {
                let caller = self.callers.len();
                let waiter = Waiter {
                    caller,
                    ttl: ms(ttl),
                    renewals: 0,
                    adopts: Some("other:1".into()),
                    on_finish: OnFinish::Release,
                    is_conditional: false,
                    asks_once: true,
                    hears_of_others: false,
                    until: self.now + ms(wait),
                    answer_by: self.now + ms(wait),
                };
                self.ttls.push(waiter.ttl);
                let id = self.put_in(|turnstile, cx| turnstile.arrive(cx, waiter, 0));
                self.callers.push((id, Stage::Waiting));
                self.adopters.insert(caller);
                self.drain();
            }
            Step::Leave(n) => {
                if let Some((caller, id)) = self.nth(n, &[Stage::Waiting, Stage::Granted]) {
                    self.leave(caller, id);
                }
            }
            Step::Take(n) => {
                if let Some((caller, id)) = self.nth(n, &[Stage::Granted]) {
                    self.take(caller, id);
                }
            }
            Step::Finish { whose, keeps } => {
                if let Some((caller, id)) = self.nth(whose, &[Stage::Holding, Stage::Closing]) {
                    let end_mode = if keeps {
                        EndMode::Keep
                    } else {
                        EndMode::Release
                    };
                    self.finish(caller, id, end_mode);
                }
            }
            Step::Detach(n) => {
                if let Some((caller, id)) = self.nth(n, &[Stage::Holding, Stage::Closing]) {
                    self.finish(caller, id, EndMode::Detach);
                }
            }
            Step::Extend(n, ttl) => {
                if let Some((caller, id)) = self.nth(n, &[Stage::Holding, Stage::Closing]) {
                    self.extend(caller, id, ttl);
                }
            }
            Step::Seal(n) => {
                if let Some((_, id)) = self.nth(n, &[Stage::Holding]) {
                    // Only one holds it, with the last token.
                    self.sealed.insert(self.last_token / 64);
                    self.feed(|turnstile, _| turnstile.forbid_passes(id));
                }
            }
            Step::Reply {
                which,
                how,
                left,
                ago,
            } => self.reply(which, how, left, ago),
            Step::Grant {
                whose,
                ttl,
                ago,
                unconfirmed,
            } => {
                let owner = match self.owners.len() {
                    0 => Owner::exclusive(9999),
                    known => self
                        .owners
                        .get(known.saturating_sub(whose))
                        .copied()
                        .unwrap_or(Owner::exclusive(9999)),
                };
                self.epochs += 1;
                self.least_granted = self.least_granted.min(ms(ttl));
                let grant = Grant {
                    owner,
                    ttl: ms(ttl),
                    epoch: self.epochs,
                    at: self.server_time(ago),
                };
                self.prove(owner, end_of(self.now, ms(ttl)));
                let fault = unconfirmed.then(broken);
                self.feed(|turnstile, cx| turnstile.grant_received(cx, grant, fault));
            }
            Step::Freed => self.feed(|turnstile, cx| turnstile.freed(cx)),
            Step::Wait { time, ticks } => self.wait(ms(time), ticks),
            Step::Down => self.break_off(),
            Step::Up { queue } => self.up(queue),
            Step::Close { grace } => {
                let until = grace.map(|grace| self.now + ms(grace));
                self.grace = self.grace.or(until);
                self.feed(|turnstile, cx| turnstile.close(cx, |_| until));
            }
        }
        if self.down {
            while let Some((_, op)) = self.flying.pop() {
                let error = OpError::Unsent(broken());
                self.feed(|turnstile, cx| turnstile.replied(cx, &op, Err(error)));
            }
        }
    }

    /// Everybody goes, the store is well again: nothing is left.
    fn wind_up(&mut self) {
        self.up(true);
        for _ in 0..400 {
            while let Some((caller, id)) = self.nth(0, &[Stage::Waiting, Stage::Granted]) {
                self.leave(caller, id);
            }
            if let Some((caller, id)) = self.nth(0, &[Stage::Holding, Stage::Closing]) {
                self.finish(caller, id, EndMode::Release);
            }
            if self.turnstile.is_idle() && self.flying.is_empty() {
                break;
            }
            if self.flying.is_empty() {
                let next = self
                    .turnstile
                    .next_timeout()
                    .expect("not idle, and nothing is due");
                self.wait(next.saturating_sub(self.now), true);
            } else {
                self.reply(0, 2, 50, 0);
            }
        }
        assert!(self.turnstile.is_idle(), "{:?}", self.turnstile);
        let left = self
            .callers
            .iter()
            .position(|(_, stage)| *stage != Stage::Done);
        assert_eq!(left, None, "I5: somebody was never told");
    }
}

/// How many; `LOCKSTREAM_CASES` says otherwise.
fn cases() -> u32 {
    let cases = std::env::var("LOCKSTREAM_CASES").ok();
    cases.map_or(600, |cases| cases.parse().expect("a number of cases"))
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: cases(),
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn any_events_keep_the_invariants(steps in steps(), passes in 0_u32..4) {
        let mut bench = Bench::new(passes);
        for step in &steps {
            bench.step(step);
        }
        bench.wind_up();
    }
}
