//! Errors between a session and a server, and whether a retry may help.

use std::error::Error;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio_postgres::error::SqlState;

use crate::StoreError;

/// The content of a [`StoreError`] of this store. It shows no password: an address is host and port, and servers do not
/// send passwords back.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{text}")]
pub(super) struct Fault {
    text: String,
    is_lasting: bool,
    is_abandoned: bool,
}

impl Fault {
    fn passing(text: impl Into<String>) -> Self {
        Self {
            text: text.into(),
            is_lasting: false,
            is_abandoned: false,
        }
    }

    fn lasting(text: impl Into<String>) -> Self {
        Self {
            is_lasting: true,
            ..Self::passing(text)
        }
    }

    /// The configuration cannot be used.
    pub(super) fn invalid(what: &str, reason: impl fmt::Display) -> Self {
        Self::lasting(format!("invalid {what}: {reason}"))
    }

    pub(super) fn url(reason: impl fmt::Display) -> Self {
        Self::invalid("PostgreSQL url", reason)
    }

    pub(super) fn connect(address: &str, error: &tokio_postgres::Error) -> Self {
        let told = format!("cannot connect to PostgreSQL at {address}");
        if let Some(reason) = rejection(error) {
            return Self::lasting(format!("{told}: {reason}"));
        }
        let chain = chain(error);
        let hints = [
            (
                "does not support TLS",
                " (if that is meant, add sslmode=disable to the url)",
            ),
            (
                "startup parameter",
                " (is a pooler there? The store needs the server's own url, and takes the pooler's by `pooled`)",
            ),
        ];
        let hint = hints.iter().find(|(said, _)| chain.contains(said));
        let hint = hint.map_or("", |(_, hint)| hint);
        let text = format!("{told}: {chain}{hint}");
        Self {
            is_lasting: error.code().is_some_and(is_lasting),
            ..Self::passing(text)
        }
    }

    pub(super) fn silent(address: &str, within: Duration) -> Self {
        Self::passing(format!(
            "PostgreSQL at {address} did not answer within {within:?}"
        ))
    }

    /// An error of a connection in use.
    pub(super) fn broken(address: &str, error: &tokio_postgres::Error) -> Self {
        match error.as_db_error() {
            Some(_) => Self::refused(address, error),
            None => Self::given_up(address, &chain(error)),
        }
    }

    /// The session ends the connection.
    pub(super) fn given_up(address: &str, why: &str) -> Self {
        Self::passing(format!(
            "connection to PostgreSQL at {address} broke: {why}"
        ))
    }

    pub(super) fn refused(address: &str, error: &tokio_postgres::Error) -> Self {
        let code = error.code();
        let hint = match code {
            Some(code) if *code == SqlState::INSUFFICIENT_PRIVILEGE => {
                " (docs/postgres.md lists the rights that a role needs)"
            }
            Some(code) if is_without_schema(code) => {
                " (the schema is missing, or not all of it: run PostgresStore::migrate)"
            }
            _ => "",
        };
        Self {
            is_lasting: code.is_some_and(is_lasting),
            ..Self::passing(format!(
                "PostgreSQL at {address} refused: {}{hint}",
                chain(error)
            ))
        }
    }

    pub(super) fn unusable(address: &str, why: impl fmt::Display) -> Self {
        Self::lasting(format!("PostgreSQL at {address} cannot be used: {why}"))
    }

    pub(super) fn standby(address: &str) -> Self {
        Self::passing(format!("PostgreSQL at {address} is a standby"))
    }

    pub(super) fn too_late(address: &str) -> Self {
        Self::passing(format!(
            "renewal not sent to PostgreSQL at {address}: too late for an answer in time"
        ))
    }

    pub(super) fn abandoned(address: &str) -> Self {
        Self {
            is_abandoned: true,
            ..Self::passing(format!(
                "connection to PostgreSQL at {address} was given up: its registry or runtime is gone"
            ))
        }
    }
}

impl From<Fault> for StoreError {
    fn from(fault: Fault) -> Self {
        match (fault.is_lasting, fault.is_abandoned) {
            (true, _) => Self::lasting(fault),
            (false, true) => Self::abandoned(fault),
            (false, false) => Self::new(fault),
        }
    }
}

/// Whether a schema, a table or a function is missing.
pub(super) fn is_without_schema(code: &SqlState) -> bool {
    let missing = [
        &SqlState::INVALID_SCHEMA_NAME,
        &SqlState::UNDEFINED_FUNCTION,
        &SqlState::UNDEFINED_TABLE,
    ];
    missing.contains(&code)
}

/// Whether the connection is of no use after this error: the server ends it, or cannot write any more.
pub(super) fn ends_connection(code: &SqlState) -> bool {
    let code = code.code();
    code == SqlState::READ_ONLY_SQL_TRANSACTION.code()
        || ["08", "57P"].iter().any(|it| code.starts_with(it))
}

/// Whether a retry cannot help.
fn is_lasting(code: &SqlState) -> bool {
    let is_setting = [
        &SqlState::INSUFFICIENT_PRIVILEGE,
        &SqlState::INVALID_CATALOG_NAME,
        &isolation(),
    ]
    .contains(&code);
    // Class 28: the user, or the password.
    is_setting || is_without_schema(code) || code.code().starts_with("28")
}

/// Whether a fence has found that its lease is over.
pub(crate) fn is_stale_fence(error: &tokio_postgres::Error) -> bool {
    error.code().is_some_and(|code| code.code() == "LS001")
}

/// Why a fence could not be asked.
pub(crate) fn fence_error(error: &tokio_postgres::Error) -> StoreError {
    let told = Fault::refused("the transaction's connection", error);
    told.into()
}

/// What our functions say in another isolation level.
fn isolation() -> SqlState {
    SqlState::from_code("LS002")
}

#[cfg(feature = "tls-rustls")]
fn rejection(error: &tokio_postgres::Error) -> Option<&'static str> {
    crate::store::tls::rejection(error.source()?)
}

#[cfg(not(feature = "tls-rustls"))]
fn rejection(_: &tokio_postgres::Error) -> Option<&'static str> {
    None
}

/// How many characters of an error are kept.
const LONGEST_TEXT: usize = 400;

/// The error with its causes, in one line of a length that fits a log.
fn chain(error: &tokio_postgres::Error) -> String {
    let text = if let Some(refusal) = error.as_db_error() {
        format!("{} ({})", refusal.message(), refusal.code().code())
    } else {
        let mut text = error.to_string();
        let mut cause = error.source();
        while let Some(error) = cause {
            text += &format!(": {error}");
            cause = error.source();
        }
        text
    };
    let text: String = text.chars().take(LONGEST_TEXT).collect();
    text.replace(char::is_control, " ")
}

/// An address as errors show it.
pub(super) type Address = Arc<str>;
