//! One connection through a proxy: two sockets, and what could not be written to them yet.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::fd::OwnedFd;

/// The client's side of a link, and the server's.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Side {
    Client,
    Server,
}

impl Side {
    pub(super) fn other(self) -> Self {
        match self {
            Self::Client => Self::Server,
            Self::Server => Self::Client,
        }
    }
}

struct End {
    stream: TcpStream,
    /// Bytes that are due and that the socket had no room for.
    unsent: Vec<u8>,
}

pub(super) struct Link {
    ends: [End; 2],
}

impl Link {
    /// Both sockets become non-blocking, and `epoll` reports when they are readable.
    ///
    /// `tokens` are the epoll data of the client's side and the server's.
    pub(super) fn new(
        epoll: &OwnedFd,
        tokens: [u64; 2],
        client: TcpStream,
        server: TcpStream,
    ) -> io::Result<Self> {
        for (token, stream) in tokens.into_iter().zip([&client, &server]) {
            stream.set_nodelay(true)?;
            stream.set_nonblocking(true)?;
            epoll::add(epoll, stream, EventData::new_u64(token), EventFlags::IN)?;
        }
        let ends = [client, server].map(|stream| End {
            stream,
            unsent: Vec::new(),
        });
        Ok(Self { ends })
    }

    /// Reads once; `Ok(0)` is the end of that side.
    pub(super) fn read(&mut self, side: Side, buffer: &mut [u8]) -> io::Result<usize> {
        self.ends[side as usize].stream.read(buffer)
    }

    /// Stops reports about a side that has nothing more to read.
    pub(super) fn mute(&self, epoll: &OwnedFd, side: Side) -> io::Result<()> {
        Ok(epoll::delete(epoll, &self.ends[side as usize].stream)?)
    }

    /// Writes to a side, behind what it had no room for before.
    pub(super) fn write(
        &mut self,
        epoll: &OwnedFd,
        token: u64,
        side: Side,
        mut bytes: &[u8],
    ) -> io::Result<()> {
        let end = &mut self.ends[side as usize];
        if end.unsent.is_empty() {
            bytes = write_some(&mut end.stream, bytes)?;
            if bytes.is_empty() {
                return Ok(());
            }
            let both = EventFlags::IN | EventFlags::OUT;
            epoll::modify(epoll, &end.stream, EventData::new_u64(token), both)?;
        }
        end.unsent.extend_from_slice(bytes);
        Ok(())
    }

    /// Writes what a side had no room for.
    pub(super) fn flush(&mut self, epoll: &OwnedFd, token: u64, side: Side) -> io::Result<()> {
        let end = &mut self.ends[side as usize];
        let left = write_some(&mut end.stream, &end.unsent)?.len();
        end.unsent.drain(..end.unsent.len() - left);
        if left == 0 {
            let data = EventData::new_u64(token);
            epoll::modify(epoll, &end.stream, data, EventFlags::IN)?;
        }
        Ok(())
    }

    /// Ends both connections as a network that fails does.
    pub(super) fn reset(self) {
        for end in self.ends {
            reset(end.stream);
        }
    }
}

/// Closes with a reset, which leaves no socket waiting in the kernel.
pub(super) fn reset(stream: TcpStream) {
    // A socket that cannot linger is closed in the usual way.
    let _ = rustix::net::sockopt::set_socket_linger(&stream, Some(Duration::ZERO));
}

/// Gives the bytes that the socket has no room for.
fn write_some<'a>(stream: &mut TcpStream, mut bytes: &'a [u8]) -> io::Result<&'a [u8]> {
    while !bytes.is_empty() {
        match stream.write(bytes) {
            Ok(written) => bytes = &bytes[written..],
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(bytes)
}
