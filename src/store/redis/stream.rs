//! A connection's stream: how it is opened, and how long a message on it may be.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures::FutureExt;
use futures::future::{BoxFuture, select_ok};
use redis::ErrorKind::InvalidClientConfig;
use redis::aio::{AsyncPushSender, AsyncStream, MultiplexedConnection};
use redis::io::tcp::TcpSettings;
use redis::io::tcp::socket2::SockRef;
use redis::{
    AsyncConnectionConfig, Cmd, ConnectionAddr, ConnectionInfo, Pipeline, ProtocolVersion,
    PushInfo, RedisResult, Value,
};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
#[cfg(unix)]
use tokio::net::UnixStream;
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::credentials::Newer;
use super::fault::Fault;
#[cfg(feature = "tls-rustls")]
use crate::store::tls::{Tls, server_name};

/// How many requests the client library takes before their senders wait. The send window of a session is far smaller,
/// so that never happens.
const QUEUE: usize = 1024;

/// The longest message in bytes: far more than any reply to a session.
const LONGEST_MESSAGE: usize = 16 << 20;

/// Who opens the stream.
#[derive(Clone)]
pub(super) enum Opener {
    /// This module.
    Plain,
    /// This module, over TLS.
    #[cfg(feature = "tls-rustls")]
    Tls(Arc<Tls>),
    /// The client library: it has certificates that cannot be read from a client.
    #[cfg(feature = "redis-1")]
    Client,
}

/// A connection, and the task that moves its bytes. Dropping it closes the connection; unwritten bytes are lost.
pub(super) struct Link {
    pub(super) connection: MultiplexedConnection,
    /// Never ends if the client library opened the stream, which then moves the bytes itself.
    driver: JoinSet<()>,
    /// Authenticates anew with new credentials.
    authenticator: JoinSet<()>,
}

impl Link {
    /// Connects to any of the addresses that a host has.
    pub(super) async fn open(
        info: &ConnectionInfo,
        opener: &Opener,
        within: Duration,
        pushes: impl AsyncPushSender,
    ) -> RedisResult<Self> {
        let received = Received::default();
        let mut config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(within))
            // A session detects silence itself.
            .set_response_timeout(None)
            .set_pipeline_buffer_size(QUEUE);
        if info.redis_settings().protocol() == ProtocolVersion::RESP3 {
            let received = received.clone();
            config = config.set_push_sender(move |push: PushInfo| {
                received.store(0, Ordering::Relaxed);
                pushes.send(push)
            });
        }
        let config = async {
            let stream: Pin<Box<dyn AsyncStream + Send>> = match (opener, info.addr()) {
                #[cfg(feature = "redis-1")]
                (Opener::Client, _) => {
                    let client = redis::Client::open(info.clone())?;
                    let connecting = client.get_multiplexed_async_connection_with_config(&config);
                    return Ok(Self::new(
                        connecting.await?,
                        futures::future::pending().boxed(),
                    ));
                }
                #[cfg(feature = "tls-rustls")]
                (Opener::Tls(tls), ConnectionAddr::TcpTls { host, port, .. }) => {
                    let stream = connect_tcp(host, *port, info.tcp_settings()).await?;
                    let name = server_name(host).ok_or((
                        InvalidClientConfig,
                        "the host name cannot be in a certificate",
                    ))?;
                    Box::pin(tls.connector().await?.connect(name, stream).await?)
                }
                (_, ConnectionAddr::Tcp(host, port)) => {
                    Box::pin(connect_tcp(host, *port, info.tcp_settings()).await?)
                }
                #[cfg(unix)]
                (_, ConnectionAddr::Unix(path)) => Box::pin(UnixStream::connect(path).await?),
                _ => return Err((InvalidClientConfig, "unsupported kind of address").into()),
            };
            Self::over(Limited { stream, received }, info, config).await
        };
        let began = std::time::Instant::now();
        timeout(within, config).await.unwrap_or_else(|_| {
            let reason = match began.elapsed() < within / 2 {
                true => "timed out: tokio's clock is paused",
                false => "timed out",
            };
            Err(io::Error::new(io::ErrorKind::TimedOut, reason).into())
        })
    }

    async fn over(
        stream: Limited,
        info: &ConnectionInfo,
        config: AsyncConnectionConfig,
    ) -> RedisResult<Self> {
        let (connection, driver) =
            MultiplexedConnection::new_with_config(info.redis_settings(), stream, config).await?;
        Ok(Self::new(connection, driver.boxed()))
    }

    fn new(connection: MultiplexedConnection, driver: BoxFuture<'static, ()>) -> Self {
        Self {
            connection,
            driver: JoinSet::from_iter([driver]),
            authenticator: JoinSet::new(),
        }
    }

    /// Authenticates anew whenever there are new credentials.
    pub(super) fn follow(&mut self, newer: Newer, address: &Arc<str>) {
        let authenticating = newer.authenticate(self.connection.clone(), address.clone());
        self.authenticator.spawn(authenticating);
    }

    /// Resolves when the connection has ended. All that it received is available then, and pending calls fail.
    pub(super) async fn ended(&mut self) {
        self.driver.join_next().await;
    }

    /// Sends one command, and waits for its reply for `within` at most.
    pub(super) async fn ask(
        &mut self,
        command: &Cmd,
        address: &Arc<str>,
        within: Duration,
    ) -> Result<Value, Fault> {
        ask(&mut self.connection, command, address, within).await
    }

    /// The same for several commands in one write. Errors are among the replies.
    pub(super) async fn ask_all(
        &mut self,
        commands: &Pipeline,
        address: &Arc<str>,
        within: Duration,
    ) -> Result<Vec<Value>, Fault> {
        let connection = &mut self.connection;
        let asking = connection.send_packed_commands(commands, 0, commands.len());
        in_time(asking, address, within).await
    }
}

