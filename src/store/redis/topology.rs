//! Which servers a store consists of, and where they are.

use std::future;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;

use super::cluster::{Address, Seeds};
use super::endpoint::Endpoint;
use super::fault::Fault;
#[cfg(feature = "sentinel")]
use super::sentinel::Sentinels;
use super::stream::Link;

#[derive(Clone, Debug)]
pub(super) enum Topology {
    /// One server, which stays where it is.
    Fixed(Box<Endpoint>),
    /// One primary, which is wherever the sentinels say.
    #[cfg(feature = "sentinel")]
    Sentinels(Arc<Sentinels>),
    /// Several primaries, each with some of the slots.
    Cluster(Arc<Seeds>),
}

impl Topology {
    /// Host and port, or a socket's path; of a cluster those of one node.
    pub(super) fn address(&self) -> &Arc<str> {
        match self {
            Self::Fixed(endpoint) => endpoint.address(),
            #[cfg(feature = "sentinel")]
            Self::Sentinels(sentinels) => sentinels.address(),
            Self::Cluster(seeds) => seeds.address(),
        }
    }

    pub(super) fn seeds(&self) -> Option<&Arc<Seeds>> {
        match self {
            Self::Cluster(seeds) => Some(seeds),
            _ => None,
        }
    }

    /// How to connect to the node `address` now. Asked before each attempt.
    pub(super) async fn endpoint(
        &self,
        address: &str,
        within: Duration,
    ) -> Result<Endpoint, Fault> {
        let _ = within;
        match self {
            Self::Fixed(endpoint) => Ok((**endpoint).clone()),
            #[cfg(feature = "sentinel")]
            Self::Sentinels(sentinels) => sentinels.primary(within).await,
            Self::Cluster(seeds) => Ok(seeds.node(address)),
        }
    }

    /// An attempt to connect to what [`Self::endpoint`] named has failed.
    pub(super) fn doubt(&self) {
        #[cfg(feature = "sentinel")]
        if let Self::Sentinels(sentinels) = self {
            sentinels.doubt();
        }
    }

    /// Connects to the node `address`, where nothing is pushed.
    pub(super) async fn connect_resp2(
        &self,
        address: &str,
        within: Duration,
    ) -> Result<(Link, Address), Fault> {
        let endpoint = self.endpoint(address, within).await?;
        let link = endpoint.connect_resp2(within).await;
        let link = link.inspect_err(|_| self.doubt())?;
        Ok((link, endpoint.address().clone()))
    }

    /// Resolves when the primary is another server than `here`.
    pub(super) fn moved(&self, here: Endpoint, within: Duration) -> BoxFuture<'static, Fault> {
        let _ = (&here, within);
        #[cfg(feature = "sentinel")]
        if let Self::Sentinels(sentinels) = self.clone() {
            let moved = async move {
                let there = sentinels.moved(&here, within).await;
                let address = here.address().clone();
                let (from, to) = (&*address, &**there.address());
                tracing::debug!(from, to, "the primary has changed");
                Fault::NotPrimary { address }
            };
            return moved.boxed();
        }
        future::pending().boxed()
    }

    /// Connects once, to see that a server answers and accepts our credentials.
    pub(super) async fn try_out(&self, within: Duration) -> Result<(), Fault> {
        match self {
            Self::Cluster(seeds) => seeds.find_map(within).await.map(drop),
            _ => {
                let endpoint = self.endpoint("", within).await?;
                let tried = endpoint.try_out(within).await;
                tried.inspect_err(|_| self.doubt())
            }
        }
    }
}
