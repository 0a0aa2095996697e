//! Which primary has which slot.

use std::sync::Arc;

use redis::Value;

use super::slots::{SLOTS, Slot};
use crate::store::redis::endpoint::is_host;

/// A cluster has no more primaries: its specification recommends a thousand nodes at most. We connect to each
/// twice, so a map that lies must not name as many as there are slots.
pub(super) const MOST_PRIMARIES: usize = 1000;

/// `host:port` of a node.
pub(in crate::store::redis) type Address = Arc<str>;

/// A slot is one primary's: a map that gives away more than that, and as many again, has no end of ranges.
const MOST_GIVEN: usize = 2 * SLOTS;

/// The slots as one node saw them, with what redirects have told since.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::store::redis) struct SlotMap {
    /// All primaries that have a slot, and some that had.
    primaries: Vec<Address>,
    /// For each slot one more than the index of its primary; 0: nobody has it.
    owners: Box<[u16]>,
}

impl Default for SlotMap {
    fn default() -> Self {
        Self {
            primaries: Vec::new(),
            owners: vec![0; SLOTS].into(),
        }
    }
}

impl SlotMap {
    /// Reads the answer to `CLUSTER SHARDS`. `asked`: the host of whoever answered, which leaves out
    /// its own where it does not know it. `tls`: whether the ports wanted are those for TLS.
    pub(super) fn read_shards(answer: Value, asked: &str, tls: bool) -> Option<Self> {
        let (mut map, mut left) = (Self::default(), MOST_GIVEN);
        for shard in list(answer)? {
            let (mut slots, mut nodes) = (None, None);
            for (name, value) in fields(shard)? {
                match &*name {
                    "slots" => slots = Some(list(value)?),
                    "nodes" => nodes = Some(list(value)?),
                    _ => {}
                }
            }
            let slots = slots?;
            if slots.is_empty() {
                continue;
            }
            // A primary that failed stays in its shard beside the one that was promoted.
            let mut primaries = Vec::new();
            for node in nodes? {
                primaries.extend(primary(node, asked, tls)?);
            }
            primaries.sort_by_key(|(_, is_online)| !is_online);
            let Some((address, _)) = primaries.into_iter().next() else {
                continue;
            };
            let owner = map.index(&address)?;
            for range in slots.chunks(2) {
                let [Value::Int(first), Value::Int(last)] = range else {
                    return None;
                };
                map.give(*first, *last, owner, &mut left)?;
            }
        }
        Some(map)
    }

    /// Reads the answer to `CLUSTER SLOTS`, for servers before 7.
    pub(super) fn read_slots(answer: Value, asked: &str) -> Option<Self> {
        let (mut map, mut left) = (Self::default(), MOST_GIVEN);
        for range in list(answer)? {
            let range = list(range)?;
            let [Value::Int(first), Value::Int(last), primary, ..] = &range[..] else {
                return None;
            };
            let Value::Array(primary) = primary else {
                return None;
            };
            let [host, Value::Int(port), ..] = &primary[..] else {
                return None;
            };
            let host = text(host).unwrap_or_default();
            let owner = map.index(&address(&host, *port, asked)?)?;
            map.give(*first, *last, owner, &mut left)?;
        }
        Some(map)
    }

    pub(in crate::store::redis) fn owner(&self, slot: Slot) -> Option<&Address> {
        let owner = usize::from(self.owners[usize::from(slot)]);
        Some(&self.primaries[owner.checked_sub(1)?])
    }

    /// A redirect named another.
    pub(super) fn moved(&mut self, slot: Slot, to: &str) {
        // One too many stays where it was: the next map says where it is.
        if let Some(owner) = self.index(to) {
            self.owners[usize::from(slot)] = owner;
        }
    }

    /// A slot of each primary, of those that are asked for.
    pub(in crate::store::redis) fn wanted(&self, only: Option<Slot>) -> Vec<(Address, Slot)> {
        if let Some(slot) = only {
            let owner = self.owner(slot).cloned();
            return owner.map(|owner| (owner, slot)).into_iter().collect();
        }
        let mut first = vec![None; self.primaries.len()];
        for (slot, owner) in (0..).zip(&self.owners) {
            if let Some(index) = usize::from(*owner).checked_sub(1) {
                first[index].get_or_insert(slot);
            }
        }
        let found = self.primaries.iter().cloned().zip(first);
        found
            .filter_map(|(address, slot)| Some((address, slot?)))
            .collect()
    }

