//! How the connections of a session are set up (O4).

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::sync::mpsc::{self, UnboundedReceiver};
use tokio::time::{Instant, timeout};
use tokio_postgres::error::SqlState;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, Row};

use super::address::{Endpoint, Heard, Link};
use super::call::{self, Call, Names, Prepared};
use super::fault::{Fault, is_without_schema};
use super::schema;
use super::store::Settings;
use crate::store::server_clock::ServerClock;

/// A server process, by which a later connection ends it.
pub(super) type Backend = (i32, SystemTime);

/// Connections that are ready for use.
pub(super) struct Connected {
    /// What comes on the first of them, which listens.
    pub(super) heard: UnboundedReceiver<Heard>,
    /// The advisory lock that the first of them holds; 0 if it cannot listen.
    pub(super) line: i64,
    pub(super) links: Vec<Ready>,
    pub(super) clock: ServerClock,
    /// The server's own number, where the role may know it.
    pub(super) identity: Option<Arc<str>>,
    /// Why nothing can be heard.
    pub(super) no_push: Option<String>,
}

/// A connection for calls.
pub(super) struct Ready {
    pub(super) link: Link,
    /// `None` behind a pooler.
    pub(super) prepared: Option<Prepared>,
}

/// What the setup needs to know.
pub(super) struct Hello<'a> {
    pub(super) settings: &'a Settings,
    pub(super) names: &'a Names,
    pub(super) within: Duration,
}

