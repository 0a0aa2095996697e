//! The child processes, as their parent sees them.

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};

use rustix::process::{Pid, Signal, kill_process};

use crate::child::{Order, Role};
use crate::dice::Dice;
use crate::judge::Child;
use crate::log::Line;

/// One process, killed and reaped when dropped.
#[derive(Debug)]
pub(crate) struct Process {
    pub(crate) child: Child,
    process: std::process::Child,
    log: PathBuf,
    reader: Option<File>,
    /// The beginning of a line whose rest was not there yet.
    rest: String,
}

impl Process {
    /// To be called on the thread that lives as long as the process is to.
    pub(crate) fn spawn(child: Child, seed: u64, folder: &Path, urls: Vec<String>) -> Self {
        let log = folder.join(format!("{child}.log"));
        let role = Role {
            child,
            seed: Dice::of(
                seed,
                1_000 + child.slot as u64 * 1_000_000 + child.generation,
            )
            .next(),
            log: log.clone(),
            resource: folder.join("resource"),
            urls,
        };
        let process = Command::new(std::env::current_exe().expect("a running program has a path"))
            .args(role.arguments())
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            // A Ctrl-C is the parent's.
            .process_group(0)
            .spawn()
            .expect("this program runs");
        Self {
            child,
            process,
            log,
            reader: None,
            rest: String::new(),
        }
    }

    pub(crate) fn tell(&mut self, order: Order) {
        let input = self.process.stdin.as_mut().expect("piped");
        // One that has died is found out when its end is looked for.
        let _ = writeln!(input, "{}", order.name());
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.process), signal).expect("a child of ours, not reaped");
    }

    /// SIGKILL. Returns when it is gone.
    pub(crate) fn kill(&mut self) {
        self.process.kill().expect("a child of ours");
        self.process.wait().expect("a child of ours");
    }

    pub(crate) fn has_ended(&mut self) -> Option<ExitStatus> {
        self.process.try_wait().expect("a child of ours")
    }

    /// What it has written since the last look, but for a line that is not complete.
    pub(crate) fn lines(&mut self) -> Vec<Line> {
        if self.reader.is_none() {
            // It makes the file when it starts.
            self.reader = File::open(&self.log).ok();
        }
        let Some(reader) = &mut self.reader else {
            return Vec::new();
        };
        let read = reader.read_to_string(&mut self.rest);
        read.expect("the folder is ours, and the log is ASCII but for whole lines");
        let complete = self.rest.rfind('\n').map_or(0, |end| end + 1);
        let rest = self.rest.split_off(complete);
        let text = std::mem::replace(&mut self.rest, rest);
        let parse =
            |line| Line::parse(line).unwrap_or_else(|| panic!("no line of a log: {line:?}"));
        text.lines().map(parse).collect()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Reaped already, as most are.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
