//! The harness of the crate's tests, as far as it starts PostgreSQL.

#![allow(
    dead_code,
    unreachable_pub,
    missing_docs,
    reason = "the tests use more of it"
)]

#[path = "../../tests/support/keeper.rs"]
mod keeper;
#[path = "../../tests/support/ports.rs"]
mod ports;
#[path = "../../tests/support/postgres.rs"]
mod postgres;
#[path = "../../tests/support/shown.rs"]
mod shown;

use std::path::PathBuf;
use std::time::Duration;

pub(crate) use self::postgres::{PgServer, find_programs};

/// How long a server may take to start, to end, or to answer.
const PATIENCE: Duration = Duration::from_secs(60);

/// Between two looks at a condition that nobody announces.
const LOOK_AGAIN: Duration = Duration::from_millis(1);

/// A program of PostgreSQL.
pub(crate) fn postgres_program(name: &str) -> PathBuf {
    postgres::programs().join(name)
}
