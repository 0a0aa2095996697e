use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use super::ids::EventCx;
use super::key_state::{InFlight, KeyState, Sent};
use super::pending::{Ending, PendingOp, PendingOps};
use super::rules::{Limits, Rules};
use super::tenure::LocalLease;
use super::time::{Moment, Point, deadline};
use super::verdict::{LeaseEnd, LeaseVerdict, Refusal, Verdict, WaiterVerdict};
use super::wait_queue::{Adopter, Patience, WaitQueue, Waiter, WaiterId};
use crate::StoreError;
use crate::store::contract::{Op, Owner};

/// For how long a renewal may be under way.
const UNDER_WAY: Duration = Duration::from_secs(60);

/// What the shell is to do.
#[derive(Clone, Debug)]
pub(crate) enum Effect<C> {
    Send(Op),
    Wake(C, Verdict),
    /// The waiter's policy is asked for its next pause, and [`on_pause`](Turnstile::on_pause) told the answer. The
    /// policy is the user's code: the shell asks it where nothing is locked.
    AskPolicy(C, WaiterId),
}

/// Room for effects. A shell that has many turnstiles lends its own to each in turn: one that is held keeps none,
/// and a turn allocates nothing for its two verdicts.
pub(crate) type EffectBuffer<C> = Option<Box<VecDeque<Effect<C>>>>;

/// Room for so many effects is kept.
const MAX_BUFFER: usize = 64;

/// See the [module](super).
///
/// After every call drain [`next_effect`](Self::next_effect) in order, then look at
/// [`next_timeout`](Self::next_timeout) and [`is_idle`](Self::is_idle).
#[derive(Debug)]
pub(crate) struct Turnstile<C> {
    pub(super) rules: Limits,
    pub(super) waiters: WaitQueue<C>,
    /// Those who adopt, first come first: served before the line, one at a time.
    pub(super) adopters: VecDeque<Adopter<C>>,
    pub(super) state: KeyState<C>,
    pub(super) in_flight: Option<Box<InFlight<C>>>,
    pub(super) pending: PendingOps<C>,
    /// Whether the store has a queue, and grants reach us.
    pub(super) queue: bool,
    /// Whether the connection is known to be gone: nothing is sent until it is back.
    pub(super) down: bool,
    /// What the store said last, if it was no answer.
    pub(super) trouble: Option<Box<StoreError>>,
    /// Refusals in a row.
    pub(super) failures: u32,
    /// Nobody comes in any more.
    pub(super) closed: bool,
    effects: EffectBuffer<C>,
}

impl<C: Clone> Turnstile<C> {
    /// `queue`: whether the store has a queue and grants reach us, as far as is known.
    pub(crate) fn new(rules: Rules, queue: bool) -> Self {
        Self {
            rules: rules.into(),
            waiters: WaitQueue::new(),
            adopters: VecDeque::new(),
            state: KeyState::Idle,
            in_flight: None,
            pending: PendingOps::new(),
            queue,
            down: false,
            trouble: None,
            failures: 0,
            closed: false,
            effects: None,
        }
    }

    /// The store is away, as far as is known: whoever gives up before it answers is told so.
    pub(crate) fn suspect(&mut self, error: StoreError) {
        self.trouble = Some(Box::new(error));
    }

    /// Lends it room for the effects of the next event.
    pub(crate) fn lend_buffer(&mut self, buffer: &mut EffectBuffer<C>) {
        if self.effects.is_none() {
            self.effects = buffer.take();
        }
    }

    /// Takes the room back, once the effects are drained; unless there were so many that it has grown too large to be
    /// kept.
    pub(crate) fn take_buffer(&mut self) -> EffectBuffer<C> {
        let buffer = self.effects.take();
        buffer.filter(|buffer| buffer.capacity() <= MAX_BUFFER)
    }

