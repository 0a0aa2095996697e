use std::collections::VecDeque;
use std::time::Duration;

use super::claim::{Belief, Claim, Exposure, QUEUE_MARGIN};
use super::errand::{Errand, Errands};
use super::line::{Line, Patience, Waiter, WaiterId};
use super::supply::Cx;
use super::tenure::{Ending, Tenure};
use super::time::{Moment, deadline, drift};
use crate::StoreError;
use crate::store::contract::{Grant, Op};

/// What a registry has settled for all its keys.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rules {
    pub(crate) local_passes: u32,
    pub(crate) local_span: Duration,
    pub(crate) max_waiters: usize,
}

/// What a waiter, or the lease that it became, is told.
#[derive(Clone, Debug)]
pub(crate) enum Verdict {
    /// The key is the waiter's, if it takes it in time (W4).
    Seated { token: u64, deadline: Moment },
    /// The lease lasts longer than was said.
    Prolonged { deadline: Moment },
    /// Seated, but it did not look: the turn is another's (W4). It may arrive again.
    TurnLost,
    /// Others have the key.
    Busy,
    /// The line is as long as it may be.
    QueueFull,
    /// To a waiter: the store could not be asked. To a finished lease: it could not be told.
    Failed(StoreError),
    /// A finished lease: it was ours to the end.
    Released,
    /// A lease, also a finished one: it was over before its end.
    Lost,
    /// The registry was shut down.
    Closed,
}

/// What the shell is to do.
#[derive(Clone, Debug)]
pub(crate) enum Effect<C> {
    Send(Op),
    Wake(C, Verdict),
}

/// See the [module](super).
///
/// After every call drain [`next_effect`](Self::next_effect) in order, then look at
/// [`next_timeout`](Self::next_timeout) and [`is_idle`](Self::is_idle).
#[derive(Debug)]
pub(crate) struct Turnstile<C> {
    pub(super) rules: Rules,
    pub(super) line: Line<C>,
    pub(super) standing: Standing<C>,
    pub(super) flight: Option<Flight<C>>,
    pub(super) owed: Errands<C>,
    /// Whether the store has a queue, and grants reach us.
    pub(super) queue: bool,
    /// Whether the connection is known to be gone: nothing is sent until it is back.
    pub(super) down: bool,
    /// What the store said last, if it was no answer.
    pub(super) trouble: Option<StoreError>,
    /// Refusals in a row.
    pub(super) failures: u32,
    closed: bool,
    effects: VecDeque<Effect<C>>,
}

/// How this registry stands to the key in the store.
#[derive(Debug)]
pub(super) enum Standing<C> {
    Out,
    /// An owner of ours is on its way to a tenure; the store is asked again at `ask_at`.
    Seeking {
        claim: Claim,
        ask_at: Moment,
    },
    Inside(Tenure<C>),
}

/// The op in flight (O2).
#[derive(Debug)]
pub(super) struct Flight<C> {
    pub(super) sent: Moment,
    /// The newest arrival that its answer speaks to.
    pub(super) upto: WaiterId,
    pub(super) what: Sent<C>,
    /// A grant that came before the reply that may have caused it (O3), and when it came.
    pub(super) grant: Option<(Moment, Grant)>,
}

#[derive(Debug)]
pub(super) enum Sent<C> {
    /// An attempt or enter for the claim that we seek with.
    Ask(Op),
    Errand(Errand<C>),
}

impl<C: Clone> Turnstile<C> {
    /// `queue`: whether the store has a queue and grants reach us, as far as is known.
    pub(crate) fn new(rules: Rules, queue: bool) -> Self {
        Self {
            rules,
            line: Line::new(),
            standing: Standing::Out,
            flight: None,
            owed: Errands::new(),
            queue,
            down: false,
            trouble: None,
            failures: 0,
            closed: false,
            effects: VecDeque::new(),
        }
    }

    /// What is to be done next.
    pub(crate) fn next_effect(&mut self) -> Option<Effect<C>> {
        self.effects.pop_front()
    }

    /// Nothing waits, is held, or is owed: the turnstile may be forgotten.
    pub(crate) fn is_idle(&self) -> bool {
        self.line.is_empty()
            && matches!(self.standing, Standing::Out)
            && self.flight.is_none()
            && self.owed.is_empty()
    }

