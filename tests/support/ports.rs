//! Ports for servers and proxies: 20000 to 29999, below those that systems hand out by themselves.

use std::collections::BTreeSet;
use std::net::{Ipv4Addr, TcpListener};
use std::sync::Mutex;

const FIRST: u16 = 20_000;
const COUNT: u16 = 10_000;

/// Each process begins in a slice of its own, so that test processes that run at once rarely try the same port.
const SLICE: u16 = 100;

static TAKEN: Mutex<BTreeSet<u16>> = Mutex::new(BTreeSet::new());

/// A port that nothing else in this process is given while this value lives, also when nobody listens on it.
#[derive(Debug)]
pub(super) struct Port(u16);

impl Port {
    /// The next port that this process does not use and that could be bound just now.
    ///
    /// Another process may still be faster: who binds it in earnest takes the next one when that fails.
    pub(super) fn pick() -> Self {
        let slice = (std::process::id() % u32::from(COUNT / SLICE)) as u16 * SLICE;
        for step in 0..COUNT {
            let port = FIRST + (slice + step) % COUNT;
            if !TAKEN.lock().unwrap().insert(port) {
                continue;
            }
            let port = Self(port);
            if TcpListener::bind((Ipv4Addr::LOCALHOST, port.0)).is_ok() {
                return port;
            }
        }
        panic!("no port is free between {FIRST} and {}", FIRST + COUNT);
    }

    pub(super) fn number(&self) -> u16 {
        self.0
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        TAKEN
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
            .remove(&self.0);
    }
}
