use std::panic::Location;
use std::sync::Arc;

use tokio::time::Instant;

use crate::base::mutex::Mutex;
use crate::base::operation::operation;
use crate::base::user_code::log;
use crate::base::{LockError, Mode};
use crate::handle::acquire::LeaseOnce;
use crate::handle::lease::Lease;
use crate::handle::lease_view::LeaseView;

/// The slot of a [`Lock`](crate::Lock): the lease that its `acquire` brought.
///
/// A lease leaves it by a release, or with the last handle, and never because another comes (H1). So a release is that
/// of the lease whose acquisition said `true`: one who has lost its lease cannot release that of the next (H3).
#[derive(Debug, Default)]
pub(crate) struct LeaseSlot {
    state: Mutex<SlotState>,
}

#[derive(Debug, Default)]
struct SlotState {
    lease: Option<Lease>,
    /// How many acquisitions are under way.
    claims: usize,
    /// Where the last acquisition was asked for, if its answer was `false` and nobody has looked at the handle since.
    refused: Option<&'static Location<'static>>,
}

impl LeaseSlot {
    /// Begins an acquisition. Fails if its lease could not be told apart from one that the handle has, or is acquiring.
    /// An exclusive acquisition waits in the queue of the key instead.
    fn claim(&self, mode: Mode) -> Option<Claim<'_>> {
        let mut state = self.state.lock();
        let is_free = match &state.lease {
            None => mode == Mode::Exclusive || state.claims == 0,
            Some(lease) => match lease.view().loss() {
                None => mode == Mode::Exclusive,
                // After a shutdown nothing is acquired, as the acquisition will say.
                Some(loss) => !loss.is_lost(),
            },
        };
        if !is_free {
            return None;
        }
        state.claims += 1;
        state.refused = None;
        Some(Claim { slot: self })
    }

    pub(crate) fn take(&self) -> Option<Lease> {
        self.state.lock().lease.take()
    }

    /// Whoever releases after an answer of `false` has perhaps not looked at it, and has worked without the lock.
    pub(crate) fn warn_of_refusal(&self, key: &str) {
        let refused = self.state.lock().refused.take();
        if let Some(place) = refused {
            log!(
                warn,
                key,
                acquire = %place,
                "release of a lock that was not acquired: `acquire` yielded false"
            );
        }
    }

    pub(crate) fn is_valid(&self) -> bool {
        let mut state = self.state.lock();
        state.refused = None;
        state.lease.as_ref().is_some_and(Lease::is_valid)
    }

    pub(crate) fn view(&self) -> Option<LeaseView> {
        let mut state = self.state.lock();
        state.refused = None;
        state.lease.as_ref().map(Lease::view)
    }
}

/// An acquisition that is under way.
struct Claim<'a> {
    slot: &'a LeaseSlot,
}

impl Claim<'_> {
    /// Puts the lease into the slot. Gives it back if there is another, which was lost and not released.
    fn fill(self, lease: Lease) -> Result<(), Lease> {
        let mut state = self.slot.state.lock();
        match &state.lease {
            None => state.lease = Some(lease),
            // The handle is reentrant: both share the lease of the work around them.
            Some(held) if Arc::ptr_eq(held.caller(), lease.caller()) => {
                drop(state);
                drop(lease);
            }
            Some(_) => return Err(lease),
        }
        Ok(())
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        self.slot.state.lock().claims -= 1;
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

operation! {
    /// Future of [`Lock::acquire`](crate::Lock::acquire),
    /// [`Lock::acquire_within`](crate::Lock::acquire_within) and
    /// [`Lock::acquire_once`](crate::Lock::acquire_once).
    #[must_use = "futures do nothing unless polled"]
    pub struct Acquire(Operation<Result<bool, LockError>>);
}

operation! {
    /// Future of [`Lock::release`](crate::Lock::release).
    #[must_use = "futures do nothing unless polled"]
    pub struct Release(Operation<Result<bool, LockError>>);
}

operation! {
    /// Future of [`Lock::extend`](crate::Lock::extend).
    #[must_use = "futures do nothing unless polled"]
    pub struct ExtendHeld(Operation<Result<Option<Instant>, LockError>>);
}

/// Acquires a lease for the slot, which is kept until then.
pub(crate) async fn acquire(acquiring: LeaseOnce, slot: Arc<LeaseSlot>) -> Result<bool, LockError> {
    let options = acquiring.0.options();
    let (key, place) = (options.key().clone(), options.place());
    let in_use = || LockError::HandleInUse { key };
    let (_, mode) = options.checked()?;
    let Some(claim) = slot.claim(mode) else {
        return Err(in_use());
    };
    let Some(lease) = acquiring.await? else {
        let mut state = slot.state.lock();
        if state.lease.is_none() {
            state.refused = Some(place);
        }
        return Ok(false);
    };
    claim.fill(lease).map(|()| true).map_err(|lease| {
        // Whatever `on_finish` says: nobody has worked under it.
        drop(lease.release());
        in_use()
    })
}
