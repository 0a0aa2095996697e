//! What to do next: grant a turn, send a pending operation, or ask the store.

use super::acquisition::{Acquisition, Footprint, QUEUE_MARGIN};
use super::ids::EventCx;
use super::key_state::{InFlight, KeyState, Sent};
use super::machine::Turnstile;
use super::pending::{Ending, PendingOp};
use super::time::Point;
use super::verdict::{LeaseEnd, Refusal, WaiterVerdict};
use super::wait_queue::WaiterId;
use crate::store::contract::Op;

/// G3: a ticket that nobody needs is withdrawn within this many milliseconds.
const WITHDRAW_WITHIN: u64 = 500;

impl<C: Clone> Turnstile<C> {
    /// Does what the state requires.
    pub(super) fn schedule(&mut self, cx: &mut EventCx<'_>) {
        self.schedule_after(cx, None);
    }

    /// The same after a turn has ended. Its lease is told how the tenure goes on.
    pub(super) fn schedule_after(&mut self, cx: &mut EventCx<'_>, mut ending: Option<Ending<C>>) {
        loop {
            if let KeyState::Held(tenure) = &self.state {
                let is_free = tenure.lease.is_none();
                // The store has the key under our owner, so not under one that left it.
                while let Some(adopter) = self.adopters.pop_front() {
                    self.refuse(adopter.waiter.who, Refusal::NothingToAdopt);
                }
                if is_free {
                    self.next_turn(cx, ending.take());
                }
            }
            if self.in_flight.is_some() {
                return;
            }
            if self.down {
                self.abandon_unsent(cx.at());
                return;
            }
            if let Some(pending) = self.pending.front() {
                if pending.not_before > cx.at() {
                    return;
                }
                let pending = self.pending.pop_front().expect("just seen");
                self.run_pending(cx, pending);
            } else if !self.ask_store(cx) {
                return;
            }
        }
    }

    /// Nobody holds the key in our tenure: passes it to the next local waiter, yields it to another
    /// registry, or releases it.
    fn next_turn(&mut self, cx: &mut EventCx<'_>, ending: Option<Ending<C>>) {
        let now = cx.at();
        let KeyState::Held(tenure) = &mut self.state else {
            unreachable!("the caller looked")
        };
        let next = self.waiters.first();
        if let Some(next) = next
            && tenure.may_grant(&self.rules, next, now)
        {
            let (id, waiter) = self.waiters.pop_first().expect("first() has seen it");
            let leads = tenure.is_new() && self.rules.passes > 0 && self.waiters.has_patient();
            let who = waiter.who.clone();
            let (token, deadline) = tenure.grant(id, waiter, now);
            if let Some(ending) = ending {
                self.end_lease(ending.who, LeaseEnd::Released);
            }
            let deadline = deadline.moment();
            self.tell_waiter(
                who,
                WaiterVerdict::Granted {
                    token,
                    deadline,
                    leads,
                },
            );
            self.refuse_once(WaiterId(u64::MAX));
            self.waiters.mark_busy();
            return;
        }
        let old = tenure.owner;
        let until = tenure.runs_out(now);
        let head_ttl = self.waiters.first().map(|head| head.ttl);
        match head_ttl {
            Some(ttl) if self.queue && self.waiters.has_patient() => {
                let mut acquisition = Acquisition::new(cx.ids.owner(), ttl);
                acquisition.contention = tenure.contention.without_others();
                let new = acquisition.owner;
                let op = Op::Yield { old, new, ttl };
                self.state = KeyState::Acquiring {
                    acquisition,
                    ask_at: now,
                };
                self.add_pending(cx, PendingOp::new(op, ending, until));
            }
            _ => {
                let op = Op::Release { owner: old };
                self.state = KeyState::Idle;
                self.add_pending(cx, PendingOp::new(op, ending, until));
            }
        }
    }

    /// Sends an operation, or queues it if another op is in flight. (`bench turns`: queueing every one of them costs an
    /// allocation a turn.)
    fn add_pending(&mut self, cx: &mut EventCx<'_>, pending: PendingOp<C>) {
        if self.in_flight.is_none() && !self.down && self.pending.is_empty() {
            self.run_pending(cx, pending);
        } else {
            self.pending.push_back(pending);
        }
    }

    /// Sends a pending operation that is due.
    fn run_pending(&mut self, cx: &mut EventCx<'_>, mut pending: PendingOp<C>) {
        if let Op::Yield { old, new, ttl } = pending.op {
            if self.waiters.is_empty() || !self.queue {
                // Nobody is left to yield for. Release the old owner, then withdraw the new one (O6).
                if pending.resent {
                    let withdraw = Op::Withdraw { owner: new, ttl };
                    let until = pending.until + QUEUE_MARGIN;
                    let settle = PendingOp::new(withdraw, None, until);
                    self.pending.push_front(settle);
                }
                pending.op = Op::Release { owner: old };
                self.state = KeyState::Idle;
            } else if let KeyState::Acquiring { acquisition, .. } = &mut self.state {
                acquisition.sent(cx.at());
                acquisition.footprint = Footprint::Ticket;
            }
        }
        let op = pending.op.clone();
        self.send_op(cx.at(), op, Sent::Pending(pending));
    }

