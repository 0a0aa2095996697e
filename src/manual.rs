use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};

use futures::future::FusedFuture;

use crate::LockError;
use crate::acquire::Acquiring;
use crate::lease::Lease;
use crate::operation::Operation;
use crate::user_code::log;
use crate::with_lock::skip;

/// The slot of a [`Lock`](crate::Lock): the lease that its `acquire` brought.
#[derive(Debug, Default)]
pub(crate) struct Slot {
    lease: Mutex<Option<Lease>>,
}

impl Slot {
    fn fill(&self, lease: Lease) {
        let before = self.lock().replace(lease);
        // It is over, or the key could not have been acquired again. Its drop takes other locks.
        drop(before);
    }

    pub(crate) fn take(&self) -> Option<Lease> {
        self.lock().take()
    }

    pub(crate) fn is_valid(&self) -> bool {
        self.lock().as_ref().is_some_and(Lease::is_valid)
    }

    fn lock(&self) -> MutexGuard<'_, Option<Lease>> {
        self.lease.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Slot {
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

/// Future of [`Lock::acquire`](crate::Lock::acquire),
/// [`Lock::acquire_within`](crate::Lock::acquire_within) and
/// [`Lock::acquire_once`](crate::Lock::acquire_once).
#[derive(Debug)]
#[must_use = "futures do nothing unless polled, and the bool that this one yields must be checked: `false` means that the lock is not held"]
pub struct Acquire {
    acquiring: Acquiring,
    /// Kept until it resolves: the lease goes into its slot.
    slot: Option<Arc<Slot>>,
}

impl Acquire {
    pub(crate) fn new(acquiring: Acquiring, slot: Arc<Slot>) -> Self {
        let slot = Some(slot);
        Self { acquiring, slot }
    }
}

impl Future for Acquire {
    type Output = Result<bool, LockError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let acquired = ready!(self.acquiring.poll(cx));
        let slot = self.slot.take().expect("kept until it resolves");
        let lease = skip(acquired)?;
        Poll::Ready(Ok(lease.map(|lease| slot.fill(lease)).is_some()))
    }
}

impl FusedFuture for Acquire {
    fn is_terminated(&self) -> bool {
        self.acquiring.is_done()
    }
}

/// Future of [`Lock::release`](crate::Lock::release).
pub type Release = Operation<Result<bool, LockError>>;
