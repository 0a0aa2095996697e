//! A real PostgreSQL server for tests, gone when the test program is, however it ends.

use std::env;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};

use postgres::error::SqlState;
use postgres::{Client, NoTls, Row};
use rustix::process::{Pid, Signal, getuid, kill_process};
use tempfile::TempDir;

use super::PATIENCE;
use super::keeper::Process;
use super::ports::Port;
use super::shown::Tls;

/// Between two looks at a server that starts or recovers. Each is a connection, and many servers may start at once.
const LOOK_AGAIN: Duration = Duration::from_millis(10);

const REMEDY: &str = "PostgreSQL 14 or newer is needed (its programs initdb and postgres): \
    `apt-get install postgresql`, `brew install postgresql`, run the tests with `./tests/run`, which sees to it, or name \
    the folder of its programs in LOCKSTREAM_POSTGRES_BIN";

/// Whom the server runs as if we are root, for whom it does not run: the user and group `nobody`.
const NOBODY: (u32, u32) = (65_534, 65_534);

/// A server of its own on 127.0.0.1. Everybody may connect, as `postgres` without a password.
#[derive(Debug)]
pub struct PgServer {
    config: Vec<String>,
    largest_file: Option<u64>,
    port: Port,
    running: Option<Process>,
    folder: TempDir,
}

/// What a [`PgServer`] is to be like.
#[derive(Debug, Default)]
#[must_use = "a builder does nothing until it is started"]
pub struct PgServerBuilder {
    config: Vec<String>,
    has_own_identity: bool,
    /// Who else may connect, and how.
    clients: Vec<String>,
    tls: Option<Tls>,
}

impl PgServerBuilder {
    /// One more line for the configuration file.
    pub fn config(mut self, line: impl Into<String>) -> Self {
        self.config.push(line.into());
        self
    }

    /// One more line for `pg_hba.conf`, before the one that trusts everybody.
    pub fn client(mut self, line: &str) -> Self {
        self.clients.push(line.to_owned());
        self
    }

    /// It offers TLS.
    pub fn tls(mut self, tls: Tls) -> Self {
        self.tls = Some(tls);
        self
    }

    /// It is no copy of the others, which have the same system identifier. It takes a second.
    pub fn own_identity(mut self) -> Self {
        self.has_own_identity = true;
        self
    }

    /// Starts it and waits until it answers.
    pub fn start(self) -> PgServer {
        let folder = temporary_folder();
        let data = folder.path().join("data");
        if self.has_own_identity {
            init(&data);
        } else {
            copy(template(), &data);
        }
        let mut config = self.config;
        let mut write = |name: &str, setting: &str, text: &str| {
            let path = folder.path().join(name);
            fs::write(&path, text).expect("the folder is ours");
            fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).expect("it is ours");
            give_away(&path);
            config.push(format!("{setting} = '{}'", path.display()));
        };
        if let Some(tls) = &self.tls {
            write("server.crt", "ssl_cert_file", &tls.certificate);
            write("server.key", "ssl_key_file", &tls.key);
            if let Some(clients) = &tls.clients {
                write("clients.crt", "ssl_ca_file", clients);
            }
        }
        if !self.clients.is_empty() {
            let lines = self.clients.join("\n");
            let lines = format!("{lines}\nlocal all all trust\nhost all all all trust\n");
            write("hba.conf", "hba_file", &lines);
        }
        if self.tls.is_some() {
            config.push("ssl = on".to_owned());
        }
        PgServer::launch_in(folder, config)
    }
}

impl PgServer {
    pub fn builder() -> PgServerBuilder {
        PgServerBuilder::default()
    }

    pub fn start() -> Self {
        Self::builder().start()
    }

