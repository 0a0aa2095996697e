//! Which servers a store consists of, and where they are.

use std::collections::BTreeMap;
#[cfg(feature = "tls-rustls")]
use std::sync::Arc;

use futures::FutureExt;
use futures::future::BoxFuture;

use super::backend::Times;
use super::cluster::Seeds;
use super::credentials::Source;
use super::endpoint::{Endpoint, split_url};
use super::fault::Fault;
use super::link::Link;
use super::sentinel::Sentinels;

use crate::base::user_code::log;
use crate::store::attempts::SetUps;
use crate::store::driver::{Address, SlotSet};
#[cfg(feature = "tls-rustls")]
use crate::store::tls::Tls;

#[derive(Clone, Debug)]
pub(super) enum Topology {
    /// One server, which stays where it is.
    Fixed(Endpoint),
    /// One primary, which is wherever the sentinels say.
    Sentinels(Sentinels),
    /// Several primaries, each with some of the slots.
    Cluster(Seeds),
}

impl Topology {
    pub(super) fn parse(url: &str) -> Result<Self, Fault> {
        // Without the feature an endpoint's error says that it is missing.
        if cfg!(feature = "cluster")
            && let Some(urls) = Seeds::split(url)
        {
            Seeds::parse(&urls).map(Self::Cluster)
        } else if cfg!(feature = "sentinel") && split_url(url).0.ends_with("+sentinel") {
            Sentinels::parse(url).map(Self::Sentinels)
        } else {
            Endpoint::parse(url).map(Self::Fixed)
        }
    }

    /// The servers, without their sentinels.
    fn servers(&mut self) -> &mut [Endpoint] {
        match self {
            Self::Fixed(endpoint) => std::slice::from_mut(endpoint),
            Self::Sentinels(sentinels) => std::slice::from_mut(&mut sentinels.server),
            Self::Cluster(seeds) => &mut seeds.endpoints,
        }
    }

    /// Gives all servers one TLS configuration.
    #[cfg(feature = "tls-rustls")]
    pub(super) fn secured(mut self, tls: Result<Tls, String>) -> Result<Self, Fault> {
        let invalid = |reason| Fault::invalid("certificates", reason);
        let tls = Arc::new(tls.map_err(invalid)?);
        let secure = |endpoint: &mut Endpoint| endpoint.secure(&tls);
        if let Self::Sentinels(sentinels) = &mut self {
            sentinels.all.iter_mut().try_for_each(secure)?;
        }
        self.servers().iter_mut().try_for_each(secure)?;
        Ok(self)
    }

    /// Gives all servers credentials that change; sentinels keep their own.
    pub(super) fn with_credentials(mut self, credentials: &Source) -> Self {
        for server in self.servers() {
            server.credentials = Some(credentials.clone());
        }
        self
    }

    /// Of a cluster one of its servers. The address of the one behind sentinels names these.
    pub(super) fn server(&self) -> &Endpoint {
        match self {
            Self::Fixed(endpoint) => endpoint,
            Self::Sentinels(sentinels) => &sentinels.server,
            Self::Cluster(seeds) => &seeds.endpoints[0],
        }
    }

    /// Host and port, or a socket's path; of a cluster those of one node.
    pub(super) fn address(&self) -> &Address {
        &self.server().address
    }

    pub(super) fn seeds(&self) -> Option<&Seeds> {
        match self {
            Self::Cluster(seeds) => Some(seeds),
            _ => None,
        }
    }

    /// Where its primaries are, and their slots; those of a cluster are asked for.
    pub(super) async fn primaries(
        &self,
        times: Times,
    ) -> Result<BTreeMap<Address, SlotSet>, Fault> {
        let Self::Cluster(seeds) = self else {
            return Ok([(self.address().clone(), SlotSet::new())].into());
        };
        let mut primaries = BTreeMap::<_, SlotSet>::new();
        for (address, slots) in seeds.find_map(&[], times).await? {
            primaries.entry(address).or_default().extend(slots);
        }
        Ok(primaries)
    }

    /// How to connect to the node `address` now. Asked before each attempt.
    pub(super) async fn endpoint(&self, address: &str, times: Times) -> Result<Endpoint, Fault> {
        match self {
            Self::Fixed(endpoint) => Ok(endpoint.clone()),
            Self::Sentinels(sentinels) => sentinels.primary(times).await,
            Self::Cluster(seeds) => Ok(seeds.node(address)),
        }
    }

    /// An attempt to connect to what [`Self::endpoint`] named has failed.
    pub(super) fn doubt(&self) {
        if let Self::Sentinels(sentinels) = self {
            sentinels.doubt();
        }
    }

    /// Connects to the node `address`, where nothing is pushed.
    pub(super) async fn connect_resp2(&self, address: &str, times: Times) -> Result<Link, Fault> {
        let endpoint = self.endpoint(address, times).await?;
        let link = endpoint.connect_resp2(times.connect).await;
        link.inspect_err(|_| self.doubt())
    }

    /// Resolves when the primary is another server than `here`. `None` if it never is.
    pub(super) fn moved(&self, here: Endpoint, times: Times) -> Option<BoxFuture<'static, Fault>> {
        let Self::Sentinels(sentinels) = self.clone() else {
            return None;
        };
        let moved = async move {
            let there = sentinels.moved(&here, times).await;
            let (address, to) = (here.address, &*there.address);
            log!(debug, from = &*address, to, "the primary has changed");
            Fault::not_primary(&address)
        };
        Some(moved.boxed())
    }

    /// Connects once, to see that a server answers and accepts our credentials.
    pub(super) async fn try_out(&self, times: Times) -> Result<(), Fault> {
        match self {
            Self::Cluster(seeds) => seeds.find_map(&[], times).await.map(drop),
            _ => {
                let within = times.connect;
                let endpoint = self.endpoint("", times).await?;
                let set_ups = SetUps::default();
                let tried = endpoint.at_any_address(within, &set_ups, |endpoint| {
                    async move { endpoint.try_out(within).await }.boxed()
                });
                tried.await.inspect_err(|_| self.doubt())
            }
        }
    }
}
