use super::tenure::Contention;
use super::time::{Point, Span, drift};
use super::wait_queue::WaiterId;
use crate::store::contract::{Grant, Op, Owner, ServerTime};

/// K3: how much longer than its lock the store keeps a queue.
pub(super) const QUEUE_MARGIN: Span = Span::secs(60);

/// What the store may have under an owner of ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Footprint {
    Nothing,
    /// The lock, by an attempt whose answer never came.
    Lock,
    /// A place among those that listen, or the lock.
    Subscription,
    /// A ticket, or the lock by way of one.
    Ticket,
}

/// One owner on its way to a tenure, and what we know about it.
#[derive(Debug)]
pub(super) struct Acquisition {
    pub(super) owner: Owner,
    /// What its ticket says; fixed when it is first sent (K1, W3).
    pub(super) ttl: Span,
    pub(super) score: Option<u64>,
    pub(super) footprint: Footprint,
    /// Who adopts by it, if it is not the line's.
    pub(super) adopter: Option<WaiterId>,
    pub(super) notices: Notices,
    /// Whose policy was asked for a pause, and has not answered yet.
    pub(super) asked_policy: Option<WaiterId>,
    /// What its tenure will know of others if it comes by a yield to itself.
    pub(super) contention: Contention,
    /// G3: when its ticket is withdrawn, while nobody here waits for the key.
    pub(super) withdraw_at: Option<Point>,
    first_sent: Option<Point>,
    proof: Option<Proof>,
}

/// W7: what notices of the lock being freed do to the pauses of the policy.
#[derive(Debug, Default)]
pub(super) struct Notices {
    /// One came while the answer to a question was on its way.
    pub(super) heard: bool,
    /// The next question comes before its time: when that is.
    pub(super) due: Option<Point>,
    /// How many did so since the policy was asked last.
    early: u32,
}

impl Notices {
    /// How soon to ask after one, from (ms) and to. At once, but where that was in vain later, and
    /// at random: those that were told at once by several nodes, and split their votes, part so. Each
    /// time twice as late, so that a store that tells of nothing makes us ask a few times.
    pub(super) fn pause(&mut self) -> (u64, u64) {
        let times = self.early;
        self.early += 1;
        match times {
            0 => (0, 0),
            _ => (5 << times.min(12), 15 << times.min(12)),
        }
    }

    /// The policy is asked: it counts anew from here.
    pub(super) fn begin_anew(&mut self) {
        self.early = 0;
    }
}

/// One answered command: it was sent at `sent` on our clock, and ran at `at` on the store's.
#[derive(Clone, Copy, Debug)]
struct Proof {
    sent: Point,
    at: ServerTime,
}

/// What a grant is worth.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Belief {
    /// Its ttl counts from here on our clock.
    From(Point),
    /// An answer that is newer than the grant has told that it is over.
    Over,
    /// The store's clock has stepped: nothing can be told from it.
    Stepped,
}

impl Acquisition {
    pub(super) fn new(owner: Owner, ttl: Span) -> Self {
        Self {
            owner,
            ttl,
            score: None,
            footprint: Footprint::Nothing,
            adopter: None,
            notices: Notices::default(),
            asked_policy: None,
            contention: Contention::default(),
            withdraw_at: None,
            first_sent: None,
            proof: None,
        }
    }

    /// For somebody who adopts: it never has a ticket.
    pub(super) fn adopting(owner: Owner, ttl: Span, adopter: WaiterId) -> Self {
        Self {
            adopter: Some(adopter),
            ..Self::new(owner, ttl)
        }
    }

    pub(super) fn sent(&mut self, now: Point) {
        self.first_sent.get_or_insert(now);
    }

    pub(super) fn answered(&mut self, sent: Point, at: ServerTime) {
        self.proof = Some(Proof { sent, at });
    }

    /// Pairs of times hold for one connection: the next may lead to another server.
    pub(super) fn forget_proof(&mut self) {
        self.proof = None;
    }

    /// Whether its ticket stands in the queue, as this connection has said. Without that it may hold
    /// the lock.
    pub(super) fn is_queued(&self) -> bool {
        self.footprint == Footprint::Ticket && self.proof.is_some()
    }

    /// The op that leaves nothing of this acquisition behind (O6).
    pub(super) fn settlement(&self) -> Option<Op> {
        match self.footprint {
            Footprint::Nothing => None,
            Footprint::Lock => Some(Op::Release { owner: self.owner }),
            Footprint::Subscription => Some(Op::Unlisten { owner: self.owner }),
            Footprint::Ticket => Some(Op::Withdraw {
                owner: self.owner,
                ttl: self.ttl.duration(),
            }),
        }
    }

    /// By when whatever the store has under this owner has run out by itself.
    pub(super) fn outlasted_by(&self) -> Span {
        let lock = self.ttl + drift(self.ttl);
        match self.footprint {
            Footprint::Subscription | Footprint::Ticket => lock + QUEUE_MARGIN,
            _ => lock,
        }
    }

    /// D2: from when on our clock the ttl of a grant counts that came at `received`.
    pub(super) fn believe(&self, grant: &Grant, received: Point) -> Belief {
        let start = match self.proof {
            Some(proof) if proof.at > grant.at => return Belief::Over,
            Some(proof) => {
                let since = Span::micros(grant.at - proof.at);
                proof.sent + since - since / 1000
            }
            None => match self.first_sent {
                Some(first_sent) => first_sent,
                None => return Belief::Over,
            },
        };
        if start > received {
            Belief::Stepped
        } else {
            Belief::From(start)
        }
    }
}
