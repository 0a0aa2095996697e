//! Leases on Redis or Valkey: one server, a primary behind sentinels, or a cluster.
//!
//! | file | what is in it |
//! |---|---|
//! | `store` | the public store and its builder |
//! | `endpoint`, `stream`, `../tls` | how one server is named in a url, and connected to |
//! | `credentials` | user and password that change while the store is in use |
//! | `topology`, `sentinel`, `cluster`, `slots` | which servers there are, and which one has a key |
//! | `session`, `change`, `routing`, `request` | a registry's session: takes requests to nodes, and answers back |
//! | `node`, `handshake`, `pipe`, `../backoff`, `../server_clock` | the task that has the connection to one primary |
//! | `subscriber`, `subscriptions` | on a cluster, the task that hears a primary's grants |
//! | `replicas` | acquisitions that count only when replicas have them |
//! | `call`, `reply`, `grant`, `keys`, `script`, `script.lua`, `confirm.lua` | what requests, answers and grants look like on the wire |
//! | `scan` | which keys have a lock, by SCAN on every primary |
//! | `../send_window` | which requests share a call, and how many calls are in flight |
//! | `fault` | what can go wrong |

mod call;
mod change;
mod cluster;
mod credentials;
mod endpoint;
mod fault;
mod grant;
mod handshake;
mod keys;
mod node;
mod pipe;
mod replicas;
mod reply;
mod request;
mod routing;
mod scan;
mod script;
mod sentinel;
mod session;
mod slots;
mod store;
mod stream;
mod subscriber;
mod subscriptions;
mod topology;

pub use self::credentials::Credentials;
pub use self::store::{ConnectStore, RedisStore, RedisStoreBuilder};

#[cfg(test)]
mod tests;
