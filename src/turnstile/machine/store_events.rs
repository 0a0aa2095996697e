//! What the store reports: answers, grants, and the state of the connection.

use std::mem;
use std::time::Duration;

use super::acquisition::{Acquisition, Footprint};
use super::transitions::TenureEnd;
use super::{EarlyGrant, InFlight, LastError, Turnstile};
use crate::base::StoreError;
use crate::base::token::is_epoch;
use crate::store::contract::{Answer, Grant, Op, OpError, Outcome, Owner, dropped_error};
use crate::turnstile::event_cx::EventCx;
use crate::turnstile::ids::Ids;
use crate::turnstile::time::drift;
use crate::turnstile::verdict::NotGranted;

/// F2: the error if an epoch is too large for tokens. The key is then released.
fn epoch_fault(epoch: u64) -> Option<StoreError> {
    let fault = || format!("epoch {epoch} out of range: its fencing tokens would not fit an i64");
    (!is_epoch(epoch)).then(|| StoreError::lasting(fault()))
}

impl<Caller: Clone> Turnstile<Caller> {
    /// Handles the one answer to an op.
    pub(crate) fn replied(
        &mut self,
        cx: &mut EventCx<'_, Caller>,
        op: &Op,
        mut result: Result<Answer, OpError>,
    ) {
        self.advance_time(cx);
        if let Ok(Answer { outcome, .. }) = &result
            && let Outcome::Won { epoch } = *outcome
            && let Some(fault) = epoch_fault(epoch)
        {
            result = Err(OpError::Unconfirmed(fault));
        }
        if let Op::Renew { owner, ttl, .. } = *op {
            self.on_renewal(cx, owner, ttl, result);
        } else if let Some(mut in_flight) = self.in_flight.take() {
            match result {
                Ok(answer) => self.on_answer(cx, &in_flight, &answer),
                Err(error) => self.on_failure(cx, &in_flight, error),
            }
            // O3: if the connection broke, the grant is dropped. Asking again recovers it.
            if let Some(received) = in_flight.grant.take() {
                self.on_grant(cx, *received);
            }
        }
        self.schedule(cx);
    }

    fn on_answer(&mut self, cx: &mut EventCx<'_, Caller>, in_flight: &InFlight, answer: &Answer) {
        if in_flight.is_pending {
            let is_ours = match answer.outcome {
                Outcome::Gone { held } => held,
                Outcome::Won { .. } | Outcome::Busy { .. } => true,
                Outcome::NotOld => false,
                Outcome::Renewed | Outcome::Raised { .. } | Outcome::Lost => {
                    unreachable!("{answer:?} to a pending operation")
                }
            };
            self.pending_done(cx, is_ours);
        }
        if let Some(footprint) = in_flight.asks {
            // A successful release does not show that the store can grant a key.
            self.last_error = None;
            self.failures = 0;
            self.on_asked(cx, footprint, in_flight, answer);
        }
    }

    fn on_failure(&mut self, cx: &mut EventCx<'_, Caller>, in_flight: &InFlight, error: OpError) {
        let adopts = self.state.acquisition().is_some_and(Acquisition::adopts);
        match error {
            OpError::Unknown(error) => {
                if in_flight.is_pending {
                    self.pending_unknown();
                }
                if let Some(acquisition) = self.state.acquisition_mut()
                    && let Some(footprint) = in_flight.asks
                {
                    acquisition.raise_footprint(footprint);
                }
                self.on_down(cx, &error);
            }
            OpError::Unsent(error) => self.on_down(cx, &error),
            OpError::Unconfirmed(error) if in_flight.asks.is_some() && !adopts => {
                if in_flight.is_pending {
                    // The old owner of a yield has released the key.
                    self.pending_done(cx, true);
                }
                self.on_unconfirmed(cx, Footprint::Lock, &error);
            }
            OpError::Refused(error) | OpError::TooLate(error) | OpError::Unconfirmed(error) => {
                if in_flight.is_pending {
                    self.on_pending_refused(cx, error);
                } else {
                    self.on_question_refused(cx, &error);
                }
            }
        }
    }

    fn on_renewal(
        &mut self,
        cx: &mut EventCx<'_, Caller>,
        owner: Owner,
        ttl: Duration,
        result: Result<Answer, OpError>,
    ) {
        let now = cx.at();
        let tenure = self.state.tenure_mut();
        let Some(tenure) = tenure.filter(|tenure| tenure.owner() == owner) else {
            // The lock lasts for so long at most. If no answer came, the store may still prolong it until then.
            let lasts = ttl + drift(ttl);
            let until = match result {
                Err(OpError::Unknown(_)) => now + lasts + lasts,
                _ => now + lasts,
            };
            return self.prolong_pending(owner, until);
        };
        let error = match result.map(|answer| answer.outcome) {
            Ok(Outcome::Renewed) => {
                cx.wake_holder(tenure.prolong(ttl));
                if tenure.is_renewed_again() {
                    self.renew(cx);
                }
                return;
            }
            Ok(Outcome::Lost) => {
                let lost = tenure.lose_lease();
                self.end_tenure(cx, TenureEnd::Lost);
                return cx.tell_lost(lost);
            }
            Ok(
                outcome @ (Outcome::Won { .. }
                | Outcome::Busy { .. }
                | Outcome::NotOld
                | Outcome::Gone { .. }
                | Outcome::Raised { .. }),
            ) => unreachable!("{outcome:?} to a renewal"),
            Err(error) => error,
        };
        let spread = tenure.spread(cx).max(Duration::from_millis(5));
        let pause = Duration::from_millis(50).min(ttl / 9) + cx.ids.within(spread);
        cx.wake_holder(tenure.renewal_failed(&error, now, pause));
    }

