use std::fmt;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

use futures::future::FusedFuture;

use crate::LockError;
use crate::lease::{Lease, LeaseRelease};
use crate::user_code::log;

/// A handle's slot: the lease that its `acquire` brought.
pub(crate) struct Handle {
    slot: Mutex<Option<Lease>>,
}

impl Handle {
    pub(crate) fn new() -> Arc<Self> {
        let slot = Mutex::new(None);
        Arc::new(Self { slot })
    }

    pub(crate) fn fill(&self, lease: Lease) {
        let before = self.lock().replace(lease);
        // Over, or the key could not have been acquired again; its drop takes locks of its own.
        drop(before);
    }

    fn take(&self) -> Option<Lease> {
        self.lock().take()
    }

    pub(crate) fn is_valid(&self) -> bool {
        self.lock().as_ref().is_some_and(Lease::is_valid)
    }

    fn lock(&self) -> MutexGuard<'_, Option<Lease>> {
        self.slot.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if let Some(lease) = self.take()
            && lease.is_valid()
            && !lease.is_shared()
            && !lease.is_kept()
        {
            log!(
                warn,
                key = lease.key(),
                token = lease.token().get(),
                "last handle of a held lock dropped, releasing the lock"
            );
            lease.dropped_while_held();
        }
    }
}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handle").finish_non_exhaustive()
    }
}

/// Future of [`Lock::release`](crate::Lock::release).
#[derive(Debug)]
#[must_use = "a release that is not polled has done nothing"]
pub struct Release {
    handle: Option<Arc<Handle>>,
    releasing: Option<LeaseRelease>,
}

impl Release {
    pub(crate) fn new(handle: Arc<Handle>) -> Self {
        Self {
            handle: Some(handle),
            releasing: None,
        }
    }
}

impl Future for Release {
    type Output = Result<bool, LockError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        let Some(handle) = &this.handle else {
            panic!("`Release` polled after it was done");
        };
        if this.releasing.is_none() {
            this.releasing = handle.take().map(Lease::release);
        }
        let released = match &mut this.releasing {
            None => Ok(false),
            Some(releasing) => std::task::ready!(Pin::new(releasing).poll(cx)).map(|()| true),
        };
        this.releasing = None;
        this.handle = None;
        Poll::Ready(released)
    }
}

impl FusedFuture for Release {
    fn is_terminated(&self) -> bool {
        self.handle.is_none()
    }
}
