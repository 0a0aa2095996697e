//! What the store's answers change.

use super::acquisition::{Acquisition, Footprint};
use super::ids::EventCx;
use super::machine::{Effect, InFlight, KeyState, Received, Sent, Turnstile};
use super::pending::{Ending, PendingOp};
use super::tenure::{Contention, Tenure};
use super::time::{Point, Span, deadline};
use super::verdict::{LeaseEnd, LeaseVerdict, Refusal, WaiterVerdict};
use super::wait_queue::{Adopter, WaiterId};
use crate::StoreError;
use crate::store::contract::{Answer, Op, OpError, Outcome, lost_error};

/// W2: how long a ticket stands at most before it is entered again, in milliseconds: 10 s, a fifth more
/// or less, so that registries that began to wait together do not ask together for ever.
const RECHECK: (u64, u64) = (8_000, 12_000);

impl<C: Clone> Turnstile<C> {
    /// The one answer to an op that was sent.
    pub(crate) fn replied(
        &mut self,
        cx: &mut EventCx<'_>,
        op: &Op,
        result: Result<Answer, OpError>,
    ) {
        self.advance_time(cx);
        if let Op::Renew { owner, ttl, .. } = *op {
            if matches!(&self.state, KeyState::Held(tenure) if tenure.owner == owner) {
                self.on_renewal(cx, ttl.into(), result);
            }
        } else if let Some(in_flight) = self.in_flight.take() {
            // That the store takes a key back does not say that it gives one.
            if result.is_ok() && !in_flight.what.gives_back() {
                self.trouble = None;
                self.failures = 0;
            }
            let InFlight {
                unsent: _,
                sent,
                upto,
                what,
                grant,
            } = *in_flight;
            match what {
                Sent::Ask { footprint } => self.on_asked(cx, footprint, sent, upto, result),
                Sent::Pending(pending) => self.on_pending(cx, pending, sent, upto, result),
            }
            self.on_held_grant(cx, grant);
        }
        self.schedule(cx);
    }

    /// The session has lost the op, which may have been done or not. Its connection is none the worse for that, and no
    /// other may come: the store is asked again after a pause.
    pub(crate) fn op_lost(&mut self, cx: &mut EventCx<'_>, op: &Op) {
        if let Op::Renew { .. } = op {
            return self.replied(cx, op, Err(OpError::Refused(lost_error())));
        }
        let (down, pause) = (self.down, self.pause(cx));
        self.replied(cx, op, Err(OpError::Unknown(lost_error())));
        self.down = down;
        self.failures += 1;
        let again = cx.at() + pause;
        if let KeyState::Acquiring { ask_at, .. } = &mut self.state {
            *ask_at = again;
        }
        if let Some(pending) = self.pending.iter_mut().next() {
            pending.not_before = again;
        }
        self.schedule(cx);
    }

    /// O3: a grant that waited for the reply. If the connection broke it is dropped: asking again
    /// makes it good.
    fn on_held_grant(&mut self, cx: &mut EventCx<'_>, grant: Option<Received>) {
        if let Some(received) = grant
            && !self.down
        {
            self.on_grant(cx, received);
        }
    }

