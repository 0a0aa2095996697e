//! Tables and functions, and how they come into a database.

use std::sync::LazyLock;

use tokio_postgres::Client;

use super::fault::{Address, Fault};

/// The SQL that makes the schema `lockstream`.
pub(super) const SQL: &str = include_str!("schema.sql");

/// The version in the table `state`.
pub(super) const VERSION: i32 = 1;

/// The schema's usual name.
pub(super) const USUAL: &str = "lockstream";

/// Only one migration runs at a time.
const MIGRATION: i64 = 6_012_214_763_185_741;

/// The statements for a schema of this name.
pub(super) fn sql(schema: &str) -> String {
    static PARTS: LazyLock<Vec<&str>> = LazyLock::new(|| SQL.split("lockstream.").collect());
    let quoted = quote(schema);
    let named = PARTS.join(&format!("{quoted}."));
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

/// Makes the schema if it is not there, all of it or nothing.
pub(super) async fn migrate(
    client: &Client,
    address: &Address,
    schema: &str,
    quiet: Option<i64>,
) -> Result<(), Fault> {
    let refused = |error| Fault::refused(address, &error);
    let begin =
        format!("BEGIN ISOLATION LEVEL READ COMMITTED; SELECT pg_advisory_xact_lock({MIGRATION})");
    client.batch_execute(&begin).await.map_err(refused)?;
    let made = async {
        if version(client, schema).await?.is_none() {
            client.batch_execute(&sql(schema)).await?;
        }
        if let Some(quiet) = quiet {
            let set = format!("UPDATE {}.state SET quiet = {quiet}", quote(schema));
            client.batch_execute(&set).await?;
        }
        Ok(())
    };
    let end = match made.await {
        Ok(()) => "COMMIT",
        Err(error) => {
            // The connection may have ended; then the server rolls back.
            let _ = client.batch_execute("ROLLBACK").await;
            return Err(refused(error));
        }
    };
    client.batch_execute(end).await.map_err(refused)
}

/// The version of a schema, if it is there.
async fn version(client: &Client, schema: &str) -> Result<Option<i32>, tokio_postgres::Error> {
    let table = format!("{}.state", quote(schema));
    let is_there = client
        .query_one("SELECT to_regclass($1) IS NOT NULL", &[&table])
        .await?;
    if !is_there.get::<_, bool>(0) {
        return Ok(None);
    }
    let version = client
        .query_opt(&format!("SELECT version FROM {table}"), &[])
        .await?;
    Ok(version.map(|row| row.get(0)))
}
