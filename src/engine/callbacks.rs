use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

use futures::task::AtomicWaker;
use smallvec::SmallVec;

use super::waiter_state::WaiterState;
use crate::Token;
use crate::repeat::Pauses;
use crate::settings::OnFinish;
use crate::user_code::{self, log};

/// What follows from verdicts. All of it is the user's code, so it runs when nothing is locked.
#[derive(Default)]
pub(super) struct Callbacks {
    pub(super) wakers: SmallVec<[Waker; 1]>,
    pub(super) watchers: SmallVec<[Arc<AtomicWaker>; 1]>,
    /// Policies of waits that are over, to be dropped.
    pub(super) policies: SmallVec<[Pauses; 1]>,
    /// Leases of groups that did not get another key, or lost it, and how they end.
    pub(super) given_up: Vec<(Arc<WaiterState>, OnFinish)>,
    /// Keys and tokens of lost leases, and whether they had expired.
    pub(super) lost: SmallVec<[(Arc<str>, Token, bool); 1]>,
    /// Keys and tokens of leases whose renewal is late, and the time that is left to them.
    pub(super) late: SmallVec<[(Arc<str>, Token, Duration); 1]>,
}

impl Callbacks {
    pub(super) fn run(&mut self) {
        // First: work whose lease is lost stops before it is logged.
        for waker in self.wakers.drain(..) {
            user_code::run("a waker", || waker.wake());
        }
        for watcher in self.watchers.drain(..) {
            user_code::run("a waker", || watcher.wake());
        }
        self.policies.drain(..).for_each(user_code::discard);
        for (key, token, left) in self.late.drain(..) {
            let (key, token) = (&*key, token.get());
            log!(
                warn,
                key,
                token,
                ?left,
                "renewal not confirmed yet, retrying until the deadline"
            );
        }
        for (key, token, is_over) in self.lost.drain(..) {
            let (key, token) = (&*key, token.get());
            let why = match is_over {
                true => "it expired before its work completed",
                false => "its key was deleted or overwritten in the store",
            };
            log!(warn, key, token, "lease lost: {why}");
        }
    }
}
