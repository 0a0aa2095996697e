//! Leases in this process.
//!
//! | file | contents |
//! |---|---|
//! | `store.rs` | the public store |
//! | `shared.rs` | what all registries on one store share |
//! | `session.rs` | one registry's session |
//! | `keyspace.rs` | all keys, and the operations on them |
//! | `slot.rs` | one key: its holder, its queue, its subscriptions |

mod keyspace;
mod session;
mod shared;
mod slot;
mod store;

#[cfg(test)]
pub(crate) use self::keyspace::{Applied, Asking, Delivery, Keyspace};
pub use self::store::MemoryStore;
