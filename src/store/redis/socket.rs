//! A connection whose bytes are moved by whoever waits for something on it.

use std::future::{Future, poll_fn};
use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::task::{Context, Poll};
use std::time::Duration;

use futures::FutureExt;
use futures::future::{BoxFuture, select_ok};
use redis::aio::MultiplexedConnection;
use redis::io::tcp::TcpSettings;
use redis::io::tcp::socket2::SockRef;
use redis::{
    AsyncConnectionConfig, ConnectionAddr, ConnectionInfo, ErrorKind, RedisError, RedisResult,
};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
#[cfg(unix)]
use tokio::net::UnixStream;

use super::bounded::{Bounded, Untaken};
use super::endpoint::Opener;

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
    #[cfg(feature = "redis-1")]
    Elsewhere,
    Here {
        driver: BoxFuture<'static, ()>,
        untaken: Untaken,
    },
    /// The connection has ended.
    Ended,
}

impl Pump {
    /// The connection's bytes are moved by a task of the client's.
    #[cfg(feature = "redis-1")]
    pub(super) fn elsewhere() -> Self {
        Self::Elsewhere
    }

    /// Whether only [`Self::poll`] brings what comes on the connection.
    pub(super) fn is_here(&self) -> bool {
        match self {
            #[cfg(feature = "redis-1")]
            Self::Elsewhere => false,
            Self::Here { .. } | Self::Ended => true,
        }
    }

    /// Moves what can be moved now. Ready, from then on: the connection has ended, and whoever waited
    /// for something on it can see so.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        match self {
            #[cfg(feature = "redis-1")]
            Self::Elsewhere => return Poll::Pending,
            Self::Here { driver, .. } => std::task::ready!(driver.poll_unpin(cx)),
            Self::Ended => {}
        }
        *self = Self::Ended;
        Poll::Ready(())
    }

    /// What the server has said so far is kept no more, but for a message whose end is still to come.
    pub(super) fn taken(&self) {
        if let Self::Here { untaken, .. } = self {
            untaken.clear();
        }
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

/// Connects as the client would.
pub(super) async fn open(
    info: &ConnectionInfo,
    opener: &Opener,
    within: Duration,
    config: AsyncConnectionConfig,
) -> RedisResult<Socket> {
    let opening = async {
        match (info.addr(), opener) {
            (ConnectionAddr::Tcp(host, port), Opener::Us) => {
                let connecting = |address| connect(address, info.tcp_settings());
                let stream = first_of(host, *port, connecting).await?;
                over(stream, info, config).await
            }
            #[cfg(feature = "tls-rustls")]
            (ConnectionAddr::TcpTls { host, port, .. }, Opener::UsOverTls(tls)) => {
                let tls = tls.connector().await?;
                let connecting = async |address| {
                    let stream = connect(address, info.tcp_settings()).await?;
                    tls.connect(host, stream).await
                };
                let stream = first_of(host, *port, connecting).await?;
                over(stream, info, config).await
            }
            #[cfg(unix)]
            (ConnectionAddr::Unix(path), Opener::Us) => {
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

/// Connects to all addresses of a host at once: the first that answers is taken.
async fn first_of<S, F>(
    host: &str,
    port: u16,
    connecting: impl Fn(SocketAddr) -> F,
) -> RedisResult<S>
where
    F: Future<Output = RedisResult<S>>,
{
    let addresses = tokio::net::lookup_host((host, port)).await?;
    let connecting: Vec<_> = addresses
        .map(|address| Box::pin(connecting(address)))
        .collect();
    if connecting.is_empty() {
        let kind = ErrorKind::InvalidClientConfig;
        return Err(RedisError::from((kind, "No address found for host")));
    }
    let (stream, _) = select_ok(connecting).await?;
    Ok(stream)
}

async fn connect(address: SocketAddr, settings: &TcpSettings) -> RedisResult<TcpStream> {
    let stream = TcpStream::connect(address).await?;
    stream.set_nodelay(settings.nodelay())?;
    let socket = SockRef::from(&stream);
    if let Some(keepalive) = settings.keepalive() {
        socket.set_tcp_keepalive(keepalive)?;
    }
    #[cfg(any(target_os = "android", target_os = "fuchsia", target_os = "linux"))]
    if let Some(timeout) = settings.user_timeout() {
        socket.set_tcp_user_timeout(Some(timeout))?;
    }
    Ok(stream)
}

async fn over(
    stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
    info: &ConnectionInfo,
    config: AsyncConnectionConfig,
) -> RedisResult<Socket> {
    let settings = info.redis_settings();
    let untaken = Untaken::default();
    let stream = Bounded::new(stream, untaken.clone());
    let (connection, driver) =
        MultiplexedConnection::new_with_config(settings, stream, config).await?;
    let driver = driver.boxed();
    let pump = Pump::Here { driver, untaken };
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