    /// What is to be done next.
    pub(crate) fn next_effect(&mut self) -> Option<Effect<C>> {
        // The op in flight is the last that an event asks for: it waits there, which saves two allocations a pair.
        let effect = self.effects.as_mut().and_then(|buffer| buffer.pop_front());
        effect.or_else(|| {
            let in_flight = self.in_flight.as_mut()?;
            in_flight.unsent.take().map(Effect::Send)
        })
    }

    /// Nothing waits, is held, or is owed: the turnstile may be forgotten.
    pub(crate) fn is_idle(&self) -> bool {
        self.waiters.is_empty()
            && self.adopters.is_empty()
            && matches!(self.state, KeyState::Idle)
            && self.in_flight.is_none()
            && self.pending.is_empty()
    }

    /// Whether a ticket of ours may stand in the store's queue, or be entered soon.
    pub(crate) fn may_have_ticket(&self) -> bool {
        matches!(self.state, KeyState::Acquiring { .. })
            || !self.waiters.is_empty()
            || self.in_flight.is_some()
            || !self.pending.is_empty()
    }

    /// Who holds a lease.
    pub(crate) fn holder(&self) -> Option<&C> {
        self.granted(true)
    }

    /// Who waits, the first first: one who is granted and has not looked yet, those who adopt, the line.
    pub(crate) fn waiters(&self) -> impl Iterator<Item = &C> {
        let granted = self.granted(false).into_iter();
        let adopters = self.adopters.iter().map(|adopter| &adopter.waiter);
        let waiters = adopters.chain(self.waiters.iter());
        granted.chain(waiters.map(|waiter| &waiter.who))
    }

    /// Everybody who is still to be told something.
    pub(crate) fn callers(&self) -> impl Iterator<Item = &C> {
        let in_flight = self.in_flight.iter().filter_map(|it| match &it.what {
            Sent::Pending(pending) => pending.ending.as_ref(),
            Sent::Ask { .. } => None,
        });
        let pending = self.pending.iter().filter_map(|it| it.ending.as_ref());
        let endings = in_flight.chain(pending).map(|ending| &ending.who);
        let effects = self.effects.iter().flat_map(|effects| effects.iter());
        let effects = effects.filter_map(|effect| match effect {
            Effect::Wake(who, _) | Effect::AskPolicy(who, _) => Some(who),
            Effect::Send(_) => None,
        });
        let holder = self.holder().into_iter();
        holder.chain(self.waiters()).chain(endings).chain(effects)
    }

    fn granted(&self, taken: bool) -> Option<&C> {
        let KeyState::Held(tenure) = &self.state else {
            return None;
        };
        let lease = tenure.lease.as_ref();
        lease
            .filter(|lease| lease.is_taken() == taken)
            .map(|lease| &lease.who)
    }

    /// When to call [`tick`](Self::tick) at the latest.
    pub(crate) fn next_timeout(&self) -> Option<Moment> {
        let mut next = self.waiters.next_end();
        let mut consider = |point: Option<Point>| {
            next = match (next, point) {
                (Some(next), Some(point)) => Some(next.min(point)),
                (next, point) => next.or(point),
            };
        };
        consider(
            self.adopters
                .iter()
                .map(|one| one.waiter.until.into())
                .min(),
        );
        consider(self.pending.next_timeout());
        if let Some(in_flight) = &self.in_flight
            && let Sent::Pending(pending) = &in_flight.what
        {
            consider(pending.ending.as_ref().map(|ending| ending.deadline));
        }
        let may_send = self.in_flight.is_none() && !self.down;
        if may_send {
            consider(self.pending.front().map(|pending| pending.not_before));
        }
        match &self.state {
            KeyState::Idle => {}
            KeyState::Acquiring {
                acquisition,
                ask_at,
            } => {
                if may_send && self.pending.is_empty() {
                    consider(acquisition.withdraw_at.or(Some(*ask_at)));
                }
            }
            KeyState::Held(tenure) => consider(Some(tenure.next_timeout(self.down))),
        }
        next.map(Point::moment)
    }

