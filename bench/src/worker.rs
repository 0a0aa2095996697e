//! The processes that do the work: this very program, run again. Each round of each library has
//! processes of its own, so that none finds what another left, and one that hangs can be ended.
//!
//! A worker gets its [`Job`] as the first line of its standard input. It says `ready` when it is
//! connected, is told `go` with the time of the start, and says `done` with its result. Before that
//! it may say things of its own scenario.

use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc as tokio_mpsc;

use crate::clock::{self, MILLISECOND, Nanos};
use crate::libs::{Lib, Outcome, told};
use crate::scenarios::Scenario;

/// The argument that makes this program a worker.
pub(crate) const FLAG: &str = "--worker";

/// How long a process may take to start, and to connect.
const START: Duration = Duration::from_secs(60);

/// What one process has to do.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Job {
    pub(crate) scenario: Scenario,
    pub(crate) lib: Lib,
    pub(crate) url: String,
    pub(crate) secs: f64,
    /// Which of a round's processes it is.
    pub(crate) role: usize,
    pub(crate) folder: PathBuf,
}

// ---- as the bench sees them

/// A process, ended when it is dropped.
pub(crate) struct Worker {
    child: Child,
    stdin: ChildStdin,
    lines: Receiver<String>,
}

impl Worker {
    /// Starts a process, and waits until it is ready.
    pub(crate) fn hire(job: &Job) -> Outcome<Self> {
        let program = std::env::current_exe().map_err(told("this program's path"))?;
        let mut worker = Self::spawn(Command::new(program).arg(FLAG))?;
        worker.tell(&serde_json::to_string(job).map_err(told("a job"))?)?;
        worker.expect("ready", START)?;
        Ok(worker)
    }

    fn spawn(command: &mut Command) -> Outcome<Self> {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(told("a worker"))?;
        let stdin = child.stdin.take().expect("piped");
        let said = BufReader::new(child.stdout.take().expect("piped"));
        let (sender, lines) = mpsc::channel();
        // Ends with the process.
        std::thread::spawn(move || {
            for line in said.lines().map_while(Result::ok) {
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

    /// Waits for a line that begins with that word, and gives the rest of it.
    pub(crate) fn expect(&mut self, word: &str, within: Duration) -> Outcome<String> {
        let begin = Instant::now();
        loop {
            let left = within.saturating_sub(begin.elapsed());
            match self.lines.recv_timeout(left) {
                Ok(line) => match line.split_once(' ').unwrap_or((&line, "")) {
                    (said, rest) if said == word => return Ok(rest.to_owned()),
                    ("failed", rest) => return Err(rest.to_owned()),
                    _ => {}
                },
                Err(RecvTimeoutError::Timeout) => {
                    return Err(format!("hung: no {word:?} within {within:?}"));
                }
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(format!("a worker ended without saying {word:?}"));
                }
            }
        }
    }

    /// [`expect`](Self::expect) for a value.
    pub(crate) fn result<T: DeserializeOwned>(
        &mut self,
        word: &str,
        within: Duration,
    ) -> Outcome<T> {
        let rest = self.expect(word, within)?;
        serde_json::from_str(&rest).map_err(told(word))
    }

    pub(crate) fn tell(&mut self, line: &str) -> Outcome<()> {
        writeln!(self.stdin, "{line}").map_err(told("a worker has gone"))
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // Both fail only if it has ended and was reaped before.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Starts them all at one moment, shortly from now, and says when that is.
pub(crate) fn go(workers: &mut [Worker]) -> Outcome<Nanos> {
    let begin = clock::now() + 30 * MILLISECOND;
    for worker in workers {
        worker.tell(&format!("go {begin}"))?;
    }
    Ok(begin)
}

// ---- as they see themselves

/// What a worker hears from the bench, and says to it.
pub(crate) struct Boss {
    orders: tokio_mpsc::UnboundedReceiver<String>,
}

impl Boss {
    /// The job of this process. From here on it ends as soon as the bench is gone.
    pub(crate) fn meet() -> Outcome<(Self, Job)> {
        let (sender, mut orders) = tokio_mpsc::unbounded_channel();
        std::thread::spawn(move || {
            for line in std::io::stdin().lines().map_while(Result::ok) {
                // A worker that hears no more still wants to know when the bench is gone.
                let _ = sender.send(line);
            }
            std::process::exit(3);
        });
        let job = orders
            .blocking_recv()
            .expect("the process ends before the channel closes");
        let job = serde_json::from_str(&job).map_err(told("a job"))?;
        Ok((Self { orders }, job))
    }

    /// Says that all is prepared, and waits for the start: the time that all processes begin at.
    pub(crate) async fn ready(&mut self) -> Outcome<Nanos> {
        say("ready", &());
        let line = self.hear("go").await?;
        line.parse().map_err(told("go"))
    }

    /// The rest of the next line, which begins with that word.
    pub(crate) async fn hear(&mut self, word: &str) -> Outcome<String> {
        let line = self.orders.recv().await;
        let line = line.expect("the process ends before the channel closes");
        line.strip_prefix(word)
            .map(|rest| rest.trim().to_owned())
            .ok_or_else(|| format!("told {line:?} instead of {word:?}"))
    }
}

/// Says a word and a value to the bench.
pub(crate) fn say(word: &str, value: &impl Serialize) {
    let value = serde_json::to_string(value).expect("results are plain data");
    let mut out = std::io::stdout().lock();
    // Without a bench there is nobody to tell that it is gone.
    let _ = writeln!(out, "{word} {value}");
    let _ = out.flush();
}

/// Says why the job cannot be done.
pub(crate) fn fail(reason: &str) {
    let mut out = std::io::stdout().lock();
    let _ = writeln!(out, "failed {}", reason.replace('\n', "; "));
    let _ = out.flush();
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Worker {
        Worker::spawn(Command::new("/bin/sh").args(["-c", script])).expect("there is a shell")
    }

    #[test]
    fn what_is_said_on_the_way_is_passed_over() {
        let mut worker = shell("echo ready null; echo held 7; read -r _; echo done '[1, 2]'");
        worker.tell("end").unwrap();
        assert_eq!(
            worker.result::<Vec<u8>>("done", START),
            Ok(vec![1, 2]),
            "the value after the word"
        );
    }

    #[test]
    fn one_that_hangs_is_given_up_and_ended() {
        let mut worker = shell("echo ready; exec sleep 600");
        worker.expect("ready", START).unwrap();
        let error = worker.expect("done", Duration::from_millis(20));
        assert!(error.unwrap_err().starts_with("hung"));
        let begin = Instant::now();
        drop(worker);
        assert!(begin.elapsed() < START, "it ran on");
    }

    #[test]
    fn why_it_failed_is_told() {
        let mut worker = shell("echo failed SET: out of memory");
        let error = worker.expect("done", START);
        assert_eq!(error, Err("SET: out of memory".to_owned()));
    }

    #[test]
    fn one_that_ends_early_is_not_waited_for() {
        let begin = Instant::now();
        let error = shell("exit 101").expect("done", 10 * START);
        assert!(error.unwrap_err().contains("ended"));
        assert!(begin.elapsed() < START);
    }
}
