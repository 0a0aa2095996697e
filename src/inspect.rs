use std::time::Duration;

use crate::LockError;
use crate::operation::Operation;
use crate::options::LockOptions;
use crate::store::contract::KeyStatus;

/// Future of [`Lock::inspect`](crate::Lock::inspect).
pub type Inspect = Operation<Result<Inspection, LockError>>;

pub(crate) async fn inspect(options: LockOptions) -> Result<Inspection, LockError> {
    let engine = options.engine()?;
    let key = options.key().clone();
    let Some(session) = engine.session() else {
        return Err(LockError::Closed { key });
    };
    let seen = session.inspect(key.clone()).await;
    seen.map(Inspection::from)
        .map_err(|source| LockError::Store { key, source })
}

/// What a lock looked like in the store; see [`Lock::inspect`](crate::Lock::inspect).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Inspection {
    /// The holder as the store has it: `<instance>:<sequence>`, where the instance of a registry with a
    /// [name](crate::LockRegistryBuilder::name) is `<name>~<random bits>`; or whatever a foreign lock put
    /// there. `None` if the lock is free.
    pub owner: Option<String>,
    /// How long the store keeps it unless it is prolonged; `None` if it is free, or without a ttl.
    pub remaining: Option<Duration>,
    /// How many registries wait for it.
    pub waiting: u64,
}

impl From<KeyStatus> for Inspection {
    fn from(key_status: KeyStatus) -> Self {
        Self {
            owner: key_status.owner,
            remaining: key_status.left,
            waiting: key_status.tickets,
        }
    }
}