/// Sends one command, and waits for its reply for `within` at most.
pub(super) async fn ask(
    connection: &mut MultiplexedConnection,
    command: &Cmd,
    address: &Arc<str>,
    within: Duration,
) -> Result<Value, Fault> {
    let asking = connection.send_packed_command(command);
    match in_time(asking, address, within).await? {
        Value::ServerError(error) => {
            let (address, refusal) = (address.clone(), (&error).into());
            Err(Fault::Refused { address, refusal })
        }
        answer => Ok(answer),
    }
}

async fn in_time<T>(
    asking: impl Future<Output = RedisResult<T>>,
    address: &Arc<str>,
    within: Duration,
) -> Result<T, Fault> {
    let address = address.clone();
    match timeout(within, asking).await {
        Ok(reply) => reply.map_err(|source| Fault::Broken { address, source }),
        Err(_) => Err(Fault::Silent { address, within }),
    }
}

/// Connects to all addresses of a host at once, and takes the first that answers.
async fn connect_tcp(host: &str, port: u16, settings: &TcpSettings) -> RedisResult<TcpStream> {
    let addresses = tokio::net::lookup_host((host, port)).await?;
    let attempts: Vec<_> = addresses
        .map(|address| TcpStream::connect(address).boxed())
        .collect();
    if attempts.is_empty() {
        return Err((InvalidClientConfig, "the host has no address").into());
    }
    let (stream, _) = select_ok(attempts).await?;
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

/// How many bytes have come since a message began.
///
/// The client library buffers a message until its end. The stream does not show where the last message ended, so the
/// count starts again at each push and at each write. A reply follows a write, and a session notices a missing reply
/// itself.
type Received = Arc<AtomicUsize>;

/// A stream that fails when a message on it is too long.
struct Limited {
    stream: Pin<Box<dyn AsyncStream + Send>>,
    received: Received,
}

impl AsyncRead for Limited {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        ready!(self.stream.as_mut().poll_read(cx, buffer))?;
        let read = buffer.filled().len() - before;
        if self.received.fetch_add(read, Ordering::Relaxed) + read > LONGEST_MESSAGE {
            let reason = "the server sent a message of more than 16 MiB";
            return Poll::Ready(Err(io::Error::new(io::ErrorKind::InvalidData, reason)));
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Limited {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.received.store(0, Ordering::Relaxed);
        self.stream.as_mut().poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream.as_mut().poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream.as_mut().poll_shutdown(cx)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use redis::{IntoConnectionInfo, RedisConnectionInfo};
    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};

    use super::*;

    const BOUND: Duration = Duration::from_secs(5);

    /// A link, and the server's end of it.
    pub(in super::super) async fn pair() -> (Link, DuplexStream) {
        let (ours, theirs) = tokio::io::duplex(1024);
        let settings = RedisConnectionInfo::default().set_skip_set_lib_name();
        let info = "redis://localhost".into_connection_info().unwrap();
        let info = info.set_redis_settings(settings);
        let config = AsyncConnectionConfig::new().set_response_timeout(None);
        let config = Link::over(limited(ours), &info, config);
        (config.await.unwrap(), theirs)
    }

    fn limited(stream: DuplexStream) -> Limited {
        let (stream, received) = (Box::pin(stream), Received::default());
        Limited { stream, received }
    }

    async fn hear_ping(server: &mut DuplexStream) {
        let mut ping = [0; b"*1\r\n$4\r\nPING\r\n".len()];
        server.read_exact(&mut ping).await.unwrap();
    }

    /// No push tells of it where there are none: a connection that ended with the last step of its
    /// setup would pass for one that stands.
    #[tokio::test]
    async fn an_end_that_came_with_an_answer_is_seen_later() {
        let (mut link, mut server) = pair().await;
        tokio::spawn(async move {
            hear_ping(&mut server).await;
            server.write_all(b"+PONG\r\n").await.unwrap();
        });
        let address = Arc::from("a:1");
        let answer = link.ask(&redis::cmd("PING"), &address, BOUND).await;
        assert_eq!(answer.unwrap(), Value::SimpleString("PONG".into()));
        for _ in 0..2 {
            let ended = tokio::time::timeout(BOUND, link.ended());
            ended.await.expect("it ended, and still has");
        }
    }

    #[tokio::test]
    async fn a_question_errs_when_the_connection_ends_or_nothing_comes() {
        let (mut link, mut server) = pair().await;
        let address = Arc::from("a:1");
        let ping = redis::cmd("PING");
        let silent = link.ask(&ping, &address, Duration::from_millis(1)).await;
        assert!(matches!(silent, Err(Fault::Silent { .. })), "{silent:?}");
        tokio::spawn(async move { hear_ping(&mut server).await });
        for _ in 0..2 {
            let asking = link.ask(&ping, &address, BOUND * 2);
            let broken = tokio::time::timeout(BOUND, asking).await.expect("it errs");
            assert!(matches!(broken, Err(Fault::Broken { .. })), "{broken:?}");
        }
    }

    /// How many bytes come until the stream errs; after every mebibyte something is done.
    async fn readable(until: usize, mut then: impl AsyncFnMut(&mut Limited)) -> usize {
        const PIECE: usize = 1 << 20;
        let (stream, theirs) = tokio::io::duplex(PIECE);
        let mut ours = limited(stream);
        let speaking = tokio::spawn(async move {
            let (mut hearing, mut speaking) = tokio::io::split(theirs);
            let mut heard = vec![0; PIECE];
            let drain = async { while hearing.read(&mut heard).await.is_ok_and(|n| n > 0) {} };
            let piece = vec![b'x'; PIECE];
            let speak = async { while speaking.write_all(&piece).await.is_ok() {} };
            tokio::join!(drain, speak)
        });
        let (mut all, mut piece) = (0, vec![0; PIECE]);
        while all < until {
            match ours.read_exact(&mut piece).await {
                Ok(read) => all += read,
                Err(error) => {
                    assert_eq!(error.kind(), io::ErrorKind::InvalidData);
                    break;
                }
            }
            then(&mut ours).await;
        }
        drop(ours);
        speaking.await.unwrap();
        all
    }

    #[tokio::test]
    async fn a_message_has_a_limit_and_many_of_them_have_none() {
        let one = readable(4 * LONGEST_MESSAGE, async |_| {}).await;
        assert_eq!(one, LONGEST_MESSAGE);
        let replies = async |ours: &mut Limited| ours.write_all(b"x").await.unwrap();
        let replies = readable(4 * LONGEST_MESSAGE, replies).await;
        assert_eq!(replies, 4 * LONGEST_MESSAGE);
        let pushes = async |ours: &mut Limited| ours.received.store(0, Ordering::Relaxed);
        let pushes = readable(4 * LONGEST_MESSAGE, pushes).await;
        assert_eq!(pushes, 4 * LONGEST_MESSAGE);
    }
}
