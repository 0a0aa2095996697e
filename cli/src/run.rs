//! `lockstream run`: one command under one lock.

use std::time::Duration;

use lockstream::{Lease, Lock, LockError, LockRegistry, OnFinish, Renewal};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep, timeout};

use crate::acquire::Asking;
use crate::args::{OnLost, RunArgs};
use crate::exit;
use crate::messages::{Messages, chain};
use crate::signals::Signals;
use crate::store::{Failure, Store};
use crate::supervise::{Held, Outcome, Supervisor};

/// How long the release may take, whatever signals come.
const PATIENCE: Duration = Duration::from_secs(1);

/// How long the release may take after the command has ended. Then the key is left to expire.
const RELEASE_WITHIN: Duration = Duration::from_secs(5);

impl RunArgs {
    fn check(&self) -> Result<(), Failure> {
        self.lease.check()?;
        if self.timeout == Some(Duration::ZERO) {
            return Err(Failure::usage("--timeout must be longer than 0"));
        }
        Ok(())
    }

    fn lock(&self, registry: &LockRegistry) -> Lock {
        let mut lock = registry.obtain_all(&self.keys);
        lock = lock.ttl(self.lease.ttl).renewal(Renewal::watchdog());
        lock = self.mode.set(lock);
        if let Some(time) = self.keep_for {
            lock = lock.on_finish(OnFinish::KeepFor(time));
        }
        lock
    }
}

/// Runs the command, and yields the exit code.
pub(crate) async fn run(mut args: RunArgs) -> Result<u8, Failure> {
    args.place_keys()?;
    args.check()?;
    let messages = args.store.messages();
    let store = Store::find(&args.store)?;
    drop(store.check(|registry| args.lock(registry)).await?);
    let url = args.pass_url.then(|| store.url_to_pass()).transpose()?;
    let mut signals = catch_signals()?;
    let registry = store.registry()?;
    let mut events = registry.events();

    let lock = args.lock(&registry);
    let began = Instant::now();
    let asking = Asking {
        registry: &registry,
        lock: &lock,
        keys: &args.keys,
        wait: &args.wait,
        longest: args.keep_for.unwrap_or(args.lease.ttl),
        messages,
    };
    let lease = tokio::select! {
        lease = asking.acquire() => lease?,
        signal = signals.end() => {
            // Gives up its place in the queue, or the lock that it was granted meanwhile.
            registry.shutdown().await;
            let fields = json!({ "key": lock.key(), "signal": signal.as_str() });
            messages.note("gave-up", format!("{signal} while waiting"), fields);
            return Ok(exit::of_signal(signal as i32));
        }
    };
    let view = lease.view();
    let held = Held::new(&args.keys, &view);
    messages.note(
        "acquired",
        format!("lock {:?} acquired", lease.key()),
        waited(held.fields(), began),
    );

    let mut supervisor = Supervisor {
        command: &args.command,
        held,
        url: url.as_deref(),
        timeout: args.timeout,
        kill_after: args.lease.kill_after,
        on_lost: args.on_lost,
        messages,
        signals: &mut signals,
        events: &mut events,
    };
    let outcome = supervisor.supervise(&view).await;
    let succeeded = |outcome: &Outcome| {
        !outcome.was_stopped() && !outcome.has_timed_out() && outcome.ended.code() == 0
    };
    let keeps = args.keep_for.is_some()
        && match &outcome {
            Ok(outcome) => !args.keep_on_success || succeeded(outcome),
            Err(_) => false,
        };
    // Whoever is impatient does not wait for the store: the key expires.
    let is_lost = tokio::select! {
        is_lost = give_back(&registry, lease, keeps, messages) => is_lost,
        _ = impatience(&mut signals) => false,
    };
    let outcome = outcome?;
    let lost = args.on_lost == OnLost::Term && (outcome.was_stopped() || is_lost);
    Ok(if lost {
        exit::LOST
    } else if outcome.has_timed_out() {
        exit::TIMED_OUT
    } else {
        outcome.ended.code()
    })
}

/// With the time from `began` until now, in milliseconds.
pub(crate) fn waited(mut fields: Value, began: Instant) -> Value {
    let waited = u64::try_from(began.elapsed().as_millis());
    fields["waited_ms"] = json!(waited.unwrap_or(u64::MAX));
    fields
}

pub(crate) fn catch_signals() -> Result<Signals, Failure> {
    Signals::catch().map_err(|error| {
        let text = format!("signals cannot be caught: {error}");
        Failure::new(exit::CANNOT_RUN, text)
    })
}

/// A signal that ends the wait for the release. One that is meant for the command may reach us when the command has
/// ended.
pub(crate) async fn impatience(signals: &mut Signals) -> Signal {
    sleep(PATIENCE).await;
    signals.end().await
}

/// Ends the lease, and returns whether it was lost before. With `keeps` it ends as its lock says; otherwise the key is
/// freed.
pub(crate) async fn give_back(
    registry: &LockRegistry,
    lease: Lease,
    keeps: bool,
    messages: Messages,
) -> bool {
    let key = lease.key().to_owned();
    let release = match keeps {
        true => lease.finish(),
        false => lease.release(),
    };
    let Ok(released) = timeout(RELEASE_WITHIN, release).await else {
        let lasting =
            format!("lock {key:?} not released within {RELEASE_WITHIN:?}, it expires by itself");
        messages.say("unreleased", lasting, json!({ "key": key }));
        return false;
    };
    match released {
        Ok(()) => {
            registry.shutdown().await;
            messages.note(
                "released",
                format!("lock {key:?} released"),
                json!({ "key": key }),
            );
            false
        }
        Err(error @ LockError::Lost { .. }) => {
            messages.note("lost", &error, json!({ "key": key }));
            true
        }
        Err(error) => {
            messages.say("unreleased", chain(&error), json!({ "key": key }));
            false
        }
    }
}