    /// A server that all tests of this program share. It is for those that do nothing to it.
    pub fn shared() -> &'static Self {
        static SHARED: OnceLock<PgServer> = OnceLock::new();
        SHARED.get_or_init(Self::start)
    }

    fn launch_in(folder: TempDir, config: Vec<String>) -> Self {
        let mut server = Self {
            config,
            largest_file: None,
            port: Port::pick(),
            running: None,
            folder,
        };
        let begin = Instant::now();
        while let Err(log) = server.launch() {
            server.assert_may_try_again(&log, begin);
            if log.contains("ddress already in use") {
                server.port = Port::pick();
            }
        }
        server
    }

    /// A copy of this server as it is now, which follows it.
    pub fn standby(&self, config: &[&str]) -> Self {
        let folder = temporary_folder();
        let data = folder.path().join("data");
        let mut backup = program("pg_basebackup");
        backup.args([
            "-h",
            "127.0.0.1",
            "-U",
            "postgres",
            "-c",
            "fast",
            "-R",
            "-p",
        ]);
        backup.arg(self.port().to_string()).arg("-D").arg(&data);
        run(backup);
        let config = config.iter().map(ToString::to_string).collect();
        Self::launch_in(folder, config)
    }

    // ---- where it is

    pub fn port(&self) -> u16 {
        self.port.number()
    }

    /// `postgres://postgres@127.0.0.1:port/postgres?sslmode=disable`
    pub fn url(&self) -> String {
        Self::url_at(self.port())
    }

    /// The same by a proxy at this port.
    pub fn url_at(port: u16) -> String {
        Self::url_of("postgres", port)
    }

    pub fn url_of(user: &str, port: u16) -> String {
        format!("postgres://{user}@127.0.0.1:{port}/postgres?sslmode=disable")
    }

    /// The url for a unix socket.
    pub fn socket_url(&self) -> String {
        let folder = self.folder.path().display().to_string().replace('/', "%2F");
        format!("postgres://postgres@{folder}:{}/postgres", self.port())
    }

    /// Its first process.
    pub fn pid(&self) -> i32 {
        self.process().pid.as_raw_pid()
    }

    /// Its first process and the children of that.
    pub fn pids(&self) -> Vec<Pid> {
        let first = self.process().pid;
        let mut pids = vec![first];
        pids.extend(children(first));
        pids
    }

    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    pub fn log(&self) -> String {
        self.process().log.text()
    }

    // ---- what may befall it

    /// SIGSTOP to all of its processes: nothing is answered.
    pub fn stop(&self) {
        self.signal_all(Signal::STOP);
    }

    /// SIGCONT, after [`PgServer::stop`].
    pub fn cont(&self) {
        self.signal_all(Signal::CONT);
    }

    /// SIGKILL to all of its processes. Its port stays this server's, and refuses connections.
    pub fn kill(&mut self) {
        self.signal_all(Signal::KILL);
        self.running = None;
    }

    /// Kills one of its processes: the server ends all the others, and recovers as from a crash.
    pub fn crash(&self) {
        // One of its own is there at any time; after a recovery others may not be, yet.
        let [mut witness, mut victim] = [self.client(), self.client()];
        let pid: i32 = victim.one("SELECT pg_backend_pid()");
        let pid = Pid::from_raw(pid).expect("a process has a number");
        kill_process(pid, Signal::KILL).expect("a process of our server");
        // Whoever comes before the server has noticed is ended with the others.
        let begin = Instant::now();
        while witness.try_rows("SELECT 1").is_ok() {
            assert!(begin.elapsed() < PATIENCE, "the server has not noticed");
            std::thread::sleep(super::LOOK_AGAIN);
        }
    }

    /// Ends it in good order; clients see a close.
    pub fn shut_down(&mut self) {
        kill_process(self.process().pid, Signal::INT).expect("our server");
        assert!(self.process().log.wait_for_end(PATIENCE), "it did not end");
        self.running = None;
    }

    /// Starts it again on the same port with its data, after killing it if it runs.
    pub fn restart(&mut self) {
        if self.running.is_some() {
            self.kill();
        }
        let begin = Instant::now();
        while let Err(log) = self.launch() {
            self.assert_may_try_again(&log, begin);
            std::thread::sleep(LOOK_AGAIN);
        }
    }

    /// From its next start on none of its files may grow beyond so many bytes.
    pub fn limit_files(&mut self, bytes: Option<u64>) {
        self.largest_file = bytes;
    }

    /// From its next start on it has this line as well.
    pub fn reconfigure(&mut self, line: &str) {
        self.config.push(line.to_owned());
    }

    /// Makes a standby take writes.
    pub fn promote(&self) {
        assert!(self.one::<bool>("SELECT pg_promote(true, 60)"));
    }

    // ---- what is in it

    /// A connection of the harness's own. A server that recovers is waited for.
    pub fn client(&self) -> PgClient {
        let begin = Instant::now();
        loop {
            match self.try_client() {
                Ok(client) => return client,
                Err(error) => {
                    let recovers = error.code() == Some(&SqlState::CANNOT_CONNECT_NOW);
                    assert!(
                        recovers && begin.elapsed() < PATIENCE,
                        "our server answers: {error:?}"
                    );
                    std::thread::sleep(LOOK_AGAIN);
                }
            }
        }
    }

    pub fn try_client(&self) -> Result<PgClient, postgres::Error> {
        let url = format!("{}&application_name=harness&connect_timeout=60", self.url());
        let client = apart(|| Client::connect(&url, NoTls))?;
        Ok(PgClient(Some(client)))
    }

    pub fn rows(&self, sql: &str) -> Vec<Row> {
        self.client().rows(sql)
    }

    /// The one value of a query.
    pub fn one<T: for<'a> postgres::types::FromSql<'a>>(&self, sql: &str) -> T {
        self.client().one(sql)
    }

    /// Any statements.
    pub fn run(&self, sql: &str) {
        self.client().run(sql);
    }

    /// Ends every connection of registries, and says how many those were.
    pub fn terminate_all(&self) -> i64 {
        self.one(
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity \
             WHERE backend_type = 'client backend' AND application_name <> 'harness'",
        )
    }

    /// A schema of a test's own in this server.
    pub fn schema(&self) -> PgSchema {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        PgSchema {
            name: format!("test_{}", NEXT.fetch_add(1, Ordering::Relaxed)),
            client: Mutex::new(self.client()),
        }
    }

    // ---- how it is done

    fn process(&self) -> &Process {
        self.running.as_ref().expect("the server runs")
    }

    /// The postmaster and its children.
    fn signal_all(&self, signal: Signal) {
        let first = self.process().pid;
        // Stopped first, it starts no new ones meanwhile.
        let _ = kill_process(
            first,
            if signal == Signal::KILL {
                Signal::STOP
            } else {
                signal
            },
        );
        for child in children(first) {
            // It may have ended since.
            let _ = kill_process(child, signal);
        }
        if signal == Signal::KILL {
            let _ = kill_process(first, signal);
        }
    }

    fn launch(&mut self) -> Result<(), String> {
        let data = self.folder.path().join("data");
        let usual = [
            "listen_addresses = '127.0.0.1'".to_owned(),
            format!("port = {}", self.port()),
            format!(
                "unix_socket_directories = '{}'",
                self.folder.path().display()
            ),
            // A write is safe from the death of a process, which is all that happens here.
            "fsync = off".to_owned(),
            "full_page_writes = off".to_owned(),
            "shared_buffers = 16MB".to_owned(),
            "max_connections = 200".to_owned(),
            "max_wal_size = 256MB".to_owned(),
            "wal_level = replica".to_owned(),
            "log_checkpoints = off".to_owned(),
            "timezone = 'UTC'".to_owned(),
        ];
        let lines: Vec<_> = usual
            .into_iter()
            .chain(self.config.iter().cloned())
            .collect();
        fs::write(data.join("lockstream.conf"), lines.join("\n")).expect("the folder is ours");
        let program = programs().join("postgres");
        let limit = match self.largest_file {
            // In blocks, as POSIX has it.
            Some(bytes) => format!("ulimit -S -f {} && ", bytes / 512),
            None => String::new(),
        };
        let script = format!("{limit}exec \"$@\"");
        let server = [
            OsStr::new("/bin/sh"),
            OsStr::new("-c"),
            OsStr::new(&script),
            OsStr::new("sh"),
            program.as_os_str(),
            OsStr::new("-D"),
            data.as_os_str(),
        ];
        let process = Process::spawn(&server, self.folder.path(), "QUIT", user());
        let begin = Instant::now();
        loop {
            if self.is_ours(&data) && self.try_client().is_ok() {
                break;
            }
            if process.log.wait_for_end(LOOK_AGAIN) {
                return Err(process.log.text());
            }
            assert!(
                begin.elapsed() < PATIENCE,
                "the server did not answer within {PATIENCE:?}:\n{}",
                process.log.text()
            );
        }
        self.running = Some(process);
        Ok(())
    }

    /// Whether it is our server that has the port: it has written so.
    fn is_ours(&self, data: &Path) -> bool {
        let written = fs::read_to_string(data.join("postmaster.pid")).unwrap_or_default();
        written
            .lines()
            .any(|line| line.trim() == "ready" || line.trim() == "standby")
    }

    fn assert_may_try_again(&self, log: &str, begin: Instant) {
        let is_passing = [
            "ddress already in use",
            "is still in use",
            "already running",
            "may still be running",
        ];
        assert!(
            is_passing.iter().any(|it| log.contains(it)) && begin.elapsed() < PATIENCE,
            "{} did not start:\n{log}",
            programs().join("postgres").display(),
        );
    }
}

