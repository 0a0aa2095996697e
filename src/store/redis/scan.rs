//! Which keys have a lock: SCAN on every primary, a page at a time.

use std::collections::btree_map::IntoKeys;
use std::sync::Arc;

use futures::stream::{self, BoxStream};
use futures::{StreamExt, TryFutureExt, TryStreamExt};
use redis::cmd;

use super::backend::RedisBackend;
use super::fault::Fault;
use super::link::Link;
use crate::base::StoreError;
use crate::store::driver::{Address, SlotSet};

/// How many names the server looks at in one call, and how many keys it returns at most, nearly: a fraction of a
/// millisecond, so that nobody else is held up.
const PAGE: usize = 500;

/// Lists the keys that begin with `start`, on a connection of its own to each primary, one after the other.
pub(super) fn scan(
    backend: Arc<RedisBackend>,
    start: Arc<str>,
) -> BoxStream<'static, Result<Vec<Arc<str>>, StoreError>> {
    let pages = async move {
        let primaries = backend.topology.primaries(backend.times).await?;
        let scan = Scan {
            backend,
            start,
            primaries: primaries.into_keys(),
            current: None,
        };
        Ok(stream::try_unfold(scan, Scan::page))
    };
    pages.try_flatten_stream().map_err(StoreError::from).boxed()
}

struct Scan {
    backend: Arc<RedisBackend>,
    start: Arc<str>,
    /// Those that are still to be scanned.
    primaries: IntoKeys<Address, SlotSet>,
    /// The connection to the present one, and where the next page begins.
    current: Option<(Link, u64)>,
}

impl Scan {
    async fn page(mut self) -> Result<Option<(Vec<Arc<str>>, Self)>, Fault> {
        let (topology, times) = (&self.backend.topology, self.backend.times);
        let (mut link, cursor) = match self.current.take() {
            Some(current) => current,
            None => match self.primaries.next() {
                Some(address) => (topology.connect_resp2(&address, times).await?, 0),
                None => return Ok(None),
            },
        };
        let names = &self.backend.names;
        let mut scan = cmd("SCAN");
        scan.arg(cursor)
            .arg("MATCH")
            .arg(names.pattern(&self.start));
        scan.arg("COUNT").arg(PAGE);
        let page = link.ask(&scan, times.answer).await?;
        let page: Result<(u64, Vec<Vec<u8>>), _> = redis::from_redis_value(page);
        let what = "unexpected answer to a scan";
        let (next, page) = page.map_err(|_| Fault::garbled(&link.address, what))?;
        // Names of others may be anything.
        let page = page
            .iter()
            .filter_map(|name| std::str::from_utf8(name).ok());
        let keys = page.filter_map(|name| names.key_of(name));
        let keys = keys.filter(|key| key.starts_with(&*self.start));
        let keys = keys.map(Arc::from).collect();
        self.current = (next != 0).then_some((link, next));
        Ok(Some((keys, self)))
    }
}
