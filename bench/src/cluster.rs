//! A cluster of the run's own: three primaries without replicas, each behind a proxy that delays.
//! Clients see nothing but the proxies.

use std::time::{Duration, Instant};

use crate::libs::Outcome;
use crate::net::Proxies;
use crate::server::{Server, free_port};

const PRIMARIES: usize = 3;

const SLOTS: usize = 16_384;

/// How long the primaries may take to agree on something.
const PATIENCE: Duration = Duration::from_secs(30);

/// The keys that one `MIGRATE` moves.
const MOVED_AT_ONCE: usize = 100;

pub(crate) struct Cluster {
    pub(crate) proxies: Proxies,
    pub(crate) servers: Vec<Server>,
}

impl Cluster {
    pub(crate) fn start(one_way: Duration) -> Outcome<Self> {
        let (mut servers, mut buses) = (Vec::new(), Vec::new());
        for _ in 0..PRIMARIES {
            // The usual bus, 10,000 above, may be a port that systems hand out to clients.
            let bus = free_port()?.to_string();
            // An overloaded machine makes nobody a failure.
            let lines =
                format!("cluster-enabled yes\ncluster-port {bus}\ncluster-node-timeout 60000");
            servers.push(Server::with(&lines)?);
            buses.push(bus);
        }
        let ports: Vec<u16> = servers.iter().map(Server::port).collect();
        let proxies = Proxies::to(&ports, one_way)?;
        for (index, server) in servers.iter_mut().enumerate() {
            let announced = proxies.ports()[index].to_string();
            server.order(&["CONFIG", "SET", "cluster-announce-port", &announced])?;
            server.order(&["CLUSTER", "SET-CONFIG-EPOCH", &(index + 1).to_string()])?;
            let first = (SLOTS * index / PRIMARIES).to_string();
            let last = (SLOTS * (index + 1) / PRIMARIES - 1).to_string();
            server.order(&["CLUSTER", "ADDSLOTSRANGE", &first, &last])?;
        }
        for (port, bus) in ports.iter().zip(&buses).skip(1) {
            servers[0].order(&["CLUSTER", "MEET", "127.0.0.1", &port.to_string(), bus])?;
        }
        let mut cluster = Self { proxies, servers };
        cluster.wait_until_it_stands()?;
        Ok(cluster)
    }

    fn wait_until_it_stands(&mut self) -> Outcome<()> {
        let begin = Instant::now();
        for server in &mut self.servers {
            loop {
                let info: String = server.ask(&["CLUSTER", "INFO"])?;
                let nodes: String = server.ask(&["CLUSTER", "NODES"])?;
                let knows = |port: &u16| nodes.contains(&format!(":{port}@"));
                if info.contains("cluster_state:ok")
                    && info.contains("cluster_slots_ok:16384")
                    && self.proxies.ports().iter().all(knows)
                {
                    break;
                }
                if begin.elapsed() > PATIENCE {
                    return Err(format!("the cluster does not stand: {info}{nodes}"));
                }
                std::thread::sleep(Duration::from_millis(10));
            }
        }
        Ok(())
    }

    /// Where clients find it.
    pub(crate) fn url(&self) -> String {
        let ports = self.proxies.ports().iter();
        let nodes: Vec<_> = ports.map(|port| format!("127.0.0.1:{port}")).collect();
        format!("redis+cluster://{}/", nodes.join(","))
    }

    /// The slot of a lock, and the primary that has it at first.
    pub(crate) fn place(&mut self, lock: &str) -> Outcome<(usize, usize)> {
        let key = format!("lock:{lock}");
        let slot: usize = self.servers[0].ask(&["CLUSTER", "KEYSLOT", &key])?;
        Ok((slot, slot * PRIMARIES / SLOTS))
    }

    /// So many names of locks that the primary has, each beginning with that.
    pub(crate) fn locks_at(
        &mut self,
        primary: usize,
        begin: &str,
        count: usize,
    ) -> Outcome<Vec<String>> {
        let mut locks = Vec::with_capacity(count);
        for number in 0.. {
            if locks.len() == count {
                break;
            }
            let lock = format!("{begin}-{number}");
            if self.place(&lock)?.1 == primary {
                locks.push(lock);
            }
        }
        Ok(locks)
    }

    /// How many scripts clients have called at a primary.
    pub(crate) fn script_calls(&mut self, primary: usize) -> Outcome<u64> {
        let stats: String = self.servers[primary].ask(&["INFO", "commandstats"])?;
        let calls = |line: &str| {
            let (command, rest) = line.strip_prefix("cmdstat_")?.split_once(":calls=")?;
            let is_script = ["eval", "evalsha", "fcall"].contains(&command);
            let count = rest.split(',').next()?.parse::<u64>().ok()?;
            is_script.then_some(count)
        };
        Ok(stats.lines().filter_map(calls).sum())
    }

