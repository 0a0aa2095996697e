mod acquisition;
mod asking;
mod pending;
mod policy;
mod schedule;
mod shutdown;
mod store_events;
mod timers;
mod transitions;

use std::collections::VecDeque;
use std::mem;
use std::time::Duration;

use self::acquisition::{Acquisition, Footprint};
use self::pending::{Ending, PendingOp};
use self::transitions::{KeyState, TenureEnd};
use super::event_cx::EventCx;
use super::tenure::{LocalLease, Tenure};
use super::time::{Point, deadline};
use super::verdict::{EndMode, Holding, LeaseEnd, NotGranted};
use super::wait_queue::{WaitQueue, Waiter, WaiterId};
use crate::base::clock::Moment;
use crate::base::{LossCause, Mode, OnFinish, StoreError};
use crate::store::contract::{Grant, Owner};

/// The settings of a registry that hold for all its keys.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rules {
    pub(crate) local_passes: u32,
    pub(crate) local_span: Duration,
    pub(crate) max_waiters: usize,
    /// For so long after it was sent the store may do an attempt whose connection was given up (O5).
    pub(crate) response_timeout: Duration,
}

/// What an answer says about tickets that the store had confirmed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Tickets {
    #[default]
    Kept,
    /// Ours is not there. It may be gone, or its grant may be on the way.
    Unknown,
    /// Ours was not there, and was entered again.
    Gone,
}

/// The op in flight (O2).
#[derive(Clone, Debug)]
struct InFlight {
    /// If it asks for the key: what it may leave in the store if the answer never comes.
    asks: Option<Footprint>,
    /// Whether this op is the first entry of `pending`. A yield is in `pending` and also sets `asks`.
    is_pending: bool,
    sent: Point,
    /// The newest waiter when it was sent. The answer counts for no later one.
    newest_waiter: WaiterId,
    /// A grant that came before the reply that may have caused it (O3).
    grant: Option<Box<EarlyGrant>>,
}

/// A grant, and when it came.
#[derive(Clone, Debug)]
struct EarlyGrant {
    at: Point,
    grant: Grant,
    /// Why it is given back, if it is.
    fault: Option<StoreError>,
}

/// The last error of the store, and since when it fails.
#[derive(Clone, Debug)]
struct LastError {
    error: StoreError,
    /// Since when.
    since: Point,
}

/// See the [module](super).
///
/// After every call drain the [`effects`](EventCx::effects) in order, then look at
/// [`next_timeout`](Self::next_timeout) and [`is_idle`](Self::is_idle).
#[derive(Clone, Debug)]
pub(crate) struct Turnstile<Caller> {
    /// The mode of all its callers. A shared one has one caller at most (M6).
    mode: Mode,
    waiters: WaitQueue<Caller>,
    /// Callers that adopt a lease, in order of arrival. They are served before the wait queue, one at a time.
    adopters: VecDeque<(WaiterId, Waiter<Caller>)>,
    state: KeyState<Caller>,
    in_flight: Option<InFlight>,
    /// In order (O2). The first may be in flight.
    pending: VecDeque<PendingOp<Caller>>,
    /// Whether the store has a queue, and grants reach us.
    store_has_queue: bool,
    /// Whether the connection is known to be gone: nothing is sent until it is back.
    down: bool,
    /// The last error of the store, until it answers.
    last_error: Option<Box<LastError>>,
    /// Refusals in a row.
    failures: u32,
    /// No new callers are accepted.
    closed: bool,
    /// What the last answer has shown about our ticket.
    tickets: Tickets,
}

impl<Caller: Clone> Turnstile<Caller> {
    /// `queue`: whether the store has a queue and grants reach us, as far as is known.
    pub(crate) fn new(mode: Mode, queue: bool) -> Self {
        Self {
            mode,
            waiters: WaitQueue::new(),
            adopters: VecDeque::new(),
            state: KeyState::new(),
            in_flight: None,
            pending: VecDeque::new(),
            store_has_queue: queue,
            down: false,
            last_error: None,
            failures: 0,
            closed: false,
            tickets: Tickets::Kept,
        }
    }

