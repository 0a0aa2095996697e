//! How a tenure begins, and how a grant is handled.

use std::time::Duration;

use super::acquisition::{Belief, Footprint};
use super::ids::EventCx;
use super::key_state::{KeyState, Received};
use super::machine::Turnstile;
use super::pending::PendingOp;
use super::tenure::{Contention, Tenure};
use super::time::{Point, deadline, drift};
use crate::store::contract::{Grant, Op};

/// With this many pending operations a key ignores grants that nobody waits for.
const MOST_OWED: usize = 64;

impl<C: Clone> Turnstile<C> {
    /// Begins a tenure of `ttl` that is proved from `start` on.
    pub(super) fn enter_tenure(
        &mut self,
        cx: &mut EventCx<'_>,
        epoch: u64,
        start: Point,
        ttl: Duration,
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
            // D4: proved, but over. The same owner asks again, and the answer is a new proof (S3).
            *ask_at = now;
            self.waiters.mark_answered();
            return;
        }
        let tenure = Tenure::new(acquisition.owner, ttl, epoch, start, now, contention);
        self.state = KeyState::Held(tenure);
        self.advance_time(cx);
    }

    /// Handles a grant that came now, or one that waited for a reply (O3).
    pub(super) fn on_grant(&mut self, cx: &mut EventCx<'_>, received: Received) {
        let grant = &received.grant;
        let yields = |pending: &PendingOp<C>| matches!(pending.op, Op::Yield { new, .. } if new == grant.owner);
        let is_yielded_to = self.pending.any(yields);
        match &mut self.state {
            KeyState::Acquiring {
                acquisition,
                ask_at,
            } if acquisition.owner == grant.owner => {
                if self.down || is_yielded_to {
                    // O3: its connection is not up yet, or no longer, or the session has lost the yield to
                    // this owner. Pending operations go first. Entering the owner again recovers the grant.
                    return;
                }
                if let Some(in_flight) = &mut self.in_flight {
                    // O3: the reply in flight may be older or newer.
                    in_flight.grant = Some(received);
                    return;
                }
                if acquisition.footprint != Footprint::Ticket {
                    // As far as is known it has no ticket. The answer to its next op tells whether it
                    // holds the lock.
                    *ask_at = cx.at();
                    return;
                }
                match (acquisition.believe(grant, received.at), &received.doubt) {
                    (Belief::Over, _) => {}
                    (_, Some(doubt)) => self.on_unconfirmed(cx, doubt),
                    (Belief::From(start), None) => {
                        // K1: the ttl on its ticket, which the store rounds up.
                        let ttl = grant.ttl.min(acquisition.ttl);
                        self.enter_tenure(cx, grant.epoch, start, ttl, Contention::Perhaps);
                    }
                    (Belief::Stepped, None) => {
                        // Ask again at once: that proves the lock, or releases it if nobody waits.
                        acquisition.forget_proof();
                        *ask_at = cx.at();
                    }
                }
            }
            KeyState::Held(tenure) if tenure.owner == grant.owner => {}
            // The grant of a tenure that has ended, whose key is meant to stay.
            _ if cx.ids.is_remembered(grant.owner, cx.at()) => {}
            _ => self.give_back(cx.at(), grant),
        }
    }

    /// O1: releases a grant for an owner that is retired or unknown.
    fn give_back(&mut self, now: Point, grant: &Grant) {
        let pending = self.pending_in_flight();
        let settled_in_flight = pending.is_some_and(|pending| pending.settles(grant.owner));
        // Bounded, since a faulty server could invent grants without end. A lock that is not released
        // expires by itself.
        let buffer = self.pending.len() < MOST_OWED;
        if buffer && !settled_in_flight && !self.pending.settles(grant.owner) {
            let op = Op::Release { owner: grant.owner };
            let ttl = grant.ttl;
            let until = now + ttl + drift(ttl);
            self.pending.push_back(PendingOp::new(op, None, until));
        }
    }
}