    /// How many connections clients have to all primaries.
    pub(crate) fn connections(&mut self) -> Outcome<usize> {
        let mut all = 0;
        for server in &mut self.servers {
            let clients: String = server.ask(&["CLIENT", "LIST"])?;
            // One of them asks this.
            all += clients.lines().count() - 1;
        }
        Ok(all)
    }

    /// Begins to move a slot: what is not there any more is asked for at `to`.
    pub(crate) fn begin_move(&mut self, slot: usize, from: usize, to: usize) -> Outcome<()> {
        let (slot, source, target) = (slot.to_string(), self.id(from)?, self.id(to)?);
        self.servers[to].order(&["CLUSTER", "SETSLOT", &slot, "IMPORTING", &source])?;
        self.servers[from].order(&["CLUSTER", "SETSLOT", &slot, "MIGRATING", &target])
    }

    /// Moves every so many-th of the slot's keys, by name, and says how many it moved.
    pub(crate) fn move_keys(
        &mut self,
        slot: usize,
        from: usize,
        to: usize,
        step: usize,
    ) -> Outcome<usize> {
        let port = self.servers[to].port().to_string();
        let (slot, all) = (slot.to_string(), i32::MAX.to_string());
        let source = &mut self.servers[from];
        let mut keys: Vec<String> = source.ask(&["CLUSTER", "GETKEYSINSLOT", &slot, &all])?;
        keys.sort_unstable();
        let keys: Vec<String> = keys.into_iter().step_by(step).collect();
        for keys in keys.chunks(MOVED_AT_ONCE) {
            let mut command = vec!["MIGRATE", "127.0.0.1", &port, "", "0", "5000", "KEYS"];
            command.extend(keys.iter().map(String::as_str));
            source.order(&command)?;
        }
        Ok(keys.len())
    }

    /// All nodes know from now on that the slot has moved.
    pub(crate) fn end_move(&mut self, slot: usize, from: usize, to: usize) -> Outcome<()> {
        let (slot, target) = (slot.to_string(), self.id(to)?);
        let others = (0..PRIMARIES).filter(|index| ![from, to].contains(index));
        for index in [to, from].into_iter().chain(others) {
            self.servers[index].order(&["CLUSTER", "SETSLOT", &slot, "NODE", &target])?;
        }
        Ok(())
    }

    fn id(&mut self, index: usize) -> Outcome<String> {
        self.servers[index].ask(&["CLUSTER", "MYID"])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_moves_with_its_keys() {
        let mut cluster = Cluster::start(Duration::ZERO).unwrap();
        let (slot, from) = cluster.place("{a}-1").unwrap();
        let to = (from + 1) % PRIMARIES;
        for number in 0..250 {
            let key = format!("lock:{{a}}-{number}");
            cluster.servers[from].order(&["SET", &key, "v"]).unwrap();
        }
        cluster.begin_move(slot, from, to).unwrap();
        assert_eq!(cluster.move_keys(slot, from, to, 2), Ok(125));
        assert_eq!(cluster.move_keys(slot, from, to, 1), Ok(125));
        cluster.end_move(slot, from, to).unwrap();
        let moved: u64 = cluster.servers[to].ask(&["DBSIZE"]).unwrap();
        assert_eq!(moved, 250);
    }

    #[test]
    fn clients_hear_of_the_proxies_alone() {
        let mut cluster = Cluster::start(Duration::ZERO).unwrap();
        let proxies = cluster.proxies.ports().to_vec();
        for server in &mut cluster.servers {
            let nodes: String = server.ask(&["CLUSTER", "NODES"]).unwrap();
            let known = |port: &u16| nodes.contains(&format!("127.0.0.1:{port}@"));
            assert!(proxies.iter().all(known), "{nodes}");
            assert!(!known(&server.port()), "{nodes}");
        }
    }

    #[test]
    fn calls_of_scripts_are_counted_where_they_run() {
        let mut cluster = Cluster::start(Duration::ZERO).unwrap();
        let before = cluster.script_calls(0).unwrap();
        let _: u64 = cluster.servers[0].ask(&["EVAL", "return 1", "0"]).unwrap();
        assert_eq!(cluster.script_calls(0).unwrap(), before + 1);
        assert_eq!(cluster.script_calls(1), Ok(0));
    }

    #[test]
    fn connections_of_the_bench_are_not_counted() {
        let mut cluster = Cluster::start(Duration::ZERO).unwrap();
        assert_eq!(cluster.connections(), Ok(0));
        let address = (std::net::Ipv4Addr::LOCALHOST, cluster.proxies.ports()[1]);
        let mut stream = std::net::TcpStream::connect(address).unwrap();
        std::io::Write::write_all(&mut stream, b"PING\r\n").unwrap();
        std::io::Read::read_exact(&mut stream, &mut [0; 7]).unwrap();
        assert_eq!(cluster.connections(), Ok(1));
    }
}
