//! `lockstream lead`: a command that runs wherever the leader is.

use std::time::Duration;

use lockstream::{LockRegistry, Renewal};
use nix::sys::signal::Signal;
use serde_json::json;
use tokio::time::{Instant, sleep};

use crate::acquire::{Absence, Wait, attempt};
use crate::args::{LeadArgs, OnLost};
use crate::child::Ended;
use crate::exit;
use crate::nested::{held_around, refusal};
use crate::run::{catch_signals, give_back, impatience, waited};
use crate::signals::Signals;
use crate::store::{Failure, Store};
use crate::supervise::{Held, Supervisor};

/// A command that ends sooner has failed at once.
const AT_ONCE: Duration = Duration::from_secs(10);

/// The pause after the first failure. Each further one doubles it.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// How a term of the leader has ended.
enum Term {
    /// We were asked to end.
    Over(u8),
    /// The command has ended by itself after this time.
    Ended(Ended, Duration),
    /// The lead was lost.
    Lost,
}

/// Runs the command whenever this process leads, until a signal ends it.
pub(crate) async fn lead(mut args: LeadArgs) -> Result<u8, Failure> {
    let key = args.take_key()?;
    args.lease.check()?;
    let messages = args.store.messages();
    let store = Store::find(&args.store)?;
    let lock = |registry: &LockRegistry| {
        let lock = registry.obtain(&key).ttl(args.lease.ttl);
        lock.renewal(Renewal::watchdog())
    };
    drop(store.check(lock).await?);
    let mut signals = catch_signals()?;
    let mut absence = Absence::new(messages);
    let url = args.pass_url.then(|| store.url_to_pass()).transpose()?;
    let (mut pause, mut has_led) = (Duration::ZERO, false);
    // One for each term: it is shut down at its end.
    let mut registry = store.registry()?;
    loop {
        if let Some(key) = held_around(&registry, std::slice::from_ref(&key)).await {
            return Err(refusal(&key));
        }
        let url = url.as_deref();
        let ended = term(&args, &registry, lock(&registry), url, &mut signals).await;
        has_led |= ended.is_ok();
        let failed = match ended {
            Ok(Term::Over(code)) => return Ok(code),
            Ok(Term::Lost) => {
                pause = Duration::ZERO;
                registry = store.registry()?;
                continue;
            }
            Ok(Term::Ended(ended, after)) => {
                let code = ended.code();
                let fields = json!({ "key": key, "code": code });
                messages.say(
                    "ended",
                    format!("the command has ended with code {code}"),
                    fields,
                );
                after < AT_ONCE
            }
            Err(failure) if failure.is_passing => {
                tokio::select! {
                    () = absence.pause(&failure) => continue,
                    signal = signals.end() => return Ok(exit::of_signal(signal as i32)),
                }
            }
            // Waiting mends a store that was good before, and a lease that was over too soon, and nothing else.
            Err(failure)
                if failure.code == exit::LOST || has_led && failure.code == exit::STORE =>
            {
                messages.say("failed", failure.text, json!({ "key": key }));
                true
            }
            Err(failure) => return Err(failure),
        };
        absence = Absence::new(messages);
        pause = if failed {
            (pause * 2).clamp(FIRST_PAUSE, LONGEST_PAUSE)
        } else {
            Duration::ZERO
        };
        tokio::select! {
            () = sleep(pause) => registry = store.registry()?,
            signal = signals.end() => return Ok(exit::of_signal(signal as i32)),
        }
    }
}

/// Waits for the lead, and runs the command until either ends.
async fn term(
    args: &LeadArgs,
    registry: &LockRegistry,
    lock: lockstream::Lock,
    url: Option<&str>,
    signals: &mut Signals,
) -> Result<Term, Failure> {
    let messages = args.store.messages();
    let mut events = registry.events();
    let began = Instant::now();
    let lease = tokio::select! {
        lease = attempt(messages, &lock, Wait::begin(Duration::MAX), args.lease.ttl) => lease,
        signal = signals.end() => {
            registry.shutdown().await;
            return Ok(Term::Over(exit::of_signal(signal as i32)));
        }
    };
    let lease = lease.map_err(|error| Failure {
        code: exit::STORE,
        // Also if its answers are too slow.
        is_passing: error.is_retryable(),
        ..Failure::lock(&error, exit::BUSY)
    })?;
    let view = lease.view();
    let held = Held::new(&[lease.key().to_owned()], &view);
    messages.say(
        "leading",
        format!("leading {:?}", lease.key()),
        waited(held.fields(), began),
    );
    let mut supervisor = Supervisor {
        command: &args.command,
        held,
        url,
        timeout: None,
        kill_after: args.lease.kill_after,
        on_lost: OnLost::Term,
        messages,
        signals,
        events: &mut events,
    };
    let began = Instant::now();
    let outcome = supervisor.supervise(&view).await;
    let is_lost = tokio::select! {
        is_lost = give_back(registry, lease, false, messages) => is_lost,
        signal = impatience(signals) => return Ok(Term::Over(exit::of_signal(signal as i32))),
    };
    let outcome = outcome?;
    // Many programs take a SIGHUP as a wish to read their settings again, and go on.
    let is_hung_up = matches!(outcome.ended, Ended::Killed(nix::libc::SIGHUP));
    let asked = outcome
        .asked
        .filter(|signal| *signal != Signal::SIGHUP || is_hung_up);
    Ok(match asked {
        Some(_) => Term::Over(outcome.ended.code()),
        None if outcome.was_stopped() || is_lost => Term::Lost,
        None => Term::Ended(outcome.ended, began.elapsed()),
    })
}
