//! The span in which this registry holds the key in the store, and the lease in it.

mod renewal;

use std::time::Duration;

use self::renewal::late_after;
use super::event_cx::EventCx;
use super::machine::Rules;
use super::time::{Point, deadline, drift};
use super::verdict::{Holding, LeaseVerdict};
use super::wait_queue::{Waiter, WaiterId, kept_until};
use crate::base::token::MOST_PASSES;
use crate::base::{LossCause, OnFinish, Token};
use crate::store::contract::Owner;

/// 95 % of the ttl. A passed lease should have at least this much time left.
fn most_of(ttl: Duration) -> Duration {
    ttl / 100 * 95
}

/// A verdict for the holder, if there is one.
pub(super) type HolderVerdict<Caller> = Option<(Caller, LeaseVerdict)>;

/// A lease that was lost, if there was one, and why.
pub(super) type LostLease<Caller> = Option<(LocalLease<Caller>, LossCause)>;

/// The store gave the key to an acquisition: what a tenure begins with, and has for as long as it lasts.
#[derive(Clone, Copy, Debug)]
pub(super) struct Win {
    pub(super) owner: Owner,
    /// Whether the store may have had a ticket of its owner, so that a grant may still be on the way (O3).
    pub(super) had_ticket: bool,
    /// The number of consecutive tenures in which no other registry waited for the key. If a yield wins the key back
    /// at once, nobody else waited.
    pub(super) uncontended: u8,
    pub(super) epoch: u64,
    /// From when its ttl is proved.
    pub(super) start: Point,
    pub(super) ttl: Duration,
}

impl Win {
    pub(super) fn deadline(&self) -> Point {
        deadline(self.start, self.ttl)
    }
}

#[derive(Clone, Debug)]
pub(super) struct Tenure<Caller> {
    win: Win,
    deadline: Point,
    lease: Option<LocalLease<Caller>>,
    /// A renewal in flight: when it was sent.
    renewing: Option<Point>,
    /// Another renewal was requested meanwhile.
    renew_again: bool,
    /// The longest ttl that the store was asked for.
    longest_ttl: Duration,
    /// The longest ttl that a holder has extended its lease by.
    longest_extension: Duration,
    /// When the registry learned of it.
    began: Point,
    /// How many leases it has had. All but the first were passes.
    turns: u8,
    /// Whether it must not be passed on to a waiter here.
    forbids_passes: bool,
    /// Whether another server answers than the one that gave it, and has not confirmed it.
    is_elsewhere: bool,
}

/// The one lease of a tenure. It ends with the tenure, or earlier.
#[derive(Clone, Debug)]
pub(super) struct LocalLease<Caller> {
    id: WaiterId,
    pub(super) caller: Caller,
    phase: LeasePhase,
    /// `Offered`: when the waiter loses its turn (W4). `Closing`: when the holder's grace period ends (O6).
    end_by: Point,
    /// Until when the key stays in the store if the lease ends earlier (M8). `FOREVER`: until the ttl is over.
    kept_until: Point,
    /// Whether the key stays also if the lease is lost, or ended by a shutdown.
    keeps_by_itself: bool,
    ttl: Duration,
    /// When a fixed lease ends, however long the tenure lasts.
    fixed_end: Option<Point>,
    /// How often the watchdog may still prolong it.
    renewals: u32,
    /// Whether the renewal in flight was counted off `renewals`.
    counted: bool,
    /// Whether the watchdog's next moment was chosen after an event that many leases share (G5).
    is_planned: bool,
    /// The end that was intended when it was taken, or at the watchdog's last renewal.
    intended_end: Point,
    /// When the watchdog renews next: at every third of the ttl once it is taken (W4).
    renew_at: Option<Point>,
    /// When the due renewal counts as late; `FOREVER` once the holder was told. `None` if all renewals are confirmed.
    late_at: Option<Point>,
    /// An extension that the store has not confirmed.
    extension: Option<Box<Extension>>,
}

/// A request to extend a lease.
#[derive(Clone, Debug)]
struct Extension {
    ttl: Duration,
    /// The deadline that fulfils it.
    until: Point,
    /// When the store is asked (again).
    ask_at: Point,
}