    /// Another turnstile of the same key. It begins with what this one knows of the store.
    pub(super) fn beside(&self, mode: Mode) -> Self {
        Self {
            down: self.down,
            last_error: self.last_error.clone(),
            closed: self.closed,
            ..Self::new(mode, self.store_has_queue)
        }
    }

    /// What was found out about our ticket since the last call.
    pub(super) fn take_tickets(&mut self) -> Tickets {
        mem::take(&mut self.tickets)
    }

    /// How many are in the wait queue.
    pub(super) fn waiting(&self) -> usize {
        self.waiters.len()
    }

    /// Whether it has asked the store for the key, and has not got it.
    pub(super) fn is_acquiring(&self) -> bool {
        self.state.acquisition().is_some()
    }

    /// The store is believed to be down. Callers that give up before it answers get this error.
    pub(crate) fn assume_down(&mut self, error: StoreError) {
        let since = Point::FIRST;
        self.last_error = Some(Box::new(LastError { error, since }));
    }

    /// Nobody waits, nothing is held or pending: the turnstile may be dropped.
    pub(crate) fn is_idle(&self) -> bool {
        self.waiters.is_empty()
            && self.adopters.is_empty()
            && self.state.is_idle()
            && self.in_flight.is_none()
            && self.pending.is_empty()
    }

    /// Whether a ticket of ours may stand in the store's queue, or be entered soon.
    pub(crate) fn may_have_ticket(&self) -> bool {
        self.state.acquisition().is_some()
            || !self.waiters.is_empty()
            || self.in_flight.is_some()
            || !self.pending.is_empty()
    }

    /// The holder of a lease.
    pub(crate) fn holder(&self) -> Option<&Caller> {
        self.granted(true)
    }

    /// The waiters in order: one that was granted the key and was not polled yet, callers that adopt, the wait queue.
    pub(crate) fn waiters(&self) -> impl Iterator<Item = &Caller> {
        let granted = self.granted(false).into_iter();
        let adopters = self.adopters.iter().map(|(_, waiter)| waiter);
        let waiters = self.waiters.iter().map(|(_, waiter)| waiter);
        granted.chain(adopters.chain(waiters).map(|waiter| &waiter.caller))
    }

    /// Everybody who still awaits a verdict, but for those of the effects.
    pub(crate) fn callers(&self) -> impl Iterator<Item = &Caller> {
        let endings = self.pending.iter().filter_map(PendingOp::caller);
        let holder = self.holder().into_iter();
        holder.chain(self.waiters()).chain(endings)
    }

    fn granted(&self, taken: bool) -> Option<&Caller> {
        let lease = self.state.tenure()?.lease();
        let lease = lease.filter(|lease| lease.is_taken() == taken);
        lease.map(|lease| &lease.caller)
    }

    /// A caller wants the key, or a lease that it adopts. Its verdicts come as effects. `others`: how many wait at other
    /// turnstiles of the key.
    pub(crate) fn arrive(
        &mut self,
        cx: &mut EventCx<'_, Caller>,
        waiter: Waiter<Caller>,
        others: usize,
    ) -> WaiterId {
        self.advance_time(cx);
        let id = cx.ids.waiter();
        let tenure = self.state.tenure();
        let held = tenure.is_some_and(|tenure| tenure.lease().is_some());
        if self.closed {
            cx.refuse(waiter.caller, NotGranted::Closed);
        } else if waiter.adopts.is_some() {
            self.adopters.push_back((id, waiter));
        } else if waiter.asks_once && (held || self.waiters.has_patient()) {
            let refusal = match &self.last_error {
                // Nobody is known to have it.
                Some(last_error) if !held => NotGranted::Failed(last_error.error.clone()),
                _ => NotGranted::Busy(self.holding(cx.at())),
            };
            cx.refuse(waiter.caller, refusal);
        } else if self.waiters.len() + others >= cx.ids.rules.max_waiters {
            cx.refuse(waiter.caller, NotGranted::QueueFull);
        } else {
            self.waiters.push(id, waiter);
            // Whether the store has said that others hold the key, and is not being asked again.
            let is_busy = self.state.acquisition().is_some_and(Acquisition::is_busy);
            if held || is_busy && self.in_flight.is_none() && !self.down {
                self.mark_busy(cx);
            } else if self.last_error.is_some() {
                self.waiters.mark_answered();
                self.tell_waiting(cx);
            }
        }
        self.schedule(cx);
        id
    }

