//! Renewals: when the watchdog renews the lease of a tenure, for how long, and what the answers change.

use std::mem;
use std::time::Duration;

use super::{Extension, HolderVerdict, LocalLease, Tenure};
use crate::store::contract::{Op, OpError};
use crate::turnstile::event_cx::EventCx;
use crate::turnstile::ids::Ids;
use crate::turnstile::time::{Point, deadline, drift};
use crate::turnstile::verdict::LeaseVerdict;

/// A renewal that is due at `due` counts as late when two thirds of the remaining time have passed. For the watchdog,
/// two ninths of the ttl are left then.
pub(super) fn late_after(deadline: Point, due: Point) -> Point {
    due + deadline.since(due) / 3 * 2
}

/// So many renewals share a call. Those of fewer leases are not spread (G5).
const FEW: usize = 64;

/// G5: how far apart the moments are at which leases are renewed. Each moment wakes the timer and the connection, and
/// its last call is not full.
const APART: Duration = Duration::from_millis(25);

/// G5: a renewal that is this late was missed because the process, or its runtime, stood still. Others were missed, too.
const MISSED: Duration = Duration::from_millis(10);

/// G5: rounds down to a moment at which other leases are renewed, too.
fn with_others(at: Point, ttl: Duration) -> Point {
    let apart = APART.min(ttl / 32).as_nanos();
    let past = at.moment().as_nanos() % apart;
    at - Duration::from_nanos(past as u64)
}

impl<Caller> LocalLease<Caller> {
    /// When the store is asked to prolong it, if it is.
    pub(super) fn due(&self) -> Option<Point> {
        let extension = self.extension.as_ref().map(|extension| extension.ask_at);
        self.renew_at.into_iter().chain(extension).min()
    }

    pub(super) fn late_at(&self, tenure_ends: Point) -> Option<Point> {
        let next = || Some(late_after(tenure_ends, self.due()?));
        self.late_at.or_else(next)
    }

    /// The watchdog renews a third of the ttl from now, if any renewals are left.
    pub(super) fn count_from(&mut self, cx: &EventCx<'_, Caller>) {
        let now = cx.at();
        self.intended_end = deadline(now, self.ttl);
        self.is_planned = false;
        let next = now + self.ttl / 3;
        self.renew_at = match self.renewals {
            0 => None,
            // G5: leases that are renewed together now are renewed together the next time.
            u32::MAX if cx.leases >= FEW => Some(with_others(next, self.ttl)),
            _ => Some(next),
        };
    }
}

impl<Caller: Clone> Tenure<Caller> {
    /// When the store is asked to prolong the lease, unless it is being asked.
    pub(in crate::turnstile) fn renewal_due(&self) -> Option<Point> {
        let lease = self.lease.as_ref().filter(|_| !self.is_renewing());
        lease.and_then(LocalLease::due)
    }

    /// When the renewal that is due is late, or else the next.
    pub(in crate::turnstile) fn renewal_late_at(&self) -> Option<Point> {
        self.lease.as_ref()?.late_at(self.deadline)
    }

    /// G5: the watchdog of a lease that was just taken comes earlier by a random part of the ttl, up to a quarter. Leases
    /// that were taken together are not renewed together then. A bounded number of renewals are not moved: they would
    /// end earlier.
    pub(in crate::turnstile) fn renew_earlier(&mut self, cx: &mut EventCx<'_, Caller>) {
        let lease = self.lease.as_mut();
        if let Some(lease) = lease.filter(|it| it.renewals == u32::MAX && cx.leases >= FEW) {
            let earlier = cx.ids.place_in(lease.ttl / 4);
            let renew_at = lease.renew_at.map(|at| at - earlier);
            lease.renew_at = renew_at.map(|at| with_others(at, lease.ttl));
        }
    }

    /// G5: within which time the lease is renewed, if many others are to be renewed, too.
    pub(in crate::turnstile) fn spread(&self, cx: &EventCx<'_, Caller>) -> Duration {
        let Some(lease) = self.lease.as_ref().filter(|_| cx.leases >= FEW) else {
            return Duration::ZERO;
        };
        let for_all = Duration::from_millis(cx.leases as u64).min(lease.ttl / 3);
        for_all.min(self.deadline.since(cx.at()) / 2)
    }

    /// G5: whether the watchdog's moment has passed without a renewal.
    pub(in crate::turnstile) fn has_missed_renewal(&self, now: Point) -> bool {
        let lease = self.lease.as_ref().filter(|lease| !lease.is_planned);
        let due = lease.and_then(|lease| lease.renew_at);
        due.is_some_and(|at| now.since(at) >= MISSED)
    }

