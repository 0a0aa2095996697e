//! A primary with two replicas, and three sentinels that watch over them.

use std::fs;
use std::os::unix::fs::symlink;
use std::time::{Duration, Instant};

use redis::{Connection, FromRedisValue, Value};
use rustix::process::Signal;
use tempfile::TempDir;

use super::keeper::Process;
use super::ports::Port;
use super::process::wait_until_stopped;
use super::program::Program;
use super::server::RedisServer;
use super::wait_until_blocking;

/// How long it may take until all know each other, and a fail-over.
pub const FAIL_OVER: Duration = Duration::from_secs(30);

/// How long a server may be silent until a sentinel takes it for dead. Less, and a busy machine looks like a dead one.
const DOWN_AFTER_MS: u64 = 1_500;

/// Three servers of which one is the primary, under the eyes of three sentinels.
#[derive(Debug)]
pub struct Watched {
    pub servers: Vec<RedisServer>,
    pub sentinels: Vec<Sentinel>,
    passwords: Option<Passwords>,
}

/// What is wanted from clients.
#[derive(Clone, Copy, Debug)]
pub struct Passwords {
    pub server: &'static str,
    pub sentinel: &'static str,
}

impl Watched {
    pub const SERVICE: &'static str = "mine";

    /// Starts all, and waits until they know each other.
    pub fn start() -> Self {
        Self::start_with(None)
    }

    pub fn start_with(passwords: Option<Passwords>) -> Self {
        let server = |primary: Option<u16>| {
            let mut server = RedisServer::builder()
                // The first replica to come would else wait for others.
                .config("repl-diskless-sync-delay 0")
                // A replica sees early that its primary has gone.
                .config("repl-ping-replica-period 1");
            if let Some(Passwords { server: secret, .. }) = passwords {
                server = server
                    .config(format!("requirepass {secret}"))
                    .config(format!("masterauth {secret}"));
            }
            if let Some(port) = primary {
                server = server.config(format!("replicaof 127.0.0.1 {port}"));
            }
            server.start()
        };
        let primary = server(None);
        let port = primary.port();
        let servers = vec![primary, server(Some(port)), server(Some(port))];
        let sentinels = (0..3).map(|_| Sentinel::start(port, passwords)).collect();
        let watched = Self {
            servers,
            sentinels,
            passwords,
        };
        watched.wait_until_known();
        watched
    }

    /// `redis+sentinel://…` of all three.
    pub fn url(&self) -> String {
        let ports: Vec<_> = self.sentinels.iter().map(Sentinel::port).collect();
        let hosts: Vec<_> = ports.iter().map(|it| format!("127.0.0.1:{it}")).collect();
        let hosts = hosts.join(",");
        let service = Self::SERVICE;
        match self.passwords {
            None => format!("redis+sentinel://{hosts}/{service}"),
            Some(Passwords { server, sentinel }) => format!(
                "redis+sentinel://:{server}@{hosts}/{service}/0?sentinel_password={sentinel}"
            ),
        }
    }

    /// Which of the servers the sentinels take for the primary.
    pub fn primary_index(&self) -> usize {
        let port = self.sentinels[0].primary();
        let index = self.servers.iter().position(|it| it.port() == port);
        index.expect("it is one of them")
    }

    pub fn primary(&self) -> &RedisServer {
        &self.servers[self.primary_index()]
    }

    /// Kills the primary, and says which it was. Nobody waits for the fail-over here.
    pub fn kill_primary(&mut self) -> usize {
        let index = self.primary_index();
        self.servers[index].kill();
        index
    }

    /// Has the sentinels promote another, while all live. Returns when it is done, with who it was.
    pub fn fail_over(&self) -> usize {
        let old = self.begin_fail_over();
        self.wait_until_promoted(old);
        old
    }

    /// The same, but it is under way when this returns.
    pub fn begin_fail_over(&self) -> usize {
        let old = self.primary_index();
        // "-NOGOODSLAVE", "-INPROG": not yet.
        wait_until_blocking("a fail-over can be begun", FAIL_OVER, || {
            let told = self.sentinels[0].try_cmd(&["SENTINEL", "FAILOVER", Self::SERVICE]);
            told.is_ok_and(|told| told == Value::Okay)
        });
        old
    }

    /// Until another than this is the primary, for all sentinels and for itself.
    pub fn wait_until_promoted(&self, old: usize) {
        let old = self.servers[old].port();
        wait_until_blocking("another is the primary", FAIL_OVER, || {
            let now = self.sentinels[0].primary();
            now != old
                && self.sentinels.iter().all(|it| it.primary() == now)
                && self.servers[self.primary_index()].role() == "master"
        });
    }

    /// Starts a server again that was killed, as a replica of who is the primary now.
    pub fn rejoin(&mut self, index: usize) {
        self.servers[index].restart();
        self.demote(index);
    }

    /// Makes a server a replica of who is the primary now. Sentinels do that too, ten seconds later.
    pub fn demote(&self, index: usize) {
        let primary = self.primary().port().to_string();
        // Whoever changed roles may have ended the harness's connection.
        self.servers[index].role();
        self.servers[index].cmd(&["REPLICAOF", "127.0.0.1", &primary]);
    }

    /// Until the primary has two replicas, whatever else goes on.
    pub fn wait_until_whole(&self) {
        wait_until_blocking("there are two replicas", FAIL_OVER, || {
            // Whoever changed roles has ended all connections.
            let roles: Vec<_> = self.servers.iter().map(RedisServer::role).collect();
            let info: String = self.primary().ask(&["INFO", "replication"]);
            roles.iter().filter(|role| *role == "slave").count() == 2
                && info.matches("state=online").count() == 2
        });
    }

