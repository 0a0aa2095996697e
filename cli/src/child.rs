//! The command: a child of its guardian, in its group.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::io;
use std::mem;
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::time::Duration;

use nix::sys::signal::Signal;
use nix::unistd::Pid;
use rustix::process::{WaitOptions, wait, waitpid};
use tokio::time::Instant;

use crate::exit;
use crate::guardian::{Guardian, Report, Started};
use crate::launch;
use crate::store::Failure;
use crate::terminal::Terminal;
use crate::tree::{Reached, Tree, adopt_orphans, children};

/// A running command.
#[derive(Debug)]
pub(crate) struct Job {
    program: OsString,
    pid: Pid,
    guardian: Guardian,
    launched: UnixStream,
    tree: Tree,
    terminal: Option<Terminal>,
    /// What the end of a child has told.
    changes: VecDeque<Change>,
    /// Whether the command was continued, and the SIGCONT that continued us before is still to be heard.
    has_resumed: bool,
    has_ended: bool,
    is_empty: bool,
}

/// What has become of a command.
#[derive(Debug)]
pub(crate) enum Change {
    Ended(Ended),
    /// It could not be run.
    Failed(Failure),
    Stopped(Signal),
    /// No process of it is left, after it has ended.
    Empty,
}

/// How a command has ended.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Ended {
    Exited(i32),
    /// By this signal. Those for real time have no name.
    Killed(i32),
}

impl Ended {
    /// Its exit code, as shells have it.
    pub(crate) fn code(self) -> u8 {
        match self {
            Self::Exited(code) => u8::try_from(code & 0xff).expect("one byte"),
            Self::Killed(signal) => exit::of_signal(signal),
        }
    }
}

