//! What the store reports, but for its answers, and what a policy answers.

use std::time::Duration;

use super::ids::EventCx;
use super::key_state::{InFlight, KeyState, Received, Sent, epoch_fault};
use super::machine::Turnstile;
use super::verdict::Refusal;
use super::wait_queue::WaiterId;
use crate::StoreError;
use crate::store::contract::Grant;

impl<C: Clone> Turnstile<C> {
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

    /// A key was freed that we listened for, or so it is said: where no grants come, the store is
    /// asked before the policy would (W7).
    pub(crate) fn freed(&mut self, cx: &mut EventCx<'_>) {
        self.advance_time(cx);
        let asked = matches!(
            self.in_flight.as_deref(),
            Some(InFlight {
                what: Sent::Ask { .. },
                ..
            })
        );
        if let KeyState::Acquiring { acquisition, .. } = &mut self.state
            && acquisition.adopter.is_none()
            && !self.queue
        {
            if asked {
                acquisition.notices.heard = true;
            } else {
                self.ask_early(cx);
            }
        }
        self.schedule(cx);
    }

    /// The policy of a waiter has named its next pause. `None`: it has ended, and so the wait.
    pub(crate) fn on_pause(&mut self, cx: &mut EventCx<'_>, id: WaiterId, pause: Option<Duration>) {
        self.advance_time(cx);
        if let KeyState::Acquiring { acquisition, .. } = &mut self.state
            && acquisition
                .asked_policy
                .take_if(|asked| *asked == id)
                .is_some()
        {
            if pause.is_none()
                && self.waiters.first_id() == Some(id)
                && let Some((_, waiter)) = self.waiters.pop_first()
            {
                self.refuse(waiter.who, Refusal::Busy);
            }
            if let Some(pause) = pause.or_else(|| self.next_repeat()) {
                self.pause_until(cx.at() + pause);
            }
        }
        self.schedule(cx);
    }

    /// The connection is gone, or could not be made.
    pub(crate) fn down(&mut self, cx: &mut EventCx<'_>, error: &StoreError) {
        self.advance_time(cx);
        self.on_down(error);
        self.schedule(cx);
    }

    /// A new connection stands. First of two steps (O4): what is held is renewed at once, so that
    /// its holder learns the truth.
    pub(crate) fn up_renew(&mut self, cx: &mut EventCx<'_>) {
        self.advance_time(cx);
        self.renew(cx.at());
        self.schedule(cx);
    }

    /// Second step: what is owed, or else the ticket again.
    pub(crate) fn up(&mut self, cx: &mut EventCx<'_>, queue: bool) {
        self.advance_time(cx);
        self.down = false;
        self.trouble = None;
        self.failures = 0;
        self.queue = queue;
        if let KeyState::Acquiring {
            acquisition,
            ask_at,
        } = &mut self.state
        {
            acquisition.forget_proof();
            acquisition.asked_policy = None;
            *ask_at = cx.at();
        }
        self.schedule(cx);
    }
}
