//! A bystander on a server: it asks for a `PONG` every millisecond on a connection of its own.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::libs::{Outcome, told};

const EVERY: Duration = Duration::from_millis(1);

/// Longer than any server stands still.
const PATIENCE: Duration = Duration::from_secs(120);

pub(super) struct Ping {
    over: Arc<AtomicBool>,
    thread: JoinHandle<std::io::Result<Duration>>,
}

impl Ping {
    pub(super) fn begin(port: u16) -> Outcome<Self> {
        let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).map_err(told("ping"))?;
        let over = Arc::new(AtomicBool::new(false));
        let is_over = Arc::clone(&over);
        let thread = std::thread::spawn(move || longest(stream, &is_over));
        Ok(Self { over, thread })
    }

    /// The longest time that an answer took.
    pub(super) fn end(self) -> Outcome<Duration> {
        self.over.store(true, Ordering::Release);
        let longest = self.thread.join().map_err(|_| "the ping panicked")?;
        longest.map_err(told("ping"))
    }
}

fn longest(mut stream: TcpStream, over: &AtomicBool) -> std::io::Result<Duration> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let mut longest = Duration::ZERO;
    while !over.load(Ordering::Acquire) {
        let begin = Instant::now();
        stream.write_all(b"PING\r\n")?;
        stream.read_exact(&mut [0; b"+PONG\r\n".len()])?;
        longest = longest.max(begin.elapsed());
        std::thread::sleep(EVERY);
    }
    Ok(longest)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::server::Server;

    #[test]
    fn a_standstill_is_seen() {
        let mut server = Server::start().unwrap();
        let ping = Ping::begin(server.port()).unwrap();
        server.order(&["CLIENT", "PAUSE", "300", "ALL"]).unwrap();
        // It is answered when the pause is over.
        server.order(&["ECHO", "x"]).unwrap();
        assert!(ping.end().unwrap() >= Duration::from_millis(250));
    }
}
