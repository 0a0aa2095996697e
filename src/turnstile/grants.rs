//! How a tenure begins, and what becomes of a grant.

use super::claim::{Belief, Exposure};
use super::errand::Errand;
use super::machine::{Received, Standing, Turnstile};
use super::supply::Cx;
use super::tenure::{Company, Tenure};
use super::time::{Point, Span, deadline, drift};
use crate::store::contract::{Grant, Op};

/// How much a key may owe, and still be told of a grant that nobody waits for.
const MOST_OWED: usize = 64;

impl<C: Clone> Turnstile<C> {
    /// A tenure of `ttl` is proved from `start` on; `draw` is its number.
    pub(super) fn enter_tenure(
        &mut self,
        cx: &mut Cx<'_>,
        draw: u64,
        start: Point,
        ttl: Span,
        company: Company,
    ) {
        let now = cx.at();
        let Standing::Seeking { claim, ask_at } = &mut self.standing else {
            unreachable!("a claim comes before a tenure")
        };
        if deadline(start, ttl) <= now && !self.line.is_empty() {
            // D4: proved, but over. The same owner asks again, and the answer proves anew (S3).
            *ask_at = now;
            return;
        }
        let tenure = Tenure::new(claim.owner, ttl, draw, start, now, company);
        self.standing = Standing::Inside(tenure);
        self.pass_time(cx);
    }

    /// A grant that came now, or before a reply that it had to wait for.
    pub(super) fn on_grant(&mut self, cx: &mut Cx<'_>, received: Received) {
        let grant = &received.grant;
        match &mut self.standing {
            Standing::Seeking { claim, ask_at } if claim.owner == grant.owner => {
                if self.down {
                    // O3: it came by a connection that is not up yet, or no longer. What is owed
                    // goes first, a yield to this owner perhaps; entering it makes the grant good.
                    return;
                }
                if let Some(flight) = &mut self.flight {
                    // O3: the reply that is on its way may be older or newer.
                    flight.grant = Some(received);
                    return;
                }
                if claim.exposure != Exposure::Ticket {
                    // It has no ticket that could have been served, as far as is known: the answer
                    // to its next op tells, which it may have been served before.
                    *ask_at = cx.at();
                    return;
                }
                match (claim.believe(grant, received.at), &received.doubt) {
                    (Belief::Over, _) => {}
                    (_, Some(doubt)) => self.on_unconfirmed(cx, doubt),
                    (Belief::From(start), None) => {
                        // K1: what its ticket says, which the store rounds up.
                        let ttl = Span::from(grant.ttl).min(claim.ttl);
                        self.enter_tenure(cx, grant.draw, start, ttl, Company::Perhaps);
                    }
                    (Belief::Stepped, None) => {
                        // The pair of times is worth nothing; and where nobody waits, the lock that
                        // was granted goes back at once.
                        claim.forget_proof();
                        *ask_at = cx.at();
                    }
                }
            }
            Standing::Inside(tenure) if tenure.owner == grant.owner => {}
            // It brought a tenure that is over, and whose key is meant to stay.
            _ if cx.supply.is_kept(grant.owner, cx.at()) => {}
            _ => self.give_back(cx.at(), grant),
        }
    }

    /// O1: a grant for an owner that is no longer, or never was.
    fn give_back(&mut self, now: Point, grant: &Grant) {
        let errand = self.errand_in_flight();
        let settled_in_flight = errand.is_some_and(|errand| errand.settles(grant.owner));
        // A server that makes them up is not remembered without end. What is passed over runs out by
        // itself, and an honest one has served a handful at most.
        let room = self.owed.len() < MOST_OWED;
        if room && !settled_in_flight && !self.owed.settles(grant.owner) {
            let op = Op::Release { owner: grant.owner };
            let ttl = grant.ttl.into();
            let until = now + ttl + drift(ttl);
            self.owed.push_back(Errand::new(op, None, until));
        }
    }
}
