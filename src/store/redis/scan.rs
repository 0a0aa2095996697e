//! Which keys have a lock: SCAN on every primary, a page at a time.

use std::sync::Arc;

use futures::stream::{self, BoxStream};
use futures::{StreamExt, TryStreamExt};
use redis::cmd;

use super::backend::RedisBackend;
use super::fault::Fault;
use super::link::Link;
use crate::base::StoreError;

/// How many names the server looks at in one call, and how many keys it returns at most, nearly: a fraction of a
/// millisecond, so that nobody else is held up.
const PAGE: usize = 500;

/// Lists the keys that begin with `start`, on a connection of its own to each primary, one after the other.
pub(super) fn scan(
    backend: Arc<RedisBackend>,
    start: Arc<str>,
) -> BoxStream<'static, Result<Vec<Arc<str>>, StoreError>> {
    let primaries = {
        let backend = backend.clone();
        async move { backend.topology.primaries(backend.times()).await }
    };
    let keys = stream::once(primaries)
        .map_ok(|primaries| stream::iter(primaries.into_keys().map(Ok)))
        .try_flatten()
        .and_then(move |address| {
            let (backend, start) = (backend.clone(), start.clone());
            async move {
                let times = backend.times();
                let link = backend.topology.connect_resp2(&address, times).await?;
                let pass = Pass {
                    backend,
                    start,
                    link,
                    cursor: Some(0),
                };
                Ok(stream::try_unfold(pass, Pass::page))
            }
        })
        .try_flatten();
    keys.map_err(StoreError::from).boxed()
}

/// One pass over the names of a server.
struct Pass {
    backend: Arc<RedisBackend>,
    start: Arc<str>,
    link: Link,
    /// `None` after the last page.
    cursor: Option<u64>,
}

impl Pass {
    async fn page(mut self) -> Result<Option<(Vec<Arc<str>>, Self)>, Fault> {
        let Some(cursor) = self.cursor else {
            return Ok(None);
        };
        let names = &self.backend.names;
        let mut scan = cmd("SCAN");
        scan.arg(cursor)
            .arg("MATCH")
            .arg(names.pattern(&self.start));
        scan.arg("COUNT").arg(PAGE);
        let within = self.backend.within;
        let page = self.link.ask(&scan, within).await?;
        let page: Result<(u64, Vec<Vec<u8>>), _> = redis::from_redis_value(page);
        let what = "unexpected answer to a scan";
        let (next, page) = page.map_err(|_| Fault::garbled(&self.link.address, what))?;
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
