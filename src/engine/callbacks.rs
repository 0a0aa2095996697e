use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

use super::few::Few;
use crate::Token;
use crate::repeat::Repeats;
use crate::user_code::{self, log};

/// What is done about verdicts once no lock is held: all of it is the user's code.
#[derive(Default)]
pub(super) struct Callbacks {
    pub(super) wakers: Few<Waker>,
    /// Policies of those who wait no more, to be dropped.
    pub(super) policies: Few<Repeats>,
    /// Keys and tokens of lost leases, and whether their time was over.
    pub(super) lost: Few<(Arc<str>, Token, bool)>,
    /// Keys and tokens of leases whose renewal is late, and how long they last without it.
    pub(super) late: Few<(Arc<str>, Token, Duration)>,
}

impl Callbacks {
    pub(super) fn run(&mut self) {
        // First: work whose lease is lost stops before anybody reads of it.
        self.wakers.drain(|waker| {
            user_code::run("a waker", || waker.wake());
        });
        self.policies.drain(user_code::discard);
        self.late.drain(|(key, token, left)| {
            let (key, token) = (&*key, token.get());
            log!(
                warn,
                key,
                token,
                ?left,
                "renewal not confirmed yet, retrying until the deadline"
            );
        });
        self.lost.drain(|(key, token, is_over)| {
            let (key, token) = (&*key, token.get());
            if is_over {
                log!(
                    warn,
                    key,
                    token,
                    "lease lost: it expired before its work completed"
                );
            } else {
                log!(
                    warn,
                    key,
                    token,
                    "lease lost: its key was deleted or overwritten in the store"
                );
            }
        });
    }
}
