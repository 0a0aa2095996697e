//! A job on its way through a cluster.

use std::borrow::Borrow;
use std::sync::Arc;

use tokio::time::Instant;

use super::map::Address;
use super::slots::Slot;
use crate::store::contract::Op;
use crate::store::redis::call::{Job, Wish};
use crate::store::traffic::{Cargo, Lane};

#[derive(Debug)]
pub(super) struct Parcel {
    pub(super) job: Job,
    pub(super) slot: Slot,
    /// When it was handed in.
    pub(super) since: Instant,
    /// How often it was sent on since it was handed in or put off.
    pub(super) hops: u32,
    /// How often it was put off.
    pub(super) pauses: u32,
    /// Where it is to be taken although the slot is not there yet.
    pub(super) asking: Option<Address>,
    /// A release that is to free the lock and look at nothing else.
    pub(super) is_bare: bool,
    /// What it is in truth, while it is an attempt.
    enter: Option<Op>,
}

impl Parcel {
    pub(super) fn new(job: Job, slot: Slot, now: Instant) -> Self {
        Self {
            job,
            slot,
            since: now,
            hops: 0,
            pauses: 0,
            asking: None,
            is_bare: false,
            enter: None,
        }
    }

    /// Makes an enter an attempt: a lock that is free is had without listening for grants. Only for
    /// one that nobody has tried yet, and that does not stand in the queue.
    pub(super) fn try_first(&mut self) {
        if let Wish::Op { op, .. } = &mut self.job.wish
            && let Op::Enter {
                owner,
                ttl,
                score: None,
            } = *op
        {
            self.enter = Some(std::mem::replace(op, Op::Attempt { owner, ttl }));
        }
    }

    /// The end of that. True: it was one.
    pub(super) fn own_up(&mut self) -> bool {
        match (&mut self.job.wish, self.enter.take()) {
            (Wish::Op { op, .. }, Some(enter)) => {
                *op = enter;
                true
            }
            _ => false,
        }
    }

    pub(super) fn is_release(&self) -> bool {
        let wish = &self.job.wish;
        matches!(
            wish,
            Wish::Op {
                op: Op::Release { .. },
                ..
            }
        )
    }

    /// Whether it puts a ticket into the queue, so that grants must be heard before.
    pub(super) fn enters(&self) -> bool {
        matches!(
            self.job.wish,
            Wish::Op {
                op: Op::Enter { .. } | Op::Yield { .. },
                ..
            }
        )
    }
}

impl Borrow<Job> for Parcel {
    fn borrow(&self) -> &Job {
        &self.job
    }
}

impl Cargo for Parcel {
    type Key = Arc<str>;

    const GROUPED: bool = true;

    fn key(&self) -> &Arc<str> {
        &self.job.key
    }

    fn lane(&self) -> Lane {
        self.job.lane()
    }

    fn is_alone(&self) -> bool {
        self.job.alone
    }

    /// A call holds one slot, and is redirected or not as a whole.
    fn group(&self) -> u16 {
        self.slot | u16::from(self.asking.is_some()) << 15 | u16::from(self.is_bare) << 14
    }
}
