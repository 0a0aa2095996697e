//! The terminal, and which process group has it.

use std::fs::File;
use std::os::unix::fs::OpenOptionsExt;

use nix::sys::signal::{SigSet, Signal, killpg};
use nix::unistd::{Pid, getpgrp, tcgetpgrp, tcsetpgrp};

/// Lets this thread write to the terminal and hand it over while another group has it. For `run`, that is most of the
/// time.
pub(crate) fn block_ttou() {
    let mut signals = SigSet::empty();
    signals.add(Signal::SIGTTOU);
    signals.thread_block().expect("SIGTTOU can be blocked");
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
