//! How the store is asked to prolong a tenure, and what its answers change.

use std::time::Duration;

use super::ids::EventCx;
use super::key_state::KeyState;
use super::machine::{Effect, Turnstile};
use super::time::{Point, deadline};
use super::verdict::LeaseVerdict;
use crate::store::contract::{Answer, Op, OpError, Outcome};

impl<C: Clone> Turnstile<C> {
    pub(super) fn renew(&mut self, now: Point) {
        let KeyState::Held(tenure) = &mut self.state else {
            return;
        };
        if tenure.renewing.is_some() {
            // It may have asked for less, for the lease before this one.
            tenure.renew_again = true;
        } else if let Some(ttl) = tenure.wanted(now) {
            tenure.renew_again = false;
            tenure.asked(now, ttl);
            let owner = tenure.owner;
            let within = tenure.deadline.since(now);
            let op = Op::Renew { owner, ttl, within };
            self.effect(Effect::Send(op));
        }
    }

    pub(super) fn on_renewal(
        &mut self,
        cx: &mut EventCx<'_>,
        ttl: Duration,
        result: Result<Answer, OpError>,
    ) {
        let now = cx.at();
        let again = now + Duration::from_millis(50).min(ttl / 9) + cx.ids.jitter(0, 5);
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
                // O6: the owner is retired. Nothing is sent for it.
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
            // An unknown outcome changes nothing. The renewal is repeated until the deadline, and at
            // once on a new connection (O4).
            Err(error) => {
                let again = match error {
                    // The store is overloaded: wait for half of the time that is left.
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
}
