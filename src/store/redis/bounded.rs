//! No more is kept of what a server says than it has reason to say.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};

use pin_project::pin_project;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// So many bytes may have come that nobody has taken yet: far more than any reply, and than the grants of
/// one turn. The client keeps a message until its end has come, and one that nobody waits for may have none.
const MOST: usize = 16 << 20;

/// So many of them are forgiven for each byte of a command: no reply of ours is more than a dozen times as long. Were
/// all of them, a message without an end might be as many times that long as there are commands under way.
const FORGIVEN: usize = 64;

/// How much has come on a connection that nobody has taken yet, in bytes.
#[derive(Clone, Debug, Default)]
pub(super) struct Untaken(Arc<AtomicUsize>);

impl Untaken {
    /// What has come so far was taken, and is kept no more.
    pub(super) fn clear(&self) {
        self.0.store(0, Ordering::Relaxed);
    }

    fn bytes(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }

    // Whoever moves a connection's bytes also takes what came, so these are one after the other.
    fn add(&self, bytes: usize) {
        self.0.store(self.bytes() + bytes, Ordering::Relaxed);
    }

    fn forgive(&self, written: usize) {
        let left = self.bytes().saturating_sub(written * FORGIVEN);
        self.0.store(left, Ordering::Relaxed);
    }
}

/// A socket that ends when more comes than that.
#[pin_project]
pub(super) struct Bounded<S> {
    #[pin]
    socket: S,
    untaken: Untaken,
}

impl<S> Bounded<S> {
    pub(super) fn new(socket: S, untaken: Untaken) -> Self {
        Self { socket, untaken }
    }
}

impl<S: AsyncRead> AsyncRead for Bounded<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.project();
        if this.untaken.bytes() > MOST {
            let told = "the server says more than it was asked";
            return Poll::Ready(Err(io::Error::new(io::ErrorKind::InvalidData, told)));
        }
        let before = buffer.filled().len();
        ready!(this.socket.poll_read(cx, buffer))?;
        this.untaken.add(buffer.filled().len() - before);
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
        let written = ready!(this.socket.poll_write(cx, bytes))?;
        this.untaken.forgive(written);
        Poll::Ready(Ok(written))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.project();
        let written = ready!(this.socket.poll_write_vectored(cx, parts))?;
        this.untaken.forgive(written);
        Poll::Ready(Ok(written))
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
    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};

    use super::*;

    const PIECE: usize = 1 << 20;

    /// How many bytes can be read from it before it errs, when after every so many something is done.
    async fn readable(
        until: usize,
        each: usize,
        mut then: impl AsyncFnMut(&mut Bounded<DuplexStream>, &Untaken),
    ) -> usize {
        let (ours, theirs) = tokio::io::duplex(PIECE);
        let untaken = Untaken::default();
        let mut ours = Bounded::new(ours, untaken.clone());
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
                then(&mut ours, &untaken).await;
                since = 0;
            }
        }
        drop(ours);
        speaking.await.unwrap();
        all
    }

    #[tokio::test]
    async fn what_nobody_takes_ends_and_what_is_taken_or_asked_for_does_not() {
        let endless = readable(4 * MOST, usize::MAX, async |_, _| {}).await;
        assert!((MOST..MOST + 2 * PIECE).contains(&endless), "{endless}");
        let taken = async |_: &mut _, untaken: &Untaken| untaken.clear();
        let taken = readable(4 * MOST, MOST / 2, taken).await;
        assert!(taken >= 4 * MOST, "{taken}");
        let asked = async |ours: &mut Bounded<_>, _: &_| {
            ours.write_all(&[b'x'; 2 * PIECE / FORGIVEN]).await.unwrap();
        };
        let asked = readable(4 * MOST, PIECE, asked).await;
        assert!(asked >= 4 * MOST, "{asked}");
    }

    /// As a server may have it that has answered nothing yet.
    #[tokio::test]
    async fn a_word_now_and_then_does_not_make_it_long() {
        let word = async |ours: &mut Bounded<_>, _: &_| ours.write_all(&[b'x'; 100]).await.unwrap();
        let endless = readable(4 * MOST, MOST / 4, word).await;
        assert!((MOST..MOST + 2 * PIECE).contains(&endless), "{endless}");
    }
}
