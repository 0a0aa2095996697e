use std::collections::BTreeSet;
use std::time::Duration;

use super::tally::Quorum;
use crate::StoreError;

/// What goes wrong in a quorum itself.
#[derive(Clone, Debug, thiserror::Error)]
pub(super) enum Fault {
    #[error("a quorum needs a node at least")]
    NoNodes,
    #[error(
        "two nodes of the quorum are one: {place}; each must be a server of its own, and no database of another's"
    )]
    Twice { place: String },
    #[error(
        "{away} of {size} nodes cannot be asked, and {majority} are a majority: {}{}",
        r#source,
        others.iter().map(|it| format!("; {it}")).collect::<String>()
    )]
    TooFew {
        away: usize,
        size: usize,
        majority: usize,
        /// Told in full, and so no `source()` (which the derive would take it for under its plain name).
        r#source: StoreError,
        /// What other nodes said that is not the same.
        others: BTreeSet<String>,
    },
    #[error("a node of the quorum is away")]
    Away,
    #[error(
        "a node of the quorum was started again {age}, and has no vote for {quarantine:?} (`QuorumStore::quarantine`)"
    )]
    TooYoung { age: String, quarantine: Duration },
    #[error(
        "two nodes of the quorum are the same server: {second} is {first}; name each server once, and no database of another's"
    )]
    SameServer { first: String, second: String },
    #[error("a node of the quorum lost the lock before it was ours")]
    Forgot,
    #[error("a quorum has no queue")]
    NoQueue,
    #[error("what was to be released has run out by itself")]
    RunOut,
}

impl From<Fault> for StoreError {
    fn from(fault: Fault) -> Self {
        let lasting = match &fault {
            Fault::NoNodes | Fault::Twice { .. } | Fault::SameServer { .. } => true,
            Fault::TooFew { source, .. } => !source.is_retryable(),
            _ => false,
        };
        if lasting {
            Self::lasting(fault)
        } else {
            Self::new(fault)
        }
    }
}

/// What is told where no majority could be asked: what the nodes said, and what will not mend by
/// itself above all, if it is that which stands in the way.
pub(super) fn too_few(quorum: Quorum, errors: &[StoreError]) -> StoreError {
    let lasting: Vec<_> = errors.iter().filter(|it| !it.is_retryable()).collect();
    let source = if lasting.len() > quorum.spare() {
        lasting.last().copied()
    } else {
        errors.iter().rfind(|it| it.is_retryable())
    };
    let source = source.cloned().unwrap_or_else(|| Fault::Away.into());
    let mut others: BTreeSet<_> = errors.iter().map(ToString::to_string).collect();
    others.remove(&source.to_string());
    let fault = Fault::TooFew {
        away: errors.len().min(quorum.size),
        size: quorum.size,
        majority: quorum.majority(),
        source,
        others,
    };
    fault.into()
}
