//! Atomics and wakers. In tests they are those of `model.rs`, as is [`Mutex`](super::mutex::Mutex).

#[cfg(not(test))]
pub(crate) use std::sync::atomic::{AtomicBool, AtomicU64};

#[cfg(not(test))]
pub(crate) use futures::task::AtomicWaker;
#[cfg(not(test))]
pub(crate) use tokio::sync::Notify;

#[cfg(test)]
pub(crate) use super::model::{AtomicBool, AtomicU64, AtomicWaker, Notify};