    /// Until two replicas have all that the primary has.
    pub fn wait_until_replicated(&self) {
        let primary = self.primary();
        wait_until_blocking("the replicas have it all", FAIL_OVER, || {
            let info: String = primary.ask(&["INFO", "replication"]);
            let field = |name: &str| {
                let line = info.lines().find_map(|line| line.strip_prefix(name));
                line.unwrap_or_default().to_owned()
            };
            let offset = field("master_repl_offset:");
            (0..2).all(|index| {
                let replica = field(&format!("slave{index}:"));
                replica.contains("state=online") && replica.contains(&format!("offset={offset},"))
            })
        });
    }

    fn wait_until_known(&self) {
        wait_until_blocking("sentinels and replicas know each other", FAIL_OVER, || {
            self.sentinels.iter().all(Sentinel::knows_all)
        });
        self.wait_until_replicated();
    }
}

impl RedisServer {
    /// `master` or `slave`. Whoever changes it ends all connections, the harness's too, which is made again here.
    pub fn role(&self) -> String {
        let told = self.try_cmd(&["ROLE"]);
        let told = told.unwrap_or_else(|_| self.cmd(&["ROLE"]));
        let Value::Array(told) = told else {
            panic!("a role is an array");
        };
        redis::from_redis_value(told[0].clone()).expect("its first part is a word")
    }
}

/// One sentinel, gone when this is dropped.
#[derive(Debug)]
pub struct Sentinel {
    port: Port,
    process: Process,
    password: Option<&'static str>,
    _folder: TempDir,
}

impl Sentinel {
    fn start(primary: u16, passwords: Option<Passwords>) -> Self {
        let program = Program::Usual.find();
        let begin = Instant::now();
        loop {
            let folder = tempfile::Builder::new()
                .prefix("lockstream-")
                .tempdir_in("/tmp")
                .expect("a folder in /tmp");
            // A server of this name is a sentinel.
            let name = folder.path().join("redis-sentinel");
            symlink(&program, &name).expect("the folder is ours");
            let port = Port::pick();
            let service = Watched::SERVICE;
            let mut config = format!(
                "bind 127.0.0.1\nport {}\ndir {}\ndaemonize no\n\
                 sentinel monitor {service} 127.0.0.1 {primary} 2\n\
                 sentinel down-after-milliseconds {service} {DOWN_AFTER_MS}\n\
                 sentinel failover-timeout {service} 3000\n\
                 sentinel parallel-syncs {service} 2\n",
                port.number(),
                folder.path().display(),
            );
            if let Some(Passwords { server, sentinel }) = passwords {
                config += &format!(
                    "requirepass {sentinel}\nsentinel auth-pass {service} {server}\n\
                     sentinel sentinel-pass {sentinel}\n"
                );
            }
            let file = folder.path().join("conf");
            fs::write(&file, config).expect("the folder is ours");
            let process = Process::spawn(&name, &file, folder.path());
            let sentinel = Self {
                port,
                process,
                password: passwords.map(|it| it.sentinel),
                _folder: folder,
            };
            while !sentinel.process.log.wait_for_end(super::LOOK_AGAIN) {
                assert!(
                    begin.elapsed() < FAIL_OVER,
                    "the sentinel does not answer:\n{}",
                    sentinel.process.log.text()
                );
                if sentinel.try_cmd(&["PING"]).is_ok() {
                    return sentinel;
                }
            }
            let log = sentinel.process.log.text();
            assert!(log.contains("ddress already in use"), "{log}");
        }
    }

    pub fn port(&self) -> u16 {
        self.port.number()
    }

    /// SIGSTOP: it lives, and says nothing.
    pub fn stop(&self) {
        self.signal(Signal::STOP);
        wait_until_stopped(self.process.pid);
    }

    /// SIGCONT, after [`Sentinel::stop`].
    pub fn cont(&self) {
        self.signal(Signal::CONT);
    }

    pub fn log(&self) -> String {
        self.process.log.text()
    }

    /// The port of the primary, as it knows it.
    pub fn primary(&self) -> u16 {
        let (_, port): (String, u16) =
            self.ask(&["SENTINEL", "GET-MASTER-ADDR-BY-NAME", Watched::SERVICE]);
        port
    }

    fn knows_all(&self) -> bool {
        let told: std::collections::HashMap<String, String> =
            self.ask(&["SENTINEL", "MASTER", Watched::SERVICE]);
        told["num-slaves"] == "2" && told["num-other-sentinels"] == "2" && told["flags"] == "master"
    }

    fn ask<T: FromRedisValue>(&self, args: &[&str]) -> T {
        let told = self.try_cmd(args);
        let told = told.unwrap_or_else(|error| panic!("{}: {error}", args.join(" ")));
        redis::from_redis_value(told).unwrap_or_else(|error| panic!("{}: {error}", args.join(" ")))
    }

    pub fn try_cmd(&self, args: &[&str]) -> redis::RedisResult<Value> {
        let secret = self.password.map(|it| format!(":{it}@"));
        let secret = secret.unwrap_or_default();
        let url = format!("redis://{secret}127.0.0.1:{}/", self.port());
        let patience = Duration::from_secs(5);
        let mut connection: Connection =
            redis::Client::open(url)?.get_connection_with_timeout(patience)?;
        connection.set_read_timeout(Some(patience))?;
        let mut command = redis::Cmd::new();
        for arg in args {
            command.arg(*arg);
        }
        command.query(&mut connection)
    }

    fn signal(&self, signal: Signal) {
        rustix::process::kill_process(self.process.pid, signal)
            .expect("it is a child of its keeper until that ends");
    }
}