    /// G5: if the registry has many leases, the watchdog comes soon, at a moment that `choose` finds in the given span.
    /// Returns false if it has few, or the number of renewals is bounded: the lease may be renewed now. `away_since`: when
    /// the outage began that ends now, if there was one.
    pub(in crate::turnstile) fn plan_renewal(
        &mut self,
        cx: &mut EventCx<'_, Caller>,
        away_since: Option<Point>,
        choose: impl FnOnce(&mut Ids, Duration) -> Duration,
    ) -> bool {
        let spread = self.spread(cx);
        let now = cx.at();
        let lease = self.lease.as_mut();
        let Some(lease) = lease.filter(|it| it.renewals == u32::MAX && !spread.is_zero()) else {
            return false;
        };
        let Some(renew_at) = lease.renew_at else {
            return false;
        };
        if renew_at <= now {
            lease.late_at = lease.late_at(self.deadline);
        }
        // What is planned keeps its order. Connections that break often must not put it off each time.
        let planned = lease.is_planned.then(|| match renew_at > now {
            true => renew_at.since(now),
            // Its moment passed in the outage.
            false => renew_at.since(away_since.unwrap_or(now)),
        });
        let after = planned.filter(|after| *after <= spread).unwrap_or_else(|| {
            // About as long as it takes until all have been told of the event.
            let first = Duration::from_micros(cx.leases as u64).min(spread / 4);
            first + choose(cx.ids, spread - first)
        });
        lease.renew_at = Some(with_others(now + after, lease.ttl).max(now));
        lease.is_planned = true;
        true
    }

    /// The ttl of the next renewal: how long the lease is intended to last from now on.
    fn wanted(&self, now: Point) -> Option<Duration> {
        let lease = self.lease.as_ref()?;
        let intended_ttl = match lease.fixed_end {
            Some(end) => (end + drift(lease.ttl)).since(now),
            None if lease.renewals == u32::MAX => lease.ttl,
            // A new connection renews as well (O4), without being counted. This renewal only restores the end that the
            // last counted renewal intended. Otherwise frequent reconnects could extend a bounded lease for ever.
            None if lease.intended_end > now => (lease.intended_end + drift(lease.ttl)).since(now),
            None => self.deadline.since(now),
        };
        let extension = lease.extension.as_ref().map(|extension| extension.ttl);
        Some(extension.map_or(intended_ttl, |ttl| ttl.max(intended_ttl)))
    }

    /// The renewal to send, if there is a lease. If one is in flight, another follows it: that one may have asked for
    /// less, or for the lease before this one.
    pub(in crate::turnstile) fn renew(&mut self, cx: &EventCx<'_, Caller>) -> Option<Op> {
        self.renew_again = self.is_renewing();
        if self.is_renewing() {
            return None;
        }
        let now = cx.at();
        let ttl = self.wanted(now)?;
        self.renewing = Some(now);
        self.keep_late_at();
        // Also after an extension, or on a new connection, the watchdog comes a third of the ttl later.
        if let Some(lease) = &mut self.lease
            && lease.renewals == u32::MAX
            && lease.renew_at.is_some()
        {
            lease.count_from(cx);
        }
        // It may be done even if nobody ever hears of it.
        self.longest_ttl = self.longest_ttl.max(ttl);
        Some(Op::Renew {
            owner: self.win.owner,
            ttl,
            within: self.deadline.since(now),
        })
    }

    /// The holder wants its lease to last until `until`, by a renewal with `ttl`. If the tenure lasts long enough
    /// already, the lease is prolonged at once.
    pub(in crate::turnstile) fn extend(
        &mut self,
        now: Point,
        ttl: Duration,
        until: Point,
    ) -> HolderVerdict<Caller> {
        let lease = self.lease.as_mut()?;
        let before = lease.deadline(self.deadline);
        lease.fixed_end = lease.fixed_end.map(|end| end.max(until));
        if self.deadline < until {
            self.longest_extension = self.longest_extension.max(ttl);
            let other = lease.extension.take();
            let (other_ttl, other_until, ask_at) = match other {
                // What was to be asked before is due since then.
                Some(it) => (it.ttl, it.until, it.ask_at.min(now)),
                None => (ttl, until, now),
            };
            lease.extension = Some(Box::new(Extension {
                ttl: ttl.max(other_ttl),
                until: until.max(other_until),
                ask_at,
            }));
            // The renewal in flight may ask for less.
            self.renew_again |= self.renewing.is_some();
        }
        self.proved(before, false)
    }