    fn on_asked(
        &mut self,
        cx: &mut EventCx<'_>,
        footprint: Footprint,
        sent: Point,
        upto: WaiterId,
        result: Result<Answer, OpError>,
    ) {
        let entered = footprint == Footprint::Ticket;
        let pause = self.pause(cx);
        let KeyState::Acquiring {
            acquisition,
            ask_at,
        } = &mut self.state
        else {
            unreachable!("a acquisition stays until its op is answered")
        };
        match result {
            Ok(Answer { at, outcome }) => match outcome {
                Outcome::Won { epoch } => {
                    acquisition.footprint = Footprint::Lock;
                    let ttl = acquisition.ttl;
                    match acquisition.adopter {
                        Some(adopter) => self.on_adopted(cx, adopter, epoch, sent),
                        None => self.enter_tenure(cx, epoch, sent, ttl, Contention::Perhaps),
                    }
                }
                Outcome::NotOld if acquisition.adopter.is_some() => {
                    // Neither the old owner's nor ours, so nothing of ours is left, even if an
                    // earlier sending was done.
                    acquisition.footprint = Footprint::Nothing;
                    let adopter = acquisition.adopter;
                    let first = self.adopters.front().map(|first| first.id);
                    if first == adopter
                        && let Some(adopter) = self.adopters.pop_front()
                    {
                        self.refuse(adopter.waiter.who, Refusal::NothingToAdopt);
                    }
                }
                Outcome::Busy { left, score } => {
                    if entered {
                        acquisition.answered(sent, at);
                        acquisition.score = score.or(acquisition.score);
                        acquisition.footprint = Footprint::Ticket;
                    } else if score.is_some() {
                        acquisition.footprint = Footprint::Subscription;
                    } else if acquisition.footprint <= footprint {
                        acquisition.footprint = Footprint::Nothing;
                    }
                    self.on_busy(cx, entered, left.map(Span::from), upto);
                }
                Outcome::NotOld
                | Outcome::Gone { .. }
                | Outcome::Renewed
                | Outcome::Raised { .. }
                | Outcome::Lost => unreachable!("{outcome:?} to who asks"),
            },
            Err(OpError::Unknown(error)) => {
                acquisition.footprint = acquisition.footprint.max(footprint);
                self.on_down(&error);
            }
            Err(OpError::Unsent(error)) => self.on_down(&error),
            Err(OpError::Refused(error) | OpError::TooLate(error)) => {
                if acquisition.adopter.is_some() {
                    // Some nodes of a quorum may have done it.
                    acquisition.footprint = Footprint::Lock;
                }
                *ask_at = cx.at() + pause;
                self.on_refused(&error);
            }
            Err(OpError::Unconfirmed(error)) => {
                acquisition.footprint = Footprint::Lock;
                if acquisition.adopter.is_some() {
                    // Given back it would be lost to all. The same owner asks again, which proves it anew (S3).
                    *ask_at = cx.at() + pause;
                    self.on_refused(&error);
                } else {
                    self.on_unconfirmed(cx, &error);
                }
            }
        }
    }

    /// The store gave the key to our acquisition, which does not count. It is given on, and asked for again after
    /// a pause, behind all who stand in the store's queue: by another owner, since nothing revives one that
    /// is given back (O1), and its release may be late.
    pub(super) fn on_unconfirmed(&mut self, cx: &mut EventCx<'_>, error: &StoreError) {
        let ask_at = cx.at() + self.pause(cx);
        self.on_refused(error);
        self.abandon(cx.at());
        if let Some(ttl) = self.waiters.first().map(|head| head.ttl.into()) {
            let acquisition = Acquisition::new(cx.ids.owner(), ttl);
            self.state = KeyState::Acquiring {
                acquisition,
                ask_at,
            };
        }
    }

    /// What was left in the store is ours now, for one who may have gone meanwhile.
    fn on_adopted(&mut self, cx: &mut EventCx<'_>, adopter: WaiterId, epoch: u64, sent: Point) {
        let now = cx.at();
        let first = self.adopters.front().map(|first| first.id);
        let KeyState::Acquiring {
            acquisition,
            ask_at,
        } = &mut self.state
        else {
            unreachable!("a acquisition comes before a tenure")
        };
        if first != Some(adopter) {
            // Nobody is left for it. (The line has not come by it, and must not pass those who
            // stand in the store's queue.) The acquisition is abandoned next.
            return;
        }
        let (owner, ttl) = (acquisition.owner, acquisition.ttl);
        if deadline(sent, ttl) <= now {
            // D4.
            *ask_at = now;
            return;
        }
        let Adopter { id, waiter, .. } = self.adopters.pop_front().expect("just seen");
        let mut tenure = Tenure::new(owner, ttl, epoch, sent, now, Contention::Perhaps);
        let who = waiter.who.clone();
        let (token, deadline) = tenure.grant(id, waiter, now);
        self.state = KeyState::Held(tenure);
        let deadline = deadline.moment();
        let leads = self.rules.passes > 0 && self.waiters.has_patient();
        self.tell_waiter(
            who,
            WaiterVerdict::Granted {
                token,
                deadline,
                leads,
            },
        );
        self.refuse_once(WaiterId(u64::MAX));
    }

