//! The server's process: run, and never left behind.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use rustix::process::Pid;

/// Runs the server of the words from `$3` on, says its pid, and ends it by the signal `$1` when told so or when the test
/// process is gone: the kernel closes the pipe then, also after a SIGKILL. In the latter case nobody else removes the
/// folder `$2`.
///
/// The pid goes to standard error, because the server may be faster with its own first line on standard output.
/// The shell keeps the dead server as its child until it is told to end, so the pid cannot become another process's.
const KEEPER: &str = r#"
trap '' HUP INT QUIT TERM
end=$1 folder=$2
shift 2
"$@" </dev/null 2>&1 &
server=$!
echo "$server" >&2
exec >/dev/null 2>&1
read -r parting || parting=
kill "-$end" "$server"
wait "$server"
[ -n "$parting" ] || /bin/rm -rf "$folder"
"#;

/// A running server and the shell that ends it.
#[derive(Debug)]
pub(super) struct Process {
    keeper: Child,
    leash: ChildStdin,
    pub(super) pid: Pid,
    pub(super) log: Arc<Log>,
}

impl Process {
    /// `end`: the name of the signal that ends it. `user`: whom it runs as, if not as we do.
    pub(super) fn spawn(
        server: &[&OsStr],
        folder: &Path,
        end: &str,
        user: Option<(u32, u32)>,
    ) -> Self {
        let mut command = Command::new("/bin/sh");
        if let Some((user, group)) = user {
            command.uid(user).gid(group);
        }
        let mut keeper = command
            .args(["-c", KEEPER, "keeper", end])
            .arg(folder)
            .args(server)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // A Ctrl-C meant for the test must not end the keeper before the server.
            .process_group(0)
            .spawn()
            .expect("there is a shell");
        let leash = keeper.stdin.take().expect("piped");
        let mut pid = String::new();
        BufReader::new(keeper.stderr.take().expect("piped"))
            .read_line(&mut pid)
            .expect("a pipe can be read");
        let pid = pid.trim().parse().ok().and_then(Pid::from_raw);

        let output = BufReader::new(keeper.stdout.take().expect("piped"));
        let log = Arc::new(Log::default());
        let writer = Arc::clone(&log);
        std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                writer.add(&line);
            }
            writer.end();
        });
        Self {
            keeper,
            leash,
            pid: pid.expect("the keeper says the pid"),
            log,
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // A keeper that is gone already has nothing left to end.
        let _ = self.leash.write_all(b"end\n");
        let _ = self.keeper.wait();
    }
}

/// What the server writes; its end is the server's.
#[derive(Debug, Default)]
pub(super) struct Log {
    state: Mutex<(String, bool)>,
    ended: Condvar,
}

impl Log {
    fn add(&self, line: &str) {
        let mut state = self.state.lock().unwrap();
        state.0.push_str(line);
        state.0.push('\n');
    }

    fn end(&self) {
        self.state.lock().unwrap().1 = true;
        self.ended.notify_all();
    }

    pub(super) fn text(&self) -> String {
        self.state.lock().unwrap().0.clone()
    }

    pub(super) fn wait_for_end(&self, within: Duration) -> bool {
        let state = self.state.lock().unwrap();
        let (state, _) = self
            .ended
            .wait_timeout_while(state, within, |state| !state.1)
            .unwrap();
        state.1
    }
}
