//! A terminal of the test's own, with a shell that controls jobs on it.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::fcntl::OFlag;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::pty::{grantpt, posix_openpt, ptsname_r, unlockpt};
use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, setsid, tcgetpgrp};

use crate::program::{LOCKSTREAM, Program, SOON, ignore_no_signals, patient};
use crate::support::{RedisServer, on_a_steady_machine_blocking, wait_until_blocking};

const TERMINAL: &str = "LOCKSTREAM_TEST_TERMINAL";
const SHELL: &str = "LOCKSTREAM_TEST_SHELL";

/// The leader of a session on the terminal that the variable names: it runs a shell there. In the test process itself
/// it is nothing.
#[test]
fn session() {
    let Some(path) = std::env::var_os(TERMINAL) else {
        return;
    };
    setsid().unwrap();
    // The first terminal that a leader opens is its session's.
    let tty = File::options().read(true).write(true).open(path).unwrap();
    let shell = std::env::var(SHELL).unwrap();
    let mut words = shell.split(' ');
    let shell = Command::new(words.next().unwrap())
        .args(words)
        .env("PS1", "READY ")
        .env_remove("ENV")
        .stdin(tty.try_clone().unwrap())
        .stdout(tty.try_clone().unwrap())
        .stderr(tty.try_clone().unwrap())
        .status();
    // The shell may have been ended with its terminal.
    let _ = shell;
}

struct Terminal {
    session: Session,
    keyboard: File,
    screen: Arc<Mutex<String>>,
    is_open: Arc<()>,
    reading: JoinHandle<()>,
}

impl Terminal {
    fn open(url: &str) -> Self {
        Self::open_in("sh -i", url)
    }

