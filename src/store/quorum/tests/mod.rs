//! Quorums of simulated nodes under paused time: what breaks is decided by the test, or a seed.

mod connections;
mod cost;
mod elections;
mod harness;
mod leases;
mod lost_ops;
mod nodes;
mod notices;
mod returns;
mod same_server;
mod simulation;
mod subscriptions;
