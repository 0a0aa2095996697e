//! Leases on a cluster.
//!
//! | file | what it answers |
//! |---|---|
//! | `seeds`, `map`, `slots` | which nodes are there, and where is a lock? |
//! | `task`, `answers`, `keys` | where does a wish go, when does it go again, and which grants are listened for? |
//! | `node`, `setup`, `wires`, `channels` | what happens to the two connections to a primary? |
//! | `parcel` | what is sent on the way? |
//!
//! The client library's own connection to clusters sends again, connects again and subscribes again
//! by itself, in an order of its own, which breaks O2 and O4.

mod answers;
mod channels;
mod keys;
mod map;
mod node;
mod parcel;
mod seeds;
mod setup;
pub(super) mod slots;
mod task;
mod wires;

pub(super) use self::answers::STRANGERS;
pub(super) use self::map::SlotMap;
pub(super) use self::seeds::{Seeds, find_map};
pub(super) use self::task::Task;