impl Job {
    /// Starts the command, after its guardian. If we are in the foreground of a terminal, the command is from now on.
    /// `prepare` sets up its environment. `deadline` is asked once the guardian has started: the lease may be renewed
    /// meanwhile.
    pub(crate) fn start(
        command: &[OsString],
        prepare: impl FnOnce(&mut Command),
        kill_after: Duration,
        deadline: impl FnOnce() -> Option<Instant>,
    ) -> Result<Self, Failure> {
        let others = children();
        // If the guardian is killed, the command is ours.
        adopt_orphans(true);
        let started = Guardian::start(kill_after, command, prepare).map_err(|error| {
            adopt_orphans(false);
            let text = format!("the guardian cannot be started: {error}");
            Failure::new(exit::CANNOT_RUN, text)
        })?;
        let Started {
            mut guardian,
            pid,
            launched,
        } = started;
        let deadline = deadline();
        if let Some(deadline) = deadline {
            guardian.expect_end_by(deadline);
        }
        let group = guardian.pid();
        // We may have been stopped since the lease was granted, or the guardian has started slowly.
        if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            adopt_orphans(false);
            guardian.finish();
            let text = "command not started: its lease is over";
            return Err(Failure::new(exit::LOST, text));
        }
        let terminal = Terminal::open(group);
        // Done before the command runs. Otherwise the command would be stopped when it reads from the terminal.
        terminal.as_ref().map(Terminal::give);
        // An error says that the process has been killed: the guardian reports that as the end of the command.
        let _ = launch::go(&launched);
        Ok(Self {
            program: command[0].clone(),
            pid,
            tree: Tree::new(group, others),
            guardian,
            launched,
            terminal,
            changes: VecDeque::new(),
            has_resumed: false,
            has_ended: false,
            is_empty: false,
        })
    }

    /// Sends a signal to all processes of the command.
    pub(crate) fn signal(&self, signal: Signal) {
        self.tree.signal(signal);
    }

    /// Sends SIGKILL to all processes of the command that are found.
    pub(crate) fn kill(&self) -> Reached {
        self.tree.kill()
    }

    /// What happens to the command next. May be dropped at any time.
    pub(crate) async fn change(&mut self) -> Change {
        loop {
            if let Some(change) = self.changes.pop_front() {
                return change;
            }
            match self.guardian.report().await {
                Some(report) => self.take(report),
                // What follows is told by our own children.
                None => std::future::pending().await,
            }
        }
    }

    fn take(&mut self, report: Report) {
        let change = match report {
            Report::Started(_) => None,
            Report::Stopped(signal) => Signal::try_from(signal).ok().map(Change::Stopped),
            Report::Exited(_) | Report::Killed(_) if self.has_ended => None,
            Report::Exited(code) => Some(self.ended(Ended::Exited(code))),
            Report::Killed(signal) => Some(self.ended(Ended::Killed(signal))),
            Report::Empty if self.is_empty => None,
            Report::Empty => {
                self.is_empty = true;
                Some(Change::Empty)
            }
        };
        self.changes.extend(change);
    }

    fn ended(&mut self, ended: Ended) -> Change {
        self.has_ended = true;
        let Some(error) = launch::failure(&self.launched) else {
            return Change::Ended(ended);
        };
        let code = match error.kind() {
            io::ErrorKind::NotFound => exit::NOT_FOUND,
            _ => exit::CANNOT_RUN,
        };
        let text = format!("cannot run {}: {error}", self.program.display());
        Change::Failed(Failure::new(code, text))
    }

    /// Looks after our own children, after one of them has changed. As the first process of a container we have those of
    /// others, too.
    pub(crate) async fn reap(&mut self) {
        while let Ok(Some((pid, status))) = wait(WaitOptions::NOHANG | WaitOptions::UNTRACED) {
            let pid = Pid::from_raw(pid.as_raw_pid());
            if pid == self.guardian.pid() {
                match Report::of(status) {
                    Some(Report::Stopped(_)) => self.guardian.resume(),
                    _ => self.lose_guardian().await,
                }
            } else if pid == self.pid {
                Report::of(status).into_iter().for_each(|it| self.take(it));
            }
        }
        if self.guardian.is_gone() && self.has_ended && !self.is_empty && self.tree.looks_empty() {
            self.take(Report::Empty);
        }
    }

    /// The guardian was killed. Its children are ours by now, where the system moves them to us.
    async fn lose_guardian(&mut self) {
        self.guardian.was_reaped();
        self.tree.lose_guardian();
        // What it has reported until then. It is dead, so this ends at once.
        while let Some(report) = self.guardian.report().await {
            self.take(report);
        }
        let pid = rustix::process::Pid::from_raw(self.pid.as_raw());
        match waitpid(pid, WaitOptions::NOHANG | WaitOptions::UNTRACED) {
            Ok(None) => {}
            Ok(Some((_, status))) => Report::of(status).into_iter().for_each(|it| self.take(it)),
            Err(_) => self.take(Report::Killed(nix::libc::SIGKILL)),
        }
    }

    /// Whether no process of the command is left, after it has ended.
    pub(crate) fn is_empty(&self) -> bool {
        self.is_empty
    }

    /// Tells the guardian how long the command may run.
    pub(crate) fn may_run_until(&mut self, deadline: Instant) {
        self.guardian.expect_end_by(deadline);
    }

    /// A SIGCONT was heard: gives the terminal to the command, if we have it, and lets the command go on.
    pub(crate) fn was_told_to_resume(&mut self) {
        // If that was done already, the command may have been stopped again by now.
        if !mem::take(&mut self.has_resumed) {
            self.terminal.as_ref().map(Terminal::give);
            self.signal(Signal::SIGCONT);
        }
    }

    /// The command was stopped because it wants the terminal. If we have it, the command gets it and goes on: bash gives it
    /// to a job of the background that runs, and sends no SIGCONT.
    pub(crate) fn gets_terminal(&self, signal: Signal) -> bool {
        let wants = matches!(signal, Signal::SIGTTIN | Signal::SIGTTOU);
        let gets = wants && self.terminal.as_ref().is_some_and(Terminal::give);
        if gets {
            self.signal(Signal::SIGCONT);
        }
        gets
    }

    /// The command was stopped from the terminal: we stop, too, so that the shell takes over.
    pub(crate) fn stop_with_it(&mut self, signal: Signal) -> bool {
        self.has_resumed = false;
        let is_from_terminal =
            matches!(signal, Signal::SIGTSTP | Signal::SIGTTIN | Signal::SIGTTOU);
        match &self.terminal {
            Some(terminal) if is_from_terminal => {
                terminal.stop();
                true
            }
            _ => false,
        }
    }

    /// Goes on after [`stop_with_it`](Self::stop_with_it), if we are in the foreground. Otherwise a SIGCONT follows.
    pub(crate) fn resume_in_foreground(&mut self) {
        if self.terminal.as_ref().is_some_and(Terminal::give) {
            self.signal(Signal::SIGCONT);
            self.has_resumed = true;
        }
    }

    /// After the command has ended. What it has left behind is left alone.
    pub(crate) fn finish(self) {
        self.terminal.as_ref().map(Terminal::take_back);
        // What is left becomes the child of whoever adopts in our place.
        adopt_orphans(false);
        self.guardian.finish();
    }
}
