//! The timers of a turnstile: when each is due, and what is done then.

use super::Turnstile;
use super::transitions::TenureEnd;
use crate::base::clock::Moment;
use crate::turnstile::event_cx::EventCx;
use crate::turnstile::ids::Ids;
use crate::turnstile::tenure::Tenure;
use crate::turnstile::time::Point;
use crate::turnstile::verdict::{LeaseEnd, NotGranted};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Timer {
    /// A waiter's wait is over.
    WaitEnds,
    /// A caller waits no longer for the answer to its adoption.
    AdoptionEnds,
    /// A finished lease expires, and the store has not confirmed its end.
    EndingFails,
    /// The entry that a pending operation would remove has expired.
    PendingExpires,
    /// D5: our proof that we hold the key is over, and so is the lease, if there is one.
    TenureEnds,
    /// A fixed lease is over.
    LeaseEnds,
    /// W4: the caller that was granted the key has not taken it in time.
    TurnLost,
    /// O6: the registry shuts down, and the holder has not ended its work in time.
    GraceEnds,
    /// Most of the time that the lease had left is over, and its renewal is not confirmed.
    RenewalLate,
    RenewalDue,
    /// The first pending operation is sent.
    SendPending,
    /// The store is asked for the key.
    Ask,
}

impl<Caller: Clone> Turnstile<Caller> {
    /// When to call [`tick`](Self::tick) at the latest.
    pub(crate) fn next_timeout(&self) -> Option<Moment> {
        // Each look is inlined. As a loop over a list, the timers took a tenth of the speed of 256 tasks on free keys (bench
        // `scenarios`, row `free-256`).
        let points = [
            self.due_at(Timer::WaitEnds),
            self.due_at(Timer::AdoptionEnds),
            self.due_at(Timer::EndingFails),
            self.due_at(Timer::PendingExpires),
            self.due_at(Timer::TenureEnds),
            self.due_at(Timer::LeaseEnds),
            self.due_at(Timer::TurnLost),
            self.due_at(Timer::GraceEnds),
            self.due_at(Timer::RenewalLate),
            self.due_at(Timer::RenewalDue),
            self.due_at(Timer::SendPending),
            self.due_at(Timer::Ask),
        ];
        points.into_iter().flatten().min().map(Point::moment)
    }

    /// When a timer is due, if it runs.
    #[inline(always)]
    fn due_at(&self, timer: Timer) -> Option<Point> {
        let may_send = self.in_flight.is_none() && !self.down;
        let tenure = self.state.tenure();
        let lease = tenure.and_then(Tenure::lease);
        match timer {
            Timer::WaitEnds => self.waiters.next_end(),
            Timer::AdoptionEnds => self.adopters.iter().map(|it| self.end_of(it)).min(),
            Timer::EndingFails => self.pending.iter().filter_map(|it| it.deadline()).min(),
            Timer::PendingExpires => self.pending_expires(),
            Timer::TenureEnds => tenure.map(Tenure::deadline),
            Timer::LeaseEnds => lease?.fixed_end(),
            Timer::TurnLost => lease?.turn_ends(),
            Timer::GraceEnds => lease?.grace_ends(),
            Timer::RenewalLate => tenure?.renewal_late_at(),
            // While the connection is down the watchdog pauses. The next connection renews at once.
            Timer::RenewalDue => tenure?.renewal_due().filter(|_| !self.down),
            Timer::SendPending => {
                let first = self.pending.front().filter(|_| may_send);
                first.map(|first| first.send_at())
            }
            Timer::Ask => {
                let acquisition = self.state.acquisition();
                let acquisition = acquisition.filter(|_| may_send && self.pending.is_empty());
                acquisition.map(|acquisition| acquisition.ask_at())
            }
        }
    }

    #[inline(always)]
    pub(super) fn is_due(&self, timer: Timer, now: Point) -> bool {
        self.due_at(timer).is_some_and(|at| at <= now)
    }

    /// Expires what is over, and sends the renewal that is due. Every event calls this first. So no event handler sees
    /// an expired lease.
    pub(super) fn advance_time(&mut self, cx: &mut EventCx<'_, Caller>) {
        self.expire_due(cx);
        self.handle_if_due(cx, Timer::RenewalLate);
        // G5: a missed renewal is late, but it is not sent at once if many others were missed, too.
        if !self.down
            && let Some(tenure) = self.state.tenure_mut()
            && tenure.has_missed_renewal(cx.at())
        {
            tenure.plan_renewal(cx, None, Ids::within);
        }
        self.handle_if_due(cx, Timer::RenewalDue);
    }

