//! A real cluster for one test.

use std::cell::Cell;
use std::time::{Duration, Instant};

use redis::{FromRedisValue, Value};

use super::ports::Port;
use super::server::RedisServer;
use super::shown::Tls;
use super::{PATIENCE, Program, Proxy, wait_until_blocking};

/// How many slots there are.
const SLOTS: usize = 16_384;

/// Primaries, each with a third of the slots, and perhaps a replica of each.
#[derive(Debug)]
pub struct Cluster {
    // Dropped first: what connects through them must not see the servers go.
    proxies: Vec<Proxy>,
    servers: Vec<RedisServer>,
    /// Where they talk among themselves; none: at the usual place.
    buses: Vec<Port>,
    replicated: bool,
    is_tls: bool,
}

impl Cluster {
    /// Three primaries and three replicas; the replica of the primary `i` is the server `i + 3`.
    pub fn start() -> Self {
        Self::make(Program::Usual, true, &[], false, None)
    }

    /// Three primaries alone.
    pub fn without_replicas() -> Self {
        Self::make(Program::Usual, false, &[], false, None)
    }

    /// The same, each behind a proxy that is all that clients ever see of it.
    pub fn behind_proxies() -> Self {
        Self::make(Program::Usual, false, &[], true, None)
    }

    /// Three primaries alone of another program, and with more lines of configuration.
    pub fn of(program: Program, config: &[&str]) -> Self {
        Self::make(program, false, config, false, None)
    }

    /// Three primaries and three replicas, with more lines of configuration.
    pub fn replicated(config: &[&str]) -> Self {
        Self::make(Program::Usual, true, config, false, None)
    }

    /// Three primaries alone that speak nothing but TLS, also among themselves. Clients show certificates.
    pub fn over_tls(tls: Tls) -> Self {
        let config = ["tls-cluster yes", "tls-replication yes"];
        Self::make(Program::Usual, false, &config, false, Some(tls))
    }

    fn make(
        program: Program,
        replicated: bool,
        config: &[&str],
        proxied: bool,
        tls: Option<Tls>,
    ) -> Self {
        let count = if replicated { 6 } else { 3 };
        // The usual place of the bus, 10,000 above, is among the ports that systems hand out by themselves.
        let buses: Vec<Port> = match program {
            Program::Redis6 => Vec::new(),
            _ => (0..count).map(|_| Port::pick()).collect(),
        };
        let start = |index: usize| {
            let mut builder = RedisServer::builder().program(program);
            if let Some(tls) = &tls {
                builder = builder.tls(tls.clone());
            }
            if let Some(bus) = buses.get(index) {
                builder = builder.config(format!("cluster-port {}", bus.number()));
            }
            for line in [
                "cluster-enabled yes",
                // Short enough for a test, and long enough for a machine that is busy.
                "cluster-node-timeout 1500",
                "cluster-replica-validity-factor 0",
                "repl-diskless-sync-delay 0",
                "cluster-require-full-coverage no",
                "cluster-allow-replica-migration no",
            ]
            .iter()
            .chain(config)
            {
                builder = builder.config(*line);
            }
            std::thread::spawn(move || builder.start())
        };
        let starting: Vec<_> = (0..count).map(start).collect();
        let servers: Vec<_> = starting
            .into_iter()
            .map(|server| server.join().expect("a server starts"))
            .collect();
        let mut cluster = Self {
            proxies: Vec::new(),
            servers,
            buses,
            replicated,
            is_tls: tls.is_some(),
        };
        cluster.join();
        if proxied {
            cluster.proxies = cluster.servers.iter().map(Proxy::to).collect();
            for (server, proxy) in cluster.servers.iter().zip(&cluster.proxies) {
                let port = proxy.port().to_string();
                server.cmd(&["CONFIG", "SET", "cluster-announce-port", &port]);
            }
            // The others hear of it by and by.
            cluster.wait("all know the proxies", |server| {
                let nodes: String = server.ask(&["CLUSTER", "NODES"]);
                let known = |proxy: &Proxy| nodes.contains(&format!(":{}@", proxy.port()));
                cluster.proxies.iter().all(known)
            });
        }
        if !replicated {
            // Nobody would take its place: no primary is taken for dead because the machine stood still.
            cluster.take_for_dead_after(Duration::from_secs(60));
        }
        cluster
    }

