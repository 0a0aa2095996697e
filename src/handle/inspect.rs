use std::sync::Arc;
use std::time::Duration;

use futures::future::try_join_all;

use crate::base::holder::{KEPT, parts_of};
use crate::base::limits::is_name;
use crate::base::operation::operation;
use crate::base::{LockError, Mode};
use crate::handle::options::LockOptions;
use crate::store::contract::KeyStatus;

operation! {
    /// Future of [`Lock::inspect`](crate::Lock::inspect).
    #[must_use = "futures do nothing unless polled"]
    pub struct Inspect(Operation<Result<Inspection, LockError>>);
}

pub(crate) async fn inspect(options: LockOptions) -> Result<Inspection, LockError> {
    let session = options.session()?;
    let keys = options.keys().iter();
    let seen = keys.clone().map(async |key| {
        let seen = session.inspect(key.clone()).await;
        seen.map_err(|source| {
            let key = key.clone();
            LockError::Store { key, source }
        })
    });
    let seen = try_join_all(seen).await?;
    Ok(Inspection::of(keys.cloned().zip(seen)))
}

/// What a lock looked like in the store; see [`Lock::inspect`](crate::Lock::inspect). Of several keys, all that was seen of
/// each.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Inspection {
    /// Who holds it: of a shared lock the first hundred, in the order of their ends. Those whose time is over are left
    /// out.
    pub holders: Vec<InspectedHolder>,
    /// How much of the lock is taken, also by those who are not shown: by a permit its weight, and by an exclusive holder
    /// or a reader 1. Of several keys, the sum. So `limit - taken` of a lock of permits is free.
    pub taken: u64,
    /// How many tickets are in the queue: one for each registry that waits for an exclusive lease, and one for each caller
    /// that waits for a shared one. Of a registry that was killed, or lost its connection, they do not count: the store
    /// passes them over. That is looked up for the first thousand tickets.
    pub waiting: u64,
    /// The first hundred of them.
    pub queue: Vec<InspectedTicket>,
}

/// A holder of a lock in the store.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct InspectedHolder {
    /// Which key it holds: of [several keys](crate::LockRegistry::obtain_all), one of them.
    pub key: Arc<str>,
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
    /// Which key it waits for.
    pub key: Arc<str>,
    /// Its owner, as in [`InspectedHolder::owner`].
    pub owner: String,
    /// What it would exclude.
    pub mode: Mode,
}

impl Inspection {
    pub(crate) fn of(seen: impl Iterator<Item = (Arc<str>, KeyStatus)>) -> Self {
        let (mut holders, mut queue, mut taken, mut waiting) = (Vec::new(), Vec::new(), 0, 0);
        for (key, status) in seen {
            taken += status.taken;
            waiting += status.tickets;
            holders.extend(status.holders.into_iter().map(|holder| InspectedHolder {
                key: key.clone(),
                owner: holder.name,
                mode: holder.mode,
                remaining: holder.left,
            }));
            let tickets = status.queue.into_iter();
            queue.extend(tickets.map(|(owner, mode)| InspectedTicket {
                key: key.clone(),
                owner,
                mode,
            }));
        }
        Self {
            holders,
            taken,
            waiting,
            queue,
        }
    }

    /// Whether anybody held it. Of several keys, any of them.
    ///
    /// The answer may be outdated when it arrives: do not use it to decide whether to work.
    pub fn is_held(&self) -> bool {
        !self.holders.is_empty()
    }

    /// The owner of the first of the [`holders`](Self::holders): of the only one, unless they share the lock. `None` if it
    /// is free.
    pub fn owner(&self) -> Option<&str> {
        self.holders.first().map(|first| &*first.owner)
    }

    /// How long the store keeps it unless it is prolonged; `None` if it is free, or without a ttl. Of a shared lock, as
    /// long as the last of the [`holders`](Self::holders) that are shown.
    pub fn remaining(&self) -> Option<Duration> {
        let remaining = self.holders.iter().map(|it| it.remaining);
        remaining
            .max_by_key(|it| it.unwrap_or(Duration::MAX))
            .flatten()
    }
}

impl InspectedHolder {
    /// The [name](crate::LockRegistryBuilder::name) of the registry that holds it, or held it until its key was
    /// [kept](crate::OnFinish::KeepFor). `None` if it has no name, or is a foreign lock.
    ///
    /// ```
    /// use lockstream::{LockRegistry, store::MemoryStore};
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let locks = LockRegistry::builder(MemoryStore::new()).name("web-1").build()?;
    /// let lock = locks.obtain("till");
    /// let lease = lock.lease().await?;
    /// let seen = lock.inspect().await?;
    /// assert_eq!(seen.holders[0].name(), Some("web-1"));
    /// # Ok(lease.release().await?)
    /// # }
    /// ```
    pub fn name(&self) -> Option<&str> {
        name_of(&self.owner)
    }
}

impl InspectedTicket {
    /// The name of the registry that waits, as [`InspectedHolder::name`].
    pub fn name(&self) -> Option<&str> {
        name_of(&self.owner)
    }
}

/// The name in `<name>~<random bits>:<sequence>`.
fn name_of(owner: &str) -> Option<&str> {
    let (instance, _) = parts_of(owner)?;
    let (name, random) = instance.split_once('~')?;
    let random = random.strip_suffix(KEPT).unwrap_or(random);
    let is_ours =
        is_name(name) && random.len() == 32 && random.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_ours.then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// They were fields, and could say something else than the holders.
    #[test]
    fn what_is_left_is_that_of_the_last_holder() {
        let holder = |owner: &str, remaining| InspectedHolder {
            key: "k".into(),
            owner: owner.into(),
            mode: Mode::Shared,
            remaining,
        };
        let (second, third) = (Duration::from_secs(2), Duration::from_secs(3));
        let mut seen = Inspection::of(std::iter::empty());
        assert_eq!((seen.owner(), seen.remaining()), (None, None));
        seen.holders = vec![holder("a:1", Some(second)), holder("b:1", Some(third))];
        assert_eq!((seen.owner(), seen.remaining()), (Some("a:1"), Some(third)));
        seen.holders.push(holder("by hand", None));
        assert_eq!(seen.remaining(), None, "it has no end");
        seen.holders.clear();
        assert!(!seen.is_held() && seen.owner().is_none());
    }

    #[test]
    fn an_owner_tells_its_name() {
        let random = "0123456789abcdef".repeat(2);
        let named = |owner: &str| name_of(&owner.replace('R', &random)).map(str::to_owned);
        assert_eq!(named("web-1~R:17").as_deref(), Some("web-1"));
        assert_eq!(named("web_1.a~R+kept:17").as_deref(), Some("web_1.a"));
        for other in [
            "R:17",
            "web~R",
            "web~R:",
            "web~R:x",
            "web~ab:1",
            "~R:1",
            "w b~R:1",
            "a~R+more:1",
            "",
            ":",
            "somebody else's",
            "~quiet",
        ] {
            assert_eq!(named(other), None, "{other}");
        }
    }
}
