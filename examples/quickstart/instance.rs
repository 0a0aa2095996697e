//! How one instance does its share, with and without locks.

use std::time::Duration;

use futures::{StreamExt, TryStreamExt, stream};
use lockstream::prelude::*;
use lockstream::store::MemoryStore;
use lockstream::{BuildError, LockRegistryBuilder};
use tokio::task::JoinSet;

use crate::ledger::{Ledger, Tally};
use crate::report::Bar;
use crate::transfers::{Transfer, Transfers};
use crate::{Error, INSTANCES, Stop};

/// How many transfers an instance has under way at once.
const AT_ONCE: usize = 8;

/// How long to wait for a lock: a slow machine takes its time for all who want the same account, and a
/// server that goes away is told in good time.
const PATIENCE: Duration = Duration::from_secs(30);

/// How long a lease lasts: no transfer takes a thousandth of it.
const TTL: Duration = Duration::from_secs(8);

/// An instance's registry, as each process of a service would make one.
pub(crate) fn registry(
    builder: LockRegistryBuilder,
    prefix: &str,
) -> Result<LockRegistry, BuildError> {
    builder.prefix(prefix).wait(PATIENCE).ttl(TTL).build()
}

/// Applies an instance's share as a stream, several at once; `applied` hears of each.
pub(crate) async fn apply_share(
    instance: usize,
    share: Vec<Transfer>,
    ledger: &Ledger,
    locks: Option<&LockRegistry>,
    applied: impl Fn(Tally),
) -> Result<(), Error> {
    let transfers = stream::iter(share).map(Ok);
    transfers
        .try_for_each_concurrent(AT_ONCE, async |transfer| {
            let transfer_money = ledger.apply(&transfer, instance);
            applied(match locks {
                None => transfer_money.await?,
                Some(locks) => {
                    let [first, second] = transfer.accounts_sorted();
                    transfer_money
                        .try_with_lock(locks.obtain(second))
                        .try_with_lock(locks.obtain(first)) // the outermost lock is taken first
                        .await?
                }
            });
            Ok(())
        })
        .await
}

/// All instances in this process: four registries on one store behave as four processes.
pub(crate) async fn run_all(
    transfers: &Transfers,
    ledger: &Ledger,
    locks: bool,
    bar: &Bar,
    stop: &Stop,
) -> Result<Tally, Error> {
    let store = MemoryStore::new();
    let registries: Result<Vec<_>, _> = (0..INSTANCES)
        .map(|_| registry(LockRegistry::builder(store.clone()), "quickstart"))
        .collect();
    let registries = registries?;
    let mut instances = JoinSet::new();
    for (instance, registry) in registries.iter().cloned().enumerate() {
        let (share, ledger, bar) = (transfers.share(instance), ledger.clone(), bar.clone());
        instances.spawn(async move {
            let registry = locks.then_some(&registry);
            apply_share(instance, share, &ledger, registry, |tally| bar.add(tally)).await
        });
    }
    let all = async {
        while let Some(ended) = instances.join_next().await {
            ended.expect("an instance does not panic")?;
        }
        Ok(bar.tally())
    };
    let ended = tokio::select! {
        ended = all => ended,
        () = stop.clone() => Err(Error::Interrupted),
    };
    // Whatever still runs under a lock ends here, and nothing stays locked.
    for registry in &registries {
        registry.shutdown().await;
    }
    ended
}