    fn join(&self) {
        let [first, rest @ ..] = &self.servers[..] else {
            unreachable!("there are three or six")
        };
        let range = |index: usize| (SLOTS * index / 3, SLOTS * (index + 1) / 3 - 1);
        for (index, server) in self.servers.iter().enumerate() {
            let epoch = (index + 1).to_string();
            server.cmd(&["CLUSTER", "SET-CONFIG-EPOCH", &epoch]);
            if index < 3 {
                let (from, to) = range(index);
                // Known to Redis 6.2 as well.
                let mut command = vec!["CLUSTER".to_owned(), "ADDSLOTS".to_owned()];
                command.extend((from..=to).map(|slot| slot.to_string()));
                let command: Vec<_> = command.iter().map(String::as_str).collect();
                server.cmd(&command);
            }
        }
        let meet_all = || {
            for (index, server) in rest.iter().enumerate() {
                let port = server.port().to_string();
                let bus = self.buses.get(index + 1);
                let bus = bus.map(|bus| bus.number().to_string());
                let mut meet = vec!["CLUSTER", "MEET", "127.0.0.1", &port];
                meet.extend(bus.as_deref());
                first.cmd(&meet);
            }
        };
        meet_all();
        let met = Cell::new(Instant::now());
        self.wait("all know each other", |server| {
            // A node that stands still for the node time-out is forgotten again.
            if met.get().elapsed() > Duration::from_secs(3) {
                met.set(Instant::now());
                meet_all();
            }
            let nodes: String = server.ask(&["CLUSTER", "NODES"]);
            nodes.lines().count() == self.servers.len() && !nodes.contains("handshake")
        });
        if self.replicated {
            for index in 3..6 {
                let id = self.id(index - 3);
                self.servers[index].cmd(&["CLUSTER", "REPLICATE", &id]);
            }
            self.wait("all replicas are known", |server| {
                let nodes: String = server.ask(&["CLUSTER", "NODES"]);
                nodes.matches("slave").count() == 3
            });
            for replica in &self.servers[3..] {
                wait_until_blocking("a replica is linked", PATIENCE, || {
                    let info: String = replica.ask(&["INFO", "replication"]);
                    info.contains("master_link_status:up")
                });
            }
        }
        self.wait("the cluster stands", |server| {
            let info: String = server.ask(&["CLUSTER", "INFO"]);
            info.contains("cluster_state:ok") && info.contains("cluster_slots_ok:16384")
        });
    }

    fn wait(&self, what: &str, condition: impl Fn(&RedisServer) -> bool) {
        for server in &self.servers {
            wait_until_blocking(what, PATIENCE, || condition(server));
        }
    }

    // ---- where it is

    pub fn server(&self, index: usize) -> &RedisServer {
        &self.servers[index]
    }

    pub fn server_mut(&mut self, index: usize) -> &mut RedisServer {
        &mut self.servers[index]
    }

    pub fn primaries(&self) -> &[RedisServer] {
        &self.servers[..3]
    }

    pub fn proxies(&self) -> &[Proxy] {
        &self.proxies
    }

    /// Where clients find a node.
    fn port(&self, index: usize) -> u16 {
        match self.proxies.get(index) {
            Some(proxy) => proxy.port(),
            None => self.servers[index].port(),
        }
    }

    /// `redis+cluster://127.0.0.1:port,…/` with all nodes.
    pub fn url(&self) -> String {
        self.url_with("")
    }

    /// The same with `user:password@`.
    pub fn url_with(&self, user: &str) -> String {
        let nodes: Vec<_> = (0..self.servers.len())
            .map(|index| format!("127.0.0.1:{}", self.port(index)))
            .collect();
        let scheme = if self.is_tls { "rediss" } else { "redis" };
        format!("{scheme}+cluster://{user}{}/", nodes.join(","))
    }

    /// `redis://127.0.0.1:port/` of each node.
    pub fn urls(&self) -> Vec<String> {
        (0..self.servers.len())
            .map(|index| format!("redis://127.0.0.1:{}/", self.port(index)))
            .collect()
    }

    pub fn id(&self, index: usize) -> String {
        self.servers[index].ask(&["CLUSTER", "MYID"])
    }

    pub fn slot(&self, key: &str) -> u16 {
        self.servers[0].ask(&["CLUSTER", "KEYSLOT", key])
    }

    /// The index of the primary that had the key's slot at first.
    pub fn home(&self, key: &str) -> usize {
        usize::from(self.slot(key)) * 3 / SLOTS
    }

    // ---- what is in it

