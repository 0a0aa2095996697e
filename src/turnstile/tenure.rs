use std::time::Duration;

use super::rules::Limits;
use super::time::{Point, deadline, drift};
use super::verdict::LeaseVerdict;
use super::wait_queue::{Waiter, WaiterId};
use crate::Token;
use crate::store::contract::Owner;

/// The part of its ttl that a fixed lease must have left when it is passed.
fn most_of(ttl: Duration) -> Duration {
    ttl / 100 * 95
}

/// The span in which this registry holds the key in the store.
#[derive(Debug)]
pub(super) struct Tenure<C> {
    pub(super) owner: Owner,
    pub(super) ttl: Duration,
    pub(super) deadline: Point,
    pub(super) lease: Option<LocalLease<C>>,
    /// A renewal in flight: when it was sent.
    pub(super) renewing: Option<Point>,
    /// Another renewal was requested meanwhile.
    pub(super) renew_again: bool,
    /// The longest ttl that the store was asked for.
    longest: Duration,
    /// The longest ttl that a holder has extended its lease by.
    extended: Duration,
    epoch: u64,
    /// When the registry learned of it.
    began: Point,
    /// How many leases it has had.
    turns: u32,
    pub(super) contention: Contention,
}

/// Whether other registries wanted the key when a tenure began, as far as is known. A yield that finds
/// an empty queue comes back, which shows that none did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Contention {
    /// Some did, or it is not known.
    #[default]
    Perhaps,
    /// None at its beginning.
    NoneNow,
    /// None at its beginning, and none at that of the tenure before.
    NoneForLong,
}

impl Contention {
    /// The contention after a yield that came back.
    pub(super) fn without_others(self) -> Self {
        match self {
            Self::Perhaps => Self::NoneNow,
            Self::NoneNow | Self::NoneForLong => Self::NoneForLong,
        }
    }
}

/// The one lease of a tenure.
#[derive(Debug)]
pub(super) struct LocalLease<C> {
    pub(super) id: WaiterId,
    pub(super) who: C,
    pub(super) deadline: Point,
    pub(super) phase: LeasePhase,
    /// W4: when it is taken from one who does not look. O6: from one who is to end its work, and has not.
    pub(super) end_by: Point,
    /// Whether the key stays in the store when it ends.
    pub(super) lets_expire: bool,
    ttl: Duration,
    /// When a fixed lease ends, however long the tenure lasts.
    own_end: Option<Point>,
    passed: bool,
    /// How often the watchdog may still prolong it.
    renewals: u32,
    /// Whether the renewal in flight is one of those.
    counted: bool,
    /// Until when it was meant to last when it was taken, or when the watchdog came last.
    meant: Point,
    /// When the watchdog comes next: at every third of the ttl once it is taken (W4).
    renew_at: Option<Point>,
    /// When the renewal that was due is late; `FOREVER` once that was told. None if all is confirmed.
    late_at: Option<Point>,
    /// What its holder asked for, and the store has not confirmed.
    extension: Option<Box<Extension>>,
}

/// A lease is to last longer.
#[derive(Debug)]
struct Extension {
    ttl: Duration,
    /// The deadline that fulfils it.
    until: Point,
    /// When the store is asked (again).
    ask_at: Point,
}

/// How far a waiter has come with its lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LeasePhase {
    /// It has not seen it.
    Offered,
    Taken,
    /// The registry is being shut down, and it has been told to end its work.
    Closing,
}

impl<C> LocalLease<C> {
    pub(super) fn is_taken(&self) -> bool {
        self.phase != LeasePhase::Offered
    }

    /// Whether its time is over, or its waiter has not looked in time.
    pub(super) fn is_over(&self, now: Point) -> bool {
        now >= self.deadline || (self.phase == LeasePhase::Offered && now >= self.end_by)
    }

    /// When the store is asked to prolong it, if it is.
    fn due(&self) -> Option<Point> {
        let extension = self.extension.as_ref().map(|extension| extension.ask_at);
        self.renew_at.into_iter().chain(extension).min()
    }
}

