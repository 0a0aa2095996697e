//! How a tenure begins, and what becomes of a grant.

use super::acquisition::{Belief, Footprint};
use super::ids::EventCx;
use super::machine::{KeyState, Received, Turnstile};
use super::pending::PendingOp;
use super::tenure::{Contention, Tenure};
use super::time::{Point, Span, deadline, drift};
use crate::store::contract::{Grant, Op};

/// How much a key may owe, and still be told of a grant that nobody waits for.
const MOST_OWED: usize = 64;

impl<C: Clone> Turnstile<C> {
    /// A tenure of `ttl` is proved from `start` on; `draw` is its number.
    pub(super) fn enter_tenure(
        &mut self,
        cx: &mut EventCx<'_>,
        epoch: u64,
        start: Point,
        ttl: Span,
        contention: Contention,
    ) {
        let now = cx.at();
        let KeyState::Acquiring {
            acquisition,
            ask_at,
        } = &mut self.state
        else {
            unreachable!("a acquisition comes before a tenure")
        };
        if deadline(start, ttl) <= now && !self.waiters.is_empty() {
            // D4: proved, but over. The same owner asks again, and the answer proves anew (S3).
            *ask_at = now;
            return;
        }
        let tenure = Tenure::new(acquisition.owner, ttl, epoch, start, now, contention);
        self.state = KeyState::Held(tenure);
        self.advance_time(cx);
    }

    /// A grant that came now, or before a reply that it had to wait for.
    pub(super) fn on_grant(&mut self, cx: &mut EventCx<'_>, received: Received) {
        let grant = &received.grant;
        match &mut self.state {
            KeyState::Acquiring {
                acquisition,
                ask_at,
            } if acquisition.owner == grant.owner => {
                if self.down {
                    // O3: it came by a connection that is not up yet, or no longer. What is owed
                    // goes first, a yield to this owner perhaps; entering it makes the grant good.
                    return;
                }
                if let Some(in_flight) = &mut self.in_flight {
                    // O3: the reply that is on its way may be older or newer.
                    in_flight.grant = Some(received);
                    return;
                }
                if acquisition.footprint != Footprint::Ticket {
                    // It has no ticket that could have been served, as far as is known: the answer
                    // to its next op tells, which it may have been served before.
                    *ask_at = cx.at();
                    return;
                }
                match (acquisition.believe(grant, received.at), &received.doubt) {
                    (Belief::Over, _) => {}
                    (_, Some(doubt)) => self.on_unconfirmed(cx, doubt),
                    (Belief::From(start), None) => {
                        // K1: what its ticket says, which the store rounds up.
                        let ttl = Span::from(grant.ttl).min(acquisition.ttl);
                        self.enter_tenure(cx, grant.epoch, start, ttl, Contention::Perhaps);
                    }
                    (Belief::Stepped, None) => {
                        // The pair of times is worth nothing; and where nobody waits, the lock that
                        // was granted goes back at once.
                        acquisition.forget_proof();
                        *ask_at = cx.at();
                    }
                }
            }
            KeyState::Held(tenure) if tenure.owner == grant.owner => {}
            // It brought a tenure that is over, and whose key is meant to stay.
            _ if cx.ids.is_remembered(grant.owner, cx.at()) => {}
            _ => self.give_back(cx.at(), grant),
        }
    }

    /// O1: a grant for an owner that is no longer, or never was.
    fn give_back(&mut self, now: Point, grant: &Grant) {
        let pending = self.pending_in_flight();
        let settled_in_flight = pending.is_some_and(|pending| pending.settles(grant.owner));
        // A server that makes them up is not remembered without end. What is passed over runs out by
        // itself, and an honest one has served a handful at most.
        let buffer = self.pending.len() < MOST_OWED;
        if buffer && !settled_in_flight && !self.pending.settles(grant.owner) {
            let op = Op::Release { owner: grant.owner };
            let ttl = grant.ttl.into();
            let until = now + ttl + drift(ttl);
            self.pending.push_back(PendingOp::new(op, None, until));
        }
    }
}