    /// Another has the key: when to ask again.
    fn on_busy(&mut self, cx: &mut EventCx<'_>, stands: bool, left: Option<Span>, upto: WaiterId) {
        self.refuse_once(upto);
        let next = if stands && self.queue {
            // W2: the holder may have changed, crashed, or be a foreign lock with no ttl at all;
            // the connection may be dead without saying so.
            let jitter = cx.ids.jitter(1, 50);
            let recheck = cx.ids.jitter(RECHECK.0, RECHECK.1);
            left.map_or(recheck, |left| (left + jitter).min(recheck))
        } else {
            match self.rest_of_pause(cx.at()) {
                Some(rest) => rest,
                // Until the policy has answered.
                None => self.next_repeat().unwrap_or(Span::MAX),
            }
        };
        let mut heard = false;
        if let KeyState::Acquiring {
            acquisition,
            ask_at,
        } = &mut self.state
        {
            *ask_at = cx.at() + next;
            heard = std::mem::take(&mut acquisition.notices.heard) && !self.queue;
        }
        if heard {
            self.ask_early(cx);
        }
    }

    /// W7: after a notice the store is asked before the pause is over, which goes on if that is in
    /// vain: the policy does not count such questions.
    pub(super) fn ask_early(&mut self, cx: &mut EventCx<'_>) {
        if let KeyState::Acquiring {
            acquisition,
            ask_at,
        } = &mut self.state
            && *ask_at > cx.at()
            && acquisition.notices.due.is_none()
        {
            let (least, most) = acquisition.notices.pause();
            let early = cx.at() + cx.ids.jitter(least, most);
            if early < *ask_at {
                acquisition.notices.due = Some(*ask_at);
                *ask_at = early;
            }
        }
    }

    /// What is left of a pause that a notice has cut short in vain.
    fn rest_of_pause(&mut self, now: Point) -> Option<Span> {
        let KeyState::Acquiring { acquisition, .. } = &mut self.state else {
            return None;
        };
        let rest = acquisition.notices.due.take().filter(|due| *due > now);
        // One who asks once and came meanwhile has a question of its own.
        let stands = self.waiters.first().is_some_and(|head| head.is_patient());
        let rest = rest.filter(|_| stands).map(|due| due.since(now));
        if rest.is_none() {
            acquisition.notices.begin_anew();
        }
        rest
    }

    /// W5: where no grants come, the policy of the first in line says how long to pause. `None`: it is asked.
    pub(super) fn next_repeat(&mut self) -> Option<Span> {
        let head = self.waiters.first();
        let head = head.filter(|head| head.is_patient() && !self.queue);
        let (Some(head), Some(id)) = (head, self.waiters.first_id()) else {
            // One who asks once arrived after the attempt was sent, and gets one of its own.
            return Some(Span::ZERO);
        };
        let who = head.who.clone();
        if let KeyState::Acquiring { acquisition, .. } = &mut self.state
            && acquisition.asked_policy.replace(id) != Some(id)
        {
            self.effect(Effect::AskPolicy(who, id));
        }
        None
    }

    /// The policy's pause ends then, unless a notice has cut it short: then the rest of it does.
    pub(super) fn pause_until(&mut self, end: Point) {
        if let KeyState::Acquiring {
            acquisition,
            ask_at,
        } = &mut self.state
        {
            *acquisition.notices.due.as_mut().unwrap_or(ask_at) = end;
        }
    }