impl Drop for PgServer {
    fn drop(&mut self) {
        if self.running.is_some() {
            // One that is stopped does not end.
            self.cont();
        }
    }
}

/// A connection that may be used inside and outside of runtimes: each call is on a thread of its own.
#[allow(missing_debug_implementations, reason = "a client is not for printing")]
pub struct PgClient(Option<Client>);

fn apart<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| scope.spawn(work).join().expect("it does not panic"))
}

impl PgClient {
    fn with<T: Send>(&mut self, work: impl FnOnce(&mut Client) -> T + Send) -> T {
        let client = self.0.as_mut().expect("until it is dropped");
        apart(|| work(client))
    }

    pub fn try_rows(&mut self, sql: &str) -> Result<Vec<Row>, postgres::Error> {
        self.with(|client| client.query(sql, &[]))
    }

    pub fn rows(&mut self, sql: &str) -> Vec<Row> {
        let rows = self.try_rows(sql);
        rows.unwrap_or_else(|error| panic!("{sql}: {error:?}"))
    }

    /// The one value of a query.
    pub fn one<T: for<'a> postgres::types::FromSql<'a>>(&mut self, sql: &str) -> T {
        let rows = self.rows(sql);
        rows.first()
            .unwrap_or_else(|| panic!("no row: {sql}"))
            .get(0)
    }