impl<C: Clone> Tenure<C> {
    pub(super) fn new(
        owner: Owner,
        ttl: Duration,
        epoch: u64,
        start: Point,
        now: Point,
        contention: Contention,
    ) -> Self {
        Self {
            owner,
            ttl,
            deadline: deadline(start, ttl),
            lease: None,
            renewing: None,
            renew_again: false,
            longest: ttl,
            extended: Duration::ZERO,
            epoch,
            began: now,
            turns: 0,
            contention,
        }
    }

    /// Whether nobody has had a turn in it.
    pub(super) fn is_new(&self) -> bool {
        self.turns == 0
    }

    /// Whether the next waiter may have the key without the store being asked.
    pub(super) fn may_grant<W>(&self, rules: &Limits, next: &Waiter<W>, now: Point) -> bool {
        if self.turns == 0 {
            return true;
        }
        if next.lets_expire {
            // The key is to stay for the whole of its ttl, and a pass brings less.
            return false;
        }
        let ttl = next.ttl;
        if self.extended > ttl.max(self.ttl) {
            // If the next holder crashed, the store would keep the key for the last holder's extension.
            return false;
        }
        let needed = if next.is_renewed() {
            ttl / 2
        } else {
            most_of(ttl)
        };
        // A yield takes as long as a dozen turns. If no other registry wanted the key for two tenures, the
        // yield comes four times less often. One tenure is not enough: a registry with a single waiter
        // enters the queue again only a moment after its turn.
        let passes = match self.contention {
            Contention::NoneForLong => rules.passes_alone,
            Contention::NoneNow | Contention::Perhaps => rules.passes,
        };
        self.turns <= u32::from(passes)
            && now.since(self.began) < rules.span
            && self.deadline.since(now) >= needed
    }

    /// Grants the key to a waiter. Returns its token (F2) and its deadline.
    pub(super) fn grant(&mut self, id: WaiterId, waiter: Waiter<C>, now: Point) -> (Token, Point) {
        let token = Token::of(self.epoch, self.turns);
        let passed = self.turns > 0;
        self.turns += 1;
        let ttl = waiter.ttl;
        let meant = deadline(now, ttl);
        let own_end = (!waiter.is_renewed()).then(|| {
            // W3: only a lease that is longer than the ticket's ttl is worth a renewal. Others end with
            // the tenure, which gives them nearly all of their ttl.
            if passed || ttl <= self.ttl {
                meant.min(self.deadline)
            } else {
                meant
            }
        });
        let lease = LocalLease {
            id,
            who: waiter.who,
            deadline: own_end.unwrap_or(self.deadline).min(self.deadline),
            phase: LeasePhase::Offered,
            end_by: now + self.ttl / 3,
            lets_expire: waiter.lets_expire,
            ttl,
            own_end,
            passed,
            renewals: waiter.renewals,
            counted: false,
            meant,
            renew_at: None,
            late_at: None,
            extension: None,
        };
        let until = lease.deadline;
        self.lease = Some(lease);
        (token, until)
    }

    /// The ttl of the next renewal: as long as the lease is meant to last from now on.
    pub(super) fn wanted(&self, now: Point) -> Option<Duration> {
        let lease = self.lease.as_ref()?;
        let meant = match lease.own_end {
            Some(end) => (end + drift(lease.ttl)).since(now),
            None if lease.renewals == u32::MAX => lease.ttl,
            // A new connection renews as well (O4), without being counted. It repeats the watchdog's
            // last renewal and prolongs no further, or connections that break often would keep a
            // bounded lease for ever.
            None if lease.meant > now => (lease.meant + drift(lease.ttl)).since(now),
            None => self.deadline.since(now),
        };
        let wished = lease.extension.as_ref().map(|extension| extension.ttl);
        Some(wished.map_or(meant, |ttl| ttl.max(meant)))
    }

    /// Whether that waiter holds the lease.
    pub(super) fn is_held_by(&self, id: WaiterId) -> bool {
        let lease = self.lease.as_ref();
        lease.is_some_and(|lease| lease.id == id && lease.is_taken())
    }

    /// Whether its holder was told to end its work.
    pub(super) fn is_closing(&self) -> bool {
        let lease = self.lease.as_ref();
        lease.is_some_and(|lease| lease.phase == LeasePhase::Closing)
    }

