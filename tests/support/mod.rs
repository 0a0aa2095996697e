//! What integration tests stand on: a real server, a proxy that breaks the connection, and worker processes.
//!
//! | file | question it answers |
//! |---|---|
//! | `server.rs` | how does a test get a server of its own, break it, and look into it? |
//! | `postgres.rs` | how does a test get a PostgreSQL server? |
//! | `cluster.rs` | how does a test get a cluster of its own, and move what is in it? |
//! | `sentinel.rs` | how does a test get sentinels, and what they watch over? |
//! | `keeper.rs` | who ends the server, however the test ends? |
//! | `program.rs` | which servers are there, and where? |
//! | `proxy.rs` | how does a test break the connection between a client and a server? |
//! | `haproxy.rs` | how does a test get a proxy as people have it before their servers? |
//! | `preload.rs` | how does a test get look-ups of names that are slow, or a name with two addresses? |
//! | `redirect.rs` | how does a client come to a proxy whose address servers tell it? |
//! | `process.rs` | how does a test get a second process? |
//! | `rights.rs` | which rights are enough? |
//! | `shown.rs` | what does a server that speaks TLS show? |
//! | `steady.rs` | what if the machine stands still, or is crowded, in a test that measures time? |
//! | `ports.rs` | which port may a test listen on? |
//! | `lock_server.rs` | how does a test run on every kind of server? (It stands by itself.) |
//! | `hearing.rs` | how does a test hear all that its thread logs? (It stands by itself.) |
//!
//! Nothing here waits by the test runtime's clock, so all of it works under paused time as well.

#![allow(
    dead_code,
    unreachable_pub,
    unused_imports,
    reason = "every integration test is a crate of its own and uses another part of this"
)]

mod cluster;
mod haproxy;
mod keeper;
mod ports;
#[cfg(feature = "postgres")]
mod postgres;
mod preload;
mod process;
mod program;
mod proxy;
mod redirect;
mod rights;
mod sentinel;
mod server;
mod shown;
mod steady;

use std::fmt::Display;
use std::time::{Duration, Instant};

pub use cluster::Cluster;
pub use haproxy::HaProxy;
#[cfg(feature = "postgres")]
pub use postgres::{PgBouncer, PgClient, PgSchema, PgServer, PgServerBuilder};
pub use preload::Lookups;
pub use process::{Role, Worker};
pub use program::Program;
pub use proxy::{Proxy, Way};
pub use rights::{least_rights, least_rights_at_sentinels};
pub use sentinel::{FAIL_OVER, Passwords, Sentinel, Watched};
pub use server::{ClientRow, RedisServer, RedisServerBuilder};
pub use shown::Tls;
pub use steady::{
    Watch, again_if_it_stood_still, on_a_steady_machine, on_a_steady_machine_blocking,
};

pub const fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// For what must come about sooner or later, be the machine ten times as slow as another. How soon it comes about is for
/// other assertions to tell.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Between two looks at a condition that nobody announces.
const LOOK_AGAIN: Duration = Duration::from_millis(1);

/// What an error says, and each of its causes, as `{:#}` of `anyhow` has it.
pub fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    causes
        .map(ToString::to_string)
        .collect::<Vec<_>>()
        .join(": ")
}

/// Does work that blocks on a thread of its own, which is left behind if it takes longer than `patience`.
///
/// A socket's own time-out would not do: a read that has one is not begun again by the kernel when the process was
/// stopped for a moment, and errs.
fn within<T: Send + 'static>(
    patience: Duration,
    work: impl FnOnce() -> redis::RedisResult<T> + Send + 'static,
) -> redis::RedisResult<T> {
    let (done, is_done) = std::sync::mpsc::channel();
    std::thread::spawn(move || done.send(work()));
    is_done.recv_timeout(patience).unwrap_or_else(|_| {
        let late = format!("no answer within {patience:?}");
        Err(std::io::Error::new(std::io::ErrorKind::TimedOut, late).into())
    })
}

/// The next message of a subscriber. Panics if none comes `within` that time. A read that a stop of the process
/// interrupts is begun again.
pub fn next_message(pubsub: &mut redis::PubSub<'_>, within: Duration) -> redis::Msg {
    pubsub.set_read_timeout(Some(within)).unwrap();
    let begin = Instant::now();
    loop {
        match pubsub.get_message() {
            Err(error)
                if error.is_io_error()
                    && !error.is_timeout()
                    && !error.is_connection_dropped()
                    && begin.elapsed() < within => {}
            message => return message.unwrap(),
        }
    }
}

/// Waits until `condition` holds, and panics naming `what` when it does not `within` that time.
///
/// Both the bound and the pauses are real time, whatever the runtime's clock does meanwhile. Time in which the machine
/// stood still does not count.
pub async fn wait_until(what: impl Display, within: Duration, mut condition: impl FnMut() -> bool) {
    let bound = steady::Bound::new(within);
    while !condition() {
        assert!(!bound.is_over(), "not within {within:?}: {what}");
        tokio::task::spawn_blocking(|| std::thread::sleep(LOOK_AGAIN))
            .await
            .expect("a sleep does not panic");
    }
}

/// [`wait_until`] for tests without a runtime.
pub fn wait_until_blocking(
    what: impl Display,
    within: Duration,
    mut condition: impl FnMut() -> bool,
) {
    let bound = steady::Bound::new(within);
    while !condition() {
        assert!(!bound.is_over(), "not within {within:?}: {what}");
        std::thread::sleep(LOOK_AGAIN);
    }
}
