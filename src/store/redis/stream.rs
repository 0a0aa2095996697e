//! A connection's stream, and how it is opened.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
#[cfg(feature = "tls-rustls")]
use std::sync::Arc;

use futures::FutureExt;
use futures::future::select_ok;
use redis::ErrorKind::InvalidClientConfig;
use redis::io::tcp::TcpSettings;
use redis::io::tcp::socket2::SockRef;
use redis::{ConnectionAddr, ConnectionInfo, RedisResult};
use tokio::io::{AsyncRead, AsyncWrite};
#[cfg(unix)]
use tokio::net::UnixStream;
use tokio::net::{TcpStream, lookup_host};

use crate::roaming::stream::Roaming;
use crate::store::attempts::{SetUp, SetUps};
#[cfg(feature = "tls-rustls")]
use crate::store::tls::Tls;

/// The bytes of a connection, over TLS or not.
pub(super) trait Stream: AsyncRead + AsyncWrite + Send {}

impl<S: AsyncRead + AsyncWrite + Send> Stream for S {}

/// How a stream is opened.
#[derive(Clone)]
pub(super) enum Opener {
    Plain,
    /// Not at all, for this reason.
    Unusable(&'static str),
    #[cfg(feature = "tls-rustls")]
    Tls(Arc<Tls>),
}

impl Opener {
    /// Connects at this address, or to any of those that the host has. What follows is one of `set_ups`.
    pub(super) async fn open(
        &self,
        info: &ConnectionInfo,
        at: Option<SocketAddr>,
        set_ups: Option<&SetUps>,
    ) -> RedisResult<(Pin<Box<dyn Stream>>, Option<SetUp>)> {
        let begin = async || match set_ups {
            Some(set_ups) => Some(set_ups.begin().await),
            None => None,
        };
        let mut set_up = None;
        let stream: Pin<Box<dyn Stream>> = match (self, info.addr()) {
            (Self::Unusable(reason), _) => return Err((InvalidClientConfig, *reason).into()),
            #[cfg(feature = "tls-rustls")]
            (Self::Tls(tls), ConnectionAddr::TcpTls { host, port, .. }) => {
                let stream = connect_tcp(host, *port, at, info.tcp_settings()).await?;
                let name = tls.name_of(host).ok_or((
                    InvalidClientConfig,
                    "the host name cannot be in a certificate",
                ))?;
                set_up = begin().await;
                Box::pin(tls.connector().await?.connect(name, stream).await?)
            }
            (_, ConnectionAddr::Tcp(host, port)) => {
                let stream = connect_tcp(host, *port, at, info.tcp_settings()).await?;
                set_up = begin().await;
                Box::pin(stream)
            }
            #[cfg(unix)]
            (_, ConnectionAddr::Unix(path)) => {
                Box::pin(Roaming::new(UnixStream::connect(path).await?))
            }
            _ => return Err((InvalidClientConfig, "unsupported kind of address").into()),
        };
        Ok((stream, set_up))
    }
}

/// Connects to all addresses of a host at once, and takes the first that answers.
async fn connect_tcp(
    host: &str,
    port: u16,
    at: Option<SocketAddr>,
    settings: &TcpSettings,
) -> io::Result<Roaming<TcpStream>> {
    let addresses = match at {
        Some(address) => vec![address],
        None => lookup_host((host, port)).await?.collect(),
    };
    let attempts = addresses.into_iter();
    let attempts: Vec<_> = attempts
        .map(|address| TcpStream::connect(address).boxed())
        .collect();
    if attempts.is_empty() {
        return Err(io::Error::new(
            io::ErrorKind::NotFound,
            "the host has no address",
        ));
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
    Ok(Roaming::new(stream))
}
