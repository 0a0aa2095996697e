//! A Redis server of the run's own: on a free port, in a folder that goes with it.

use std::env;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::net::{Ipv4Addr, TcpListener};
use std::ops::Range;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use redis::{Connection, FromRedisValue, Value};
use tempfile::TempDir;

use crate::libs::{Outcome, told};

/// How long the server may take to start, or to answer.
const PATIENCE: Duration = Duration::from_secs(60);

const PORTS: Range<u16> = 10_000..16_000;

/// Runs the server `$1` with the configuration `$2`, says its pid, and ends it by that pid when it
/// is told to, or when the bench is gone in whatever way: the kernel closes the pipe then. In the
/// latter case nobody else removes the folder `$3`.
///
/// The shell keeps the dead server as its child until then, so the pid cannot become another's.
const KEEPER: &str = r#"
trap '' HUP INT QUIT TERM
"$1" "$2" </dev/null >"$3/log" 2>&1 &
server=$!
echo "$server"
exec >/dev/null 2>&1
read -r parting || parting=
kill -9 "$server"
wait "$server"
[ -n "$parting" ] || /bin/rm -rf "$3"
"#;

/// A running server; it ends when this is dropped, in a panic too.
pub(crate) struct Server {
    program: PathBuf,
    port: u16,
    version: String,
    connection: Option<Connection>,
    /// Ends the server, and goes before its folder does; none while the server is stopped.
    keeper: Option<Keeper>,
    folder: TempDir,
}

struct Keeper {
    shell: Child,
    leash: ChildStdin,
    pid: String,
}

impl Server {
    /// Starts the program that `LOCKSTREAM_REDIS_SERVER` names, else the first server on the path.
    pub(crate) fn start() -> Outcome<Self> {
        Self::with("")
    }

    /// The same with more lines of configuration.
    pub(crate) fn with(lines: &str) -> Outcome<Self> {
        let program = find()?;
        let begin = Instant::now();
        loop {
            match Self::launch(&program, lines) {
                // Someone else was faster to bind the port that had been free.
                Err(error) if error.contains("in use") && begin.elapsed() < PATIENCE => {}
                started => return started,
            }
        }
    }

    fn launch(program: &Path, lines: &str) -> Outcome<Self> {
        let folder = tempfile::Builder::new()
            .prefix("lockstream-bench-")
            .tempdir()
            .map_err(told("a folder"))?;
        let port = free_port()?;
        let path = folder.path().join("conf");
        let config = format!(
            "bind 127.0.0.1\nport {port}\ndir {}\ndaemonize no\nsave \"\"\nappendonly no\n\
             tcp-backlog 4096\n{lines}\n",
            folder.path().display()
        );
        fs::write(&path, config).map_err(told("the server's configuration"))?;
        let (keeper, connection) = run(program, folder.path(), port)?;
        let mut server = Self {
            program: program.to_owned(),
            port,
            version: String::new(),
            connection: Some(connection),
            keeper: Some(keeper),
            folder,
        };
        server.version = match server.info("server", "valkey_version") {
            Ok(version) => format!("valkey {version}"),
            Err(_) => format!("redis {}", server.info("server", "redis_version")?),
        };
        Ok(server)
    }

