//! One turnstile, and somebody who plays its callers, its store and its clock.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use crate::base::clock::{FOREVER, Moment};
use crate::base::{LossCause, Mode, OnFinish, StoreError};
use crate::store::contract::{Answer, Grant, Occupant, Op, OpError, Outcome, Owner};
use crate::turnstile::machine::Turnstile;
use crate::turnstile::{
    Effect, EndMode, EventCx, Holding, Ids, LeaseEnd, LeaseVerdict, NotGranted, Rules, Verdict,
    Waiter, WaiterId, WaiterVerdict,
};

/// For this long the store's first answer is awaited.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(1);

/// What the server's clock shows when ours shows 0, in milliseconds.
pub(super) const EPOCH: u64 = 1_700_000_000_000;

pub(super) fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

pub(super) fn broken() -> StoreError {
    StoreError::new("the connection broke")
}

pub(super) fn too_few() -> StoreError {
    StoreError::new("too few replicas")
}

pub(super) fn busy(left: u64, score: u64) -> Outcome {
    Outcome::Busy {
        left: Some(ms(left)),
        score: Some(score),
        entered: false,
        holder: None,
    }
}

/// The same, and who has it.
pub(super) fn busy_by(owner: &str, left: Option<Duration>, score: Option<u64>) -> Outcome {
    let occupant = Occupant {
        owner: owner.into(),
        mode: Mode::Exclusive,
        others: 0,
    };
    Outcome::Busy {
        left,
        score,
        entered: false,
        holder: Some(Arc::new(occupant)),
    }
}

pub(super) struct Harness {
    pub(super) turnstile: Turnstile<&'static str>,
    pub(super) now: Moment,
    /// Server time minus ours, in milliseconds.
    pub(super) ahead: i64,
    ids: Ids,
    sent: VecDeque<Op>,
    told: Vec<(&'static str, Verdict)>,
    /// Whose policy was asked for a pause, each time.
    pub(super) asked: Vec<&'static str>,
    /// What it answers.
    pub(super) pause: Option<Duration>,
    /// How many leases its registry has.
    pub(super) leases: usize,
}

/// How a caller waits.
#[derive(Clone, Copy)]
pub(super) struct Wish {
    ttl: u64,
    renewals: u32,
    on_finish: OnFinish,
    is_conditional: bool,
    asks_once: bool,
    hears_of_others: bool,
    until: Moment,
}

/// A lease of so many milliseconds.
pub(super) fn fixed(ttl: u64) -> Wish {
    Wish {
        ttl,
        renewals: 0,
        on_finish: OnFinish::Release,
        is_conditional: false,
        asks_once: false,
        hears_of_others: false,
        until: FOREVER,
    }
}

impl Wish {
    pub(super) fn renewed(self) -> Self {
        self.renewed_at_most(u32::MAX)
    }

    pub(super) fn renewed_at_most(self, renewals: u32) -> Self {
        Self { renewals, ..self }
    }

    /// Its key stays in the store when it ends.
    pub(super) fn kept(self) -> Self {
        Self {
            on_finish: OnFinish::LetExpire,
            ..self
        }
    }

    /// Its key stays only if its holder says so.
    pub(super) fn on_condition(self) -> Self {
        Self {
            is_conditional: true,
            ..self
        }
    }

    /// Its key stays for so long.
    pub(super) fn kept_for(self, keep_for: u64) -> Self {
        Self {
            on_finish: OnFinish::KeepFor(ms(keep_for)),
            ..self
        }
    }

    pub(super) fn once(self) -> Self {
        Self {
            asks_once: true,
            ..self
        }
    }

    /// It wants to know when it waits for others.
    pub(super) fn hearing(self) -> Self {
        Self {
            hears_of_others: true,
            ..self
        }
    }

    pub(super) fn until(self, until: u64) -> Self {
        Self {
            until: ms(until),
            ..self
        }
    }
}

pub(in crate::turnstile) fn rules() -> Rules {
    Rules {
        local_passes: 16,
        local_span: ms(20),
        max_waiters: 100,
        response_timeout: RESPONSE_TIMEOUT,
    }
}

impl Harness {
    pub(super) fn new() -> Self {
        Self::with(rules(), true)
    }

    pub(super) fn with(rules: Rules, queue: bool) -> Self {
        Self {
            turnstile: Turnstile::new(Mode::Exclusive, queue),
            now: ms(1000),
            ahead: EPOCH as i64,
            ids: Ids::new(rules, 1),
            sent: VecDeque::new(),
            told: Vec::new(),
            asked: Vec::new(),
            pause: Some(ms(30)),
            leases: 1,
        }
    }

