//! The signals that are caught.

use std::future::poll_fn;
use std::io;
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
            let is_ignored = ignored & 1 << (signal as u32 - 1) != 0;
            if !is_ignored {
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

/// The mask of signals that the parent process has set to be ignored. Linux alone tells.
fn ignored_signals() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .unwrap_or(0)
}
