//! Distributed locks as future and stream combinators.

mod error;
pub mod store;
#[allow(dead_code)]
mod turnstile;

pub use self::error::{LockError, StoreError};