    fn on_refused(&mut self, error: &StoreError) {
        self.failures += 1;
        self.trouble = Some(Box::new(error.clone()));
        self.fail_waiters(error);
    }

    /// The pause after a refusal: 50 ms, doubled with each, up to 1.6 s.
    fn pause(&self, cx: &mut EventCx<'_>) -> Span {
        Span::millis(50 << self.failures.min(5)) + cx.ids.jitter(1, 50)
    }

    fn on_pending(
        &mut self,
        cx: &mut EventCx<'_>,
        mut pending: PendingOp<C>,
        sent: Point,
        upto: WaiterId,
        result: Result<Answer, OpError>,
    ) {
        let answer = match result {
            Ok(answer) => answer,
            Err(error) => return self.on_pending_failed(cx, pending, error),
        };
        let Answer { at, outcome } = answer;
        let ours = match outcome {
            Outcome::Gone { held } => held,
            Outcome::NotOld => false,
            Outcome::Won { .. } | Outcome::Busy { .. } => true,
            Outcome::Renewed | Outcome::Raised { .. } | Outcome::Lost => {
                unreachable!("{outcome:?} to {:?}", pending.op)
            }
        };
        if let Some(ending) = pending.ending.take() {
            self.tell_end(ending, ours, pending.resent);
        }
        if !matches!(pending.op, Op::Yield { .. }) {
            return;
        }
        let KeyState::Acquiring {
            acquisition,
            ask_at,
        } = &mut self.state
        else {
            unreachable!("a yield leaves a acquisition")
        };
        match outcome {
            Outcome::Won { epoch } => {
                acquisition.footprint = Footprint::Lock;
                let (ttl, contention) = (acquisition.ttl, acquisition.contention);
                self.enter_tenure(cx, epoch, sent, ttl, contention);
            }
            Outcome::Busy { left, score } => {
                acquisition.answered(sent, at);
                acquisition.score = score;
                acquisition.footprint = Footprint::Ticket;
                self.on_busy(cx, true, left.map(Span::from), upto);
            }
            // Wherever the new owner is, entering it makes it good (S3). If this was sent before,
            // it may well be somewhere.
            Outcome::NotOld => {
                if !pending.resent {
                    acquisition.footprint = Footprint::Nothing;
                }
                *ask_at = cx.at();
            }
            Outcome::Gone { .. } | Outcome::Renewed | Outcome::Raised { .. } | Outcome::Lost => {
                unreachable!("{outcome:?} to a yield")
            }
        }
    }

    /// A finished lease: was the key ours until its end? Gone or another's is what the second
    /// sending of a release finds when the first was done.
    fn tell_end(&mut self, ending: Ending<C>, ours: bool, resent: bool) {
        let end = if ours || resent {
            LeaseEnd::Released
        } else {
            LeaseEnd::Lost
        };
        self.end_lease(ending.who, end);
    }

    fn on_pending_failed(
        &mut self,
        cx: &mut EventCx<'_>,
        mut pending: PendingOp<C>,
        error: OpError,
    ) {
        match error {
            OpError::Unknown(error) => {
                pending.resent = true;
                self.pending.push_front(pending);
                self.on_down(&error);
            }
            OpError::Unsent(error) => {
                self.pending.push_front(pending);
                self.on_down(&error);
            }
            OpError::Unconfirmed(error) => {
                // A yield's: the old owner has let go, the new one has it and it does not count.
                if let Some(ending) = pending.ending.take() {
                    self.tell_end(ending, true, pending.resent);
                }
                if let KeyState::Acquiring { acquisition, .. } = &mut self.state
                    && matches!(pending.op, Op::Yield { new, .. } if new == acquisition.owner)
                {
                    acquisition.footprint = Footprint::Lock;
                    self.on_unconfirmed(cx, &error);
                }
            }
            OpError::Refused(error) | OpError::TooLate(error) => {
                let pause = self.pause(cx);
                self.on_refused(&error);
                if let Op::Yield { old, new, .. } = pending.op {
                    // Release instead; the new owner has nothing, unless a first sending was done.
                    pending.op = Op::Release { owner: old };
                    if let KeyState::Acquiring { acquisition, .. } = &mut self.state
                        && acquisition.owner == new
                        && !pending.resent
                    {
                        acquisition.footprint = Footprint::Nothing;
                    }
                    // S1: it may have let the lock go, when it could not tell the next owner. That the
                    // release does not find it is no loss then.
                    pending.resent = true;
                    self.pending.push_front(pending);
                } else if error.is_retryable() {
                    pending.not_before = cx.at() + pause;
                    self.pending.push_front(pending);
                } else if let Some(ending) = pending.ending.take() {
                    self.end_lease(ending.who, LeaseEnd::Failed(error));
                }
            }
        }
    }

