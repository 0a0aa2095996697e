//! The command: a process in the group of its guardian.

use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::signal::{Signal, killpg};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use tokio::time::Instant;

use crate::exit;
use crate::guardian::Guardian;
use crate::store::Failure;
use crate::terminal::{Terminal, with_ttou};
use crate::url;

/// A running command.
#[derive(Debug)]
pub(crate) struct Job {
    pid: Pid,
    group: Pid,
    guardian: Guardian,
    terminal: Option<Terminal>,
}

/// What has become of a command.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Change {
    Ended(Ended),
    Stopped(Signal),
}

/// How a command has ended.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Ended {
    Exited(i32),
    Killed(Signal),
}

impl Ended {
    /// Its exit code, as shells have it.
    pub(crate) fn code(self) -> u8 {
        match self {
            Self::Exited(code) => u8::try_from(code & 0xff).expect("one byte"),
            Self::Killed(signal) => exit::of_signal(signal as i32),
        }
    }
}

impl Job {
    /// Starts the command, after its guardian. If we are in the foreground of a terminal, the command is from now on.
    pub(crate) fn start(
        command: &[OsString],
        environment: [(&str, String); 2],
        kill_after: Duration,
        deadline: Option<Instant>,
    ) -> Result<Self, Failure> {
        let mut guardian = with_ttou(|| Guardian::start(kill_after)).map_err(|error| Failure {
            code: exit::CANNOT_RUN,
            text: format!("the guardian cannot be started: {error}"),
        })?;
        if let Some(deadline) = deadline {
            guardian.expect_end_by(deadline);
        }
        let group = guardian.group();
        // We may have been stopped since the lease was granted, or the guardian has started slowly.
        if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            guardian.finish();
            return Err(Failure {
                code: exit::LOST,
                text: "command not started: its lease is over".to_owned(),
            });
        }
        let terminal = Terminal::open(group);
        // Before the command exists, or it would be stopped when it reads.
        terminal.as_ref().map(Terminal::give);
        let (program, arguments) = command
            .split_first()
            .expect("the parser asks for a command");
        let mut command = Command::new(program);
        command
            .args(arguments)
            .envs(environment)
            .env_remove(url::VARIABLE)
            .process_group(group.as_raw());
        match with_ttou(|| command.spawn()) {
            Ok(process) => Ok(Self {
                pid: Pid::from_raw(process.id().cast_signed()),
                group,
                guardian,
                terminal,
            }),
            Err(error) => {
                terminal.as_ref().map(Terminal::take_back);
                guardian.finish();
                let code = match error.kind() {
                    io::ErrorKind::NotFound => exit::NOT_FOUND,
                    _ => exit::CANNOT_RUN,
                };
                let program = program.display();
                let text = format!("cannot run {program}: {error}");
                Err(Failure { code, text })
            }
        }
    }

    /// Sends a signal to the whole group.
    pub(crate) fn signal(&self, signal: Signal) {
        // The group exists as long as its guardian is not reaped.
        let _ = killpg(self.group, signal);
    }

    /// What has happened to the command since the last call. Once it has ended, that is forgotten.
    pub(crate) fn change(&self) -> Option<Change> {
        let flags = WaitPidFlag::WNOHANG | WaitPidFlag::WUNTRACED;
        match waitpid(self.pid, Some(flags)) {
            Ok(WaitStatus::Exited(_, code)) => Some(Change::Ended(Ended::Exited(code))),
            Ok(WaitStatus::Signaled(_, signal, _)) => Some(Change::Ended(Ended::Killed(signal))),
            Ok(WaitStatus::Stopped(_, signal)) => Some(Change::Stopped(signal)),
            // Real-time signals have no name there.
            Err(Errno::EINVAL) => Some(Change::Ended(Ended::Exited(255))),
            _ => None,
        }
    }

    /// Tells the guardian how long the command may run.
    pub(crate) fn may_run_until(&mut self, deadline: Instant) {
        self.guardian.expect_end_by(deadline);
    }

    /// Gives the terminal to the command, if we have it, and lets the command go on.
    pub(crate) fn resume(&self) {
        self.terminal.as_ref().map(Terminal::give);
        self.signal(Signal::SIGCONT);
    }

    /// The command was stopped from the terminal: we stop, too, so that the shell takes over.
    pub(crate) fn stop_with_it(&self, signal: Signal) -> bool {
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
    pub(crate) fn resume_in_foreground(&self) {
        if self.terminal.as_ref().is_some_and(Terminal::give) {
            self.signal(Signal::SIGCONT);
        }
    }

    /// After the command has ended. What it has left behind in its group is killed, or left alone.
    pub(crate) fn finish(self, kills_the_rest: bool) {
        self.terminal.as_ref().map(Terminal::take_back);
        if kills_the_rest {
            self.signal(Signal::SIGKILL);
        }
        self.guardian.finish();
    }
}
