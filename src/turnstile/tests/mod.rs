//! The rules, one by one: each test tells the interleaving that breaks the lock without its rule.

mod shutdown;
mod deadlines;
mod desk;
mod ends;
mod keyspace;
mod wait_queue;
mod notices;
mod owners;
mod passes;
mod property;
mod purity;
mod unconfirmed;
mod waiting;
mod watchdog;
mod withdrawing;
