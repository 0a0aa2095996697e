//! What a server is, and what our role may do there.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio_postgres::types::Type;

use super::backend::PostgresBackend;
use super::call::Argument;
use super::fault::Fault;
use crate::base::CheckedServer;
use crate::roaming::time::timeout;
use crate::store::attempts::SetUps;

/// How often the way to the server is measured.
const TRIES: usize = 3;

/// The functions of the schema that an application calls, and that our role may not call. The others are called by these,
/// as their owner.
const FORBIDDEN: &str = "
    SELECT DISTINCT p.proname::text FROM pg_catalog.pg_proc p
    JOIN pg_catalog.pg_namespace n ON n.oid = p.pronamespace
    WHERE n.nspname = $1 AND NOT has_function_privilege(p.oid, 'EXECUTE') AND p.proname IN ('hello_1', 'ops_1',
        'notify_1', 'untold_1', 'inspect_1', 'scan_1', 'end_backend_1', 'sweep_1', 'fence') ORDER BY 1";

/// Whether commits wait for a standby, and there is none. What kind of standby it is, not every role may see. The setting is
/// that of the session: our transactions that look have another one.
const ALONE: &str = "
    SELECT current_setting('synchronous_standby_names') <> '' AND s.reset_val <> 'local'
        AND NOT EXISTS (SELECT 1 FROM pg_catalog.pg_stat_replication)
    FROM pg_catalog.pg_settings s WHERE s.name = 'synchronous_commit'";

const UNCONFIRMED: &str =
    "no lock can be acquired while no standby is connected: synchronous_standby_names asks for one";

/// Looks at the server, on a connection of its own.
pub(super) async fn check(backend: &PostgresBackend) -> Result<Vec<CheckedServer>, Fault> {
    let endpoint = &backend.settings.endpoint;
    let within = endpoint.connect_within + backend.within;
    let silent = |_| Err(Fault::silent(&endpoint.address, within));
    let backend = backend.looking();
    let looking = timeout(within, look(&backend));
    looking.await.unwrap_or_else(silent)
}

async fn look(backend: &Arc<PostgresBackend>) -> Result<Vec<CheckedServer>, Fault> {
    let (names, schema) = (&backend.names, backend.settings.schema());
    let connected = backend.set_up(&[], &SetUps::default()).await?;
    let mut link = connected.link;
    let connection = link.first();
    let address = connection.address.to_string();

    let mut round_trip = Duration::MAX;
    let mut version = None;
    for _ in 0..TRIES {
        let began = Instant::now();
        let rows = connection.query(names, "SELECT current_setting('server_version')", &[]);
        let rows = rows.await?;
        round_trip = round_trip.min(began.elapsed());
        version = rows
            .first()
            .and_then(|row| row.try_get::<_, String>(0).ok());
    }
    let which: [Argument<'_>; 1] = [(&schema, Type::TEXT)];
    let forbidden = connection.query(names, FORBIDDEN, &which).await?;
    let alone = connection.query(names, ALONE, &[]).await?;
    let is_alone = alone.first().and_then(|row| row.try_get(0).ok());
    let is_alone = is_alone.unwrap_or(false) && backend.settings.is_durable;
    let missing_rights = forbidden.iter().filter_map(|row| row.try_get(0).ok());
    Ok(vec![CheckedServer {
        address,
        version: version.map(|version| format!("PostgreSQL {version}")),
        round_trip,
        no_push: connected.no_push,
        missing_rights: missing_rights.collect(),
        warnings: is_alone
            .then(|| UNCONFIRMED.to_owned())
            .into_iter()
            .collect(),
    }])
}
