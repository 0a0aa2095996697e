//! O4: how a connection is made, and what ends one.

use std::time::Duration;

use super::registry::{
    BOUND, HELD, Log, Registry, Settings, TTL, attempt, enter, refused, release, renew, unknown,
    unsent, won,
};
use super::support::{Proxy, RedisServer, Way, wait_until};
use crate::store::contract::{News, OpError, Outcome};

/// Every command that the server gets, in order, from now on.
struct Monitor(redis::Connection);

impl Monitor {
    fn new(server: &RedisServer) -> Self {
        let client = redis::Client::open(server.url()).unwrap();
        let mut connection = client.get_connection().unwrap();
        connection.set_read_timeout(Some(BOUND)).unwrap();
        redis::cmd("MONITOR").exec(&mut connection).unwrap();
        Self(connection)
    }

    /// The commands up to the first that holds `last`, those inside scripts left out.
    fn until(&mut self, last: &str) -> Vec<String> {
        let mut seen = Vec::new();
        loop {
            let line = match self.0.recv_response().unwrap() {
                redis::Value::SimpleString(line) => line,
                other => panic!("{other:?}"),
            };
            if !line.contains(" lua] ") {
                seen.push(line);
            }
            if seen.last().is_some_and(|line| line.contains(last)) {
                return seen;
            }
        }
    }
}
