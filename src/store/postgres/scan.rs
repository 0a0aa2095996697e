//! Which keys have a lock, a page at a time.

use std::sync::Arc;

use futures::stream::{self, BoxStream};
use futures::{StreamExt, TryStreamExt};
use tokio_postgres::types::Type;

use super::backend::PostgresBackend;
use super::call::Argument;
use super::connection::{Connection, Patience};
use super::fault::Fault;
use crate::base::{StoreError, key};

/// How many rows one call looks at.
const PAGE: i32 = 500;

/// Lists the keys under the prefix that begin with `start`, on a connection of its own.
pub(super) fn scan(
    backend: Arc<PostgresBackend>,
    start: &str,
) -> BoxStream<'static, Result<Vec<Arc<str>>, StoreError>> {
    let pass = Pass {
        sql: backend.names.sql("scan_1($1, $2, $3)"),
        prefix: backend.names.lock(""),
        start: backend.names.lock(start),
        backend,
        after: Some(String::new()),
        connection: None,
    };
    let pages = stream::try_unfold(pass, Pass::page);
    pages.map_err(StoreError::from).boxed()
}

/// One pass over the locks.
struct Pass {
    backend: Arc<PostgresBackend>,
    sql: String,
    prefix: String,
    start: String,
    /// Where the next page begins; `None` after the last one.
    after: Option<String>,
    connection: Option<Connection>,
}

impl Pass {
    async fn page(mut self) -> Result<Option<(Vec<Arc<str>>, Self)>, Fault> {
        let Some(after) = self.after.take() else {
            return Ok(None);
        };
        let endpoint = &self.backend.settings.endpoint;
        let mut connection = match self.connection.take() {
            Some(connection) => connection,
            None => {
                let mut connection = endpoint.connect().await?;
                // It may be the first to call a function of the schema.
                self.backend.check_schema(&mut connection).await?;
                connection.patience = Patience::Each(self.backend.within);
                connection
            }
        };
        let arguments: [Argument<'_>; 3] = [
            (&self.start, Type::TEXT),
            (&after, Type::TEXT),
            (&PAGE, Type::INT4),
        ];
        let asking = connection.query(&self.backend.names, &self.sql, &arguments);
        let rows = asking.await?;
        let mut keys = Vec::new();
        for row in &rows {
            // In a database without an encoding it may be anything.
            let read = row
                .try_get(0)
                .and_then(|name: String| Ok((name, row.try_get(1)?)));
            let (name, in_use): (String, bool) =
                read.map_err(|error| Fault::broken(&endpoint.address, &error))?;
            // Rows of others may have any name.
            if in_use
                && let Some(key) = name.strip_prefix(&self.prefix)
                && key::fault(&self.backend.names.prefix, key).is_none()
            {
                keys.push(Arc::from(key));
            }
            self.after = Some(name);
        }
        self.connection = Some(connection);
        Ok(Some((keys, self)))
    }
}
