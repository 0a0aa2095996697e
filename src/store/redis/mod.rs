//! Leases on a Redis or Valkey server.
//!
//! | file | what it answers |
//! |---|---|
//! | `store`, `endpoint`, `socket`, `bounded`, `tls` | how is a server named, and connected to? |
//! | `sentinel` | where is the server just now? |
//! | `session`, `inbox` | how do a registry's wishes reach the task that has the connection? |
//! | `teller` | how does what that task learns reach the registry? |
//! | `link`, `setup`, `serve`, `pauses` | what happens to the connection, from first to last? |
//! | `replicas/` | what if replicas must have what is acquired? |
//! | `bell`, `busy_poll` | when does that task run? |
//! | `../traffic`, `clock` | which wishes share a call, in what order, and until when is it of use? |
//! | `call`, `reply`, `grant`, `keys`, `script` | what do wishes, answers and grants look like on the wire? |
//! | `*.lua` | what happens on the server? |
//! | `cluster/` | the same, on a cluster |
//! | `fault` | what went wrong? |
//!
//! The rules that the code cites by number are those of the protocol.

mod bell;
#[cfg(feature = "test-util")]
mod bench;
mod bounded;
mod busy_poll;
mod call;
mod clock;
#[cfg(feature = "cluster")]
mod cluster;
mod endpoint;
mod fault;
mod grant;
mod inbox;
mod keys;
mod link;
mod pauses;
mod replicas;
mod reply;
mod script;
#[cfg(feature = "sentinel")]
mod sentinel;
mod serve;
mod session;
mod setup;
mod socket;
mod store;
mod teller;
#[cfg(feature = "tls-rustls")]
mod tls;

#[cfg(feature = "test-util")]
pub(crate) use self::bench::Calls;
pub use self::store::{ConnectStore, RedisStore, RedisStoreBuilder};

#[cfg(test)]
mod tests;
