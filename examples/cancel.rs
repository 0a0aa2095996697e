//! Spawned tasks that stop when the lease is lost. `with_lock` drops its own work at a loss, but not what that work has
//! spawned: a task runs on unless somebody tells it.
//!
//! ```sh
//! cargo run --features tokio-util --example cancel
//! ```
//!
//! A backup is copied in parts by three tasks, under a lease of one second that nobody renews. A fourth task, which was
//! given no token, shows what happens otherwise: it goes on copying while somebody else has the lock.

use std::collections::BTreeMap;
use std::error::Error;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use lockstream::prelude::*;
use lockstream::store::MemoryStore;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

/// How long one part takes.
const PART: Duration = Duration::from_millis(150);

/// When each task copied its parts.
type Copied = Arc<Mutex<BTreeMap<&'static str, Vec<Instant>>>>;

async fn copy(task: &'static str, copied: Copied) {
    loop {
        sleep(PART).await;
        let mut copied = copied.lock().expect("no task panics");
        copied.entry(task).or_default().push(Instant::now());
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let store = MemoryStore::new();
    let here = LockRegistry::builder(store.clone()).build()?;
    let there = LockRegistry::builder(store).build()?;
    let (copied, begun) = (Copied::default(), Instant::now());
    let since = |at: Instant| format!("{:4.2} s", (at - begun).as_secs_f64());
    let mut tasks = JoinSet::new();

    let lock = here.obtain("backup").ttl(Duration::from_secs(1));
    let backup = lock.with_lease(async |lease| {
        println!(
            "{}  the backup begins under lease {}",
            since(Instant::now()),
            lease.token()
        );
        for task in ["first", "second", "third"] {
            let (lost, copied) = (lease.cancellation_token(), copied.clone());
            tasks.spawn(async move {
                lost.run_until_cancelled(copy(task, copied)).await;
                Instant::now()
            });
        }
        tokio::spawn(copy("careless", copied.clone()));
        // It would take for ever.
        std::future::pending::<()>().await;
    });
    let lost = backup.await.expect_err("it takes longer than its lease");
    let lost_at = Instant::now();
    println!("{}  {lost}", since(lost_at));
    for stopped in tasks.join_all().await {
        println!("{}  a task has stopped", since(stopped));
    }

    let next = there.obtain("backup").lease().await?;
    let next_at = Instant::now();
    println!(
        "{}  somebody else has the lock, under lease {}",
        since(next_at),
        next.token()
    );
    sleep(Duration::from_secs(1)).await;
    next.release().await?;

    println!();
    for (task, copied) in copied.lock().expect("no task panics").iter() {
        let late = copied.iter().filter(|at| **at > next_at).count();
        println!(
            "{task:9} copied {} parts, {late} of them under somebody else's lock",
            copied.len()
        );
    }
    Ok(())
}
