//! Counts the commands that clients send, as the server sees them.
//!
//! No counter of Redis 7.0 tells them: `total_commands_processed`, `INFO commandstats` and the ids
//! of the slow log count what scripts call inside as well (one `EVAL` that sets 100 keys adds 101 to
//! each), and `CLIENT LIST` has no count at all. What scripts call cannot be taken off again, since
//! a library may send by itself what its scripts call too. `MONITOR` alone tells the two apart:
//! a command of a client comes with its address, one of a script with the word `lua`.
//!
//! It costs the server a line a command, so no rate is taken while it runs: where rates and calls are
//! both asked for, calls get a stretch of their own.

use std::io::{BufRead, BufReader, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::libs::{Outcome, told};
use crate::server::Server;

/// The last command of a count: nobody else sends it.
const END: &str = "lockstream-bench-end";

/// A count under way.
pub(crate) struct Monitor {
    counting: JoinHandle<Outcome<u64>>,
}

impl Monitor {
    /// Counts all that is sent from here on, by others than [`Monitor::end`].
    pub(crate) fn begin(server: &Server) -> Outcome<Self> {
        let address = (Ipv4Addr::LOCALHOST, server.port());
        let mut stream = TcpStream::connect(address).map_err(told("monitor"))?;
        // Bounds the thread, too, should the server not say a word any more.
        let patience = Some(Duration::from_secs(60));
        stream.set_read_timeout(patience).map_err(told("monitor"))?;
        stream.write_all(b"MONITOR\r\n").map_err(told("monitor"))?;
        let mut lines = BufReader::with_capacity(1 << 18, stream);
        let mut first = String::new();
        lines.read_line(&mut first).map_err(told("monitor"))?;
        if first.trim() != "+OK" {
            return Err(format!("MONITOR: {}", first.trim()));
        }
        let counting = std::thread::spawn(move || count(lines).map_err(told("monitor")));
        Ok(Self { counting })
    }

    /// How many commands clients have sent up to now.
    pub(crate) fn end(self, server: &mut Server) -> Outcome<u64> {
        let _: String = server.ask(&["ECHO", END])?;
        let counted = self.counting.join();
        counted.map_err(|_| "the count panicked".to_owned())?
    }
}

fn count(mut lines: impl BufRead) -> std::io::Result<u64> {
    let (mut line, mut commands) = (Vec::new(), 0);
    loop {
        line.clear();
        if lines.read_until(b'\n', &mut line)? == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        if is_from_client(&line) {
            if line.windows(END.len()).any(|part| part == END.as_bytes()) {
                return Ok(commands);
            }
            commands += 1;
        }
    }
}

/// `+1700000000.000000 [0 127.0.0.1:4711] "SET" "k"`, or `[0 unix:/path]`; a script's has `[0 lua]`.
fn is_from_client(line: &[u8]) -> bool {
    let source = line.split(|byte| *byte == b']').next().unwrap_or_default();
    source.contains(&b'[') && source.contains(&b':')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_scripts_call_is_not_counted() {
        let said = format!(
            "+1.1 [0 127.0.0.1:9] \"EVALSHA\" \"a:b]\" \"0\"\r\n+1.2 [0 lua] \"SET\" \"k:1\" \"x\"\r\n\
             +1.2 [0 lua] \"ECHO\" \"{END}\"\r\n+1.3 [3 unix:/tmp/s] \"GET\" \"k\"\r\n\
             +1.4 [0 [::1]:80] \"GET\" \"k\"\r\n+1.5 [0 127.0.0.1:9] \"ECHO\" \"{END}\"\r\n\
             +1.6 [0 127.0.0.1:9] \"GET\" \"k\"\r\n"
        );
        assert_eq!(count(said.as_bytes()).unwrap(), 3);
    }

    #[test]
    fn a_count_that_is_cut_off_is_an_error() {
        assert!(count(&b"+1.1 [0 127.0.0.1:9] \"GET\" \"k\"\r\n"[..]).is_err());
    }
}
