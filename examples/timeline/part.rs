//! What each of them does, and what it tells.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use futures::StreamExt;
use lockstream::store::MemoryStore;
use lockstream::{
    BuildError, Lock, LockError, LockEvent, LockRegistry, LockRegistryBuilder, Renewal,
};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use crate::story::{Heard, What};
use crate::{Error, INTO_ITS_WORK, KILL_AFTER, LASTS, PARTS, VICTIM};

/// How long a lease lasts unless it is renewed: so long the others wait for a dead holder.
pub(crate) const TTL: Duration = Duration::from_millis(600);

/// How one of them works.
pub(crate) struct Part {
    /// How many callers it has: those of one process pass the lock on among themselves.
    pub(crate) callers: usize,
    /// How long each works under the lock.
    pub(crate) work: Duration,
    pub(crate) renewed: bool,
    /// Every third time it takes longer than its lease lasts.
    pub(crate) slow: bool,
}

pub(crate) const ALL: [Part; PARTS] = [
    Part::new(1, 240).renewed(),
    Part::new(1, 280),
    Part::new(2, 90).renewed(),
    Part::new(1, 110).slow(),
];

impl Part {
    const fn new(callers: usize, millis: u64) -> Self {
        let work = Duration::from_millis(millis);
        let (renewed, slow) = (false, false);
        Self {
            callers,
            work,
            renewed,
            slow,
        }
    }

    const fn renewed(mut self) -> Self {
        self.renewed = true;
        self
    }

    const fn slow(mut self) -> Self {
        self.slow = true;
        self
    }

    /// In words, for the picture.
    pub(crate) fn describe(&self) -> String {
        let callers = match self.callers {
            1 => "1 caller".to_owned(),
            n => format!("{n} callers"),
        };
        let how = match (self.renewed, self.slow) {
            (true, _) => ", renewed",
            (_, true) => ", at times too slow",
            _ => "",
        };
        format!("{callers}{how}")
    }
}

pub(crate) fn registry(
    builder: LockRegistryBuilder,
    prefix: &str,
) -> Result<LockRegistry, BuildError> {
    builder
        .prefix(prefix)
        .ttl(TTL)
        .renewal(Renewal::off())
        .wait(Duration::from_secs(10))
        // Long enough for one of its callers to pass the lock to the other.
        .local_span(Duration::from_millis(150))
        .build()
}

/// Takes part until it is over, and tells what its registry tells.
pub(crate) async fn take_part(
    number: usize,
    locks: LockRegistry,
    mut crash: watch::Receiver<bool>,
    tell: impl Fn(u64, What),
) -> Result<(), LockError> {
    let part = &ALL[number];
    let mut events = locks.events();
    let mut callers = Vec::new();
    for caller in 0..part.callers {
        let (locks, crash) = (locks.clone(), crash.clone());
        callers.push(tokio::spawn(async move {
            // Not all at once.
            sleep(Duration::from_millis(25 * (number + 4 * caller) as u64)).await;
            work(number, &locks, crash).await
        }));
    }
    let mut has_crashed = crash.clone();
    let ends = async move {
        for caller in callers {
            caller.await.expect("a caller does not panic")?;
        }
        if *has_crashed.borrow_and_update() {
            // Its callers have seen that first.
            std::future::pending::<()>().await;
        }
        // Everything is told that there is to tell, and the events end.
        locks.shutdown().await;
        Ok(())
    };
    let listens = async {
        let mut passed = false;
        while let Some(event) = events.next().await {
            let now = SystemTime::now().duration_since(UNIX_EPOCH);
            let now = micros(now.unwrap_or_default());
            let what = match event {
                LockEvent::Waiting { waiter, .. } => What::Waits(waiter),
                LockEvent::Passed { .. } => {
                    passed = true;
                    continue;
                }
                LockEvent::Acquired { waiter, token, .. } => {
                    let passed = std::mem::take(&mut passed);
                    What::Acquires(waiter, token.get(), passed)
                }
                LockEvent::Renewed { token, .. } => What::Renews(token.get()),
                LockEvent::Released { token, held, .. } | LockEvent::Closed { token, held, .. } => {
                    What::Releases(token.get(), micros(held))
                }
                LockEvent::Lost { token, held, .. } | LockEvent::Unreleased { token, held, .. } => {
                    What::Loses(token.get(), micros(held))
                }
                LockEvent::GaveUp { waiter, .. } => What::GivesUp(waiter),
                _ => continue,
            };
            tell(now, what);
        }
    };
    tokio::select! {
        biased;
        // A dead process tells nothing more, and ends nothing in good order.
        () = crashed(&mut crash) => Ok(()),
        (ended, ()) = async { tokio::join!(ends, listens) } => ended,
    }
}