    /// Expires what is over. Where a lease ends, this is called instead of [`advance_time`](Self::advance_time): it needs
    /// no renewal.
    pub(super) fn expire_due(&mut self, cx: &mut EventCx<'_, Caller>) {
        // Each may end what would be due after it.
        self.handle_if_due(cx, Timer::WaitEnds);
        self.handle_if_due(cx, Timer::AdoptionEnds);
        self.handle_if_due(cx, Timer::EndingFails);
        self.handle_if_due(cx, Timer::PendingExpires);
        self.handle_if_due(cx, Timer::TenureEnds);
        self.handle_if_due(cx, Timer::LeaseEnds);
        self.handle_if_due(cx, Timer::TurnLost);
        self.handle_if_due(cx, Timer::GraceEnds);
    }

    #[inline(always)]
    fn handle_if_due(&mut self, cx: &mut EventCx<'_, Caller>, timer: Timer) {
        if self.is_due(timer, cx.at()) {
            self.handle(cx, timer);
        }
    }

    #[inline(never)]
    fn handle(&mut self, cx: &mut EventCx<'_, Caller>, timer: Timer) {
        let now = cx.at();
        match timer {
            Timer::WaitEnds => self.end_waits(cx),
            Timer::AdoptionEnds => {
                while let Some(at) = self.adopters.iter().position(|it| self.end_of(it) <= now)
                    && let Some((_, waiter)) = self.adopters.remove(at)
                {
                    cx.refuse(waiter.caller, NotGranted::Failed(self.store_error()));
                }
            }
            Timer::EndingFails => {
                let end = LeaseEnd::Failed(self.store_error());
                self.end_pending_leases(cx, now, &end);
            }
            Timer::PendingExpires => self.drop_expired_pending(now),
            Timer::TenureEnds | Timer::LeaseEnds | Timer::TurnLost => {
                let away_since = self.away_since();
                let Some(tenure) = self.state.tenure_mut() else {
                    return;
                };
                let lost = tenure.expire_lease(now, away_since);
                let kept_until = lost.as_ref().and_then(|(lease, _)| lease.kept_if_lost(now));
                if let Some(until) = kept_until {
                    self.end_tenure(cx, TenureEnd::Keep(until, None));
                } else if timer == Timer::TenureEnds {
                    // D5: the store may hold the key for a little longer.
                    self.end_tenure(cx, TenureEnd::Release(None));
                }
                cx.tell_lost(lost);
            }
            Timer::GraceEnds => self.close_lease(cx),
            Timer::RenewalLate => {
                let tenure = self.state.tenure_mut();
                cx.wake_holder(tenure.and_then(Tenure::on_renewal_late));
            }
            Timer::RenewalDue => {
                if let Some(tenure) = self.state.tenure_mut() {
                    tenure.on_renewal_due(cx);
                }
                self.renew(cx);
            }
            // `schedule` does these.
            Timer::SendPending | Timer::Ask => {}
        }
    }

    /// Refuses waiters whose wait is over: others hold the key, or the store has failed.
    pub(super) fn end_waits(&mut self, cx: &mut EventCx<'_, Caller>) {
        let now = cx.at();
        while let Some((waiter, busy)) = self.waiters.pop_ended(now) {
            let refusal = if busy && self.last_error.is_none() {
                NotGranted::Busy(self.holding(now))
            } else {
                NotGranted::Failed(self.store_error())
            };
            cx.refuse(waiter.caller, refusal);
        }
    }
}

#[cfg(test)]
mod tests {
    /// No list in the code is checked by the compiler: a timer that is left out would never be looked at.
    #[test]
    fn every_timer_is_looked_at() {
        let code = include_str!("timers.rs");
        let (_, list) = code.split_once("enum Timer {").unwrap();
        let (list, _) = list.split_once("\n}").unwrap();
        let lines = list.lines().map(str::trim);
        let timers: Vec<_> = lines.filter_map(|line| line.strip_suffix(',')).collect();
        assert_eq!(timers.len(), 12, "{timers:?}");
        for timer in timers {
            assert!(
                code.contains(&format!("self.due_at(Timer::{timer}),")),
                "{timer}"
            );
        }
    }
}
