//! A job of `tokio-cron-scheduler` in a service of which three instances run. It is due every second in each of them,
//! and one of the three does it.
//!
//! ```sh
//! cargo run --example scheduler                                 # on a memory store
//! REDIS_URL=redis://127.0.0.1/ cargo run --example scheduler    # on a server; in two terminals for six instances
//! ```
//!
//! This scheduler checks every 500 ms which jobs are due, so one start may be 500 ms late, and the next one on time. For
//! a job that is due every second this is too much: now and then the last second's key is still there, and every
//! instance skips the job. A job that is due every minute and keeps its key for 50 s has room enough.

use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use lockstream::OnFinish;
use lockstream::prelude::*;
use lockstream::store::MemoryStore;
use tokio::time::{Instant, sleep};
use tokio_cron_scheduler::{Job, JobScheduler};

/// What one instance has counted.
#[derive(Default)]
struct Counts {
    done: AtomicU32,
    skipped: AtomicU32,
}

/// Starts an instance of the service.
async fn serve(
    name: char,
    locks: LockRegistry,
    counts: Arc<Counts>,
) -> Result<JobScheduler, Box<dyn Error>> {
    let begun = Instant::now();
    let once = locks
        .obtain("report")
        .wait(Duration::ZERO)
        // Less than the second until the next start, which may be a little early.
        .on_finish(OnFinish::KeepFor(Duration::from_millis(900)));
    let job = Job::new_async("* * * * * *", move |_, _| {
        let (once, counts) = (once.clone(), counts.clone());
        Box::pin(async move {
            let report = async {
                println!("{:4.1} s  {name} did it", begun.elapsed().as_secs_f64());
                counts.done.fetch_add(1, Ordering::Relaxed);
            };
            match report.with_lock(once).or_skip().await {
                Ok(Some(())) => {}
                Ok(None) => {
                    counts.skipped.fetch_add(1, Ordering::Relaxed);
                }
                Err(error) => eprintln!("scheduler: {name}: {error}"),
            }
        })
    })?;
    let scheduler = JobScheduler::new().await?;
    scheduler.add(job).await?;
    scheduler.start().await?;
    Ok(scheduler)
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let memory = MemoryStore::new();
    let mut instances = Vec::new();
    for name in ['A', 'B', 'C'] {
        let locks = match std::env::var("REDIS_URL") {
            Ok(url) => LockRegistry::connect(url)
                .await
                .map_err(|error| format!("the server in REDIS_URL cannot be used: {error}"))?,
            Err(_) => LockRegistry::builder(memory.clone()).build()?,
        };
        let counts = Arc::new(Counts::default());
        let scheduler = serve(name, locks.clone(), counts.clone()).await?;
        instances.push((name, locks, counts, scheduler));
    }
    sleep(Duration::from_secs(5)).await;
    for (name, locks, counts, mut scheduler) in instances {
        scheduler.shutdown().await?;
        // What it has begun may end.
        locks.drain(Duration::from_secs(5)).await;
        let [done, skipped] =
            [&counts.done, &counts.skipped].map(|count| count.load(Ordering::Relaxed));
        println!("{name}: {done} done, {skipped} skipped");
    }
    Ok(())
}
