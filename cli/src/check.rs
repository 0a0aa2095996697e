//! `lockstream check` and `migrate`: what is the store, and is it ready?

use std::time::Duration;

use lockstream::store::PostgresStore;
use lockstream::{Check, CheckedServer};
use serde_json::{Value, json};

use crate::args::{CheckArgs, MigrateArgs};
use crate::show::print;
use crate::store::{Failure, Store};

/// Says what the store is, or why it cannot be used.
pub(crate) async fn check(args: CheckArgs) -> Result<u8, Failure> {
    let registry = Store::for_looking(&args.store)?.registry()?;
    let checked = registry.check().await;
    let checked = checked.map_err(|error| Failure::store(&error))?;
    if args.store.json {
        print(&to_json(&checked).to_string());
    } else if !args.store.quiet {
        print(&checked.to_string());
    }
    Ok(0)
}

fn to_json(checked: &Check) -> Value {
    let millis = |time: Duration| time.as_secs_f64() * 1e3;
    let server = |server: &CheckedServer| {
        json!({
            "address": server.address,
            "version": server.version,
            "round_trip_ms": millis(server.round_trip),
            "no_push": server.no_push,
            "missing_rights": server.missing_rights,
            "warnings": server.warnings,
        })
    };
    let failed = checked.failed.iter().map(ToString::to_string);
    json!({
        "servers": checked.servers.iter().map(server).collect::<Vec<_>>(),
        "failed": failed.collect::<Vec<_>>(),
        "shares": checked.shares,
        "round_trip_ms": millis(checked.round_trip()),
    })
}

/// Makes the schema if it is not there, or writes its SQL.
pub(crate) async fn migrate(args: MigrateArgs) -> Result<u8, Failure> {
    if args.print {
        // A url is not needed. If there is one, it may name the schema.
        let store = args.store.names_store().then(|| Store::find(&args.store));
        let store = store.transpose()?;
        let sql = store.as_ref().and_then(Store::postgres);
        let sql = sql.map_or_else(|| PostgresStore::SQL.to_owned(), PostgresStore::sql);
        print(sql.trim_end());
        return Ok(0);
    }
    let messages = args.store.messages();
    let store = Store::find(&args.store)?;
    let Some(postgres) = store.postgres() else {
        messages.say(
            "migrated",
            "this store has no schema: nothing to do",
            json!({}),
        );
        return Ok(0);
    };
    let made = postgres.migrate().await;
    made.map_err(|error| Failure::store(&error))?;
    messages.say("migrated", "the schema is there", json!({}));
    Ok(0)
}