    pub(super) fn feed<R>(
        &mut self,
        event: impl FnOnce(&mut Turnstile<&'static str>, &mut EventCx<'_, &'static str>) -> R,
    ) -> R {
        let mut effects = VecDeque::new();
        let mut cx = EventCx::new(self.now, &mut self.ids, &mut effects);
        cx.leases = self.leases;
        let result = event(&mut self.turnstile, &mut cx);
        while let Some(effect) = cx.effects.pop_front() {
            match effect {
                Effect::Send(op) => self.sent.push_back(op),
                Effect::Wake(caller, verdict) => self.told.push((caller, verdict)),
                Effect::AskPolicy(caller, id) => {
                    self.asked.push(caller);
                    self.turnstile.on_pause(&mut cx, id, self.pause);
                }
            }
        }
        result
    }

    /// Draws other random numbers.
    pub(super) fn seed(&mut self, seed: u64) {
        self.ids = Ids::new(rules(), seed);
    }

    /// An idle turnstile is forgotten; the next event makes another.
    #[track_caller]
    pub(super) fn forget(&mut self) {
        assert!(self.turnstile.is_idle());
        self.turnstile = Turnstile::new(Mode::Exclusive, true);
    }

    /// Lets time go by, with the timer at every point that the turnstile names.
    pub(super) fn wait_until(&mut self, millis: u64) {
        let then = ms(millis);
        while let Some(next) = self.turnstile.next_timeout()
            && next <= then
        {
            self.now = self.now.max(next);
            self.feed(|turnstile, cx| turnstile.tick(cx));
        }
        self.now = then;
    }

    /// The process is stopped until then: nothing is handled.
    pub(super) fn stop_until(&mut self, millis: u64) {
        self.now = ms(millis);
    }

    pub(super) fn arrive(&mut self, caller: &'static str, wish: Wish) -> WaiterId {
        let waiter = self.waiter(caller, wish);
        self.feed(|turnstile, cx| turnstile.arrive(cx, waiter, 0))
    }

    /// Somebody adopts what `from` left, and wants to know soon.
    pub(super) fn adopt(&mut self, caller: &'static str, from: &str, wish: Wish) -> WaiterId {
        let mut waiter = self.waiter(caller, wish.once());
        waiter.adopts = Some(from.into());
        self.feed(|turnstile, cx| turnstile.arrive(cx, waiter, 0))
    }

    fn waiter(&self, caller: &'static str, wish: Wish) -> Waiter<&'static str> {
        Waiter {
            caller,
            ttl: ms(wish.ttl),
            renewals: wish.renewals,
            adopts: None,
            on_finish: wish.on_finish,
            is_conditional: wish.is_conditional,
            asks_once: wish.asks_once,
            hears_of_others: wish.hears_of_others,
            until: wish.until,
            answer_by: self.now + RESPONSE_TIMEOUT,
        }
    }

    pub(super) fn leave(&mut self, id: WaiterId) {
        self.feed(|turnstile, cx| turnstile.leave(cx, id));
    }

    pub(super) fn take(&mut self, id: WaiterId) -> bool {
        self.feed(|turnstile, cx| turnstile.take(cx, id))
    }

    /// The lease begins anew.
    pub(super) fn restart(&mut self, id: WaiterId, renewals: u32, on_finish: OnFinish) {
        self.feed(|turnstile, cx| turnstile.restart(cx, id, renewals, on_finish));
    }

    pub(super) fn finish(&mut self, id: WaiterId) {
        self.feed(|turnstile, cx| turnstile.finish(cx, id, EndMode::Release));
    }

    /// It is over for its holder, and its key stays in the store.
    pub(super) fn keep(&mut self, id: WaiterId) -> Option<Owner> {
        self.feed(|turnstile, cx| turnstile.finish(cx, id, EndMode::Keep))
    }

    /// It is over for its holder, and another is to adopt it.
    pub(super) fn detach(&mut self, id: WaiterId) -> Option<Owner> {
        self.feed(|turnstile, cx| turnstile.finish(cx, id, EndMode::Detach))
    }

    /// Whether its key would stay if it ended now.
    pub(super) fn is_kept(&mut self, id: WaiterId) -> bool {
        self.feed(|turnstile, cx| turnstile.is_kept(cx, id))
    }

    /// The holder has seen its token.
    pub(super) fn forbid_passes(&mut self, id: WaiterId) {
        self.feed(|turnstile, _| turnstile.forbid_passes(id));
    }

    /// The lease is to last so many milliseconds from now: until when, in microseconds.
    pub(super) fn extend(&mut self, id: WaiterId, ttl: u64) -> Option<u64> {
        let until = self.feed(|turnstile, cx| turnstile.extend(cx, id, ms(ttl)));
        until.map(|until| until.as_micros() as u64)
    }

    pub(super) fn up(&mut self, queue: bool) {
        self.feed(|turnstile, cx| turnstile.up_renew(cx, false));
        self.feed(|turnstile, cx| turnstile.up(cx, queue));
    }

    /// The key was freed, or so it is said.
    pub(super) fn freed(&mut self) {
        self.feed(Turnstile::freed);
    }

    pub(super) fn down(&mut self) {
        self.feed(|turnstile, cx| turnstile.down(cx, &broken()));
    }

    /// The store did it when the server's clock showed ours plus `at` milliseconds.
    pub(super) fn reply_at(&mut self, op: &Op, at: u64, outcome: Outcome) {
        let at = (at as i64 + self.ahead) as u64 * 1000;
        let answer = Ok(Answer { at, outcome });
        self.feed(|turnstile, cx| turnstile.replied(cx, op, answer));
    }

    pub(super) fn reply(&mut self, op: &Op, outcome: Outcome) {
        self.reply_at(op, self.now.as_millis() as u64, outcome);
    }

    pub(super) fn fail(&mut self, op: &Op, error: OpError) {
        self.feed(|turnstile, cx| turnstile.replied(cx, op, Err(error)));
    }

    /// The connection breaks under an op.
    pub(super) fn lose(&mut self, op: &Op) {
        self.fail(op, OpError::Unknown(broken()));
        self.down();
    }

    pub(super) fn grant_at(&mut self, owner: Owner, ttl: u64, epoch: u64, at: u64) {
        let grant = Grant {
            owner,
            ttl: ms(ttl),
            epoch,
            at: (at as i64 + self.ahead) as u64 * 1000,
        };
        self.feed(|turnstile, cx| turnstile.grant_received(cx, grant, None));
    }

    /// It was granted just now, and does not count.
    pub(super) fn grant_in_vain(&mut self, owner: Owner, ttl: u64, epoch: u64) {
        let grant = Grant {
            owner,
            ttl: ms(ttl),
            epoch,
            at: (self.now.as_millis() as i64 + self.ahead) as u64 * 1000,
        };
        let fault = Some(too_few());
        self.feed(|turnstile, cx| turnstile.grant_received(cx, grant, fault));
    }

    pub(super) fn grant(&mut self, owner: Owner, ttl: u64, epoch: u64) {
        self.grant_at(owner, ttl, epoch, self.now.as_millis() as u64);
    }

    /// The next op that was sent.
    #[track_caller]
    pub(super) fn sent(&mut self) -> Op {
        self.sent.pop_front().expect("an op was to be sent")
    }

    /// The op is sent again by the same owner. For an adoption there is less time left.
    #[track_caller]
    pub(super) fn sent_again(&mut self, op: &Op) -> Op {
        let again = self.sent();
        let mut expected = op.clone();
        if let (Op::Adopt { within, .. }, Op::Adopt { within: left, .. }) = (&mut expected, &again)
            && *left <= *within
        {
            *within = *left;
        }
        assert_eq!(again, expected);
        again
    }

    /// For how many owners a late grant is expected.
    pub(super) fn remembered(&self) -> usize {
        self.ids.remembered()
    }

    pub(super) fn sent_if_any(&mut self) -> Option<Op> {
        self.sent.pop_front()
    }

    /// Nothing was sent that was not looked at.
    #[track_caller]
    pub(super) fn silent(&self) {
        assert_eq!(self.sent, []);
    }

    /// The next verdict of this caller; those of others stay.
    #[track_caller]
    pub(super) fn told(&mut self, caller: &str) -> Verdict {
        let at = self.told.iter().position(|(told, _)| *told == caller);
        let at = at.unwrap_or_else(|| panic!("{caller} was to be told something"));
        self.told.remove(at).1
    }

    /// The next thing that anybody was told.
    pub(super) fn told_any(&mut self) -> Verdict {
        self.told.remove(0).1
    }

    /// What a waiter is told.
    #[track_caller]
    pub(super) fn waiter_told(&mut self, caller: &str) -> WaiterVerdict {
        match self.told(caller) {
            Verdict::Waiter(verdict) => verdict,
            Verdict::Lease(verdict) => panic!("{caller} waits, and is told {verdict:?}"),
        }
    }

    /// Why a waiter does not get the key.
    #[track_caller]
    pub(super) fn refused(&mut self, caller: &str) -> NotGranted {
        match self.waiter_told(caller) {
            WaiterVerdict::Refused(refusal) => refusal,
            other => panic!("{caller} was to be refused, not told {other:?}"),
        }
    }

    /// A waiter is told that others have the key: who, and for how long.
    #[track_caller]
    pub(super) fn refused_for(&mut self, caller: &str) -> Option<(String, Option<Duration>)> {
        match self.refused(caller) {
            NotGranted::Busy(holding) => holding.map(|holding| match *holding {
                Holding::Here { owner, left } => (format!("ours {}", owner.sequence), Some(left)),
                Holding::There { occupant, left } => (occupant.owner.to_string(), left),
            }),
            other => panic!("{caller} was to be told who has the key, not {other:?}"),
        }
    }

    /// A lease was lost: why.
    #[track_caller]
    pub(super) fn lost(&mut self, caller: &str) -> LossCause {
        loop {
            match self.lease_told(caller) {
                LeaseVerdict::Ended(LeaseEnd::Lost(cause)) => return cause,
                LeaseVerdict::Ended(end) => {
                    panic!("the lease of {caller} was to be lost, not {end:?}")
                }
                _ => {}
            }
        }
    }

    /// What a holder is told.
    #[track_caller]
    pub(super) fn lease_told(&mut self, caller: &str) -> LeaseVerdict {
        match self.told(caller) {
            Verdict::Lease(verdict) => verdict,
            Verdict::Waiter(verdict) => panic!("{caller} holds, and is told {verdict:?}"),
        }
    }

    /// How a lease has ended.
    #[track_caller]
    pub(super) fn ended(&mut self, caller: &str) -> LeaseEnd {
        match self.lease_told(caller) {
            LeaseVerdict::Ended(end) => end,
            other => panic!("the lease of {caller} was to end, not to be told {other:?}"),
        }
    }

    #[track_caller]
    pub(super) fn untold(&self, caller: &str) {
        let verdict = self.told.iter().find(|(told, _)| *told == caller);
        assert!(verdict.is_none(), "{caller} was told {verdict:?}");
    }

    /// Somebody was granted: the token and the deadline in microseconds.
    #[track_caller]
    pub(super) fn granted(&mut self, caller: &str) -> (u64, u64) {
        let (token, deadline, _) = self.granted_leading(caller);
        (token, deadline)
    }

    /// The same, and whether it is the first of several.
    #[track_caller]
    pub(super) fn granted_leading(&mut self, caller: &str) -> (u64, u64, bool) {
        match self.waiter_told(caller) {
            WaiterVerdict::Granted {
                token,
                deadline,
                needs_another_poll,
            } => (token.get(), deadline.as_micros() as u64, needs_another_poll),
            other => panic!("{caller} was to be granted, not told {other:?}"),
        }
    }

    /// Somebody alone comes, asks a free store, and takes the lease.
    #[track_caller]
    pub(super) fn hold(
        &mut self,
        caller: &'static str,
        wish: Wish,
        epoch: u64,
    ) -> (WaiterId, Owner) {
        let id = self.arrive(caller, wish);
        let op = self.sent();
        self.reply(&op, Outcome::Won { epoch });
        self.granted(caller);
        assert!(self.take(id));
        (id, asker(&op))
    }
}

/// On whose behalf an op asks for the key.
#[track_caller]
pub(super) fn asker(op: &Op) -> Owner {
    match *op {
        Op::Attempt { owner, .. }
        | Op::Listen { owner, .. }
        | Op::Enter { owner, .. }
        | Op::Adopt { owner, .. }
        | Op::Yield { new: owner, .. } => owner,
        _ => panic!("{op:?} does not ask"),
    }
}

/// What withdraws the ticket that `op` entered.
pub(super) fn withdrawal(op: &Op) -> Op {
    let (Op::Enter { ttl, .. } | Op::Yield { ttl, .. }) = *op else {
        panic!("{op:?} enters no ticket")
    };
    let owner = asker(op);
    Op::Withdraw { owner, ttl }
}

/// D1, in microseconds: when a lease is over whose command was sent at `start` milliseconds.
pub(super) fn deadline(start: u64, ttl: u64) -> u64 {
    (start + ttl) * 1000 - ttl * 10 - 2000
}
