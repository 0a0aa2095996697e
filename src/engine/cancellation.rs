//! Cancellation tokens: how the loss of a lease reaches tasks that do not poll it.

use std::sync::Arc;
use std::task::{Wake, Waker};

use tokio_util::sync::CancellationToken;

use super::Caller;
use crate::base::sync::AtomicWaker;

/// What is cancelled when a lease is lost. The lease owns it, so no task is needed that could outlive the lease.
pub(crate) struct Cancellation {
    token: CancellationToken,
    /// Registered with the lease, which has only a weak reference to it.
    _watch: Arc<AtomicWaker>,
}

impl Cancellation {
    /// `callers`: of all keys of the lease.
    pub(crate) fn of<'a>(callers: impl IntoIterator<Item = &'a Arc<Caller>>) -> Self {
        let token = CancellationToken::new();
        let watch = Arc::<AtomicWaker>::default();
        // Before the watch is known to the lease: a loss wakes it once.
        watch.register(&Waker::from(Arc::new(CancelOnWake(token.clone()))));
        for caller in callers {
            caller.watch_with(&watch, false);
        }
        Self {
            token,
            _watch: watch,
        }
    }

    /// A token that is cancelled with it. Cancelling that one cancels no other.
    pub(crate) fn child(&self, is_lost: bool) -> CancellationToken {
        if is_lost {
            self.token.cancel();
        }
        self.token.child_token()
    }
}

/// Woken only by a loss: that is all that it watches for.
struct CancelOnWake(CancellationToken);

impl Wake for CancelOnWake {
    fn wake(self: Arc<Self>) {
        self.0.cancel();
    }
}