    pub fn try_run(&mut self, sql: &str) -> Result<(), postgres::Error> {
        self.with(|client| client.batch_execute(sql))
    }

    pub fn run(&mut self, sql: &str) {
        let run = self.try_run(sql);
        run.unwrap_or_else(|error| panic!("{sql}: {error:?}"));
    }
}

impl Drop for PgClient {
    fn drop(&mut self) {
        apart(|| drop(self.0.take()));
    }
}

/// A schema of a test's own, which is dropped with this value.
pub struct PgSchema {
    name: String,
    client: Mutex<PgClient>,
}

impl std::fmt::Debug for PgSchema {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("PgSchema").field(&self.name).finish()
    }
}

impl PgSchema {
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Runs statements in which `lockstream.` stands for this schema.
    pub fn run(&self, sql: &str) {
        self.client.lock().unwrap().run(&self.named(sql));
    }

    pub fn rows(&self, sql: &str) -> Vec<Row> {
        self.client.lock().unwrap().rows(&self.named(sql))
    }

    pub fn one<T: for<'a> postgres::types::FromSql<'a>>(&self, sql: &str) -> T {
        self.client.lock().unwrap().one(&self.named(sql))
    }

    fn named(&self, sql: &str) -> String {
        sql.replace("lockstream.", &format!("{}.", self.name))
    }
}

impl Drop for PgSchema {
    fn drop(&mut self) {
        // The server may be gone by now.
        if let Ok(client) = self.client.get_mut() {
            let _ = client.try_run(&format!("DROP SCHEMA IF EXISTS {} CASCADE", self.name));
        }
    }
}

/// Whom servers run as.
fn user() -> Option<(u32, u32)> {
    getuid().is_root().then_some(NOBODY)
}

/// A unix socket's path holds about 100 bytes, and some systems' own temporary folder nearly fills them.
fn temporary_folder() -> TempDir {
    let folder = tempfile::Builder::new()
        .prefix("lockstream-")
        .tempdir_in("/tmp")
        .expect("a folder in /tmp");
    give_away(folder.path());
    folder
}

