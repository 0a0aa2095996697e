//! Opens the sockets of connections. The client library opens its own, and those cannot move to another runtime.

use std::io;
use std::net::{IpAddr, SocketAddr};
#[cfg(unix)]
use std::path::PathBuf;

use rand::seq::SliceRandom;
use socket2::{SockRef, TcpKeepalive};
#[cfg(unix)]
use tokio::net::UnixStream;
use tokio::net::{TcpStream, lookup_host};
use tokio_postgres::Config;
use tokio_postgres::config::Host;
use tokio_util::either::Either;

use crate::roaming::stream::Roaming;

/// A socket of either kind.
#[cfg(unix)]
pub(super) type Socket = Either<Roaming<TcpStream>, Roaming<UnixStream>>;
#[cfg(not(unix))]
pub(super) type Socket = Either<Roaming<TcpStream>, Roaming<TcpStream>>;

/// One of the hosts that a url names.
#[derive(Clone, Debug)]
pub(super) struct Site {
    pub(super) host: Option<Host>,
    /// If it is there, the name is not looked up.
    pub(super) address: Option<IpAddr>,
    pub(super) port: u16,
}

/// One of the addresses where a host may listen.
pub(super) enum Destination {
    Tcp(SocketAddr),
    #[cfg(unix)]
    Unix(PathBuf),
}

impl Site {
    #[cfg(feature = "tls-rustls")]
    pub(super) fn is_socket(&self) -> bool {
        self.address.is_none() && !matches!(self.host, Some(Host::Tcp(_)))
    }

    /// Whether what is sent there does not leave this machine, as far as the name tells.
    #[cfg(feature = "tls-rustls")]
    pub(super) fn is_local(&self) -> bool {
        match (&self.host, self.address) {
            (_, Some(address)) => address.is_loopback(),
            (Some(Host::Tcp(name)), _) => {
                let address = name.parse::<IpAddr>();
                name == "localhost" || address.is_ok_and(|address| address.is_loopback())
            }
            _ => true,
        }
    }

    /// The name that its certificate has.
    #[cfg(feature = "tls-rustls")]
    pub(super) fn name(&self) -> String {
        match (&self.host, self.address) {
            (Some(Host::Tcp(name)), _) => name.clone(),
            (_, Some(address)) => address.to_string(),
            _ => String::new(),
        }
    }

    /// Where it may listen.
    pub(super) async fn destinations(&self, shuffled: bool) -> io::Result<Vec<Destination>> {
        if let Some(address) = self.address {
            return Ok(vec![Destination::Tcp(SocketAddr::new(address, self.port))]);
        }
        let mut found: Vec<_> = match &self.host {
            Some(Host::Tcp(name)) => lookup_host((name.clone(), self.port))
                .await?
                .map(Destination::Tcp)
                .collect(),
            #[cfg(unix)]
            Some(Host::Unix(folder)) => {
                let socket = folder.join(format!(".s.PGSQL.{}", self.port));
                vec![Destination::Unix(socket)]
            }
            None => Vec::new(),
        };
        if shuffled {
            found.shuffle(&mut rand::rng());
        }
        match found.is_empty() {
            true => Err(io::Error::other("could not resolve any addresses")),
            false => Ok(found),
        }
    }
}

impl Destination {
    /// Whether what is sent there does not leave this machine.
    pub(super) fn is_local(&self) -> bool {
        match self {
            Self::Tcp(address) => address.ip().is_loopback(),
            #[cfg(unix)]
            Self::Unix(_) => true,
        }
    }

    #[cfg(feature = "tls-rustls")]
    pub(super) fn is_socket(&self) -> bool {
        !matches!(self, Self::Tcp(_))
    }

    /// `config`: how the server is probed.
    pub(super) async fn connect(&self, config: &Config) -> io::Result<Socket> {
        Ok(match self {
            Self::Tcp(address) => {
                let stream = TcpStream::connect(address).await?;
                settle(&stream, config)?;
                Either::Left(Roaming::new(stream))
            }
            #[cfg(unix)]
            Self::Unix(path) => Either::Right(Roaming::new(UnixStream::connect(path).await?)),
        })
    }
}

fn settle(stream: &TcpStream, config: &Config) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let socket = SockRef::from(stream);
    #[cfg(target_os = "linux")]
    if let Some(within) = config.get_tcp_user_timeout() {
        socket.set_tcp_user_timeout(Some(*within))?;
    }
    if !config.get_keepalives() {
        return Ok(());
    }
    let mut keepalive = TcpKeepalive::new();
    let idle = config.get_keepalives_idle();
    if !idle.is_zero() {
        keepalive = keepalive.with_time(idle);
    }
    if let Some(interval) = config.get_keepalives_interval() {
        keepalive = keepalive.with_interval(interval);
    }
    #[cfg(not(windows))]
    if let Some(count) = config.get_keepalives_retries() {
        keepalive = keepalive.with_retries(count);
    }
    socket.set_tcp_keepalive(&keepalive)
}
