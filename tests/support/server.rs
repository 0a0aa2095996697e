//! A real server for one test, gone when the test is, however it ends.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use redis::{Connection, FromRedisValue, RedisError, RedisResult, Value};
use rustix::process::Signal;
use tempfile::TempDir;

use super::keeper::Process;
use super::ports::Port;
use super::process::wait_until_stopped;
use super::program::Program;
use super::shown::Tls;
use super::{PATIENCE, within};

/// The user that the harness looks in as: whatever a test does to the default user, the harness may do everything.
const HARNESS: &str = "harness";

/// A server of the test's own on 127.0.0.1 and on a unix socket.
#[derive(Debug)]
pub struct RedisServer {
    kind: Program,
    program: PathBuf,
    config: Vec<String>,
    tls: Option<Tls>,
    port: Port,
    running: Option<Process>,
    looker: Mutex<Looker>,
    folder: TempDir,
}

/// What a [`RedisServer`] is to be like.
#[derive(Debug, Default)]
#[must_use = "a builder does nothing until it is started"]
pub struct RedisServerBuilder {
    program: Program,
    config: Vec<String>,
    tls: Option<Tls>,
}

impl RedisServerBuilder {
    /// Runs this program instead of the usual one.
    pub fn program(mut self, program: Program) -> Self {
        self.program = program;
        self
    }

    /// Data outlives `kill` and `restart`: every write is in the append-only file before its reply is sent.
    pub fn keep_data(self) -> Self {
        // `appendfsync no`: a write is safe from the death of the process, which is all that happens here, and unlike
        // with `everysec` never waits for a sync under way.
        self.config("appendonly yes").config("appendfsync no")
    }

    /// One more line for the configuration file: `requirepass …`, `user …`, `maxmemory …`.
    pub fn config(mut self, line: impl Into<String>) -> Self {
        self.config.push(line.into());
        self
    }

    /// Its port speaks TLS, and nothing else.
    pub fn tls(mut self, tls: Tls) -> Self {
        self.tls = Some(tls);
        self
    }

    /// Starts it and waits until it answers.
    pub fn start(self) -> RedisServer {
        let program = self.program.find();
        // A unix socket's path holds about 100 bytes, and some systems' own temporary folder nearly fills them.
        let folder = tempfile::Builder::new()
            .prefix("lockstream-")
            .tempdir_in("/tmp")
            .expect("a folder in /tmp");
        let mut server = RedisServer {
            kind: self.program,
            program,
            config: self.config,
            tls: self.tls,
            port: Port::pick(),
            running: None,
            looker: Mutex::default(),
            folder,
        };
        let begin = Instant::now();
        while let Err(log) = server.launch() {
            server.assert_port_was_taken(&log, begin);
            server.port = Port::pick();
        }
        let info: String = server.ask(&["INFO", "server"]);
        server.kind.assert_is(&info, &server.program);
        server
    }
}

impl RedisServer {
    /// An empty server that keeps nothing on disk.
    pub fn start() -> Self {
        Self::builder().start()
    }

    pub fn builder() -> RedisServerBuilder {
        RedisServerBuilder::default()
    }

    // ---- where it is

    pub fn port(&self) -> u16 {
        self.port.number()
    }

