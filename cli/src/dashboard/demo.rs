//! Tasks that take turns on a few locks in memory, so that the page has something to show.

use std::time::Duration;

use lockstream::BuildError;
use lockstream::prelude::*;
use lockstream::store::MemoryStore;
use tokio::time::sleep;

/// Starts the tasks. They run until the process ends.
pub(crate) fn start(store: &MemoryStore) -> Result<(), BuildError> {
    let named = |name: &str| {
        let locks = LockRegistry::builder(store.clone()).name(name);
        locks.ttl(Duration::from_secs(6)).build()
    };
    for (name, work) in [
        ("till-1", 1_700),
        ("till-2", 2_600),
        ("till-3", 3_300),
        ("till-4", 2_300),
    ] {
        let locks = named(name)?;
        for (account, more, pause) in [
            ("account:7", 0, 400),
            ("account:42", 900, 5_700),
            ("account:99", 1_900, 9_000),
        ] {
            again_and_again(locks.obtain(account), work + more, pause);
        }
    }
    for (name, work, pause) in [
        ("reader-1", 4_600, 1_900),
        ("reader-2", 5_300, 2_300),
        ("reader-3", 3_900, 2_900),
    ] {
        again_and_again(named(name)?.obtain("doc:terms").shared(), work, pause);
    }
    again_and_again(named("editor")?.obtain("doc:terms"), 2_900, 7_000);
    for (name, work) in [
        ("render-1", 3_700),
        ("render-2", 4_900),
        ("render-3", 7_300),
        ("render-4", 6_100),
        ("render-5", 3_300),
    ] {
        again_and_again(named(name)?.obtain("gpu").permits(3), work, 200);
    }
    for (name, work) in [("cron-a", 14_000), ("cron-b", 9_000)] {
        again_and_again(named(name)?.obtain("nightly:report"), work, 100);
    }
    Ok(())
}

/// Holds the lock for `work` and leaves it for `pause`, in milliseconds.
fn again_and_again(lock: Lock, work: u64, pause: u64) {
    let [work, pause] = [work, pause].map(Duration::from_millis);
    tokio::spawn(async move {
        loop {
            // A sleep counts from its making, so it is made under the lock.
            let work = async { sleep(work).await };
            // Whoever did not get the lock in time, or has lost it, comes again.
            let _ = work.with_lock(lock.clone()).await;
            sleep(pause).await;
        }
    });
}
