//! The nodes of a cluster: how it is named in urls, and which primary has which slot.

use std::iter;

use futures::FutureExt;
use rand::seq::SliceRandom;
use redis::{Cmd, ConnectionAddr, FromRedisValue, Value, cmd};
use tokio::time::Instant;

use super::backend::Times;
use super::endpoint::{Endpoint, is_host, split_url};
use super::fault::Fault;
use super::slots::SLOTS;
use crate::store::attempts::{Pace, SetUps, first_success};
use crate::store::driver::{Address, Slot, SlotMap};

/// The next node is asked as well when one has not accepted a connection within this part of its turn.
const NEXT_AFTER: u32 = 8;

/// Some nodes of a cluster, of which one is enough to find the others.
#[derive(Clone, Debug)]
pub(super) struct Seeds {
    pub(super) endpoints: Vec<Endpoint>,
}

impl Seeds {
    /// Splits `redis+cluster://user:password@host:port,host:port/` into one url for each node.
    pub(super) fn split(url: &str) -> Option<Vec<String>> {
        let (scheme, user, hosts, tail) = split_url(url);
        let scheme = scheme.strip_suffix("+cluster")?;
        // Faults of the url are found in those that this makes.
        let url = |host| format!("{scheme}://{user}{host}{tail}");
        Some(hosts.split(',').map(url).collect())
    }

    pub(super) fn parse(urls: &[String]) -> Result<Self, Fault> {
        let endpoints = urls.iter().map(|url| Endpoint::parse(url));
        let mut endpoints = endpoints.collect::<Result<Vec<_>, _>>()?;
        if endpoints.is_empty() {
            return Err(Fault::url("a cluster needs at least one node"));
        }
        // Their nodes share it, and its sessions.
        let first = endpoints[0].clone();
        for endpoint in &mut endpoints {
            endpoint.secure_as(&first);
        }
        for Endpoint { info, .. } in &endpoints {
            if let ConnectionAddr::Unix(_) = info.addr() {
                return Err(Fault::url("the nodes of a cluster have hosts and ports"));
            }
            if info.redis_settings().db() != 0 {
                return Err(Fault::url("a cluster has database 0 only"));
            }
        }
        Ok(Self { endpoints })
    }

    /// A node that the map names: with the first seed's user and certificates.
    pub(super) fn node(&self, address: &str) -> Endpoint {
        let (host, port) = address.rsplit_once(':').unwrap_or((address, ""));
        self.endpoints[0].elsewhere(host, port.parse().unwrap_or(6379))
    }

    /// The map as the first that answers has it, of these nodes and the seeds. The time to connect is for all of it.
    pub(super) async fn find_map(&self, nodes: &[Address], times: Times) -> Result<SlotMap, Fault> {
        let within = times.connect;
        // At random, so that a fleet does not ask the same one.
        let mut seeds = self.endpoints.clone();
        seeds.shuffle(&mut rand::rng());
        // In turns: those that we know may all be gone.
        let mut seeds = seeds.into_iter();
        let known = nodes.iter().map(|node| self.node(node));
        let mixed = known.flat_map(|node| iter::once(node).chain(seeds.next()));
        let mut nodes = mixed.collect::<Vec<_>>();
        nodes.extend(seeds);

        let set_ups = SetUps::at_most(nodes.len());
        let attempts = nodes.into_iter().map(|node| {
            let node = node.among(&set_ups);
            async move {
                let (mut link, _) = node.connect::<()>(within).await?;
                let map = link.ask(&map_question(), within).await?;
                read_map_of(&map, &node.address)
            }
            .boxed()
        });
        // One after the other, without waiting for one that is gone before the next is asked. One that is slow is waited
        // for: otherwise each process of a fleet would log in to all nodes of a cluster that has too much to do.
        // Two silent nodes leave time for a third. The next attempt asks in another order.
        let turn = times.turn(2);
        let pace = Pace::of_servers(&set_ups, turn / NEXT_AFTER, turn);
        let found = first_success(attempts, pace, Instant::now() + within).await;
        found.map_err(|failed| {
            let silent = || Fault::silent(&self.endpoints[0].address, within);
            Fault::of_attempts(failed, silent, "the slots of the cluster not found")
        })
    }
}

/// Asks a node for the map.
pub(super) fn map_question() -> Cmd {
    cmd("CLUSTER").arg("SLOTS").take()
}

/// The answer to [`map_question`].
pub(super) fn read_map_of(answer: &Value, node: &Address) -> Result<SlotMap, Fault> {
    let what = match read_map(answer, node) {
        Some(map) if !map.is_empty() => return Ok(map),
        Some(_) => "no node of its cluster has a slot",
        None => "it does not report its slots",
    };
    Err(Fault::garbled(node, what))
}

/// Reads the answer of the node at `asked`, which leaves out its own host where it does not know it.
fn read_map(answer: &Value, asked: &str) -> Option<SlotMap> {
    let read = |range: &Value| {
        let (first, last): (Slot, Slot) = (part(range, 0)?, part(range, 1)?);
        let primary: Value = part(range, 2)?;
        let (host, port): (Option<String>, u16) = (part(&primary, 0)?, part(&primary, 1)?);
        let address = format!("{}:{port}", host.unwrap_or_default());
        let is_range = first <= last && usize::from(last) < SLOTS;
        is_range.then_some((absolute(&address, asked)?, first..=last))
    };
    answer.as_sequence()?.iter().map(read).collect()
}

fn part<T: FromRedisValue>(list: &Value, index: usize) -> Option<T> {
    redis::from_redis_value_ref(list.as_sequence()?.get(index)?).ok()
}

/// The address of a node as another one names it; without a host it is a port of the node `asked`.
pub(super) fn absolute(address: &str, asked: &str) -> Option<Address> {
    let (host, port) = address.rsplit_once(':')?;
    port.parse::<u16>().ok()?;
    let host = match host {
        "" | "?" => asked.rsplit_once(':')?.0,
        host => host,
    };
    is_host(host).then(|| format!("{host}:{port}").into())
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