    /// `left`: how many may still be given away.
    fn give(&mut self, first: i64, last: i64, owner: u16, left: &mut usize) -> Option<()> {
        let (first, last) = (usize::try_from(first).ok()?, usize::try_from(last).ok()?);
        let slots = self.owners.get_mut(first..=last)?;
        *left = left.checked_sub(slots.len().max(1))?;
        slots.fill(owner);
        Some(())
    }

    /// One more than its index.
    fn index(&mut self, address: &str) -> Option<u16> {
        let known = self.primaries.iter().position(|known| **known == *address);
        let index = known.unwrap_or(self.primaries.len());
        if index >= MOST_PRIMARIES {
            return None;
        }
        if known.is_none() {
            self.primaries.push(address.into());
        }
        u16::try_from(index + 1).ok()
    }
}

/// A primary's address, and whether it is said to be well; an inner `None` for a replica.
#[allow(clippy::option_option, reason = "garbled, or another kind of node")]
fn primary(node: Value, asked: &str, tls: bool) -> Option<Option<(Address, bool)>> {
    let (mut host, mut ip, mut port, mut tls_port) = (None, None, None, None);
    let (mut is_primary, mut is_online) = (false, true);
    for (name, value) in fields(node)? {
        match (&*name, value) {
            ("endpoint", value) => host = text(&value),
            ("ip", value) => ip = text(&value),
            ("port", Value::Int(number)) => port = Some(number),
            ("tls-port", Value::Int(number)) => tls_port = Some(number),
            ("role", value) => is_primary = text(&value)? == "master",
            ("health", value) => is_online = text(&value)? == "online",
            _ => {}
        }
    }
    if !is_primary {
        return Some(None);
    }
    let host = host.filter(|host| !host.is_empty() && host != "?");
    let host = host.or(ip).unwrap_or_default();
    let port = if tls { tls_port.or(port) } else { port };
    Some(Some((address(&host, port?, asked)?, is_online)))
}

fn address(host: &str, port: i64, asked: &str) -> Option<Address> {
    let host = match host {
        "" | "?" => asked,
        host if is_host(host) => host,
        _ => return None,
    };
    let port = u16::try_from(port).ok()?;
    Some(format!("{host}:{port}").into())
}

fn list(value: Value) -> Option<Vec<Value>> {
    match value {
        Value::Array(values) | Value::Set(values) => Some(values),
        _ => None,
    }
}

/// A map, which RESP2 writes as a list.
fn fields(value: Value) -> Option<Vec<(String, Value)>> {
    match value {
        Value::Map(pairs) => pairs
            .into_iter()
            .map(|(name, value)| Some((text(&name)?, value)))
            .collect(),
        Value::Array(values) => {
            let mut values = values.into_iter();
            let mut pairs = Vec::new();
            while let Some(name) = values.next() {
                pairs.push((text(&name)?, values.next()?));
            }
            Some(pairs)
        }
        _ => None,
    }
}

