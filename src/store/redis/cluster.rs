//! The nodes of a cluster: how it is named in urls, and which primary has which slot.

use std::fmt;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use futures::stream::FuturesUnordered;
use redis::aio::MultiplexedConnection;
use redis::{Value, cmd};
use tokio::time::{Instant, timeout, timeout_at};

use super::endpoint::{Endpoint, ignore, is_host};
use super::fault::{Fault, Refusal};
use super::slots::{SLOTS, Slot};

/// `host:port` of a node.
pub(super) type Address = Arc<str>;

/// The slots of each primary, as one node saw them.
pub(super) type SlotMap = Vec<(Address, RangeInclusive<Slot>)>;

/// The next node is asked as well when one has not answered within this part of the time.
const NEXT_AFTER: u32 = 8;

/// Some nodes of a cluster, of which one is enough to find the others.
#[derive(Clone)]
pub(super) struct Seeds {
    endpoints: Vec<Endpoint>,
    address: Arc<str>,
}

impl Seeds {
    /// Splits `redis+cluster://user:password@host:port,host:port/` into one url for each node.
    pub(super) fn split(url: &str) -> Option<Vec<String>> {
        let (scheme, rest) = url.split_once("://")?;
        let scheme = scheme.to_ascii_lowercase();
        let scheme = scheme.strip_suffix("+cluster")?;
        let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
        // Faults of the url are found in those that this makes.
        let (authority, tail) = rest.split_at(end);
        let (user, hosts) = match authority.rsplit_once('@') {
            Some((user, hosts)) => (format!("{user}@"), hosts),
            None => (String::new(), authority),
        };
        let url = |host| format!("{scheme}://{user}{host}{tail}");
        Some(hosts.split(',').map(url).collect())
    }

    pub(super) fn new(endpoints: Vec<Endpoint>) -> Result<Self, Fault> {
        let Some(first) = endpoints.first() else {
            return Err(Fault::url("a cluster needs at least one node"));
        };
        if endpoints.iter().any(|endpoint| endpoint.host().is_none()) {
            return Err(Fault::url("the nodes of a cluster have hosts and ports"));
        }
        if endpoints.iter().any(|endpoint| endpoint.db() != 0) {
            return Err(Fault::url("a cluster has database 0 only"));
        }
        let address = first.address().clone();
        Ok(Self { endpoints, address })
    }

    /// The first one's.
    pub(super) fn address(&self) -> &Arc<str> {
        &self.address
    }

    /// A node that the map names: with the first seed's user and certificates.
    pub(super) fn node(&self, address: &str) -> Endpoint {
        let (host, port) = address.rsplit_once(':').unwrap_or((address, ""));
        self.endpoints[0].elsewhere(host, port.parse().unwrap_or(6379))
    }

    /// The map as the first seed that answers has it. `within` is for all of it.
    pub(super) async fn find_map(&self, within: Duration) -> Result<SlotMap, Fault> {
        find_map(self.endpoints.clone(), within).await
    }

    /// The same, asking these nodes as well.
    pub(super) async fn find_map_among(
        &self,
        nodes: &[Address],
        within: Duration,
    ) -> Result<SlotMap, Fault> {
        // In turns: those that we know may all be gone.
        let mut seeds = self.endpoints.iter();
        let mut endpoints = Vec::new();
        for node in nodes {
            endpoints.push(self.node(node));
            endpoints.extend(seeds.next().cloned());
        }
        endpoints.extend(seeds.cloned());
        find_map(endpoints, within).await
    }
}

impl fmt::Debug for Seeds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&self.endpoints).finish()
    }
}

/// Asks one node after the other, and does not wait for one that is slow before it asks the next.
async fn find_map(nodes: Vec<Endpoint>, within: Duration) -> Result<SlotMap, Fault> {
    let give_up = Instant::now() + within;
    let mut faults: Vec<Fault> = Vec::new();
    let mut silent: Vec<_> = nodes.iter().map(|node| node.address().clone()).collect();
    let mut nodes = nodes.into_iter();
    let mut asking = FuturesUnordered::new();
    loop {
        let next = nodes.next();
        let until = match next {
            Some(_) => give_up.min(Instant::now() + within / NEXT_AFTER),
            None => give_up,
        };
        asking.extend(next.map(|node| connect_and_ask(node, within)));
        match timeout_at(until, asking.next()).await {
            Ok(Some((_, Ok(map)))) => return Ok(map),
            Ok(Some((address, Err(fault)))) => {
                silent.retain(|other| *other != address);
                faults.push(fault);
            }
            Ok(None) => break,
            Err(_) if Instant::now() >= give_up => break,
            Err(_) => {}
        }
    }
    faults.extend(
        silent
            .into_iter()
            .map(|address| Fault::Silent { address, within }),
    );
    if faults.len() == 1 {
        return Err(faults.swap_remove(0));
    }
    Err(Fault::not_found("the slots of the cluster", &faults))
}

async fn connect_and_ask(node: Endpoint, within: Duration) -> (Address, Result<SlotMap, Fault>) {
    let address = node.address().clone();
    let asking = async {
        let mut link = match node.connect(within, ignore).await? {
            Some(link) => link,
            None => node.connect_resp2(within).await?,
        };
        let mut connection = link.connection.clone();
        link.run(ask_map(&mut connection, &address, within)).await
    };
    let asked = asking.await;
    (address, asked)
}

