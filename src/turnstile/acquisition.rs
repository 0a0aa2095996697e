use std::time::Duration;

use super::tenure::Contention;
use super::time::{Point, drift};
use super::wait_queue::WaiterId;
use crate::store::contract::{Grant, Op, Owner, ServerTime};

/// K3: the store keeps a queue this much longer than its lock.
pub(super) const QUEUE_MARGIN: Duration = Duration::from_secs(60);

/// What the store may hold under one of our owners.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Footprint {
    Nothing,
    /// The lock, by an attempt whose answer never came.
    Lock,
    /// A subscription to the release, or the lock.
    Subscription,
    /// A ticket, or the lock granted to it.
    Ticket,
}

/// One owner that asks the store for the key, and what is known about it.
#[derive(Debug)]
pub(super) struct Acquisition {
    pub(super) owner: Owner,
    /// The ttl on its ticket, fixed when it is first sent (K1, W3).
    pub(super) ttl: Duration,
    pub(super) score: Option<u64>,
    pub(super) footprint: Footprint,
    /// Whether the store's last answer was that others hold the key.
    pub(super) is_busy: bool,
    /// The caller that adopts a lease with it. `None`: it is for the wait queue.
    pub(super) adopter: Option<WaiterId>,
    pub(super) notices: Notices,
    /// The waiter whose policy was asked for a pause and has not answered yet.
    pub(super) asked_policy: Option<WaiterId>,
    /// What its tenure will know of other registries if a yield gives it the key.
    pub(super) contention: Contention,
    /// G3: when its ticket is withdrawn. Set while nobody here waits for the key.
    pub(super) withdraw_at: Option<Point>,
    first_sent: Option<Point>,
    proof: Option<Proof>,
}

/// W7: how notices of a release shorten the pauses of the policy.
#[derive(Debug, Default)]
pub(super) struct Notices {
    /// A notice came while the store was being asked.
    pub(super) heard: bool,
    /// When the policy's pause ends, if a notice has moved the next question before that.
    pub(super) due: Option<Point>,
    /// How many questions were moved since the policy was last asked.
    early: u32,
}

impl Notices {
    /// The least and the longest pause after a notice, in milliseconds. The first notice is
    /// followed at once. Later ones are followed after a random pause that doubles each time: it
    /// separates registries that split the votes of a quorum, and bounds what a store can make us ask
    /// by false notices.
    pub(super) fn pause(&mut self) -> (u64, u64) {
        let times = self.early;
        self.early += 1;
        match times {
            0 => (0, 0),
            _ => (5 << times.min(12), 15 << times.min(12)),
        }
    }

    /// The policy is asked: the count starts over.
    pub(super) fn begin_anew(&mut self) {
        self.early = 0;
    }
}

/// One answered command. It was sent at `sent` by our clock, and ran at `at` by the store's.
#[derive(Clone, Copy, Debug)]
struct Proof {
    sent: Point,
    at: ServerTime,
}

/// Whether a grant can be used.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Belief {
    /// Yes. Its ttl counts from this point on our clock.
    From(Point),
    /// No. An answer that is newer than the grant shows that it is over.
    Over,
    /// No. The store's clock has stepped, so nothing can be derived from it.
    Stepped,
}

impl Acquisition {
    pub(super) fn new(owner: Owner, ttl: Duration) -> Self {
        Self {
            owner,
            ttl,
            score: None,
            footprint: Footprint::Nothing,
            is_busy: false,
            adopter: None,
            notices: Notices::default(),
            asked_policy: None,
            contention: Contention::default(),
            withdraw_at: None,
            first_sent: None,
            proof: None,
        }
    }

    /// For a caller that adopts a lease. It never has a ticket.
    pub(super) fn adopting(owner: Owner, ttl: Duration, adopter: WaiterId) -> Self {
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

    /// A proof is valid for one connection: the next may lead to another server.
    pub(super) fn forget_proof(&mut self) {
        self.proof = None;
    }

    /// Whether its ticket is in the store's queue, as this connection has confirmed. Unconfirmed, the
    /// owner may hold the lock.
    pub(super) fn is_queued(&self) -> bool {
        self.footprint == Footprint::Ticket && self.proof.is_some()
    }

    /// The op that removes everything of this acquisition from the store (O6).
    pub(super) fn settlement(&self) -> Option<Op> {
        match self.footprint {
            Footprint::Nothing => None,
            Footprint::Lock => Some(Op::Release { owner: self.owner }),
            Footprint::Subscription => Some(Op::Unlisten { owner: self.owner }),
            Footprint::Ticket => Some(Op::Withdraw {
                owner: self.owner,
                ttl: self.ttl,
            }),
        }
    }

    /// How long the store may keep anything of this owner if it is never told.
    pub(super) fn outlasted_by(&self) -> Duration {
        let lock = self.ttl + drift(self.ttl);
        match self.footprint {
            Footprint::Subscription | Footprint::Ticket => lock + QUEUE_MARGIN,
            _ => lock,
        }
    }

    /// D2: the point on our clock from which the ttl of a grant counts that came at `received`.
    pub(super) fn believe(&self, grant: &Grant, received: Point) -> Belief {
        let start = match self.proof {
            Some(proof) if proof.at > grant.at => return Belief::Over,
            Some(proof) => {
                let since = Duration::from_micros(grant.at - proof.at);
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
