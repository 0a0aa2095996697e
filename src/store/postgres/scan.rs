//! Which keys have a lock, a page at a time.

use std::sync::Arc;
use std::time::Duration;

use futures::stream::{self, BoxStream};
use futures::{StreamExt, TryStreamExt};
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_postgres::types::{ToSql, Type};

use super::address::Link;
use super::call::{self, Names};
use super::fault::Fault;
use super::schema;
use super::store::Settings;
use crate::StoreError;

/// How many rows one call looks at.
const PAGE: i32 = 500;

/// Lists the keys under the prefix that begin with `start`, on a connection of its own.
pub(super) fn scan(
    settings: Settings,
    names: Arc<Names>,
    start: &str,
    within: Duration,
) -> BoxStream<'static, Result<Vec<Arc<str>>, StoreError>> {
    let pass = Pass {
        sql: format!(
            "SELECT * FROM {}.scan_1($1, $2, $3)",
            schema::quote(&settings.schema)
        ),
        settings,
        prefix: names.lock(""),
        start: names.lock(start),
        names,
        within,
        after: Some(String::new()),
        link: None,
    };
    let pages = stream::try_unfold(pass, Pass::page);
    pages.map_err(StoreError::from).boxed()
}

/// One pass over the locks.
struct Pass {
    settings: Settings,
    names: Arc<Names>,
    sql: String,
    prefix: String,
    start: String,
    within: Duration,
    /// Where the next page begins; `None` after the last one.
    after: Option<String>,
    link: Option<Link>,
}

impl Pass {
    /// It may be the first to call a function of the schema.
    async fn check_owner(&self, link: &Link) -> Result<(), Fault> {
        let (address, schema) = (&self.settings.endpoint.address, &self.settings.schema);
        let which: [(&(dyn ToSql + Sync), Type); 2] = [
            (schema, Type::TEXT),
            (&self.settings.schema_owner, Type::TEXT),
        ];
        let asked = call::bounded(&link.client, &self.names, schema::FOREIGN, &which);
        let asked = timeout(self.within, asked).await;
        let rows = asked.map_err(|_| Fault::silent(address, self.within))?;
        let rows = rows.map_err(|error| Fault::refused(address, &error))?;
        match schema::refuse_foreign(address, schema, &rows)? {
            true => Ok(()),
            false => Err(schema::missing(address, schema)),
        }
    }

    async fn page(mut self) -> Result<Option<(Vec<Arc<str>>, Self)>, Fault> {
        let Some(after) = self.after.take() else {
            return Ok(None);
        };
        let endpoint = &self.settings.endpoint;
        let link = match self.link.take() {
            Some(link) => link,
            None => {
                let (sender, _heard) = mpsc::unbounded_channel();
                let link = endpoint.connect(self.within, sender).await?;
                self.check_owner(&link).await?;
                link
            }
        };
        let arguments: [(&(dyn ToSql + Sync), Type); 3] = [
            (&self.start, Type::TEXT),
            (&after, Type::TEXT),
            (&PAGE, Type::INT4),
        ];
        let asked = call::bounded(&link.client, &self.names, &self.sql, &arguments);
        let asked = timeout(self.within, asked).await;
        let rows = asked.map_err(|_| Fault::silent(&endpoint.address, self.within))?;
        let rows = rows.map_err(|error| Fault::refused(&endpoint.address, &error))?;
        let mut keys = Vec::new();
        for row in &rows {
            // In a database without an encoding it may be anything.
            let read = row
                .try_get(0)
                .and_then(|name: String| Ok((name, row.try_get(1)?)));
            let (name, in_use): (String, bool) =
                read.map_err(|error| Fault::broken(&endpoint.address, &error))?;
            if in_use && let Some(key) = name.strip_prefix(&self.prefix) {
                keys.push(Arc::from(key));
            }
            self.after = Some(name);
        }
        self.link = Some(link);
        Ok(Some((keys, self)))
    }
}
