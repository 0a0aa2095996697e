//! Which keys have a lock, a page at a time.

use std::sync::Arc;

use futures::stream::{self, BoxStream};
use futures::{StreamExt, TryFutureExt, TryStreamExt};
use tokio_postgres::Error;
use tokio_postgres::types::Type;

use super::backend::PostgresBackend;
use super::call::Argument;
use super::connection::Connection;
use super::fault::Fault;
use crate::base::{StoreError, key};

/// How many rows one call looks at.
const PAGE: i32 = 500;

/// Lists the keys under the prefix that begin with `start`, on a connection of its own.
pub(super) fn scan(
    backend: Arc<PostgresBackend>,
    start: &str,
) -> BoxStream<'static, Result<Vec<Arc<str>>, StoreError>> {
    let start = backend.names.lock(start);
    let pages = async move {
        let mut connection = backend.settings.endpoint.connect().await?;
        // It may be the first to call a function of the schema.
        backend.check_schema(&mut connection).await?;
        connection.begin_calls(backend.within);
        let pass = Pass {
            backend,
            connection,
            start,
            after: Some(String::new()),
        };
        Ok(stream::try_unfold(pass, Pass::page))
    };
    pages.try_flatten_stream().map_err(StoreError::from).boxed()
}

/// One pass over the locks.
struct Pass {
    backend: Arc<PostgresBackend>,
    connection: Connection,
    start: String,
    /// Where the next page begins; `None` after the last one.
    after: Option<String>,
}

impl Pass {
    async fn page(mut self) -> Result<Option<(Vec<Arc<str>>, Self)>, Fault> {
        let Some(after) = self.after.take() else {
            return Ok(None);
        };
        let (names, caller) = (&self.backend.names, self.connection.caller.clone());
        let asking = async {
            let arguments: [Argument<'_>; 3] = [
                (&self.start, Type::TEXT),
                (&after, Type::TEXT),
                (&PAGE, Type::INT4),
            ];
            let rows = caller.call(names, "scan_1($1, $2, $3)", &arguments).await?;
            // In a database without an encoding it may be anything.
            let read = rows
                .iter()
                .map(|row| Ok((row.try_get(0)?, row.try_get(1)?)));
            read.collect::<Result<Vec<(String, bool)>, Error>>()
        };
        let found = self.connection.get(asking).await?;
        let (prefix, mut keys) = (names.lock(""), Vec::new());
        for (name, in_use) in found {
            // Rows of others may have any name.
            if in_use
                && let Some(key) = name.strip_prefix(&prefix)
                && key::fault(&names.prefix, key).is_none()
            {
                keys.push(Arc::from(key));
            }
            self.after = Some(name);
        }
        Ok(Some((keys, self)))
    }
}
