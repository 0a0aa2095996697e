//! All that one registry has of one key: a turnstile for the exclusive callers, and one for each shared caller (M6).

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;
use std::{iter, mem};

use foldhash::HashMap;

use super::ids::EventCx;
use super::machine::{Effect, Tickets, Turnstile};
use super::verdict::{Holding, Refusal, Verdict, WaiterVerdict};
use super::wait_queue::{Request, WaiterId};
use crate::base::clock::Moment;
use crate::base::{LossCause, Mode, OnFinish, StoreError};
use crate::store::contract::{Grant, Op, OpResult, Owner};

/// The turnstiles of one key. Its methods are those of a [`Turnstile`], and each reaches the one that it is about.
///
/// After every call drain [`next_effect`](Self::next_effect) in order, then look at
/// [`next_timeout`](Self::next_timeout) and [`is_idle`](Self::is_idle).
#[derive(Debug)]
pub(crate) struct Lines<Caller> {
    exclusive: Turnstile<Caller>,
    /// Most keys have none.
    shared: Option<Box<SharedLines<Caller>>>,
}

/// The lines of shared callers. A reader or a permit has a ticket, a renewal and a loss of its own, so each is the only
/// caller of its turnstile (M6).
#[derive(Debug)]
struct SharedLines<Caller> {
    /// By the arrival that began the line.
    lines: BTreeMap<WaiterId, Line<Caller>>,
    /// Which line an owner belongs to.
    by_owner: HashMap<Owner, WaiterId>,
    /// When each line is to be ticked. Without it a tick would look at each of thousands of permits.
    timeouts: BTreeSet<(Moment, WaiterId)>,
    /// Those that have asked the store. The first asks again for all of them (M5).
    acquiring: BTreeSet<WaiterId>,
    /// How many callers wait, also while the store is away.
    waiters: usize,
}

#[derive(Debug)]
struct Line<Caller> {
    turnstile: Turnstile<Caller>,
    /// Its places in `by_owner`.
    owners: Vec<Owner>,
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
            by_owner: HashMap::default(),
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

    /// What is to be done next.
    pub(crate) fn next_effect(&mut self) -> Option<Effect<Caller>> {
        let effect = self.exclusive.next_effect();
        if effect.is_none() {
            self.shared.take_if(|shared| shared.lines.is_empty());
        }
        effect
    }

    /// Lends it a buffer for the effects of an event, or takes that back once all are drained.
    pub(crate) fn swap_buffer(&mut self, buffer: &mut VecDeque<Effect<Caller>>) {
        mem::swap(self.exclusive.effects(), buffer);
    }

    /// Nobody waits, nothing is held or pending, and all effects are drained: all this may be dropped.
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

    /// Everybody who still awaits a verdict.
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

    /// A caller wants the key. Its verdicts come as effects.
    pub(crate) fn arrive(
        &mut self,
        cx: &mut EventCx<'_>,
        mode: Mode,
        request: Request<Caller>,
    ) -> WaiterId {
        let shared = self.shared.as_ref().map_or(0, |shared| shared.waiters);
        if mode == Mode::Exclusive {
            return self.exclusive.arrive(cx, request, shared);
        }
        let others = shared + self.exclusive.waiting();
        self.begin_line(cx, mode, |turnstile, cx| {
            turnstile.arrive(cx, request, others)
        })
    }

    /// A caller wants the lease that the owner `from` left in the store: see [`Turnstile::adopt`].
    pub(crate) fn adopt(
        &mut self,
        cx: &mut EventCx<'_>,
        mode: Mode,
        from: Arc<str>,
        request: Request<Caller>,
    ) -> WaiterId {
        if mode == Mode::Exclusive {
            return self.exclusive.adopt(cx, from, request);
        }
        self.begin_line(cx, mode, |turnstile, cx| turnstile.adopt(cx, from, request))
    }

