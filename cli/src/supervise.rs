//! A command under a lease: from its start to its end, whatever happens to the lease, to the terminal and to us.
//!
//! - Every process of the command has ended when the lease is over: SIGTERM at the deadline less `--kill-after`, SIGKILL
//!   at the deadline. A renewal moves both. After a SIGTERM nothing moves the SIGKILL to a later time.
//! - The same follows if the command has run for `--timeout`, with `--kill-after` between the two.
//! - If the command ends after INT, QUIT or TERM was passed on to it, the lock is held until its other processes have
//!   ended, too: they get SIGTERM, and SIGKILL after `--kill-after`. What it leaves behind when it ends by itself is left
//!   alone.
//! - The guardian knows every deadline before the command could run beyond it.
//! - Nothing continues a stopped command once its lease is over.

use std::ffi::OsString;
use std::process::Command;
use std::time::Duration;

use futures::StreamExt;
use lockstream::{LeaseView, LockEvent, Token};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep_until};

use crate::args::OnLost;
use crate::child::{Change, Ended, Job};
use crate::messages::{Messages, chain};
use crate::nested;
use crate::signals::{self, Signals};
use crate::store::Failure;
use crate::tree::Reached;
use crate::url;

/// The pauses between two attempts to kill what is left of a command. Each is twice the one before.
const FIRST_PAUSE: Duration = Duration::from_millis(2);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);

/// How long the processes of a command may take to end once they are killed. Those that wait for a device may, and those
/// of another user are not killed at all.
const KILLED_WITHIN: Duration = Duration::from_secs(5);

/// The keys that are held, each with its token.
#[derive(Debug)]
pub(crate) struct Held {
    keys: Vec<(String, Token)>,
    /// What those who are nested in the command find.
    around: String,
}

impl Held {
    /// Those of the lease, in the order in which they were asked for.
    pub(crate) fn new(keys: &[String], lease: &LeaseView) -> Self {
        let mut held: Vec<(String, Token)> = Vec::new();
        for key in keys {
            let is_new = held.iter().all(|(known, _)| known != key);
            if let Some(token) = lease.token_of(key).filter(|_| is_new) {
                held.push((key.clone(), token));
            }
        }
        let owners = held
            .iter()
            .filter_map(|(key, _)| Some((lease.owner_of(key)?, key)));
        let owners: Vec<_> = owners.collect();
        let around = nested::with(owners.iter().map(|(owner, key)| (&**owner, key.as_str())));
        Self { keys: held, around }
    }

    /// What a message says of them.
    pub(crate) fn fields(&self) -> Value {
        match &*self.keys {
            [(key, token)] => json!({ "key": key, "token": token.get() }),
            held => {
                let keys: Vec<_> = held.iter().map(|(key, _)| key).collect();
                let tokens: Vec<_> = held.iter().map(|(_, token)| token.get()).collect();
                json!({ "keys": keys, "tokens": tokens })
            }
        }
    }

    /// What the command finds in its environment. Lines are unambiguous, since keys have no control characters. What a
    /// `lockstream` around us has set would be wrong.
    fn set_up(&self, command: &mut Command, url: Option<&str>) {
        let lines = |line: fn(&(String, Token)) -> String| {
            self.keys.iter().map(line).collect::<Vec<_>>().join("\n")
        };
        let keys = lines(|(key, _)| key.clone());
        let tokens = lines(|(_, token)| token.to_string());
        let names = ["LOCKSTREAM_KEY", "LOCKSTREAM_TOKEN"];
        let lists = ["LOCKSTREAM_KEYS", "LOCKSTREAM_TOKENS"];
        let (set, unset) = match self.keys.len() {
            1 => (names, lists),
            _ => (lists, names),
        };
        match url {
            Some(url) => command.env(url::VARIABLE, url),
            None => command.env_remove(url::VARIABLE),
        };
        command.env(nested::VARIABLE, &self.around);
        unset.iter().for_each(|name| {
            command.env_remove(name);
        });
        command.envs(set.into_iter().zip([keys, tokens]));
    }
}

/// What a command is run with.
pub(crate) struct Supervisor<'a> {
    pub(crate) command: &'a [OsString],
    pub(crate) held: Held,
    /// The url of the store, if the command gets it.
    pub(crate) url: Option<&'a str>,
    pub(crate) kill_after: Duration,
    pub(crate) timeout: Option<Duration>,
    pub(crate) on_lost: OnLost,
    pub(crate) messages: Messages,
    pub(crate) signals: &'a mut Signals,
    pub(crate) events: &'a mut lockstream::stream::Events,
}

