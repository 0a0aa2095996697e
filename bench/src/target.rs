//! The server that a run measures: Redis or PostgreSQL.

use std::path::PathBuf;

use crate::database::Database;
use crate::libs::Outcome;
use crate::monitor::Monitor;
use crate::server::Server;

/// Where locks are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Store {
    Redis,
    Postgres,
}

impl Store {
    pub(crate) const ALL: [Self; 2] = [Self::Redis, Self::Postgres];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Redis => "redis",
            Self::Postgres => "postgres",
        }
    }
}

pub(crate) enum Target {
    Redis(Server),
    Postgres(Database),
}

/// A count of commands or statements under way.
pub(crate) enum Count {
    Commands(Monitor),
    /// So many had been logged when it began.
    Statements(u64),
}

impl Target {
    pub(crate) fn start(store: Store) -> Outcome<Self> {
        Ok(match store {
            Store::Redis => Self::Redis(Server::start()?),
            Store::Postgres => Self::Postgres(Database::start()?),
        })
    }

    /// Its kind and its version.
    pub(crate) fn version(&self) -> &str {
        match self {
            Self::Redis(server) => server.version(),
            Self::Postgres(database) => database.version(),
        }
    }

    pub(crate) fn url(&self) -> String {
        match self {
            Self::Redis(server) => server.url(),
            Self::Postgres(database) => database.url(),
        }
    }

    pub(crate) fn pid(&self) -> String {
        match self {
            Self::Redis(server) => server.pid().to_owned(),
            Self::Postgres(database) => database.pid(),
        }
    }

    /// Where the processes of a run put what they have to say at length.
    pub(crate) fn folder(&self) -> PathBuf {
        match self {
            Self::Redis(server) => server.folder(),
            Self::Postgres(database) => database.folder(),
        }
    }

    /// Deletes all that a round has left.
    pub(crate) fn empty(&mut self) -> Outcome<()> {
        match self {
            Self::Redis(server) => server.order(&["FLUSHALL"]),
            Self::Postgres(database) => {
                database.empty();
                Ok(())
            }
        }
    }

    /// The processor time that the server has used so far, in seconds.
    pub(crate) fn processor_secs(&mut self) -> Outcome<f64> {
        match self {
            Self::Redis(server) => server.processor_secs(),
            Self::Postgres(database) => database.processor_secs(),
        }
    }

    /// Begins to count what clients send.
    pub(crate) fn count(&mut self) -> Outcome<Count> {
        Ok(match self {
            Self::Redis(server) => Count::Commands(Monitor::begin(server)?),
            Self::Postgres(database) => {
                database.log_statements(true);
                Count::Statements(database.statements())
            }
        })
    }

    /// How many commands or statements clients have sent since then.
    pub(crate) fn counted(&mut self, count: Count) -> Outcome<u64> {
        match (self, count) {
            (Self::Redis(server), Count::Commands(monitor)) => monitor.end(server),
            (Self::Postgres(database), Count::Statements(before)) => {
                let counted = database.statements() - before;
                database.log_statements(false);
                Ok(counted)
            }
            _ => Err("the count is another server's".to_owned()),
        }
    }

    /// For scenarios that run on Redis alone.
    pub(crate) fn redis(&mut self) -> &mut Server {
        match self {
            Self::Redis(server) => server,
            Self::Postgres(_) => unreachable!("options have no such scenario for PostgreSQL"),
        }
    }
}
