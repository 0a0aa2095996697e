//! How the store is asked to prolong a tenure, and what its answers change.

use std::time::Duration;

use super::ids::EventCx;
use super::machine::{Effect, KeyState, Turnstile};
use super::time::Point;
use crate::store::contract::{Answer, OpError, Outcome, Owner};

impl<C: Clone> Turnstile<C> {
    pub(super) fn renew(&mut self, now: Point) {
        if let KeyState::Held(tenure) = &mut self.state
            && let Some(op) = tenure.renew(now)
        {
            self.effect(Effect::Send(op));
        }
    }

    pub(super) fn on_renewal(
        &mut self,
        cx: &mut EventCx<'_>,
        owner: Owner,
        ttl: Duration,
        result: Result<Answer, OpError>,
    ) {
        let now = cx.at();
        let tenure = match &mut self.state {
            KeyState::Held(tenure) if tenure.owner() == owner => tenure,
            _ => return,
        };
        let Some(sent) = tenure.renewal_answered() else {
            return;
        };
        let error = match result.map(|answer| answer.outcome) {
            Ok(Outcome::Renewed) => {
                let verdict = tenure.prolong(sent, ttl);
                let renews = tenure.is_renewed_again();
                self.wake_holder(verdict);
                if renews {
                    self.renew(now);
                }
                return;
            }
            Ok(Outcome::Lost) => {
                // O6: the owner is retired. Nothing is sent for it.
                let lease = tenure.lease.take();
                self.state = KeyState::Idle;
                return self.lose(lease);
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
        let pause = Duration::from_millis(50).min(ttl / 9) + cx.ids.jitter(0, 5);
        let verdict = tenure.renewal_failed(&error, now, pause);
        self.wake_holder(verdict);
    }
}