    fn begin_line(
        &mut self,
        cx: &mut EventCx<'_>,
        mode: Mode,
        arrive: impl FnOnce(&mut Turnstile<Caller>, &mut EventCx<'_>) -> WaiterId,
    ) -> WaiterId {
        let mut turnstile = self.exclusive.beside(mode);
        let effects = self.exclusive.effects();
        let earlier = effects.len();
        mem::swap(turnstile.effects(), effects);
        let id = arrive(&mut turnstile, cx);
        mem::swap(turnstile.effects(), effects);
        let shared = self.shared.get_or_insert_default();
        let owners = Vec::new();
        shared.lines.insert(id, Line { turnstile, owners });
        shared.update(cx.now, id, Indexed::default(), effects.range_mut(earlier..));
        id
    }

    pub(crate) fn leave(&mut self, cx: &mut EventCx<'_>, id: WaiterId) {
        self.feed(cx, id, |turnstile, cx| turnstile.leave(cx, id));
    }

    pub(crate) fn take(&mut self, cx: &mut EventCx<'_>, id: WaiterId) -> bool {
        self.feed(cx, id, |turnstile, cx| turnstile.take(cx, id))
    }

    pub(crate) fn extend(
        &mut self,
        cx: &mut EventCx<'_>,
        id: WaiterId,
        ttl: Duration,
    ) -> Option<Moment> {
        self.feed(cx, id, |turnstile, cx| turnstile.extend(cx, id, ttl))
    }

    pub(crate) fn finish(
        &mut self,
        cx: &mut EventCx<'_>,
        id: WaiterId,
        keeps: bool,
    ) -> Option<Owner> {
        self.feed(cx, id, |turnstile, cx| turnstile.finish(cx, id, keeps))
    }

    pub(crate) fn detach(&mut self, cx: &mut EventCx<'_>, id: WaiterId) -> Option<Owner> {
        self.feed(cx, id, |turnstile, cx| turnstile.detach(cx, id))
    }

    pub(crate) fn restart(
        &mut self,
        cx: &mut EventCx<'_>,
        id: WaiterId,
        renewals: u32,
        on_finish: OnFinish,
    ) {
        self.feed(cx, id, |turnstile, cx| {
            turnstile.restart(cx, id, renewals, on_finish);
        });
    }

    pub(crate) fn forbid_passes(&mut self, cx: &mut EventCx<'_>, id: WaiterId) {
        self.feed(cx, id, |turnstile, _| turnstile.forbid_passes(id));
    }

    pub(crate) fn is_kept(&self, cx: &EventCx<'_>, id: WaiterId) -> bool {
        self.turnstile_of(id).is_kept(cx, id)
    }

    /// The owner under which the store has the lease of this holder.
    pub(crate) fn owner_of(&self, id: WaiterId) -> Option<Owner> {
        self.turnstile_of(id).owner_of(id)
    }

    /// Whether any lease is held under the owner with this sequence.
    pub(crate) fn holds(&self, sequence: u64) -> bool {
        let mut owners = self.turnstiles().filter_map(Turnstile::owner);
        owners.any(|owner| owner.sequence == sequence)
    }

    pub(crate) fn cause_of_expiry(&self, now: Moment, id: WaiterId) -> Option<LossCause> {
        self.turnstile_of(id).cause_of_expiry(now, id)
    }

    fn turnstile_of(&self, id: WaiterId) -> &Turnstile<Caller> {
        let shared = self.shared.as_ref();
        let line = shared.and_then(|shared| shared.lines.get(&id));
        line.map_or(&self.exclusive, |line| &line.turnstile)
    }

    pub(crate) fn on_pause(&mut self, cx: &mut EventCx<'_>, id: WaiterId, pause: Option<Duration>) {
        self.feed(cx, id, |turnstile, cx| turnstile.on_pause(cx, id, pause));
    }

    /// Time went by.
    pub(crate) fn tick(&mut self, cx: &mut EventCx<'_>) {
        self.exclusive.tick(cx);
        let due = ..=(cx.now, WaiterId::LAST);
        let shared = self.shared.iter();
        let due = shared.flat_map(|shared| shared.timeouts.range(due));
        let due: Vec<_> = due.map(|(_, id)| *id).collect();
        // Each once: one that stays due must not keep the others waiting for ever.
        for id in due {
            self.feed_line_if_any(cx, id, Turnstile::tick);
        }
    }

    pub(crate) fn replied(&mut self, cx: &mut EventCx<'_>, op: &Op, result: OpResult) {
        if !is_serve(op) {
            self.feed_owner(cx, op.owner(), |turnstile, cx| {
                turnstile.replied(cx, op, result)
            });
        }
    }

    pub(crate) fn op_dropped(&mut self, cx: &mut EventCx<'_>, op: &Op) {
        if !is_serve(op) {
            self.feed_owner(cx, op.owner(), |turnstile, cx| turnstile.op_dropped(cx, op));
        }
    }

    pub(crate) fn grant_received(
        &mut self,
        cx: &mut EventCx<'_>,
        grant: Grant,
        fault: Option<StoreError>,
    ) {
        let owner = grant.owner;
        if owner.mode != Mode::Exclusive {
            let shared = self.shared.get_or_insert_default();
            if !shared.by_owner.contains_key(&owner) {
                // A line of its own gives it back (O1).
                let turnstile = self.exclusive.beside(owner.mode);
                let (id, owners) = (cx.ids.waiter(), Vec::new());
                shared.lines.insert(id, Line { turnstile, owners });
                shared.know(owner, id);
            }
        }
        self.feed_owner(cx, owner, |turnstile, cx| {
            turnstile.grant_received(cx, grant, fault);
        });
    }

    pub(crate) fn down(&mut self, cx: &mut EventCx<'_>, error: &StoreError) {
        self.feed_all(cx, |turnstile, cx| turnstile.down(cx, error));
    }

    pub(crate) fn up_renew(&mut self, cx: &mut EventCx<'_>, elsewhere: bool) {
        self.feed_all(cx, |turnstile, cx| turnstile.up_renew(cx, elsewhere));
    }

    pub(crate) fn up(&mut self, cx: &mut EventCx<'_>, queue: bool) {
        self.feed_all(cx, |turnstile, cx| turnstile.up(cx, queue));
    }

    pub(crate) fn freed(&mut self, cx: &mut EventCx<'_>) {
        self.feed_all(cx, Turnstile::freed);
    }

    pub(crate) fn close(
        &mut self,
        cx: &mut EventCx<'_>,
        grace: impl Fn(&Caller) -> Option<Moment>,
    ) {
        self.feed_all(cx, |turnstile, cx| turnstile.close(cx, &grace));
    }

    pub(crate) fn drain(&mut self, cx: &mut EventCx<'_>) {
        self.feed_all(cx, Turnstile::drain);
    }

    pub(crate) fn disconnect(&mut self, cx: &mut EventCx<'_>) {
        self.feed_all(cx, Turnstile::disconnect);
    }

    #[cfg(test)]
    pub(super) fn known_owners(&self) -> usize {
        let shared = self.shared.as_ref();
        shared.map_or(0, |shared| shared.by_owner.len())
    }

    /// Feeds the turnstile of this caller.
    fn feed<R>(
        &mut self,
        cx: &mut EventCx<'_>,
        id: WaiterId,
        event: impl FnOnce(&mut Turnstile<Caller>, &mut EventCx<'_>) -> R,
    ) -> R {
        match self.has_line(id) {
            true => self.feed_line(cx, id, event),
            // Also for a caller whose line is over: nobody there knows it.
            false => event(&mut self.exclusive, cx),
        }
    }

    /// Feeds the turnstile of this owner. One that is not known has nothing to hear.
    fn feed_owner(
        &mut self,
        cx: &mut EventCx<'_>,
        owner: Owner,
        event: impl FnOnce(&mut Turnstile<Caller>, &mut EventCx<'_>),
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

    fn feed_all(
        &mut self,
        cx: &mut EventCx<'_>,
        event: impl Fn(&mut Turnstile<Caller>, &mut EventCx<'_>),
    ) {
        event(&mut self.exclusive, cx);
        let ids = self.shared.iter().flat_map(|shared| shared.lines.keys());
        for id in ids.copied().collect::<Vec<_>>() {
            self.feed_line_if_any(cx, id, &event);
        }
    }

    fn has_line(&self, id: WaiterId) -> bool {
        let shared = self.shared.as_ref();
        shared.is_some_and(|shared| shared.lines.contains_key(&id))
    }

    /// Feeds a line, unless what another was fed has ended it.
    fn feed_line_if_any(
        &mut self,
        cx: &mut EventCx<'_>,
        id: WaiterId,
        event: impl FnOnce(&mut Turnstile<Caller>, &mut EventCx<'_>),
    ) {
        if self.has_line(id) {
            self.feed_line(cx, id, event);
        }
    }

    /// Feeds a line. If another becomes the first that waits, that one asks soon.
    fn feed_line<R>(
        &mut self,
        cx: &mut EventCx<'_>,
        id: WaiterId,
        event: impl FnOnce(&mut Turnstile<Caller>, &mut EventCx<'_>) -> R,
    ) -> R {
        let (result, tickets, mut next) = self.feed_one(cx, id, event);
        while let Some(first) = next {
            // Its wait may be over as well, and so on. It has no answer, so it says nothing of tickets.
            ((), _, next) = self.feed_one(cx, first, Turnstile::ask_soon);
        }
        self.ask_again(cx, tickets, Some(id));
        result
    }

    /// Feeds a line, and drops it if it is idle. Returns what it has found out about tickets, and the line that is the
    /// first in its place.
    fn feed_one<R>(
        &mut self,
        cx: &mut EventCx<'_>,
        id: WaiterId,
        event: impl FnOnce(&mut Turnstile<Caller>, &mut EventCx<'_>) -> R,
    ) -> (R, Tickets, Option<WaiterId>) {
        let shared = self.shared.as_mut().expect("it has the line");
        let leases = cx.leases + shared.lines.len();
        let Line { turnstile, .. } = shared.lines.get_mut(&id).expect("the caller looked");
        let first = shared.acquiring.first().copied();
        let mut cx_of_line = EventCx {
            now: cx.now,
            ids: cx.ids,
            asks_for_others: first.is_none_or(|first| id <= first),
            leases,
        };
        let effects = self.exclusive.effects();
        let (before, earlier) = (Indexed::of(turnstile), effects.len());
        mem::swap(turnstile.effects(), effects);
        let result = event(turnstile, &mut cx_of_line);
        mem::swap(turnstile.effects(), effects);
        let tickets = turnstile.take_tickets();
        shared.update(cx.now, id, before, effects.range_mut(earlier..));
        let next = shared.acquiring.first().copied();
        let next = next.filter(|next| first == Some(id) && *next != id);
        (result, tickets, next)
    }

    /// M5: if the ticket of the line `but` is gone, or that of the exclusive callers, all others may be, too: all lines
    /// ask. If it may be gone, the next line asks.
    fn ask_again(&mut self, cx: &mut EventCx<'_>, tickets: Tickets, but: Option<WaiterId>) {
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
            self.feed_line_if_any(cx, id, |turnstile, cx| turnstile.ask_again(cx, all_ask));
        }
    }
}

/// Nobody waits for its answer. If it is not done, the first in the queue asks soon (W2).
fn is_serve(op: &Op) -> bool {
    matches!(op, Op::Serve { .. })
}

impl<Caller: Clone> SharedLines<Caller> {
    /// A line was fed: drops it if it is idle, and brings the indexes up to date. `effects`: those of the event.
    fn update<'a>(
        &mut self,
        now: Moment,
        id: WaiterId,
        before: Indexed,
        effects: impl Iterator<Item = &'a mut Effect<Caller>>,
    ) where
        Caller: 'a,
    {
        let mut owners = Vec::new();
        for effect in effects {
            if let Effect::Send(op) = effect {
                owners.push(op.owner());
            } else if let Effect::Wake(_, Verdict::Waiter(WaiterVerdict::Refused(refusal))) = effect
                && let Refusal::Busy(holding @ None) = refusal
            {
                *holding = self.holding(now);
            }
        }
        let turnstile = self.lines.get(&id).map(|line| &line.turnstile);
        let turnstile = turnstile.filter(|turnstile| !turnstile.is_idle());
        let after = turnstile.map(Indexed::of);
        if after.is_none() {
            let line = self.lines.remove(&id);
            for owner in line.into_iter().flat_map(|line| line.owners) {
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
        {
            // While replicas do not confirm, each attempt has an owner of its own.
            let known = mem::take(&mut line.owners).into_iter();
            let (current, retired) = known.partition(|it| line.turnstile.concerns(*it));
            line.owners = current;
            line.owners.push(owner);
            for owner in retired {
                self.by_owner.remove(&owner);
            }
        }
    }

    /// Who has the key, as the first line has heard that asks for all of them (M5).
    fn holding(&self, now: Moment) -> Option<Box<Holding>> {
        // The first may be the one that has just ended.
        let mut first = self.acquiring.iter().take(2);
        first.find_map(|id| self.lines.get(id)?.turnstile.holding(now.into()))
    }
}