    /// Asks the store for the key if that is due. Returns false if there is nothing to send.
    fn ask_store(&mut self, cx: &mut EventCx<'_>) -> bool {
        let now = cx.at();
        let adopter = self.adopters.front();
        match &mut self.state {
            KeyState::Held(_) => false,
            KeyState::Acquiring { acquisition, .. }
                if acquisition.adopter != adopter.map(|first| first.id) =>
            {
                // A caller that adopts goes first, or it has left, or it has been answered.
                self.abandon(now);
                true
            }
            KeyState::Idle => {
                if let Some(first) = adopter {
                    let ttl = first.waiter.ttl;
                    let acquisition = Acquisition::adopting(cx.ids.owner(), ttl, first.id);
                    self.state = KeyState::Acquiring {
                        acquisition,
                        ask_at: now,
                    };
                    return true;
                }
                let Some(ttl) = self.waiters.first().map(|head| head.ttl) else {
                    return false;
                };
                let acquisition = Acquisition::new(cx.ids.owner(), ttl);
                self.state = KeyState::Acquiring {
                    acquisition,
                    ask_at: now,
                };
                true
            }
            KeyState::Acquiring {
                acquisition,
                ask_at,
            } => {
                if let Some(first) = adopter {
                    if *ask_at > now {
                        return false;
                    }
                    let (owner, ttl) = (acquisition.owner, acquisition.ttl);
                    let from = first.from.clone();
                    let op = Op::Adopt { owner, from, ttl };
                    acquisition.sent(now);
                    let footprint = Footprint::Lock;
                    self.send_op(now, op, Sent::Ask { footprint });
                    return true;
                }
                let stands = self.queue && self.waiters.has_patient();
                let misplaced = match acquisition.footprint {
                    Footprint::Ticket => !stands,
                    Footprint::Subscription => stands,
                    _ => false,
                };
                let is_unwanted = self.waiters.is_empty();
                if is_unwanted && self.queue && !self.closed && acquisition.is_queued() {
                    // G3: the waits of a thousand registries may end at the same moment. A waiter that
                    // arrives before the withdrawal takes over the ticket and its place in the queue.
                    let jitter = || now + cx.ids.jitter(0, WITHDRAW_WITHIN);
                    if *acquisition.withdraw_at.get_or_insert_with(jitter) > now {
                        return false;
                    }
                }
                if is_unwanted || misplaced {
                    self.abandon(now);
                    return true;
                }
                acquisition.withdraw_at = None;
                if *ask_at > now {
                    return false;
                }
                let (owner, ttl) = (acquisition.owner, acquisition.ttl);
                let (op, footprint) = if stands {
                    let score = acquisition.score;
                    (Op::Enter { owner, ttl, score }, Footprint::Ticket)
                } else if self.waiters.has_patient() {
                    (Op::Listen { owner, ttl }, Footprint::Subscription)
                } else {
                    (Op::Attempt { owner, ttl }, Footprint::Lock)
                };
                acquisition.sent(now);
                self.send_op(now, op, Sent::Ask { footprint });
                true
            }
        }
    }

    /// Abandons an acquisition that nobody needs while the store is away. One that belongs to a pending yield stays.
    fn abandon_unsent(&mut self, now: Point) {
        let yields = |pending: &PendingOp<C>| matches!(pending.op, Op::Yield { .. });
        let wanted = |acquisition: &Acquisition| match acquisition.adopter {
            Some(id) => self.adopters.iter().any(|adopter| adopter.id == id),
            None => !self.waiters.is_empty(),
        };
        if matches!(&self.state, KeyState::Acquiring { acquisition, .. } if !wanted(acquisition))
            && !self.pending.any(yields)
        {
            self.abandon(now);
        }
    }

    /// Ends an acquisition that is not needed, and removes it from the store.
    pub(super) fn abandon(&mut self, now: Point) {
        let KeyState::Acquiring { acquisition, .. } =
            std::mem::replace(&mut self.state, KeyState::Idle)
        else {
            unreachable!("only a acquisition is abandoned")
        };
        if let Some(op) = acquisition.settlement() {
            let until = now + acquisition.outlasted_by();
            self.pending.push_back(PendingOp::new(op, None, until));
        }
    }

    fn send_op(&mut self, now: Point, op: Op, what: Sent<C>) {
        self.in_flight = Some(Box::new(InFlight {
            unsent: Some(op),
            sent: now,
            upto: self.waiters.last_id(),
            what,
            grant: None,
        }));
    }

    /// Refuses those who ask once and arrived no later than `upto`.
    pub(super) fn refuse_once(&mut self, upto: WaiterId) {
        for waiter in self.waiters.take_once(upto) {
            self.refuse(waiter.who, Refusal::Busy);
        }
    }
}
