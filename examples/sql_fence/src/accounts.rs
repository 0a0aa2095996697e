//! Where the balance lives: one row of a SQLite file, with the greatest token that has written it.

use std::path::Path;
use std::time::Duration;

use lockstream::Token;
use rusqlite::{Connection, params};

const ID: i64 = 1;

/// Takes every write, as most programs do.
const OPEN: &str = "UPDATE accounts SET balance = ?, token = ? WHERE id = ?";

/// Refuses a write under an older token than it has seen. The same token may write again.
const FENCED: &str = "UPDATE accounts SET balance = ?, token = ? WHERE id = ? AND token <= ?";

/// The file, opened again for each access, as by processes that know nothing of each other. An access takes less than
/// a millisecond; a real service would hand it to `spawn_blocking`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Accounts<'a> {
    file: &'a Path,
    fenced: bool,
}

impl<'a> Accounts<'a> {
    pub(crate) fn create(file: &'a Path, fenced: bool, balance: i64) -> rusqlite::Result<Self> {
        let accounts = Self::open(file, fenced);
        let connection = accounts.connect()?;
        connection.execute_batch(
            "CREATE TABLE accounts (id INTEGER PRIMARY KEY, balance INTEGER NOT NULL, token INTEGER NOT NULL)",
        )?;
        connection.execute(
            "INSERT INTO accounts VALUES (?, ?, 0)",
            params![ID, balance],
        )?;
        Ok(accounts)
    }

    pub(crate) fn open(file: &'a Path, fenced: bool) -> Self {
        Self { file, fenced }
    }

    pub(crate) fn balance(self) -> rusqlite::Result<i64> {
        let query = "SELECT balance FROM accounts WHERE id = ?";
        self.connect()?.query_row(query, [ID], |row| row.get(0))
    }

    /// Writes the balance under a lease's token; false if it was refused.
    pub(crate) fn write(self, balance: i64, token: Token) -> rusqlite::Result<bool> {
        let token = token.as_i64();
        let connection = self.connect()?;
        let rows = if self.fenced {
            connection.execute(FENCED, params![balance, token, ID, token])?
        } else {
            connection.execute(OPEN, params![balance, token, ID])?
        };
        Ok(rows == 1)
    }

    fn connect(self) -> rusqlite::Result<Connection> {
        let connection = Connection::open(self.file)?;
        connection.busy_timeout(Duration::from_secs(5))?;
        Ok(connection)
    }
}
