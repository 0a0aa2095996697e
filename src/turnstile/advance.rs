//! What the state asks for next: a turn, an errand, a question to the store.

use super::claim::{Claim, Exposure, QUEUE_MARGIN};
use super::errand::{Ending, Errand};
use super::line::WaiterId;
use super::machine::{Flight, Sent, Standing, Turnstile, Verdict};
use super::supply::Cx;
use super::time::{Point, Span};
use crate::store::contract::Op;

/// G3: within so many milliseconds a ticket is withdrawn that nobody waits for any more.
const WITHDRAW_WITHIN: u64 = 500;

impl<C: Clone> Turnstile<C> {
    /// Does whatever the state now asks for.
    pub(super) fn advance(&mut self, cx: &mut Cx<'_>) {
        self.advance_from(cx, None);
    }

    /// The same after a turn: its lease is told what becomes of the tenure.
    pub(super) fn advance_from(&mut self, cx: &mut Cx<'_>, mut ending: Option<Ending<C>>) {
        loop {
            if let Standing::Inside(tenure) = &self.standing {
                let is_free = tenure.seat.is_none();
                // The store has the key under this owner of ours: under none that left it.
                while let Some(adopter) = self.adopters.pop_front() {
                    self.wake(adopter.waiter.who, Verdict::Lost);
                }
                if is_free {
                    self.next_turn(cx, ending.take());
                }
            }
            if self.flight.is_some() {
                return;
            }
            if self.down {
                self.abandon_unsent(cx.at());
                return;
            }
            if let Some(errand) = self.owed.front() {
                if errand.not_before > cx.at() {
                    return;
                }
                let errand = self.owed.pop_front().expect("just seen");
                self.run_errand(cx, errand);
            } else if !self.seek(cx) {
                return;
            }
        }
    }

    /// The seat of our tenure is empty: the next local waiter's, another registry's, or nobody's.
    fn next_turn(&mut self, cx: &mut Cx<'_>, ending: Option<Ending<C>>) {
        let now = cx.at();
        let Standing::Inside(tenure) = &mut self.standing else {
            unreachable!("the caller looked")
        };
        let next = self.line.first();
        if let Some(next) = next
            && tenure.may_seat(&self.rules, next, now)
        {
            let (id, waiter) = self.line.pop_first().expect("first() has seen it");
            let leads = tenure.is_new() && self.rules.passes > 0 && self.line.has_standing();
            let who = waiter.who.clone();
            let (token, deadline) = tenure.seat(id, waiter, now);
            if let Some(ending) = ending {
                self.wake(ending.who, Verdict::Released);
            }
            let deadline = deadline.moment();
            self.wake(
                who,
                Verdict::Seated {
                    token,
                    deadline,
                    leads,
                },
            );
            self.refuse_once(WaiterId(u64::MAX));
            return;
        }
        let old = tenure.owner;
        let until = tenure.runs_out(now);
        let head_ttl = self.line.first().map(|head| Span::from(head.ttl));
        match head_ttl {
            Some(ttl) if self.queue && self.line.has_standing() => {
                let mut claim = Claim::new(cx.supply.owner(), ttl);
                claim.company = tenure.company.without_others();
                let new = claim.owner;
                let ttl = ttl.duration();
                let op = Op::Yield { old, new, ttl };
                self.standing = Standing::Seeking { claim, ask_at: now };
                self.owe(cx, Errand::new(op, ending, until));
            }
            _ => {
                let op = Op::Release { owner: old };
                self.standing = Standing::Out;
                self.owe(cx, Errand::new(op, ending, until));
            }
        }
    }

    /// The last in the queue; but where that is empty and nothing keeps it from being sent, as nearly always, it is
    /// sent now: the way through the queue was an allocation.
    fn owe(&mut self, cx: &mut Cx<'_>, errand: Errand<C>) {
        if self.flight.is_none() && !self.down && self.owed.is_empty() {
            self.run_errand(cx, errand);
        } else {
            self.owed.push_back(errand);
        }
    }

    /// Sends an errand that is due.
    fn run_errand(&mut self, cx: &mut Cx<'_>, mut errand: Errand<C>) {
        if let Op::Yield { old, new, ttl } = errand.op {
            if self.line.is_empty() || !self.queue {
                // Nobody is left to yield for: give back instead, the old one first (O6).
                if errand.resent {
                    let withdraw = Op::Withdraw { owner: new, ttl };
                    let until = errand.until + QUEUE_MARGIN;
                    let settle = Errand::new(withdraw, None, until);
                    self.owed.push_front(settle);
                }
                errand.op = Op::Release { owner: old };
                self.standing = Standing::Out;
            } else if let Standing::Seeking { claim, .. } = &mut self.standing {
                claim.sent(cx.at());
                claim.exposure = Exposure::Ticket;
            }
        }
        let op = errand.op.clone();
        self.fly(cx.at(), op, Sent::Errand(errand));
    }

