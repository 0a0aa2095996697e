//! A primary with two replicas, and three sentinels that watch over them.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::time::{Duration, Instant};

use redis::{FromRedisValue, Value};
use rustix::process::Signal;
use tempfile::TempDir;

use super::keeper::Process;
use super::ports::Port;
use super::process::wait_until_stopped;
use super::program::Program;
use super::server::RedisServer;
use super::shown::Tls;
use super::wait_until_blocking;

/// How long it may take until all know each other, and a fail-over: a question that is missed costs ten seconds, and a
/// sentinel that stood still does nothing for thirty.
pub const FAIL_OVER: Duration = Duration::from_secs(90);

/// How long a server may be silent until a sentinel takes it for dead. Less, and a busy machine looks like a dead one.
const DOWN_AFTER_MS: u64 = 1_500;

/// The same where none is taken for dead because the machine stood still.
const NEVER_DOWN_MS: u64 = 60_000;

/// Three servers of which one is the primary, under the eyes of three sentinels.
#[derive(Debug)]
pub struct Watched {
    pub servers: Vec<RedisServer>,
    pub sentinels: Vec<Sentinel>,
    passwords: Option<Passwords>,
    is_tls: bool,
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

    /// The same, and no primary is replaced unless the sentinels are told to.
    pub fn lasting() -> Self {
        Self::start_as(None, None, &[], NEVER_DOWN_MS)
    }

    /// The servers keep their data when they are killed.
    pub fn keeping_data() -> Self {
        // As `RedisServerBuilder::keep_data` has it.
        let config = ["appendonly yes", "appendfsync no"];
        Self::start_as(None, None, &config, DOWN_AFTER_MS)
    }

    pub fn start_with(passwords: Option<Passwords>) -> Self {
        Self::start_as(passwords, None, &[], DOWN_AFTER_MS)
    }

    /// All of them speak TLS to each other and to clients, and show this.
    pub fn start_over_tls(tls: &Tls) -> Self {
        Self::start_as(None, Some(tls), &[], DOWN_AFTER_MS)
    }

    fn start_as(
        passwords: Option<Passwords>,
        tls: Option<&Tls>,
        config: &[&str],
        down_after_ms: u64,
    ) -> Self {
        let server = |primary: Option<u16>| {
            let mut server = RedisServer::builder()
                // The first replica to come would else wait for others.
                .config("repl-diskless-sync-delay 0")
                // A replica sees early that its primary has gone.
                .config("repl-ping-replica-period 1");
            for line in config {
                server = server.config(*line);
            }
            if let Some(Passwords { server: secret, .. }) = passwords {
                server = server
                    .config(format!("requirepass {secret}"))
                    .config(format!("masterauth {secret}"));
            }
            if let Some(tls) = tls {
                server = server.tls(tls.clone()).config("tls-replication yes");
            }
            if let Some(port) = primary {
                server = server.config(format!("replicaof 127.0.0.1 {port}"));
            }
            server.start()
        };
        let primary = server(None);
        let port = primary.port();
        let servers = vec![primary, server(Some(port)), server(Some(port))];
        let start = |_| Sentinel::start(port, passwords, tls, down_after_ms);
        let sentinels = (0..3).map(start).collect();
        let watched = Self {
            servers,
            sentinels,
            passwords,
            is_tls: tls.is_some(),
        };
        watched.wait_until_known();
        watched
    }

