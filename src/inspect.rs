use std::time::Duration;

use futures::future::try_join_all;

use crate::operation::Operation;
use crate::options::LockOptions;
use crate::store::contract::KeyStatus;
use crate::{LockError, Mode};

/// Future of [`Lock::inspect`](crate::Lock::inspect).
pub type Inspect = Operation<Result<Inspection, LockError>>;

pub(crate) async fn inspect(options: LockOptions) -> Result<Inspection, LockError> {
    let engine = options.engine()?;
    let Some(session) = engine.session() else {
        let key = options.key().clone();
        return Err(LockError::Closed { key });
    };
    let keys = options.keys().iter();
    let seen = keys.map(async |key| {
        let seen = session.inspect(key.clone()).await;
        seen.map_err(|source| {
            let key = key.clone();
            LockError::Store { key, source }
        })
    });
    let mut all = KeyStatus::default();
    for seen in try_join_all(seen).await? {
        all.holders.extend(seen.holders);
        all.tickets += seen.tickets;
        all.queue.extend(seen.queue);
    }
    Ok(all.into())
}

/// What a lock looked like in the store; see [`Lock::inspect`](crate::Lock::inspect). Of several keys, all that was seen of
/// each.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Inspection {
    /// The first of the [`holders`](Self::holders): the only one, unless they share the lock. `None` if it is free.
    pub owner: Option<String>,
    /// How long the store keeps it unless it is prolonged; `None` if it is free, or without a ttl.
    pub remaining: Option<Duration>,
    /// Who holds it: of a shared lock the first 200, where a permit counts by its weight.
    pub holders: Vec<InspectedHolder>,
    /// How many tickets are in the queue: one for each registry that waits for an exclusive lease, and one for each caller
    /// that waits for a shared one.
    pub waiting: u64,
    /// The first hundred of them.
    pub queue: Vec<InspectedTicket>,
}

/// A holder of a lock in the store.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct InspectedHolder {
    /// Its owner: `<instance>:<sequence>`, where the instance of a registry with a
    /// [name](crate::LockRegistryBuilder::name) is `<name>~<random bits>`; or whatever a foreign lock put there.
    /// A key that [`OnFinish::KeepFor`](crate::OnFinish::KeepFor) keeps after its lease has `<instance>+kept:<sequence>`.
    pub owner: String,
    /// What it excludes.
    pub mode: Mode,
    /// How long the store keeps it unless it is prolonged; `None` if it has no ttl.
    pub remaining: Option<Duration>,
}

/// A ticket in the queue of a lock.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct InspectedTicket {
    /// Its owner, as in [`InspectedHolder::owner`].
    pub owner: String,
    /// What it would exclude.
    pub mode: Mode,
}

impl From<KeyStatus> for Inspection {
    fn from(key_status: KeyStatus) -> Self {
        let holders = key_status.holders.into_iter();
        let holders: Vec<_> = holders
            .map(|holder| InspectedHolder {
                owner: holder.name,
                mode: holder.mode,
                remaining: holder.left,
            })
            .collect();
        let queue = key_status.queue.into_iter();
        Self {
            owner: holders.first().map(|first| first.owner.clone()),
            remaining: holders
                .iter()
                .map(|it| it.remaining)
                .max_by_key(|it| it.unwrap_or(Duration::MAX))
                .flatten(),
            holders,
            waiting: key_status.tickets,
            queue: queue
                .map(|(owner, mode)| InspectedTicket { owner, mode })
                .collect(),
        }
    }
}
