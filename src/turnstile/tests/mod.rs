//! The rules, one by one: each test tells the interleaving that breaks the lock without its rule.

mod deadlines;
mod ends;
mod epochs;
mod harness;
mod keyspace;
mod lines;
mod notices;
mod owners;
mod passes;
mod property;
mod purity;
mod shutdown;
mod spread;
mod told;
mod unconfirmed;
mod wait_queue;
mod waiting;
mod watchdog;
mod withdrawing;
mod worlds;

pub(super) use self::harness::rules;
