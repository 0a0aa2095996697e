//! The signals that are caught, and those that our caller has blocked or ignored.

use std::future::poll_fn;
use std::io;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;

use nix::sys::signal::{SigSet, Signal};
use tokio::signal::unix::{self, SignalKind};

/// Those that are passed on to the command.
const FORWARDED: [Signal; 8] = [
    Signal::SIGHUP,
    Signal::SIGINT,
    Signal::SIGQUIT,
    Signal::SIGTERM,
    Signal::SIGUSR1,
    Signal::SIGUSR2,
    Signal::SIGWINCH,
    Signal::SIGCONT,
];

/// The signal mask with which this program was started.
static CALLERS_MASK: OnceLock<SigSet> = OnceLock::new();

/// Whether this program was started with SIGPIPE ignored, as each unit of systemd is.
static IGNORES_PIPE: AtomicBool = AtomicBool::new(false);

/// Runs before `main`, since the Rust runtime ignores SIGPIPE from there on. Only Linux shows which signals are
/// ignored. Code that runs before `main` must not rely on `std`.
#[cfg(target_os = "linux")]
#[ctor::ctor]
fn look_before_main() {
    use rustix::fs::{Mode, OFlags, open};
    let mut status = [0; 4096];
    let file = open(
        "/proc/self/status",
        OFlags::RDONLY | OFlags::CLOEXEC,
        Mode::empty(),
    );
    let read = file.and_then(|file| rustix::io::read(file, &mut status));
    let status = read
        .ok()
        .and_then(|length| std::str::from_utf8(&status[..length]).ok());
    let ignored = status.map_or(0, ignored_in);
    IGNORES_PIPE.store(holds(ignored, Signal::SIGPIPE), Ordering::Relaxed);
}

/// Notes the signal mask, before anything changes it.
pub(crate) fn note_callers_mask() {
    let mask = SigSet::thread_get_mask().unwrap_or_else(|_| SigSet::empty());
    CALLERS_MASK.get_or_init(|| mask);
}

/// Runs `spawn` with the signal mask with which this program was started: a process inherits the mask of the thread that
/// spawns it.
pub(crate) fn with_callers_mask<T>(spawn: impl FnOnce() -> T) -> T {
    let now = SigSet::thread_get_mask();
    if let Some(mask) = CALLERS_MASK.get() {
        let _ = mask.thread_set_mask();
    }
    let spawned = spawn();
    if let Ok(mask) = now {
        let _ = mask.thread_set_mask();
    }
    spawned
}

/// Whether this program was started with SIGPIPE ignored.
pub(crate) fn ignores_pipe() -> bool {
    IGNORES_PIPE.load(Ordering::Relaxed)
}

/// Whether the signal asks a process to end.
pub(crate) const fn ends(signal: Signal) -> bool {
    matches!(
        signal,
        Signal::SIGHUP | Signal::SIGINT | Signal::SIGQUIT | Signal::SIGTERM
    )
}

/// The signals of this process.
#[derive(Debug)]
pub(crate) struct Signals {
    forwarded: Vec<(Signal, unix::Signal)>,
    child: unix::Signal,
}

impl Signals {
    /// Catches them from now on. One that was ignored when the program started, as SIGHUP is under `nohup`, stays so,
    /// here and in the command.
    pub(crate) fn catch() -> io::Result<Self> {
        let ignored = ignored_signals();
        let mut forwarded = Vec::new();
        for signal in FORWARDED {
            if !holds(ignored, signal) {
                let caught = unix::signal(SignalKind::from_raw(signal as i32))?;
                forwarded.push((signal, caught));
            }
        }
        let child = unix::signal(SignalKind::child())?;
        // Whoever has started us may have blocked it: the end of the command would not be heard.
        let mut blocked = SigSet::empty();
        blocked.add(Signal::SIGCHLD);
        blocked.thread_unblock()?;
        Ok(Self { forwarded, child })
    }

    /// The next signal that is to be passed on.
    pub(crate) async fn next(&mut self) -> Signal {
        next_of(&mut self.forwarded).await
    }

    /// The next signal that asks this process to end. Others are dropped.
    pub(crate) async fn end(&mut self) -> Signal {
        loop {
            let signal = self.next().await;
            if ends(signal) {
                return signal;
            }
        }
    }

    /// The next signal that is to be passed on, or `None` after a child process has changed.
    pub(crate) async fn next_or_child(&mut self) -> Option<Signal> {
        let Self { forwarded, child } = self;
        tokio::select! {
            signal = next_of(forwarded) => Some(signal),
            _ = child.recv() => None,
        }
    }
}

async fn next_of(signals: &mut [(Signal, unix::Signal)]) -> Signal {
    poll_fn(|cx| {
        for (signal, caught) in &mut *signals {
            if let Poll::Ready(Some(())) = caught.poll_recv(cx) {
                return Poll::Ready(*signal);
            }
        }
        Poll::Pending
    })
    .await
}

/// The signals that the parent process has set to be ignored. Linux alone tells.
fn ignored_signals() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    ignored_in(&status)
}

fn ignored_in(status: &str) -> u64 {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .unwrap_or(0)
}

fn holds(mask: u64, signal: Signal) -> bool {
    mask & 1 << (signal as u32 - 1) != 0
}