    /// The holder wants its lease to last until `until`, by a renewal with `ttl`. Returns what the holder is
    /// told if the tenure lasts long enough already.
    pub(super) fn extend(
        &mut self,
        now: Point,
        ttl: Duration,
        until: Point,
    ) -> Option<(C, LeaseVerdict)> {
        let lease = self.lease.as_mut()?;
        lease.own_end = lease.own_end.map(|end| end.max(until));
        if self.deadline >= until {
            return self.proved();
        }
        self.extended = self.extended.max(ttl);
        let before = lease.extension.take();
        let (before_ttl, before_until) =
            before.map_or((ttl, until), |extension| (extension.ttl, extension.until));
        lease.extension = Some(Box::new(Extension {
            ttl: ttl.max(before_ttl),
            until: until.max(before_until),
            ask_at: now,
        }));
        // The renewal in flight may ask for less.
        self.renew_again |= self.renewing.is_some();
        self.proved()
    }

    /// Whether its holder wants it to last longer than is proved.
    pub(super) fn has_extension(&self) -> bool {
        let lease = self.lease.as_ref();
        lease.is_some_and(|lease| lease.extension.is_some())
    }

    /// The renewal failed: an open extension is tried again.
    pub(super) fn retry_extension_at(&mut self, again: Point) {
        let lease = self.lease.as_mut();
        if let Some(extension) = lease.and_then(|lease| lease.extension.as_mut()) {
            extension.ask_at = again;
        }
    }

    /// The lease lasts as long as the tenure, but no longer than it is meant to: what it is to be
    /// told, if its deadline moved.
    fn proved(&mut self) -> Option<(C, LeaseVerdict)> {
        let lease = self.lease.as_mut()?;
        lease
            .extension
            .take_if(|extension| extension.until <= self.deadline);
        let last = lease.own_end.is_none() && lease.renewals == 0;
        let deadline = lease.own_end.unwrap_or(self.deadline).min(self.deadline);
        let moved = deadline > lease.deadline;
        lease.deadline = deadline;
        moved.then(|| {
            let deadline = deadline.moment();
            (
                lease.who.clone(),
                LeaseVerdict::Prolonged { deadline, last },
            )
        })
    }

    /// W3: whether the lease just taken should outlast what its ticket brought, or the tenure that
    /// it was passed inside of. What a fixed lease has to do with is enough for a renewed one, too,
    /// until the watchdog comes by itself: to renew at each pass was half of all calls of a busy
    /// key, and a third of the server's time.
    pub(super) fn wants_more(&self, now: Point) -> bool {
        self.lease
            .as_ref()
            .is_some_and(|lease| match lease.own_end {
                Some(end) => end > self.deadline,
                None => {
                    let used_up = || self.deadline.since(now) < most_of(lease.ttl);
                    lease.ttl > self.ttl || (lease.passed && used_up())
                }
            })
    }

    /// The waiter has seen its lease, and holds it from here on.
    pub(super) fn take(&mut self, id: WaiterId, now: Point) -> bool {
        let lease = self.lease.as_mut().filter(|lease| lease.id == id);
        let Some(lease) = lease else {
            return false;
        };
        lease.phase = LeasePhase::Taken;
        lease.meant = deadline(now, lease.ttl);
        lease.renew_at = (lease.renewals > 0).then(|| now + lease.ttl / 3);
        true
    }

    /// Whether the watchdog is due, or a wish is not met; the watchdog comes again after another
    /// third of the ttl.
    pub(super) fn is_renewal_due(&mut self, now: Point) -> bool {
        if self.renewing.is_some() {
            return false;
        }
        let late_at = self.late_at();
        let Some(lease) = &mut self.lease else {
            return false;
        };
        if lease.due().is_none_or(|due| now < due) {
            return false;
        }
        lease.late_at = late_at;
        if lease.renew_at.is_none_or(|at| now < at) {
            return true;
        }
        // A fixed lease has none to count, and comes here to be given what it was promised (W3).
        lease.counted = lease.renewals > 0;
        if lease.renewals < u32::MAX {
            lease.renewals = lease.renewals.saturating_sub(1);
        }
        lease.meant = deadline(now, lease.ttl);
        lease.renew_at = (lease.renewals > 0).then(|| now + lease.ttl / 3);
        true
    }

