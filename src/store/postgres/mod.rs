//! Leases in PostgreSQL.
//!
//! | file | what is in it |
//! |---|---|
//! | `store` | the public store and its builder |
//! | `address` | how a server is named in a url, and over TLS |
//! | `schema`, `schema.sql` | tables and functions, and how they come into a database |
//! | `session` | a registry's session: takes requests to its task, and answers back |
//! | `task` | the task that has the connections: it sends calls and reads answers and grants |
//! | `hello` | how a connection is set up |
//! | `call`, `notice` | what requests, answers and grants look like on the wire |
//! | `scan` | which keys have a lock |
//! | `sweep` | how unused rows are deleted |
//! | `../send_window` | which requests share a call |
//! | `fault` | what can go wrong |

mod address;
mod call;
mod fault;
mod hello;
mod notice;
mod scan;
mod schema;
mod session;
mod store;
mod sweep;
mod task;

pub(crate) use self::fault::{fence_error, is_stale_fence};
pub use self::store::{ConnectPostgres, PostgresStore, PostgresStoreBuilder};

#[cfg(test)]
mod tests;