    /// `redis+sentinel://…` of all three, or `rediss+sentinel://…`.
    pub fn url(&self) -> String {
        let ports: Vec<_> = self.sentinels.iter().map(Sentinel::port).collect();
        let scheme = if self.is_tls { "rediss" } else { "redis" };
        let hosts: Vec<_> = ports.iter().map(|it| format!("127.0.0.1:{it}")).collect();
        let hosts = hosts.join(",");
        let service = Self::SERVICE;
        match self.passwords {
            None => format!("{scheme}+sentinel://{hosts}/{service}"),
            Some(Passwords { server, sentinel }) => format!(
                "{scheme}+sentinel://:{server}@{hosts}/{service}/0?sentinel_password={sentinel}"
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

    /// Whom each sentinel that answers takes for the primary, two at least. `None`: they differ, or fewer answer.
    pub fn told(&self) -> Option<usize> {
        let mut told = self.sentinels.iter().filter_map(Sentinel::try_primary);
        let port = told.next()?;
        let others: Vec<_> = told.collect();
        if others.is_empty() || others.iter().any(|other| *other != port) {
            return None;
        }
        self.servers.iter().position(|it| it.port() == port)
    }

    /// Whether a server says so itself, which it may not while it is stopped.
    pub fn is_primary(&self, index: usize) -> bool {
        self.servers[index].try_role().as_deref() == Some("master")
    }

    /// Has the sentinels replace the primary, when all is well; nobody waits until they have.
    pub fn order_fail_over(&self) {
        wait_until_blocking("a fail-over can be begun", 2 * FAIL_OVER, || {
            self.settle();
            // In TILT mode it would begin a fail-over, and go on with it 30 s later.
            let able = self.sentinels.iter().find(|it| !it.is_in_tilt());
            // "-NOGOODSLAVE", "-INPROG": not yet.
            able.is_some_and(|able| {
                let told = able.try_cmd(&["SENTINEL", "FAILOVER", Self::SERVICE]);
                told.is_ok_and(|told| told == Value::Okay)
            })
        });
    }

    /// Until no sentinel replaces the primary any more, whether another has become one or not.
    ///
    /// [`settle`](Self::settle) makes any second primary a replica. In the middle of a fail-over that is the one to come.
    /// A sentinel that stands still in the middle of one is in TILT mode for 30 s, and goes on with it then.
    pub fn wait_until_fail_over_ends(&self) {
        wait_until_blocking("the fail-over ends", 4 * FAIL_OVER, || {
            let mut all = self.sentinels.iter();
            !all.any(|it| it.flags().contains("failover_in_progress"))
        });
    }

    /// Leaves one sentinel in TILT mode at most, so that the others are a majority that can replace the primary.
    ///
    /// A sentinel that stood still for more than two seconds enters TILT: for 30 s it answers clients, but neither
    /// replaces a primary nor agrees that one is down. With two of three in TILT, nobody replaces a primary that dies. And
    /// when TILT ends, each of the two counts the primary as down from that moment only. It then takes the replicas, cut
    /// off for longer than that and ten times `down-after-milliseconds`, for outdated, and promotes none of them however
    /// often it is elected ("-failover-abort-no-good-slave"). A new process is not in TILT.
    pub fn end_tilt(&mut self) {
        let in_tilt = self.sentinels.iter_mut().filter(|it| it.is_in_tilt());
        in_tilt.skip(1).for_each(Sentinel::restart);
    }

    /// Starts a server again as it was when it was killed: as a primary, or as a replica of that one.
    pub fn restart(&mut self, index: usize, primary: Option<usize>) {
        let port = primary.map(|primary| self.servers[primary].port());
        let line = port.map(|port| format!("replicaof 127.0.0.1 {port}"));
        self.servers[index].reconfigure("replicaof", line);
        self.servers[index].restart();
    }

    /// Until all sentinels agree on a primary and see nothing amiss, and the others are its replicas. Which one that is
    /// does not matter: sentinels that were told to replace one may have changed their mind, and others may not have
    /// waited to be told. Whoever is left as a second primary is made a replica.
    pub fn settle(&self) -> usize {
        let mut settled = None;
        wait_until_blocking("all agree on a primary", 2 * FAIL_OVER, || {
            settled = self.told().filter(|primary| {
                self.is_primary(*primary)
                    && self.demote_others(*primary)
                    && self.sentinels.iter().all(Sentinel::is_calm)
                    && self.servers[*primary]
                        .try_cmd(&["INFO", "replication"])
                        .is_ok_and(|info| {
                            let info = String::from_redis_value(info).unwrap_or_default();
                            info.matches("state=online").count() == 2
                        })
            });
            settled.is_some()
        });
        settled.expect("waited for")
    }

    /// Whether all of the others are replicas already.
    fn demote_others(&self, primary: usize) -> bool {
        let port = self.servers[primary].port().to_string();
        let mut are_replicas = true;
        for other in (0..self.servers.len()).filter(|other| *other != primary) {
            let server = &self.servers[other];
            let role = server.try_role();
            if role.as_deref() == Some("master") {
                // It ends all connections, also that on which it was told so.
                let _ = server.try_cmd(&["REPLICAOF", "127.0.0.1", &port]);
            }
            are_replicas &= role.as_deref() == Some("slave");
        }
        are_replicas
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

    /// Until two replicas have all that the primary has now. It is written to all the time: its sentinels greet each other.
    pub fn wait_until_replicated(&self) {
        let mut until = None;
        wait_until_blocking("the replicas have it all", FAIL_OVER, || {
            // Sentinels may replace it meanwhile.
            let primary = self.primary_index();
            let Ok(info) = self.servers[primary].try_cmd(&["INFO", "replication"]) else {
                return false;
            };
            let info = String::from_redis_value(info).unwrap_or_default();
            let field = |name: &str| info.lines().find_map(|line| line.strip_prefix(name));
            let number = |text: &str| text.parse::<u64>().ok();
            if until.is_none_or(|(of, _)| of != primary) {
                until = Some((primary, field("master_repl_offset:").and_then(number)));
            }
            let written = until.and_then(|(_, written)| written);
            (0..2).all(|index| {
                let replica = field(&format!("slave{index}:")).unwrap_or_default();
                let fields = replica.split(',');
                let mut offsets = fields.filter_map(|it| it.strip_prefix("offset="));
                let has = offsets.next().and_then(number);
                replica.contains("state=online") && written.is_some() && has >= written
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
    /// [`RedisServer::role`] of one that may be away, or just now end all connections.
    pub fn try_role(&self) -> Option<String> {
        let Value::Array(told) = self.try_cmd(&["ROLE"]).ok()? else {
            return None;
        };
        redis::from_redis_value(told.into_iter().next()?).ok()
    }

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
    /// For others than the harness, if they come by TLS.
    tls: Option<Port>,
    process: Option<Process>,
    password: Option<&'static str>,
    folder: TempDir,
}

impl Sentinel {
    fn start(
        primary: u16,
        passwords: Option<Passwords>,
        tls: Option<&Tls>,
        down_after_ms: u64,
    ) -> Self {
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
                 sentinel down-after-milliseconds {service} {down_after_ms}\n\
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
            let tls_port = tls.map(|tls| {
                let (port, lines) = secured(tls, folder.path());
                config += &lines;
                port
            });
            let file = folder.path().join("conf");
            fs::write(&file, config).expect("the folder is ours");
            let server = [name.as_os_str(), file.as_os_str()];
            let process = Process::spawn(&server, folder.path(), "KILL", None);
            let sentinel = Self {
                port,
                tls: tls_port,
                process: Some(process),
                password: passwords.map(|it| it.sentinel),
                folder,
            };
            if sentinel.answers(begin) {
                return sentinel;
            }
        }
    }

    /// Waits until it answers. False: its port is taken.
    fn answers(&self, begin: Instant) -> bool {
        let log = &self.process().log;
        while !log.wait_for_end(super::LOOK_AGAIN) {
            assert!(
                begin.elapsed() < FAIL_OVER,
                "the sentinel does not answer:\n{}",
                log.text()
            );
            if self.try_cmd(&["PING"]).is_ok() {
                return true;
            }
        }
        let log = log.text();
        assert!(log.contains("ddress already in use"), "{log}");
        false
    }

    fn process(&self) -> &Process {
        self.process.as_ref().expect("the sentinel runs")
    }

    /// SIGKILL. Returns when the process is gone; its port stays this sentinel's, and refuses connections.
    pub fn kill(&mut self) {
        self.process = None;
    }

    /// Starts it again with all that it knew: a sentinel writes that down.
    pub fn restart(&mut self) {
        let begin = Instant::now();
        loop {
            self.kill();
            let folder = self.folder.path();
            let (name, file) = (folder.join("redis-sentinel"), folder.join("conf"));
            let server = [name.as_os_str(), file.as_os_str()];
            self.process = Some(Process::spawn(&server, folder, "KILL", None));
            if self.answers(begin) {
                return;
            }
        }
    }

    /// Where clients find it.
    pub fn port(&self) -> u16 {
        self.tls.as_ref().unwrap_or(&self.port).number()
    }

    /// SIGSTOP: it lives, and says nothing.
    pub fn stop(&self) {
        self.signal(Signal::STOP);
        wait_until_stopped(self.process().pid);
    }

    /// SIGCONT, after [`Sentinel::stop`].
    pub fn cont(&self) {
        self.signal(Signal::CONT);
    }

    pub fn log(&self) -> String {
        self.process().log.text()
    }

    /// The port of the primary, as it knows it.
    pub fn primary(&self) -> u16 {
        let (_, port): (String, u16) =
            self.ask(&["SENTINEL", "GET-MASTER-ADDR-BY-NAME", Watched::SERVICE]);
        port
    }

    /// The same of one that may be away or silent.
    fn try_primary(&self) -> Option<u16> {
        let question = ["SENTINEL", "GET-MASTER-ADDR-BY-NAME", Watched::SERVICE];
        let told = self
            .cmd_within(&question, Duration::from_millis(500))
            .ok()?;
        let (_, port): (String, u16) = redis::from_redis_value(told).ok()?;
        Some(port)
    }

    /// Whether it takes the primary for well, and does not replace it just now.
    fn is_calm(&self) -> bool {
        self.flags() == "master"
    }

    /// Whether it is in TILT mode. One that does not answer is not.
    fn is_in_tilt(&self) -> bool {
        let info = self.try_cmd(&["INFO", "sentinel"]);
        let info = info.and_then(|info| Ok(String::from_redis_value(info)?));
        info.is_ok_and(|info| info.contains("sentinel_tilt:1"))
    }

    /// What it says of the primary: `master`, and more if it is down or being replaced. Empty: it says nothing.
    pub fn flags(&self) -> String {
        let told = self.try_cmd(&["SENTINEL", "MASTER", Watched::SERVICE]);
        let told = told.ok().and_then(|told| {
            let told: std::collections::HashMap<String, String> =
                redis::from_redis_value(told).ok()?;
            told.get("flags").cloned()
        });
        told.unwrap_or_default()
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
        self.cmd_within(args, Duration::from_secs(5))
    }

    fn cmd_within(&self, args: &[&str], patience: Duration) -> redis::RedisResult<Value> {
        let secret = self.password.map(|it| format!(":{it}@"));
        let secret = secret.unwrap_or_default();
        let url = format!("redis://{secret}127.0.0.1:{}/", self.port.number());
        let client = redis::Client::open(url)?;
        let mut command = redis::Cmd::new();
        for arg in args {
            command.arg(*arg);
        }
        super::within(patience, move || {
            command.query(&mut client.get_connection()?)
        })
    }

    fn signal(&self, signal: Signal) {
        rustix::process::kill_process(self.process().pid, signal)
            .expect("it is a child of its keeper until that ends");
    }
}

/// The lines of a sentinel's configuration with which it speaks TLS, to clients on that port.
fn secured(tls: &Tls, folder: &Path) -> (Port, String) {
    let write = |name: &str, text: &str| {
        let path = folder.join(name);
        fs::write(&path, text).expect("the folder is ours");
        path.display().to_string()
    };
    let clients = tls
        .clients
        .as_ref()
        .expect("they believe each other by this");
    let port = Port::pick();
    let lines = format!(
        "tls-port {}\ntls-replication yes\ntls-auth-clients yes\n\
         tls-cert-file {}\ntls-key-file {}\ntls-ca-cert-file {}\n",
        port.number(),
        write("cert.pem", &tls.certificate),
        write("key.pem", &tls.key),
        write("clients.pem", clients),
    );
    (port, lines)
}
