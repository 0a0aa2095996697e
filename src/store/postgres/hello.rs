//! How the connections of a session are set up (O4).

use std::borrow::Cow;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::time::Instant;
use tokio_postgres::Row;
use tokio_postgres::types::Type;

use super::backend::PostgresBackend;
use super::call::{self, Argument, Call};
use super::connection::Connection;
use super::fault::Fault;
use super::link::PostgresLink;
use super::schema;
use crate::roaming::time::timeout;
use crate::store::attempts::SetUps;
use crate::store::driver::{Connected, ServerClock};

/// Calls and grants are of one server.
const OTHER_SERVER: &str = "it leads to another server than the connection before it";

/// A server process, by which a later connection ends it.
pub(super) type Process = (i32, SystemTime);

impl PostgresBackend {
    /// Connects. Cancel safe: no step touches a lock. `predecessors`: server processes that may still run a call.
    pub(super) async fn set_up(
        self: &Arc<Self>,
        predecessors: &[Process],
        set_ups: &SetUps,
    ) -> Result<Connected<PostgresLink>, Fault> {
        let settings = &self.settings;
        let mut first = settings.endpoint.connect_among(set_ups).await?;
        // What stays in a session, as its number and its channel, must not come into one that a pooler gives to others.
        let mut number = match first.process.is_some() && !settings.said.is_pooler {
            true => rand::random_range(1..=i64::MAX),
            false => 0,
        };
        let greeting = self.greet(&mut first, number).await?;
        let clock = ServerClock::told(greeting.now, Instant::now());
        let is_ours = number != 0 && greeting.is_by(first.process);
        let mut processes = Vec::new();
        let no_push = if is_ours {
            processes.extend(greeting.process);
            let caller = first.caller.clone();
            for (pid, started) in predecessors {
                let which: [Argument<'_>; 2] = [(pid, Type::INT4), (started, Type::TIMESTAMPTZ)];
                // Without that right O5 guards against late calls.
                let ending = caller.call(&self.greeting, "end_backend_1($1, $2)", &which);
                let _ = first.ask(ending).await?;
            }
            let bounding = caller.client.batch_execute(&self.names.bounds);
            first.get(bounding).await?;
            self.listen(&mut first, &greeting.channel).await?
        } else {
            Some(POOLED.to_owned())
        };
        if no_push.is_some() {
            number = 0;
        }
        self.prepare(&mut first, is_ours && settings.pooled.is_none())
            .await?;
        let (mut connections, identity) = (vec![first], greeting.identity);
        let calls_here = settings.pooled.is_none();
        let mut endpoint = Cow::Borrowed(settings.pooled.as_ref().unwrap_or(&settings.endpoint));
        let mut site = connections[0].site.take().filter(|_| calls_here);
        for _ in usize::from(calls_here)..settings.lanes {
            if let Some(site) = site.take() {
                // The hosts before it were tried, and another one might be another server.
                endpoint = Cow::Owned(endpoint.only(&site));
            }
            let mut connection = endpoint.connect().await?;
            site = connection.site.take().filter(|_| endpoint.sites.len() > 1);
            let greeting = self.greet(&mut connection, 0).await?;
            if greeting.identity != identity {
                return Err(Fault::given_up(&endpoint.address, OTHER_SERVER));
            }
            let is_ours = is_ours && calls_here && greeting.is_by(connection.process);
            if is_ours {
                processes.extend(greeting.process);
                let client = connection.caller.client.clone();
                let bounding = client.batch_execute(&self.names.bounds);
                connection.get(bounding).await?;
            }
            self.prepare(&mut connection, is_ours).await?;
            connections.push(connection);
        }
        for connection in &mut connections {
            connection.begin_calls(self.within);
        }
        Ok(Connected {
            link: PostgresLink::new(self.clone(), connections, number, processes),
            no_push,
            clock,
            identity,
        })
    }

    /// Prepares the statements of calls, if the session is ours.
    async fn prepare(&self, connection: &mut Connection, is_ours: bool) -> Result<(), Fault> {
        let names = &self.greeting;
        if is_ours {
            let preparing = connection.caller.clone().prepared(names);
            connection.caller = connection.get(preparing).await?;
        }
        // A call without ops: whether we have the right, and the server has the function at hand for the first.
        let (call, caller) = (Call::default(), connection.caller.clone());
        let arguments = call.arguments();
        let calling = caller.call(names, call::OPS, &arguments);
        connection.get(calling).await.map(drop)
    }

    /// Checks that the schema is there and may be trusted, and takes the advisory lock of that number. If the schema is missing, it is made, if
    /// we may.
    async fn greet(&self, connection: &mut Connection, number: i64) -> Result<Greeting, Fault> {
        let (schema, names) = (self.settings.schema(), &self.greeting);
        let address = &connection.address.clone();
        let sql = format!(
            "SELECT h.version, h.now, h.is_standby, h.server, a.pid, a.backend_start, h.missing, h.channel \
             FROM {}.hello_1($1) h \
             LEFT JOIN pg_stat_activity a ON a.pid = pg_backend_pid()",
            names.schema
        );
        let own: [Argument<'_>; 1] = [(&number, Type::INT8)];
        let greeted = match self.check_schema(connection).await {
            Ok(()) => connection.query(names, &sql, &own).await,
            Err(fault) => Err(fault),
        };
        let rows = match greeted {
            Err(missing) if missing.is_without_schema() && self.settings.migrates => {
                match schema::migrate(connection, &self.settings, &names.begin).await {
                    Err(fault) if fault.is_forbidden() => return Err(missing),
                    migrated => migrated?,
                }
                connection.query(names, &sql, &own).await?
            }
            greeted => greeted?,
        };
        let garbled = || Fault::given_up(address, "unexpected answer to the greeting");
        let greeting = rows.first().and_then(Greeting::read);
        let greeting = greeting.ok_or_else(garbled)?;
        let why = match greeting.version {
            _ if let Some(tables) = &greeting.missing => format!(
                "its schema {schema:?} lacks the tables {tables}: drop the schema, and run PostgresStore::migrate"
            ),
            _ if greeting.is_standby => return Err(Fault::standby(address)),
            Some(schema::VERSION) => return Ok(greeting),
            None => return Err(garbled()),
            Some(other) => format!(
                "its schema has version {other}, and this crate knows version {}",
                schema::VERSION
            ),
        };
        Err(Fault::unusable(address, why))
    }

    /// Fails if the schema may not be trusted, or is not there: no function of it is called before.
    pub(super) async fn check_schema(&self, connection: &mut Connection) -> Result<(), Fault> {
        let (schema, owner) = (self.settings.schema(), &self.settings.said.schema_owner);
        let which: [Argument<'_>; 2] = [(&schema, Type::TEXT), (owner, Type::TEXT)];
        let asking = connection.query(&self.greeting, schema::FOREIGN, &which);
        let foreign = asking.await?;
        schema::refuse_foreign(&connection.address, schema, &foreign)
    }

    /// Listens, and proves by a message to ourselves that notices arrive. `Some`: why they do not.
    async fn listen(
        &self,
        connection: &mut Connection,
        channel: &str,
    ) -> Result<Option<String>, Fault> {
        let caller = connection.caller.clone();
        let probe = format!("probe {:016x}", rand::random::<u64>());
        let listening = async {
            let listen = format!("LISTEN \"{channel}\"");
            caller.client.batch_execute(&listen).await?;
            let told: [Argument<'_>; 2] = [(&channel, Type::TEXT), (&probe, Type::TEXT)];
            let sql = "SELECT pg_notify($1, $2)";
            caller.bounded(&self.greeting, sql, &told).await
        };
        connection.get(listening).await?;
        let hearing = async {
            loop {
                if connection.notice().await?.payload() == probe {
                    return Ok(());
                }
            }
        };
        match timeout(
            LONGEST_PROBE.min(self.settings.endpoint.connect_within / 2),
            hearing,
        )
        .await
        {
            Ok(heard) => heard.map(|()| None),
            Err(_) => Ok(Some(UNHEARD.to_owned())),
        }
    }
}

const POOLED: &str = "a pooler is between; for grants by push give the store the server's own url, and the pooler's by \
                      `pooled`";

const UNHEARD: &str = "a notification sent to ourselves did not arrive";

const LONGEST_PROBE: Duration = Duration::from_secs(2);

struct Greeting {
    version: Option<i32>,
    now: u64,
    is_standby: bool,
    identity: Option<Arc<str>>,
    process: Option<Process>,
    /// Where the first connection listens.
    channel: String,
    /// Tables that somebody has dropped.
    missing: Option<String>,
}

impl Greeting {
    /// Whether it came from that server process, as far as is known.
    fn is_by(&self, process: Option<i32>) -> bool {
        self.process.is_none_or(|(pid, _)| Some(pid) == process)
    }

    /// `None`: it is no greeting.
    fn read(row: &Row) -> Option<Self> {
        let channel: Option<_> = row.try_get(7).ok()?;
        let (pid, started): (Option<_>, Option<_>) = (row.try_get(4).ok()?, row.try_get(5).ok()?);
        let identity: Option<String> = row.try_get(3).ok()?;
        Some(Self {
            version: row.try_get(0).ok()?,
            now: u64::try_from(row.try_get::<_, i64>(1).ok()?).ok()?,
            is_standby: row.try_get(2).ok()?,
            identity: identity.map(|it| format!("PostgreSQL {it}").into()),
            process: pid.zip(started),
            missing: row.try_get(6).ok()?,
            channel: channel.unwrap_or_default(),
        })
    }
}
