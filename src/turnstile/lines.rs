//! All that one registry has of one key: a turnstile for the exclusive callers, and one for each shared caller (M6).

use std::collections::{BTreeMap, BTreeSet};
use std::iter;

use super::event_cx::{Effect, EventCx};
use super::machine::{Tickets, Turnstile};
use super::verdict::{Holding, NotGranted, Verdict, WaiterVerdict};
use super::wait_queue::{Waiter, WaiterId};
use crate::base::clock::Moment;
use crate::base::{Mode, StoreError};
use crate::store::contract::{Grant, Op, OpResult, Owner};

/// The turnstiles of one key. An event reaches the one that it is about, or all.
///
/// After every call drain the [`effects`](EventCx::effects) in order, then look at
/// [`next_timeout`](Self::next_timeout) and [`is_idle`](Self::is_idle).
#[derive(Clone, Debug)]
pub(crate) struct Lines<Caller> {
    exclusive: Turnstile<Caller>,
    /// Most keys have none.
    shared: Option<Box<SharedLines<Caller>>>,
}

/// The lines of shared callers. A reader or a permit has a ticket, a renewal and a loss of its own, so each is the only
/// caller of its turnstile (M6).
#[derive(Clone, Debug)]
struct SharedLines<Caller> {
    /// By the arrival that began the line.
    lines: BTreeMap<WaiterId, Line<Caller>>,
    /// Which line an owner belongs to. In order, so that equal states have equal `Debug` texts (`tests/worlds`).
    by_owner: BTreeMap<Owner, WaiterId>,
    /// When each line is to be ticked. Without it a tick would look at each of thousands of permits.
    timeouts: BTreeSet<(Moment, WaiterId)>,
    /// Those that have asked the store. The first asks again for all of them (M5).
    acquiring: BTreeSet<WaiterId>,
    /// How many callers wait, also while the store is away.
    waiters: usize,
}

#[derive(Clone, Debug)]
struct Line<Caller> {
    turnstile: Turnstile<Caller>,
    /// Its place in `by_owner`.
    owner: Option<Owner>,
}

/// What the indexes have of a line.
#[derive(Clone, Copy, Default)]
struct Indexed {
    timeout: Option<Moment>,
    is_acquiring: bool,
    waiters: usize,
}

impl Indexed {
    fn of<Caller: Clone>(turnstile: &Turnstile<Caller>) -> Self {
        Self {
            timeout: turnstile.next_timeout(),
            is_acquiring: turnstile.is_acquiring(),
            waiters: turnstile.waiting(),
        }
    }
}

impl<Caller> Default for SharedLines<Caller> {
    fn default() -> Self {
        Self {
            lines: BTreeMap::new(),
            by_owner: BTreeMap::new(),
            timeouts: BTreeSet::new(),
            acquiring: BTreeSet::new(),
            waiters: 0,
        }
    }
}

impl<Caller: Clone> Lines<Caller> {
    /// `queue`: whether the store has a queue and grants reach us, as far as is known.
    pub(crate) fn new(queue: bool) -> Self {
        Self {
            exclusive: Turnstile::new(Mode::Exclusive, queue),
            shared: None,
        }
    }

    /// The store is believed to be down. Callers that give up before it answers get this error.
    pub(crate) fn assume_down(&mut self, error: StoreError) {
        self.exclusive.assume_down(error);
    }

    /// Nobody waits, nothing is held or pending: all this may be dropped.
    pub(crate) fn is_idle(&self) -> bool {
        self.exclusive.is_idle() && self.shared.is_none()
    }

    /// Whether a ticket of ours may stand in the store's queue, or be entered soon.
    pub(crate) fn may_have_ticket(&self) -> bool {
        self.turnstiles().any(Turnstile::may_have_ticket)
    }

    /// The holders of leases.
    pub(crate) fn holders(&self) -> impl Iterator<Item = &Caller> {
        self.turnstiles().filter_map(Turnstile::holder)
    }

    /// The waiters: the exclusive ones first, each kind in order.
    pub(crate) fn waiters(&self) -> impl Iterator<Item = &Caller> {
        self.turnstiles().flat_map(Turnstile::waiters)
    }