    /// The lease just taken is to be renewed at once.
    pub(super) fn is_to_be_renewed(&mut self, now: Point) {
        let late_at = self.late_after(now);
        if let Some(lease) = &mut self.lease {
            lease.late_at = Some(late_at);
        }
    }

    /// When a renewal is late that is due at `due`: when a third is left of the time that the lease has
    /// left then. Of a watchdog's that is two ninths of the ttl.
    fn late_after(&self, due: Point) -> Point {
        due + self.deadline.since(due) / 3 * 2
    }

    /// When the renewal that is due is late, or else the next.
    fn late_at(&self) -> Option<Point> {
        let lease = self.lease.as_ref()?;
        lease
            .late_at
            .or_else(|| Some(self.late_after(lease.due()?)))
    }

    /// Who is to be told, once, that a renewal is late, whatever keeps it from being confirmed: that
    /// no connection stands, too.
    pub(super) fn is_renewal_late(&mut self, now: Point) -> Option<C> {
        let late = self.late_at()? <= now;
        let lease = self.lease.as_mut().filter(|_| late)?;
        lease.late_at = Some(Point::FOREVER);
        Some(lease.who.clone())
    }

    pub(super) fn stop_renewing(&mut self, has_gone: impl FnOnce(&C) -> bool) {
        if let Some(lease) = self.lease.as_mut().filter(|lease| has_gone(&lease.who)) {
            lease.renewals = 0;
            lease.counted = false;
            lease.renew_at = None;
            lease.late_at = None;
        }
    }

    /// The store refused a renewal, or it was not sent: the watchdog tries again, on the same count. So it does for a
    /// fixed lease that has less than it was promised (W3).
    pub(super) fn renew_after(&mut self, again: Point) {
        let tenure_ends = self.deadline;
        if let Some(lease) = self.lease.as_mut().filter(|lease| lease.is_taken()) {
            if std::mem::take(&mut lease.counted) {
                lease.renewals = lease.renewals.saturating_add(1);
            }
            let pending = lease.own_end.is_some_and(|end| end > tenure_ends);
            lease.renew_at = (lease.renewals > 0 || pending).then_some(again);
        }
    }

    /// A renewal is sent; it may be done even if nobody ever hears of it.
    pub(super) fn asked(&mut self, now: Point, ttl: Duration) {
        self.renewing = Some(now);
        self.longest = self.longest.max(ttl);
    }

    /// When the store has let go of it by itself, whatever becomes of what is sent now.
    pub(super) fn runs_out(&self, now: Point) -> Point {
        now + self.longest + drift(self.longest)
    }

    /// The store prolonged the tenure; returns what its lease is to be told: if its deadline moved, or
    /// if that was the watchdog's last.
    pub(super) fn prolong(&mut self, sent: Point, until: Point) -> Option<(C, LeaseVerdict)> {
        self.deadline = self.deadline.max(until);
        let lease = self.lease.as_mut()?;
        lease.late_at = None;
        let was_last = std::mem::take(&mut lease.counted) && lease.renewals == 0;
        if lease.own_end.is_some() {
            lease.renew_at = None;
        } else if lease.renewals == u32::MAX {
            // Whoever wished for it, the next is a third of the ttl away.
            lease.renew_at = lease.renew_at.map(|at| at.max(sent + lease.ttl / 3));
        }
        self.proved().or_else(|| {
            let lease = self.lease.as_ref().filter(|_| was_last)?;
            let (deadline, last) = (lease.deadline.moment(), true);
            Some((
                lease.who.clone(),
                LeaseVerdict::Prolonged { deadline, last },
            ))
        })
    }

    /// `down`: the watchdog rests until the connection is back, which renews at once.
    pub(super) fn next_timeout(&self, down: bool) -> Point {
        let mut next = self.deadline;
        if let Some(lease) = &self.lease {
            next = next.min(lease.deadline);
            if lease.phase != LeasePhase::Taken {
                next = next.min(lease.end_by);
            }
            if self.renewing.is_none() && !down {
                next = next.min(lease.due().unwrap_or(next));
            }
            next = next.min(self.late_at().unwrap_or(next));
        }
        next
    }
}
