//! Errors between a session and a server, and whether a retry may help.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio_postgres::error::SqlState;

use crate::base::StoreError;

/// The content of a [`StoreError`] of this store. It shows no password: an address is host and port, and servers do not
/// send passwords back.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{text}")]
pub(super) struct Fault {
    text: String,
    kind: Kind,
}

/// What may help.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// A retry.
    Passing,
    /// A change of the configuration.
    Lasting,
    /// The same, or a migration.
    Unmigrated,
    /// A right for the role.
    Forbidden,
    /// Nothing: our own task has ended, with its registry or its runtime.
    Abandoned,
}

impl Fault {
    fn passing(text: impl Into<String>) -> Self {
        let (text, kind) = (text.into(), Kind::Passing);
        Self { text, kind }
    }

    fn lasting(text: impl Into<String>) -> Self {
        let (text, kind) = (text.into(), Kind::Lasting);
        Self { text, kind }
    }

    /// The configuration cannot be used.
    pub(super) fn invalid(what: &str, reason: impl fmt::Display) -> Self {
        Self::lasting(format!("invalid {what}: {reason}"))
    }

    pub(super) fn url(reason: impl fmt::Display) -> Self {
        Self::invalid("PostgreSQL url", reason)
    }

    #[cfg(feature = "tls-rustls")]
    pub(super) fn certificates(reason: impl fmt::Display) -> Self {
        Self::invalid("certificates", reason)
    }

    fn unconnected(address: &str, why: impl fmt::Display) -> Self {
        Self::passing(format!("cannot connect to PostgreSQL at {address}: {why}"))
    }

    pub(super) fn connect(address: &str, error: &tokio_postgres::Error) -> Self {
        if let Some(reason) = rejection(error) {
            return Self::rejected(address, &chain(error), reason);
        }
        let chain = chain(error);
        let hints = [
            (
                "startup parameter",
                " (a pooler takes no `options`: leave them out of the url)",
            ),
            (
                "did not use channel binding",
                " (channel_binding=require needs TLS, and a password that the server has as scram-sha-256)",
            ),
            ("bytes remaining on stream", STRANGER),
            ("unexpected message", STRANGER),
            ("parsing response", STRANGER),
        ];
        let hint = hints.iter().find(|(said, _)| chain.contains(said));
        let hint = hint.map_or("", |(_, hint)| hint);
        let kind = match error.code() {
            Some(code) => kind(code),
            // The client library has no name for this.
            None if chain.contains("password missing") => Kind::Lasting,
            None => Kind::Passing,
        };
        let unconnected = Self::unconnected(address, format_args!("{chain}{hint}"));
        Self {
            kind,
            ..unconnected
        }
    }

    /// Client and server did not accept each other.
    pub(super) fn rejected(address: &str, error: &dyn fmt::Display, reason: &str) -> Self {
        let unconnected = Self::unconnected(address, format_args!("{error} ({reason})"));
        Self::lasting(unconnected.text)
    }

    /// The server has no TLS, or we have none.
    pub(super) fn without_tls(address: &str, is_required: bool) -> Self {
        let why = match is_required {
            true => "the server does not support TLS",
            false => "there is no TLS, and plain text is only sent to this machine itself",
        };
        let advice = "if that is meant, add sslmode=disable to the url";
        Self::unconnected(address, format_args!("{why} ({advice})"))
    }

    /// It does not speak PostgreSQL's protocol.
    #[cfg(feature = "tls-rustls")]
    pub(super) fn stranger(address: &str) -> Self {
        let why = format_args!("unexpected answer to the request for TLS{STRANGER}");
        Self::unconnected(address, why)
    }

    /// It says nothing to the request for TLS, and hangs up.
    #[cfg(feature = "tls-rustls")]
    pub(super) fn speechless(address: &str, error: &io::Error) -> Self {
        let told = Self::unreachable(address, error);
        Self::passing(told.text + STRANGER)
    }

