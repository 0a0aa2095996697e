//! Leases in this process.

mod keyspace;
mod session;
mod shared;
mod slot;
mod store;

#[cfg(test)]
pub(crate) use self::keyspace::{Asking, Delivery, Keyspace};
pub use self::store::MemoryStore;
