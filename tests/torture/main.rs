//! Thirty seconds of the torture example on each deployment, and its judges before a court of their own: whatever they
//! are to find they find when it is there.

#[path = "../support/mod.rs"]
mod support;

#[allow(
    dead_code,
    unreachable_pub,
    reason = "what the example does with them is not all done here"
)]
#[path = "../../examples/torture"]
mod torture {
    pub(crate) mod callers;
    pub(crate) mod deployments;
    pub(crate) mod dice;
    pub(crate) mod judge;
    pub(crate) mod log;
    pub(crate) mod plan;
    pub(crate) mod resource;
    pub(crate) mod table;
}
use torture::table;
#[allow(
    unused_imports,
    reason = "the example's files name each other from the root"
)]
use torture::{callers, deployments, dice, judge, log, plan, resource};

mod judges;
mod leftovers;
mod plans;
mod runs;
mod sentinels;
