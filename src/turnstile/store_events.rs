//! What the store reports: answers, grants, and the state of the connection.

use std::time::Duration;

use super::ids::EventCx;
use super::machine::{KeyState, Received, Turnstile};
use super::verdict::Refusal;
use super::wait_queue::WaiterId;
use crate::StoreError;
use crate::store::contract::{Answer, Grant, Op, OpError, Outcome, lost_error};
use crate::token::is_epoch;

/// F2: why a tenure with this epoch would not count, which gives the key back. Its tokens would not grow.
fn epoch_fault(epoch: u64) -> Option<StoreError> {
    let fault = || format!("epoch {epoch} out of range: its fencing tokens would not fit an i64");
    (!is_epoch(epoch)).then(|| StoreError::lasting(fault()))
}

impl<C: Clone> Turnstile<C> {
    /// Handles the one answer to an op.
    pub(crate) fn replied(
        &mut self,
        cx: &mut EventCx<'_>,
        op: &Op,
        result: Result<Answer, OpError>,
    ) {
        self.advance_time(cx);
        let fault = match &result {
            Ok(Answer {
                outcome: Outcome::Won { epoch },
                ..
            }) => epoch_fault(*epoch),
            _ => None,
        };
        let result = fault.map_or(result, |fault| Err(OpError::Unconfirmed(fault)));
        if let Op::Renew { owner, ttl, .. } = *op {
            self.on_renewal(cx, owner, ttl, result);
        } else if let Some(mut in_flight) = self.in_flight.take() {
            // A successful release does not show that the store can grant a key.
            let asks = in_flight.is_question() || matches!(op, Op::Yield { .. });
            if result.is_ok() && asks {
                self.trouble = None;
                self.failures = 0;
            }
            match in_flight.question {
                Some(footprint) => self.on_asked(cx, footprint, &in_flight, result),
                None => self.on_pending(cx, &in_flight, result),
            }
            // O3: if the connection broke, the grant is dropped. Asking again recovers it.
            if let Some(received) = in_flight.grant.take() {
                self.on_grant(cx, received);
            }
        }
        self.schedule(cx);
    }

    /// The session has lost the op, which may have been done or not. Its connection is none the worse for that, and no
    /// other may come: the store is asked again after a pause.
    pub(crate) fn op_lost(&mut self, cx: &mut EventCx<'_>, op: &Op) {
        if let Op::Renew { .. } = op {
            return self.replied(cx, op, Err(OpError::Refused(lost_error())));
        }
        let (down, again) = (self.down, cx.at() + self.retry_pause(cx));
        self.replied(cx, op, Err(OpError::Unknown(lost_error())));
        self.down = down;
        self.failures += 1;
        if let KeyState::Acquiring(acquisition) = &mut self.state {
            acquisition.ask_at = again;
        }
        if let Some(pending) = self.pending.front_mut() {
            pending.retry_at = Some(again);
        }
        self.schedule(cx);
    }

    /// The store gave the key to one of our tickets. `doubt`: why that does not count, if it does not.
    pub(crate) fn grant_received(
        &mut self,
        cx: &mut EventCx<'_>,
        grant: Grant,
        doubt: Option<StoreError>,
    ) {
        self.advance_time(cx);
        let at = cx.at();
        let doubt = doubt.or_else(|| epoch_fault(grant.epoch));
        self.on_grant(cx, Received { at, grant, doubt });
        self.schedule(cx);
    }

    /// The connection is gone, or could not be made.
    pub(crate) fn down(&mut self, cx: &mut EventCx<'_>, error: &StoreError) {
        self.advance_time(cx);
        self.on_down(error);
        self.schedule(cx);
    }

    /// The connection is up again. First of two steps (O4): what is held is renewed at once, so that
    /// its holder learns the truth.
    pub(crate) fn up_renew(&mut self, cx: &mut EventCx<'_>) {
        self.advance_time(cx);
        self.renew(cx.at());
        self.schedule(cx);
    }

    /// Second step: pending operations, or else the ticket again.
    pub(crate) fn up(&mut self, cx: &mut EventCx<'_>, queue: bool) {
        self.advance_time(cx);
        self.down = false;
        self.trouble = None;
        self.failures = 0;
        self.queue = queue;
        if let KeyState::Acquiring(acquisition) = &mut self.state {
            acquisition.ask_anew(cx.at());
        }
        self.schedule(cx);
    }

    pub(super) fn on_down(&mut self, error: &StoreError) {
        self.down = true;
        if let KeyState::Acquiring(acquisition) = &mut self.state {
            acquisition.forget_proof();
        }
        self.fail_waiters(error);
    }

    pub(super) fn on_refused(&mut self, error: &StoreError) {
        self.failures += 1;
        self.fail_waiters(error);
    }

    /// Refuses those who ask once. If waiting cannot help, refuses everybody.
    fn fail_waiters(&mut self, error: &StoreError) {
        self.trouble = Some(Box::new(error.clone()));
        let refusal = Refusal::Failed(error.clone());
        if error.is_retryable() {
            self.refuse_once(WaiterId::LAST, &refusal);
            self.waiters.mark_answered();
        } else {
            self.refuse_all(&refusal);
        }
    }

    /// The pause after a refusal: 50 ms, doubled with each, up to 1.6 s.
    pub(super) fn retry_pause(&self, cx: &mut EventCx<'_>) -> Duration {
        Duration::from_millis(50 << self.failures.min(5)) + cx.ids.jitter(1, 50)
    }
}
