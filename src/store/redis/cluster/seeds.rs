//! How a cluster is named, and how its nodes are found.

use std::convert::Infallible;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use futures::stream::FuturesUnordered;
use redis::{Value, cmd};

use super::map::SlotMap;
use crate::store::redis::endpoint::Endpoint;
use crate::store::redis::fault::{Fault, Refusal, listed};
use crate::store::redis::socket::Socket;

/// A node that has not given its map within this part of the time that it has is not waited for alone:
/// it may be stopped. Most answer, and no other is bothered.
const NEXT_AFTER: u32 = 8;

/// Some nodes of a cluster, of which one is enough to find the others.
#[derive(Clone)]
pub(in crate::store::redis) struct Seeds {
    endpoints: Vec<Endpoint>,
    address: Arc<str>,
}

impl Seeds {
    /// Takes several urls apart into one each for a node.
    ///
    /// `redis+cluster://user:password@host:port,host:port/` has one user and several nodes.
    pub(in crate::store::redis) fn split(url: &str) -> Option<Vec<String>> {
        let (scheme, rest) = url.split_once("://")?;
        let scheme = scheme.to_ascii_lowercase();
        let scheme = scheme.strip_suffix("+cluster")?;
        let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
        // What is wrong with it is said of the urls that this makes.
        let (authority, tail) = rest.split_at(end);
        let (user, hosts) = match authority.rsplit_once('@') {
            Some((user, hosts)) => (format!("{user}@"), hosts),
            None => (String::new(), authority),
        };
        let url = |host| format!("{scheme}://{user}{host}{tail}");
        Some(hosts.split(',').map(url).collect())
    }

    pub(in crate::store::redis) fn new(endpoints: Vec<Endpoint>) -> Result<Self, Fault> {
        let invalid = |reason: &str| Fault::Url {
            reason: reason.to_owned(),
        };
        let Some(first) = endpoints.first() else {
            return Err(invalid("a cluster needs a node at least"));
        };
        if endpoints.iter().any(|endpoint| endpoint.host().is_none()) {
            return Err(invalid("the nodes of a cluster have hosts and ports"));
        }
        if endpoints.iter().any(|endpoint| endpoint.db() != 0) {
            return Err(invalid("a cluster has database 0 only"));
        }
        let address = first.address().clone();
        Ok(Self { endpoints, address })
    }

    /// The first one's.
    pub(in crate::store::redis) fn address(&self) -> &Arc<str> {
        &self.address
    }

    pub(in crate::store::redis) fn endpoints(&self) -> &[Endpoint] {
        &self.endpoints
    }

    /// A node that the map names: with the first seed's user and certificates.
    pub(in crate::store::redis) fn node(&self, address: &str) -> Endpoint {
        let (host, port) = address.rsplit_once(':').unwrap_or((address, ""));
        self.endpoints[0].elsewhere(host, port.parse().unwrap_or(6379))
    }

    /// Looks whether the cluster is there.
    pub(in crate::store::redis) async fn try_out(&self, within: Duration) -> Result<(), Fault> {
        self.find_map(within).await.map(drop)
    }

    /// The map as the first of them that answers has it. `within` is for all of it.
    pub(in crate::store::redis) async fn find_map(
        &self,
        within: Duration,
    ) -> Result<SlotMap, Fault> {
        let mut asked = Asked::default();
        let asking = asked.until_one_answers(self.endpoints.clone(), within);
        match tokio::time::timeout(within, asking).await {
            Ok(Some(map)) => Ok(map),
            Ok(None) => Err(asked.fault()),
            Err(_) => {
                asked.give_up(within);
                Err(asked.fault())
            }
        }
    }
}

impl fmt::Debug for Seeds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&self.endpoints).finish()
    }
}

/// The map as the first of these that answers has it. `within` is for each step.
pub(in crate::store::redis) async fn find_map(
    nodes: Vec<Endpoint>,
    within: Duration,
) -> Result<SlotMap, Fault> {
    let mut asked = Asked::default();
    let found = asked.until_one_answers(nodes, within).await;
    found.ok_or_else(|| asked.fault())
}