    /// When to call [`tick`](Self::tick) at the latest.
    pub(crate) fn next_timeout(&self) -> Option<Moment> {
        let mut next = self.line.next_end();
        let mut consider = |moment: Option<Moment>| {
            next = next.into_iter().chain(moment).min();
        };
        consider(self.owed.next_timeout());
        if let Some(Flight {
            what: Sent::Errand(errand),
            ..
        }) = &self.flight
        {
            consider(errand.ending.as_ref().map(|ending| ending.deadline));
        }
        let may_send = self.flight.is_none() && !self.down;
        if may_send {
            consider(self.owed.front().map(|errand| errand.not_before));
        }
        match &self.standing {
            Standing::Out => {}
            Standing::Seeking { ask_at, .. } => {
                if may_send && self.owed.is_empty() {
                    consider(Some(*ask_at));
                }
            }
            Standing::Inside(tenure) => consider(Some(tenure.next_timeout())),
        }
        next
    }

    /// A caller wants the key. Its verdicts come as effects.
    pub(crate) fn arrive(&mut self, cx: &mut Cx<'_>, waiter: Waiter<C>) -> WaiterId {
        self.pass_time(cx);
        let id = cx.supply.waiter();
        let held = matches!(&self.standing, Standing::Inside(tenure) if tenure.seat.is_some());
        if self.closed {
            self.wake(waiter.who, Verdict::Closed);
        } else if waiter.patience == Patience::Once && (held || self.line.has_standing()) {
            self.wake(waiter.who, Verdict::Busy);
        } else if self.line.len() >= self.rules.max_waiters {
            self.wake(waiter.who, Verdict::QueueFull);
        } else {
            self.line.push(id, waiter);
        }
        self.advance(cx);
        id
    }

    /// A waiter gave up, or was dropped: in line, or seated and not taken.
    pub(crate) fn leave(&mut self, cx: &mut Cx<'_>, id: WaiterId) {
        self.pass_time(cx);
        if self.line.remove(id).is_none()
            && let Standing::Inside(tenure) = &mut self.standing
            && tenure.seat.as_ref().is_some_and(|seat| seat.id == id)
        {
            tenure.seat = None;
        }
        self.advance(cx);
    }

    /// A seated waiter saw its verdict: the lease is held from here on. False if the turn was
    /// another's by then.
    pub(crate) fn take(&mut self, cx: &mut Cx<'_>, id: WaiterId) -> bool {
        self.pass_time(cx);
        let mut taken = false;
        let mut wants_more = false;
        if let Standing::Inside(tenure) = &mut self.standing
            && let Some(seat) = tenure.seat.as_mut().filter(|seat| seat.id == id)
        {
            seat.taken = true;
            taken = true;
            wants_more = tenure.wants_more();
        }
        if wants_more {
            self.renew(cx.now);
        }
        self.advance(cx);
        taken
    }

    /// A lease is given back. It is told what became of it.
    pub(crate) fn finish(&mut self, cx: &mut Cx<'_>, id: WaiterId) {
        self.pass_time(cx);
        if let Standing::Inside(tenure) = &mut self.standing
            && let Some(seat) = tenure.seat.take_if(|seat| seat.id == id)
        {
            tenure.ending = Some(Ending {
                who: seat.who,
                deadline: seat.deadline,
            });
        }
        self.advance(cx);
    }

    /// The store gave the key to one of our tickets.
    pub(crate) fn granted(&mut self, cx: &mut Cx<'_>, grant: Grant) {
        self.pass_time(cx);
        self.on_grant(cx, cx.now, grant);
        self.advance(cx);
    }

    /// Time went by.
    pub(crate) fn tick(&mut self, cx: &mut Cx<'_>) {
        self.pass_time(cx);
        self.advance(cx);
    }

    /// The connection is gone, or could not be made.
    pub(crate) fn down(&mut self, cx: &mut Cx<'_>, error: &StoreError) {
        self.pass_time(cx);
        self.on_down(error);
        self.advance(cx);
    }

    /// A new connection stands. First of two steps (O4): what is held is renewed at once, so that
    /// its holder learns the truth.
    pub(crate) fn up_renew(&mut self, cx: &mut Cx<'_>) {
        self.pass_time(cx);
        self.renew(cx.now);
        self.advance(cx);
    }

    /// Second step: what is owed, or else the ticket again.
    pub(crate) fn up(&mut self, cx: &mut Cx<'_>, queue: bool) {
        self.pass_time(cx);
        self.down = false;
        self.trouble = None;
        self.failures = 0;
        self.queue = queue;
        if let Standing::Seeking { claim, ask_at } = &mut self.standing {
            claim.forget_proof();
            *ask_at = cx.now;
        }
        self.advance(cx);
    }

