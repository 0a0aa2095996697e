//! What the callers of a child do with its locks, each for itself, until the registry is shut down.

use std::future::poll_fn;
use std::path::PathBuf;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use lockstream::{Lease, LeaseView, Lock, LockError, LockRegistry, OnLost, Renewal};
use tokio::time::{Instant, sleep, timeout};

use crate::dice::Dice;
use crate::log::{Line, Log, Wait};
use crate::resource::Client;

/// All keys: two that everybody passes on, two for all, one that is held for long, and one with leases that run out.
pub(crate) const KEYS: [&str; 6] = ["pass-0", "pass-1", "any-0", "any-1", "long", "short"];

/// The registry's own ttl; nobody has a longer one.
pub(crate) const TTL: Duration = Duration::from_millis(600);

/// When a call counts as unanswered.
pub(crate) const RESPONSE_TIMEOUT: Duration = Duration::from_millis(400);

/// What one of them is like.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Habit {
    /// Locks, works, unlocks.
    Plain,
    /// Is dropped after a random time, or after a random number of polls.
    Dropped,
    /// One of many that hand a lock on.
    Passing,
    /// Holds for many times its ttl.
    Renewing,
    /// Works until its lease is lost, or beyond.
    Fixed,
    /// Asks once, and goes away if it is busy.
    Once,
}

/// Who does what in every child.
pub(crate) const HABITS: [(Habit, u64); 6] = [
    (Habit::Plain, 4),
    (Habit::Dropped, 4),
    (Habit::Passing, 16),
    (Habit::Renewing, 2),
    (Habit::Fixed, 2),
    (Habit::Once, 1),
];

/// One caller.
#[derive(Clone, Debug)]
pub(crate) struct Caller {
    pub(crate) registry: LockRegistry,
    pub(crate) log: Log,
    pub(crate) resource: Arc<PathBuf>,
    pub(crate) dice: Dice,
}

/// Whether to go on.
type Outcome = Result<(), Closed>;

/// The registry was shut down.
pub(crate) struct Closed;

impl Caller {
    pub(crate) async fn live(mut self, habit: Habit) {
        while self.turn(habit).await.is_ok() {}
    }

    async fn turn(&mut self, habit: Habit) -> Outcome {
        match habit {
            Habit::Plain => {
                let lock = self.lock_any();
                let (limit, hold) = (self.dice.millis(1, 2_000), self.dice.micros(0, 3_000));
                self.run(&lock, limit, hold).await?;
                sleep(self.dice.micros(0, 10_000)).await;
            }
            Habit::Dropped => {
                let lock = self.lock_any();
                let (limit, hold) = (self.dice.millis(1, 2_000), self.dice.micros(0, 8_000));
                let lasts = self.dice.micros(0, 30_000);
                let polls = self.dice.between(0, 12);
                let by_polls = self.dice.once_in(2);
                let run = self.run(&lock, limit, hold);
                if by_polls {
                    polled(polls, run).await.unwrap_or(Ok(()))?;
                } else {
                    timeout(lasts, run).await.unwrap_or(Ok(()))?;
                }
                sleep(self.dice.micros(0, 5_000)).await;
            }
            Habit::Passing => {
                let key = KEYS[self.dice.between(0, 1) as usize];
                let lock = self.registry.obtain(key);
                let (limit, hold) = (self.dice.millis(100, 3_000), self.dice.micros(0, 600));
                self.guarded(&lock, limit, hold).await?;
                sleep(self.dice.micros(0, 20_000)).await;
            }
            Habit::Renewing => {
                let ttl = self.dice.millis(150, 300);
                let lock = self.registry.obtain("long").ttl(ttl);
                let lock = lock.renewal(Renewal::watchdog());
                let (limit, hold) = (self.dice.millis(500, 5_000), self.dice.millis(200, 1_500));
                self.run(&lock, limit, hold).await?;
                sleep(self.dice.millis(0, 50)).await;
            }
            Habit::Fixed => {
                let ttl = self.dice.millis(60, 150);
                let mut lock = self.registry.obtain("short").ttl(ttl);
                if self.dice.once_in(2) {
                    lock = lock.on_lost(OnLost::RunOn);
                }
                let (limit, hold) = (self.dice.millis(100, 2_000), self.dice.millis(10, 300));
                self.run(&lock, limit, hold).await?;
                sleep(self.dice.millis(0, 50)).await;
            }
            Habit::Once => {
                let lock = self.lock_any();
                let wait = self.log.wait(RESPONSE_TIMEOUT);
                match lock.lease_once().await {
                    Ok(Some(lease)) => self.with_guard(&wait, lease, Duration::ZERO).await?,
                    Ok(None) => wait.ended("busy"),
                    Err(error) => self.failed(&wait, &error)?,
                }
                sleep(self.dice.micros(0, 20_000)).await;
            }
        }
        Ok(())
    }

