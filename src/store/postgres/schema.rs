//! Tables and functions, and how they come into a database.

use tokio_postgres::types::Type;
use tokio_postgres::{Client, Row};

use super::connection::Connection;
use super::fault::{Address, Fault};
use super::store::Settings;

/// The SQL that makes the schema `lockstream`.
pub(super) const SQL: &str = include_str!("schema.sql");

/// The version in the table `state`.
pub(super) const VERSION: i32 = 1;

/// The schema's usual name.
pub(super) const USUAL: &str = "lockstream";

/// Only one migration runs at a time.
const MIGRATION: i64 = 6_012_214_763_185_741;

/// Null if there is no schema `$1`, or else a role that owns it or a function in it and need not be trusted: its functions
/// would run with our rights. Trusted are `$2`, if it is not null, the owner of the database, whoever may become that
/// owner or us anyway, and, unless we are a superuser, a role whose rights we have.
pub(super) const FOREIGN: &str = "
    SELECT NULL::text WHERE NOT EXISTS (SELECT 1 FROM pg_catalog.pg_namespace n WHERE n.nspname = $1)
    UNION ALL (SELECT o.rolname::text FROM pg_catalog.pg_roles o WHERE o.oid IN (
        SELECT n.nspowner FROM pg_catalog.pg_namespace n WHERE n.nspname = $1
        UNION ALL
        SELECT p.proowner FROM pg_catalog.pg_namespace n JOIN pg_catalog.pg_proc p ON p.pronamespace = n.oid
        WHERE n.nspname = $1
    ) AND o.rolname IS DISTINCT FROM $2
    AND NOT pg_has_role(o.oid, (SELECT d.datdba FROM pg_catalog.pg_database d WHERE d.datname = current_database()), 'MEMBER')
    AND NOT pg_has_role(o.oid, current_user, 'MEMBER')
    AND NOT (pg_has_role(current_user, o.oid, 'USAGE')
        AND NOT (SELECT u.rolsuper FROM pg_catalog.pg_roles u WHERE u.rolname = current_user))
    LIMIT 1)";

/// Refuses a schema in which [`FOREIGN`] found somebody, and one that is not there: it could be anybody's a moment later.
pub(super) fn refuse_foreign(address: &str, schema: &str, found: &[Row]) -> Result<(), Fault> {
    let Some(row) = found.first() else {
        return Ok(());
    };
    let owner: Option<String> = row
        .try_get(0)
        .map_err(|error| Fault::broken(address, &error))?;
    let Some(owner) = owner else {
        return Err(Fault::without_schema(address, schema));
    };
    Err(Fault::unusable(
        address,
        format_args!(
            "its schema {schema:?} belongs to the role {owner:?}, which need not be trusted: drop the schema, or name the \
             role by `schema_owner` in the url or in PostgresStoreBuilder"
        ),
    ))
}

/// The statements for a schema of this name.
pub(super) fn sql(schema: &str) -> String {
    let quoted = quote(schema);
    let named = SQL.replace("lockstream.", &format!("{quoted}."));
    let create = named.replace(
        "SCHEMA IF NOT EXISTS lockstream;",
        &format!("SCHEMA IF NOT EXISTS {quoted};"),
    );
    create.replace("IN SCHEMA lockstream ", &format!("IN SCHEMA {quoted} "))
}

/// A name as SQL has it.
pub(super) fn quote(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

/// Why this cannot be the name of a schema.
pub(super) fn fault(schema: &str) -> Option<&'static str> {
    match schema {
        "" => Some("must not be empty"),
        _ if schema.len() > 63 => Some("must be at most 63 bytes"),
        _ if schema.starts_with("pg_") => Some("must not begin with pg_"),
        // Our functions are dollar-quoted, and their names are in them.
        _ if schema.contains(|c: char| c.is_control() || matches!(c, '$' | '\'' | '"')) => {
            Some("must not contain '$', quotes or control characters")
        }
        _ => None,
    }
}

/// Makes the schema if it is not there, all of it or nothing. `begin`: of its transaction, in which the connection stays
/// if it takes too long.
pub(super) async fn migrate(
    connection: &mut Connection,
    settings: &Settings,
    begin: &str,
) -> Result<(), Fault> {
    let (client, address) = (connection.caller.client.clone(), connection.address.clone());
    let refused = |error| Fault::refused(&address, &error);
    // It waits for another migration as long as a statement may take.
    let begin =
        format!("{begin}; SET LOCAL lock_timeout = 0; SELECT pg_advisory_xact_lock({MIGRATION})");
    let migrating = async {
        client.batch_execute(&begin).await.map_err(refused)?;
        let made = make(&client, &address, settings).await;
        // The connection may have ended; then the server rolls back.
        let end = made.as_ref().map_or("ROLLBACK", |()| "COMMIT");
        let ended = client.batch_execute(end).await;
        made.and(ended.map_err(refused))
    };
    connection.ask(migrating).await?
}

async fn make(client: &Client, address: &Address, settings: &Settings) -> Result<(), Fault> {
    let refused = |error| Fault::refused(address, &error);
    let schema = settings.schema();
    let table = format!("{}.state", quote(schema));
    let finding = "SELECT to_regclass($1) IS NOT NULL";
    let found = client.query_typed(finding, &[(&table, Type::TEXT)]).await;
    // It has our tables, or some of them.
    let is_there = |found: &Row| found.get(0);
    if !found.map_err(refused)?.first().is_some_and(is_there) {
        let made = client.batch_execute(&sql(schema)).await;
        made.map_err(|error| Fault::unmade(address, &error))?;
    }
    // Checked also if we have just made it: somebody else may have been quicker to make the schema.
    let which = [
        (&schema as _, Type::TEXT),
        (&settings.said.schema_owner as _, Type::TEXT),
    ];
    let foreign = client.query_typed(FOREIGN, &which).await;
    refuse_foreign(address, schema, &foreign.map_err(refused)?)?;
    if let Some(quiet) = settings.quiet {
        let set = set_quiet(schema, quiet.as_micros());
        let set = client.batch_execute(&set).await;
        set.map_err(refused)?;
    }
    Ok(())
}

/// Sets the quiet time, and the default by which the row is made again. Not if it is set, since that locks the table.
fn set_quiet(schema: &str, quiet: u128) -> String {
    let table = format!("{}.state", quote(schema));
    format!(
        "DO $$ BEGIN IF NOT EXISTS (SELECT 1 FROM {table} WHERE quiet = {quiet}) THEN
             ALTER TABLE {table} ALTER quiet SET DEFAULT {quiet};
             INSERT INTO {table} DEFAULT VALUES ON CONFLICT (one) DO UPDATE SET quiet = {quiet};
         END IF; END $$"
    )
}