/// Why a command has to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cause {
    /// Its lease is about to end, or lost.
    Lease,
    /// It has run for `--timeout`.
    Timeout,
    /// It has ended because of a signal, and others of its processes have not.
    Asked,
}

/// A command that has to end, and when it is killed.
#[derive(Clone, Copy, Debug)]
struct Ending {
    cause: Cause,
    kill_at: Instant,
    /// Since when it is killed.
    killed_since: Option<Instant>,
    /// Until it is killed again.
    pause: Duration,
    /// Whether it was told that it does not end.
    is_told: bool,
}

impl Ending {
    fn new(cause: Cause, kill_at: Instant) -> Self {
        Self {
            cause,
            kill_at,
            killed_since: None,
            pause: FIRST_PAUSE,
            is_told: false,
        }
    }
}

/// How it went.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) ended: Ended,
    cause: Option<Cause>,
    /// The last signal that asked us to end meanwhile: SIGHUP only if there was no other.
    pub(crate) asked: Option<Signal>,
}

impl Outcome {
    /// Whether the command was stopped because of its lease.
    pub(crate) fn was_stopped(&self) -> bool {
        self.cause == Some(Cause::Lease)
    }

    /// Whether the command was stopped because it ran for too long.
    pub(crate) fn has_timed_out(&self) -> bool {
        self.cause == Some(Cause::Timeout)
    }
}

