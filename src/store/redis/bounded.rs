//! No more is read than a server has reason to say.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use pin_project::pin_project;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// So many bytes may come between two of our commands: a hundred thousand grants, and far more than
/// any reply. The client keeps a message until its end has come, and one that nobody waits for may
/// have none.
const MOST: usize = 64 << 20;

/// A socket that ends when more comes than that.
#[pin_project]
pub(super) struct Bounded<S> {
    #[pin]
    socket: S,
    /// Since the last that was written.
    read: usize,
}

impl<S> Bounded<S> {
    pub(super) fn new(socket: S) -> Self {
        Self { socket, read: 0 }
    }
}

impl<S: AsyncRead> AsyncRead for Bounded<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.project();
        if *this.read > MOST {
            let told = "the server says more than it was asked";
            return Poll::Ready(Err(io::Error::new(io::ErrorKind::InvalidData, told)));
        }
        let before = buffer.filled().len();
        ready!(this.socket.poll_read(cx, buffer))?;
        *this.read += buffer.filled().len() - before;
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite> AsyncWrite for Bounded<S> {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = self.project();
        *this.read = 0;
        this.socket.poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.project();
        *this.read = 0;
        this.socket.poll_write_vectored(cx, parts)
    }

    fn is_write_vectored(&self) -> bool {
        self.socket.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.project().socket.poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.project().socket.poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    const PIECE: usize = 1 << 20;

    /// How many bytes can be read from it before it errs, with a word written after every so many.
    async fn readable(each: usize, until: usize) -> io::Result<usize> {
        let (ours, theirs) = tokio::io::duplex(PIECE);
        let mut ours = Bounded::new(ours);
        let speaking = tokio::spawn(async move {
            let (mut hearing, mut speaking) = tokio::io::split(theirs);
            let mut heard = vec![0; PIECE];
            let drain = async { while hearing.read(&mut heard).await.is_ok_and(|n| n > 0) {} };
            let piece = vec![b'x'; PIECE];
            let speak = async { while speaking.write_all(&piece).await.is_ok() {} };
            tokio::join!(drain, speak)
        });
        let mut piece = vec![0; PIECE];
        let (mut all, mut since) = (0, 0);
        while all < until {
            let read = match ours.read(&mut piece).await {
                Ok(read) => read,
                Err(error) => {
                    assert_eq!(error.kind(), io::ErrorKind::InvalidData);
                    break;
                }
            };
            (all, since) = (all + read, since + read);
            if since >= each {
                ours.write_all(b"x").await?;
                since = 0;
            }
        }
        drop(ours);
        speaking.await?;
        Ok(all)
    }

    #[tokio::test]
    async fn what_nobody_asked_for_ends_and_what_was_asked_for_does_not() {
        let endless = readable(usize::MAX, 4 * MOST).await.unwrap();
        assert!((MOST..MOST + 2 * PIECE).contains(&endless), "{endless}");
        let asked = readable(MOST / 2, 4 * MOST).await.unwrap();
        assert!(asked >= 4 * MOST, "{asked}");
    }
}
