use std::time::Duration;

use super::errand::Ending;
use super::line::{Waiter, WaiterId};
use super::machine::Verdict;
use super::rules::Rules;
use super::time::{Moment, deadline, drift};
use crate::store::contract::Owner;

/// F2: a token has six bits for the passes.
const MOST_PASSES: u32 = 63;

/// The span in which this registry holds the key in the store.
#[derive(Debug)]
pub(super) struct Tenure<C> {
    pub(super) owner: Owner,
    pub(super) ttl: Duration,
    pub(super) deadline: Moment,
    pub(super) seat: Option<Seat<C>>,
    /// Finished, and waiting for what becomes of the tenure.
    pub(super) ending: Option<Ending<C>>,
    /// A renewal in flight: when it was sent.
    pub(super) renewing: Option<Moment>,
    /// Another renewal was wished for meanwhile.
    pub(super) renew_again: bool,
    /// The longest ttl that the store was asked for.
    longest: Duration,
    /// The longest ttl that a holder has extended its lease by.
    extended: Duration,
    draw: u64,
    /// When we learned of it.
    began: Moment,
    /// Leases given inside it.
    turns: u32,
}

/// The one lease of a tenure.
#[derive(Debug)]
pub(super) struct Seat<C> {
    pub(super) id: WaiterId,
    pub(super) who: C,
    pub(super) deadline: Moment,
    /// Whether the waiter has seen it.
    pub(super) taken: bool,
    /// W4: when it is taken from one who does not look.
    pub(super) take_by: Moment,
    /// Whether the key stays in the store when it ends.
    pub(super) keeps: bool,
    ttl: Duration,
    /// When a fixed lease ends, however long the tenure lasts.
    own_end: Option<Moment>,
    passed: bool,
    /// How often the watchdog may still prolong it.
    renewals: u32,
    /// Whether the renewal in flight is one of those.
    counted: bool,
    /// Until when it was meant to last when it was taken, or when the watchdog came last.
    meant: Moment,
    /// When the watchdog comes next: at every third of the ttl once it is taken (W4).
    renew_at: Option<Moment>,
    /// What its holder asked for, and the store has not confirmed.
    wish: Option<Wish>,
}

/// A lease is to last longer.
#[derive(Debug)]
struct Wish {
    ttl: Duration,
    /// The deadline that fulfils it.
    until: Moment,
    /// When the store is asked (again).
    ask_at: Moment,
}

impl<C: Clone> Tenure<C> {
    pub(super) fn new(owner: Owner, ttl: Duration, draw: u64, start: Moment, now: Moment) -> Self {
        Self {
            owner,
            ttl,
            deadline: deadline(start, ttl),
            seat: None,
            ending: None,
            renewing: None,
            renew_again: false,
            longest: ttl,
            extended: Duration::ZERO,
            draw,
            began: now,
            turns: 0,
        }
    }

    /// Whether the next waiter may have the key without the store being asked.
    pub(super) fn may_seat<W>(&self, rules: &Rules, next: &Waiter<W>, now: Moment) -> bool {
        if self.turns == 0 {
            return true;
        }
        if next.keeps {
            // The key is to stay for the whole of its ttl, and a pass brings less.
            return false;
        }
        if self.extended > next.ttl.max(self.ttl) {
            // The store would keep the key for the last holder's hours when the next one crashes, and
            // a lease that is renewed a few times at most would last as long.
            return false;
        }
        let needed = if next.is_renewed() {
            next.ttl / 2
        } else {
            next.ttl / 100 * 95
        };
        self.turns <= rules.local_passes.min(MOST_PASSES)
            && now.saturating_sub(self.began) < rules.local_span
            && self.deadline.saturating_sub(now) >= needed
    }

