//! Why a lease was lost.

use std::fmt;
use std::time::Duration;

/// Why a lease was lost: of [`LockError::Lost`](crate::LockError::Lost) and
/// [`LockEvent::Lost`](crate::LockEvent::Lost).
///
/// It is what the registry knows at the moment of the loss. Its `Display` is for people.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LossCause {
    /// Its ttl was over, and nobody renews it: a lock with a [`ttl`](crate::Lock::ttl) of its own is not renewed unless
    /// [`renewal`](crate::Lock::renewal) says so.
    FixedTtl,
    /// It was renewed as often as [`max_renewals`](crate::Renewal::max_renewals) allows.
    LastRenewal,
    /// It could not be renewed: the store was unreachable.
    #[non_exhaustive]
    StoreUnreachable {
        /// For how long, until the end of the lease.
        lasted: Duration,
    },
    /// It could not be renewed, on a connection that stands: the store refused, or did not answer in time.
    NotRenewed,
    /// It was not renewed, since this process, its runtime or the machine stood still.
    #[non_exhaustive]
    StoodStill {
        /// For how long, at most.
        lasted: Duration,
    },
    /// The store does not have it any more, though it was not over: somebody has deleted or overwritten the key.
    Taken,
    /// The store does not have it any more, and another server answers than the one that gave it: the server was started
    /// again without its data, or another one has taken its place.
    ServerChanged,
    /// Another guard of the lease has ended it: it was [detached](crate::Lease::detach), or another key of its group was
    /// lost.
    EndedByOther,
    /// Its own guard has ended it before.
    Ended,
    /// The detached lease that was to be [adopted](crate::LockRegistry::adopt) was over, adopted by another, or of another
    /// prefix.
    NothingToAdopt,
    /// The registry has failed: the log has its error.
    RegistryFailed,
}

impl LossCause {
    /// As a label of metrics.
    #[cfg(feature = "metrics")]
    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::FixedTtl => "fixed_ttl",
            Self::LastRenewal => "last_renewal",
            Self::StoreUnreachable { .. } => "store_unreachable",
            Self::NotRenewed => "not_renewed",
            Self::StoodStill { .. } => "stood_still",
            Self::Taken => "taken",
            Self::ServerChanged => "server_changed",
            Self::EndedByOther => "ended_by_other",
            Self::Ended => "ended",
            Self::NothingToAdopt => "nothing_to_adopt",
            Self::RegistryFailed => "registry_failed",
        }
    }
}

impl fmt::Display for LossCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::FixedTtl => f.write_str(
                "its ttl was over: a lock with a `ttl` of its own is not renewed unless `renewal` is set",
            ),
            Self::LastRenewal => f.write_str("its ttl was over, and `max_renewals` allowed no more"),
            Self::StoreUnreachable { lasted } => {
                write!(f, "not renewed, since the store was unreachable for {lasted:.1?}")
            }
            Self::NotRenewed => f.write_str("the store confirmed no renewal in time"),
            Self::StoodStill { lasted } => write!(
                f,
                "not renewed, since this process or its runtime stood still for up to {lasted:.1?}"
            ),
            Self::Taken => f.write_str("its key was deleted or overwritten in the store"),
            Self::ServerChanged => {
                f.write_str("its key is not on the server that answers now, which is another or has lost its data")
            }
            Self::EndedByOther => f.write_str("another guard of it, or of its group, has ended it"),
            Self::Ended => f.write_str("it was ended before"),
            Self::NothingToAdopt => f.write_str("it was over or adopted before"),
            Self::RegistryFailed => f.write_str("its registry has failed"),
        }
    }
}