    /// A caller wants the key. Its verdicts come as effects.
    pub(crate) fn arrive(&mut self, cx: &mut EventCx<'_>, waiter: Waiter<C>) -> WaiterId {
        self.advance_time(cx);
        let id = cx.ids.waiter();
        let held = matches!(&self.state, KeyState::Held(tenure) if tenure.lease.is_some());
        if self.closed {
            self.refuse(waiter.who, Refusal::Closed);
        } else if waiter.patience == Patience::Once && (held || self.waiters.has_patient()) {
            let refusal = match &self.trouble {
                // Nobody is known to have it.
                Some(trouble) if !held => Refusal::Failed(StoreError::clone(trouble)),
                _ => Refusal::Busy,
            };
            self.refuse(waiter.who, refusal);
        } else if self.waiters.len() >= self.rules.waiters as usize {
            self.refuse(waiter.who, Refusal::QueueFull);
        } else {
            self.waiters.push(id, waiter);
            if held || self.is_known_busy() {
                self.waiters.mark_busy();
            } else if self.trouble.is_some() {
                self.waiters.mark_answered();
            }
        }
        self.schedule(cx);
        id
    }

    /// Whether the store has said that others hold the key, and is not being asked again.
    fn is_known_busy(&self) -> bool {
        let is_busy =
            matches!(&self.state, KeyState::Acquiring { acquisition, .. } if acquisition.is_busy);
        is_busy && self.in_flight.is_none() && !self.down
    }

    /// A caller wants the lease that the owner `from` left in the store, whoever stands in line for
    /// the key. Its verdicts come as effects, as those of a waiter do.
    pub(crate) fn adopt(
        &mut self,
        cx: &mut EventCx<'_>,
        from: Arc<str>,
        waiter: Waiter<C>,
    ) -> WaiterId {
        self.advance_time(cx);
        let id = cx.ids.waiter();
        if self.closed {
            self.refuse(waiter.who, Refusal::Closed);
        } else {
            self.adopters.push_back(Adopter { id, from, waiter });
        }
        self.schedule(cx);
        id
    }

    /// A waiter gave up, or was dropped: in line, adopting, or granted and not taken.
    pub(crate) fn leave(&mut self, cx: &mut EventCx<'_>, id: WaiterId) {
        self.advance_time(cx);
        let adopter = self.adopters.iter().position(|one| one.id == id);
        if adopter.and_then(|at| self.adopters.remove(at)).is_none()
            && self.waiters.remove(id).is_none()
            && let KeyState::Held(tenure) = &mut self.state
            && tenure.lease.as_ref().is_some_and(|lease| lease.id == id)
        {
            tenure.lease = None;
        }
        self.schedule(cx);
    }

    /// A granted waiter saw its verdict: the lease is held from here on. False if the turn was
    /// another's by then.
    pub(crate) fn take(&mut self, cx: &mut EventCx<'_>, id: WaiterId) -> bool {
        self.advance_time(cx);
        let mut taken = false;
        let mut wants_more = false;
        if let KeyState::Held(tenure) = &mut self.state
            && tenure.take(id, cx.at())
        {
            taken = true;
            wants_more = tenure.wants_more(cx.at());
            if wants_more {
                tenure.is_to_be_renewed(cx.at());
            }
        }
        if wants_more {
            self.renew(cx.at());
        }
        self.schedule(cx);
        taken
    }

    /// A lease is to last `ttl` from now at least: until when, if it is held. The store is asked
    /// until that is so, or the lease is over.
    pub(crate) fn extend(
        &mut self,
        cx: &mut EventCx<'_>,
        id: WaiterId,
        ttl: Duration,
    ) -> Option<Moment> {
        self.advance_time(cx);
        let until = deadline(cx.at(), ttl);
        let mut held = false;
        if let KeyState::Held(tenure) = &mut self.state
            && tenure.is_held_by(id)
            && !tenure.is_closing()
        {
            held = true;
            if let Some((who, verdict)) = tenure.extend(cx.at(), ttl, until) {
                self.tell_holder(who, verdict);
            }
            self.advance_time(cx);
        }
        self.schedule(cx);
        held.then(|| until.moment())
    }

