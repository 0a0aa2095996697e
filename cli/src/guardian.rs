//! The guardian: the parent of the command, which ends the command if this process is killed, or stopped for too long.
//!
//! It leads the process group of the command, so that the group exists before the command does and its id stays ours. It
//! adopts the command's orphans, so that every process of the command is below it whatever becomes of us. It is this
//! program, run again. From a socket, its standard input, it reads deadlines, and kills the command when the last one
//! has passed. When the socket closes, this process is dead: the command gets SIGTERM, and SIGKILL after `--kill-after`,
//! or at the deadline if that is earlier. It reports over the same socket what becomes of the command, and when no
//! process is left. A guardian that is no longer needed is killed.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal};
use nix::time::{ClockId, clock_gettime};
use nix::unistd::{Pid, getpgrp, getpid};
use rustix::process::{WaitOptions, WaitStatus, wait};
use tokio::time::Instant;

use crate::args::GuardianArgs;
use crate::exit;
use crate::signals::{ignores_pipe, with_callers_mask};
use crate::tree::{Tree, adopt_orphans};

/// A suspension of the machine stops the timer of `poll`, and the deadline does not wait.
const LONGEST_POLL: Duration = Duration::from_secs(1);

/// The pauses between two attempts to kill what is left.
const FIRST_PAUSE: Duration = Duration::from_millis(2);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);

/// What a guardian reports: a line each, a letter and a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Report {
    /// The process that becomes the command, and its id.
    Started(i32),
    /// The command was stopped by this signal.
    Stopped(i32),
    /// The command has ended with this code.
    Exited(i32),
    /// The command was ended by this signal.
    Killed(i32),
    /// No process is left.
    Empty,
}

impl Report {
    fn line(self) -> String {
        match self {
            Self::Started(pid) => format!("p{pid}\n"),
            Self::Stopped(signal) => format!("s{signal}\n"),
            Self::Exited(code) => format!("x{code}\n"),
            Self::Killed(signal) => format!("k{signal}\n"),
            Self::Empty => "e0\n".to_owned(),
        }
    }

    fn parse(line: &str) -> Option<Self> {
        let number = line.get(1..)?.parse().ok()?;
        Some(match line.get(..1)? {
            "p" => Self::Started(number),
            "s" => Self::Stopped(number),
            "x" => Self::Exited(number),
            "k" => Self::Killed(number),
            "e" => Self::Empty,
            _ => return None,
        })
    }

    /// What the system says of a process, if it is of interest.
    pub(crate) fn of(status: WaitStatus) -> Option<Self> {
        let exited = status.exit_status().map(Self::Exited);
        let killed = || status.terminating_signal().map(Self::Killed);
        let stopped = || status.stopping_signal().map(Self::Stopped);
        exited.or_else(killed).or_else(stopped)
    }
}

/// The guardian, as the process sees it that is guarded.
#[derive(Debug)]
pub(crate) struct Guardian {
    pid: Pid,
    /// Whether it has ended and was reaped: its id may be that of another process by now.
    is_gone: bool,
    line: tokio::net::UnixStream,
    /// The same socket.
    writer: UnixStream,
    unread: Vec<u8>,
    is_over: bool,
}

/// A guardian that has just been started, with the process that is to become the command.
#[derive(Debug)]
pub(crate) struct Started {
    pub(crate) guardian: Guardian,
    /// That process.
    pub(crate) pid: Pid,
    /// It waits at the other end; see [`launch::go`](crate::launch::go).
    pub(crate) launched: UnixStream,
}

