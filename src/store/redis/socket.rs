//! A connection whose bytes are moved by whoever waits for something on it.

use std::future::{Future, poll_fn};
use std::io;
use std::pin::pin;
use std::task::{Context, Poll};
use std::time::Duration;

use futures::FutureExt;
use futures::future::{BoxFuture, select_ok};
use redis::aio::MultiplexedConnection;
use redis::{
    AsyncConnectionConfig, ConnectionAddr, ConnectionInfo, ErrorKind, RedisError, RedisResult,
};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
#[cfg(unix)]
use tokio::net::UnixStream;

/// The client's connection, and what moves its bytes.
pub(super) struct Socket {
    pub(super) connection: MultiplexedConnection,
    pub(super) pump: Pump,
}

/// Moves a connection's bytes while it is polled. Dropped, the socket is closed at once, and what
/// was not written is dropped with it.
///
/// The client would have a task of its own for this. Then each call would wake that task, and each
/// reply ours: two more switches of tasks, and often of threads, in the way of every lock.
pub(super) struct Pump {
    /// `None`: the client's own task does it, or the connection has ended.
    driver: Option<BoxFuture<'static, ()>>,
}

impl Pump {
    /// The connection's bytes are moved by a task of the client's.
    pub(super) fn elsewhere() -> Self {
        Self { driver: None }
    }

    /// Moves what can be moved now. Ready, once: the connection has ended, and whoever waited for
    /// something on it can see so.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Some(driver) = &mut self.driver else {
            return Poll::Pending;
        };
        let moved = driver.poll_unpin(cx);
        if moved.is_ready() {
            self.driver = None;
        }
        moved
    }

    /// Moves bytes until something on the connection is done.
    pub(super) async fn run<T>(&mut self, step: impl Future<Output = T>) -> T {
        let mut step = pin!(step);
        poll_fn(|cx| {
            // First what is to be sent, then the sending, then what came of it.
            if let Poll::Ready(done) = step.as_mut().poll(cx) {
                return Poll::Ready(done);
            }
            let _ = self.poll(cx);
            step.as_mut().poll(cx)
        })
        .await
    }
}

/// Connects as the client would. Not for TLS, which the client alone can set up.
pub(super) async fn open(
    info: &ConnectionInfo,
    within: Duration,
    config: AsyncConnectionConfig,
) -> RedisResult<Socket> {
    let opening = async {
        match info.addr() {
            ConnectionAddr::Tcp(host, port) => {
                let addresses: Vec<_> = tokio::net::lookup_host((&**host, *port)).await?.collect();
                if addresses.is_empty() {
                    let kind = ErrorKind::InvalidClientConfig;
                    return Err(RedisError::from((kind, "No address found for host")));
                }
                // All at once: the first that answers is taken.
                let connecting = addresses
                    .into_iter()
                    .map(|address| TcpStream::connect(address).boxed());
                let (stream, _) = select_ok(connecting).await?;
                stream.set_nodelay(info.tcp_settings().nodelay())?;
                over(stream, info, config).await
            }
            #[cfg(unix)]
            ConnectionAddr::Unix(path) => {
                over(UnixStream::connect(path).await?, info, config).await
            }
            _ => {
                let kind = ErrorKind::InvalidClientConfig;
                Err(RedisError::from((kind, "No socket of ours goes there")))
            }
        }
    };
    tokio::time::timeout(within, opening)
        .await
        .unwrap_or_else(|_| Err(io::Error::from(io::ErrorKind::TimedOut).into()))
}

async fn over(
    stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
    info: &ConnectionInfo,
    config: AsyncConnectionConfig,
) -> RedisResult<Socket> {
    let settings = info.redis_settings();
    let (connection, driver) =
        MultiplexedConnection::new_with_config(settings, stream, config).await?;
    let driver = Some(driver.boxed());
    Ok(Socket {
        connection,
        pump: Pump { driver },
    })
}