    /// A lease is over for its holder. Without `keep` it is given back, and told what became of it;
    /// else the key stays in the store until its ttl is over: nothing is sent, and whoever wants it
    /// next asks the store. Returns the owner whose tenure ended so.
    pub(crate) fn finish(
        &mut self,
        cx: &mut EventCx<'_>,
        id: WaiterId,
        let_expire: bool,
    ) -> Option<Owner> {
        self.expire_due(cx);
        let mut kept = None;
        let mut ending = None;
        if let KeyState::Held(tenure) = &mut self.state
            && let Some(lease) = tenure.lease.take_if(|lease| lease.id == id)
        {
            if let_expire {
                kept = Some(tenure.owner);
                self.end_lease(lease.who, LeaseEnd::Released);
                self.let_expire(cx);
            } else {
                ending = Some(Ending {
                    who: lease.who,
                    deadline: lease.deadline,
                });
            }
        }
        self.schedule_after(cx, ending);
        kept
    }

    /// Our tenure ends here, the key stays in the store.
    pub(super) fn let_expire(&mut self, cx: &mut EventCx<'_>) {
        let KeyState::Held(tenure) = std::mem::replace(&mut self.state, KeyState::Idle) else {
            unreachable!("only a tenure is kept")
        };
        // I7: the grant that brought it may be seen only now, after the reply that told of it (O3). It
        // must not be given back as a stranger's (O1).
        let mut until = tenure.runs_out(cx.at());
        if tenure.renewing.is_some() {
            // It may be done at any time until its connection is given up. To remember the owner for too
            // long costs nothing: the key runs out by itself.
            until += UNDER_WAY;
        }
        cx.ids.remember(tenure.owner, cx.at(), until);
    }

    /// The lease of one whose runtime has gone is renewed no more; it lasts for as long as it was
    /// prolonged last.
    pub(crate) fn stop_renewing(&mut self, has_gone: impl FnOnce(&C) -> bool) {
        if let KeyState::Held(tenure) = &mut self.state {
            tenure.stop_renewing(has_gone);
        }
    }

    /// Time went by.
    pub(crate) fn tick(&mut self, cx: &mut EventCx<'_>) {
        self.advance_time(cx);
        self.schedule(cx);
    }

    /// What the store said last, where it is to blame.
    pub(super) fn trouble(&self) -> StoreError {
        let trouble = self.trouble.as_deref();
        trouble.cloned().unwrap_or_else(no_answer)
    }

    pub(super) fn pending_in_flight(&mut self) -> Option<&mut PendingOp<C>> {
        match self.in_flight.as_deref_mut() {
            Some(InFlight {
                what: Sent::Pending(pending),
                ..
            }) => Some(pending),
            _ => None,
        }
    }

    pub(super) fn tell_waiter(&mut self, who: C, verdict: WaiterVerdict) {
        self.effect(Effect::Wake(who, Verdict::Waiter(verdict)));
    }

    pub(super) fn refuse(&mut self, who: C, refusal: Refusal) {
        self.tell_waiter(who, WaiterVerdict::Refused(refusal));
    }

    pub(super) fn tell_holder(&mut self, who: C, verdict: LeaseVerdict) {
        self.effect(Effect::Wake(who, Verdict::Lease(verdict)));
    }

    pub(super) fn end_lease(&mut self, who: C, end: LeaseEnd) {
        self.tell_holder(who, LeaseVerdict::Ended(end));
    }

    /// Time has taken a lease away, or the store has.
    pub(super) fn lose(&mut self, lease: LocalLease<C>) {
        if lease.is_taken() {
            self.end_lease(lease.who, LeaseEnd::Lost);
        } else {
            self.tell_waiter(lease.who, WaiterVerdict::TurnLost);
        }
    }

    pub(super) fn effect(&mut self, effect: Effect<C>) {
        self.effects.get_or_insert_default().push_back(effect);
    }
}

/// Said where nothing else was said.
pub(super) fn no_answer() -> StoreError {
    StoreError::new("no answer in time")
}