impl Guardian {
    /// Starts it in a new process group, which it leads. `prepare` sets up what the command inherits.
    pub(crate) fn start(
        kill_after: Duration,
        command: &[std::ffi::OsString],
        prepare: impl FnOnce(&mut Command),
    ) -> io::Result<Started> {
        let (mut line, theirs) = UnixStream::pair()?;
        let (launched, launching) = UnixStream::pair()?;
        let mut guardian = Command::new(this_program()?);
        guardian
            .arg0("lockstream")
            .arg("guardian")
            .arg(kill_after.as_millis().to_string());
        if ignores_pipe() {
            guardian.arg("--ignore-pipe");
        }
        guardian
            .args(own_ids())
            .arg("--")
            .args(command)
            .process_group(0)
            .stdin(OwnedFd::from(theirs))
            .stdout(OwnedFd::from(launching))
            .stderr(Stdio::null());
        prepare(&mut guardian);
        let child = with_callers_mask(|| guardian.spawn())?;
        // It has the other ends of the sockets: ours would keep them open.
        drop(guardian);
        let pid = Pid::from_raw(child.id().cast_signed());
        // Until it has blocked its signals, one for the group would end it.
        let mut unread = Vec::new();
        let first = loop {
            if let Some(report) = next_report(&mut unread) {
                break report;
            }
            let mut buffer = [0; 64];
            match line.read(&mut buffer) {
                Ok(0) => break None,
                Ok(count) => unread.extend_from_slice(&buffer[..count]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        };
        let Some(Report::Started(command)) = first else {
            return Err(io::Error::other("it has ended"));
        };
        // A guardian that is stopped must not stop us when the socket is full.
        line.set_nonblocking(true)?;
        launched.set_nonblocking(true)?;
        let guardian = Self {
            pid,
            is_gone: false,
            writer: line.try_clone()?,
            line: tokio::net::UnixStream::from_std(line)?,
            unread,
            is_over: false,
        };
        Ok(Started {
            guardian,
            pid: Pid::from_raw(command),
            launched,
        })
    }

    /// Its id, and that of the process group which it leads.
    pub(crate) fn pid(&self) -> Pid {
        self.pid
    }

    /// The command must have ended by then.
    pub(crate) fn expect_end_by(&mut self, deadline: Instant) {
        // In this order: a stop between the two makes the guardian's deadline earlier, and never later.
        let now = now();
        let left = deadline.saturating_duration_since(Instant::now());
        let deadline = (now + left).as_nanos();
        // If the guardian is gone or stopped, we are the ones to end the command.
        let _ = self.writer.write_all(format!("{deadline}\n").as_bytes());
    }

    /// What it reports next; `None` once it has ended. May be dropped at any time.
    pub(crate) async fn report(&mut self) -> Option<Report> {
        loop {
            if let Some(report) = next_report(&mut self.unread) {
                return report;
            }
            if self.is_over {
                return None;
            }
            let mut buffer = [0; 64];
            let ready = self.line.readable().await;
            match ready.and_then(|()| self.line.try_read(&mut buffer)) {
                Ok(count @ 1..) => self.unread.extend_from_slice(&buffer[..count]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Ok(_) | Err(_) => self.is_over = true,
            }
        }
    }

    /// Continues the guardian, which was found to be stopped: none of its work may wait.
    pub(crate) fn resume(&self) {
        let _ = nix::sys::signal::kill(self.pid, Signal::SIGCONT);
    }

    /// It has ended and was reaped.
    pub(crate) fn was_reaped(&mut self) {
        self.is_gone = true;
    }

    /// Whether it has ended and was reaped.
    pub(crate) fn is_gone(&self) -> bool {
        self.is_gone
    }

    /// The command has ended.
    pub(crate) fn finish(self) {
        if !self.is_gone {
            // Killed, and not asked to end: a guardian that is stopped would not answer, and we would wait for it.
            let _ = nix::sys::signal::kill(self.pid, Signal::SIGKILL);
            let _ = nix::sys::wait::waitpid(self.pid, None);
        }
    }
}

/// The next whole line. `Some(None)` is one that nobody has written.
#[allow(clippy::option_option, reason = "the inner one is the end")]
fn next_report(unread: &mut Vec<u8>) -> Option<Option<Report>> {
    let end = unread.iter().position(|byte| *byte == b'\n')?;
    let line: Vec<u8> = unread.drain(..=end).collect();
    let line = std::str::from_utf8(&line[..end]).ok();
    Some(line.and_then(Report::parse))
}

/// systemd hands sockets and the watchdog to the process with the id in these variables: to us, and so to the command.
fn own_ids() -> impl Iterator<Item = String> {
    let own = getpid().to_string();
    let names = ["LISTEN_PID", "WATCHDOG_PID"].into_iter();
    let names = names.filter(move |name| std::env::var(name).is_ok_and(|id| id == own));
    names.map(|name| format!("--own-id={name}"))
}

pub(crate) fn this_program() -> io::Result<std::path::PathBuf> {
    // The kernel's link also leads to a program whose file was replaced by an update.
    let link = std::path::Path::new("/proc/self/exe");
    if link.exists() {
        Ok(link.to_owned())
    } else {
        std::env::current_exe()
    }
}

/// The guardian's own work.
pub(crate) fn guard(args: &GuardianArgs) -> u8 {
    if getpgrp() != getpid() {
        return exit::USAGE;
    }
    adopt_orphans(true);
    // Signals for the group are meant for the command. SIGKILL alone ends a guardian.
    let Ok(command) = launch(args) else {
        return exit::CANNOT_RUN;
    };
    if SigSet::all().thread_block().is_err() {
        return exit::USAGE;
    }
    let _ = std::env::set_current_dir("/");
    report(Report::Started(command));
    let is_empty = Arc::new(AtomicBool::new(false));
    let told = is_empty.clone();
    std::thread::spawn(move || reap(command, &told));
    let tree = Tree::new(getpid(), Vec::new());
    let mut deadline = None;
    let mut unread = Vec::new();
    loop {
        match read_some(deadline, &mut unread) {
            // Only if there is no newer one to read.
            Input::Nothing if deadline.is_some_and(|deadline| now() >= deadline) => {
                return kill(&tree, &is_empty);
            }
            Input::Nothing => {}
            Input::Ended => break,
            Input::Some => {
                deadline = last_line(&mut unread).or(deadline);
            }
        }
    }
    tree.signal(Signal::SIGTERM);
    let end = now() + Duration::from_millis(args.kill_after);
    let end = deadline.map_or(end, |deadline| deadline.min(end));
    while now() < end && !is_empty.load(Ordering::Acquire) {
        std::thread::sleep((end.saturating_sub(now())).min(LONGEST_PAUSE));
    }
    kill(&tree, &is_empty)
}

/// Starts the process that becomes the command, and yields its id.
fn launch(args: &GuardianArgs) -> io::Result<i32> {
    // The process starts with these signals blocked, and unblocks them itself. Signals without a name are not among
    // them.
    let before = SigSet::thread_get_mask()?;
    let ours = Signal::iterator().filter(|signal| !before.contains(*signal));
    let ours: SigSet = ours.collect();
    ours.thread_block()?;
    let numbers: Vec<_> = ours
        .iter()
        .map(|signal| (signal as i32).to_string())
        .collect();
    let stdout = io::stdout();
    let mut launched = Command::new(this_program()?);
    launched.arg0("lockstream").arg("launch");
    if args.ignore_pipe {
        launched.arg("--ignore-pipe");
    }
    let own_ids = args.own_id.iter();
    launched.args(own_ids.map(|name| format!("--own-id={name}")));
    let launched = launched
        .arg(format!("--unblock={}", numbers.join(",")))
        .arg("--")
        .args(&args.command)
        .stdin(stdout.as_fd().try_clone_to_owned()?)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()?;
    // The socket belongs to the launched process alone.
    rustix::stdio::dup2_stdout(std::fs::File::open("/dev/null")?)?;
    Ok(launched.id().cast_signed())
}

/// Reaps all children, also those that were adopted, until none is left. That is then the end of the whole command, since
/// orphans are adopted in the moment in which their parents end.
fn reap(command: i32, is_empty: &AtomicBool) {
    loop {
        match wait(WaitOptions::UNTRACED) {
            Ok(Some((pid, status))) if pid.as_raw_pid() == command => {
                if let Some(changed) = Report::of(status) {
                    report(changed);
                }
            }
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(_) => break,
        }
    }
    is_empty.store(true, Ordering::Release);
    report(Report::Empty);
}

fn report(report: Report) {
    // An error says that nobody is left who reads reports.
    let _ = rustix::io::write(io::stdin(), report.line().as_bytes());
}

/// Kills what is left of the command, until nothing is.
fn kill(tree: &Tree, is_empty: &AtomicBool) -> u8 {
    let mut pause = FIRST_PAUSE;
    while !is_empty.load(Ordering::Acquire) {
        tree.kill();
        std::thread::sleep(pause);
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
    exit::LOST
}

enum Input {
    Some,
    Nothing,
    Ended,
}

/// Waits for input until the deadline.
fn read_some(deadline: Option<Duration>, unread: &mut Vec<u8>) -> Input {
    let stdin = io::stdin();
    let left = deadline.map(|deadline| deadline.saturating_sub(now()).min(LONGEST_POLL));
    let timeout = left.map_or(PollTimeout::NONE, |left| {
        PollTimeout::try_from(left + Duration::from_millis(1)).unwrap_or(PollTimeout::ZERO)
    });
    match poll(
        &mut [PollFd::new(stdin.as_fd(), PollFlags::POLLIN)],
        timeout,
    ) {
        Ok(0) | Err(_) => return Input::Nothing,
        Ok(_) => {}
    }
    let mut buffer = [0; 512];
    match nix::unistd::read(stdin.as_fd(), &mut buffer) {
        Ok(0) => Input::Ended,
        Ok(count) => {
            unread.extend_from_slice(&buffer[..count]);
            Input::Some
        }
        Err(_) => Input::Nothing,
    }
}

/// The last deadline in the input. What follows it is the beginning of the next one.
fn last_line(unread: &mut Vec<u8>) -> Option<Duration> {
    let end = unread.iter().rposition(|byte| *byte == b'\n')?;
    let lines: Vec<u8> = unread.drain(..=end).collect();
    let text = String::from_utf8(lines).ok()?;
    let nanos = text.lines().next_back()?.parse().ok()?;
    Some(Duration::from_nanos(nanos))
}

/// A clock that all processes share and that counts the time for which the machine is suspended.
fn now() -> Duration {
    #[cfg(any(target_os = "linux", target_os = "android"))]
    let clock = ClockId::CLOCK_BOOTTIME;
    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    let clock = ClockId::CLOCK_MONOTONIC;
    Duration::from(clock_gettime(clock).expect("every system has this clock"))
}