    /// Asks the store for the key, if that is due; false if there is nothing to send.
    fn seek(&mut self, cx: &mut Cx<'_>) -> bool {
        let now = cx.at();
        let adopter = self.adopters.front();
        match &mut self.standing {
            Standing::Inside(_) => false,
            Standing::Seeking { claim, .. } if claim.adopter != adopter.map(|first| first.id) => {
                // One who adopts goes before the line; or it has gone, or had its answer.
                self.abandon(now);
                true
            }
            Standing::Out => {
                if let Some(first) = adopter {
                    let ttl = first.waiter.ttl.into();
                    let claim = Claim::adopting(cx.supply.owner(), ttl, first.id);
                    self.standing = Standing::Seeking { claim, ask_at: now };
                    return true;
                }
                let Some(ttl) = self.line.first().map(|head| head.ttl.into()) else {
                    return false;
                };
                let claim = Claim::new(cx.supply.owner(), ttl);
                self.standing = Standing::Seeking { claim, ask_at: now };
                true
            }
            Standing::Seeking { claim, ask_at } => {
                if let Some(first) = adopter {
                    if *ask_at > now {
                        return false;
                    }
                    let (owner, ttl) = (claim.owner, claim.ttl.duration());
                    let from = first.from.clone();
                    let op = Op::Adopt { owner, from, ttl };
                    claim.sent(now);
                    let exposes = Exposure::Lock;
                    self.fly(now, op, Sent::Ask { exposes });
                    return true;
                }
                let stands = self.queue && self.line.has_standing();
                let misplaced = match claim.exposure {
                    Exposure::Ticket => !stands,
                    Exposure::Ear => stands,
                    _ => false,
                };
                let is_unwanted = self.line.is_empty();
                if is_unwanted && self.queue && !self.closed && claim.is_queued() {
                    // G3: the waits of a thousand registries may end at the same moment. Whoever comes
                    // before the withdrawal takes the ticket over, and its place in the queue.
                    let jitter = || now + cx.supply.jitter(0, WITHDRAW_WITHIN);
                    if *claim.withdraw_at.get_or_insert_with(jitter) > now {
                        return false;
                    }
                }
                if is_unwanted || misplaced {
                    self.abandon(now);
                    return true;
                }
                claim.withdraw_at = None;
                if *ask_at > now {
                    return false;
                }
                let (owner, ttl) = (claim.owner, claim.ttl.duration());
                let (op, exposes) = if stands {
                    let score = claim.score;
                    (Op::Enter { owner, ttl, score }, Exposure::Ticket)
                } else if self.line.has_standing() {
                    (Op::Listen { owner, ttl }, Exposure::Ear)
                } else {
                    (Op::Attempt { owner, ttl }, Exposure::Lock)
                };
                claim.sent(now);
                self.fly(now, op, Sent::Ask { exposes });
                true
            }
        }
    }

    /// Nobody wants the key any more while the connection is gone, perhaps for good: the claim does
    /// not wait for the next one. (A yield that is owed needs its claim, and goes by its own time.)
    fn abandon_unsent(&mut self, now: Point) {
        let yields = |errand: &Errand<C>| matches!(errand.op, Op::Yield { .. });
        let wanted = |claim: &Claim| match claim.adopter {
            Some(id) => self.adopters.iter().any(|adopter| adopter.id == id),
            None => !self.line.is_empty(),
        };
        if matches!(&self.standing, Standing::Seeking { claim, .. } if !wanted(claim))
            && !self.owed.any(yields)
        {
            self.abandon(now);
        }
    }

    /// Nobody wants the key any more, or not by way of this claim.
    pub(super) fn abandon(&mut self, now: Point) {
        let Standing::Seeking { claim, .. } = std::mem::replace(&mut self.standing, Standing::Out)
        else {
            unreachable!("only a claim is abandoned")
        };
        if let Some(op) = claim.settlement() {
            let until = now + claim.outlasted_by();
            self.owed.push_back(Errand::new(op, None, until));
        }
    }

    fn fly(&mut self, now: Point, op: Op, what: Sent<C>) {
        self.flight = Some(Box::new(Flight {
            unsent: Some(op),
            sent: now,
            upto: self.line.last_id(),
            what,
            grant: None,
        }));
    }

    /// Tells those who will not stand in line, and whom the answer speaks to, that it is busy.
    pub(super) fn refuse_once(&mut self, upto: WaiterId) {
        for waiter in self.line.take_once(upto) {
            self.wake(waiter.who, Verdict::Busy);
        }
    }
}
