//! What the callers of a child do with its locks, each for itself, until the registry is shut down.

use std::future::poll_fn;
use std::path::PathBuf;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use lockstream::{Lease, LeaseView, Lock, LockError, LockRegistry, OnFinish, OnLost, Renewal};
use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::dice::Dice;
use crate::judge::Mode;
use crate::log::{Line, Log, Wait};
use crate::resource::Client;

/// All keys: two that everybody passes on, two for all, one that is held for long, one with leases that run out, one with
/// readers and one with permits, and one that stays in the store for a time.
pub(crate) const KEYS: [&str; 9] = [
    "pass-0", "pass-1", "any-0", "any-1", "long", "short", "read", "permits", "kept",
];

/// The registry's own ttl; nobody has a longer one.
pub(crate) const TTL: Duration = Duration::from_millis(600);

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
    /// Reads, or has a permit.
    Sharing,
    /// Locks several keys at once.
    Grouping,
    /// Leaves its key in the store for a time.
    Keeping,
    /// Acquires and releases by a handle that others share.
    Handling,
    /// Asks to be let in at once, inside a lock of any mode on the same key.
    Nesting,
}

/// Who does what in every child.
pub(crate) const HABITS: [(Habit, u64); 11] = [
    (Habit::Plain, 4),
    (Habit::Dropped, 4),
    (Habit::Passing, 16),
    (Habit::Renewing, 2),
    (Habit::Fixed, 2),
    (Habit::Once, 1),
    (Habit::Sharing, 8),
    (Habit::Grouping, 3),
    (Habit::Keeping, 1),
    (Habit::Handling, 4),
    (Habit::Nesting, 2),
];

/// For how long a transaction thinks, at most.
const LONGEST_PAUSE: Duration = Duration::from_millis(100);

/// One caller.
#[derive(Clone, Debug)]
pub(crate) struct Caller {
    pub(crate) registry: LockRegistry,
    /// The registry's own.
    pub(crate) response_timeout: Duration,
    pub(crate) log: Log,
    pub(crate) resource: Arc<PathBuf>,
    pub(crate) dice: Dice,
    /// Handles of every mode, which several callers share.
    pub(crate) handles: Arc<[Wanted]>,
    /// Whether the store has shared locks and permits.
    pub(crate) shares: bool,
    /// Where the table is whose updates are fenced, if there is one.
    pub(crate) table: Option<Arc<str>>,
}

/// What a caller locks.
#[derive(Debug)]
pub(crate) struct Wanted {
    lock: Lock,
    keys: Vec<&'static str>,
    mode: Mode,
}

impl Wanted {
    fn with(self, change: impl FnOnce(Lock) -> Lock) -> Self {
        let lock = change(self.lock);
        Self { lock, ..self }
    }
}

