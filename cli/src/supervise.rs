//! A command under a lease: from its start to its end, whatever happens to the lease, to the terminal and to us.
//!
//! - The command has ended when the lease is over: SIGTERM at the deadline less `--kill-after`, SIGKILL at the
//!   deadline. A renewal moves both. After a SIGTERM nothing moves the SIGKILL to a later time.
//! - The guardian knows every deadline before the command could run beyond it.
//! - Nothing continues a stopped command once its lease is over.

use std::ffi::OsString;
use std::time::Duration;

use futures::StreamExt;
use lockstream::{LeaseView, LockEvent};
use nix::sys::signal::Signal;
use serde_json::json;
use tokio::time::{Instant, sleep_until};

use crate::args::OnLost;
use crate::child::{Change, Ended, Job};
use crate::messages::{Messages, chain};
use crate::signals::{self, Signals};
use crate::store::Failure;

/// What a command is run with.
pub(crate) struct Supervisor<'a> {
    pub(crate) command: &'a [OsString],
    pub(crate) kill_after: Duration,
    pub(crate) on_lost: OnLost,
    pub(crate) messages: Messages,
    pub(crate) signals: &'a mut Signals,
    pub(crate) events: &'a mut lockstream::stream::Events,
}

/// How it went.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) ended: Ended,
    /// Whether the command was stopped because of its lease.
    pub(crate) was_stopped: bool,
    /// The last signal that asked us to end meanwhile: SIGHUP only if there was no other.
    pub(crate) asked: Option<Signal>,
}

impl Supervisor<'_> {
    /// Runs the command until it has ended.
    pub(crate) async fn supervise(&mut self, lease: &LeaseView) -> Result<Outcome, Failure> {
        let stops = self.on_lost == OnLost::Term;
        let environment = [
            ("LOCKSTREAM_KEY", lease.key().to_owned()),
            ("LOCKSTREAM_TOKEN", lease.token().to_string()),
        ];
        let mut deadline = lease.deadline();
        let end_by = stops.then_some(deadline);
        let mut job = Job::start(self.command, environment, self.kill_after, end_by)?;
        let mut lost = lease.lost();
        let mut is_lost = false;
        // When the command is killed, once it has been asked to end.
        let mut kill_at = None;
        let mut is_killed = false;
        let mut asked = None;
        loop {
            let renewed = lease.deadline();
            if renewed != deadline {
                deadline = renewed;
                if stops && kill_at.is_none() {
                    job.may_run_until(deadline);
                }
            }
            let term_at = deadline.checked_sub(self.kill_after).unwrap_or(deadline);
            tokio::select! {
                biased;
                () = sleep_until(kill_at.unwrap_or(term_at)), if stops && !is_killed => {
                    if kill_at.is_some() {
                        job.signal(Signal::SIGKILL);
                        is_killed = true;
                        self.messages.say("killed", "command killed", json!({ "key": lease.key() }));
                    } else if lease.deadline() == deadline {
                        kill_at = Some(self.stop(&job, lease, deadline));
                    }
                }
                error = &mut lost, if !is_lost => {
                    is_lost = true;
                    self.messages.say("lost", &error, json!({ "key": lease.key(), "token": lease.token().get() }));
                    if stops && kill_at.is_none() {
                        kill_at = Some(self.stop(&job, lease, deadline));
                    }
                }
                signal = self.signals.next_or_child() => match signal {
                    None => match job.change() {
                        None => {}
                        Some(Change::Ended(ended)) => {
                            let was_stopped = kill_at.is_some();
                            job.finish(was_stopped);
                            return Ok(Outcome { ended, was_stopped, asked });
                        }
                        Some(Change::Stopped(signal)) => {
                            let is_over = || stops && Instant::now() >= deadline;
                            if job.stop_with_it(signal) && !is_over() {
                                job.resume_in_foreground();
                            }
                        }
                    },
                    Some(Signal::SIGCONT) => {
                        if !stops || Instant::now() < deadline {
                            job.resume();
                        }
                    }
                    Some(signal) => {
                        if signals::ends(signal) && (asked.is_none() || signal != Signal::SIGHUP) {
                            asked = Some(signal);
                        }
                        job.signal(signal);
                    }
                },
                Some(event) = self.events.next() => self.tell(&event),
            }
        }
    }

    /// Asks the command to end, and says when it is killed.
    fn stop(&self, job: &Job, lease: &LeaseView, deadline: Instant) -> Instant {
        let key = lease.key();
        let text = format!("stopping the command: the lease on {key:?} is about to end or lost");
        self.messages.say("stopping", text, json!({ "key": key }));
        job.signal(Signal::SIGTERM);
        // A stopped command could not end by itself.
        job.signal(Signal::SIGCONT);
        deadline.min(Instant::now() + self.kill_after)
    }

    fn tell(&self, event: &LockEvent) {
        match event {
            LockEvent::RenewalUnknown { key, error, .. } => {
                let text = format!(
                    "renewal of {key:?} failed, retrying until the deadline: {}",
                    chain(error)
                );
                self.messages
                    .say("renewal-failed", text, json!({ "key": **key }));
            }
            LockEvent::StoreDown { error, .. } => {
                let text = format!("store unreachable: {}", chain(error));
                self.messages.say("store-down", text, json!({}));
            }
            LockEvent::Renewed { key, .. } => {
                let text = format!("lease on {key:?} renewed");
                self.messages.note("renewed", text, json!({ "key": **key }));
            }
            _ => {}
        }
    }
}
