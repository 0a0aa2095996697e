use std::mem;
use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

use smallvec::SmallVec;

use super::caller::Caller;
use super::lease_log::LeaseLog;
use crate::base::sync::AtomicWaker;
use crate::base::{LossCause, OnFinish, Pauses, Token, user_code};

/// What follows from verdicts. All of it is the user's code, so it runs when nothing is locked. What follows from most
/// verdicts needs no allocation.
#[derive(Default)]
pub(super) struct Callbacks {
    pub(super) wakers: SmallVec<[Waker; 1]>,
    /// Policies of waits that are over, to be dropped.
    pub(super) policies: SmallVec<[Pauses; 1]>,
    rare: Option<Box<Rare>>,
}

/// What follows from few verdicts.
#[derive(Default)]
pub(super) struct Rare {
    pub(super) watchers: Vec<Arc<AtomicWaker>>,
    /// Leases of groups that did not get another key, or lost it, and how they end.
    pub(super) given_up: Vec<(Arc<Caller>, OnFinish)>,
    /// Keys and tokens of lost leases, and why they were lost.
    pub(super) lost: Vec<(Arc<str>, Token, LossCause)>,
    /// Keys and tokens of leases whose renewal is late, and the time that is left to them.
    pub(super) late: Vec<(Arc<str>, Token, Duration)>,
}

impl Callbacks {
    pub(super) fn rare(&mut self) -> &mut Rare {
        self.rare.get_or_insert_default()
    }

    /// The leases of groups that end.
    pub(super) fn take_given_up(&mut self) -> Vec<(Arc<Caller>, OnFinish)> {
        let rare = self.rare.as_mut();
        rare.map_or_else(Vec::new, |rare| mem::take(&mut rare.given_up))
    }

    /// The log already reports the failure of the registry, and need not report each lost lease.
    pub(super) fn forget_losses(&mut self) {
        if let Some(rare) = &mut self.rare {
            rare.lost.clear();
        }
    }

    pub(super) fn run(&mut self, log: &LeaseLog) {
        for waker in self.wakers.drain(..) {
            user_code::run("a waker", || waker.wake());
        }
        if let Some(rare) = self.rare.take() {
            rare.run(log);
        }
        self.policies.drain(..).for_each(user_code::discard);
    }
}

impl Rare {
    fn run(self, log: &LeaseLog) {
        // First: work whose lease is lost stops before it is logged.
        for watcher in self.watchers {
            user_code::run("a waker", || watcher.wake());
        }
        for (key, token, left) in self.late {
            log.late(&key, token, left);
        }
        for (key, token, cause) in self.lost {
            log.lost(&key, token, &cause);
        }
    }
}
