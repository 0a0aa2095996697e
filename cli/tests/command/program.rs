//! The program under test, as a process.

use std::ffi::{OsStr, OsString};
use std::io::{PipeWriter, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, OnceLock, mpsc};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use tokio::signal::unix::{SignalKind, signal};

use crate::support::wait_until_blocking;

/// How long something may take that takes a moment on a machine that is not busy. Only a test that fails waits for so
/// long. What must not end by itself in that time lasts ten minutes: a `sleep`, or a lease that is to be released.
pub(crate) const SOON: Duration = Duration::from_secs(100);

/// The time for connecting, and the time for an answer of the store. The usual seconds may be over on a machine that stands
/// still. A test that waits until a time-out is over sets that one itself.
const PATIENCE: &str = "60000ms";

/// The flags that set these two times, and their names in the url.
const TIMEOUTS: [(&str, &str); 2] = [
    ("--connect-timeout", "connect_timeout"),
    ("--response-timeout", "response_timeout"),
];

/// Whether a command asks a store.
fn asks(command: &OsStr) -> bool {
    const ASKING: [&str; 11] = [
        "check", "free", "hold", "inspect", "lead", "ls", "migrate", "release", "renew", "run",
        "watch",
    ];
    command.to_str().is_some_and(|it| ASKING.contains(&it))
}

/// The url with the [patience](PATIENCE), for a command that is not begun by [`lockstream`].
pub(crate) fn patient(url: &str) -> String {
    let begin = if url.contains('?') { '&' } else { '?' };
    let [connect, response] = TIMEOUTS.map(|(_, name)| format!("{name}={PATIENCE}"));
    format!("{url}{begin}{connect}&{response}")
}

/// The path of the program.
pub(crate) const LOCKSTREAM: &str = env!("CARGO_BIN_EXE_lockstream");

/// A running `lockstream`. It is killed when dropped, and its guardian then ends the command.
#[derive(Debug)]
pub(crate) struct Program {
    child: Child,
    out: Heard,
    err: Heard,
}

/// What a program has done.
#[derive(Debug)]
pub(crate) struct Done {
    pub(crate) code: Option<i32>,
    pub(crate) out: String,
    pub(crate) err: String,
}

/// `nohup` and the like start these tests with signals that are ignored, and children would inherit that. A signal that is
/// caught here has its usual effect in a child.
pub(crate) fn ignore_no_signals() {
    static CAUGHT: OnceLock<()> = OnceLock::new();
    CAUGHT.get_or_init(|| {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime can be built");
        let _inside = runtime.enter();
        let caught = [
            SignalKind::hangup(),
            SignalKind::interrupt(),
            SignalKind::quit(),
            SignalKind::terminate(),
        ];
        for kind in caught {
            // The handler stays for as long as this process lives.
            drop(signal(kind).expect("it can be caught"));
        }
    });
}

/// The program with this url in its environment, and with [patience](PATIENCE).
pub(crate) fn lockstream<A: AsRef<OsStr>>(
    url: &str,
    arguments: impl IntoIterator<Item = A>,
) -> Command {
    let mut arguments: Vec<_> = arguments
        .into_iter()
        .map(|it| it.as_ref().to_owned())
        .collect();
    if arguments.first().is_some_and(|command| asks(command)) {
        for (flag, name) in TIMEOUTS {
            if !url.contains(name) && !arguments.iter().any(|it| it == flag) {
                arguments.splice(1..1, [flag, PATIENCE].map(OsString::from));
            }
        }
    }
    let mut command = Command::new(LOCKSTREAM);
    command.args(arguments).env("LOCKSTREAM_URL", url);
    command
}

impl Program {
    /// Runs [`lockstream`] in a process group of its own.
    pub(crate) fn start<A: AsRef<OsStr>>(
        url: &str,
        arguments: impl IntoIterator<Item = A>,
    ) -> Self {
        Self::spawn(lockstream(url, arguments))
    }

    /// Runs any command in a process group of its own.
    pub(crate) fn spawn(command: Command) -> Self {
        Self::spawn_with_input(command, Stdio::null())
    }

    /// The same with this as its standard input.
    pub(crate) fn spawn_with_input(mut command: Command, input: Stdio) -> Self {
        ignore_no_signals();
        let (out, its_out) = Heard::follow();
        let (err, its_err) = Heard::follow();
        let child = command
            .stdin(input)
            .stdout(its_out)
            .stderr(its_err)
            .process_group(0)
            .spawn()
            .expect("the program runs");
        Self { child, out, err }
    }