impl Hello<'_> {
    /// Connects. Cancel safe: no step touches a lock. `predecessors`: server processes that may still run a call.
    pub(super) async fn set_up(
        &self,
        predecessors: &[Backend],
    ) -> Result<(Connected, Vec<Backend>), Fault> {
        let (sender, heard) = mpsc::unbounded_channel();
        let settings = self.settings;
        let link = settings
            .endpoint
            .connect(self.within, sender.clone())
            .await?;
        let line = rand::random_range(1..=i64::MAX);
        let mut connected = Connected {
            heard,
            line,
            links: Vec::new(),
            clock: ServerClock::told(0, Instant::now()),
            identity: None,
            no_push: None,
        };
        let greeting = self.greet(&settings.endpoint, &link.client, line).await?;
        connected.clock = ServerClock::told(greeting.now, Instant::now());
        connected.identity = greeting.identity;
        for (pid, started) in predecessors {
            let sql = format!(
                "SELECT {}.end_backend_1($1, $2)",
                schema::quote(&settings.schema)
            );
            let which: [(&(dyn ToSql + Sync), Type); 2] =
                [(pid, Type::INT4), (started, Type::TIMESTAMPTZ)];
            // Without that right O5 guards against late calls.
            let ending = call::bounded(&link.client, self.names, &sql, &which);
            let _ = self.in_time(ending).await?;
        }
        let listening = self.listen(&link.client, &greeting.channel, &mut connected.heard);
        if let Some(reason) = listening.await? {
            connected.line = 0;
            connected.no_push = Some(reason);
        }
        let mut backends = Vec::from_iter(greeting.backend);
        let is_pooled = connected.line == 0 || settings.pooled.is_some();
        let calls_here = settings.pooled.is_none();
        let more = settings.lanes - usize::from(calls_here);
        let first = Ready {
            prepared: self.prepare(&link.client, is_pooled).await?,
            link,
        };
        connected.links.push(first);
        for _ in 0..more {
            let endpoint = settings.pooled.as_ref().unwrap_or(&settings.endpoint);
            let link = endpoint.connect(self.within, sender.clone()).await?;
            let greeting = self.greet(endpoint, &link.client, 0).await?;
            backends.extend(greeting.backend.filter(|_| !is_pooled));
            connected.links.push(Ready {
                prepared: self.prepare(&link.client, is_pooled).await?,
                link,
            });
        }
        Ok((connected, backends))
    }

    async fn prepare(&self, client: &Client, is_pooled: bool) -> Result<Option<Prepared>, Fault> {
        let mut prepared = None;
        if !is_pooled {
            let bounding = self.in_time(client.batch_execute(&self.names.bounds));
            bounding.await?.map_err(|error| self.refused(&error))?;
            let statements = self.in_time(Prepared::new(client, self.names)).await?;
            prepared = Some(statements.map_err(|error| self.refused(&error))?);
        }
        // A call without ops: whether we have the right, and the server has the function at hand for the first.
        let call = Call::new(self.names, false, 0, 0, &[]);
        let called = self
            .in_time(call.send(client, self.names, prepared.as_ref()))
            .await?;
        called.map_err(|error| self.refused(&error))?;
        Ok(prepared)
    }

    /// Checks that the schema is there and may be trusted, and takes the line. If the schema is missing, it is made, if
    /// we may.
    async fn greet(
        &self,
        endpoint: &Endpoint,
        client: &Client,
        line: i64,
    ) -> Result<Greeting, Fault> {
        let (schema, names) = (&self.settings.schema, self.names);
        let which: [(&(dyn ToSql + Sync), Type); 2] = [
            (schema, Type::TEXT),
            (&self.settings.schema_owner, Type::TEXT),
        ];
        let asking = call::bounded(client, names, schema::FOREIGN, &which);
        let foreign = self.in_time(asking).await?;
        let foreign = foreign.map_err(|error| self.refused(&error))?;
        let is_there = schema::refuse_foreign(&endpoint.address, schema, &foreign)?;
        let sql = format!(
            "SELECT h.version, h.now, h.is_standby, h.server, a.pid, a.backend_start, h.missing, h.channel \
             FROM {}.hello_1($1) h \
             LEFT JOIN pg_stat_activity a ON a.pid = pg_backend_pid()",
            schema::quote(schema)
        );
        let own: [(&(dyn ToSql + Sync), Type); 1] = [(&line, Type::INT8)];
        let greet = || call::bounded(client, names, &sql, &own);
        // No function is called of a schema that was not there when its owner was looked up.
        let greeted = match is_there {
            true => self.in_time(greet()).await?.map_err(|error| {
                let is_missing = error.code().is_some_and(is_without_schema);
                (self.refused(&error), is_missing)
            }),
            false => Err((schema::missing(&endpoint.address, schema), true)),
        };
        let rows = match greeted {
            Ok(rows) => rows,
            Err((missing, true)) if self.settings.migrates => {
                let address = &endpoint.address;
                let migrating = schema::migrate(client, address, self.settings, &names.begin);
                // If it takes too long, the connection is in its transaction.
                match self.in_time(migrating).await? {
                    Err(fault) if fault.is_forbidden() => return Err(missing),
                    migrated => migrated?,
                }
                let greeted = self.in_time(greet()).await?;
                greeted.map_err(|error| self.refused(&error))?
            }
            Err((fault, _)) => return Err(fault),
        };
        let garbled = || Fault::given_up(&endpoint.address, "unexpected answer to the greeting");
        let (version, greeting) = rows.first().and_then(Greeting::read).ok_or_else(garbled)?;
        match version {
            _ if let Some(tables) = &greeting.missing => Err(Fault::unusable(
                &endpoint.address,
                format_args!(
                    "its schema {schema:?} lacks the tables {tables}: drop the schema, and run PostgresStore::migrate"
                ),
            )),
            _ if greeting.is_standby => Err(Fault::standby(&endpoint.address)),
            Some(schema::VERSION) => Ok(greeting),
            None => Err(garbled()),
            Some(other) => Err(Fault::unusable(
                &endpoint.address,
                format_args!(
                    "its schema has version {other}, and this crate knows version {}",
                    schema::VERSION
                ),
            )),
        }
    }

    /// Listens, and proves by a message to ourselves that notices arrive. `Some`: why they do not.
    async fn listen(
        &self,
        client: &Client,
        channel: &str,
        heard: &mut UnboundedReceiver<Heard>,
    ) -> Result<Option<String>, Fault> {
        let probe = format!("probe {:016x}", rand::random::<u64>());
        let listening = async {
            client
                .batch_execute(&format!("LISTEN \"{channel}\""))
                .await?;
            let told: [(&(dyn ToSql + Sync), Type); 2] =
                [(&channel, Type::TEXT), (&probe, Type::TEXT)];
            call::bounded(client, self.names, "SELECT pg_notify($1, $2)", &told).await
        };
        if let Err(error) = self.in_time(listening).await? {
            return Err(self.refused(&error));
        }
        let hearing = async {
            loop {
                match heard.recv().await {
                    Some(Heard::Notice(notice)) if notice.payload() == probe => return Ok(()),
                    Some(Heard::Notice(_)) => {}
                    Some(Heard::Ended(fault)) => return Err(fault),
                    None => return Err(Fault::abandoned(&self.settings.endpoint.address)),
                }
            }
        };
        match timeout(self.within.min(LONGEST_PROBE), hearing).await {
            Ok(heard) => heard.map(|()| None),
            Err(_) => Ok(Some(
                "a notification sent to ourselves did not arrive".to_owned(),
            )),
        }
    }

    fn refused(&self, error: &tokio_postgres::Error) -> Fault {
        match error.as_db_error() {
            Some(refusal) if *refusal.code() == SqlState::PROTOCOL_VIOLATION => {
                Fault::given_up(&self.settings.endpoint.address, refusal.message())
            }
            Some(_) => Fault::refused(&self.settings.endpoint.address, error),
            None => Fault::broken(&self.settings.endpoint.address, error),
        }
    }

    async fn in_time<T>(&self, asking: impl Future<Output = T>) -> Result<T, Fault> {
        let silent = |_| Fault::silent(&self.settings.endpoint.address, self.within);
        timeout(self.within, asking).await.map_err(silent)
    }
}

/// Behind a pooler the probe never arrives.
const LONGEST_PROBE: Duration = Duration::from_secs(2);

struct Greeting {
    now: u64,
    is_standby: bool,
    identity: Option<Arc<str>>,
    backend: Option<Backend>,
    /// Where the first connection listens.
    channel: String,
    /// Tables that somebody has dropped.
    missing: Option<String>,
}

impl Greeting {
    fn read(row: &Row) -> Option<(Option<i32>, Self)> {
        let identity: Option<String> = row.try_get(3).ok()?;
        let pid: Option<i32> = row.try_get(4).ok()?;
        let started: Option<SystemTime> = row.try_get(5).ok()?;
        let greeting = Self {
            now: u64::try_from(row.try_get::<_, i64>(1).ok()?).ok()?,
            is_standby: row.try_get(2).ok()?,
            identity: identity.map(|it| format!("PostgreSQL {it}").into()),
            backend: pid.zip(started),
            missing: row.try_get(6).ok()?,
            channel: row
                .try_get::<_, Option<String>>(7)
                .ok()?
                .unwrap_or_default(),
        };
        Some((row.try_get(0).ok()?, greeting))
    }
}