    /// The session has dropped the op, which may have been done or not. The connection may still be up, so no `Up` event
    /// will trigger a retry. So the turnstile sends the op again after a pause.
    pub(crate) fn op_dropped(&mut self, cx: &mut EventCx<'_, Caller>, op: &Op) {
        if let Op::Renew { .. } = op {
            return self.replied(cx, op, Err(OpError::Refused(dropped_error())));
        }
        let (down, again) = (self.down, cx.at() + self.retry_pause(cx));
        self.replied(cx, op, Err(OpError::Unknown(dropped_error())));
        self.down = down;
        self.failures += 1;
        if let Some(acquisition) = self.state.acquisition_mut() {
            acquisition.plan_question(again);
        }
        if let Some(pending) = self.pending.front_mut() {
            pending.send_again(again);
        }
        self.schedule(cx);
    }

    /// The store gave the key to one of our tickets. `fault`: why that does not count, if it does not.
    pub(crate) fn grant_received(
        &mut self,
        cx: &mut EventCx<'_, Caller>,
        grant: Grant,
        fault: Option<StoreError>,
    ) {
        self.advance_time(cx);
        let at = cx.at();
        let fault = fault.or_else(|| epoch_fault(grant.epoch));
        self.on_grant(cx, EarlyGrant { at, grant, fault });
        self.schedule(cx);
    }

    /// The connection is gone, or could not be made.
    pub(crate) fn down(&mut self, cx: &mut EventCx<'_, Caller>, error: &StoreError) {
        self.advance_time(cx);
        self.on_down(cx, error);
        self.schedule(cx);
    }

    /// The connection is up again. Step 1 of 2 (O4): renew each held lease, of many at moments of their own (G5). A lost
    /// lease is then noticed. `elsewhere`: it leads to another server than the last one did.
    pub(crate) fn up_renew(&mut self, cx: &mut EventCx<'_, Caller>, elsewhere: bool) {
        self.advance_time(cx);
        let away_since = self.away_since();
        if let Some(tenure) = self.state.tenure_mut() {
            if elsewhere {
                tenure.note_other_server();
            }
            if !tenure.plan_renewal(cx, away_since, Ids::place_in) {
                self.renew(cx);
            }
        }
        self.schedule(cx);
    }

    /// Second step: pending operations, or else the ticket again.
    pub(crate) fn up(&mut self, cx: &mut EventCx<'_, Caller>, queue: bool) {
        self.advance_time(cx);
        self.down = false;
        self.last_error = None;
        self.failures = 0;
        self.store_has_queue = queue;
        if let Some(acquisition) = self.state.acquisition_mut() {
            acquisition.on_up(cx.at());
        }
        self.schedule(cx);
    }

    fn on_down(&mut self, cx: &mut EventCx<'_, Caller>, error: &StoreError) {
        if !mem::replace(&mut self.down, true) {
            self.last_error = None;
        }
        if let Some(acquisition) = self.state.acquisition_mut() {
            acquisition.forget_proof();
        }
        self.fail_waiters(cx, error);
    }

    pub(super) fn on_refused(&mut self, cx: &mut EventCx<'_, Caller>, error: &StoreError) {
        self.failures += 1;
        self.fail_waiters(cx, error);
    }

    /// Refuses waiters that ask once. If waiting cannot help, refuses everybody.
    fn fail_waiters(&mut self, cx: &mut EventCx<'_, Caller>, error: &StoreError) {
        let last_error = self.last_error.as_ref();
        let since = last_error.map_or(cx.at(), |last_error| last_error.since);
        self.last_error = Some(Box::new(LastError {
            error: error.clone(),
            since,
        }));
        let refusal = NotGranted::Failed(error.clone());
        if error.is_retryable() {
            self.refuse_once(cx, &refusal);
            self.waiters.mark_answered();
            self.tell_waiting(cx);
        } else {
            self.refuse_all(cx, &refusal);
        }
    }

    /// The pause after a refusal: 50 ms, doubled with each, up to 1.6 s.
    pub(super) fn retry_pause(&self, cx: &mut EventCx<'_, Caller>) -> Duration {
        Duration::from_millis(50 << self.failures.min(5)) + cx.ids.jitter(1, 50)
    }
}