    /// Whether the server refuses the user or the password.
    pub(super) fn is_of_login(error: &tokio_postgres::Error) -> bool {
        let code = error.code();
        code.is_some_and(|code| code.code().starts_with("28"))
    }

    pub(super) fn is_passing(&self) -> bool {
        self.kind == Kind::Passing
    }

    /// The same, and a retry may help if `is_passing`.
    pub(super) fn passing_if(self, is_passing: bool) -> Self {
        match is_passing {
            true => Self::passing(self.text),
            false => self,
        }
    }

    pub(super) fn unreachable(address: &str, error: &io::Error) -> Self {
        Self::unconnected(address, format_args!("error connecting to server: {error}"))
    }

    pub(super) fn silent(address: &str, within: Duration) -> Self {
        Self::passing(format!(
            "PostgreSQL at {address} did not answer within {within:?}"
        ))
    }

    /// The same of one that has accepted the connection.
    pub(super) fn mute(address: &str, within: Duration) -> Self {
        let Self { text, .. } = Self::silent(address, within);
        Self::passing(format!(
            "{text}, though it accepted the connection (it hangs, or is no PostgreSQL server)"
        ))
    }

    /// An error of a connection in use. If it ends the connection, a retry may help: the next one makes a missing schema
    /// again, or says what lasts.
    pub(super) fn broken(address: &str, error: &tokio_postgres::Error) -> Self {
        match error.code() {
            None => Self::given_up(address, &chain(error)),
            Some(_) if ends_connection(error) => Self {
                kind: Kind::Passing,
                ..Self::refused(address, error)
            },
            Some(_) => Self::refused(address, error),
        }
    }

    /// The session ends the connection.
    pub(super) fn given_up(address: &str, why: &str) -> Self {
        Self::passing(format!(
            "connection to PostgreSQL at {address} broke: {why}"
        ))
    }

    pub(super) fn refused(address: &str, error: &tokio_postgres::Error) -> Self {
        let hint = match error.code() {
            Some(&SqlState::INSUFFICIENT_PRIVILEGE) => {
                " (docs/postgres.md lists the rights that a role needs)"
            }
            Some(&SqlState::UNDEFINED_FUNCTION) => {
                " (part of the schema is missing: drop it, and run PostgresStore::migrate)"
            }
            Some(&SqlState::INVALID_SCHEMA_NAME | &SqlState::UNDEFINED_TABLE) => {
                " (the schema is missing: run PostgresStore::migrate)"
            }
            Some(&SqlState::READ_ONLY_SQL_TRANSACTION) => {
                " (it is a standby, or default_transaction_read_only is on for the server, the database or the role)"
            }
            Some(&SqlState::UNTRANSLATABLE_CHARACTER) => {
                " (the key has a character that the encoding of the database does not have)"
            }
            _ => "",
        };
        Self::refused_with(address, error, hint)
    }

    fn refused_with(address: &str, error: &tokio_postgres::Error, hint: &str) -> Self {
        Self {
            text: format!("PostgreSQL at {address} refused: {}{hint}", chain(error)),
            kind: error.code().map_or(Kind::Passing, kind),
        }
    }

    /// The schema could not be made.
    pub(super) fn unmade(address: &str, error: &tokio_postgres::Error) -> Self {
        let refused = Self::refused(address, error);
        if !refused.is_forbidden() {
            return refused;
        }
        let hint = " (let a role that may make schemas run PostgresStore::SQL, and grant what docs/postgres.md lists)";
        Self::refused_with(address, error, hint)
    }

    /// Whether the role lacks a right.
    pub(super) fn is_forbidden(&self) -> bool {
        self.kind == Kind::Forbidden
    }

    pub(super) fn unusable(address: &str, why: impl fmt::Display) -> Self {
        Self::lasting(format!("PostgreSQL at {address} cannot be used: {why}"))
    }

    pub(super) fn without_schema(address: &str, schema: &str) -> Self {
        let why = format!("it has no schema {schema:?}: run PostgresStore::migrate");
        Self {
            kind: Kind::Unmigrated,
            ..Self::unusable(address, why)
        }
    }