pub(crate) fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).expect("a time of this age")
}

/// One caller: locks, works and pauses until it is over.
async fn work(
    number: usize,
    locks: &LockRegistry,
    mut crash: watch::Receiver<bool>,
) -> Result<(), LockError> {
    let part = &ALL[number];
    let lock = locks.obtain("contended");
    let renewed = if part.renewed {
        Renewal::watchdog()
    } else {
        Renewal::off()
    };
    let lock = lock.ttl(TTL).renewal(renewed);
    let begin = Instant::now();
    for turn in 1.. {
        if begin.elapsed() > LASTS {
            break;
        }
        if part.slow && turn % 3 == 0 {
            work_too_slowly(&lock).await?;
        } else {
            let lease = tokio::select! {
                lease = lock.lease() => lease?,
                () = crashed(&mut crash) => return Ok(()),
            };
            tokio::select! {
                () = sleep(part.work) => lease.release().await?,
                () = crashed(&mut crash) => {
                    // What a killed process leaves: a lease that nobody releases.
                    std::mem::forget(lease);
                    return Ok(());
                }
            }
        }
        sleep(Duration::from_millis(30)).await;
    }
    Ok(())
}

async fn crashed(crash: &mut watch::Receiver<bool>) {
    if crash.wait_for(|crashed| *crashed).await.is_err() {
        std::future::pending().await
    }
}

/// The lease lasts for half of the work: its holder is told, and stops.
async fn work_too_slowly(lock: &Lock) -> Result<(), LockError> {
    let lease = lock.clone().ttl(Duration::from_millis(160)).lease().await?;
    tokio::select! {
        () = sleep(Duration::from_millis(320)) => lease.release().await,
        lost = lease.lost() => match lost {
            lost if lost.is_lost() => Ok(()),
            closed => Err(closed),
        },
    }
}

/// All of them in this process, each a registry of its own on one memory store.
pub(crate) async fn run_all() -> Result<Vec<Heard>, Error> {
    let store = MemoryStore::new();
    let (teller, mut told) = mpsc::unbounded_channel();
    let (crash, crashed) = watch::channel(false);
    let (_, never) = watch::channel(false);
    let mut parts = JoinSet::new();
    for number in 0..PARTS {
        let locks = registry(LockRegistry::builder(store.clone()), "timeline")?;
        let crash = if number == VICTIM { &crashed } else { &never };
        let (teller, crash) = (teller.clone(), crash.clone());
        parts.spawn(take_part(number, locks, crash, move |at, what| {
            let part = number;
            // Nobody listens any more when the run has failed.
            let _ = teller.send(Heard { part, at, what });
        }));
    }
    drop(teller);
    let begin = Instant::now();
    let mut heard = Vec::new();
    while let Some(said) = told.recv().await {
        let dead = *crash.borrow();
        let kills = !dead && is_time_to_kill(&said, begin);
        if !(dead && said.part == VICTIM) {
            heard.push(said);
        }
        if kills {
            sleep(INTO_ITS_WORK).await;
            heard.push(Heard::killed_now(VICTIM));
            crash.send_replace(true);
        }
    }
    while let Some(ended) = parts.join_next().await {
        ended.expect("a part does not panic")?;
    }
    Ok(heard)
}

/// Whether the victim has just got the lock, and is to be killed for that.
pub(crate) fn is_time_to_kill(said: &Heard, begin: Instant) -> bool {
    said.part == VICTIM && matches!(said.what, What::Acquires(..)) && begin.elapsed() > KILL_AFTER
}
