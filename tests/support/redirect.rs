//! Other ports in what a server tells of its kind.

use std::sync::Arc;

/// Before a port in a redirect, and in a node's name of itself.
const HOST: &[u8] = b"127.0.0.1:";

/// One way of one connection, from a server to a client. All ports have five digits, so nothing changes its length.
#[derive(Debug)]
pub(super) struct Redirect {
    ports: Arc<[(u16, u16)]>,
    /// A line whose end has not come yet. A reply ends with a line, so nobody waits for what is kept here.
    rest: Vec<u8>,
    /// The line before: it says what a number is.
    before: Vec<u8>,
}

impl Redirect {
    /// `None`: there is nothing to do.
    pub(super) fn to(ports: Arc<[(u16, u16)]>) -> Option<Self> {
        (!ports.is_empty()).then_some(Self {
            ports,
            rest: Vec::new(),
            before: Vec::new(),
        })
    }

    /// All complete lines so far.
    pub(super) fn apply(&mut self, bytes: &[u8]) -> Vec<u8> {
        self.rest.extend_from_slice(bytes);
        let end = self.rest.iter().rposition(|byte| *byte == b'\n');
        let mut lines: Vec<u8> = self.rest.drain(..end.map_or(0, |end| end + 1)).collect();
        for line in lines.split_inclusive_mut(|byte| *byte == b'\n') {
            self.line(line);
            self.before = line.to_vec();
        }
        lines
    }

    fn line(&self, line: &mut [u8]) {
        // A sentinel's answer has the port as a text of its own; that of a node as a number with its name before it.
        let at = match &*self.before {
            b"$5\r\n" => Some(0),
            b"port\r\n" | b"+port\r\n" => Some(1),
            _ => None,
        };
        let hosts = line.windows(HOST.len()).enumerate();
        let hosts = hosts.filter_map(|(at, it)| (it == HOST).then_some(at + HOST.len()));
        let places: Vec<usize> = hosts.chain(at).collect();
        for at in places {
            if let Some(port) = line.get_mut(at..at + 5) {
                self.port(port);
            }
        }
    }

    fn port(&self, digits: &mut [u8]) {
        let port = std::str::from_utf8(digits)
            .ok()
            .and_then(|it| it.parse().ok());
        let other = self.ports.iter().find(|(told, _)| Some(*told) == port);
        if let Some((_, other)) = other {
            digits.copy_from_slice(format!("{other:05}").as_bytes());
        }
    }
}