    /// Seats a waiter; returns its token (F2) and its deadline.
    pub(super) fn seat(&mut self, id: WaiterId, waiter: Waiter<C>, now: Moment) -> (u64, Moment) {
        // A fence that was set by hand to what no clock shows is no reason to panic.
        let first = self.draw.saturating_mul(u64::from(MOST_PASSES + 1));
        let token = first.saturating_add(u64::from(self.turns));
        let passed = self.turns > 0;
        self.turns += 1;
        let own_end = (!waiter.is_renewed()).then(|| {
            let end = deadline(now, waiter.ttl);
            // W3: only one who wants longer than the ticket brought is worth a renewal. The
            // others have nearly all they want, and no more than the tenure has.
            if passed || waiter.ttl <= self.ttl {
                end.min(self.deadline)
            } else {
                end
            }
        });
        let seat = Seat {
            id,
            who: waiter.who,
            deadline: own_end.unwrap_or(self.deadline).min(self.deadline),
            taken: false,
            take_by: now + self.ttl / 3,
            keeps: waiter.keeps,
            ttl: waiter.ttl,
            own_end,
            passed,
            renewals: waiter.renewals,
            counted: false,
            meant: deadline(now, waiter.ttl),
            renew_at: None,
            wish: None,
        };
        let until = seat.deadline;
        self.seat = Some(seat);
        (token, until)
    }

    /// For how long the store should be asked to prolong the tenure: as long as the lease in it
    /// is meant to last from now on.
    pub(super) fn wanted(&self, now: Moment) -> Option<Duration> {
        let seat = self.seat.as_ref()?;
        let meant = match seat.own_end {
            Some(end) => (end + drift(seat.ttl)).saturating_sub(now),
            None if seat.renewals == u32::MAX => seat.ttl,
            // A new connection asks as well (O4), and those are not counted: they make good what the
            // watchdog asked for last, or only look, lest a wire that breaks often prolong for ever
            // what is to end.
            None if seat.meant > now => seat.meant + drift(seat.ttl) - now,
            None => self.deadline.saturating_sub(now),
        };
        let wished = seat.wish.as_ref().map(|wish| wish.ttl);
        Some(wished.map_or(meant, |ttl| ttl.max(meant)))
    }

    /// Whether that waiter holds the lease.
    pub(super) fn is_held_by(&self, id: WaiterId) -> bool {
        let seat = self.seat.as_ref();
        seat.is_some_and(|seat| seat.id == id && seat.taken)
    }

    /// The holder wants its lease to last `until` at least, for which the store is to be asked for
    /// `ttl`. Returns what the lease is to be told if the tenure lasts longer than it already.
    pub(super) fn wish(
        &mut self,
        now: Moment,
        ttl: Duration,
        until: Moment,
    ) -> Option<(C, Verdict)> {
        let seat = self.seat.as_mut()?;
        seat.own_end = seat.own_end.map(|end| end.max(until));
        if self.deadline >= until {
            return self.proved();
        }
        self.extended = self.extended.max(ttl);
        let before = seat.wish.take();
        let (before_ttl, before_until) =
            before.map_or_else(Default::default, |wish| (wish.ttl, wish.until));
        seat.wish = Some(Wish {
            ttl: ttl.max(before_ttl),
            until: until.max(before_until),
            ask_at: now,
        });
        // One in flight may have asked for less.
        self.renew_again |= self.renewing.is_some();
        self.proved()
    }

    /// Whether its holder wants it to last longer than is proved.
    pub(super) fn is_wished_for(&self) -> bool {
        let seat = self.seat.as_ref();
        seat.is_some_and(|seat| seat.wish.is_some())
    }

    /// No answer, or a refusal: a wish that is not met is tried again.
    pub(super) fn wish_after(&mut self, again: Moment) {
        let seat = self.seat.as_mut();
        if let Some(wish) = seat.and_then(|seat| seat.wish.as_mut()) {
            wish.ask_at = again;
        }
    }

    /// The lease lasts as long as the tenure, but no longer than it is meant to: what it is to be
    /// told, if its deadline moved.
    fn proved(&mut self) -> Option<(C, Verdict)> {
        let seat = self.seat.as_mut()?;
        seat.wish.take_if(|wish| wish.until <= self.deadline);
        let last = seat.own_end.is_none() && seat.renewals == 0;
        let deadline = seat.own_end.unwrap_or(self.deadline).min(self.deadline);
        let moved = deadline > seat.deadline;
        seat.deadline = deadline;
        moved.then(|| (seat.who.clone(), Verdict::Prolonged { deadline, last }))
    }

    /// W3: whether the lease just taken should outlast what its ticket brought.
    pub(super) fn wants_more(&self) -> bool {
        self.seat.as_ref().is_some_and(|seat| match seat.own_end {
            Some(end) => end > self.deadline,
            None => seat.passed || seat.ttl > self.ttl,
        })
    }