    pub(crate) fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(self.pid(), signal).expect("a child of ours, not reaped before");
    }

    pub(crate) fn out(&self) -> String {
        self.out.text()
    }

    pub(crate) fn err(&self) -> String {
        self.err.text()
    }

    /// Waits until the command has written this.
    pub(crate) fn expect(&self, text: &str) {
        let has_text = || self.out().contains(text);
        let begin = Instant::now();
        while !has_text() {
            let late = begin.elapsed() > SOON;
            assert!(!late, "no {text:?}: {:?} {:?}", self.out(), self.err());
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Waits until the program itself has written this to standard error.
    pub(crate) fn expect_said(&self, text: &str) {
        wait_until_blocking(format!("said {text:?}"), SOON, || self.err().contains(text));
    }

    /// The number after `word=` in what the command has written.
    pub(crate) fn number(&self, word: &str) -> i64 {
        let begin = format!("{word}=");
        let find = |out: &str| {
            let (_, rest) = out.split_once(&begin)?;
            let (number, _) = rest.split_once('\n')?;
            number.parse().ok()
        };
        wait_until_blocking(format!("{word} is told"), SOON, || {
            find(&self.out()).is_some()
        });
        find(&self.out()).unwrap()
    }

    /// Whether it still runs.
    pub(crate) fn runs(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    /// Waits for its end.
    pub(crate) fn end(mut self) -> Done {
        let status = self.wait();
        // Whoever has inherited its output may go on, and is not waited for.
        Done {
            code: status.code(),
            out: self.out.whole(),
            err: self.err.whole(),
        }
    }

    fn wait(&mut self) -> ExitStatus {
        let begin = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            let late = begin.elapsed() > SOON;
            assert!(!late, "it does not end: {:?} {:?}", self.out(), self.err());
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// SIGKILL. Returns when the process is gone.
    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // Both fail if it has ended before.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Runs it to its end.
pub(crate) fn run<A: AsRef<OsStr>>(url: &str, arguments: impl IntoIterator<Item = A>) -> Done {
    Program::start(url, arguments).end()
}

/// Writes a program. Another process does: ours might fork in another thread while it writes, and a file that any process
/// has open for writing cannot be run.
pub(crate) fn write_program(path: &std::path::Path, text: &str) {
    let script = "printf %s \"$1\" >\"$0\" && chmod 755 \"$0\"";
    let written = Command::new("sh")
        .args(["-c", script])
        .arg(path)
        .arg(text)
        .status();
    assert!(written.unwrap().success());
}

/// Whether the process is gone, be it a zombie that nobody reaps.
pub(crate) fn is_gone(pid: i64) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"));
    let is_zombie = stat.is_ok_and(|stat| {
        stat.rsplit_once(')')
            .is_some_and(|(_, rest)| rest.starts_with(" Z"))
    });
    let pid = Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
    is_zombie || test_kill_process(pid).is_err()
}

/// Waits until it is.
pub(crate) fn until_gone(pid: i64) {
    wait_until_blocking(format!("{pid} is gone"), SOON, || is_gone(pid));
}

/// What comes out of a pipe.
#[derive(Debug)]
struct Heard {
    text: Arc<Mutex<String>>,
    /// Ours, to write a mark: it comes out behind all that was written before.
    pipe: PipeWriter,
    marks: mpsc::Receiver<()>,
}

impl Heard {
    const MARK: char = '\0';

    /// The second is the end for the process.
    fn follow() -> (Self, PipeWriter) {
        let (mut reader, pipe) = std::io::pipe().expect("a pipe can be made");
        let its_end = pipe.try_clone().expect("it can be cloned");
        let text = Arc::new(Mutex::new(String::new()));
        let (marked, marks) = mpsc::channel();
        let writer = text.clone();
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(count @ 1..) = reader.read(&mut buffer) {
                let more = String::from_utf8_lossy(&buffer[..count]);
                writer
                    .lock()
                    .unwrap()
                    .push_str(&more.replace(Self::MARK, ""));
                if more.contains(Self::MARK) {
                    // Nobody may wait for it any more.
                    let _ = marked.send(());
                }
            }
        });
        (Self { text, pipe, marks }, its_end)
    }

    fn text(&self) -> String {
        self.text.lock().unwrap().clone()
    }

    /// All that has been written by now.
    fn whole(&mut self) -> String {
        let mark = [u8::try_from(Self::MARK).expect("it is a byte")];
        self.pipe.write_all(&mark).expect("it is read");
        self.marks.recv().expect("it is read");
        self.text()
    }
}