    /// When the wait of an adopter is over. Like a waiter, it waits for longer until the store's first answer has come.
    fn end_of(&self, (_, adopter): &(WaiterId, Waiter<Caller>)) -> Point {
        adopter.end(self.last_error.is_some()).into()
    }

    /// A waiter gave up, or was dropped: in the wait queue, adopting, or granted the key and not polled.
    pub(crate) fn leave(&mut self, cx: &mut EventCx<'_, Caller>, id: WaiterId) {
        self.advance_time(cx);
        self.waiters.remove(id);
        self.adopters.retain(|(adopter, _)| *adopter != id);
        if let Some(tenure) = self.state.tenure_mut() {
            tenure.finish(id);
        }
        self.schedule(cx);
    }

    /// A granted waiter has polled: it holds the lease from here on. Returns false if it has lost its turn.
    pub(crate) fn take(&mut self, cx: &mut EventCx<'_, Caller>, id: WaiterId) -> bool {
        self.advance_time(cx);
        let tenure = self.state.tenure_mut();
        let taken = tenure.and_then(|tenure| tenure.take(cx, id));
        if let Some(wants_more) = taken {
            self.begin(cx, wants_more);
        }
        self.schedule(cx);
        taken.is_some()
    }

    /// A lease begins anew: its ttl counts from now. `renewals`: how often the watchdog renews it at most.
    pub(crate) fn restart(
        &mut self,
        cx: &mut EventCx<'_, Caller>,
        id: WaiterId,
        renewals: u32,
        on_finish: OnFinish,
    ) {
        self.advance_time(cx);
        if let Some(tenure) = self.tenure_of(id) {
            let wants_more = tenure.restart(cx, renewals, on_finish);
            self.begin(cx, wants_more);
        }
        self.schedule(cx);
    }

    /// A lease begins, and is renewed now if it wants more time.
    fn begin(&mut self, cx: &mut EventCx<'_, Caller>, wants_more: bool) {
        if wants_more {
            self.renew(cx);
        }
        if let Some(tenure) = self.state.tenure_mut() {
            tenure.renew_earlier(cx);
        }
    }

    /// The holder has seen its token, on a store that fences by it: the tenure is not passed on. Returns whether it still
    /// is the holder's.
    pub(crate) fn forbid_passes(&mut self, id: WaiterId) -> bool {
        let tenure = self.state.tenure_mut();
        let tenure = tenure.filter(|tenure| tenure.is_held_by(id));
        tenure.map(Tenure::forbid_passes).is_some()
    }

    /// Extends a lease to at least `ttl` from now. Returns the new deadline if the lease is held. The store is asked
    /// until it confirms, or the lease is over.
    pub(crate) fn extend(
        &mut self,
        cx: &mut EventCx<'_, Caller>,
        id: WaiterId,
        ttl: Duration,
    ) -> Option<Moment> {
        self.advance_time(cx);
        let until = deadline(cx.at(), ttl);
        let mut extended = None;
        if let Some(tenure) = self.tenure_of(id) {
            extended = Some(until.moment());
            cx.wake_holder(tenure.extend(cx.at(), ttl, until));
            self.advance_time(cx);
        }
        self.schedule(cx);
        extended
    }

