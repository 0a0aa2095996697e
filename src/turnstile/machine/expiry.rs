//! What expires: waits, grants that nobody takes, leases, tenures and pending operations.

use super::pending::PendingOp;
use super::{Effect, KeyState, Turnstile};
use crate::store::contract::Op;
use crate::turnstile::ids::{EventCx, Ids};
use crate::turnstile::tenure::{LocalLease, Tenure};
use crate::turnstile::time::Point;
use crate::turnstile::verdict::Refusal;

impl<Caller: Clone> Turnstile<Caller> {
    /// Expires what is over, and sends the renewal that is due. Every event calls this first. So no event handler sees
    /// an expired lease.
    pub(super) fn advance_time(&mut self, cx: &mut EventCx<'_>) {
        self.expire_due(cx);
        let now = cx.at();
        let KeyState::Held(tenure) = &mut self.state else {
            return;
        };
        let late = tenure.renewal_late(now);
        if !self.down && tenure.has_missed_renewal(now) {
            tenure.plan_renewal(cx, Ids::within);
        }
        let renews = !self.down && tenure.is_renewal_due(cx);
        self.wake_holder(late);
        if renews {
            self.renew(cx);
        }
    }

    /// Asks the store to prolong the tenure, if there is a lease in it.
    pub(super) fn renew(&mut self, cx: &EventCx<'_>) {
        if let KeyState::Held(tenure) = &mut self.state
            && let Some(op) = tenure.renew(cx)
        {
            self.effect(Effect::Send(op));
        }
    }

    /// Expires what is over. `finish` calls this instead of `advance_time`, because a lease that ends needs no
    /// renewal. [`advance_time`](Self::advance_time).
    pub(super) fn expire_due(&mut self, cx: &mut EventCx<'_>) {
        let now = cx.at();
        self.end_waits(now);
        while let Some(at) = self.adopters.iter().position(|it| self.end_of(it) <= now)
            && let Some(adopter) = self.adopters.remove(at)
        {
            let store_error = self.store_error();
            self.refuse(adopter.waiter.caller, Refusal::Failed(store_error));
        }
        self.expire_pending(now);
        let KeyState::Held(tenure) = &mut self.state else {
            return;
        };
        let away_since = self.trouble.as_ref().filter(|_| self.down);
        let away_since = away_since.map(|trouble| trouble.since);
        let cause = |tenure: &Tenure<Caller>, lease: &LocalLease<Caller>| {
            tenure.cause_of_expiry(lease, now, away_since)
        };
        if tenure.is_over(now) {
            // D5: the store may hold the key for a little longer.
            let owner = tenure.owner();
            let until = tenure.expires_by(now);
            let lease = tenure.remove_lease();
            let lost = lease.map(|lease| (cause(tenure, &lease), lease));
            let kept_until = lost.as_ref().and_then(|(_, lease)| lease.kept_if_lost(now));
            if let Some(kept_until) = kept_until {
                self.keep(now, kept_until, None);
            } else {
                self.state = KeyState::Idle;
                let release = PendingOp::new(Op::Release { owner }, None, until);
                self.pending.push_back(release);
            }
            if let Some((cause, lease)) = lost {
                self.lose(lease, cause);
            }
        } else if let Some(lease) = tenure.remove_expired_lease(now) {
            let cause = cause(tenure, &lease);
            if let Some(kept_until) = lease.kept_if_lost(now) {
                self.keep(now, kept_until, None);
            }
            self.lose(lease, cause);
        } else if tenure.is_grace_over(now) {
            self.close_lease(cx);
        }
    }

    /// Refuses those whose wait is over: others hold the key, or the store has failed.
    pub(super) fn end_waits(&mut self, now: Point) {
        while let Some((waiter, busy)) = self.waiters.pop_ended(now) {
            let refusal = if busy && self.trouble.is_none() {
                Refusal::Busy(self.holding(now))
            } else {
                Refusal::Failed(self.store_error())
            };
            self.refuse(waiter.caller, refusal);
        }
    }
}