    /// `redis://127.0.0.1:port/`
    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}/", self.port())
    }

    /// `redis://user:password@127.0.0.1:port/db`, with nothing escaped; an empty user is the default user.
    pub fn url_with(&self, user: &str, password: &str, db: u32) -> String {
        format!("redis://{user}:{password}@127.0.0.1:{}/{db}", self.port())
    }

    /// `rediss://host:port/`, for a server that was built with [`RedisServerBuilder::tls`].
    pub fn tls_url(&self, host: &str) -> String {
        format!("rediss://{host}:{}/", self.port())
    }

    /// `unix:///path`; append `?db=…&user=…&pass=…` as needed.
    pub fn unix_url(&self) -> String {
        format!("unix://{}", self.socket().display())
    }

    /// The server's own pid, for signals.
    pub fn pid(&self) -> u32 {
        self.process().pid.as_raw_pid() as u32
    }

    /// Where its configuration and data are.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Everything that the server has logged since it was last started.
    pub fn log(&self) -> String {
        self.process().log.text()
    }

    // ---- what may befall it

    /// SIGSTOP: the process lives, its sockets stay open, nothing is answered. Returns when it has stopped.
    pub fn stop(&self) {
        self.signal(Signal::STOP);
        wait_until_stopped(self.process().pid);
    }

    /// SIGCONT, after [`RedisServer::stop`].
    pub fn cont(&self) {
        self.signal(Signal::CONT);
    }

    /// SIGKILL. Returns when the process is gone; its port stays this server's, and refuses connections.
    pub fn kill(&mut self) {
        self.looker().connection = None;
        self.running = None;
    }

    /// Starts it again on the same port and in the same folder, after killing it if it runs: with its data if it was
    /// built to keep them, empty if not. Returns when it answers.
    pub fn restart(&mut self) {
        self.kill();
        let begin = Instant::now();
        while let Err(log) = self.launch() {
            self.assert_port_was_taken(&log, begin);
            std::thread::sleep(super::LOOK_AGAIN);
        }
    }

    /// Shows another certificate to whoever connects from now on.
    pub fn show(&self, certificate: &str, key: &str) {
        let (certificate, key) = self.write_identity(certificate, key);
        self.cmd(&[
            "CONFIG",
            "SET",
            "tls-cert-file",
            &certificate,
            "tls-key-file",
            &key,
        ]);
    }

    /// `SHUTDOWN NOSAVE`: an orderly end, which clients see as a close. Returns when the process is gone.
    pub fn shutdown_nosave(&mut self) {
        // No answer comes: the connection ends with the server.
        let _ = self.try_cmd(&["SHUTDOWN", "NOSAVE"]);
        assert!(
            self.process().log.wait_for_end(PATIENCE),
            "the server did not shut down within {PATIENCE:?}"
        );
        self.kill();
    }

    /// From its next start on it has this line instead of all lines that begin with the same word; `None`: none of them.
    pub fn reconfigure(&mut self, word: &str, line: Option<String>) {
        self.config
            .retain(|old| old.split(' ').next() != Some(word));
        self.config.extend(line);
    }

    // ---- what is in it, seen on a connection of the harness's own

    /// For a connection besides the one that is used here, as the same user.
    pub fn harness_url(&self) -> String {
        format!("{}?user={HARNESS}&pass={HARNESS}", self.unix_url())
    }

    /// Sends one command and gives its reply. Blocks for a moment, and panics if the server errs or does not answer.
    pub fn cmd(&self, args: &[&str]) -> Value {
        self.try_cmd(args)
            .unwrap_or_else(|error| panic!("{}: {error}", args.join(" ")))
    }

    /// [`RedisServer::cmd`] for commands that may err.
    pub fn try_cmd(&self, args: &[&str]) -> RedisResult<Value> {
        let mut looker = self.looker();
        let connection = match looker.connection.take() {
            Some(connection) => connection,
            None => self.connect()?,
        };
        looker.send(connection, args)
    }

    /// [`RedisServer::cmd`], with its reply as any type that the client library can make of it.
    pub fn ask<T: FromRedisValue>(&self, args: &[&str]) -> T {
        redis::from_redis_value(self.cmd(args))
            .unwrap_or_else(|error| panic!("{}: {error}", args.join(" ")))
    }

    pub fn get(&self, key: &str) -> Option<String> {
        self.ask(&["GET", key])
    }

    pub fn set(&self, key: &str, value: &str) {
        self.cmd(&["SET", key, value]);
    }

    /// Whether there was something to delete.
    pub fn del(&self, key: &str) -> bool {
        self.ask(&["DEL", key])
    }

    pub fn exists(&self, key: &str) -> bool {
        self.ask(&["EXISTS", key])
    }

    /// In milliseconds; -1 when the key has no expiry, -2 when there is no such key.
    pub fn pttl(&self, key: &str) -> i64 {
        self.ask(&["PTTL", key])
    }

    /// Sorted.
    pub fn keys(&self, pattern: &str) -> Vec<String> {
        let mut keys: Vec<String> = self.ask(&["KEYS", pattern]);
        keys.sort();
        keys
    }

    pub fn flushall(&self) {
        self.cmd(&["FLUSHALL"]);
    }

    pub fn script_flush(&self) {
        self.cmd(&["SCRIPT", "FLUSH"]);
    }

    /// Ends every connection but the harness's, and says how many those were.
    pub fn client_kill_all(&self) -> u64 {
        ["normal", "pubsub"]
            .into_iter()
            .map(|kind| self.ask::<u64>(&["CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes"]))
            .sum()
    }

    /// Every connection but the harness's.
    pub fn clients(&self) -> Vec<ClientRow> {
        let list: String = self.ask(&["CLIENT", "LIST"]);
        list.lines()
            .map(ClientRow::parse)
            .filter(|client| client.field("user") != HARNESS)
            .collect()
    }

    /// Channels with a subscriber, sorted. Patterns and sharded channels are not among them.
    pub fn channels(&self) -> Vec<String> {
        let mut channels: Vec<String> = self.ask(&["PUBSUB", "CHANNELS"]);
        channels.sort();
        channels
    }

    pub fn subscribers(&self, channel: &str) -> u64 {
        let (_, count): (String, u64) = self.ask(&["PUBSUB", "NUMSUB", channel]);
        count
    }

    /// How often a command ran since the start or the last [`RedisServer::reset_stats`], in any letter case, with all its
    /// subcommands or one of them (`"client|kill"`). Commands inside scripts count; the harness's own do not.
    pub fn calls(&self, command: &str) -> u64 {
        let command = command.to_ascii_lowercase();
        self.all_calls()
            .into_iter()
            .filter(|(name, _)| {
                name.strip_prefix(&command)
                    .is_some_and(|rest| rest.is_empty() || rest.starts_with('|'))
            })
            .map(|(_, calls)| calls)
            .sum()
    }

    /// [`RedisServer::calls`] of every command that was called at all.
    pub fn all_calls(&self) -> BTreeMap<String, u64> {
        let stats: String = self.ask(&["INFO", "commandstats"]);
        let looker = self.looker();
        stats
            .lines()
            .filter_map(|line| {
                let (name, stat) = line.strip_prefix("cmdstat_")?.split_once(":calls=")?;
                let calls: u64 = stat.split(',').next()?.parse().ok()?;
                // This INFO is among the harness's calls already, but was not yet among the server's.
                let calls = calls.saturating_sub(looker.calls.get(name).copied().unwrap_or(0));
                (calls > 0).then(|| (name.to_owned(), calls))
            })
            .collect()
    }

    pub fn reset_stats(&self) {
        self.cmd(&["CONFIG", "RESETSTAT"]);
    }

    // ---- how it is done

    /// Writes both to files, and gives their paths.
    fn write_identity(&self, certificate: &str, key: &str) -> (String, String) {
        let write = |name: &str, text: &str| {
            let path = self.folder.path().join(name);
            fs::write(&path, text).expect("the folder is ours");
            path.display().to_string()
        };
        (write("cert.pem", certificate), write("key.pem", key))
    }

    /// The lines of the configuration that say where it listens.
    fn ports(&self) -> String {
        let Some(tls) = &self.tls else {
            return format!("port {}\n", self.port());
        };
        let (certificate, key) = self.write_identity(&tls.certificate, &tls.key);
        let clients = tls.clients.as_ref().map_or_else(
            || "tls-auth-clients no\n".to_owned(),
            |authority| {
                let path = self.folder.path().join("clients.pem");
                fs::write(&path, authority).expect("the folder is ours");
                format!(
                    "tls-auth-clients yes\ntls-ca-cert-file {}\n",
                    path.display()
                )
            },
        );
        format!(
            "port 0\ntls-port {}\ntls-cert-file {certificate}\ntls-key-file {key}\n{clients}",
            self.port()
        )
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("sock")
    }

    fn process(&self) -> &Process {
        self.running.as_ref().expect("the server runs")
    }

    fn looker(&self) -> MutexGuard<'_, Looker> {
        // A test that panicked while it looked must still be able to clean up.
        self.looker.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn signal(&self, signal: Signal) {
        rustix::process::kill_process(self.process().pid, signal)
            .expect("the server is a child of its keeper until that ends");
    }

    /// Runs the server until it answers, or gives its log if it ends instead.
    fn launch(&mut self) -> Result<(), String> {
        let file = self.folder.path().join("conf");
        let mut config = format!(
            "bind 127.0.0.1\n{}unixsocket {}\ndir {}\n\
             daemonize no\nsave \"\"\nappendonly no\n\
             user {HARNESS} on >{HARNESS} ~* &* +@all\n",
            self.ports(),
            self.socket().display(),
            self.folder.path().display(),
        );
        if self.kind != Program::Redis6 {
            // Before there was such a word everybody might.
            config.push_str("enable-debug-command yes\n");
        }
        for line in &self.config {
            config.push_str(line);
            config.push('\n');
        }
        fs::write(&file, config).expect("the folder is ours");
        let process = Process::spawn(
            &[self.program.as_os_str(), file.as_os_str()],
            self.folder.path(),
            "KILL",
            None,
        );

        let begin = Instant::now();
        // Only our own server listens on the unix socket, while on the port someone else's may answer.
        let connection = loop {
            let error = match self.connect() {
                Ok(connection) => break connection,
                Err(error) => error,
            };
            if process.log.wait_for_end(super::LOOK_AGAIN) {
                return Err(process.log.text());
            }
            // One that reads its data again is there.
            let patience = match error.to_string().contains("loading") {
                true => 6 * PATIENCE,
                false => PATIENCE,
            };
            assert!(
                begin.elapsed() < patience,
                "the server did not answer within {patience:?}: {error}\n{}",
                process.log.text()
            );
        };
        self.running = Some(process);
        let mut looker = self.looker();
        // The handshake above, and the commands replayed from disk, are nobody's calls.
        let reset = looker.send(connection, &["CONFIG", "RESETSTAT"]);
        reset.map(drop).unwrap();
        drop(looker);
        Ok(())
    }

    fn assert_port_was_taken(&self, log: &str, begin: Instant) {
        assert!(
            log.contains("ddress already in use") && begin.elapsed() < PATIENCE,
            "{} did not start{}:\n{log}",
            self.program.display(),
            if log.contains("tls-") {
                " (this test needs one that speaks TLS, as Debian's and brew's redis-server do)"
            } else {
                ""
            }
        );
    }

    fn connect(&self) -> RedisResult<Connection> {
        let client = redis::Client::open(self.harness_url())?;
        within(PATIENCE, move || {
            let mut connection = client.get_connection()?;
            // Answers with an error while the server still loads its data.
            redis::cmd("PING").exec(&mut connection)?;
            Ok(connection)
        })
    }
}