fn give_away(path: &Path) {
    if let Some((user, group)) = user() {
        chown(path, Some(user), Some(group)).expect("root may do that");
    }
}

/// A program of PostgreSQL, run as the user of the server.
fn program(name: &str) -> Command {
    let mut command = Command::new(programs().join(name));
    if let Some((user, group)) = user() {
        command.uid(user).gid(group);
    }
    command.current_dir("/tmp").stdin(Stdio::null());
    command
}

fn run(mut command: Command) {
    let output = command.output().expect("the program runs");
    assert!(output.status.success(), "{command:?}: {output:?}");
}

/// Makes an empty database that no server runs on.
fn init(data: &Path) {
    let mut initdb = program("initdb");
    let options = "-U postgres -A trust -E UTF8 --locale=C --no-sync -D";
    initdb.args(options.split(' ')).arg(data);
    run(initdb);
    let config = data.join("postgresql.conf");
    let text = fs::read_to_string(&config).expect("initdb has made it");
    fs::write(&config, text + "\ninclude_if_exists = 'lockstream.conf'\n").expect("ours");
}

/// An empty database: made once, and copied for each server.
fn template() -> &'static Path {
    static TEMPLATE: OnceLock<PathBuf> = OnceLock::new();
    TEMPLATE.get_or_init(|| {
        // Test programs that run at once share it.
        let version = Command::new(programs().join("postgres"))
            .arg("--version")
            .output();
        let version = String::from_utf8_lossy(&version.expect("it runs").stdout)
            .trim()
            .replace(|c: char| !c.is_alphanumeric(), "-");
        let path = env::temp_dir().join(format!(
            "lockstream-template-{version}-{}",
            getuid().as_raw()
        ));
        if !path.join("done").exists() {
            let folder = temporary_folder();
            let data = folder.path().join("data");
            init(&data);
            fs::write(data.join("done"), "").expect("ours");
            // Whoever is first makes it; the others are as good.
            if fs::rename(&data, &path).is_err() {
                assert!(
                    path.join("done").exists(),
                    "{} cannot be made",
                    path.display()
                );
            }
        }
        path
    })
}

fn copy(from: &Path, to: &Path) {
    let mut copy = Command::new("/bin/cp");
    if let Some((user, group)) = user() {
        copy.uid(user).gid(group);
    }
    copy.arg("-R").arg(from).arg(to);
    run(copy);
    let mode = fs::Permissions::from_mode(0o700);
    fs::set_permissions(to, mode).expect("the folder is ours");
    fs::remove_file(to.join("done")).expect("it was in the template");
}

fn children(parent: Pid) -> Vec<Pid> {
    let listed = Command::new("ps")
        .args(["-A", "-o", "pid=,ppid="])
        .output()
        .expect("there is ps");
    let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
    let rows = listed.lines().filter_map(|line| {
        let mut numbers = line
            .split_whitespace()
            .map(|number| number.parse::<i32>().ok());
        Some((numbers.next()??, numbers.next()??))
    });
    rows.filter(|(_, of)| *of == parent.as_raw_pid())
        .filter_map(|(pid, _)| Pid::from_raw(pid))
        .collect()
}

/// The folder of the programs.
pub(super) fn programs() -> &'static Path {
    static PROGRAMS: OnceLock<PathBuf> = OnceLock::new();
    PROGRAMS.get_or_init(|| find_programs().unwrap_or_else(|missing| panic!("{missing}")))
}