    pub(crate) fn url(&self) -> String {
        format!("redis://127.0.0.1:{}/", self.port)
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    pub(crate) fn pid(&self) -> &str {
        self.keeper.as_ref().map_or("none", |keeper| &keeper.pid)
    }

    /// Shuts it down; what it has written to its folder stays.
    pub(crate) fn stop(&mut self) {
        // Its only answer is the end of the connection.
        let _: Outcome<String> = self.ask(&["SHUTDOWN"]);
        self.keeper = None;
    }

    /// Starts it again where it was, with what is in its folder.
    pub(crate) fn start_again(&mut self) -> Outcome<()> {
        let (keeper, connection) = run(&self.program, self.folder.path(), self.port)?;
        self.keeper = Some(keeper);
        self.connection = Some(connection);
        Ok(())
    }

    /// Its kind and its version.
    pub(crate) fn version(&self) -> &str {
        &self.version
    }

    /// Where the processes of a run put what they have to say at length.
    pub(crate) fn folder(&self) -> PathBuf {
        self.folder.path().to_path_buf()
    }

    /// Sends one command and gives its reply.
    pub(crate) fn ask<T: FromRedisValue>(&mut self, words: &[&str]) -> Outcome<T> {
        let mut connection = match self.connection.take() {
            Some(connection) => connection,
            None => connect(&self.url(), self.pid())?,
        };
        let mut command = redis::Cmd::new();
        for word in words {
            command.arg(*word);
        }
        let (connection, reply) = in_time(move || {
            let reply = command.query::<Value>(&mut connection);
            Ok((connection, reply))
        })
        .map_err(told(&words.join(" ")))?;
        // After an error a late reply may still be under way, for the next command to take as its own.
        self.connection = reply.is_ok().then_some(connection);
        let reply = reply.map_err(told(&words.join(" ")))?;
        redis::from_redis_value(reply).map_err(told(&words.join(" ")))
    }

    /// [`ask`](Self::ask) where nothing but an error tells something.
    pub(crate) fn order(&mut self, words: &[&str]) -> Outcome<()> {
        self.ask::<redis::Value>(words).map(drop)
    }

    /// The processor time that the server has used so far, in seconds.
    pub(crate) fn processor_secs(&mut self) -> Outcome<f64> {
        let mut sum = 0.0;
        for name in ["used_cpu_user", "used_cpu_sys"] {
            let value = self.info("cpu", name)?;
            sum += value.parse::<f64>().map_err(told(name))?;
        }
        Ok(sum)
    }

    pub(crate) fn info(&mut self, section: &str, name: &str) -> Outcome<String> {
        let info: String = self.ask(&["INFO", section])?;
        field(&info, name)
            .map(str::to_owned)
            .ok_or_else(|| format!("INFO {section} has no {name}"))
    }
}

/// Runs a server on the configuration in its folder, and connects to it.
fn run(program: &Path, folder: &Path, port: u16) -> Outcome<(Keeper, Connection)> {
    let mut keeper = Keeper::spawn(program, folder)?;
    let url = format!("redis://127.0.0.1:{port}/");
    let begin = Instant::now();
    loop {
        let error = match connect(&url, &keeper.pid) {
            Ok(connection) => return Ok((keeper, connection)),
            Err(error) => error,
        };
        let log = fs::read_to_string(folder.join("log")).unwrap_or_default();
        if log.contains("in use") || begin.elapsed() > PATIENCE {
            let program = program.display();
            return Err(format!("{program} did not start: {error}\n{log}"));
        }
        if let Ok(Some(status)) = keeper.shell.try_wait() {
            return Err(format!("the server's keeper ended: {status}\n{log}"));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

impl Keeper {
    fn spawn(program: &Path, folder: &Path) -> Outcome<Self> {
        let mut shell = Command::new("/bin/sh")
            .args(["-c", KEEPER, "keeper"])
            .args([program, &folder.join("conf"), folder])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // A Ctrl-C meant for the bench must not end the keeper before the server.
            .process_group(0)
            .spawn()
            .map_err(told("/bin/sh"))?;
        let leash = shell.stdin.take().expect("piped");
        let mut said = BufReader::new(shell.stdout.take().expect("piped"));
        let mut pid = String::new();
        said.read_line(&mut pid).map_err(told("the keeper"))?;
        let pid = pid.trim().to_owned();
        Ok(Self { shell, leash, pid })
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        // A keeper that is gone already has nothing left to end.
        let _ = self.leash.write_all(b"end\n");
        let _ = self.shell.wait();
    }
}

/// A connection to the server with that pid, and to no other that may listen on the port.
fn connect(url: &str, pid: &str) -> Outcome<Connection> {
    let client = redis::Client::open(url).map_err(told("open"))?;
    let (connection, info) = in_time(move || {
        let mut connection = client.get_connection().map_err(told("connect"))?;
        let info: String = redis::cmd("INFO")
            .query(&mut connection)
            .map_err(told("INFO"))?;
        Ok((connection, info))
    })?;
    match field(&info, "process_id") {
        Some(found) if found == pid && field(&info, "loading") == Some("1") => {
            Err("it loads its data".to_owned())
        }
        Some(found) if found == pid => Ok(connection),
        _ => Err(format!("another server than ours is on {url}")),
    }
}

/// Does work that blocks on a thread of its own, which is left behind if the server does not answer in time.
///
/// A socket's own time-out would not do: a read that has one is not begun again by the kernel when the process was
/// stopped for a moment, and errs.
fn in_time<T: Send + 'static>(work: impl FnOnce() -> Outcome<T> + Send + 'static) -> Outcome<T> {
    let (done, is_done) = mpsc::channel();
    std::thread::spawn(move || done.send(work()));
    let answer = is_done.recv_timeout(PATIENCE);
    answer.unwrap_or_else(|_| Err(format!("no answer within {PATIENCE:?}")))
}

fn field<'a>(info: &'a str, name: &str) -> Option<&'a str> {
    info.lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
        .map(str::trim)
}

/// A port below those that systems hand out to clients by themselves: while a server is stopped, none
/// of the clients that try to connect is given the server's own port.
pub(crate) fn free_port() -> Outcome<u16> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let first = std::process::id() * 101;
    for _ in 0..PORTS.len() {
        let offset = first.wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed)) % PORTS.len() as u32;
        let port = PORTS.start + offset as u16;
        if TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok() {
            return Ok(port);
        }
    }
    Err(format!("no port is free in {PORTS:?}"))
}

