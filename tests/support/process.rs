//! A second process for a test: the test's own binary, run again as a worker.
//!
//! The test crate has one entry for all of its workers:
//!
//! ```ignore
//! #[tokio::test]
//! async fn worker() {
//!     let Some(mut role) = Role::of_this_process() else { return };
//!     match role.name() {
//!         "holder" => { …; role.say("holds 42"); role.hear().await; … }
//!         other => panic!("no such role: {other}"),
//!     }
//! }
//! ```
//!
//! and a test spawns it: `Worker::spawn("worker", "holder", &[("URL", &server.url())])`.

use std::env;
use std::fmt::Display;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal};
use tokio::sync::mpsc as tokio_mpsc;

use super::{PATIENCE, wait_until_blocking};

const ROLE: &str = "LOCKSTREAM_WORKER_ROLE";

/// Tells a worker's lines from the test runner's, which share its standard output and its lines.
const MARK: &str = "\u{1}worker: ";

/// A worker process, killed and reaped when dropped.
#[derive(Debug)]
pub struct Worker {
    role: String,
    child: Child,
    stdin: ChildStdin,
    lines: Arc<Mutex<Receiver<String>>>,
    transcript: Arc<Mutex<String>>,
}

impl Worker {
    /// Runs the test `entry` of this very binary in a process of its own, as `role` and with `env` added to the
    /// environment. The entry's name is its path within the test crate.
    pub fn spawn(entry: &str, role: &str, env: &[(&str, &str)]) -> Self {
        let mut child = Command::new(env::current_exe().expect("a running program has a path"))
            .args([entry, "--exact", "--nocapture", "--test-threads=1"])
            .env(ROLE, role)
            .envs(env.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .spawn()
            .expect("this program runs");
        let transcript = Arc::new(Mutex::new(String::new()));
        let (sender, lines) = mpsc::channel();
        follow(child.stdout.take().expect("piped"), &transcript, {
            move |line| {
                if let Some((_, said)) = line.split_once(MARK) {
                    // Nobody listens when the worker has just been dropped.
                    let _ = sender.send(said.to_owned());
                }
            }
        });
        follow(child.stderr.take().expect("piped"), &transcript, |_| {});
        Self {
            role: role.to_owned(),
            stdin: child.stdin.take().expect("piped"),
            child,
            lines: Arc::new(Mutex::new(lines)),
            transcript,
        }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Writes one line, which the worker gets from [`Role::hear`].
    pub fn tell(&mut self, line: impl Display) {
        writeln!(self.stdin, "{line}").expect("the worker lives");
    }

    /// Waits for the worker to say a line that begins with `prefix`, and gives the rest of it. Other lines on the way
    /// there are passed over. Panics, with all that the worker wrote, when it ends or nothing comes `within` that time.
    pub async fn expect_line(&self, prefix: &str, within: Duration) -> String {
        let lines = Arc::clone(&self.lines);
        let wanted = prefix.to_owned();
        // On a thread for blocking calls: this process may itself hold leases that its runtime has to renew.
        let found = tokio::task::spawn_blocking(move || find_line(&lines, &wanted, within));
        found
            .await
            .expect("the search does not panic")
            .unwrap_or_else(|error| self.complain(prefix, within, error))
    }

    /// [`Worker::expect_line`] for tests without a runtime.
    pub fn expect_line_blocking(&self, prefix: &str, within: Duration) -> String {
        find_line(&self.lines, prefix, within)
            .unwrap_or_else(|error| self.complain(prefix, within, error))
    }

    /// All lines that the worker has said and nobody has taken yet.
    pub fn said(&self) -> Vec<String> {
        self.lines.lock().unwrap().try_iter().collect()
    }

    /// Everything that the worker has written, the test runner's lines and panics included.
    pub fn transcript(&self) -> String {
        self.transcript.lock().unwrap().clone()
    }

    /// [`Worker::transcript`] of a worker that has ended, which may have been faster than the threads that follow it.
    pub fn last_words(&self) -> String {
        wait_until_blocking("the pipes end", PATIENCE, || {
            Arc::strong_count(&self.transcript) == 1
        });
        self.transcript()
    }

    /// Returns when the process is gone.
    pub fn sigkill(&mut self) {
        self.child.kill().expect("a child of ours");
        self.child.wait().expect("a child of ours");
    }

    /// Returns when the process has stopped.
    pub fn sigstop(&self) {
        self.signal(Signal::STOP);
        self.until_stopped();
    }

    /// Returns when the process has stopped, whoever sent the signal.
    pub fn until_stopped(&self) {
        wait_until_stopped(Pid::from_child(&self.child));
    }

    pub fn sigcont(&self) {
        self.signal(Signal::CONT);
    }

    pub fn signal(&self, signal: Signal) {
        rustix::process::kill_process(Pid::from_child(&self.child), signal)
            .expect("a child of ours, not reaped before");
    }

    /// Waits for the worker to end by itself.
    pub fn exit(&mut self, within: Duration) -> ExitStatus {
        let begin = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().expect("a child of ours") {
                return status;
            }
            if begin.elapsed() >= within {
                let (role, wrote) = (&self.role, self.transcript());
                panic!("worker {role} did not end within {within:?}; it wrote:\n{wrote}");
            }
            std::thread::sleep(super::LOOK_AGAIN);
        }
    }

    fn complain(&self, prefix: &str, within: Duration, error: RecvTimeoutError) -> ! {
        let role = &self.role;
        match error {
            RecvTimeoutError::Timeout => panic!(
                "worker {role} did not say {prefix:?} within {within:?}; it wrote:\n{}",
                self.transcript()
            ),
            RecvTimeoutError::Disconnected => panic!(
                "worker {role} ended without saying {prefix:?}; it wrote:\n{}",
                self.last_words()
            ),
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // Both fail only if it has ended and was reaped before.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn find_line(
    lines: &Mutex<Receiver<String>>,
    prefix: &str,
    within: Duration,
) -> Result<String, RecvTimeoutError> {
    let begin = Instant::now();
    let lines = lines.lock().unwrap();
    loop {
        let line = lines.recv_timeout(within.saturating_sub(begin.elapsed()))?;
        if let Some(rest) = line.strip_prefix(prefix) {
            return Ok(rest.to_owned());
        }
    }
}

fn follow(
    output: impl Read + Send + 'static,
    transcript: &Arc<Mutex<String>>,
    mut each: impl FnMut(&str) + Send + 'static,
) {
    let transcript = Arc::clone(transcript);
    std::thread::spawn(move || {
        for line in BufReader::new(output).lines().map_while(Result::ok) {
            let mut all = transcript.lock().unwrap();
            all.push_str(&line);
            all.push('\n');
            drop(all);
            each(&line);
        }
    });
}

/// What this process is, if it is a worker.
#[derive(Debug)]
pub struct Role {
    name: String,
    orders: tokio_mpsc::UnboundedReceiver<String>,
}

impl Role {
    /// None in the test process itself: the entry then returns at once. From here on the process ends as soon as the one
    /// that spawned it is gone.
    pub fn of_this_process() -> Option<Self> {
        let name = env::var(ROLE).ok()?;
        let (sender, orders) = tokio_mpsc::unbounded_channel();
        std::thread::spawn(move || {
            for line in std::io::stdin().lines().map_while(Result::ok) {
                // A role that hears no more still wants to know when its spawner is gone.
                let _ = sender.send(line);
            }
            std::process::exit(3);
        });
        Some(Self { name, orders })
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// A variable that [`Worker::spawn`] set.
    pub fn env(&self, name: &str) -> String {
        env::var(name).unwrap_or_else(|_| panic!("the role {} needs {name}", self.name))
    }

    /// Writes one line to the spawner.
    pub fn say(&self, line: impl Display) {
        let mut out = std::io::stdout().lock();
        // The test runner leaves its own last line unfinished.
        write!(out, "\n{MARK}{line}\n").expect("the spawner reads");
        out.flush().expect("the spawner reads");
    }

    /// The next line from the spawner.
    pub async fn hear(&mut self) -> String {
        self.orders.recv().await.expect(OPEN)
    }

    /// [`Role::hear`] outside of a runtime.
    pub fn hear_blocking(&mut self) -> String {
        self.orders.blocking_recv().expect(OPEN)
    }
}

const OPEN: &str = "the process ends before the channel closes";

/// A signal is under way for a moment; what was sent to a process just before might still be answered.
///
/// Only Linux tells; elsewhere the moment is left to pass.
pub(super) fn wait_until_stopped(pid: Pid) {
    if !cfg!(target_os = "linux") {
        std::thread::sleep(Duration::from_millis(20));
        return;
    }
    let stat = format!("/proc/{}/stat", pid.as_raw_pid());
    wait_until_blocking(format!("{pid:?} stops"), PATIENCE, || {
        let stat = std::fs::read_to_string(&stat).expect("the process exists");
        // The state follows the name, which is in brackets and may itself hold any character.
        stat.rsplit_once(')')
            .is_some_and(|(_, rest)| rest.trim_start().starts_with('T'))
    });
}
