//! Leases that count only when replicas have them.
//!
//! | file | what it answers |
//! |---|---|
//! | `rule` | how many, and how long do they have? |
//! | `session` | what does a registry see of it? |
//! | `ledger` | who waits for which confirmation? |
//! | `places` | whose replicas are asked, on a cluster? |
//! | `task`, `wire`, `confirm.lua` | how are they asked? |
//!
//! It stands around a session that knows nothing of it, and holds back what that one tells of locks that were won or
//! granted until enough replicas have them. What they have not is told as such, and the registry gives it back.
//!
//! `WAIT` holds up its connection, and counts the writes of that connection alone. So there is a second connection (on a
//! cluster one more to each primary), which first writes something that comes after the acquisition in the stream to the
//! replicas: whoever has the one has the other. All acquisitions that came meanwhile share the next such question.
//!
//! It is asked of whoever has the lock now, which need not be the node that gave it: a slot has moved, or a replica was
//! promoted. What counts is that one node says, on one connection, that the lock is its owner's and how many of its
//! replicas know that. A node that has it no more says who does, and is not believed about replicas.
//!
//! Neither renewals nor releases ask. A renewal says nothing new of who holds, and a replica without it has the lock for
//! as long as the renewal before said, which was a third of the ttl earlier. A release that a replica has not heard of
//! keeps a lock locked there until its ttl is over, and gives it to nobody.

mod ledger;
#[cfg(feature = "cluster")]
mod places;
mod rule;
mod session;
mod task;
mod wire;

use std::time::Duration;

pub(super) use self::rule::Replicas;
pub(super) use self::session::ReplicasSession;
use self::wire::Wire;
use super::fault::Fault;
use super::session::Place;

/// Whether a server lets us wait for its replicas.
pub(super) async fn try_out(place: &Place, within: Duration) -> Result<(), Fault> {
    match place {
        Place::Server(endpoint) => Wire::connect(endpoint, false, within).await.map(drop),
        #[cfg(feature = "cluster")]
        Place::Cluster(seeds) => places::try_out(seeds, within).await,
    }
}

#[cfg(test)]
mod tests;
