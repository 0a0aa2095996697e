//! What only a PostgreSQL store shows.
//!
//! | file | question it answers |
//! |---|---|
//! | `fences.rs` | does a transaction commit only while its lease holds, and does nobody get the lock before its end? |
//! | `by_hand.rs` | does what docs/postgres.md tells a person to type do what it says? |
//! | `cleaners.rs` | what if somebody empties or drops our tables? |
//! | `strangers.rs` | what may another role of the database hear, pretend and make? |
//! | `surroundings.rs` | what do the settings of a role and a database change? |
//! | `faults.rs` | what if the server, a connection or a right is gone? |
//! | `notices.rs` | is a grant told, though whoever granted it is gone? |
//! | `losses.rs` | what if the server loses what it acknowledged? |
//! | `connecting.rs` | how is a connection opened: over which TLS, for how long, to which address? |
//! | `credentials.rs` | does anybody notice when a password changes? |
//! | `poolers.rs` | what if a pooler is between? |
//! | `quorums.rs` | does a quorum of such servers elect one holder? |
//! | `setup.rs` | how does the schema come into a database, and who may use it? |
//! | `sqlx.rs` | does the example of another client run? |
//! | `cost.rs` | what does waiting cost, and what a lock? |

#[cfg(feature = "tls-rustls")]
#[allow(dead_code, reason = "another test uses the rest of it")]
#[path = "../access/authority.rs"]
mod authority;
#[path = "../support/hearing.rs"]
mod hearing;
#[path = "../support/mod.rs"]
mod support;

mod by_hand;
mod cleaners;
mod connecting;
mod cost;
mod credentials;
mod faults;
mod fences;
mod losses;
mod notices;
mod poolers;
mod quorums;
mod setup;
mod sqlx;
mod strangers;
mod surroundings;

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use lockstream::store::{PostgresStore, PostgresStoreBuilder};
use lockstream::{LockRegistry, LockRegistryBuilder};
use support::{PATIENCE, again_if_it_stood_still, ms};
use tokio_postgres::NoTls;

const BOUND: Duration = Duration::from_secs(10);

/// A registry to be. No machine that is slow or stands still takes its leases away.
fn builder(store: PostgresStore) -> LockRegistryBuilder {
    LockRegistry::builder(store)
        .ttl(PATIENCE)
        .wait(BOUND)
        .response_timeout(ms(5000))
}

/// A store to be. On a slow machine its first connection, which may make the schema, takes seconds.
fn patient(url: impl AsRef<str>) -> PostgresStoreBuilder {
    PostgresStore::builder(url).connect_timeout(PATIENCE)
}

/// A registry whose connection stands. Its first call has five seconds: a machine that stands still takes them from it.
async fn registry(url: &str) -> LockRegistry {
    let made = Arc::new(OnceLock::new());
    let (url, making) = (url.to_owned(), made.clone());
    again_if_it_stood_still(move || {
        let (url, made) = (url.clone(), making.clone());
        async move {
            let store = patient(url).connect().await.unwrap();
            let registry = builder(store).build().unwrap();
            registry.obtain("anything").inspect().await.unwrap();
            made.set(registry).expect("it is made once");
        }
    })
    .await;
    Arc::into_inner(made)
        .and_then(OnceLock::into_inner)
        .expect("it is made")
}

/// A client of the application.
async fn client(url: &str) -> tokio_postgres::Client {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await.unwrap();
    tokio::spawn(connection);
    client
}

/// Waits until `condition` holds. How soon it does is for others to tell: a busy machine connects and authenticates in
/// seconds, and a condition may ask a registry that is given up after five.
async fn eventually(what: &str, mut condition: impl AsyncFnMut() -> bool) {
    let begin = Instant::now();
    while !condition().await {
        assert!(
            begin.elapsed() < PATIENCE,
            "not within {PATIENCE:?}: {what}"
        );
        tokio::time::sleep(ms(5)).await;
    }
}

/// An error with all of its causes.
fn told(error: &dyn std::error::Error) -> String {
    support::chain(error)
}