    /// The store has prolonged the tenure by `ttl`.
    pub(in crate::turnstile) fn prolong(&mut self, ttl: Duration) -> HolderVerdict<Caller> {
        let sent = self.renewing.take()?;
        self.is_elsewhere = false;
        let before = self.deadline;
        self.deadline = before.max(deadline(sent, ttl));
        let lease = self.lease.as_mut()?;
        lease.late_at = None;
        let was_last = mem::take(&mut lease.counted) && lease.renewals == 0;
        if lease.fixed_end.is_some() {
            lease.renew_at = None;
        }
        let before = lease.deadline(before);
        self.proved(before, was_last)
    }

    /// Whether another renewal follows the one that was just confirmed.
    pub(in crate::turnstile) fn is_renewed_again(&self) -> bool {
        self.renew_again
    }

    /// The verdict if the deadline has moved since `before`, or if the watchdog's last renewal is confirmed.
    fn proved(&mut self, before: Point, was_last: bool) -> HolderVerdict<Caller> {
        let tenure_ends = self.deadline;
        let lease = self.lease.as_mut()?;
        lease
            .extension
            .take_if(|extension| extension.until <= tenure_ends);
        let deadline = lease.deadline(tenure_ends);
        let last = lease.fixed_end.is_none() && lease.renewals == 0;
        let deadline = (deadline > before || was_last).then(|| deadline.moment())?;
        let verdict = LeaseVerdict::Prolonged { deadline, last };
        Some((lease.caller.clone(), verdict))
    }

    /// A renewal failed, or its outcome is unknown. If it was sent, it may still have taken effect. A new connection
    /// repeats it at once (O4).
    pub(in crate::turnstile) fn renewal_failed(
        &mut self,
        error: &OpError,
        now: Point,
        pause: Duration,
    ) -> HolderVerdict<Caller> {
        let tenure_ends = self.deadline;
        self.renewing = None;
        let lease = self.lease.as_mut().filter(|lease| lease.is_taken())?;
        let pause = match error {
            // The store is overloaded: wait for half of the time that is left.
            OpError::TooLate(_) => pause.max(tenure_ends.since(now) / 2),
            _ => pause,
        };
        if let Some(extension) = &mut lease.extension {
            extension.ask_at = now + pause;
        }
        if let OpError::Refused(_) | OpError::TooLate(_) = error {
            // The watchdog retries, and the retry is not counted again. A fixed lease that is still too short is
            // retried as well (W3).
            if mem::take(&mut lease.counted) {
                lease.renewals = lease.renewals.saturating_add(1);
            }
            let is_short = lease.fixed_end.is_some_and(|end| end > tenure_ends);
            lease.renew_at = (lease.renewals > 0 || is_short).then(|| now + pause);
        }
        let verdict = LeaseVerdict::Unrenewed(error.store_error().clone());
        Some((lease.caller.clone(), verdict))
    }

    /// A renewal is due, by the watchdog or for an extension. A bounded watchdog comes again after another third of the
    /// ttl; [`renew`](Self::renew) puts off any other.
    pub(in crate::turnstile) fn on_renewal_due(&mut self, cx: &EventCx<'_, Caller>) {
        self.keep_late_at();
        let Some(lease) = &mut self.lease else {
            return;
        };
        if lease.renew_at.is_some_and(|at| cx.at() >= at) {
            // A fixed lease has no renewals to count. It gets here only to reach its full ttl (W3).
            lease.counted = lease.renewals > 0;
            if lease.renewals < u32::MAX {
                lease.renewals = lease.renewals.saturating_sub(1);
                lease.count_from(cx);
            }
        }
    }

    /// However often the watchdog is put off from here on, by one connection after the other, what is due now is late at
    /// its own time, until a renewal is confirmed.
    fn keep_late_at(&mut self) {
        let late_at = self.renewal_late_at();
        if let Some(lease) = &mut self.lease {
            lease.late_at = late_at;
        }
    }

    /// A renewal is late. The cause does not matter; an outage counts, too. The holder is told once.
    pub(in crate::turnstile) fn on_renewal_late(&mut self) -> HolderVerdict<Caller> {
        let lease = self.lease.as_mut()?;
        lease.late_at = Some(Point::FOREVER);
        Some((lease.caller.clone(), LeaseVerdict::RenewalLate))
    }
}