    /// The registry shuts down: nobody comes in any more, everybody is told, everything is given
    /// back.
    pub(crate) fn close(&mut self, cx: &mut Cx<'_>) {
        self.pass_time(cx);
        self.closed = true;
        while let Some((_, waiter)) = self.line.pop_first() {
            self.wake(waiter.who, Verdict::Closed);
        }
        if let Standing::Inside(tenure) = &mut self.standing
            && let Some(seat) = tenure.seat.take()
        {
            self.wake(seat.who, Verdict::Closed);
        }
        self.advance(cx);
    }

    pub(super) fn wake(&mut self, who: C, verdict: Verdict) {
        self.effects.push_back(Effect::Wake(who, verdict));
    }

    pub(super) fn send(&mut self, op: Op) {
        self.effects.push_back(Effect::Send(op));
    }

    pub(super) fn renew(&mut self, now: Moment) {
        let Standing::Inside(tenure) = &mut self.standing else {
            return;
        };
        if tenure.renewing.is_some() {
            // It may have asked for less, for the lease before this one.
            tenure.renew_again = true;
        } else if let Some(ttl) = tenure.wanted(now) {
            tenure.renew_again = false;
            tenure.asked(now, ttl);
            let owner = tenure.owner;
            self.send(Op::Renew { owner, ttl });
        }
    }

    /// Tells everybody whose time is over. Comes first at every event, so that an event that is
    /// handled late does not see a lease that is over.
    pub(super) fn pass_time(&mut self, cx: &mut Cx<'_>) {
        let now = cx.now;
        while let Some(waiter) = self.line.pop_ended(now) {
            let verdict = match (&self.trouble, waiter.patience) {
                (Some(trouble), _) => Verdict::Failed(trouble.clone()),
                (None, Patience::Once) => Verdict::Failed(no_answer()),
                (None, Patience::Stand) => Verdict::Busy,
            };
            self.wake(waiter.who, verdict);
        }
        self.end_endings(now);
        self.owed.forget_past(now);
        let Standing::Inside(tenure) = &mut self.standing else {
            return;
        };
        if now >= tenure.deadline {
            self.expire(now);
        } else if let Some(seat) = &tenure.seat {
            let (who, taken) = (seat.who.clone(), seat.taken);
            if now >= seat.deadline || (!taken && now >= seat.take_by) {
                tenure.seat = None;
                self.wake(
                    who,
                    if taken {
                        Verdict::Lost
                    } else {
                        Verdict::TurnLost
                    },
                );
            }
        }
    }

    /// The registry hangs up: nobody will hear what becomes of what is still owed, and who waits
    /// for that is told.
    pub(crate) fn hang_up(&mut self) {
        for ending in self.take_endings(|_| true) {
            self.wake(ending.who, Verdict::Closed);
        }
    }

    /// Finished leases whose deadline passes before the store has confirmed their end.
    fn end_endings(&mut self, now: Moment) {
        for ending in self.take_endings(|ending| now >= ending.deadline) {
            let trouble = self.trouble.clone().unwrap_or_else(no_answer);
            self.wake(ending.who, Verdict::Failed(trouble));
        }
    }

    /// Takes out the finished leases whose end the store has not confirmed, as far as they are
    /// `over`.
    fn take_endings(&mut self, over: impl Fn(&mut Ending<C>) -> bool) -> Vec<Ending<C>> {
        let mut ended = Vec::new();
        if let Some(Flight {
            what: Sent::Errand(errand),
            ..
        }) = &mut self.flight
        {
            ended.extend(errand.ending.take_if(&over));
        }
        for errand in self.owed.iter_mut() {
            ended.extend(errand.ending.take_if(&over));
        }
        if let Standing::Inside(tenure) = &mut self.standing {
            ended.extend(tenure.ending.take_if(&over));
        }
        ended
    }

    /// D5: the tenure is over by our clock.
    fn expire(&mut self, now: Moment) {
        let Standing::Inside(mut tenure) = std::mem::replace(&mut self.standing, Standing::Out)
        else {
            unreachable!("only a tenure expires")
        };
        if let Some(seat) = tenure.seat.take() {
            let verdict = if seat.taken {
                Verdict::Lost
            } else {
                Verdict::TurnLost
            };
            self.wake(seat.who, verdict);
        }
        // The store may hold the key a little longer than we dare to.
        let release = Op::Release {
            owner: tenure.owner,
        };
        let until = tenure.runs_out(now);
        self.owed.push_back(Errand::new(release, None, until));
    }

