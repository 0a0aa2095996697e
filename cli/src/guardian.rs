//! The guardian: a process that ends the command if this one is killed, or stopped for too long.
//!
//! It leads the process group of the command, so that the group exists before the command does and its id stays ours.
//! It is this program, run again. It reads deadlines from its standard input and kills the group when the last one has
//! passed. When its input ends, this process is dead: the group gets SIGTERM, and SIGKILL after `--kill-after`, or at the
//! deadline if that is earlier. A guardian that is no longer needed is killed.

use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::Duration;

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal, killpg};
use nix::time::{ClockId, clock_gettime};
use nix::unistd::{Pid, getpgrp, getpid};
use tokio::time::Instant;

use crate::exit;

/// What a guardian says when it is ready.
const WORD: u8 = b'.';

/// A suspension of the machine stops the timer of `poll`, and the deadline does not wait.
const LONGEST_POLL: Duration = Duration::from_secs(1);

/// The guardian, as the process sees it that is guarded.
#[derive(Debug)]
pub(crate) struct Guardian {
    process: Child,
    input: ChildStdin,
}

impl Guardian {
    /// Starts it in a new process group, which it leads.
    pub(crate) fn start(kill_after: Duration) -> io::Result<Self> {
        let mut process = Command::new(this_program()?)
            .arg0("lockstream")
            .arg("guardian")
            .arg(kill_after.as_millis().to_string())
            // It needs none, and a password may be in it.
            .env_clear()
            .current_dir("/")
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()?;
        let input = process.stdin.take().expect("piped");
        // A guardian that is stopped must not stop us when the pipe is full.
        fcntl(&input, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
        // Until it has blocked its signals, one for the group would end it.
        let mut output = process.stdout.take().expect("piped");
        output.read_exact(&mut [0])?;
        Ok(Self { process, input })
    }

    /// The process group that it leads.
    pub(crate) fn group(&self) -> Pid {
        Pid::from_raw(self.process.id().cast_signed())
    }

    /// The command must have ended by then.
    pub(crate) fn expect_end_by(&mut self, deadline: Instant) {
        // In this order: a stop between the two makes the guardian's deadline earlier, and never later.
        let now = now();
        let left = deadline.saturating_duration_since(Instant::now());
        let deadline = (now + left).as_nanos();
        // If the guardian is gone or stopped, we are the ones to end the command.
        let _ = self.input.write_all(format!("{deadline}\n").as_bytes());
    }

    /// The command has ended.
    pub(crate) fn finish(mut self) {
        // Not a word: it may have been stopped, and would be waited for.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn this_program() -> io::Result<std::path::PathBuf> {
    // The kernel's link also leads to a program whose file was replaced by an update.
    let link = std::path::Path::new("/proc/self/exe");
    if link.exists() {
        Ok(link.to_owned())
    } else {
        std::env::current_exe()
    }
}

/// The guardian's own work.
pub(crate) fn guard(kill_after: Duration) -> u8 {
    // Signals for the group are meant for the command. SIGKILL alone ends a guardian.
    let blocked = SigSet::all().thread_block();
    if blocked.is_err() || getpgrp() != getpid() || io::stdout().write_all(&[WORD]).is_err() {
        return exit::USAGE;
    }
    let _ = io::stdout().flush();
    let mut deadline = None;
    let mut unread = Vec::new();
    loop {
        match read_some(deadline, &mut unread) {
            // Only if there is no newer one to read.
            Input::Nothing if deadline.is_some_and(|deadline| now() >= deadline) => {
                return kill_group();
            }
            Input::Nothing => {}
            Input::Ended => break,
            Input::Some => {
                deadline = last_line(&mut unread).or(deadline);
            }
        }
    }
    let _ = killpg(getpgrp(), Signal::SIGTERM);
    let end = now() + kill_after;
    let end = deadline.map_or(end, |deadline| deadline.min(end));
    while now() < end {
        std::thread::sleep((end.saturating_sub(now())).min(LONGEST_POLL));
    }
    kill_group()
}

/// Ends the whole group, and with it the guardian.
fn kill_group() -> u8 {
    let _ = killpg(getpgrp(), Signal::SIGKILL);
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
