//! Opens the sockets of connections. The client library opens its own, and those cannot move to another runtime.

use std::io;
use std::net::SocketAddr;
#[cfg(unix)]
use std::path::PathBuf;

use rand::seq::SliceRandom;
use socket2::{SockRef, TcpKeepalive};
#[cfg(unix)]
use tokio::net::UnixStream;
use tokio::net::{TcpStream, lookup_host};
use tokio_postgres::Config;
use tokio_postgres::config::{Host, LoadBalanceHosts};
use tokio_util::either::Either;

use crate::roaming::stream::Roaming;
use crate::roaming::time::timeout;

/// A socket of either kind.
#[cfg(unix)]
pub(super) type Socket = Either<Roaming<TcpStream>, Roaming<UnixStream>>;
#[cfg(not(unix))]
pub(super) type Socket = Either<Roaming<TcpStream>, Roaming<TcpStream>>;

/// One of the addresses where a host may listen.
pub(super) enum Destination {
    Tcp(SocketAddr),
    #[cfg(unix)]
    Unix(PathBuf),
}

/// The addresses of the one host that is configured. If it has an address and a name, the name is not looked up.
pub(super) async fn destinations(host: &Config) -> io::Result<Vec<Destination>> {
    let port = host.get_ports().first().copied().unwrap_or(5432);
    if let Some(address) = host.get_hostaddrs().first() {
        return Ok(vec![Destination::Tcp(SocketAddr::new(*address, port))]);
    }
    let mut destinations: Vec<_> = match host.get_hosts().first() {
        Some(Host::Tcp(name)) => lookup_host((name.clone(), port))
            .await?
            .map(Destination::Tcp)
            .collect(),
        #[cfg(unix)]
        Some(Host::Unix(folder)) => {
            vec![Destination::Unix(folder.join(format!(".s.PGSQL.{port}")))]
        }
        None => Vec::new(),
    };
    if host.get_load_balance_hosts() == LoadBalanceHosts::Random {
        destinations.shuffle(&mut rand::rng());
    }
    match destinations.is_empty() {
        true => Err(io::Error::other("could not resolve any addresses")),
        false => Ok(destinations),
    }
}

impl Destination {
    /// Connects with the time-outs that are configured.
    pub(super) async fn connect(self, host: &Config) -> io::Result<Socket> {
        let connecting = async {
            Ok(match self {
                Self::Tcp(address) => {
                    let stream = TcpStream::connect(address).await?;
                    settle(&stream, host)?;
                    Either::Left(Roaming::new(stream))
                }
                #[cfg(unix)]
                Self::Unix(path) => Either::Right(Roaming::new(UnixStream::connect(path).await?)),
            })
        };
        let late = |_| {
            Err(io::Error::new(
                io::ErrorKind::TimedOut,
                "connection timed out",
            ))
        };
        match host.get_connect_timeout() {
            Some(within) => timeout(*within, connecting).await.unwrap_or_else(late),
            None => connecting.await,
        }
    }
}

fn settle(stream: &TcpStream, host: &Config) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let socket = SockRef::from(stream);
    #[cfg(target_os = "linux")]
    if let Some(within) = host.get_tcp_user_timeout() {
        socket.set_tcp_user_timeout(Some(*within))?;
    }
    if !host.get_keepalives() {
        return Ok(());
    }
    let mut keepalive = TcpKeepalive::new().with_time(host.get_keepalives_idle());
    if let Some(interval) = host.get_keepalives_interval() {
        keepalive = keepalive.with_interval(interval);
    }
    #[cfg(not(windows))]
    if let Some(retries) = host.get_keepalives_retries() {
        keepalive = keepalive.with_retries(retries);
    }
    socket.set_tcp_keepalive(&keepalive)
}