    /// Does whatever the state now asks for.
    pub(super) fn advance(&mut self, cx: &mut Cx<'_>) {
        loop {
            if let Standing::Inside(tenure) = &self.standing
                && tenure.seat.is_none()
            {
                self.next_turn(cx);
            }
            if self.flight.is_some() {
                return;
            }
            if self.down {
                self.abandon_unsent(cx.now);
                return;
            }
            if let Some(errand) = self.owed.front() {
                if errand.not_before > cx.now {
                    return;
                }
                self.run_errand(cx);
            } else if !self.seek(cx) {
                return;
            }
        }
    }

    /// The seat of our tenure is empty: the next local waiter's, another registry's, or nobody's.
    fn next_turn(&mut self, cx: &mut Cx<'_>) {
        let now = cx.now;
        let Standing::Inside(tenure) = &mut self.standing else {
            unreachable!("the caller looked")
        };
        let next = self.line.first();
        if let Some(next) = next
            && tenure.may_seat(&self.rules, next, now)
        {
            let ending = tenure.ending.take();
            let (id, waiter) = self.line.pop_first().expect("first() has seen it");
            let who = waiter.who.clone();
            let (token, deadline) = tenure.seat(id, waiter, now);
            if let Some(ending) = ending {
                self.wake(ending.who, Verdict::Released);
            }
            self.wake(who, Verdict::Seated { token, deadline });
            self.refuse_once(WaiterId(u64::MAX));
            return;
        }
        let ending = tenure.ending.take();
        let old = tenure.owner;
        let until = tenure.runs_out(now);
        let head_ttl = self.line.first().map(|head| head.ttl);
        match head_ttl {
            Some(ttl) if self.queue && self.line.has_standing() => {
                let claim = Claim::new(cx.supply.owner(), ttl);
                let new = claim.owner;
                let op = Op::Yield { old, new, ttl };
                self.owed.push_back(Errand::new(op, ending, until));
                self.standing = Standing::Seeking { claim, ask_at: now };
            }
            _ => {
                let op = Op::Release { owner: old };
                self.owed.push_back(Errand::new(op, ending, until));
                self.standing = Standing::Out;
            }
        }
    }

    /// Sends the first errand.
    fn run_errand(&mut self, cx: &mut Cx<'_>) {
        let mut errand = self.owed.pop_front().expect("the caller has seen it");
        if let Op::Yield { old, new, .. } = errand.op {
            if self.line.is_empty() || !self.queue {
                // Nobody is left to yield for: give back instead, the old one first (O6).
                if errand.resent {
                    let withdraw = Op::Withdraw { owner: new };
                    let until = errand.until + QUEUE_MARGIN;
                    let settle = Errand::new(withdraw, None, until);
                    self.owed.push_front(settle);
                }
                errand.op = Op::Release { owner: old };
                self.standing = Standing::Out;
            } else if let Standing::Seeking { claim, .. } = &mut self.standing {
                claim.sent(cx.now);
                claim.exposure = Exposure::Ticket;
            }
        }
        let op = errand.op.clone();
        self.fly(cx.now, op, Sent::Errand(errand));
    }

    /// Asks the store for the key, if that is due; false if there is nothing to send.
    fn seek(&mut self, cx: &mut Cx<'_>) -> bool {
        let now = cx.now;
        match &mut self.standing {
            Standing::Inside(_) => false,
            Standing::Out => {
                let Some(ttl) = self.line.first().map(|head| head.ttl) else {
                    return false;
                };
                let claim = Claim::new(cx.supply.owner(), ttl);
                self.standing = Standing::Seeking { claim, ask_at: now };
                true
            }
            Standing::Seeking { claim, ask_at } => {
                let stands = self.queue && self.line.has_standing();
                let misplaced = claim.exposure == Exposure::Ticket && !stands;
                if self.line.is_empty() || misplaced {
                    self.abandon(now);
                    return true;
                }
                if *ask_at > now {
                    return false;
                }
                let (owner, ttl) = (claim.owner, claim.ttl);
                let op = if stands {
                    let score = claim.score;
                    Op::Enter { owner, ttl, score }
                } else {
                    Op::Attempt { owner, ttl }
                };
                claim.sent(now);
                self.fly(now, op.clone(), Sent::Ask(op));
                true
            }
        }
    }

    /// Nobody wants the key any more while the connection is gone, perhaps for good: the claim does
    /// not wait for the next one. (A yield that is owed needs its claim, and goes by its own time.)
    fn abandon_unsent(&mut self, now: Moment) {
        let yields = |errand: &Errand<C>| matches!(errand.op, Op::Yield { .. });
        if self.line.is_empty()
            && matches!(self.standing, Standing::Seeking { .. })
            && !self.owed.any(yields)
        {
            self.abandon(now);
        }
    }

