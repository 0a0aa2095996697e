//! All that one registry has of one key: a turnstile for the exclusive callers, and one for each shared caller (M6).

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::mem;
use std::sync::Arc;
use std::time::Duration;

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
/// caller of its turnstile.
#[derive(Debug)]
struct SharedLines<Caller> {
    /// By the arrival that began the line.
    lines: BTreeMap<WaiterId, Line<Caller>>,
    /// Which line an owner belongs to.
    by_owner: HashMap<Owner, WaiterId>,
    /// When each line is to be ticked.
    timeouts: BTreeSet<(Moment, WaiterId)>,
    /// Those that wait for the store. The first asks it for all of them (M5).
    waiting: BTreeSet<WaiterId>,
    effects: VecDeque<Effect<Caller>>,
    /// How many lines have a caller that waits, also while the store is away.
    callers: usize,
}

#[derive(Debug)]
struct Line<Caller> {
    turnstile: Turnstile<Caller>,
    /// Whether it counts as one with a caller that waits.
    has_caller: bool,
    /// Its place in `timeouts`.
    timeout: Option<Moment>,
    /// Its places in `by_owner`.
    owners: Vec<Owner>,
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
        let effect = effect.or_else(|| self.shared.as_mut()?.effects.pop_front());
        if effect.is_none() {
            self.shared.take_if(|shared| shared.lines.is_empty());
        }
        effect
    }

    /// Lends it a buffer for the effects of an event, or takes that back once all are drained.
    pub(crate) fn swap_buffer(&mut self, buffer: &mut VecDeque<Effect<Caller>>) {
        self.exclusive.swap_effects(buffer);
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
        let effects = self.shared.iter().flat_map(|shared| &shared.effects);
        let effects = effects.filter_map(Effect::caller);
        self.turnstiles()
            .flat_map(Turnstile::callers)
            .chain(effects)
    }

    fn turnstiles(&self) -> impl Iterator<Item = &Turnstile<Caller>> {
        let lines = self.shared.iter().flat_map(|shared| shared.lines.values());
        [&self.exclusive]
            .into_iter()
            .chain(lines.map(|line| &line.turnstile))
    }

    /// When to call [`tick`](Self::tick) at the latest.
    pub(crate) fn next_timeout(&self) -> Option<Moment> {
        let shared = self.shared.as_ref();
        let shared = shared.and_then(|shared| Some(shared.timeouts.first()?.0));
        self.exclusive
            .next_timeout()
            .into_iter()
            .chain(shared)
            .min()
    }

    /// A caller wants the key. Its verdicts come as effects.
    pub(crate) fn arrive(
        &mut self,
        cx: &mut EventCx<'_>,
        mode: Mode,
        request: Request<Caller>,
    ) -> WaiterId {
        let shared = self.shared.as_ref().map_or(0, |it| it.callers);
        if mode == Mode::Exclusive {
            return self.exclusive.arrive(cx, request, shared);
        }
        let others = shared + self.exclusive.waiting();
        let (exclusive, shared) = self.shared();
        let mut turnstile = exclusive.beside(mode);
        let id = turnstile.arrive(cx, request, others);
        shared.add(id, turnstile);
        shared.settle(cx.now, id);
        id
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
        let (exclusive, shared) = self.shared();
        let mut turnstile = exclusive.beside(mode);
        let id = turnstile.adopt(cx, from, request);
        shared.add(id, turnstile);
        shared.settle(cx.now, id);
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
        // Each once: one that stays due must not keep the others waiting for ever.
        let mut due = Vec::new();
        if let Some(shared) = &mut self.shared {
            while shared.timeouts.first().is_some_and(|(at, _)| *at <= cx.now) {
                due.extend(shared.timeouts.pop_first().map(|(_, id)| id));
            }
            for id in &due {
                if let Some(line) = shared.lines.get_mut(id) {
                    line.timeout = None;
                }
            }
        }
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
        if owner.mode != Mode::Exclusive && !self.knows(owner) {
            // A line of its own gives it back (O1).
            let (exclusive, shared) = self.shared();
            let turnstile = exclusive.beside(owner.mode);
            let id = cx.ids.waiter();
            shared.add(id, turnstile);
            shared.know(owner, id);
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
        self.shared
            .as_ref()
            .map_or(0, |shared| shared.by_owner.len())
    }

    fn knows(&self, owner: Owner) -> bool {
        let shared = self.shared.as_ref();
        shared.is_some_and(|shared| shared.by_owner.contains_key(&owner))
    }

    fn shared(&mut self) -> (&Turnstile<Caller>, &mut SharedLines<Caller>) {
        let shared = self
            .shared
            .get_or_insert_with(|| Box::new(SharedLines::new()));
        (&self.exclusive, shared)
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
        for id in self.line_ids() {
            self.feed_line_if_any(cx, id, &event);
        }
    }

    fn line_ids(&self) -> Vec<WaiterId> {
        let shared = self.shared.iter();
        shared.flat_map(|it| it.lines.keys().copied()).collect()
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
        let line = shared.lines.get_mut(&id).expect("the caller looked");
        let first = shared.waiting.first().copied();
        let mut cx_of_line = EventCx {
            now: cx.now,
            ids: cx.ids,
            asks_for_others: first.is_none_or(|first| id <= first),
            leases,
        };
        let result = event(&mut line.turnstile, &mut cx_of_line);
        let tickets = line.turnstile.take_tickets();
        shared.settle(cx.now, id);
        let next = shared.waiting.first().copied();
        let next = next.filter(|next| first == Some(id) && *next != id);
        (result, tickets, next)
    }

    /// If the store has lost the ticket of the line `but`, or of the exclusive callers, it may have lost the others, too:
    /// all of them ask. If it may have lost it, the next one asks.
    fn ask_again(&mut self, cx: &mut EventCx<'_>, tickets: Tickets, but: Option<WaiterId>) {
        let (most, all_ask) = match tickets {
            Tickets::Kept => return,
            Tickets::Unknown => (1, false),
            Tickets::Gone => (usize::MAX, true),
        };
        if but.is_some() {
            self.exclusive.ask_again(cx, all_ask);
        }
        let waiting = self.shared.iter().flat_map(|shared| &shared.waiting);
        let others = waiting.copied().filter(|id| Some(*id) != but);
        for id in others.take(most).collect::<Vec<_>>() {
            self.feed_line_if_any(cx, id, |turnstile, cx| turnstile.ask_again(cx, all_ask));
        }
    }
}

