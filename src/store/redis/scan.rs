//! Which keys have a lock: SCAN on every primary, a page at a time.

use std::collections::BTreeSet;
use std::sync::Arc;

use futures::stream::{self, BoxStream};
use futures::{StreamExt, TryStreamExt};
use redis::cmd;

use super::cluster::Address;
use super::fault::Fault;
use super::session::Shared;
use super::stream::Link;
use crate::StoreError;

/// How many names the server looks at in one call, and how many keys it returns at most, nearly: a fraction of a
/// millisecond, so that nobody else is held up.
const PAGE: usize = 500;

/// Lists the keys that begin with `start`, on a connection of its own to each primary, one after the other.
pub(super) fn scan(
    shared: Arc<Shared>,
    start: Arc<str>,
) -> BoxStream<'static, Result<Vec<Arc<str>>, StoreError>> {
    let primaries = {
        let shared = shared.clone();
        async move { primaries(&shared).await }
    };
    let keys = stream::once(primaries)
        .map_ok(|primaries| stream::iter(primaries.into_iter().map(Ok)))
        .try_flatten()
        .and_then(move |address| {
            let pass = Pass::open(shared.clone(), start.clone(), address);
            async move { Ok(stream::try_unfold(pass.await?, Pass::page)) }
        })
        .try_flatten();
    keys.map_err(StoreError::from).boxed()
}

async fn primaries(shared: &Shared) -> Result<BTreeSet<Address>, Fault> {
    let Some(seeds) = shared.topology.seeds() else {
        return Ok(BTreeSet::from([shared.topology.address().clone()]));
    };
    let map = seeds.find_map(&[], shared.config.response_timeout).await?;
    Ok(map.into_iter().map(|(address, _)| address).collect())
}

/// One pass over the names of a server.
struct Pass {
    shared: Arc<Shared>,
    start: Arc<str>,
    link: Link,
    address: Address,
    /// `None` after the last page.
    cursor: Option<u64>,
}

impl Pass {
    async fn open(shared: Arc<Shared>, start: Arc<str>, address: Address) -> Result<Self, Fault> {
        let within = shared.config.response_timeout;
        let (link, address) = shared.topology.connect_resp2(&address, within).await?;
        Ok(Self {
            shared,
            start,
            link,
            address,
            cursor: Some(0),
        })
    }

    async fn page(mut self) -> Result<Option<(Vec<Arc<str>>, Self)>, Fault> {
        let Some(cursor) = self.cursor else {
            return Ok(None);
        };
        let names = &self.shared.names;
        let mut scan = cmd("SCAN");
        scan.arg(cursor)
            .arg("MATCH")
            .arg(names.pattern(&self.start));
        scan.arg("COUNT").arg(PAGE);
        let within = self.shared.config.response_timeout;
        let page = self.link.ask(&scan, &self.address, within).await?;
        let page: Result<(u64, Vec<Vec<u8>>), _> = redis::from_redis_value(page);
        let what = "unexpected answer to a scan";
        let (next, page) = page.map_err(|_| Fault::garbled(&self.address, what))?;
        // Names of others may be anything.
        let page = page
            .iter()
            .filter_map(|name| std::str::from_utf8(name).ok());
        let keys = page.filter_map(|name| names.key_of(name));
        let keys = keys.filter(|key| key.starts_with(&*self.start));
        let keys = keys.map(Arc::from).collect();
        self.cursor = (next != 0).then_some(next);
        Ok(Some((keys, self)))
    }
}
