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

use super::bounded::Bounded;

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
pub(super) enum Pump {
    /// The client's own task does it.
    Elsewhere,
    Here(BoxFuture<'static, ()>),
    /// The connection has ended.
    Ended,
}

impl Pump {
    /// The connection's bytes are moved by a task of the client's.
    pub(super) fn elsewhere() -> Self {
        Self::Elsewhere
    }

    /// Whether only [`Self::poll`] brings what comes on the connection.
    pub(super) fn is_here(&self) -> bool {
        !matches!(self, Self::Elsewhere)
    }

    /// Moves what can be moved now. Ready, from then on: the connection has ended, and whoever waited
    /// for something on it can see so.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        match self {
            Self::Elsewhere => return Poll::Pending,
            Self::Here(driver) => std::task::ready!(driver.poll_unpin(cx)),
            Self::Ended => {}
        }
        *self = Self::Ended;
        Poll::Ready(())
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
    let stream = Bounded::new(stream);
    let (connection, driver) =
        MultiplexedConnection::new_with_config(settings, stream, config).await?;
    let pump = Pump::Here(driver.boxed());
    Ok(Socket { connection, pump })
}

#[cfg(test)]
mod tests {
    use redis::{IntoConnectionInfo, RedisConnectionInfo, Value};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    /// No push tells of it where there are none: a connection that ended with the last step of its
    /// setup would pass for one that stands.
    #[tokio::test]
    async fn an_end_that_came_with_an_answer_is_seen_later() {
        let (ours, mut servers) = tokio::io::duplex(1024);
        let settings = RedisConnectionInfo::default().set_skip_set_lib_name();
        let info = "redis://localhost".into_connection_info().unwrap();
        let info = info.set_redis_settings(settings);
        let config = AsyncConnectionConfig::new().set_response_timeout(None);
        let mut socket = over(ours, &info, config).await.unwrap();
        tokio::spawn(async move {
            let mut ping = [0; b"*1\r\n$4\r\nPING\r\n".len()];
            servers.read_exact(&mut ping).await.unwrap();
            servers.write_all(b"+PONG\r\n").await.unwrap();
        });
        let ping = redis::cmd("PING");
        let asking = socket.connection.send_packed_command(&ping);
        let answer = socket.pump.run(asking).await.unwrap();
        assert_eq!(answer, Value::SimpleString("PONG".into()));
        let within = Duration::from_secs(5);
        let ended = poll_fn(|cx| socket.pump.poll(cx));
        tokio::time::timeout(within, ended).await.expect("it ended");
    }
}