/// Nobody waits for its answer: if it is lost, whoever is first in the queue asks soon (W2).
fn is_serve(op: &Op) -> bool {
    matches!(op, Op::Serve { .. })
}

impl<Caller: Clone> SharedLines<Caller> {
    fn new() -> Self {
        Self {
            lines: BTreeMap::new(),
            by_owner: HashMap::default(),
            timeouts: BTreeSet::new(),
            waiting: BTreeSet::new(),
            effects: VecDeque::new(),
            callers: 0,
        }
    }

    fn add(&mut self, id: WaiterId, turnstile: Turnstile<Caller>) {
        let line = Line {
            turnstile,
            has_caller: false,
            timeout: None,
            owners: Vec::new(),
        };
        self.lines.insert(id, line);
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
        let mut first = self.waiting.iter().take(2);
        first.find_map(|id| self.lines.get(id)?.turnstile.holding(now.into()))
    }

    /// A line was fed: takes its effects, and brings the indexes up to date.
    fn settle(&mut self, now: Moment, id: WaiterId) {
        let Some(line) = self.lines.get_mut(&id) else {
            return;
        };
        let (mut owners, mut effects) = (Vec::new(), VecDeque::new());
        line.turnstile.swap_effects(&mut effects);
        for mut effect in effects {
            if let Effect::Send(op) = &effect {
                owners.push(op.owner());
            } else if let Effect::Wake(_, Verdict::Waiter(verdict)) = &mut effect
                && let WaiterVerdict::Refused(Refusal::Busy(holding @ None)) = verdict
            {
                *holding = self.holding(now);
            }
            self.effects.push_back(effect);
        }
        let Some(line) = self.lines.get_mut(&id) else {
            return;
        };
        if let Some(timeout) = line.timeout.take() {
            self.timeouts.remove(&(timeout, id));
        }
        self.waiting.remove(&id);
        let had_caller = mem::replace(&mut line.has_caller, line.turnstile.waiting() > 0);
        self.callers = self.callers + usize::from(line.has_caller) - usize::from(had_caller);
        if line.turnstile.is_idle() {
            for owner in self
                .lines
                .remove(&id)
                .into_iter()
                .flat_map(|line| line.owners)
            {
                self.by_owner.remove(&owner);
            }
            return;
        }
        line.timeout = line.turnstile.next_timeout();
        self.timeouts.extend(line.timeout.map(|at| (at, id)));
        if line.turnstile.is_acquiring() {
            self.waiting.insert(id);
        }
        for owner in owners {
            self.know(owner, id);
        }
    }
}
