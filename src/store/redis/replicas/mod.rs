//! Acquisitions that count only when replicas have them.
//!
//! | file | what is in it |
//! |---|---|
//! | `held` | an acquisition that is held back, and what the registry is told of it |
//! | `confirmer`, `confirm.lua` | how a node's task asks the replicas, and whether a server lets it |
//!
//! A request that won a lock is not answered, but goes to the node that has the lock's slot once more:
//! to be confirmed there. So does each grant. On its way it is redirected, delayed and lost like any
//! other request.
//!
//! `WAIT` holds up its connection, and counts the writes of that connection alone. So each node's task
//! has one more connection, on which it first writes something that comes after the acquisition in the
//! stream to the replicas: a replica that has the one has the other. All acquisitions that come
//! meanwhile share the next question.
//!
//! Whoever has the lock by then is asked, which need not be the node that gave it: a slot has moved, or
//! a replica was promoted. What counts is that one node says, on one connection, that the lock is its
//! owner's and how many of its replicas know that.
//!
//! Renewals and releases ask nobody. A replica that missed a renewal has the lock for as long as the
//! renewal before said. A replica that missed a release keeps the lock until its ttl is over, and gives
//! it to nobody.

mod confirmer;
mod held;

pub(super) use self::confirmer::{Confirmer, try_out};
pub(super) use self::held::{Held, MinReplicas};
