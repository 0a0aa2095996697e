//! Leases that count only when replicas have them.
//!
//! | file | what it answers |
//! |---|---|
//! | `rule` | how many, and how long do they have? |
//! | `session` | what does a registry see of it? |
//! | `ledger` | who waits for which confirmation? |
//! | `task`, `wire`, `confirm.lua` | how are the replicas asked? |
//!
//! It stands around a session that knows nothing of it, and holds back what that one tells of locks that were won or
//! granted until enough replicas have them. What they have not is told as such, and the registry gives it back.
//!
//! `WAIT` holds up its connection, and counts the writes of that connection alone. So there is a second connection,
//! which first writes something that comes after the acquisition in the stream to the replicas: whoever has the one
//! has the other. All acquisitions that came meanwhile share the next such question.
//!
//! Neither renewals nor releases ask. A renewal says nothing new of who holds, and a replica without it has the lock for
//! as long as the renewal before said, which was a third of the ttl earlier. A release that a replica has not heard of
//! keeps a lock locked there until its ttl is over, and gives it to nobody.

mod ledger;
mod rule;
mod session;
mod task;
mod wire;

pub(super) use self::rule::Replicas;
pub(super) use self::session::ReplicasSession;
pub(super) use self::wire::Wire;

#[cfg(test)]
mod tests;