/// Who was asked for the map, and what came of it.
#[derive(Default)]
struct Asked {
    waiting: Vec<Arc<str>>,
    faults: Vec<Fault>,
}

impl Asked {
    async fn until_one_answers(
        &mut self,
        nodes: Vec<Endpoint>,
        within: Duration,
    ) -> Option<SlotMap> {
        let mut nodes = nodes.into_iter();
        let mut asking: FuturesUnordered<_> = FuturesUnordered::new();
        loop {
            let next = nodes.next();
            let is_last = next.is_none();
            if let Some(node) = next {
                let address = node.address().clone();
                self.waiting.push(address.clone());
                asking.push(async move { (address, ask_map(node, within).await) });
            }
            let answer = match is_last {
                true => asking.next().await,
                false => match tokio::time::timeout(within / NEXT_AFTER, asking.next()).await {
                    Ok(answer) => answer,
                    Err(_) => continue,
                },
            };
            match answer {
                Some((_, Ok(map))) => return Some(map),
                Some((address, Err(fault))) => {
                    self.waiting.retain(|waiting| *waiting != address);
                    self.faults.push(fault);
                }
                None if is_last => return None,
                None => {}
            }
        }
    }

    /// No more time is left for those that have not answered.
    fn give_up(&mut self, within: Duration) {
        let silent = |address| Fault::Silent { address, within };
        self.faults.extend(self.waiting.drain(..).map(silent));
    }

    /// What all of them said.
    fn fault(mut self) -> Fault {
        match self.faults.len() {
            0 => Fault::Url {
                reason: "a cluster needs a node at least".to_owned(),
            },
            1 => self.faults.remove(0),
            _ => {
                let told: Vec<_> = self.faults.iter().map(Fault::to_string).collect();
                Fault::Nodes {
                    told: listed(&told, "; "),
                    // Those that are away may know it.
                    is_lasting: self.faults.iter().all(Fault::is_lasting),
                }
            }
        }
    }
}

async fn ask_map(node: Endpoint, within: Duration) -> Result<SlotMap, Fault> {
    let address = node.address().clone();
    let silent = Fault::Silent {
        address: address.clone(),
        within,
    };
    let asking = async {
        let nowhere = |_| Ok::<_, Infallible>(());
        let Socket {
            mut connection,
            mut pump,
        } = match node.connect(within, nowhere).await? {
            Some(socket) => socket,
            None => node.connect_resp2(within).await?,
        };
        let mut ask = async |word: &str| {
            let command = cmd("CLUSTER").arg(word).take();
            let asking = connection.send_packed_command(&command);
            pump.run(asking).await.map_err(|source| Fault::Broken {
                address: address.clone(),
                source,
            })
        };
        let host = node.host().unwrap_or_default();
        let shards = ask("SHARDS").await?;
        // Servers before 7 do not know the word, and a user may have the right to one of both.
        let (map, answer) = match &shards {
            Value::ServerError(_) => {
                let slots = ask("SLOTS").await?;
                (SlotMap::read_slots(slots.clone(), host), slots)
            }
            _ => (
                SlotMap::read_shards(shards.clone(), host, node.is_tls()),
                shards,
            ),
        };
        if let Value::ServerError(error) = &answer {
            return Err(Fault::Refused {
                address: address.clone(),
                refusal: Refusal::from(error),
            });
        }
        let garbled = |what| Fault::Garbled {
            address: address.clone(),
            what,
        };
        let map = map.ok_or_else(|| garbled("it does not tell where the slots are"))?;
        if map.wanted(None).is_empty() {
            return Err(garbled("nobody in its cluster has a slot"));
        }
        Ok(map)
    };
    match tokio::time::timeout(within, asking).await {
        Ok(answer) => answer,
        Err(_) => Err(silent),
    }
}

#[cfg(test)]
mod tests {
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
}
