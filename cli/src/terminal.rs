//! The terminal, and which process group has it.

use std::fs::File;
use std::os::unix::fs::OpenOptionsExt;

use nix::sys::signal::{SigSet, SigmaskHow, Signal, killpg};
use nix::unistd::{Pid, getpgrp, tcgetpgrp, tcsetpgrp};

/// Lets this thread write to the terminal and hand it over while another group has it. For `run`, that is most of the
/// time.
pub(crate) fn block_ttou() {
    let blocked = ttou().thread_block();
    blocked.expect("SIGTTOU can be blocked");
}

/// Runs `spawn` with SIGTTOU as this program has found it: a process inherits the mask of the thread that spawns it.
pub(crate) fn with_ttou<T>(spawn: impl FnOnce() -> T) -> T {
    let before = ttou().thread_swap_mask(SigmaskHow::SIG_UNBLOCK);
    let before = before.expect("SIGTTOU can be unblocked");
    let spawned = spawn();
    before
        .thread_set_mask()
        .expect("a mask that was set before");
    spawned
}

fn ttou() -> SigSet {
    let mut signals = SigSet::empty();
    signals.add(Signal::SIGTTOU);
    signals
}

/// The controlling terminal.
#[derive(Debug)]
pub(crate) struct Terminal {
    file: File,
    /// The group of the command.
    group: Pid,
}

impl Terminal {
    /// The terminal of this session, if it has one. `group` is the command's.
    pub(crate) fn open(group: Pid) -> Option<Self> {
        let mut options = File::options();
        let options = options
            .read(true)
            .write(true)
            .custom_flags(nix::libc::O_NOCTTY);
        let file = options.open("/dev/tty").ok()?;
        Some(Self { file, group })
    }

    /// Gives it to the command, if we are in the foreground.
    pub(crate) fn give(&self) -> bool {
        let is_ours = tcgetpgrp(&self.file) == Ok(getpgrp());
        is_ours && tcsetpgrp(&self.file, self.group).is_ok()
    }

    /// Takes it from the command. If the shell has given it to another group meanwhile, it stays there.
    pub(crate) fn take_back(&self) {
        if tcgetpgrp(&self.file) == Ok(self.group) {
            // It fails if the terminal is gone.
            let _ = tcsetpgrp(&self.file, getpgrp());
        }
    }

    /// Stops this process group, as the stopped command would have been without us: the shell takes over until it
    /// continues us. Returns then, or at once if nobody could continue us.
    pub(crate) fn stop(&self) {
        self.take_back();
        let _ = killpg(getpgrp(), Signal::SIGTSTP);
    }
}