fn text(value: &Value) -> Option<String> {
    match value {
        Value::BulkString(bytes) => Some(String::from_utf8_lossy(bytes).into_owned()),
        Value::SimpleString(text) | Value::VerbatimString { text, .. } => Some(text.clone()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn word(text: &str) -> Value {
        Value::BulkString(text.into())
    }

    fn node(host: &str, port: i64, role: &str, health: &str) -> Value {
        Value::Array(vec![
            word("id"),
            word("0123"),
            word("port"),
            Value::Int(port),
            word("tls-port"),
            Value::Int(port + 1),
            word("endpoint"),
            word(host),
            word("role"),
            word(role),
            word("health"),
            word(health),
        ])
    }

    fn shard(slots: &[i64], nodes: Vec<Value>) -> Value {
        let slots = slots.iter().map(|slot| Value::Int(*slot)).collect();
        Value::Map(vec![
            (word("slots"), Value::Array(slots)),
            (word("nodes"), Value::Array(nodes)),
        ])
    }

    #[test]
    fn shards_are_read_with_those_that_failed_and_those_that_know_no_name() {
        let failed = node("10.0.0.1", 1, "master", "fail");
        let promoted = node("10.0.0.2", 2, "master", "online");
        let replica = node("10.0.0.3", 3, "replica", "online");
        let own = node("?", 4, "master", "online");
        let empty = node("10.0.0.5", 5, "master", "online");
        let answer = || {
            Value::Array(vec![
                shard(
                    &[0, 9, 20, 29],
                    vec![failed.clone(), replica.clone(), promoted.clone()],
                ),
                shard(&[10, 19], vec![own.clone()]),
                shard(&[], vec![empty.clone()]),
            ])
        };
        let map = SlotMap::read_shards(answer(), "host", false).unwrap();
        let owner = |slot| map.owner(slot).map(|address| &**address);
        assert_eq!(owner(0), Some("10.0.0.2:2"));
        assert_eq!(owner(29), Some("10.0.0.2:2"));
        assert_eq!(owner(19), Some("host:4"));
        assert_eq!(owner(30), None);
        assert_eq!(
            map.wanted(None),
            [("10.0.0.2:2".into(), 0), ("host:4".into(), 10)]
        );
        assert_eq!(map.wanted(Some(15)), [("host:4".into(), 15)]);

        let tls = SlotMap::read_shards(answer(), "host", true).unwrap();
        assert_eq!(tls.owner(10).map(|address| &**address), Some("host:5"));
    }

    #[test]
    fn slots_are_read_and_moved() {
        let primary = Value::Array(vec![word(""), Value::Int(7000), word("id")]);
        let range = Value::Array(vec![Value::Int(5), Value::Int(6), primary]);
        let mut map = SlotMap::read_slots(Value::Array(vec![range]), "::1").unwrap();
        assert_eq!(map.owner(6).map(|address| &**address), Some("::1:7000"));
        map.moved(6, "other:1");
        assert_eq!(map.owner(6).map(|address| &**address), Some("other:1"));
        assert_eq!(map.owner(5).map(|address| &**address), Some("::1:7000"));
    }

    fn range(first: i64, last: i64, host: &str, port: i64) -> Value {
        let primary = Value::Array(vec![word(host), Value::Int(port), word("id")]);
        Value::Array(vec![Value::Int(first), Value::Int(last), primary])
    }

    #[test]
    fn a_map_of_too_much_is_none() {
        let primaries = |many: i64| {
            let one = |port| range(port, port, "h", port);
            let ranges = (1..=many).map(one).collect();
            SlotMap::read_slots(Value::Array(ranges), "h")
        };
        let most = MOST_PRIMARIES as i64;
        assert_eq!(primaries(most).unwrap().wanted(None).len(), MOST_PRIMARIES);
        assert_eq!(primaries(most + 1), None);
        // A redirect adds none either.
        let mut map = primaries(most).unwrap();
        map.moved(1, "other:1");
        assert_eq!(map.owner(1).map(|address| &**address), Some("h:1"));

        let overlapping = |many: usize| {
            let all = [0, SLOTS as i64 - 1].repeat(many);
            let shard = shard(&all, vec![node("h", 1, "master", "online")]);
            SlotMap::read_shards(Value::Array(vec![shard]), "h", false)
        };
        assert!(overlapping(2).is_some());
        assert_eq!(overlapping(3), None);
        // Ranges of nothing have an end, too.
        let nothing = vec![range(7, 6, "h", 1); MOST_GIVEN + 1];
        assert_eq!(SlotMap::read_slots(Value::Array(nothing), "h"), None);
    }

    #[test]
    fn what_is_no_host_or_port_is_no_address() {
        let read = |host: &str, port| {
            let ranges = Value::Array(vec![range(0, 1, host, port)]);
            SlotMap::read_slots(ranges, "asked").is_some()
        };
        for host in [
            "",
            "?",
            "10.0.0.1",
            "::1",
            "fe80::1%eth0",
            "redis-0.redis_x.svc",
        ] {
            assert!(read(host, 6379), "{host}");
        }
        let long = "h".repeat(254);
        for host in ["a b", "a\n", "\u{1b}[2J", "u:p@h", "a/b", "é", &long] {
            assert!(!read(host, 6379), "{host}");
        }
        for port in [-1, 65_536, i64::MAX, i64::MIN] {
            assert!(!read("h", port), "{port}");
        }
    }

    fn any_value() -> impl Strategy<Value = Value> {
        let words = prop::sample::select(vec![
            "slots", "nodes", "port", "endpoint", "role", "master", "health", "online", "?", "",
        ]);
        let leaf = prop_oneof![
            any::<i64>().prop_map(Value::Int),
            (0..20_000_i64).prop_map(Value::Int),
            words.prop_map(word),
            Just(Value::Nil),
        ];
        leaf.prop_recursive(5, 200, 8, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..8).prop_map(Value::Array),
                prop::collection::vec((inner.clone(), inner), 0..5).prop_map(Value::Map),
            ]
        })
    }

    proptest! {
        #[test]
        fn no_answer_panics(value in any_value()) {
            let _ = SlotMap::read_slots(value.clone(), "h");
            let _ = SlotMap::read_shards(value, "h", false);
        }
    }
}