impl Supervisor<'_> {
    /// Runs the command until it has ended.
    pub(crate) async fn supervise(&mut self, lease: &LeaseView) -> Result<Outcome, Failure> {
        let stops = self.on_lost == OnLost::Term;
        let mut deadline = lease.deadline();
        let end_by = || {
            deadline = match lease.is_valid() {
                true => lease.deadline(),
                false => Instant::now(),
            };
            stops.then_some(deadline)
        };
        let set_up = |command: &mut Command| self.held.set_up(command, self.url);
        let mut job = Job::start(self.command, set_up, self.kill_after, end_by)?;
        let time_out_at = self
            .timeout
            .and_then(|timeout| Instant::now().checked_add(timeout));
        let mut lost = lease.lost();
        let mut is_lost = false;
        let mut ending: Option<Ending> = None;
        let mut ended = None;
        let mut asked = None;
        let ended = loop {
            let renewed = lease.deadline();
            if renewed != deadline {
                deadline = renewed;
                if stops && ending.is_none() {
                    job.may_run_until(deadline);
                }
            }
            let term_at = deadline.checked_sub(self.kill_after).unwrap_or(deadline);
            let (next, is_due) = match ending {
                Some(ending) => (ending.kill_at, true),
                None => (term_at, stops),
            };
            tokio::select! {
                biased;
                () = sleep_until(next), if is_due => match &mut ending {
                    Some(ending) => {
                        let left = job.kill();
                        let since = *ending.killed_since.get_or_insert_with(Instant::now);
                        ending.kill_at = Instant::now() + ending.pause;
                        ending.pause = (ending.pause * 2).min(LONGEST_PAUSE);
                        let is_late = left.all_refuse || since.elapsed() >= KILLED_WITHIN;
                        // If nobody is left, the guardian is about to say so.
                        if is_late && !left.alive.is_empty() {
                            if !ending.is_told {
                                ending.is_told = true;
                                self.tell_of_survivors(&left, lease);
                            }
                            // The end of the command itself is waited for, however long that takes.
                            if let Some(ended) = ended {
                                break ended;
                            }
                        }
                    }
                    None if lease.deadline() == deadline => {
                        ending = Some(self.stop(&job, Cause::Lease, lease, deadline));
                    }
                    None => {}
                },
                () = until(time_out_at), if ending.is_none() => {
                    let latest = if stops { deadline } else { Instant::now() + self.kill_after };
                    ending = Some(self.stop(&job, Cause::Timeout, lease, latest));
                }
                error = &mut lost, if !is_lost => {
                    is_lost = true;
                    let mut fields = self.held.fields();
                    fields["key"] = lease.key().into();
                    self.messages.say("lost", &error, fields);
                    if stops && ending.is_none() {
                        ending = Some(self.stop(&job, Cause::Lease, lease, deadline));
                    }
                }
                signal = self.signals.next_or_child() => match signal {
                    None => job.reap().await,
                    Some(Signal::SIGCONT) => {
                        if !stops || Instant::now() < deadline {
                            job.was_told_to_resume();
                        }
                    }
                    Some(signal) => {
                        if signals::ends(signal) && (asked.is_none() || signal != Signal::SIGHUP) {
                            asked = Some(signal);
                        }
                        job.signal(signal);
                    }
                },
                change = job.change() => match change {
                    Change::Failed(failure) => {
                        job.finish();
                        return Err(failure);
                    }
                    Change::Stopped(signal) => {
                        let is_over = || stops && Instant::now() >= deadline;
                        let has_terminal = !is_over() && job.gets_terminal(signal);
                        if !has_terminal && job.stop_with_it(signal) && !is_over() {
                            job.resume_in_foreground();
                        }
                    }
                    Change::Ended(how) => {
                        let is_asked = asked.is_some_and(|signal| signal != Signal::SIGHUP);
                        if job.is_empty() || ending.is_none() && !is_asked {
                            break how;
                        }
                        ended = Some(how);
                        if ending.is_none() && asked != Some(Signal::SIGTERM) {
                            // What a shell runs in the background ignores the signals of the keyboard.
                            job.signal(Signal::SIGTERM);
                        }
                        let end = Instant::now() + self.kill_after;
                        let end = if stops { deadline.min(end) } else { end };
                        ending.get_or_insert(Ending::new(Cause::Asked, end));
                    }
                    Change::Empty => {
                        if let Some(ended) = ended {
                            if ending.is_some_and(|ending| ending.killed_since.is_some()) {
                                let fields = json!({ "key": lease.key() });
                                self.messages.say("killed", "command killed", fields);
                            }
                            break ended;
                        }
                    }
                },
                Some(event) = self.events.next() => tell(self.messages, &event),
            }
        };
        job.finish();
        let cause = ending.map(|ending| ending.cause);
        Ok(Outcome {
            ended,
            cause,
            asked,
        })
    }

    /// Asks the command to end, and says when it is killed.
    fn stop(&self, job: &Job, cause: Cause, lease: &LeaseView, latest: Instant) -> Ending {
        let key = lease.key();
        let why = match cause {
            Cause::Timeout => "it has run for as long as --timeout allows".to_owned(),
            _ if lease.is_valid() => format!("the lease on {key:?} is about to end"),
            _ => format!("the lease on {key:?} is lost"),
        };
        let text = format!("stopping the command: {why}");
        self.messages.say("stopping", text, json!({ "key": key }));
        job.signal(Signal::SIGTERM);
        // A stopped command could not end by itself.
        job.signal(Signal::SIGCONT);
        Ending::new(cause, latest.min(Instant::now() + self.kill_after))
    }

    /// What could not be killed.
    fn tell_of_survivors(&self, left: &Reached, lease: &LeaseView) {
        let pids: Vec<_> = left.alive.iter().map(|pid| pid.as_raw()).collect();
        let why = match left.all_refuse {
            true => "not permitted",
            false => "they do not end",
        };
        let text = format!("processes of the command cannot be killed: {pids:?}: {why}");
        let fields = json!({ "key": lease.key(), "pids": pids });
        self.messages.say("not-killed", text, fields);
    }
}

/// Tells what becomes of a lease and its store meanwhile.
pub(crate) fn tell(messages: Messages, event: &LockEvent) {
    match event {
        LockEvent::RenewalUnknown { key, error, .. } => {
            let text = format!(
                "renewal of {key:?} failed, retrying until the deadline: {}",
                chain(error)
            );
            messages.say("renewal-failed", text, json!({ "key": **key }));
        }
        LockEvent::StoreDown { error, .. } => {
            let text = format!("store unreachable: {}", chain(error));
            messages.say("store-down", text, json!({}));
        }
        LockEvent::Renewed { key, .. } => {
            let text = format!("lease on {key:?} renewed");
            messages.note("renewed", text, json!({ "key": **key }));
        }
        _ => {}
    }
}

async fn until(moment: Option<Instant>) {
    match moment {
        Some(moment) => sleep_until(moment).await,
        None => std::future::pending().await,
    }
}