    fn on_renewal(&mut self, cx: &mut EventCx<'_>, ttl: Span, result: Result<Answer, OpError>) {
        let now = cx.at();
        let again = now + Span::millis(50).min(ttl / 9) + cx.ids.jitter(0, 5);
        let KeyState::Held(tenure) = &mut self.state else {
            unreachable!("the caller looked")
        };
        let Some(sent) = tenure.renewing.take() else {
            return;
        };
        match result.map(|answer| answer.outcome) {
            Ok(Outcome::Renewed) => {
                if let Some((who, verdict)) = tenure.prolong(sent, deadline(sent, ttl)) {
                    self.tell_holder(who, verdict);
                }
                if let KeyState::Held(tenure) = &self.state
                    && (tenure.renew_again || tenure.has_extension())
                {
                    self.renew(now);
                }
            }
            Ok(Outcome::Lost) => {
                // O6: the owner is retired, and nothing is sent.
                let KeyState::Held(tenure) = std::mem::replace(&mut self.state, KeyState::Idle)
                else {
                    unreachable!("seen above")
                };
                if let Some(lease) = tenure.lease {
                    self.lose(lease);
                }
            }
            Ok(
                outcome @ (Outcome::Won { .. }
                | Outcome::Busy { .. }
                | Outcome::NotOld
                | Outcome::Gone { .. }
                | Outcome::Raised { .. }),
            ) => unreachable!("{outcome:?} to a renewal"),
            // Unknown changes nothing: it is tried again until the deadline, which decides. A new
            // connection renews at once (O4).
            Err(error) => {
                let again = match error {
                    // Each time half of what is left later: the store has more to do than it can.
                    OpError::TooLate(_) => again.max(now + tenure.deadline.since(now) / 2),
                    _ => again,
                };
                if let OpError::Refused(_) | OpError::TooLate(_) = error {
                    tenure.renew_after(again);
                }
                tenure.retry_extension_at(again);
                if let Some(lease) = tenure.lease.as_ref().filter(|lease| lease.is_taken()) {
                    let who = lease.who.clone();
                    self.tell_holder(who, LeaseVerdict::Unrenewed(error.store_error().clone()));
                }
            }
        }
    }

    pub(super) fn on_down(&mut self, error: &StoreError) {
        self.down = true;
        if let KeyState::Acquiring { acquisition, .. } = &mut self.state {
            acquisition.forget_proof();
        }
        self.trouble = Some(Box::new(error.clone()));
        self.fail_waiters(error);
    }

    /// Those who will not wait are told what the store said; all are, if waiting will not mend it.
    pub(super) fn fail_waiters(&mut self, error: &StoreError) {
        let failed = if error.is_retryable() {
            self.waiters.take_once(WaiterId(u64::MAX))
        } else {
            let line = std::iter::from_fn(|| self.waiters.pop_first()).map(|(_, waiter)| waiter);
            let adopters = std::iter::from_fn(|| self.adopters.pop_front());
            let adopters = adopters.map(|adopter| adopter.waiter);
            adopters.chain(line).collect()
        };
        for waiter in failed {
            self.refuse(waiter.who, Refusal::Failed(error.clone()));
        }
    }
}
