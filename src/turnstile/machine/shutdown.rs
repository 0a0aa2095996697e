//! The end of a registry.

use super::Turnstile;
use super::transitions::TenureEnd;
use crate::base::clock::Moment;
use crate::turnstile::event_cx::EventCx;
use crate::turnstile::time::Point;
use crate::turnstile::verdict::{LeaseEnd, NotGranted};

impl<Caller: Clone> Turnstile<Caller> {
    /// The registry shuts down. Waiters are refused and leases are released. `grace`: until when a holder may end its
    /// work, if it watches its lease.
    pub(crate) fn close(
        &mut self,
        cx: &mut EventCx<'_, Caller>,
        grace: impl FnOnce(&Caller) -> Option<Moment>,
    ) {
        self.turn_away(cx);
        if !self.give_grace(cx, grace) {
            self.close_lease(cx);
        }
        self.schedule(cx);
    }

    /// The registry is drained. Waiters are refused, and holders continue.
    pub(crate) fn drain(&mut self, cx: &mut EventCx<'_, Caller>) {
        self.turn_away(cx);
        if self.holder().is_none() {
            self.close_lease(cx);
        }
        self.schedule(cx);
    }

    fn turn_away(&mut self, cx: &mut EventCx<'_, Caller>) {
        self.expire_due(cx);
        self.closed = true;
        self.refuse_all(cx, &NotGranted::Closed);
    }

    /// Whether there is a holder that has time to end its work.
    fn give_grace(
        &mut self,
        cx: &mut EventCx<'_, Caller>,
        grace: impl FnOnce(&Caller) -> Option<Moment>,
    ) -> bool {
        let until = self.holder().and_then(grace);
        let Some(tenure) = self.state.tenure_mut() else {
            return false;
        };
        // A second shutdown grants no more time.
        if !tenure.is_closing() {
            let Some(until) = until else {
                return false;
            };
            cx.wake_holder(tenure.close_by(until.into()));
        }
        true
    }

    /// Ends the lease, taken or not.
    pub(super) fn close_lease(&mut self, cx: &mut EventCx<'_, Caller>) {
        let Some(tenure) = self.state.tenure_mut() else {
            return;
        };
        let Some(lease) = tenure.remove_lease() else {
            return;
        };
        if !lease.is_taken() {
            return cx.refuse(lease.caller, NotGranted::Closed);
        }
        match lease.kept_if_closed(cx.at()) {
            Some(Point::FOREVER) => self.end_tenure(cx, TenureEnd::LetExpire),
            Some(until) => self.end_tenure(cx, TenureEnd::Keep(until, None)),
            None => {}
        }
        cx.end_lease(lease.caller, LeaseEnd::Closed);
    }

    /// The registry closes its session. Pending operations get no answer, so callers that wait for one get a verdict.
    pub(crate) fn disconnect(&mut self, cx: &mut EventCx<'_, Caller>) {
        // If the process was stopped, the grace period may have passed unseen.
        self.close_lease(cx);
        self.schedule(cx);
        self.end_pending_leases(cx, Point::FOREVER, &LeaseEnd::Closed);
    }
}