    /// The holder ends its lease. If the key is released, or kept for a time, a verdict follows. If it is left in the
    /// store, nothing is sent, and the owner is returned under which it is there.
    pub(crate) fn finish(
        &mut self,
        cx: &mut EventCx<'_, Caller>,
        id: WaiterId,
        end_mode: EndMode,
    ) -> Option<Owner> {
        self.expire_due(cx);
        let mut left = None;
        if let Some(tenure) = self.state.tenure_mut()
            && let Some((lease, deadline)) = tenure.finish(id)
        {
            let kept_until = match end_mode {
                EndMode::Release => None,
                EndMode::Keep => lease.kept_until(cx.at()),
                EndMode::Detach => Some(Point::FOREVER),
            };
            let caller = lease.caller;
            if kept_until == Some(Point::FOREVER) {
                left = Some(tenure.owner());
                cx.end_lease(caller, LeaseEnd::Released);
                self.end_tenure(cx, TenureEnd::LetExpire);
            } else {
                let ending = Some(Ending { caller, deadline });
                match kept_until {
                    Some(until) => self.end_tenure(cx, TenureEnd::Keep(until, ending)),
                    None => self.next_turn(cx, ending),
                }
            }
        }
        self.schedule(cx);
        left
    }

    /// The tenure, if this caller holds it and need not end its work.
    fn tenure_of(&mut self, id: WaiterId) -> Option<&mut Tenure<Caller>> {
        let tenure = self.state.tenure_mut();
        tenure.filter(|tenure| tenure.is_extendable_by(id))
    }

    /// The owner under which the store has the lease of this holder.
    pub(crate) fn owner_of(&self, id: WaiterId) -> Option<Owner> {
        let tenure = self.state.tenure();
        let tenure = tenure.filter(|tenure| tenure.is_extendable_by(id));
        tenure.map(Tenure::owner)
    }

    /// The owner under which we hold the key.
    pub(crate) fn owner(&self) -> Option<Owner> {
        self.state.tenure().map(Tenure::owner)
    }

    /// Whether the key stays in the store if this holder ends its lease now, as it was asked for.
    pub(crate) fn is_kept(&self, cx: &EventCx<'_, Caller>, id: WaiterId) -> bool {
        let lease = self.lease_of(id);
        lease.is_some_and(|lease| lease.kept_until(cx.at()).is_some())
    }

    fn lease_of(&self, id: WaiterId) -> Option<&LocalLease<Caller>> {
        self.state.tenure()?.lease().filter(|lease| lease.is_of(id))
    }

    /// Time went by.
    pub(crate) fn tick(&mut self, cx: &mut EventCx<'_, Caller>) {
        self.advance_time(cx);
        self.schedule(cx);
    }

    /// The last error of the store.
    fn store_error(&self) -> StoreError {
        let last_error = self.last_error.as_ref();
        last_error.map_or_else(
            || StoreError::new("no answer in time"),
            |last_error| last_error.error.clone(),
        )
    }

    /// Who has the key, as far as is known. What a store has said of a lease counts until that lease is over.
    pub(super) fn holding(&self, now: Point) -> Option<Box<Holding>> {
        let there = self.state.acquisition().and_then(|it| it.holding(now));
        let here = || self.state.tenure()?.holding(now);
        there.or_else(here).map(Box::new)
    }

    /// Why the lease of this caller was not prolonged. Its deadline has passed, and its holder has not been told.
    pub(crate) fn cause_of_expiry(&self, now: Moment, id: WaiterId) -> Option<LossCause> {
        let (tenure, lease) = (self.state.tenure()?, self.lease_of(id)?);
        Some(tenure.cause_of_expiry(lease, now.into(), self.away_since()))
    }

    /// Since when the store is away, if it is.
    fn away_since(&self) -> Option<Point> {
        let last_error = self.last_error.as_ref().filter(|_| self.down);
        last_error.map(|last_error| last_error.since)
    }
}
