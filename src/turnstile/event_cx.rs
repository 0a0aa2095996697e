use std::collections::VecDeque;

use super::ids::Ids;
use super::tenure::{HolderVerdict, LostLease};
use super::time::Point;
use super::verdict::{LeaseEnd, LeaseVerdict, NotGranted, Verdict, WaiterVerdict};
use super::wait_queue::WaiterId;
use crate::base::clock::Moment;
use crate::store::contract::Op;

/// What the engine is to do.
#[derive(Clone, Debug)]
pub(crate) enum Effect<Caller> {
    Send(Op),
    Wake(Caller, Verdict),
    /// Ask the waiter's policy for its next pause, and tell [`on_pause`](super::Turnstile::on_pause) the answer. The
    /// policy is the user's code: the engine asks it where nothing is locked.
    AskPolicy(Caller, WaiterId),
}

impl<Caller> Effect<Caller> {
    /// The caller that it concerns.
    pub(crate) fn caller(&self) -> Option<&Caller> {
        match self {
            Self::Wake(caller, _) | Self::AskPolicy(caller, _) => Some(caller),
            Self::Send(_) => None,
        }
    }
}

/// What comes in with every event: the time, and what the registry's turnstiles share. And what goes out: the effects.
#[derive(Debug)]
pub(crate) struct EventCx<'a, Caller> {
    pub(crate) now: Moment,
    pub(crate) ids: &'a mut Ids,
    /// In order. A turnstile has no buffer of its own: there may be a hundred thousand.
    pub(crate) effects: &'a mut VecDeque<Effect<Caller>>,
    /// Whether this line asks again while its ticket is in the queue. Only the first line of a registry does, for all of
    /// them (M5).
    pub(super) asks_for_others: bool,
    /// How many leases the registry may have: the renewals of many are spread (G5).
    pub(crate) leases: usize,
}

impl<'a, Caller> EventCx<'a, Caller> {
    pub(crate) fn new(
        now: Moment,
        ids: &'a mut Ids,
        effects: &'a mut VecDeque<Effect<Caller>>,
    ) -> Self {
        Self {
            now,
            ids,
            effects,
            asks_for_others: true,
            leases: 1,
        }
    }

    /// The time, as a turnstile stores it.
    pub(super) fn at(&self) -> Point {
        self.now.into()
    }

    pub(super) fn emit(&mut self, effect: Effect<Caller>) {
        self.effects.push_back(effect);
    }

    pub(super) fn wake_waiter(&mut self, caller: Caller, verdict: WaiterVerdict) {
        self.emit(Effect::Wake(caller, Verdict::Waiter(verdict)));
    }

    pub(super) fn refuse(&mut self, caller: Caller, refusal: NotGranted) {
        self.wake_waiter(caller, WaiterVerdict::Refused(refusal));
    }

    pub(super) fn wake_holder(&mut self, verdict: HolderVerdict<Caller>) {
        if let Some((caller, verdict)) = verdict {
            self.emit(Effect::Wake(caller, Verdict::Lease(verdict)));
        }
    }

    pub(super) fn end_lease(&mut self, caller: Caller, end: LeaseEnd) {
        self.wake_holder(Some((caller, LeaseVerdict::Ended(end))));
    }

    /// A lease was lost, at its deadline or in the store.
    pub(super) fn tell_lost(&mut self, lost: LostLease<Caller>) {
        match lost {
            Some((lease, cause)) if lease.is_taken() => {
                self.end_lease(lease.caller, LeaseEnd::Lost(cause));
            }
            Some((lease, _)) => self.wake_waiter(lease.caller, WaiterVerdict::TurnLost),
            None => {}
        }
    }
}
