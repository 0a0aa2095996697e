//! Leases on a majority of independent stores.
//!
//! | file | question it answers |
//! |---|---|
//! | `store.rs` | what does a user make, and what does it promise? |
//! | `session.rs` | how do the nodes and the registry reach the state, and in which order is it told? |
//! | `state.rs` | which nodes are there, and which keys are in use? |
//! | `entry.rs` | which node is asked what about one key, and what follows from its answer? |
//! | `lane.rs` | what is one node asked about one key, in which order, and what may it still have of ours? |
//! | `node.rs` | what is known of a node, and what is sent to it? |
//! | `quarantine.rs` | for how long has a node that was started again no vote? |
//! | `ballot.rs` | how are votes counted? (No node, no time.) |
//!
//! All but `session.rs` is data in, data out.

mod entry;
mod fault;
mod node;
mod node_queue;
mod quarantine;
mod session;
mod state;
mod store;
mod tally;
#[cfg(test)]
mod tests;

pub use self::store::QuorumStore;