    fn lock_any(&mut self) -> Lock {
        let key = self.dice.pick(&KEYS);
        self.registry.obtain(key)
    }

    /// One turn by combinator; sometimes the work writes once more when its lease is over.
    async fn run(&mut self, lock: &Lock, limit: Duration, hold: Duration) -> Outcome {
        let wait = self.log.wait(limit);
        let lock = lock.clone().wait(limit);
        let (this, waiting) = (&*self, &wait);
        let ran = lock.with_lease(|lease| async move {
            waiting.ended("got");
            let held = this.log.hold(&lease);
            let written = this.work(&lease, &held, hold).await;
            drop(held);
            (lease.token().get(), written)
        });
        match ran.await {
            Ok((token, Some(value))) if self.dice.once_in(8) => {
                sleep(self.dice.micros(0, 20_000)).await;
                self.write_late(lock.key(), token, value).await;
                Ok(())
            }
            Ok(_) => Ok(()),
            Err(error) => self.failed(&wait, &error),
        }
    }

    /// One turn by guard.
    pub(crate) async fn guarded(
        &mut self,
        lock: &Lock,
        limit: Duration,
        hold: Duration,
    ) -> Outcome {
        let wait = self.log.wait(limit);
        match lock.lease_within(limit).await {
            Ok(lease) => self.with_guard(&wait, lease, hold).await,
            Err(error) => self.failed(&wait, &error),
        }
    }

    async fn with_guard(&mut self, wait: &Wait, lease: Lease, hold: Duration) -> Outcome {
        wait.ended("got");
        let held = self.log.hold(&lease.view());
        let view = lease.view();
        tokio::select! {
            biased;
            _ = lease.lost() => {}
            _ = self.work(&view, &held, hold) => {}
        }
        drop(held);
        if self.dice.once_in(4) {
            drop(lease);
            return Ok(());
        }
        match lease.release().await {
            Ok(()) => Ok(()),
            Err(error) => self.failed(wait, &error),
        }
    }

    /// Adds one to the resource, again and again, for that long. What was written last.
    async fn work(
        &self,
        lease: &LeaseView,
        held: &crate::log::Hold,
        hold: Duration,
    ) -> Option<u64> {
        let begin = Instant::now();
        let (key, token) = (lease.key(), lease.token().get());
        // The parent has gone, and with it the judge.
        let mut resource = Client::connect(&self.resource).await.ok()?;
        loop {
            held.look(lease);
            let Ok(Some(value)) = resource.read(key, token).await else {
                return None;
            };
            tokio::task::yield_now().await;
            let Ok(true) = resource.write(key, token, value + 1).await else {
                return None;
            };
            let left = hold.saturating_sub(begin.elapsed());
            if left.is_zero() {
                return Some(value + 1);
            }
            sleep(left.min(Duration::from_millis(20))).await;
        }
    }

    async fn write_late(&self, key: &str, token: u64, value: u64) {
        if let Ok(mut resource) = Client::connect(&self.resource).await
            && let Ok(taken) = resource.write(key, token, value).await
        {
            self.log.write(&Line::Late { refused: !taken });
        }
    }

    fn failed(&self, wait: &Wait, error: &LockError) -> Outcome {
        match error {
            LockError::NotAcquired { .. } => wait.ended("busy"),
            LockError::Store { .. } => wait.ended("unreachable"),
            LockError::Lost { .. } => wait.ended("lost"),
            LockError::Closed { .. } => {
                wait.ended("closed");
                return Err(Closed);
            }
            other => {
                wait.ended("wrong");
                let what = format!("{other:?}");
                self.log.write(&Line::Wrong { what });
            }
        }
        Ok(())
    }
}

/// Drops the future after so many polls; `None` then.
async fn polled<F: Future>(mut left: u64, run: F) -> Option<F::Output> {
    let mut run = pin!(run);
    poll_fn(|context| {
        if left == 0 {
            return Poll::Ready(None);
        }
        left -= 1;
        run.as_mut().poll(context).map(Some)
    })
    .await
}