/// The harness's own connection, and how often it called what, so that it does not count itself.
#[derive(Default)]
struct Looker {
    connection: Option<Connection>,
    calls: BTreeMap<String, u64>,
}

impl Looker {
    fn send(&mut self, mut connection: Connection, args: &[&str]) -> RedisResult<Value> {
        let mut command = redis::Cmd::new();
        for arg in args {
            command.arg(*arg);
        }
        let (connection, reply) = within(PATIENCE, move || {
            let reply = command.query::<Value>(&mut connection);
            Ok((connection, reply))
        })?;
        if reply.as_ref().is_err_and(RedisError::is_io_error) {
            return reply;
        }
        self.connection = Some(connection);
        let name = args[0].to_ascii_lowercase();
        if let Some(sub) = args.get(1) {
            let sub = sub.to_ascii_lowercase();
            if (name.as_str(), sub.as_str()) == ("config", "resetstat") {
                self.calls.clear();
            }
            *self.calls.entry(format!("{name}|{sub}")).or_default() += 1;
        }
        *self.calls.entry(name).or_default() += 1;
        reply
    }
}

impl std::fmt::Debug for Looker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Looker").finish_non_exhaustive()
    }
}

/// One connection as the server sees it: a line of `CLIENT LIST`.
#[derive(Clone, Debug)]
pub struct ClientRow(BTreeMap<String, String>);

impl ClientRow {
    fn parse(line: &str) -> Self {
        let fields = line.split(' ').filter_map(|field| field.split_once('='));
        Self(fields.map(|(k, v)| (k.to_owned(), v.to_owned())).collect())
    }

    /// Any field by the server's own name for it; empty if there is none.
    pub fn field(&self, name: &str) -> &str {
        self.0.get(name).map_or("", String::as_str)
    }

    pub fn id(&self) -> u64 {
        self.number("id")
    }

    pub fn name(&self) -> &str {
        self.field("name")
    }

    /// The command that it sent last.
    pub fn last_command(&self) -> &str {
        self.field("cmd")
    }

    /// Channels, patterns and sharded channels together.
    pub fn subscriptions(&self) -> u64 {
        self.number("sub") + self.number("psub") + self.number("ssub")
    }

    fn number(&self, name: &str) -> u64 {
        self.field(name).parse().unwrap_or(0)
    }
}