fn find() -> Outcome<PathBuf> {
    const VARIABLE: &str = "LOCKSTREAM_REDIS_SERVER";
    if let Some(named) = env::var_os(VARIABLE).filter(|named| !named.is_empty()) {
        let named = PathBuf::from(named);
        return match File::open(&named) {
            Ok(_) => Ok(named),
            Err(error) => Err(format!("{VARIABLE} is {}: {error}", named.display())),
        };
    }
    let path = env::var_os("PATH").unwrap_or_default();
    ["redis-server", "valkey-server"]
        .into_iter()
        .flat_map(|name| env::split_paths(&path).map(move |folder| folder.join(name)))
        .find(|candidate| candidate.is_file())
        .ok_or_else(|| {
            format!(
                "no redis-server (7.0 or newer) or valkey-server on the path: install one, or name \
                 it in {VARIABLE}"
            )
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::monitor::Monitor;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    #[test]
    fn a_panic_ends_the_server() {
        let (mut place, mut pid) = (PathBuf::new(), String::new());
        let end = catch_unwind(AssertUnwindSafe(|| {
            let server = Server::start().unwrap();
            place = server.folder();
            server.pid().clone_into(&mut pid);
            assert!(Path::new("/proc").join(&pid).exists() || !cfg!(target_os = "linux"));
            panic!("a bug");
        }));
        assert!(end.is_err());
        assert!(!place.exists() && !place.as_os_str().is_empty());
        assert!(!Path::new("/proc").join(&pid).exists(), "{pid} lives");
    }

    #[test]
    fn a_server_that_starts_again_has_its_data() {
        let mut server = Server::with("appendonly yes").unwrap();
        let _: String = server.ask(&["SET", "k", "v"]).unwrap();
        server.stop();
        assert!(server.ask::<String>(&["GET", "k"]).is_err(), "it runs on");
        server.start_again().unwrap();
        assert_eq!(server.ask(&["GET", "k"]), Ok("v".to_owned()));
    }

    #[test]
    fn calls_inside_scripts_are_not_counted() {
        let mut server = Server::start().unwrap();
        let monitor = Monitor::begin(&server).unwrap();
        let script = "for i = 1, 100 do redis.call('SET', KEYS[1], i) end return 1";
        let _: u64 = server.ask(&["EVAL", script, "1", "k"]).unwrap();
        let _: String = server.ask(&["SET", "k", "[0 lua]"]).unwrap();
        assert_eq!(monitor.end(&mut server), Ok(2));
    }
}