/// The phase of a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LeasePhase {
    /// Granted, and not polled yet.
    Offered,
    Taken,
    /// The registry is being shut down, and the holder must end its work.
    Closing,
}

impl<Caller> LocalLease<Caller> {
    pub(super) fn is_taken(&self) -> bool {
        self.phase != LeasePhase::Offered
    }

    pub(super) fn is_of(&self, id: WaiterId) -> bool {
        self.id == id
    }

    /// Until when the key stays in the store, if the holder ends the lease now. A lease that was not taken keeps nothing.
    pub(super) fn kept_until(&self, now: Point) -> Option<Point> {
        let is_kept = self.is_taken() && now < self.kept_until;
        is_kept.then_some(self.kept_until)
    }

    /// The same if a shutdown ends it.
    pub(super) fn kept_if_closed(&self, now: Point) -> Option<Point> {
        self.kept_until(now).filter(|_| self.keeps_by_itself)
    }

    /// The same if it is lost. A key that is left to expire is released then: it is over anyway.
    pub(super) fn kept_if_lost(&self, now: Point) -> Option<Point> {
        self.kept_if_closed(now).filter(|it| *it != Point::FOREVER)
    }

    /// When it ends, however long the tenure lasts, if it is fixed.
    pub(super) fn fixed_end(&self) -> Option<Point> {
        self.fixed_end
    }

    /// W4: when a caller that has not taken it loses its turn.
    pub(super) fn turn_ends(&self) -> Option<Point> {
        (self.phase == LeasePhase::Offered).then_some(self.end_by)
    }

    /// O6: when the grace period ends of a holder that must end its work.
    pub(super) fn grace_ends(&self) -> Option<Point> {
        (self.phase == LeasePhase::Closing).then_some(self.end_by)
    }

    fn deadline(&self, tenure_ends: Point) -> Point {
        self.fixed_end.map_or(tenure_ends, |it| it.min(tenure_ends))
    }
}

impl<Caller: Clone> Tenure<Caller> {
    pub(super) fn new(win: Win, now: Point) -> Self {
        Self {
            deadline: win.deadline(),
            lease: None,
            renewing: None,
            renew_again: false,
            longest_ttl: win.ttl,
            longest_extension: Duration::ZERO,
            began: now,
            turns: 0,
            forbids_passes: false,
            is_elsewhere: false,
            win,
        }
    }

    /// This tenure is not passed on: its holder may have fenced a transaction, and a fence does not tell our waiters
    /// apart.
    pub(super) fn forbid_passes(&mut self) {
        self.forbids_passes = true;
    }

    /// The present connection leads to another server than the last.
    pub(super) fn note_other_server(&mut self) {
        self.is_elsewhere = true;
    }

    pub(super) fn owner(&self) -> Owner {
        self.win.owner
    }

    /// Who has the key, if there is a lease that is not over.
    pub(super) fn holding(&self, now: Point) -> Option<Holding> {
        let ends = self.lease.as_ref()?.deadline(self.deadline);
        let (owner, left) = (self.owner(), ends.since(now));
        (!left.is_zero()).then_some(Holding::Here { owner, left })
    }

    /// Why a lease that is over was not prolonged. `away_since`: the store cannot be reached since then.
    pub(super) fn cause_of_expiry(
        &self,
        lease: &LocalLease<Caller>,
        now: Point,
        away_since: Option<Point>,
    ) -> LossCause {
        if lease.fixed_end.is_some_and(|end| end <= self.deadline) {
            return LossCause::FixedTtl;
        }
        let is_unconfirmed = lease.late_at.is_some() || lease.extension.is_some();
        if lease.renewals == 0 && lease.fixed_end.is_none() && !is_unconfirmed {
            return LossCause::LastRenewal;
        }
        let ends = lease.deadline(self.deadline);
        if let Some(since) = away_since {
            let lasted = ends.since(since);
            return LossCause::StoreUnreachable { lasted };
        }
        // The process may have stood still when the renewal was due, or when its answer came.
        let unseen_since = match self.renewing {
            None if lease.late_at.is_none() || lease.is_planned => {
                lease.due().filter(|due| *due < ends)
            }
            sent => sent
                .or(Some(ends))
                .filter(|_| now.since(ends) >= lease.ttl / 6),
        };
        match unseen_since {
            Some(since) => LossCause::StoodStill {
                lasted: now.since(since),
            },
            None => LossCause::NotRenewed,
        }
    }