    fn open_in(shell: &str, url: &str) -> Self {
        // No other process may inherit it, or it would not close.
        let flags = OFlag::O_RDWR | OFlag::O_NOCTTY | OFlag::O_CLOEXEC;
        let keyboard = posix_openpt(flags).unwrap();
        grantpt(&keyboard).unwrap();
        unlockpt(&keyboard).unwrap();
        let path = ptsname_r(&keyboard).unwrap();
        let mut options = File::options();
        let options = options.read(true).write(true);
        let slave = options.custom_flags(OFlag::O_NOCTTY.bits()).open(&path);
        ignore_no_signals();
        let session = Command::new(std::env::current_exe().unwrap())
            .args([
                "terminal::session",
                "--exact",
                "--nocapture",
                "--test-threads=1",
            ])
            .env(TERMINAL, path)
            .env(SHELL, shell)
            .env("LOCKSTREAM_URL", patient(url))
            .env("L", LOCKSTREAM)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let keyboard = File::from(OwnedFd::from(keyboard));
        let mut reader = keyboard.try_clone().unwrap();
        let screen = Arc::new(Mutex::new(String::new()));
        let is_open = Arc::new(());
        let (writer, open) = (screen.clone(), Arc::downgrade(&is_open));
        let reading = std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while open.strong_count() > 0 {
                let mut polled = [PollFd::new(reader.as_fd(), PollFlags::POLLIN)];
                if poll(&mut polled, PollTimeout::from(20_u8)) != Ok(1) {
                    continue;
                }
                let Ok(count @ 1..) = reader.read(&mut buffer) else {
                    return;
                };
                let text = String::from_utf8_lossy(&buffer[..count]);
                writer.lock().unwrap().push_str(&text);
            }
        });
        let terminal = Self {
            session: Session(session),
            keyboard,
            screen,
            is_open,
            reading,
        };
        // The shell must have opened it before we let go, or it would be closed.
        terminal.expect("READY");
        drop(slave.unwrap());
        terminal
    }

    fn type_keys(&mut self, keys: &str) {
        self.keyboard.write_all(keys.as_bytes()).unwrap();
    }

    /// Closes it. Nothing else has it open.
    fn close(self) -> Session {
        drop((self.keyboard, self.is_open));
        self.reading.join().unwrap();
        self.session
    }

    /// Waits until the screen shows this, and yields and wipes it up to there.
    fn expect(&self, text: &str) -> String {
        let begin = Instant::now();
        loop {
            let mut screen = self.screen.lock().unwrap();
            if let Some(at) = screen.find(text) {
                return screen.drain(..at + text.len()).collect();
            }
            assert!(begin.elapsed() < SOON, "no {text:?} in {screen:?}");
            drop(screen);
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Ends the session, however the test ends.
struct Session(Child);

impl Drop for Session {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn the_command_reads_from_the_terminal() {
    let server = RedisServer::start();
    let mut terminal = Terminal::open(&server.url());
    terminal.type_keys("\"$L\" run k -- sh -c 'read x; echo got=$x'\n");
    wait_until_blocking("k is held", SOON, || server.exists("lock:k"));
    terminal.type_keys("words\n");
    terminal.expect("got=words");
    terminal.expect("READY");
    // The shell has its terminal back.
    terminal.type_keys("echo sum=$((20 + 3))\n");
    terminal.expect("sum=23");
    assert!(!server.exists("lock:k"));
}

#[test]
fn the_keyboard_interrupts_the_command() {
    let server = RedisServer::start();
    let mut terminal = Terminal::open(&server.url());
    // A signal that we passed on as well would count twice.
    let script =
        r#"trap "n=\$((n + 1)); echo int=\$n" INT; echo u''p; while :; do sleep 0.01; done"#;
    terminal.type_keys(&format!("\"$L\" run k -- sh -c '{script}'; echo code=$?\n"));
    terminal.expect("up");
    terminal.type_keys("\u{3}");
    terminal.expect("int=1");
    terminal.type_keys("\u{3}");
    terminal.expect("int=2");
    terminal.type_keys("\u{1c}");
    terminal.expect("code=131");
}

/// Stopped, and continued by the shell. The command goes on where it was, with the terminal.
#[test]
fn the_keyboard_stops_the_command_and_the_shell_continues_it() {
    let server = RedisServer::start();
    let mut terminal = Terminal::open(&server.url());
    let script = "echo u''p; while read x; do echo got=$x; done";
    terminal.type_keys(&format!("\"$L\" run --ttl 10m k -- sh -c '{script}'\n"));
    terminal.expect("up");
    for round in 1..=2 {
        terminal.type_keys("\u{1a}");
        terminal.expect("Stopped");
        terminal.type_keys(&format!("echo shell=$(({round} + 20))\n"));
        terminal.expect(&format!("shell={}", round + 20));
        assert!(server.exists("lock:k"), "a stopped command has its lock");
        terminal.type_keys("fg\n");
        terminal.expect("run --ttl 10m k");
        terminal.type_keys(&format!("words{round}\n"));
        terminal.expect(&format!("got=words{round}"));
    }
    // The end of the input.
    terminal.type_keys("\u{4}");
    terminal.expect("READY");
    wait_until_blocking("the lock is released", SOON, || !server.exists("lock:k"));
}

/// As often as the shell does so. A second time might undo the next stop.
#[test]
fn the_command_is_continued_once() {
    let server = RedisServer::start();
    let mut terminal = Terminal::open(&server.url());
    let script = r#"trap "n=\$((n + 1)); echo \$n." CONT; sleep 600 & echo u''p; while kill -0 $!; do wait; done"#;
    terminal.type_keys(&format!("\"$L\" run --ttl 10m k -- sh -c '{script}'\n"));
    terminal.expect("up");
    for round in 1..=3 {
        terminal.type_keys("\u{1a}");
        terminal.expect("Stopped");
        terminal.type_keys("fg\n");
        let said = terminal.expect(".\r\n");
        assert!(said.ends_with(&format!("{round}.\r\n")), "{said}");
    }
}

/// A background job that reads is stopped as any other, and has the terminal in the foreground.
#[test]
fn a_background_job_comes_to_the_foreground() {
    let server = RedisServer::start();
    let mut terminal = Terminal::open(&server.url());
    terminal.type_keys("\"$L\" run k -- sh -c 'echo u''p; read x; echo got=$x' &\n");
    terminal.expect("up");
    let begin = Instant::now();
    let mut jobs = String::new();
    while !jobs.contains("Stopped") {
        assert!(begin.elapsed() < SOON, "its read stops it: {jobs}");
        terminal.type_keys("jobs\n");
        jobs = terminal.expect("READY");
        std::thread::sleep(Duration::from_millis(10));
    }
    terminal.type_keys("fg\n");
    terminal.expect("run k");
    terminal.type_keys("words\n");
    terminal.expect("got=words");
    terminal.expect("READY");
}

/// Bash gives the terminal to a job that runs, and sends no signal with it.
#[test]
fn a_running_job_comes_to_the_foreground_unheard() {
    let server = RedisServer::start();
    let mut terminal = Terminal::open_in("bash --norc --noediting -i", &server.url());
    let script = "while kill -0 $1 2>/dev/null; do sleep 0.01; done; read x; echo got=$x";
    terminal.type_keys("sleep 600 & it=$!; echo sl''eep=$it.\n");
    terminal.expect("sleep=");
    let sleep = terminal.expect(".\r\n");
    let sleep = Pid::from_raw(sleep.trim_end_matches(".\r\n").parse().unwrap());
    terminal.type_keys(&format!("\"$L\" run k -- sh -c '{script}' sh $it &\n"));
    wait_until_blocking("k is held", SOON, || server.exists("lock:k"));
    let shell = tcgetpgrp(&terminal.keyboard).unwrap();
    terminal.type_keys("fg\n");
    wait_until_blocking("the job is in the foreground", SOON, || {
        tcgetpgrp(&terminal.keyboard) != Ok(shell)
    });
    // It wants the terminal from now on.
    kill(sleep, Signal::SIGKILL).unwrap();
    terminal.type_keys("words\n");
    terminal.expect("got=words");
    terminal.type_keys("echo sum=$((20 + 3))\n");
    terminal.expect("sum=23");
    assert!(!server.exists("lock:k"));
}

/// The lease ends while the job is stopped: it is not continued.
#[test]
fn a_job_that_is_stopped_for_too_long_is_ended() {
    on_a_steady_machine_blocking(|| {
        let server = RedisServer::start();
        let mut terminal = Terminal::open(&server.url());
        terminal.type_keys("\"$L\" run --ttl 3s --kill-after 1s k -- sh -c 'echo u''p; read x; echo got=$x'; echo code=$?\n");
        terminal.expect("up");
        terminal.type_keys("\u{1a}");
        terminal.expect("Stopped");
        wait_until_blocking("the lease is over", SOON, || !server.exists("lock:k"));
        terminal.type_keys("fg; echo code=$?\n");
        terminal.expect("code=76");
    });
}

/// Whoever closes the window ends the command, and the lock is free.
#[test]
fn a_terminal_that_closes_ends_the_command() {
    let server = RedisServer::start();
    let mut terminal = Terminal::open(&server.url());
    terminal
        .type_keys("\"$L\" run --ttl 10m k -- sh -c 'echo u''p; while :; do sleep 0.01; done'\n");
    terminal.expect("up");
    assert!(server.exists("lock:k"));
    let mut session = terminal.close();
    wait_until_blocking("the lock is released", SOON, || !server.exists("lock:k"));
    assert!(
        session.0.wait().unwrap().signal().is_some(),
        "its leader is hung up"
    );
}

/// Drawn again and again, with the lock's holder by name, until the keyboard ends it.
#[test]
fn a_watch_is_a_table() {
    let server = RedisServer::start();
    let mut terminal = Terminal::open(&server.url());
    terminal.type_keys("\"$L\" watch --every 100ms; echo code=$?\n");
    terminal.expect("KEY");
    let lasting = ["run", "--ttl", "10m", "--name", "alpha", "till"];
    let holder = Program::start(
        &server.url(),
        lasting.into_iter().chain(["--", "sleep", "600"]),
    );
    terminal.expect("till  held   alpha  alpha~");
    holder.signal(rustix::process::Signal::TERM);
    assert_eq!(holder.end().code, Some(128 + 15));
    terminal.expect("KEY  STATE  NAME  OWNER  SEEN FOR");
    terminal.type_keys("\u{3}");
    terminal.expect("code=130");
}