    /// Of all primaries, without the fences.
    pub fn leftovers(&self) -> Vec<String> {
        let mut keys: Vec<_> = self.servers[..3]
            .iter()
            .flat_map(|server| server.keys("*"))
            .filter(|key| !key.contains(":~fence"))
            .collect();
        keys.sort();
        keys
    }

    /// All sharded channels with a subscriber.
    pub fn channels(&self) -> Vec<String> {
        let mut channels: Vec<String> = self
            .servers
            .iter()
            .filter_map(|server| server.try_cmd(&["PUBSUB", "SHARDCHANNELS"]).ok())
            .flat_map(|channels| Vec::<String>::from_redis_value(channels).unwrap_or_default())
            .collect();
        channels.sort();
        channels
    }

    /// Sends a command to the node that has the key.
    pub fn cmd(&self, key: &str, args: &[&str]) -> Value {
        self.served(key, args).1
    }

    /// The same, and says which server that is.
    pub fn served(&self, key: &str, args: &[&str]) -> (usize, Value) {
        let mut index = self.home(key);
        let mut is_asked = false;
        for _ in 0..5 {
            if is_asked {
                self.servers[index].cmd(&["ASKING"]);
            }
            match self.servers[index].try_cmd(args) {
                Err(error) if matches!(error.code(), Some("MOVED" | "ASK")) => {
                    is_asked = error.code() == Some("ASK");
                    let to = error.redirect_node().expect("it says where").0.to_owned();
                    let port = to.rsplit(':').next().and_then(|port| port.parse().ok());
                    index = (0..self.servers.len())
                        .find(|index| Some(self.port(*index)) == port)
                        .expect("it is one of ours");
                }
                Err(error) => panic!("{args:?}: {error}"),
                Ok(value) => return (index, value),
            }
        }
        panic!("{args:?}: sent round in circles")
    }

    // ---- what may befall it

    /// Begins to move a slot: from now on what is not there is asked for at `to`.
    pub fn begin_move(&self, slot: u16, from: usize, to: usize) {
        let slot = slot.to_string();
        self.servers[to].cmd(&["CLUSTER", "SETSLOT", &slot, "IMPORTING", &self.id(from)]);
        self.servers[from].cmd(&["CLUSTER", "SETSLOT", &slot, "MIGRATING", &self.id(to)]);
    }

    /// Moves up to `count` of the slot's keys, and says how many it moved.
    pub fn move_keys(&self, slot: u16, from: usize, to: usize, count: usize) -> usize {
        let (slot, count) = (slot.to_string(), count.to_string());
        let keys: Vec<String> =
            self.servers[from].ask(&["CLUSTER", "GETKEYSINSLOT", &slot, &count]);
        for key in &keys {
            self.move_key(key, from, to);
        }
        keys.len()
    }

    /// Moves one key, if it is there.
    pub fn move_key(&self, key: &str, from: usize, to: usize) {
        let port = self.servers[to].port().to_string();
        let mut command = vec!["MIGRATE", "127.0.0.1", &port, key, "0", "5000"];
        command.extend(["AUTH2", "harness", "harness"]);
        self.servers[from].cmd(&command);
    }

    /// All nodes know from now on.
    pub fn end_move(&self, slot: u16, from: usize, to: usize) {
        let (slot, id) = (slot.to_string(), self.id(to));
        for index in [to, from] {
            self.servers[index].cmd(&["CLUSTER", "SETSLOT", &slot, "NODE", &id]);
        }
        // Replicas are not told: they would refuse, they hear of it anyway, and a test may have stopped one.
        for index in (0..3).filter(|index| ![from, to].contains(index)) {
            let _ = self.servers[index].try_cmd(&["CLUSTER", "SETSLOT", &slot, "NODE", &id]);
        }
    }

    /// Moves a slot with all that is in it.
    pub fn move_slot(&self, slot: u16, from: usize, to: usize) {
        self.begin_move(slot, from, to);
        while self.move_keys(slot, from, to, 100) > 0 {}
        self.end_move(slot, from, to);
    }

    // ---- who is who, where replicas take over; a shard is the servers `i` and `i + 3`

    /// Which server is the primary of a shard, as far as those say who live.
    pub fn primary_of(&self, shard: usize) -> usize {
        let is_primary = |index: &usize| self.servers[*index].role() == "master";
        let found = [shard, shard + 3].into_iter().find(is_primary);
        found.expect("a shard has a primary")
    }

