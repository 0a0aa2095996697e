//! Distributed locks as future and stream combinators.

#[cfg(feature = "test-util")]
pub mod verify;
