//! Functions under `#[with_lock]`, on the memory store.
//!
//! The lints are those of a strict user: what the attribute writes must not trip them.
#![warn(clippy::pedantic, clippy::nursery)]
#![warn(let_underscore_drop, single_use_lifetimes, unused_qualifications)]
#![allow(clippy::missing_errors_doc, clippy::significant_drop_tightening)]

mod beside;
mod endings;
mod futures;
// An attribute that wrote an `allow` of these would not compile.
mod asked;
#[forbid(unused_imports, unused_variables, unused_braces, unused_parens)]
mod keys;
mod methods;
#[forbid(unused_imports, unused_variables, unused_braces, unused_parens)]
mod modes;
mod nesting;
#[forbid(unused_imports, unused_variables, unused_braces, unused_parens)]
mod options;
#[forbid(unused_imports, unused_variables, unused_braces, unused_parens)]
mod skipping;
mod streams;

use std::fmt;
use std::time::Duration;

use lockstream::{LockError, LockRegistry};

/// An error of the user's own.
#[derive(Debug)]
enum ShopError {
    Lock(LockError),
    SoldOut,
}

impl From<LockError> for ShopError {
    fn from(error: LockError) -> Self {
        Self::Lock(error)
    }
}

impl fmt::Display for ShopError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Lock(error) => error.fmt(f),
            Self::SoldOut => f.write_str("sold out"),
        }
    }
}

impl std::error::Error for ShopError {}

/// Whether anybody holds the key.
async fn held(locks: &LockRegistry, key: &str) -> bool {
    let seen = locks.obtain(key).inspect().await.unwrap();
    seen.owner().is_some()
}

/// How long the store keeps the key.
async fn remaining(locks: &LockRegistry, key: &str) -> Duration {
    let seen = locks.obtain(key).inspect().await.unwrap();
    seen.remaining().expect("somebody holds the key")
}

/// Waits until nobody holds the key: a drop releases in the background.
async fn free(locks: &LockRegistry, key: &str) {
    let until = Duration::from_secs(1);
    let lock = locks.obtain(key).ttl(until);
    let lease = lock.lease_within(until).await.unwrap();
    lease.release().await.unwrap();
}
