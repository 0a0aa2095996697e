//! Leases in PostgreSQL.
//!
//! | file | what is in it |
//! |---|---|
//! | `store` | the public store and its builder |
//! | `address` | how a server is named in a url, and over TLS |
//! | `schema`, `schema.sql` | tables and functions, and how they come into a database |
//! | `backend` | PostgreSQL as the driver (`../driver`) sees it |
//! | `link`, `hello` | a registry's connections, as the driver sees them, and how they are set up |
//! | `connection` | one connection |
//! | `call`, `notice` | what requests, answers and grants look like on the wire |
//! | `scan` | which keys have a lock |
//! | `sweep` | how unused rows are deleted |
//! | `fault` | what can go wrong |

mod address;
mod backend;
mod call;
mod check;
mod connection;
mod fault;
mod hello;
mod link;
mod notice;
mod scan;
mod schema;
mod socket;
mod store;
mod sweep;

pub(crate) use self::fault::fence_error;
pub use self::store::{ConnectPostgres, PostgresStore, PostgresStoreBuilder};

#[cfg(test)]
mod tests;