    /// Nobody wants the key any more, or not by way of this claim.
    fn abandon(&mut self, now: Moment) {
        let Standing::Seeking { claim, .. } = std::mem::replace(&mut self.standing, Standing::Out)
        else {
            unreachable!("only a claim is abandoned")
        };
        if let Some(op) = claim.settlement() {
            let until = now + claim.outlasted_by();
            self.owed.push_back(Errand::new(op, None, until));
        }
    }

    fn fly(&mut self, now: Moment, op: Op, what: Sent<C>) {
        self.flight = Some(Flight {
            sent: now,
            upto: self.line.last_id(),
            what,
            grant: None,
        });
        self.send(op);
    }

    /// Tells those who will not stand in line, and whom the answer speaks to, that it is busy.
    pub(super) fn refuse_once(&mut self, upto: WaiterId) {
        for waiter in self.line.take_once(upto) {
            self.wake(waiter.who, Verdict::Busy);
        }
    }

    pub(super) fn on_down(&mut self, error: &StoreError) {
        self.down = true;
        if let Standing::Seeking { claim, .. } = &mut self.standing {
            claim.forget_proof();
        }
        self.trouble = Some(error.clone());
        self.fail_waiters(error);
    }

    /// Those who will not wait are told what the store said; all are, if waiting will not mend it.
    pub(super) fn fail_waiters(&mut self, error: &StoreError) {
        let failed = if error.is_retryable() {
            self.line.take_once(WaiterId(u64::MAX))
        } else {
            std::iter::from_fn(|| self.line.pop_first())
                .map(|(_, waiter)| waiter)
                .collect()
        };
        for waiter in failed {
            self.wake(waiter.who, Verdict::Failed(error.clone()));
        }
    }

    /// A tenure of `ttl` is proved from `start` on; `draw` is its number.
    pub(super) fn enter_tenure(
        &mut self,
        cx: &mut Cx<'_>,
        draw: u64,
        start: Moment,
        ttl: Duration,
    ) {
        let now = cx.now;
        let Standing::Seeking { claim, ask_at } = &mut self.standing else {
            unreachable!("a claim comes before a tenure")
        };
        if deadline(start, ttl) <= now && !self.line.is_empty() {
            // D4: proved, but over. The same owner asks again, and the answer proves anew (S3).
            *ask_at = now;
            return;
        }
        let tenure = Tenure::new(claim.owner, ttl, draw, start, now);
        self.standing = Standing::Inside(tenure);
        self.pass_time(cx);
    }

    /// A grant that came at `received`, now or before a reply that it had to wait for.
    pub(super) fn on_grant(&mut self, cx: &mut Cx<'_>, received: Moment, grant: Grant) {
        match &mut self.standing {
            Standing::Seeking { claim, ask_at } if claim.owner == grant.owner => {
                if self.down {
                    // O3: it came by a connection that is not up yet, or no longer. What is owed
                    // goes first, a yield to this owner perhaps; entering it makes the grant good.
                    return;
                }
                if let Some(flight) = &mut self.flight {
                    // O3: the reply that is on its way may be older or newer.
                    flight.grant = Some((received, grant));
                    return;
                }
                match claim.believe(&grant, received) {
                    Belief::From(start) => {
                        claim.exposure = Exposure::Ticket;
                        self.enter_tenure(cx, grant.draw, start, grant.ttl);
                    }
                    Belief::Over => {}
                    Belief::Stepped => *ask_at = cx.now,
                }
            }
            Standing::Inside(tenure) if tenure.owner == grant.owner => {}
            _ => self.give_back(cx.now, &grant),
        }
    }

    /// O1: a grant for an owner that is no longer, or never was.
    fn give_back(&mut self, now: Moment, grant: &Grant) {
        let settled_in_flight = matches!(
            &self.flight,
            Some(Flight { what: Sent::Errand(errand), .. }) if errand.settles(grant.owner)
        );
        if !settled_in_flight && !self.owed.settles(grant.owner) {
            let op = Op::Release { owner: grant.owner };
            let until = now + grant.ttl + drift(grant.ttl);
            self.owed.push_back(Errand::new(op, None, until));
        }
    }
}

/// Said where nothing else was said.
pub(super) fn no_answer() -> StoreError {
    StoreError::new("no answer in time")
}
