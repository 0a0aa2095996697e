use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;

use crate::LockError;
use crate::options::LockOptions;
use crate::store::contract::KeyStatus;

/// Future of [`Lock::inspect`](crate::Lock::inspect).
#[must_use = "futures do nothing unless polled"]
pub struct Inspect(Option<BoxFuture<'static, Result<Inspection, LockError>>>);

impl Inspect {
    pub(crate) fn new(options: LockOptions) -> Self {
        let look = async move {
            let engine = options.engine()?;
            let key = options.key().clone();
            let Some(session) = engine.session() else {
                return Err(LockError::Closed { key });
            };
            let seen = session.inspect(key.clone()).await;
            seen.map(Inspection::from)
                .map_err(|source| LockError::Store { key, source })
        };
        Self(Some(look.boxed()))
    }
}

impl Future for Inspect {
    type Output = Result<Inspection, LockError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let Some(look) = &mut self.0 else {
            panic!("`Inspect` polled after it was done");
        };
        let seen = std::task::ready!(look.as_mut().poll(cx));
        self.0 = None;
        Poll::Ready(seen)
    }
}

impl fmt::Debug for Inspect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inspect").finish_non_exhaustive()
    }
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
