//! Ports for servers and proxies: 20000 to 29999, below those that systems hand out by themselves.

use std::collections::BTreeSet;
use std::net::{Ipv4Addr, TcpListener};
use std::sync::Mutex;

const FIRST: u16 = 20_000;
const COUNT: u16 = 10_000;

/// Test processes that run at once have slices of their own: nobody takes the port of a server that is about to be
/// started again, or of a proxy that refuses connections for a while.
const SLICE: u16 = 100;

static SLICES: Mutex<Slices> = Mutex::new(Slices {
    ours: Vec::new(),
    taken: BTreeSet::new(),
    last: 0,
});

struct Slices {
    /// The first port of each slice of ours, on which we listen for as long as this process lives.
    ours: Vec<TcpListener>,
    taken: BTreeSet<u16>,
    /// The one that was given last.
    last: u16,
}

impl Slices {
    /// A port of a slice of ours that is not in use: one that has not been in use for long, if there is any. A client of
    /// a test that has just ended may still try to connect to its server.
    fn free(&mut self) -> Option<u16> {
        let firsts = self.ours.iter().filter_map(|claim| claim.local_addr().ok());
        let ports = firsts.flat_map(|first| first.port() + 1..first.port() + SLICE);
        let mut ports: Vec<_> = ports.collect();
        ports.sort_by_key(|port| (*port <= self.last, *port));
        let is_free = |port: &u16| !self.taken.contains(port) && listen(*port).is_ok();
        self.last = ports.into_iter().find(is_free)?;
        Some(self.last)
    }

    /// One more slice; whose first port somebody listens on is another process's.
    fn claim(&mut self) -> bool {
        let slices = u32::from(COUNT / SLICE);
        let begin = std::process::id() % slices;
        let firsts = (0..slices).map(|step| FIRST + ((begin + step) % slices) as u16 * SLICE);
        let claimed = { firsts }.find_map(|first| listen(first).ok());
        let is_claimed = claimed.is_some();
        self.ours.extend(claimed);
        is_claimed
    }
}

fn listen(port: u16) -> std::io::Result<TcpListener> {
    TcpListener::bind((Ipv4Addr::LOCALHOST, port))
}

fn slices() -> std::sync::MutexGuard<'static, Slices> {
    SLICES
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// A port that nothing else is given while this value lives, also when nobody listens on it.
#[derive(Debug)]
pub(super) struct Port(u16);

impl Port {
    pub(super) fn pick() -> Self {
        let mut slices = slices();
        loop {
            if let Some(port) = slices.free() {
                slices.taken.insert(port);
                return Self(port);
            }
            let is_claimed = slices.claim();
            assert!(
                is_claimed,
                "no port is free between {FIRST} and {}",
                FIRST + COUNT
            );
        }
    }

    pub(super) fn number(&self) -> u16 {
        self.0
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        slices().taken.remove(&self.0);
    }
}
