//! Quorums of simulated nodes under paused time: what breaks is decided by the test, or a seed.

mod nodes;
mod notices;
mod rules;
mod simulation;
