//! A peer's process: what it says, and what befalls it.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::clock::Nanos;
use crate::libs::{Outcome, told};

/// Ended when it is dropped.
pub(super) struct Process {
    child: Child,
    stdin: ChildStdin,
    lines: Receiver<Value>,
}

impl Process {
    pub(super) fn start(mut command: Command) -> Outcome<Self> {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // What a library logs of an outage is not asked for.
            .stderr(Stdio::null())
            .spawn()
            .map_err(|error| format!("{}: {error}", command.get_program().display()))?;
        let stdin = child.stdin.take().expect("piped");
        let said = BufReader::new(child.stdout.take().expect("piped"));
        let (sender, lines) = mpsc::channel();
        // Ends with the process.
        std::thread::spawn(move || {
            let lines = said.lines().map_while(Result::ok);
            for line in lines.filter_map(|line| serde_json::from_str(&line).ok()) {
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        Ok(Self {
            child,
            stdin,
            lines,
        })
    }

    /// Waits for a line with that word.
    pub(super) fn expect(&self, word: &str, within: Duration) -> Outcome<Value> {
        let begin = Instant::now();
        loop {
            let left = within.saturating_sub(begin.elapsed());
            match self.lines.recv_timeout(left) {
                Ok(line) if line["say"] == word => return Ok(line),
                Ok(line) if line["say"] == "failed" => {
                    return Err(format!("failed: {}", line["error"]));
                }
                Ok(_) => {}
                Err(RecvTimeoutError::Timeout) => {
                    return Err(format!("hung: not {word:?} within {within:?}"));
                }
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(format!("ended without {word:?}"));
                }
            }
        }
    }

    /// When it said the word.
    pub(super) fn when(&self, word: &str, within: Duration) -> Outcome<Nanos> {
        self.expect(word, within)
            .map(|line| line["at"].as_u64().unwrap_or_default())
    }

    /// Whether it has said the word by now.
    pub(super) fn has_said(&self, word: &str) -> bool {
        self.lines.try_iter().any(|line| line["say"] == word)
    }

    pub(super) fn tell(&mut self, line: &str) -> Outcome<()> {
        writeln!(self.stdin, "{line}").map_err(told("it has gone"))
    }

    pub(super) fn signal(&self, signal: Signal) -> Outcome<()> {
        kill_process(Pid::from_child(&self.child), signal).map_err(told("a signal"))
    }

    /// A figure of `/proc/PID/status`, as its first number.
    pub(super) fn status(&self, name: &str) -> Outcome<f64> {
        let path = format!("/proc/{}/status", self.child.id());
        let status = std::fs::read_to_string(path).map_err(told("this system does not tell"))?;
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        let number = line.and_then(|line| line.split_whitespace().next()?.parse().ok());
        number.ok_or_else(|| format!("no {name}"))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Both fail only if it has ended and was reaped before.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