    /// Whether the schema, or a part of it, is missing.
    pub(super) fn is_without_schema(&self) -> bool {
        self.kind == Kind::Unmigrated
    }

    pub(super) fn standby(address: &str) -> Self {
        Self::passing(format!("PostgreSQL at {address} is a standby"))
    }

    pub(super) fn too_late(address: &str) -> Self {
        Self::passing(format!(
            "renewal not sent to PostgreSQL at {address}: too late for an answer in time"
        ))
    }

    pub(super) fn fenced(address: &str) -> Self {
        Self::passing(format!(
            "PostgreSQL at {address}: a transaction is still fenced by the lease"
        ))
    }

    pub(super) fn abandoned(address: &str) -> Self {
        Self {
            text: format!(
                "connection to PostgreSQL at {address} was given up: its registry or runtime is gone"
            ),
            kind: Kind::Abandoned,
        }
    }
}

const STRANGER: &str = " (is it a PostgreSQL server?)";

impl From<String> for Fault {
    /// What is wrong with a url.
    fn from(reason: String) -> Self {
        Self::url(reason)
    }
}

impl From<Fault> for StoreError {
    fn from(fault: Fault) -> Self {
        match fault.kind {
            Kind::Passing => Self::new(fault),
            Kind::Lasting | Kind::Unmigrated | Kind::Forbidden => Self::lasting(fault),
            Kind::Abandoned => Self::abandoned(fault),
        }
    }
}

/// Whether the connection is of no use after this error: it has broken, the server ends it or cannot write any more, or
/// the schema is gone. The next connection makes the schema again, or says what is missing.
pub(super) fn ends_connection(error: &tokio_postgres::Error) -> bool {
    match error.code() {
        None
        | Some(
            &SqlState::READ_ONLY_SQL_TRANSACTION
            | &SqlState::INVALID_SCHEMA_NAME
            | &SqlState::UNDEFINED_TABLE,
        ) => true,
        Some(code) => ["08", "57P"].iter().any(|it| code.code().starts_with(it)),
    }
}

/// What can help.
fn kind(code: &SqlState) -> Kind {
    match *code {
        SqlState::INSUFFICIENT_PRIVILEGE => Kind::Forbidden,
        // A schema, a table or a function is missing.
        SqlState::INVALID_SCHEMA_NAME
        | SqlState::UNDEFINED_FUNCTION
        | SqlState::UNDEFINED_TABLE => Kind::Unmigrated,
        SqlState::INVALID_CATALOG_NAME | SqlState::UNTRANSLATABLE_CHARACTER => Kind::Lasting,
        // The user, or the password; and what our functions say in another isolation level.
        _ if code.code().starts_with("28") || code.code() == "LS002" => Kind::Lasting,
        _ => Kind::Passing,
    }
}

/// Why a fence could not be asked.
pub(crate) fn fence_error(error: &tokio_postgres::Error) -> StoreError {
    let told = Fault::refused("the transaction's connection", error);
    told.into()
}

#[cfg(feature = "tls-rustls")]
fn rejection(error: &tokio_postgres::Error) -> Option<&'static str> {
    crate::store::tls::rejection(std::error::Error::source(error)?)
}

#[cfg(not(feature = "tls-rustls"))]
fn rejection(_: &tokio_postgres::Error) -> Option<&'static str> {
    None
}

/// How many characters of an error are kept.
const LONGEST_TEXT: usize = 400;

/// The error with its causes, in one line of a length that fits a log.
fn chain(error: &tokio_postgres::Error) -> String {
    let text = match error.as_db_error() {
        Some(refusal) => format!("{} ({})", refusal.message(), refusal.code().code()),
        None => crate::base::error::chain(error),
    };
    let text: String = text.chars().take(LONGEST_TEXT).collect();
    text.replace(char::is_control, " ")
}

/// An address as errors show it.
pub(super) type Address = Arc<str>;