/// Handles to be shared: exclusive, a reader, a permit; each lasts, or may run out under its holder.
pub(crate) fn handles(registry: &LockRegistry, shares: bool) -> Arc<[Wanted]> {
    let mut handles = Vec::new();
    for ttl in [None, Some(Duration::from_millis(100))] {
        let mut add = |key, mode, share: fn(Lock) -> Lock| {
            let lock = share(registry.obtain(key));
            let lock = match ttl {
                Some(ttl) => lock.ttl(ttl),
                None => lock,
            };
            let keys = vec![key];
            handles.push(Wanted { lock, keys, mode });
        };
        add("any-0", Mode::Exclusive, |lock| lock);
        if shares {
            add("read", Mode::Reader, Lock::shared);
            let (weight, limit) = (2, 4);
            let permit = Mode::Permit { weight, limit };
            add("permits", permit, |lock| lock.permits_of(4, 2));
        }
    }
    handles.into()
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
                let wanted = self.any();
                let (limit, hold) = (self.dice.millis(1, 2_000), self.dice.micros(0, 3_000));
                self.run(wanted, limit, hold).await?;
                sleep(self.dice.micros(0, 10_000)).await;
            }
            Habit::Dropped => {
                let wanted = self.any();
                let (limit, hold) = (self.dice.millis(1, 2_000), self.dice.micros(0, 8_000));
                let lasts = self.dice.micros(0, 30_000);
                let polls = self.dice.between(0, 12);
                let by_polls = self.dice.once_in(2);
                let run = self.run(wanted, limit, hold);
                if by_polls {
                    polled(polls, run).await.unwrap_or(Ok(()))?;
                } else {
                    timeout(lasts, run).await.unwrap_or(Ok(()))?;
                }
                sleep(self.dice.micros(0, 5_000)).await;
            }
            Habit::Passing => {
                let wanted = self.one_of(&KEYS[..2]);
                let (limit, hold) = (self.dice.millis(100, 3_000), self.dice.micros(0, 600));
                self.guarded(wanted, limit, hold).await?;
                sleep(self.dice.micros(0, 20_000)).await;
            }
            Habit::Renewing => {
                let ttl = self.dice.millis(150, 300);
                let wanted = match self.dice.once_in(2) {
                    true => self.exclusive("long"),
                    false => self.shared(),
                };
                let wanted = wanted.with(|lock| lock.ttl(ttl).renewal(Renewal::watchdog()));
                let (limit, hold) = (self.dice.millis(500, 5_000), self.dice.millis(200, 1_500));
                self.run(wanted, limit, hold).await?;
                sleep(self.dice.millis(0, 50)).await;
            }
            Habit::Fixed => {
                // On a slow machine a call to PostgreSQL may take 150 ms, and then the lease is over when it comes.
                let slower = if self.table.is_some() { 2 } else { 1 };
                let ttl = self.dice.millis(60 * slower, 150 * slower);
                let wanted = match self.dice.once_in(4) {
                    true => self.shared(),
                    false => self.exclusive("short"),
                };
                let mut wanted = wanted.with(|lock| lock.ttl(ttl));
                if self.dice.once_in(2) {
                    wanted = wanted.with(|lock| lock.on_lost(OnLost::RunOn));
                }
                let limit = self.dice.millis(100, 2_000);
                let hold = self.dice.millis(10, 300 * slower);
                self.run(wanted, limit, hold).await?;
                sleep(self.dice.millis(0, 50)).await;
            }
            Habit::Once => {
                let wanted = self.any();
                let wait = self
                    .log
                    .wait(self.response_timeout * wanted.keys.len() as u32);
                match wanted.lock.lease_once().await {
                    Ok(Some(lease)) => {
                        self.with_guard(&wait, &wanted, lease, Duration::ZERO)
                            .await?
                    }
                    Ok(None) => wait.ended("busy"),
                    Err(error) => self.failed(&wait, &error)?,
                }
                sleep(self.dice.micros(0, 20_000)).await;
            }
            Habit::Sharing => {
                let wanted = self.shared();
                let (limit, hold) = (self.dice.millis(100, 3_000), self.dice.micros(0, 3_000));
                self.guarded(wanted, limit, hold).await?;
                sleep(self.dice.micros(0, 20_000)).await;
            }
            Habit::Grouping => {
                let wanted = self.group();
                // A group has its keys one after the other. On PostgreSQL each of them may take seconds on a busy machine.
                let longest = if self.table.is_some() { 10_000 } else { 3_000 };
                let (limit, hold) = (self.dice.millis(100, longest), self.dice.micros(0, 1_000));
                self.run(wanted, limit, hold).await?;
                sleep(self.dice.micros(0, 20_000)).await;
            }
            Habit::Keeping => {
                let time = self.dice.millis(50, 400);
                let mut wanted = self.exclusive("kept");
                wanted.mode = Mode::Kept;
                let wanted = wanted.with(|lock| lock.on_finish(OnFinish::KeepFor(time)));
                let (limit, hold) = (self.dice.millis(100, 2_000), self.dice.micros(0, 20_000));
                self.keep(wanted, limit, hold, time).await?;
                sleep(self.dice.millis(0, 100)).await;
            }
            Habit::Handling => {
                self.by_handle().await?;
                sleep(self.dice.micros(0, 20_000)).await;
            }
            Habit::Nesting => {
                self.nested().await?;
                sleep(self.dice.micros(0, 20_000)).await;
            }
        }
        Ok(())
    }

    /// One turn by a handle that others may use at the same time. It is never dropped while it holds: nobody else may
    /// release the handle.
    async fn by_handle(&mut self) -> Outcome {
        let handles = self.handles.clone();
        let wanted = self.dice.pick(&handles);
        let (limit, hold) = (self.dice.millis(10, 1_000), self.dice.millis(0, 120));
        let wait = self.log.wait(limit);
        match wanted.lock.acquire_within(limit).await {
            Ok(true) => {}
            Ok(false) => {
                wait.ended("busy");
                return Ok(());
            }
            Err(LockError::HandleInUse { .. }) => {
                wait.ended("in-use");
                return Ok(());
            }
            Err(error) => return self.failed(&wait, &error),
        }
        wait.ended("got");
        let Some(view) = wanted.lock.view() else {
            self.wrong("a handle was released by another");
            return Ok(());
        };
        let held = wait.hold(&view, &wanted.keys, wanted.mode);
        tokio::select! {
            biased;
            _ = view.lost() => {}
            _ = self.work(wanted, &view, &held, hold) => {}
        }
        drop(held);
        match wanted.lock.release().await {
            Ok(true) => Ok(()),
            Ok(false) => {
                self.wrong("a handle was released by another");
                Ok(())
            }
            Err(error) => self.failed(&wait, &error),
        }
    }

    /// An exclusive lock inside work that holds its key in any mode. What it gets is in the log, unless it shares the
    /// lease around it.
    async fn nested(&mut self) -> Outcome {
        let outer = match self.dice.once_in(2) {
            true => self.one_of(&KEYS[2..4]),
            false => self.shared(),
        };
        let (limit, hold) = (self.dice.millis(100, 2_000), self.dice.micros(0, 3_000));
        let inner = self.exclusive(outer.keys[0]).with(Lock::reentrant);
        let outer = outer.with(|lock| lock.wait(limit));
        let wait = self.log.wait(limit);
        let (this, waiting, outside, inside) = (&*self, &wait, &outer, &inner);
        let ran = outer.lock.with_lease(|lease| async move {
            waiting.ended("got");
            let held = waiting.hold(&lease, &outside.keys, outside.mode);
            match inside.lock.lease_once().await {
                Ok(Some(inner)) if inner.token() == lease.token() => {
                    if outside.mode != Mode::Exclusive {
                        this.wrong("a shared lease was had by an exclusive lock inside");
                    }
                    this.work(inside, &inner.view(), &held, hold).await;
                }
                Ok(Some(inner)) => {
                    // The lease around it is over.
                    let view = inner.view();
                    let held = waiting.hold(&view, &inside.keys, inside.mode);
                    this.work(inside, &view, &held, hold).await;
                }
                Err(LockError::InvalidSetting { .. }) if outside.mode != Mode::Exclusive => {}
                Ok(None) => {}
                Err(error) => drop(this.failed(waiting, &error)),
            }
        });
        match ran.await {
            Ok(()) => Ok(()),
            Err(error) => self.failed(&wait, &error),
        }
    }

    fn wrong(&self, what: &str) {
        let what = what.to_owned();
        self.log.write(&Line::Wrong { what });
    }

    pub(crate) fn one_of(&mut self, keys: &[&'static str]) -> Wanted {
        let key = *self.dice.pick(keys);
        self.exclusive(key)
    }

    fn exclusive(&self, key: &'static str) -> Wanted {
        Wanted {
            lock: self.registry.obtain(key),
            keys: vec![key],
            mode: Mode::Exclusive,
        }
    }

    /// A reader, or a permit. Its limit is another than that of others, as in the midst of a rolling change.
    pub(crate) fn shared(&mut self) -> Wanted {
        if !self.shares {
            return self.exclusive("read");
        }
        if self.dice.once_in(2) {
            let reader = self.exclusive("read");
            let lock = reader.lock.shared();
            let mode = Mode::Reader;
            return Wanted {
                lock,
                mode,
                ..reader
            };
        }
        let limit = *self.dice.pick(&[2, 4, 4, 6_u64]);
        let weight = self.dice.between(1, 2);
        let permit = self.exclusive("permits");
        let lock = permit.lock.permits_of(limit as u32, weight as u32);
        let mode = Mode::Permit { weight, limit };
        Wanted {
            lock,
            mode,
            ..permit
        }
    }

    /// Two or three of the keys that others lock one by one, in any order.
    fn group(&mut self) -> Wanted {
        let (first, step) = (self.dice.between(0, 3), self.dice.between(1, 3));
        let count = self.dice.between(2, 3);
        let places = (0..count).map(|place| (first + place * step) % 4);
        let mut keys: Vec<_> = places.map(|place| KEYS[place as usize]).collect();
        let lock = self.registry.obtain_all(&keys);
        keys.sort_unstable();
        keys.dedup();
        let mode = Mode::Group;
        Wanted { lock, keys, mode }
    }

    fn any(&mut self) -> Wanted {
        match self.dice.between(0, 7) {
            0 => self.group(),
            1 | 2 => self.shared(),
            _ => self.one_of(&KEYS),
        }
    }

    /// One turn by combinator; sometimes the work writes once more when its lease is over.
    async fn run(&mut self, wanted: Wanted, limit: Duration, hold: Duration) -> Outcome {
        let wait = self.log.wait(limit);
        let wanted = wanted.with(|lock| lock.wait(limit));
        let (this, waiting, what) = (&*self, &wait, &wanted);
        let ran = wanted.lock.with_lease(|lease| async move {
            waiting.ended("got");
            let held = waiting.hold(&lease, &what.keys, what.mode);
            let written = this.work(what, &lease, &held, hold).await;
            drop(held);
            (lease.token().get(), written)
        });
        match ran.await {
            Ok((token, Some(value))) if self.dice.once_in(8) => {
                sleep(self.dice.micros(0, 20_000)).await;
                self.write_late(wanted.keys[0], token, value).await;
                Ok(())
            }
            Ok(_) => Ok(()),
            Err(error) => self.failed(&wait, &error),
        }
    }

    /// One turn by guard.
    pub(crate) async fn guarded(
        &mut self,
        wanted: Wanted,
        limit: Duration,
        hold: Duration,
    ) -> Outcome {
        let wait = self.log.wait(limit);
        match wanted.lock.lease_within(limit).await {
            Ok(lease) => self.with_guard(&wait, &wanted, lease, hold).await,
            Err(error) => self.failed(&wait, &error),
        }
    }

    /// One turn whose key is kept for a time after its beginning.
    async fn keep(
        &mut self,
        wanted: Wanted,
        limit: Duration,
        hold: Duration,
        time: Duration,
    ) -> Outcome {
        let wait = self.log.wait(limit);
        let lease = match wanted.lock.lease_within(limit).await {
            Ok(lease) => lease,
            Err(error) => return self.failed(&wait, &error),
        };
        // It began a ttl less the drift before its first deadline.
        let until = lease.deadline() - (TTL - TTL / 100 - Duration::from_millis(2)) + time;
        wait.ended("got");
        let view = lease.view();
        let held = wait.hold(&view, &wanted.keys, wanted.mode);
        tokio::select! {
            biased;
            _ = lease.lost() => {}
            _ = self.work(&wanted, &view, &held, hold) => {}
        }
        // It is released then.
        let held = (Instant::now() < until).then_some(held);
        if let Some(held) = &held {
            // Its end may be that of its key from now on, though that is confirmed late or never.
            held.is_kept(until.min(lease.deadline()));
        }
        match (lease.finish().await, held) {
            (Ok(()), Some(held)) => {
                held.is_kept(until);
                sleep_until(until).await;
                Ok(())
            }
            (Ok(()), None) => Ok(()),
            (Err(error), held) => {
                drop(held);
                self.failed(&wait, &error)
            }
        }
    }

    async fn with_guard(
        &mut self,
        wait: &Wait,
        wanted: &Wanted,
        lease: Lease,
        hold: Duration,
    ) -> Outcome {
        wait.ended("got");
        let view = lease.view();
        let held = wait.hold(&view, &wanted.keys, wanted.mode);
        tokio::select! {
            biased;
            _ = lease.lost() => {}
            _ = self.work(wanted, &view, &held, hold) => {}
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

    /// Uses the resource, again and again, for that long. What was written last, if that may be written late.
    async fn work(
        &self,
        wanted: &Wanted,
        lease: &LeaseView,
        held: &crate::log::Hold,
        hold: Duration,
    ) -> Option<u64> {
        let begin = Instant::now();
        // The parent has gone, and with it the judge.
        let mut resource = Client::connect(&self.resource).await.ok()?;
        if let Some(table) = &self.table
            && !matches!(wanted.mode, Mode::Reader | Mode::Permit { .. })
            // Half of them.
            && (lease.token().get() / 64).is_multiple_of(2)
        {
            crate::table::add(table, lease, &wanted.keys, hold.min(LONGEST_PAUSE)).await;
        }
        loop {
            held.look(lease);
            let written = step(&mut resource, wanted, lease).await?;
            let left = hold.saturating_sub(begin.elapsed());
            if left.is_zero() {
                return written;
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
            // The shortest ttls do not stand every stall.
            LockError::Store { .. } | LockError::TooSlow { .. } => wait.ended("unreachable"),
            LockError::Lost { .. } => wait.ended("lost"),
            LockError::Closed { .. } => {
                wait.ended("closed");
                return Err(Closed);
            }
            other => {
                wait.ended("wrong");
                self.wrong(&format!("{other:?}"));
            }
        }
        Ok(())
    }
}

/// Uses the resource once, as the lease allows. `None`: it was refused. `Some(Some(_))`: what was written.
async fn step(resource: &mut Client, wanted: &Wanted, lease: &LeaseView) -> Option<Option<u64>> {
    let token = |key| lease.token_of(key).map(|token| token.get());
    let key = wanted.keys[0];
    match wanted.mode {
        Mode::Reader => {
            resource.look(key, token(key)?).await.ok()??;
            return Some(None);
        }
        Mode::Permit { weight, limit } => {
            let token = token(key)?;
            let entered = resource.enter(key, token, (weight, limit)).await;
            entered.ok().filter(|entered| *entered)?;
            tokio::task::yield_now().await;
            let left = resource.leave(key, token).await;
            left.ok().filter(|left| *left)?;
            return Some(None);
        }
        Mode::Exclusive | Mode::Group | Mode::Kept => {}
    }
    // Adds one to each: first all are read, and then all are written.
    let mut values = Vec::new();
    for key in &wanted.keys {
        values.push(resource.read(key, token(key)?).await.ok()??);
    }
    tokio::task::yield_now().await;
    for (key, value) in wanted.keys.iter().zip(&values) {
        let taken = resource.write(key, token(key)?, value + 1).await;
        taken.ok().filter(|taken| *taken)?;
    }
    Some(values.first().map(|value| value + 1))
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