/// Asks for the map over a connection that stands.
pub(super) async fn ask_map(
    connection: &mut MultiplexedConnection,
    address: &Address,
    within: Duration,
) -> Result<SlotMap, Fault> {
    let question = cmd("CLUSTER").arg("SLOTS").take();
    let address = address.clone();
    let garbled = |what| {
        let address = address.clone();
        Err(Fault::Garbled { address, what })
    };
    match timeout(within, connection.send_packed_command(&question)).await {
        Err(_) => Err(Fault::Silent { address, within }),
        Ok(Err(source)) => Err(Fault::Broken { address, source }),
        Ok(Ok(Value::ServerError(error))) => {
            let refusal = Refusal::from(&error);
            Err(Fault::Refused { address, refusal })
        }
        Ok(Ok(answer)) => match read_map(&answer, &address) {
            None => garbled("it does not tell where the slots are"),
            Some(map) if map.is_empty() => garbled("nobody in its cluster has a slot"),
            Some(map) => Ok(map),
        },
    }
}

/// Reads the answer of the node at `asked`, which leaves out its own host where it does not know it.
fn read_map(answer: &Value, asked: &str) -> Option<SlotMap> {
    list(answer)?
        .iter()
        .map(|range| read_range(range, asked))
        .collect()
}

fn read_range(range: &Value, asked: &str) -> Option<(Address, RangeInclusive<Slot>)> {
    let [Value::Int(first), Value::Int(last), primary, ..] = list(range)? else {
        return None;
    };
    let [host, Value::Int(port), ..] = list(primary)? else {
        return None;
    };
    let host = match host {
        Value::BulkString(host) => std::str::from_utf8(host).ok()?,
        _ => "",
    };
    let (first, last) = (Slot::try_from(*first).ok()?, Slot::try_from(*last).ok()?);
    if usize::from(last) >= SLOTS {
        return None;
    }
    Some((absolute(&format!("{host}:{port}"), asked)?, first..=last))
}

/// The address of a node as another one names it; without a host it is a port of the node `asked`.
pub(super) fn absolute(address: &str, asked: &str) -> Option<Address> {
    let (host, port) = address.rsplit_once(':')?;
    port.parse::<u16>().ok()?;
    match host {
        "" | "?" => {
            let (own, _) = asked.rsplit_once(':')?;
            Some(format!("{own}:{port}").into())
        }
        host => is_host(host).then(|| address.into()),
    }
}

fn list(value: &Value) -> Option<&[Value]> {
    match value {
        Value::Array(values) | Value::Set(values) => Some(values),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_url_names_several_nodes() {
        let split = |url| Seeds::split(url);
        assert_eq!(
            split("redis+cluster://me:pw@a:1,b:2/?x"),
            Some(vec![
                "redis://me:pw@a:1/?x".into(),
                "redis://me:pw@b:2/?x".into()
            ])
        );
        assert_eq!(
            split("rediss+cluster://[::1]:1"),
            Some(vec!["rediss://[::1]:1".into()])
        );
        assert_eq!(split("redis://a:1"), None);
        assert_eq!(split("+cluster"), None);
    }

    fn word(text: &str) -> Value {
        Value::BulkString(text.into())
    }

    fn range(first: i64, last: i64, host: &str, port: i64) -> Value {
        let primary = Value::Array(vec![word(host), Value::Int(port), word("id")]);
        Value::Array(vec![Value::Int(first), Value::Int(last), primary])
    }

    #[test]
    fn a_map_is_read_with_nodes_that_do_not_know_their_own_host() {
        let answer = Value::Array(vec![
            range(0, 9, "10.0.0.2", 2),
            range(10, 19, "", 4),
            range(20, 16_383, "10.0.0.2", 2),
        ]);
        let map = read_map(&answer, "host:1").unwrap();
        let expected: SlotMap = vec![
            ("10.0.0.2:2".into(), 0..=9),
            ("host:4".into(), 10..=19),
            ("10.0.0.2:2".into(), 20..=16_383),
        ];
        assert_eq!(map, expected);
        let beyond = Value::Array(vec![range(0, 16_384, "h", 1)]);
        assert_eq!(read_map(&beyond, "host:1"), None);
    }

    #[test]
    fn an_address_is_a_host_and_a_port() {
        for host in [
            "",
            "?",
            "10.0.0.1",
            "::1",
            "fe80::1%eth0",
            "redis-0.redis_x.svc",
        ] {
            assert!(
                absolute(&format!("{host}:6379"), "asked:1").is_some(),
                "{host}"
            );
        }
        let long = "h".repeat(254);
        for host in ["a b", "a\n", "\u{1b}[2J", "u:p@h", "a/b", "é", &long] {
            assert_eq!(absolute(&format!("{host}:6379"), "asked:1"), None, "{host}");
        }
        for port in ["-1", "65536", "", "x"] {
            assert_eq!(absolute(&format!("h:{port}"), "asked:1"), None, "{port}");
        }
    }

    fn any_value() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            any::<i64>().prop_map(Value::Int),
            (0..20_000_i64).prop_map(Value::Int),
            prop::sample::select(vec!["?", "", "host", "a b"]).prop_map(word),
            Just(Value::Nil),
        ];
        leaf.prop_recursive(5, 200, 8, |inner| {
            prop::collection::vec(inner, 0..8).prop_map(Value::Array)
        })
    }

    proptest! {
        #[test]
        fn no_answer_panics(value in any_value()) {
            let _ = read_map(&value, "h:1");
        }
    }
}
