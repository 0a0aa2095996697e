use crate::StoreError;

/// What goes wrong in a quorum itself.
#[derive(Clone, Debug, thiserror::Error)]
pub(super) enum Fault {
    #[error("a quorum needs a node at least")]
    NoNodes,
    #[error("{away} of {size} nodes cannot be asked, and {majority} are a majority: {source}")]
    TooFew {
        away: usize,
        size: usize,
        majority: usize,
        source: StoreError,
    },
    #[error("a node of the quorum is away")]
    Away,
    #[error("a node of the quorum was started again {age}, and has no vote yet")]
    TooYoung { age: String },
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
            Fault::NoNodes => true,
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