    /// Everybody who still awaits a verdict, but for those of the effects.
    pub(crate) fn callers(&self) -> impl Iterator<Item = &Caller> {
        self.turnstiles().flat_map(Turnstile::callers)
    }

    fn turnstiles(&self) -> impl Iterator<Item = &Turnstile<Caller>> {
        let lines = self.shared.iter().flat_map(|shared| shared.lines.values());
        iter::once(&self.exclusive).chain(lines.map(|line| &line.turnstile))
    }

    /// When to call [`tick`](Self::tick) at the latest.
    pub(crate) fn next_timeout(&self) -> Option<Moment> {
        let shared = self.shared.as_ref();
        let shared = shared.and_then(|shared| Some(shared.timeouts.first()?.0));
        let exclusive = self.exclusive.next_timeout();
        exclusive.into_iter().chain(shared).min()
    }

    /// A caller wants the key, or a lease that it adopts. Its verdicts come as effects.
    pub(crate) fn arrive(
        &mut self,
        cx: &mut EventCx<'_, Caller>,
        mode: Mode,
        waiter: Waiter<Caller>,
    ) -> WaiterId {
        let shared = self.shared.as_ref().map_or(0, |shared| shared.waiters);
        if mode == Mode::Exclusive {
            return self.exclusive.arrive(cx, waiter, shared);
        }
        let mut turnstile = self.exclusive.beside(mode);
        let earlier = cx.effects.len();
        let id = turnstile.arrive(cx, waiter, shared + self.exclusive.waiting());
        let shared = self.shared.get_or_insert_default();
        let owner = None;
        shared.lines.insert(id, Line { turnstile, owner });
        shared.update(cx, id, Indexed::default(), earlier);
        self.drop_if_unused();
        id
    }

    /// Whether any lease is held under the owner with this sequence.
    pub(crate) fn holds(&self, sequence: u64) -> bool {
        let mut owners = self.turnstiles().filter_map(Turnstile::owner);
        owners.any(|owner| owner.sequence == sequence)
    }

    /// The turnstile of this caller.
    pub(crate) fn turnstile_of(&self, id: WaiterId) -> &Turnstile<Caller> {
        let shared = self.shared.as_ref();
        let line = shared.and_then(|shared| shared.lines.get(&id));
        line.map_or(&self.exclusive, |line| &line.turnstile)
    }

    /// Time went by.
    pub(crate) fn tick(&mut self, cx: &mut EventCx<'_, Caller>) {
        self.exclusive.tick(cx);
        let due = ..=(cx.now, WaiterId::LAST);
        let shared = self.shared.iter();
        let due = shared.flat_map(|shared| shared.timeouts.range(due));
        let due: Vec<_> = due.map(|(_, id)| *id).collect();
        // Each once: one that stays due must not keep the others waiting for ever.
        for id in due {
            self.feed_line(cx, id, Turnstile::tick);
        }
    }

    pub(crate) fn replied(&mut self, cx: &mut EventCx<'_, Caller>, op: &Op, result: OpResult) {
        if !is_serve(op) {
            self.feed_owner(cx, op.owner(), |turnstile, cx| {
                turnstile.replied(cx, op, result)
            });
        }
    }

    pub(crate) fn op_dropped(&mut self, cx: &mut EventCx<'_, Caller>, op: &Op) {
        if !is_serve(op) {
            self.feed_owner(cx, op.owner(), |turnstile, cx| turnstile.op_dropped(cx, op));
        }
    }

    pub(crate) fn grant_received(
        &mut self,
        cx: &mut EventCx<'_, Caller>,
        grant: Grant,
        fault: Option<StoreError>,
    ) {
        let owner = grant.owner;
        if owner.mode != Mode::Exclusive {
            let shared = self.shared.get_or_insert_default();
            if !shared.by_owner.contains_key(&owner) {
                // A line of its own gives it back (O1).
                let turnstile = self.exclusive.beside(owner.mode);
                let id = cx.ids.waiter();
                let line = Line {
                    turnstile,
                    owner: None,
                };
                shared.lines.insert(id, line);
                shared.know(owner, id);
            }
        }
        self.feed_owner(cx, owner, |turnstile, cx| {
            turnstile.grant_received(cx, grant, fault);
        });
    }