/// The one that is named, else that on the path, else where systems put it. Or what to do, if there is none.
pub fn find_programs() -> Result<PathBuf, String> {
    let has_all = |folder: &PathBuf| {
        ["initdb", "postgres"]
            .iter()
            .all(|name| folder.join(name).exists())
    };
    if let Some(named) = env::var_os("LOCKSTREAM_POSTGRES_BIN").filter(|named| !named.is_empty()) {
        let named = PathBuf::from(named);
        let shown = named.display();
        let lacks = format!("LOCKSTREAM_POSTGRES_BIN is {shown}, which lacks them; {REMEDY}");
        return has_all(&named).then_some(named).ok_or(lacks);
    }
    let path = env::var_os("PATH").unwrap_or_default();
    let on_path: Vec<_> = env::split_paths(&path).collect();
    let this = env::current_exe().expect("the system knows what it runs");
    let installed = this
        .ancestors()
        .map(|folder| folder.join("servers/POSTGRES/bin"));
    let folders = on_path
        .into_iter()
        .chain(in_usual_places())
        .chain(installed);
    // A link on the path leads to the folder of the other programs.
    let real = |folder: PathBuf| {
        let program = fs::canonicalize(folder.join("postgres")).ok()?;
        Some(program.parent()?.to_owned())
    };
    let mut found = folders.filter_map(real).filter(has_all);
    found
        .next()
        .ok_or_else(|| format!("no PostgreSQL here; {REMEDY}"))
}

/// `/usr/lib/postgresql/15/bin` and the like, the newest first.
fn in_usual_places() -> Vec<PathBuf> {
    let places = ["/usr/lib/postgresql", "/opt/homebrew/opt", "/usr/local/opt"];
    let mut found: Vec<_> = places
        .iter()
        .filter_map(|place| fs::read_dir(place).ok())
        .flat_map(|entries| entries.filter_map(Result::ok))
        .map(|entry| entry.path().join("bin"))
        .filter(|folder| folder.join("initdb").exists())
        .collect();
    found.sort();
    found.reverse();
    found
}

/// PgBouncer before a server.
#[derive(Debug)]
pub struct PgBouncer {
    port: Port,
    process: Process,
    _folder: TempDir,
}

impl PgBouncer {
    /// In transaction mode, with so many connections to the server.
    pub fn to(server: &PgServer, connections: usize) -> Self {
        Self::as_user(server, connections, "postgres")
    }

    /// The same, and whoever comes is this role there.
    pub fn as_user(server: &PgServer, connections: usize, role: &str) -> Self {
        Self::in_mode(server, connections, role, "transaction")
    }

    /// The same in any mode.
    pub fn in_mode(server: &PgServer, connections: usize, role: &str, mode: &str) -> Self {
        let program = env::var_os("LOCKSTREAM_PGBOUNCER").map(PathBuf::from);
        let path = env::var_os("PATH").unwrap_or_default();
        let usual = [
            PathBuf::from("/usr/sbin"),
            PathBuf::from("/opt/homebrew/bin"),
        ];
        let mut places = env::split_paths(&path)
            .chain(usual)
            .map(|folder| folder.join("pgbouncer"));
        let program = program.or_else(|| places.find(|place| place.exists()));
        let program = program.expect(
            "this test needs PgBouncer: `apt-get install pgbouncer`, `brew install pgbouncer`, run the tests with \
             `./tests/run`, which sees to it, or name the program in LOCKSTREAM_PGBOUNCER",
        );
        let (folder, port) = (temporary_folder(), Port::pick());
        let config = folder.path().join("pgbouncer.ini");
        let lines = format!(
            "[databases]\npostgres = host=127.0.0.1 port={}\n[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {}\n\
             unix_socket_dir =\nauth_type = any\nmax_client_conn = 200\ndefault_pool_size = {connections}\n\
             pool_mode = {mode}\nserver_fast_close = 1\n",
            server.port(),
            port.number()
        );
        // `any` takes everybody as the user of the database.
        let lines = lines.replace("postgres = host", &format!("postgres = user={role} host"));
        fs::write(&config, lines).expect("the folder is ours");
        give_away(&config);
        let words = [program.as_os_str(), config.as_os_str()];
        let process = Process::spawn(&words, folder.path(), "INT", user());
        let begin = Instant::now();
        while std::net::TcpStream::connect(("127.0.0.1", port.number())).is_err() {
            assert!(
                begin.elapsed() < PATIENCE,
                "no pooler: {}",
                process.log.text()
            );
            std::thread::sleep(super::LOOK_AGAIN);
        }
        Self {
            port,
            process,
            _folder: folder,
        }
    }

    pub fn port(&self) -> u16 {
        self.port.number()
    }

    pub fn log(&self) -> String {
        self.process.log.text()
    }

    pub fn url(&self) -> String {
        PgServer::url_at(self.port.number())
    }
}
