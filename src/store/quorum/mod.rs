//! Leases on a majority of independent stores.
//!
//! | file | contents |
//! |---|---|
//! | `store.rs` | the public store |
//! | `session.rs` | one registry's session: connects the nodes and the registry to the state |
//! | `state.rs` | the nodes, and the keys in use |
//! | `entry.rs` | one key: its open operations, and what follows from the nodes' replies |
//! | `node_queue.rs` | what one node is asked about one key, in order, and what it may still hold of ours |
//! | `node.rs` | what is known of a node, and which of its replies count |
//! | `quarantine.rs` | for how long a node that was started again has no vote |
//! | `ballot.rs` | one open operation: the nodes' replies to it as votes, and the result as an answer |
//! | `fault.rs` | what can go wrong |
//!
//! All but `session.rs` is data in, data out.

mod ballot;
mod entry;
mod fault;
mod node;
mod node_queue;
mod quarantine;
mod session;
mod state;
mod store;
#[cfg(test)]
mod tests;

pub use self::store::QuorumStore;
