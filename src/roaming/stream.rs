//! A socket that moves to the runtime where it is polled.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
#[cfg(unix)]
use tokio::net::UnixStream;

use super::Spot;

/// A socket of tokio's.
pub(crate) trait Socket: AsyncRead + AsyncWrite + Unpin + Sized {
    /// The same socket, on the present runtime.
    fn register_here(self) -> io::Result<Self>;
}

impl Socket for TcpStream {
    fn register_here(self) -> io::Result<Self> {
        Self::from_std(self.into_std()?)
    }
}

#[cfg(unix)]
impl Socket for UnixStream {
    fn register_here(self) -> io::Result<Self> {
        Self::from_std(self.into_std()?)
    }
}

#[derive(Debug)]
pub(crate) struct Roaming<S> {
    /// `None` if it could not move.
    socket: Option<S>,
    spot: Spot,
}

impl<S: Socket> Roaming<S> {
    /// Its connection may have been begun elsewhere, so it moves when it is polled first.
    pub(crate) fn new(socket: S) -> Self {
        Self {
            socket: Some(socket),
            spot: Spot::unknown(),
        }
    }

    fn here(&mut self) -> io::Result<Pin<&mut S>> {
        if self.spot.has_moved() {
            self.socket = self.socket.take().map(S::register_here).transpose()?;
        }
        let gone = || io::Error::other("the socket could not be moved to another runtime");
        self.socket.as_mut().map(Pin::new).ok_or_else(gone)
    }
}

impl<S: Socket> AsyncRead for Roaming<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.get_mut().here()?.poll_read(cx, buf)
    }
}

impl<S: Socket> AsyncWrite for Roaming<S> {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.get_mut().here()?.poll_write(cx, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.get_mut().here()?.poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.get_mut().here()?.poll_shutdown(cx)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.get_mut().here()?.poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.socket.as_ref().is_some_and(S::is_write_vectored)
    }
}
