//! How the store's answers change the state.

use std::time::Duration;

use super::acquisition::{Acquisition, Footprint};
use super::ids::EventCx;
use super::key_state::{InFlight, KeyState, Received, Sent, epoch_fault};
use super::machine::{Effect, Turnstile};
use super::pending::{Ending, PendingOp};
use super::tenure::{Contention, Tenure};
use super::time::{Point, deadline};
use super::verdict::{LeaseEnd, Refusal, WaiterVerdict};
use super::wait_queue::{Adopter, WaiterId};
use crate::StoreError;
use crate::store::contract::{Answer, Op, OpError, Outcome, lost_error};

/// W2: how long a ticket waits at most before it is entered again, in milliseconds. The jitter of a fifth
/// separates registries that began to wait at the same time.
const RECHECK: (u64, u64) = (8_000, 12_000);

impl<C: Clone> Turnstile<C> {
    /// Handles the one answer to an op.
    pub(crate) fn replied(
        &mut self,
        cx: &mut EventCx<'_>,
        op: &Op,
        result: Result<Answer, OpError>,
    ) {
        self.advance_time(cx);
        let result = result.and_then(|answer| match answer.outcome {
            Outcome::Won { epoch } => match epoch_fault(epoch) {
                Some(error) => Err(OpError::Unconfirmed(error)),
                None => Ok(answer),
            },
            _ => Ok(answer),
        });
        if let Op::Renew { owner, ttl, .. } = *op {
            if matches!(&self.state, KeyState::Held(tenure) if tenure.owner == owner) {
                self.on_renewal(cx, ttl, result);
            }
        } else if let Some(in_flight) = self.in_flight.take() {
            // A successful release does not show that the store can grant a key.
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

    /// O3: handles a grant that waited for the reply. If the connection broke, the grant is dropped:
    /// asking again recovers it.
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
                    // The lock is neither the old owner's nor ours, even if the op was sent before.
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
                    self.on_busy(cx, entered, left, upto);
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
                    // Some nodes of a quorum may have given it the lock.
                    acquisition.footprint = Footprint::Lock;
                }
                *ask_at = cx.at() + pause;
                self.on_refused(&error);
            }
            Err(OpError::Unconfirmed(error)) => {
                acquisition.footprint = Footprint::Lock;
                if acquisition.adopter.is_some() {
                    // Releasing it would lose the lease that is to be adopted. The same owner asks again,
                    // which is a new proof (S3).
                    *ask_at = cx.at() + pause;
                    self.on_refused(&error);
                } else {
                    self.on_unconfirmed(cx, &error);
                }
            }
        }
    }

    /// The store gave us the key, but too few replicas confirmed it. The key is released, and a new owner asks for it
    /// after a pause, behind everybody in the store's queue. The old owner is retired (O1).
    pub(super) fn on_unconfirmed(&mut self, cx: &mut EventCx<'_>, error: &StoreError) {
        let ask_at = cx.at() + self.pause(cx);
        self.on_refused(error);
        self.abandon(cx.at());
        if let Some(ttl) = self.waiters.first().map(|head| head.ttl) {
            let acquisition = Acquisition::new(cx.ids.owner(), ttl);
            self.state = KeyState::Acquiring {
                acquisition,
                ask_at,
            };
        }
    }

    /// The lease to be adopted is ours now. Its caller may have left meanwhile.
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
            // Its caller has left. The local waiters may not have it: they would overtake the store's
            // queue. The acquisition is abandoned next.
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
        self.waiters.mark_busy();
    }

    /// Another owner has the key. Plans the next question.
    fn on_busy(
        &mut self,
        cx: &mut EventCx<'_>,
        stands: bool,
        left: Option<Duration>,
        upto: WaiterId,
    ) {
        self.refuse_once(upto);
        self.waiters.mark_busy();
        self.end_waits(cx.at());
        let next = if stands && self.queue {
            // W2: the holder may have changed, crashed, or be a foreign lock without a ttl. The
            // connection may be dead without an error.
            let jitter = cx.ids.jitter(1, 50);
            let recheck = cx.ids.jitter(RECHECK.0, RECHECK.1);
            left.map_or(recheck, |left| left.saturating_add(jitter).min(recheck))
        } else {
            match self.rest_of_pause(cx.at()) {
                Some(rest) => rest,
                // Not before the policy has answered.
                None => self.next_repeat().unwrap_or(Duration::MAX),
            }
        };
        let mut heard = false;
        if let KeyState::Acquiring {
            acquisition,
            ask_at,
        } = &mut self.state
        {
            acquisition.is_busy = true;
            *ask_at = cx.at() + next;
            heard = std::mem::take(&mut acquisition.notices.heard) && !self.queue;
        }
        if heard {
            self.ask_early(cx);
        }
    }

    /// W7: after a notice the store is asked before the pause is over. If the key is busy, the rest of
    /// the pause follows: the policy does not count such questions.
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

    /// The rest of a pause that a notice has interrupted.
    fn rest_of_pause(&mut self, now: Point) -> Option<Duration> {
        let KeyState::Acquiring { acquisition, .. } = &mut self.state else {
            return None;
        };
        let rest = acquisition.notices.due.take().filter(|due| *due > now);
        // A waiter that asks once and came meanwhile needs a question of its own.
        let stands = self.waiters.first().is_some_and(|head| head.is_patient());
        let rest = rest.filter(|_| stands).map(|due| due.since(now));
        if rest.is_none() {
            acquisition.notices.begin_anew();
        }
        rest
    }

    /// W5: where no grants come, the policy of the first waiter sets the pause. `None`: the policy is being asked.
    pub(super) fn next_repeat(&mut self) -> Option<Duration> {
        let head = self.waiters.first();
        let head = head.filter(|head| head.is_patient() && !self.queue);
        let (Some(head), Some(id)) = (head, self.waiters.first_id()) else {
            // A waiter that asks once arrived after the attempt was sent. It gets an attempt of its own.
            return Some(Duration::ZERO);
        };
        let who = head.who.clone();
        if let KeyState::Acquiring { acquisition, .. } = &mut self.state
            && acquisition.asked_policy.replace(id) != Some(id)
        {
            self.effect(Effect::AskPolicy(who, id));
        }
        None
    }

    /// Sets the end of the policy's pause, or of the rest of it after a notice.
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
    fn pause(&self, cx: &mut EventCx<'_>) -> Duration {
        Duration::from_millis(50 << self.failures.min(5)) + cx.ids.jitter(1, 50)
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
                self.on_busy(cx, true, left, upto);
            }
            // Entering the new owner recovers it, wherever it is (S3). After an earlier sending it may
            // have a ticket or the lock.
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

    /// Tells a finished lease whether the key was ours until its end. A release that was sent twice
    /// finds the key gone if the first one was done.
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
                // A yield: the old owner has released the key, and the new one has it unconfirmed.
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
                    // Release instead. The new owner has nothing, unless the yield was sent before.
                    pending.op = Op::Release { owner: old };
                    if let KeyState::Acquiring { acquisition, .. } = &mut self.state
                        && acquisition.owner == new
                        && !pending.resent
                    {
                        acquisition.footprint = Footprint::Nothing;
                    }
                    // S1: the refused yield may have freed the lock, if it could not tell the next owner.
                    // Then it is no loss that the release does not find the lock.
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

    pub(super) fn on_down(&mut self, error: &StoreError) {
        self.down = true;
        if let KeyState::Acquiring { acquisition, .. } = &mut self.state {
            acquisition.forget_proof();
        }
        self.trouble = Some(Box::new(error.clone()));
        self.fail_waiters(error);
    }

    /// Refuses those who ask once. If waiting cannot help, refuses everybody.
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
        self.waiters.mark_answered();
    }
}
