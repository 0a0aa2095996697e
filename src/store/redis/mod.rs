//! Leases on Redis or Valkey: one server, a primary behind sentinels, or a cluster.
//!
//! | file | what is in it |
//! |---|---|
//! | `store` | the public store and its builder |
//! | `endpoint`, `options`, `../url` | how one server is named in a url |
//! | `stream`, `../tls` | how one server is connected to |
//! | `credentials` | user and password that change while the store is in use |
//! | `topology`, `sentinel`, `cluster`, `slots` | which servers there are, and which one has a key |
//! | `backend` | Redis as the driver (`../driver`) sees it |
//! | `primary`, `handshake` | the connection to one primary, as the driver sees it, and how it is set up |
//! | `link`, `incoming`, `login` | one connection: requests, replies and pushes |
//! | `replicas` | acquisitions that count only when replicas have them |
//! | `call`, `reply`, `grant`, `keys`, `script`, `script.lua`, `confirm.lua` | what requests, answers and grants look like on the wire |
//! | `check` | what a server is, and what our user may do there |
//! | `scan` | which keys have a lock, by SCAN on every primary |
//! | `fault` | what can go wrong |

mod backend;
mod call;
mod check;
mod cluster;
mod credentials;
mod endpoint;
mod fault;
mod grant;
mod handshake;
mod incoming;
mod keys;
mod link;
mod login;
mod options;
mod primary;
mod replicas;
mod reply;
mod scan;
mod script;
mod sentinel;
mod slots;
mod store;
mod stream;
mod topology;

pub use self::store::{ConnectRedis, RedisStore, RedisStoreBuilder};

#[cfg(test)]
mod tests;
