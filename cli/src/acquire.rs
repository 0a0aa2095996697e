//! How a lock is acquired: a store that is away is waited for, and then the lock.

use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

use lockstream::{Lease, Lock, LockError, LockRegistry};
use serde_json::json;
use tokio::time::{Instant, sleep, timeout, timeout_at};

use crate::args::WaitArgs;
use crate::exit;
use crate::messages::Messages;
use crate::nested::{held_around, refusal};
use crate::show::{brief, named_holder, to_json};
use crate::store::Failure;

/// How long a wait may last before people are told of it.
const QUIET_WAIT: Duration = Duration::from_millis(500);

/// How long it may take to leave the queue.
pub(crate) const LEAVE_WITHIN: Duration = Duration::from_secs(1);

/// The shortest and the longest pause between two attempts. A registry has pauses of its own before it connects, which
/// grow with the outage; these are also for a server that is there and refuses.
const PAUSE: [Duration; 2] = [Duration::from_millis(400), Duration::from_secs(2)];

/// How often an absence that lasts is told.
const TOLD_EVERY: Duration = Duration::from_secs(60);

/// The absence of a store, as people are told of it: at once, and then once a minute.
#[derive(Debug)]
pub(crate) struct Absence {
    messages: Messages,
    told: Option<Instant>,
}

impl Absence {
    pub(crate) fn new(messages: Messages) -> Self {
        Self {
            messages,
            told: None,
        }
    }

    /// Tells of it if it is time, and pauses before the next attempt.
    pub(crate) async fn pause(&mut self, failure: &Failure) {
        if self.told.is_none_or(|told| told.elapsed() >= TOLD_EVERY) {
            self.told = Some(Instant::now());
            let text = format!("waiting for the store: {}", failure.text);
            self.messages.say("store-away", text, json!({}));
        }
        sleep(random_pause()).await;
    }
}

/// So a fleet does not come back in step.
fn random_pause() -> Duration {
    let [shortest, longest] = PAUSE;
    let random = RandomState::new().hash_one(()) as f64 / u64::MAX as f64;
    shortest + (longest - shortest).mul_f64(random)
}

/// A wait, which counts from its beginning.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wait {
    began: Instant,
    within: Duration,
}

impl Wait {
    pub(crate) fn begin(within: Duration) -> Self {
        let began = Instant::now();
        Self { began, within }
    }

    fn left(self) -> Duration {
        self.within.saturating_sub(self.began.elapsed())
    }
}

/// How a command asks for its lock.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asking<'a> {
    pub(crate) registry: &'a LockRegistry,
    pub(crate) lock: &'a Lock,
    pub(crate) keys: &'a [String],
    pub(crate) wait: &'a WaitArgs,
    /// For how long it asks for the lock at most.
    pub(crate) longest: Duration,
    pub(crate) messages: Messages,
}

impl Asking<'_> {
    /// Acquires the lock within the wait. A wait that was given bounds the absence of the store, too. Without one, a
    /// store that is away is an error: it may never have been there.
    pub(crate) async fn acquire(self) -> Result<Lease, Failure> {
        let acquired = self.acquire_from_store().await;
        if acquired.is_err() {
            // The store is told that nobody waits any more, and gets back what a lost answer may have given us. If it does
            // not answer, the ticket, or the lease, ends with its ttl.
            let _ = timeout(LEAVE_WITHIN, self.registry.shutdown()).await;
        }
        acquired
    }

    async fn acquire_from_store(self) -> Result<Lease, Failure> {
        let wait = Wait::begin(self.wait.within());
        let Some(within) = self.wait.wait else {
            return self.try_once(wait).await;
        };
        // A wait of centuries has no end.
        let far = Duration::from_secs(86_400 * 365 * 30);
        let end = wait.began + within.min(far);
        let mut absence = Absence::new(self.messages);
        let silent = format!("the store did not answer within {within:?}");
        let mut failed = Failure::new(exit::STORE, silent);
        loop {
            let trying = timeout_at(end + 2 * LEAVE_WITHIN, self.try_once(wait));
            failed = match trying.await {
                Ok(Ok(lease)) => return Ok(lease),
                Ok(Err(failure)) => failure,
                // What was told before is still so.
                Err(_) => return Err(failed),
            };
            if !failed.is_passing || Instant::now() >= end {
                return Err(failed);
            }
            let _ = timeout_at(end, absence.pause(&failed)).await;
        }
    }

    async fn try_once(self, wait: Wait) -> Result<Lease, Failure> {
        // Whoever shares the lock with a command around it may have it at once. If not, what is in the way may wait for
        // that command.
        let around = match wait.left().is_zero() {
            true => None,
            false => held_around(self.registry, self.keys).await,
        };
        let wait = match around {
            Some(_) => Wait::begin(Duration::ZERO),
            None => wait,
        };
        let lease = attempt(self.messages, self.lock, wait, self.longest).await;
        lease.map_err(|error| match around {
            Some(key) if error.is_not_acquired() => refusal(&key),
            _ => Failure::lock(&error, self.wait.busy_code),
        })
    }
}

/// Acquires the lock, and waits for others until the wait is over. A store that is away is an error at once: the
/// lock itself would wait for it, and tell nobody.
pub(crate) async fn attempt(
    messages: Messages,
    lock: &Lock,
    wait: Wait,
    longest: Duration,
) -> Result<Lease, LockError> {
    // On the connection that the lock needs anyway. Whoever may not look may have the lock.
    if let Err(error) = lock.inspect().await
        && error.is_retryable()
    {
        return Err(error);
    }
    let waiting = lock.lease_within(wait.left());
    let mut lease = tell_of_wait(messages, lock, longest, waiting).await;
    if let Err(LockError::NotAcquired { waited, .. }) = &mut lease
        && !wait.within.is_zero()
    {
        *waited = wait.began.elapsed();
    }
    lease
}

/// How many holders are told by name.
const MOST_HOLDERS: usize = 3;

/// Says that the command waits, and for whom, unless the wait is over soon. Also says if others have the lock for more
/// than `longest`, the longest time for which this caller would ask.
async fn tell_of_wait<T>(
    messages: Messages,
    lock: &Lock,
    longest: Duration,
    waiting: impl Future<Output = T>,
) -> T {
    let mut waiting = std::pin::pin!(waiting);
    tokio::select! {
        biased;
        done = &mut waiting => return done,
        () = sleep(QUIET_WAIT) => {}
    }
    let seen = tokio::select! {
        biased;
        done = &mut waiting => return done,
        seen = lock.inspect() => seen.ok(),
    };
    let mut text = format!("waiting for lock {:?}", lock.key());
    let mut fields = json!({ "key": lock.key() });
    if let Some(seen) = seen.filter(|seen| !seen.holders.is_empty()) {
        let told = seen.holders.iter().take(MOST_HOLDERS).map(named_holder);
        text += &format!(", held by {}", told.collect::<Vec<_>>().join(", "));
        let more = seen.holders.len().saturating_sub(MOST_HOLDERS);
        if more > 0 {
            text += &format!(" and {more} more");
        }
        fields["holders"] = to_json(lock.key(), &seen)["holders"].take();
        if let Some(remaining) = seen.remaining().filter(|remaining| *remaining > longest) {
            text += &format!(", longer than the {} asked for here", brief(longest));
            fields["remaining"] = json!(brief(remaining));
        }
    }
    messages.say("waiting", text, fields);
    waiting.await
}
