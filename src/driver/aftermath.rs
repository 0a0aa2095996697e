use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

use super::few::Few;

/// What is done about verdicts once no lock is held: wakers and the log run other people's code.
#[derive(Default)]
pub(super) struct Aftermath {
    pub(super) wakers: Few<Waker>,
    /// Keys and tokens of lost leases, and whether their time was over.
    pub(super) lost: Few<(Arc<str>, u64, bool)>,
    /// Keys and tokens of leases whose renewal is late, and how long they last without it.
    pub(super) late: Few<(Arc<str>, u64, Duration)>,
}

impl Aftermath {
    pub(super) fn come(&mut self) {
        self.late.drain(|(key, token, left)| {
            let key = &*key;
            tracing::warn!(
                key,
                token,
                ?left,
                "renewal is late: not confirmed yet, retrying until the deadline"
            );
        });
        self.lost.drain(|(key, token, is_over)| {
            let key = &*key;
            if is_over {
                tracing::warn!(key, token, "lease lost: its ttl was over before its work");
            } else {
                tracing::warn!(
                    key,
                    token,
                    "lease lost: the store has it no more, its key was deleted or overwritten"
                );
            }
        });
        self.wakers.drain(|waker| {
            // One that panics has told so by the panic hook; the others are to be woken all the same.
            let _ = catch_unwind(AssertUnwindSafe(|| waker.wake()));
        });
    }
}
