//! How a registry finds its server: urls, names, proxies, servers that are not there yet.
//!
//! | file | question it answers |
//! |---|---|
//! | `urls.rs` | which urls and options are taken, and what is said of the others? |
//! | `lookups.rs` | what if a name is looked up slowly, or has several addresses? |
//! | `loading.rs` | what if the server is loading, or not there yet? |
//! | `proxies.rs` | what if a proxy is between? |
//! | `looks.rs` | what does `LockRegistry::check` say? |
#![cfg(all(
    feature = "redis",
    feature = "cluster",
    feature = "sentinel",
    feature = "tls-rustls",
    feature = "test-util"
))]

#[path = "../support/hearing.rs"]
mod hearing;
mod loading;
mod looks;
mod lookups;
mod proxies;
#[path = "../support/mod.rs"]
mod support;
mod urls;

use std::time::Duration;

use lockstream::{LockError, LockRegistry, StoreError};
pub(crate) use support::ms;
use support::{Role, Worker};

/// For what takes some round trips or a reconnect.
pub(crate) const BOUND: Duration = Duration::from_secs(10);

/// A registry that has not connected.
pub(crate) fn lazy(url: &str) -> LockRegistry {
    let builder = LockRegistry::builder_for(url).unwrap();
    builder.build().unwrap()
}

/// The store's word in an error.
#[track_caller]
pub(crate) fn told<T>(result: Result<T, LockError>) -> StoreError {
    match result {
        Err(LockError::Store { source, .. }) => source,
        Err(other) => panic!("not the store's: {other:?}"),
        Ok(_) => panic!("it should not have worked"),
    }
}

/// Not a test, but what the other processes run.
#[tokio::test]
async fn worker() {
    if let Some(mut role) = Role::of_this_process() {
        lookups::run(&mut role).await;
    }
}

pub(crate) fn spawn(role: &str, env: &[(&str, &str)]) -> Worker {
    Worker::spawn("worker", role, env)
}
