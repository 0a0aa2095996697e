use std::collections::BTreeSet;
use std::time::Duration;

use super::ballot::Quorum;
use crate::base::StoreError;

/// Errors of a quorum itself.
#[derive(Clone, Debug, thiserror::Error)]
pub(super) enum Fault {
    #[error("a quorum needs at least one node")]
    NoNodes,
    #[error("two nodes of the quorum are one: {place}")]
    Twice { place: String },
    #[error(
        "the urls of the quorum's nodes say different things of the registry: give all the same prefix, name and \
         response_timeout, or none"
    )]
    Differ,
    #[error("no majority of {majority}: {away} of {size} nodes unavailable: {reasons}")]
    TooFew {
        away: usize,
        size: usize,
        majority: usize,
        reasons: String,
        /// Whether a retry does not help.
        lasting: bool,
    },
    #[error("node unavailable")]
    Away,
    #[error("node restarted {age:?} ago, no vote for {quarantine:?} (`QuorumStore::quarantine`)")]
    TooYoung { age: Duration, quarantine: Duration },
    #[error(
        "age of the node unknown (no right to INFO), no vote for {quarantine:?} after connecting (`QuorumStore::quarantine`)"
    )]
    UnknownAge { quarantine: Duration },
    #[error("two nodes of the quorum are the same server: {second} is {first}")]
    SameServer { first: String, second: String },
    #[error("node lost the lock before the majority was complete")]
    Forgot,
    #[error("a quorum has no queue")]
    NoQueue,
    #[error("lock expired before it was released")]
    RunOut,
}

impl From<Fault> for StoreError {
    fn from(fault: Fault) -> Self {
        match fault {
            Fault::NoNodes | Fault::Differ | Fault::Twice { .. } | Fault::SameServer { .. } => {
                Self::lasting(fault)
            }
            Fault::TooFew { lasting: true, .. } => Self::lasting(fault),
            _ => Self::new(fault),
        }
    }
}

/// The error if no majority has a vote: why the nodes have none, lasting reasons first.
pub(super) fn too_few<'a>(
    quorum: Quorum,
    errors: impl Iterator<Item = &'a StoreError> + Clone,
) -> StoreError {
    let reasons = errors.clone().map(|it| (it.is_retryable(), it.to_string()));
    let reasons: BTreeSet<_> = reasons.collect();
    let reasons: Vec<_> = reasons.into_iter().map(|(_, reason)| reason).collect();
    let lasting = errors.clone().filter(|it| !it.is_retryable()).count();
    let abandoned = errors.clone().filter(|it| it.is_abandoned()).count();
    let fault = Fault::TooFew {
        away: errors.count(),
        size: quorum.size,
        majority: quorum.majority(),
        reasons: reasons.join("; "),
        lasting: lasting > quorum.spare(),
    };
    if abandoned > quorum.spare() {
        StoreError::abandoned(fault)
    } else {
        fault.into()
    }
}