    /// Whether a server says that it has a slot.
    pub fn has_slot(&self, index: usize, slot: u16) -> bool {
        let nodes: String = self.servers[index].ask(&["CLUSTER", "NODES"]);
        let own = nodes.lines().find(|line| line.contains("myself"));
        let ranges = own.unwrap_or_default().split(' ').skip(8);
        ranges.filter(|range| !range.starts_with('[')).any(|range| {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            let ends = first.parse::<u16>().ok().zip(last.parse::<u16>().ok());
            ends.is_some_and(|(first, last)| (first..=last).contains(&slot))
        })
    }

    /// The other server of its shard.
    pub fn other_of(index: usize) -> usize {
        (index + 3) % 6
    }

    /// Until each shard has a primary with a replica that has it all, and all agree on where the slots are.
    pub fn wait_until_whole(&self) {
        wait_until_blocking("the cluster is whole", PATIENCE, || {
            let roles: Vec<_> = self.servers.iter().map(RedisServer::role).collect();
            let is_linked = |server: &RedisServer, role: &str| {
                let info: String = server.ask(&["INFO", "replication"]);
                match role {
                    "master" => info.contains("state=online"),
                    _ => info.contains("master_link_status:up"),
                }
            };
            let stands = |server: &RedisServer| {
                let info: String = server.ask(&["CLUSTER", "INFO"]);
                info.contains("cluster_state:ok") && info.contains("cluster_slots_ok:16384")
            };
            let primaries = (0..self.servers.len()).filter(|index| roles[*index] == "master");
            let primaries: Vec<_> = primaries.map(|index| self.id(index)).collect();
            // Who took over is so before all others have heard of it.
            let knows_them = |server: &RedisServer| {
                let nodes: String = server.ask(&["CLUSTER", "NODES"]);
                let is_known = |id: &String| {
                    let of_it = |line: &str| line.starts_with(id) && line.contains("master");
                    nodes.lines().any(of_it)
                };
                primaries.iter().all(is_known)
            };
            let mut servers = self.servers.iter().zip(&roles);
            (0..3).all(|shard| roles[shard] != roles[shard + 3])
                && servers.all(|(server, role)| {
                    is_linked(server, role) && stands(server) && knows_them(server)
                })
        });
    }

    /// Makes a replica the primary, in order: nothing that was acknowledged is lost. On a busy machine it may have taken
    /// over by itself.
    pub fn promote(&self, index: usize) {
        let _ = self.servers[index].try_cmd(&["CLUSTER", "FAILOVER"]);
        self.wait_until_primary(index);
    }

    /// Until this one is its shard's primary.
    pub fn wait_until_primary(&self, index: usize) {
        let mut asked = Instant::now();
        wait_until_blocking("it is the primary", PATIENCE, || {
            // Who wants to take over in good order gives up after five seconds.
            if asked.elapsed() > Duration::from_secs(6) {
                asked = Instant::now();
                let _ = self.servers[index].try_cmd(&["CLUSTER", "FAILOVER"]);
            }
            self.servers[index].role() == "master"
        });
    }

    /// Gives an empty slot to another.
    pub fn hand_slot(&self, slot: u16, from: usize, to: usize) {
        self.begin_move(slot, from, to);
        // The fence stays where a lock was.
        let (slot_text, many) = (slot.to_string(), "100");
        let keys: Vec<String> =
            self.servers[from].ask(&["CLUSTER", "GETKEYSINSLOT", &slot_text, many]);
        for key in keys {
            self.servers[from].del(&key);
        }
        self.end_move(slot, from, to);
    }

    /// Whether a replica takes the place of its primary when that fails, or only looks so: a machine that stood still makes
    /// them all look so.
    pub fn let_replicas_stand_in(&self, stands_in: bool) {
        let stays = if stands_in { "no" } else { "yes" };
        for replica in &self.servers[3..] {
            replica.cmd(&["CONFIG", "SET", "cluster-replica-no-failover", stays]);
        }
    }

    /// For how long a node may be silent.
    pub fn take_for_dead_after(&self, silence: Duration) {
        let millis = silence.as_millis().to_string();
        for server in &self.servers {
            server.cmd(&["CONFIG", "SET", "cluster-node-timeout", &millis]);
        }
    }

    /// Waits until the replica of a dead primary has taken its place.
    pub fn wait_for_promotion(&self, replica: usize) {
        wait_until_blocking("the replica is promoted", PATIENCE, || {
            let role: Vec<Value> = self.servers[replica].ask(&["ROLE"]);
            role.first() == Some(&Value::BulkString(b"master".to_vec()))
        });
    }
}
