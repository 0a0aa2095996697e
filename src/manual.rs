use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::LockError;
use crate::acquire::TryLease;
use crate::lease::Lease;
use crate::operation::Operation;
use crate::user_code::log;

/// The slot of a [`Lock`](crate::Lock): the lease that its `acquire` brought.
#[derive(Debug, Default)]
pub(crate) struct LeaseSlot {
    lease: Mutex<Option<Lease>>,
}

impl LeaseSlot {
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

impl Drop for LeaseSlot {
    fn drop(&mut self) {
        if let Some(lease) = self.take()
            && lease.is_valid()
            && !lease.is_shared()
            && !lease.is_kept()
        {
            log!(
                warn,
                key = lease.key(),
                token = lease.view().told_token().get(),
                "last handle of a held lock dropped, releasing the lock"
            );
            lease.dropped_while_held();
        }
    }
}

/// Future of [`Lock::acquire`](crate::Lock::acquire),
/// [`Lock::acquire_within`](crate::Lock::acquire_within) and
/// [`Lock::acquire_once`](crate::Lock::acquire_once).
pub type Acquire = Operation<Result<bool, LockError>>;

/// Future of [`Lock::release`](crate::Lock::release).
pub type Release = Operation<Result<bool, LockError>>;

/// Acquires a lease for the slot, which is kept until then.
pub(crate) async fn acquire(acquiring: TryLease, slot: Arc<LeaseSlot>) -> Result<bool, LockError> {
    let lease = acquiring.await?;
    Ok(lease.map(|lease| slot.fill(lease)).is_some())
}
