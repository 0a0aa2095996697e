//! What to do next: grant a turn, send a pending operation, or ask the store.

use super::acquisition::Footprint;
use super::pending::Ending;
use super::timers::Timer;
use super::transitions::TenureEnd;
use super::{InFlight, Turnstile};
use crate::store::contract::Op;
use crate::turnstile::event_cx::{Effect, EventCx};
use crate::turnstile::verdict::{LeaseEnd, NotGranted, WaiterVerdict};
use crate::turnstile::wait_queue::{Waiter, WaiterId};

impl<Caller: Clone> Turnstile<Caller> {
    /// Does what the state requires. Every event ends with it.
    pub(super) fn schedule(&mut self, cx: &mut EventCx<'_, Caller>) {
        loop {
            if let Some(tenure) = self.state.tenure() {
                let has_no_lease = tenure.lease().is_none();
                // Our own owner holds the key. So there is no detached lease to adopt.
                self.refuse_adopters(cx, &NotGranted::NothingToAdopt);
                if has_no_lease {
                    self.next_turn(cx, None);
                }
            }
            if self.in_flight.is_some() {
                return;
            }
            if self.down {
                return self.abandon_unwanted(cx);
            }
            if self.is_due(Timer::SendPending, cx.at()) {
                self.send_pending(cx);
            } else if !self.pending.is_empty() || !self.ask_store(cx) {
                return;
            }
        }
    }

    /// Nobody holds the key in our tenure: it is passed to the next local waiter, if that is allowed. Otherwise it is
    /// yielded if waiters remain, and released if not. `ending`: the turn that has just ended, if this is not the first of
    /// a tenure.
    pub(super) fn next_turn(
        &mut self,
        cx: &mut EventCx<'_, Caller>,
        ending: Option<Ending<Caller>>,
    ) {
        let Some(tenure) = self.state.tenure() else {
            return;
        };
        let next = self.waiters.first();
        if next.is_some_and(|next| tenure.may_grant(&cx.ids.rules, next, cx.at()))
            && let Some((id, waiter)) = self.waiters.pop_first()
        {
            if let Some(ending) = ending {
                cx.end_lease(ending.caller, LeaseEnd::Released);
            }
            return self.grant_lease(cx, id, waiter);
        }
        let end = match self.waiters.first() {
            // Whoever asks once has been refused: a lease was here.
            Some(next) if self.store_has_queue => TenureEnd::Yield(next.ttl, ending),
            _ => TenureEnd::Release(ending),
        };
        self.end_tenure(cx, end);
    }

    /// Grants the key to a waiter in our tenure.
    pub(super) fn grant_lease(
        &mut self,
        cx: &mut EventCx<'_, Caller>,
        id: WaiterId,
        waiter: Waiter<Caller>,
    ) {
        let Some(tenure) = self.state.tenure_mut() else {
            return;
        };
        let caller = waiter.caller.clone();
        let (token, deadline) = tenure.grant(id, waiter, cx.at());
        let verdict = WaiterVerdict::Granted {
            token,
            deadline: deadline.moment(),
            needs_another_poll: !token.is_passed()
                && cx.ids.rules.local_passes > 0
                && self.waiters.has_patient(),
        };
        cx.wake_waiter(caller, verdict);
        self.refuse_busy(cx, WaiterId::LAST);
        self.mark_busy(cx);
    }

    /// `asks`, `is_pending`: see [`InFlight`].
    pub(super) fn send_op(
        &mut self,
        cx: &mut EventCx<'_, Caller>,
        op: Op,
        asks: Option<Footprint>,
        is_pending: bool,
    ) {
        self.in_flight = Some(InFlight {
            asks,
            is_pending,
            sent: cx.at(),
            newest_waiter: self.waiters.last_id(),
            grant: None,
        });
        cx.emit(Effect::Send(op));
    }

    /// Asks the store to prolong the tenure, if there is a lease in it.
    pub(super) fn renew(&mut self, cx: &mut EventCx<'_, Caller>) {
        if let Some(tenure) = self.state.tenure_mut()
            && let Some(op) = tenure.renew(cx)
        {
            cx.emit(Effect::Send(op));
        }
    }

    /// All present waiters wait for others, which have the key.
    pub(super) fn mark_busy(&mut self, cx: &mut EventCx<'_, Caller>) {
        self.waiters.mark_busy();
        self.tell_waiting(cx);
    }

    /// Those that wait now, and want to know it.
    pub(super) fn tell_waiting(&mut self, cx: &mut EventCx<'_, Caller>) {
        for caller in self.waiters.take_untold() {
            cx.wake_waiter(caller, WaiterVerdict::Waits);
        }
    }

    /// Refuses waiters that ask once.
    pub(super) fn refuse_once(&mut self, cx: &mut EventCx<'_, Caller>, refusal: &NotGranted) {
        for waiter in self.waiters.take_once(WaiterId::LAST) {
            cx.refuse(waiter.caller, refusal.clone());
        }
    }

    /// The same for those that arrived no later than `newest_waiter`, since others have the key.
    pub(super) fn refuse_busy(&mut self, cx: &mut EventCx<'_, Caller>, newest_waiter: WaiterId) {
        for waiter in self.waiters.take_once(newest_waiter) {
            let holding = self.holding(cx.at());
            cx.refuse(waiter.caller, NotGranted::Busy(holding));
        }
    }

    pub(super) fn refuse_adopters(&mut self, cx: &mut EventCx<'_, Caller>, refusal: &NotGranted) {
        while let Some((_, waiter)) = self.adopters.pop_front() {
            cx.refuse(waiter.caller, refusal.clone());
        }
    }

    pub(super) fn refuse_all(&mut self, cx: &mut EventCx<'_, Caller>, refusal: &NotGranted) {
        self.refuse_adopters(cx, refusal);
        while let Some((_, waiter)) = self.waiters.pop_first() {
            cx.refuse(waiter.caller, refusal.clone());
        }
    }
}