    pub(super) fn had_ticket(&self) -> bool {
        self.win.had_ticket
    }

    pub(super) fn lease(&self) -> Option<&LocalLease<Caller>> {
        self.lease.as_ref()
    }

    pub(super) fn remove_lease(&mut self) -> Option<LocalLease<Caller>> {
        self.lease.take()
    }

    /// [`uncontended`](Win::uncontended) of the next tenure, if a yield gives the key back to us.
    pub(super) fn uncontended_after_yield(&self) -> u8 {
        self.win.uncontended.saturating_add(1)
    }

    /// Whether the next waiter may have the key without the store being asked.
    pub(super) fn may_grant(&self, rules: &Rules, next: &Waiter<Caller>, now: Point) -> bool {
        if self.turns == 0 {
            return true;
        }
        if self.forbids_passes {
            return false;
        }
        if next.on_finish == OnFinish::LetExpire {
            // A pass brings less than the ttl for which the key is to stay.
            return false;
        }
        let ttl = next.ttl;
        if self.longest_extension > ttl.max(self.win.ttl) {
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
        let passes = match self.win.uncontended {
            0 | 1 => rules.local_passes,
            _ => rules.local_passes.saturating_mul(4),
        };
        u32::from(self.turns) <= passes.min(MOST_PASSES)
            && now.since(self.began) < rules.local_span
            && self.deadline.since(now) >= needed
    }

    /// Grants the key to a waiter. Returns its token (F2) and its deadline.
    pub(super) fn grant(
        &mut self,
        id: WaiterId,
        waiter: Waiter<Caller>,
        now: Point,
    ) -> (Token, Point) {
        let token = Token::of(self.win.epoch, self.turns.into());
        self.turns += 1;
        let ttl = waiter.ttl;
        let intended_end = deadline(now, ttl);
        let fixed_end = (!waiter.is_renewed()).then(|| {
            // W3: only a lease that is longer than the ticket's ttl is worth a renewal, or one whose grant is proved by
            // an old answer (D2). Others end with the tenure, which gives them nearly all of their ttl.
            let is_enough = self.deadline.since(now) >= most_of(ttl);
            if token.is_passed() || ttl <= self.win.ttl && is_enough {
                intended_end.min(self.deadline)
            } else {
                intended_end
            }
        });
        let lease = self.lease.insert(LocalLease {
            id,
            caller: waiter.caller,
            phase: LeasePhase::Offered,
            end_by: now + self.win.ttl.min(ttl) / 3,
            // A pass is an acquisition, too.
            kept_until: kept_until(
                waiter.on_finish,
                if token.is_passed() {
                    now
                } else {
                    self.win.start
                },
            ),
            keeps_by_itself: !waiter.is_conditional,
            ttl,
            fixed_end,
            renewals: waiter.renewals,
            counted: false,
            is_planned: false,
            intended_end,
            renew_at: None,
            late_at: None,
            extension: None,
        });
        (token, lease.deadline(self.deadline))
    }

    /// The caller has seen its lease, and holds it from here on. `None`: the lease is not its. Returns `Some(true)` if the
    /// lease must be renewed at once (W3): its ttl exceeds the ticket's, or too little is left.
    pub(super) fn take(&mut self, cx: &EventCx<'_, Caller>, id: WaiterId) -> Option<bool> {
        let lease = self.lease.as_mut().filter(|lease| lease.id == id)?;
        lease.phase = LeasePhase::Taken;
        let ttl = lease.ttl;
        let enough = if ttl > self.win.ttl {
            Duration::MAX
        } else if self.turns > 1 {
            // A pass brings less than the ttl.
            most_of(ttl)
        } else {
            // So does a grant that is proved by an old answer (D2).
            ttl / 2
        };
        Some(self.begin_lease(cx, enough))
    }

    /// The lease begins anew, as if it were acquired now. Returns whether it must be renewed at once.
    pub(super) fn restart(
        &mut self,
        cx: &EventCx<'_, Caller>,
        renewals: u32,
        on_finish: OnFinish,
    ) -> bool {
        let Some(lease) = &mut self.lease else {
            return false;
        };
        let now = cx.at();
        lease.kept_until = kept_until(on_finish, now);
        lease.renewals = renewals;
        lease.counted = false;
        lease.fixed_end = (renewals == 0).then(|| deadline(now, lease.ttl));
        let enough = most_of(lease.ttl);
        self.begin_lease(cx, enough)
    }

    /// The lease counts from now. Returns whether it must be renewed at once: a fixed lease if it ends after the tenure,
    /// another if less than `enough` is left.
    fn begin_lease(&mut self, cx: &EventCx<'_, Caller>, enough: Duration) -> bool {
        let Some(lease) = &mut self.lease else {
            return false;
        };
        lease.count_from(cx);
        let wants_more = match lease.fixed_end {
            Some(end) => end > self.deadline,
            None => self.deadline.since(cx.at()) < enough,
        };
        // What was late already, and is unconfirmed, is told of no second time.
        let late_at = lease.late_at.take();
        lease.late_at =
            wants_more.then(|| late_at.unwrap_or_else(|| late_after(self.deadline, cx.at())));
        wants_more
    }

    /// Removes the lease of a holder that has finished. Returns it, and its deadline.
    pub(super) fn finish(&mut self, id: WaiterId) -> Option<(LocalLease<Caller>, Point)> {
        let lease = self.lease.take_if(|lease| lease.id == id)?;
        let deadline = lease.deadline(self.deadline);
        Some((lease, deadline))
    }

    /// The time of the lease is over. `away_since`: see [`cause_of_expiry`](Self::cause_of_expiry).
    pub(super) fn expire_lease(
        &mut self,
        now: Point,
        away_since: Option<Point>,
    ) -> LostLease<Caller> {
        let lease = self.lease.take()?;
        let cause = self.cause_of_expiry(&lease, now, away_since);
        Some((lease, cause))
    }

    /// The store has found that the key is not ours.
    pub(super) fn lose_lease(&mut self) -> LostLease<Caller> {
        let cause = match self.is_elsewhere {
            true => LossCause::ServerChanged,
            false => LossCause::Taken,
        };
        Some((self.lease.take()?, cause))
    }

    /// Whether its holder must end its work.
    pub(super) fn is_closing(&self) -> bool {
        let lease = self.lease.as_ref();
        lease.is_some_and(|lease| lease.grace_ends().is_some())
    }

    /// The holder must end its work by then.
    pub(super) fn close_by(&mut self, end_by: Point) -> HolderVerdict<Caller> {
        let lease = self.lease.as_mut()?;
        lease.phase = LeasePhase::Closing;
        lease.end_by = end_by;
        Some((lease.caller.clone(), LeaseVerdict::Closing))
    }

    /// The latest time at which the key can still exist in the store, even if the renewal in flight is done.
    pub(super) fn expires_by(&self, now: Point) -> Point {
        now + self.longest_ttl + drift(self.longest_ttl)
    }

    /// Whether a renewal is in flight.
    pub(super) fn is_renewing(&self) -> bool {
        self.renewing.is_some()
    }

    pub(super) fn deadline(&self) -> Point {
        self.deadline
    }

    /// Whether this waiter holds the lease, also if it must end its work.
    pub(super) fn is_held_by(&self, id: WaiterId) -> bool {
        let lease = self.lease.as_ref();
        lease.is_some_and(|lease| lease.id == id && lease.is_taken())
    }

    /// Whether this waiter holds the lease and need not end its work.
    pub(super) fn is_extendable_by(&self, id: WaiterId) -> bool {
        let lease = self.lease.as_ref();
        lease.is_some_and(|lease| lease.id == id && lease.phase == LeasePhase::Taken)
    }
}
