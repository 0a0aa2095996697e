//! Leases in PostgreSQL.
//!
//! | file | what is in it |
//! |---|---|
//! | `store` | the public store and its builder |
//! | `address`, `options` | what a url says |
//! | `connecting`, `socket`, `secure` | how a connection is opened: hosts and addresses, sockets, TLS |
//! | `schema`, `schema.sql` | tables and functions, and how they come into a database |
//! | `backend` | PostgreSQL as the driver (`../driver`) sees it |
//! | `link`, `hello` | a registry's connections, as the driver sees them, and how they are set up |
//! | `connection` | one connection |
//! | `call`, `notice` | what requests, answers and grants look like on the wire |
//! | `check` | what a server is, and what our role may do there |
//! | `scan` | which keys have a lock |
//! | `sweep` | how unused rows are deleted |
//! | `fault` | what can go wrong |

mod address;
mod backend;
mod call;
mod check;
mod connecting;
mod connection;
mod fault;
mod hello;
mod link;
mod notice;
mod options;
mod scan;
mod schema;
mod secure;
mod socket;
mod store;
mod sweep;

pub(crate) use self::fault::fence_error;
pub use self::store::{ConnectPostgres, Migrate, PostgresStore, PostgresStoreBuilder};

#[cfg(test)]
mod tests;