    #[cfg(test)]
    pub(super) fn known_owners(&self) -> usize {
        let shared = self.shared.as_ref();
        shared.map_or(0, |shared| shared.by_owner.len())
    }

    /// Feeds the turnstile of this caller.
    pub(crate) fn feed<R>(
        &mut self,
        cx: &mut EventCx<'_, Caller>,
        id: WaiterId,
        event: impl FnOnce(&mut Turnstile<Caller>, &mut EventCx<'_, Caller>) -> R,
    ) -> R {
        match self.has_line(id) {
            true => self.feed_line(cx, id, event).expect("it has the line"),
            // Also for a caller whose line is over: nobody there knows it.
            false => event(&mut self.exclusive, cx),
        }
    }

    /// Feeds the turnstile of this owner. One that is not known has nothing to hear.
    fn feed_owner(
        &mut self,
        cx: &mut EventCx<'_, Caller>,
        owner: Owner,
        event: impl FnOnce(&mut Turnstile<Caller>, &mut EventCx<'_, Caller>),
    ) {
        if owner.mode == Mode::Exclusive {
            event(&mut self.exclusive, cx);
            let tickets = self.exclusive.take_tickets();
            self.ask_again(cx, tickets, None);
        } else if let Some(shared) = &self.shared
            && let Some(id) = shared.by_owner.get(&owner).copied()
        {
            self.feed_line(cx, id, event);
        }
    }

    /// Feeds all turnstiles.
    pub(crate) fn feed_all(
        &mut self,
        cx: &mut EventCx<'_, Caller>,
        event: impl Fn(&mut Turnstile<Caller>, &mut EventCx<'_, Caller>),
    ) {
        event(&mut self.exclusive, cx);
        let ids = self.shared.iter().flat_map(|shared| shared.lines.keys());
        for id in ids.copied().collect::<Vec<_>>() {
            self.feed_line(cx, id, &event);
        }
    }

    fn has_line(&self, id: WaiterId) -> bool {
        let shared = self.shared.as_ref();
        shared.is_some_and(|shared| shared.lines.contains_key(&id))
    }

    /// Feeds a line, unless what another was fed has ended it. If another becomes the first that waits, that one asks
    /// soon.
    fn feed_line<R>(
        &mut self,
        cx: &mut EventCx<'_, Caller>,
        id: WaiterId,
        event: impl FnOnce(&mut Turnstile<Caller>, &mut EventCx<'_, Caller>) -> R,
    ) -> Option<R> {
        let (result, tickets, mut next) = self.feed_one(cx, id, event)?;
        while let Some(first) = next {
            // Its wait may be over as well, and so on. It has no answer, so it says nothing of tickets.
            let fed = self.feed_one(cx, first, Turnstile::ask_soon);
            next = fed.and_then(|((), _, next)| next);
        }
        self.ask_again(cx, tickets, Some(id));
        self.drop_if_unused();
        Some(result)
    }

    fn drop_if_unused(&mut self) {
        self.shared.take_if(|shared| shared.lines.is_empty());
    }

    /// Feeds a line, and drops it if it is idle. Returns what it has found out about tickets, and the line that is the
    /// first in its place.
    fn feed_one<R>(
        &mut self,
        cx: &mut EventCx<'_, Caller>,
        id: WaiterId,
        event: impl FnOnce(&mut Turnstile<Caller>, &mut EventCx<'_, Caller>) -> R,
    ) -> Option<(R, Tickets, Option<WaiterId>)> {
        let shared = self.shared.as_mut()?;
        let leases = cx.leases + shared.lines.len();
        let Line { turnstile, .. } = shared.lines.get_mut(&id)?;
        let first = shared.acquiring.first().copied();
        let mut cx_of_line = EventCx {
            now: cx.now,
            ids: cx.ids,
            effects: cx.effects,
            asks_for_others: first.is_none_or(|first| id <= first),
            leases,
        };
        let (before, earlier) = (Indexed::of(turnstile), cx_of_line.effects.len());
        let result = event(turnstile, &mut cx_of_line);
        let tickets = turnstile.take_tickets();
        shared.update(cx, id, before, earlier);
        let next = shared.acquiring.first().copied();
        let next = next.filter(|next| first == Some(id) && *next != id);
        Some((result, tickets, next))
    }

    /// M5: if the ticket of the line `but` is gone, or that of the exclusive callers, all others may be, too: all lines
    /// ask. If it may be gone, the next line asks.
    fn ask_again(&mut self, cx: &mut EventCx<'_, Caller>, tickets: Tickets, but: Option<WaiterId>) {
        let (most, all_ask) = match tickets {
            Tickets::Kept => return,
            Tickets::Unknown => (1, false),
            Tickets::Gone => (usize::MAX, true),
        };
        if but.is_some() {
            self.exclusive.ask_again(cx, all_ask);
        }
        let acquiring = self.shared.iter().flat_map(|shared| &shared.acquiring);
        let others = acquiring.copied().filter(|id| Some(*id) != but);
        for id in others.take(most).collect::<Vec<_>>() {
            self.feed_line(cx, id, |turnstile, cx| turnstile.ask_again(cx, all_ask));
        }
    }
}

/// Nobody waits for its answer. If it is not done, the first in the queue asks soon (W2).
fn is_serve(op: &Op) -> bool {
    matches!(op, Op::Serve { .. })
}

impl<Caller: Clone> SharedLines<Caller> {
    /// A line was fed: drops it if it is idle, and brings the indexes up to date. `earlier`: how many effects there were
    /// before.
    fn update(
        &mut self,
        cx: &mut EventCx<'_, Caller>,
        id: WaiterId,
        before: Indexed,
        earlier: usize,
    ) {
        let mut owners = Vec::new();
        for effect in cx.effects.range_mut(earlier..) {
            if let Effect::Send(op) = effect {
                owners.push(op.owner());
            } else if let Effect::Wake(_, Verdict::Waiter(WaiterVerdict::Refused(refusal))) = effect
                && let NotGranted::Busy(holding @ None) = refusal
            {
                *holding = self.holding(cx.now);
            }
        }
        let turnstile = self.lines.get(&id).map(|line| &line.turnstile);
        let turnstile = turnstile.filter(|turnstile| !turnstile.is_idle());
        let after = turnstile.map(Indexed::of);
        if after.is_none() {
            let line = self.lines.remove(&id);
            if let Some(owner) = line.and_then(|line| line.owner) {
                self.by_owner.remove(&owner);
            }
        } else {
            for owner in owners {
                self.know(owner, id);
            }
        }
        let after = after.unwrap_or_default();
        if before.timeout != after.timeout {
            if let Some(timeout) = before.timeout {
                self.timeouts.remove(&(timeout, id));
            }
            self.timeouts.extend(after.timeout.map(|at| (at, id)));
        }
        match after.is_acquiring {
            true => self.acquiring.insert(id),
            false => self.acquiring.remove(&id),
        };
        self.waiters = self.waiters + after.waiters - before.waiters;
    }

    fn know(&mut self, owner: Owner, id: WaiterId) {
        if self.by_owner.insert(owner, id).is_none()
            && let Some(line) = self.lines.get_mut(&id)
            && let Some(retired) = line.owner.replace(owner)
        {
            // While replicas do not confirm, each attempt has an owner of its own. It is made when nothing is pending for
            // the last one any more (I2).
            self.by_owner.remove(&retired);
        }
    }

    /// Who has the key, as the first line has heard that asks for all of them (M5).
    fn holding(&self, now: Moment) -> Option<Box<Holding>> {
        // The first may be the one that has just ended.
        let mut first = self.acquiring.iter().take(2);
        first.find_map(|id| self.lines.get(id)?.turnstile.holding(now.into()))
    }
}