    /// The waiter has seen its lease, and holds it from here on.
    pub(super) fn take(&mut self, id: WaiterId, now: Moment) -> bool {
        let seat = self.seat.as_mut().filter(|seat| seat.id == id);
        let Some(seat) = seat else {
            return false;
        };
        seat.taken = true;
        seat.meant = deadline(now, seat.ttl);
        seat.renew_at = (seat.renewals > 0).then(|| now + seat.ttl / 3);
        true
    }

    /// Whether the watchdog is due, or a wish is not met; the watchdog comes again after another
    /// third of the ttl.
    pub(super) fn is_renewal_due(&mut self, now: Moment) -> bool {
        let Some(seat) = &mut self.seat else {
            return false;
        };
        if self.renewing.is_some() {
            return false;
        }
        if seat.renew_at.is_none_or(|at| now < at) {
            return seat.wish.as_ref().is_some_and(|wish| wish.ask_at <= now);
        }
        // A fixed lease has none to count, and comes here to be given what it was promised (W3).
        seat.counted = seat.renewals > 0;
        if seat.renewals < u32::MAX {
            seat.renewals = seat.renewals.saturating_sub(1);
        }
        seat.meant = deadline(now, seat.ttl);
        seat.renew_at = (seat.renewals > 0).then(|| now + seat.ttl / 3);
        true
    }

    pub(super) fn unwatch(&mut self, has_gone: impl FnOnce(&C) -> bool) {
        if let Some(seat) = self.seat.as_mut().filter(|seat| has_gone(&seat.who)) {
            seat.renewals = 0;
            seat.counted = false;
            seat.renew_at = None;
        }
    }

    /// The store refused a renewal: the watchdog tries again, on the same count. So it does for a
    /// fixed lease that has less than it was promised (W3).
    pub(super) fn renew_after(&mut self, again: Moment) {
        let tenure_ends = self.deadline;
        if let Some(seat) = self.seat.as_mut().filter(|seat| seat.taken) {
            if std::mem::take(&mut seat.counted) {
                seat.renewals = seat.renewals.saturating_add(1);
            }
            let owed = seat.own_end.is_some_and(|end| end > tenure_ends);
            seat.renew_at = (seat.renewals > 0 || owed).then_some(again);
        }
    }

    /// A renewal is sent; it may be done even if nobody ever hears of it.
    pub(super) fn asked(&mut self, now: Moment, ttl: Duration) {
        self.renewing = Some(now);
        self.longest = self.longest.max(ttl);
    }

    /// When the store has let go of it by itself, whatever becomes of what is sent now.
    pub(super) fn runs_out(&self, now: Moment) -> Moment {
        now + self.longest + drift(self.longest)
    }

    /// The store prolonged the tenure; returns what its lease is to be told: if its deadline moved, or
    /// if that was the watchdog's last.
    pub(super) fn prolong(&mut self, sent: Moment, until: Moment) -> Option<(C, Verdict)> {
        self.deadline = self.deadline.max(until);
        let seat = self.seat.as_mut()?;
        let was_last = std::mem::take(&mut seat.counted) && seat.renewals == 0;
        if seat.own_end.is_some() {
            seat.renew_at = None;
        } else if seat.renewals == u32::MAX {
            // Whoever wished for it, the next is a third of the ttl away.
            seat.renew_at = seat.renew_at.map(|at| at.max(sent + seat.ttl / 3));
        }
        self.proved().or_else(|| {
            let seat = self.seat.as_ref().filter(|_| was_last)?;
            let (deadline, last) = (seat.deadline, true);
            Some((seat.who.clone(), Verdict::Prolonged { deadline, last }))
        })
    }

    /// `down`: the watchdog rests until the connection is back, which renews at once.
    pub(super) fn next_timeout(&self, down: bool) -> Moment {
        let mut next = self.deadline;
        if let Some(seat) = &self.seat {
            next = next.min(seat.deadline);
            if !seat.taken {
                next = next.min(seat.take_by);
            }
            if self.renewing.is_none() && !down {
                next = next.min(seat.renew_at.unwrap_or(next));
                let wish = seat.wish.as_ref();
                next = wish.map_or(next, |wish| next.min(wish.ask_at));
            }
        }
        if let Some(ending) = &self.ending {
            next = next.min(ending.deadline);
        }
        next
    }
}
